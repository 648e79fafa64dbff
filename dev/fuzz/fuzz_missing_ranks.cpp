// sources: llmc/parallel/missing_ranks.cpp llmc/base/common.cpp llmc/base/host.cpp
//
// fuzz_missing_ranks.cpp: reads any bytes as the files of two processes in /proc: environ, stat, the name of a thread,
// and the program, each up to a byte 255. Any user can set these. Every rank must be reported at most once, and a rank
// beyond the world size never.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "base/common.h"
#include "memory_directory.h"
#include "parallel/missing_ranks.h"

static void make_process(const std::string& process) {
    std::filesystem::create_directories(process + "/ns");
    std::filesystem::create_directories(process + "/task/1");
    std::filesystem::create_symlink("net:[1]", process + "/ns/net");
    std::filesystem::create_symlink("/opt/train_gpt2", process + "/exe");
}

static void write_process(const std::string& process, const std::string* parts) {
    const std::string exe = process + "/exe", program = parts[3].c_str();
    write_bytes(process + "/environ", parts[0]);
    write_bytes(process + "/stat", parts[1]);
    write_bytes(process + "/task/1/comm", parts[2]);
    unlink(exe.c_str());
    if (!program.empty() && symlink(program.c_str(), exe.c_str()) != 0) unlink(exe.c_str());  // too long
}

static size_t count(const std::string& text, const std::string& part) {
    size_t found = 0;
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) found++;
    return found;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const TemporaryDirectory& proc = memory_directory();
    static const bool made = [&] {
        for (const char* process : {"self", "11", "12"}) make_process(proc / process);
        return true;
    }();
    std::vector<std::string> parts(8);
    for (size_t i = 0, part = 0; i < size && part < parts.size(); i++)
        if (data[i] == 255)
            part++;
        else
            parts[part] += char(data[i]);
    write_process(proc / "11", &parts[0]);
    write_process(proc / "12", &parts[4]);
    Launch launch;
    launch.world_size = launch.local_world_size = 3;
    const MissingRanks ranks = find_missing_ranks(launch, "42", proc.path);
    const bool programs = !parts[3].empty() || !parts[7].empty();  // their names may look like ranks
    const size_t named = count(ranks.text, "rank 0 (") + count(ranks.text, "rank 1 (") + count(ranks.text, "rank 2 (");
    if (!made || ranks.text.empty() || (!programs && (named > 3 || count(ranks.text, "rank ") != named))) abort();
    return 0;
}
