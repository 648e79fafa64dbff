#include "text/text_stream.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

namespace fs = std::filesystem;
extern char** environ;

static constexpr int64_t PEEKED = 64 << 10;  // bytes that peek reads at least

struct Unpacker {
    const char* suffix;
    std::vector<std::string> command;
    const char* package;  // has the program
};

static const Unpacker* unpacker_of(const std::string& path) {
    static const Unpacker unpackers[] = {
        {".gz", {"gzip", "-dc"}, "gzip"},
        {".zst", {"zstd", "-dc", "--long=31"}, "zstd"},  // also files of --long, whose window takes up to 2 GiB
        {".xz", {"xz", "-dc"}, "xz-utils"},
        {".parquet", {"python3"}, "python3"}};
    for (const Unpacker& unpacker : unpackers)
        if (path.ends_with(unpacker.suffix)) return &unpacker;
    return nullptr;
}

bool is_packed(const std::string& path) { return unpacker_of(path) != nullptr; }

std::string without_packing(const std::string& path) {
    const Unpacker* unpacker = unpacker_of(path);
    if (!unpacker || path.ends_with(".parquet")) return path;
    return path.substr(0, path.size() - strlen(unpacker->suffix));
}

// The script is in the tree of the sources, which also has the program, or where `make install` puts it.
static std::string parquet_script() {
    std::error_code ignored;
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    for (const char* place : {"../share/train_gpt2", "scripts", "../../scripts", "../../../scripts"})
        if (const fs::path script = folder / place / "parquet_text.py"; path_exists(script)) return script;
    fail(EXIT_NO_INPUT, "scripts/parquet_text.py, which reads .parquet files, is neither in the sources nor installed");
}

// ---- the program

TextStream::TextStream(const std::string& path, const std::string& text_key) : file(path) {
    const Unpacker* unpacker = unpacker_of(path);
    if (!unpacker) return;
    std::vector<std::string> command = unpacker->command;
    if (path.ends_with(".parquet")) command.insert(command.end(), {parquet_script(), text_key});
    start(command, unpacker->package);
}

void TextStream::start(const std::vector<std::string>& command, const char* package) {
    int ends[2];
    if (pipe(ends) != 0) fail_errno(EXIT_IO, file.path, "open a pipe to unpack it");
    for (int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
    pipe_end = ends[0];
    errors.reset(tmpfile());
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, file.fd, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    if (errors) posix_spawn_file_actions_adddup2(&actions, fileno(errors.get()), 2);
    // This process ignores SIGPIPE. The program must not, so that it ends when nobody reads its output any more.
    posix_spawnattr_t attributes;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGPIPE);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &signals);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    const int error = posix_spawnp(&program, words[0], &actions, &attributes, words.data(), environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error == 0) return;
    close(pipe_end);
    fail(EXIT_NO_INPUT, "%s: %s, which unpacks it, cannot be started: %s; apt-get install %s", file.path.c_str(),
         words[0], strerror(error), package);
}

TextStream::~TextStream() {
    if (program > 0) kill(program, SIGKILL);
    wait_for_program();
}

void TextStream::wait_for_program() {
    if (pipe_end >= 0) close(std::exchange(pipe_end, -1));
    if (program < 0) return;
    while (waitpid(program, &status, 0) < 0 && errno == EINTR) {
    }
    program = -1;
}

void TextStream::check_program() {
    wait_for_program();
    if (status == 0) return;
    std::string reason =
        WIFSIGNALED(status) ? format("signal %d", WTERMSIG(status)) : format("exit code %d", WEXITSTATUS(status));
    if (errors) rewind(errors.get());
    for (char line[512]; errors && fgets(line, sizeof(line), errors.get());)
        if (line[0] != '\n') reason = std::string(line, strcspn(line, "\n"));
    const bool missing = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_NO_INPUT;  // as parquet_text.py says
    fail(missing ? EXIT_NO_INPUT : EXIT_BAD_DATA, "%s: %s cannot read all of it: %s", file.path.c_str(),
         unpacker_of(file.path)->command[0].c_str(), reason.c_str());
}

// ---- reading

// Reads some of the next bytes; 0: the end.
int64_t TextStream::fetch(char* out, int64_t bytes) {
    if (!is_packed(file.path)) {
        bytes = std::min(bytes, file.size - position);
        file.read_at(out, position, bytes);
        position += bytes;
        return bytes;
    }
    if (pipe_end < 0) return 0;
    ssize_t got;
    do got = ::read(pipe_end, out, size_t(bytes));
    while (got < 0 && errno == EINTR);
    if (got < 0) fail_errno(EXIT_IO, file.path, "read from the program that unpacks it");
    if (got == 0) check_program();
    return got;
}

int64_t TextStream::read(char* out, int64_t bytes) {
    int64_t done = std::min(bytes, int64_t(ahead.size()));
    memcpy(out, ahead.data(), size_t(done));
    ahead.erase(0, size_t(done));
    for (int64_t got = 1; got > 0 && done < bytes; done += got) got = fetch(out + done, bytes - done);
    return done;
}

std::string_view TextStream::peek(int64_t bytes) {
    for (int64_t got = 1; got > 0 && int64_t(ahead.size()) < bytes;) {
        const size_t have = ahead.size();
        ahead.resize(have + size_t(std::max(bytes, PEEKED)));
        got = fetch(ahead.data() + have, std::max(bytes, PEEKED));
        ahead.resize(have + size_t(got));
    }
    return std::string_view(ahead).substr(0, size_t(bytes));
}

// The program shares the position in the file, because its standard input is the same open file.
int64_t TextStream::file_position() const { return is_packed(file.path) ? lseek(file.fd, 0, SEEK_CUR) : position; }
