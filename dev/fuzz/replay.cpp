// replay.cpp: main() of a fuzzer in an ordinary build, which needs no clang. Runs LLVMFuzzerTestOneInput on each file
// of the fuzzer's corpus, dev/fuzz/corpus/NAME for the program replay_NAME, in a process of its own: a crash, an error
// of a sanitizer or a hang is the failure of that file alone. Prints "PASS  FILE" or "FAIL  FILE: REASON" for each.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static constexpr unsigned SECONDS_PER_FILE = 60;  // an input takes milliseconds; more means that it hangs

static std::vector<std::string> files_in(const std::string& folder) {
    std::vector<std::string> files;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
        if (entry->is_regular_file()) files.push_back(entry->path().string());
    std::sort(files.begin(), files.end());
    return files;
}

// Runs in the child process. The heap copy has exactly the file's size, so that AddressSanitizer sees a read beyond it.
static int run_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    if (!in.good() && !in.eof()) return EXIT_FAILURE;
    std::vector<uint8_t> input(bytes.begin(), bytes.end());
    input.shrink_to_fit();
    alarm(SECONDS_PER_FILE);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    return EXIT_SUCCESS;
}

// The reason why the file failed; empty if it passed.
static std::string replay(const std::string& path) {
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) return "fork failed";
    if (child == 0) exit(run_file(path));
    int status = 0;
    if (waitpid(child, &status, 0) != child) return "waitpid failed";
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return "hangs";
    if (WIFSIGNALED(status)) return strsignal(WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? "" : "exit status " + std::to_string(WEXITSTATUS(status));
}

int main(int, char** argv) {
    const std::string program = std::filesystem::path(argv[0]).filename().string(), prefix = "replay_";
    const std::string name = program.starts_with(prefix) ? program.substr(prefix.size()) : program;
    const std::string folder = "dev/fuzz/corpus/" + name;
    const std::vector<std::string> files = files_in(folder);
    if (files.empty()) {
        printf("FAIL  %s: has no file; dev/fuzz/make_corpus.sh %s makes the corpus (docs/testing.md)\n", folder.c_str(),
               name.c_str());
        return EXIT_FAILURE;
    }
    int failed = 0;
    for (const std::string& file : files) {
        const std::string reason = replay(file);
        failed += !reason.empty();
        printf("%s  %s%s%s\n", reason.empty() ? "PASS" : "FAIL", file.c_str(), reason.empty() ? "" : ": ",
               reason.c_str());
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
