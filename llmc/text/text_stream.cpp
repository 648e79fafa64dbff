#include "text/text_stream.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

namespace fs = std::filesystem;

static constexpr int64_t PEEKED = 64 << 10;    // bytes that peek reads at least
static constexpr int CANNOT_BE_STARTED = 127;  // exit code

struct Unpacker {
    std::string suffix;
    std::vector<const char*> command;
    const char* package;  // has the program
};

static const Unpacker* unpacker_of(const std::string& path) {
    static const Unpacker unpackers[] = {
        {".gz", {"gzip", "-dc"}, "gzip"},
        {".zst", {"zstd", "-dc", "--long=31"}, "zstd"},  // also what was packed with --long, in windows up to 2 GiB
        {".xz", {"xz", "-dc"}, "xz-utils"},
        {".parquet", {"python3"}, "python3"}};
    for (const Unpacker& unpacker : unpackers)
        if (path.ends_with(unpacker.suffix)) return &unpacker;
    return nullptr;
}

bool is_packed(const std::string& path) { return unpacker_of(path) != nullptr; }

std::string without_packing(const std::string& path) {
    if (!is_packed(path) || path.ends_with(".parquet")) return path;
    return path.substr(0, path.size() - unpacker_of(path)->suffix.size());
}

// The script is in the tree of the sources, where the program is too, or where `make install` puts it.
static std::string parquet_script() {
    std::error_code ignored;
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    for (const char* place : {"../share/train_gpt2", "scripts", "../../scripts", "../../../scripts"})
        if (const fs::path script = folder / place / "parquet_text.py"; path_exists(script)) return script;
    fail(EXIT_NO_INPUT, "scripts/parquet_text.py, which reads .parquet files, is neither in the sources nor installed");
}

TextStream::TextStream(const std::string& path, const std::string& text_key) : file(path), unpacker(unpacker_of(path)) {
    if (unpacker) start(text_key);
}

void TextStream::start(const std::string& text_key) {
    const std::string script = unpacker->suffix == ".parquet" ? parquet_script() : "";
    std::vector<const char*> words = unpacker->command;
    if (!script.empty()) words.insert(words.end(), {script.c_str(), text_key.c_str()});
    words.push_back(nullptr);
    errors.reset(tmpfile());
    int ends[2];
    if (pipe(ends) != 0) fail_errno(EXIT_IO, file.path, "open a pipe to unpack it");
    for (int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
    program = fork();
    if (program == 0) {
        dup2(file.fd, 0), dup2(ends[1], 1);
        if (errors) dup2(fileno(errors.get()), 2);
        signal(SIGPIPE, SIG_DFL);  // ignored here; so the program ends when nobody reads its output any more
        execvp(words[0], const_cast<char**>(words.data()));
        _exit(CANNOT_BE_STARTED);
    }
    close(ends[1]);
    output = ends[0];
    if (program < 0) fail_errno(EXIT_IO, file.path, "start a process to unpack it");
}

static void wait_for(pid_t program, int& status) {
    while (waitpid(program, &status, 0) < 0 && errno == EINTR) {
    }
}

TextStream::~TextStream() {
    if (output >= 0) close(output);
    if (program < 0) return;
    kill(program, SIGKILL);
    wait_for(program, status);
}

// Waits for the program, whose output has ended, and checks its exit code.
void TextStream::finish() {
    close(std::exchange(output, -1));
    wait_for(std::exchange(program, -1), status);
    if (status == 0) return;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == CANNOT_BE_STARTED)
        fail(EXIT_NO_INPUT, "%s: %s, which unpacks it, cannot be started: apt-get install %s", file.path.c_str(),
             unpacker->command[0], unpacker->package);
    std::string reason = format("exit code %d", code);
    if (errors) rewind(errors.get());
    for (char line[512]; errors && fgets(line, sizeof(line), errors.get());)
        if (line[0] != '\n') reason = std::string(line, strcspn(line, "\n"));
    fail(code == EXIT_NO_INPUT ? EXIT_NO_INPUT : EXIT_BAD_DATA, "%s: %s cannot read all of it: %s", file.path.c_str(),
         unpacker->command[0], reason.c_str());
}

// Reads some of the next bytes; 0: the end.
int64_t TextStream::fetch(char* out, int64_t bytes) {
    if (!unpacker) {
        bytes = std::min(bytes, file.size - position);
        file.read_at(out, position, bytes);
        position += bytes;
        return bytes;
    }
    ssize_t got = 0;
    while (output >= 0 && (got = ::read(output, out, size_t(bytes))) < 0)
        if (errno != EINTR) fail_errno(EXIT_IO, file.path, "read what is unpacked");
    if (output >= 0 && got == 0) finish();
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
    const int64_t more = std::max(bytes, PEEKED);
    for (int64_t got = 1; got > 0 && int64_t(ahead.size()) < bytes;) {
        ahead.resize(ahead.size() + size_t(more));
        got = fetch(ahead.data() + ahead.size() - more, more);
        ahead.resize(ahead.size() - size_t(more - got));
    }
    return std::string_view(ahead).substr(0, size_t(bytes));
}

// The program shares the position in the file: its standard input is the same open file.
int64_t TextStream::file_position() const { return unpacker ? lseek(file.fd, 0, SEEK_CUR) : position; }
