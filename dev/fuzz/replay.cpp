// replay.cpp: main() of a fuzzer in an ordinary build, which needs no clang. Runs LLVMFuzzerTestOneInput on each file
// of the fuzzer's corpus, dev/fuzz/corpus/NAME for the program replay_NAME, in a process of its own: a crash, an error
// of a sanitizer or a hang is the failure of that file alone. Prints "PASS  FILE" or "FAIL  FILE: REASON" for each.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Runs in the child process. The heap copy has exactly the file's size, so that AddressSanitizer sees a read beyond it.
[[noreturn]] static void run_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    std::vector<uint8_t> input(bytes.begin(), bytes.end());
    input.shrink_to_fit();
    alarm(60);  // an input takes milliseconds; SIGALRM means that it hangs
    LLVMFuzzerTestOneInput(input.data(), input.size());
    exit(EXIT_SUCCESS);
}

int main(int, char** argv) {
    const std::string program = std::filesystem::path(argv[0]).filename().string();
    const std::string folder = "dev/fuzz/corpus/" + program.substr(strlen("replay_"));
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) files.insert(entry.path().string());
    int failed = files.empty();
    if (files.empty()) printf("FAIL  %s: has no file; dev/fuzz/make_corpus.sh makes the corpus\n", folder.c_str());
    for (const std::string& file : files) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) run_file(file);
        int status = -1;
        waitpid(child, &status, 0);
        failed += status != 0;
        if (status == 0)
            printf("PASS  %s\n", file.c_str());
        else
            printf("FAIL  %s: %s\n", file.c_str(),
                   WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit status not 0");
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
