#include "base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
// The functions of xxHash for the whole program: a build for another architecture needs no library.
#define XXH_STATIC_LINKING_ONLY
#define XXH_IMPLEMENTATION
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/print.h"

namespace fs = std::filesystem;

void fail_errno(int exit_code, const std::string& path, const std::string& what) {
    const std::string reason = std::generic_category().message(errno);
    fail(exit_code, "%s: cannot %s: %s", path.c_str(), what.c_str(), reason.c_str());
}

// Whether the user caused the error, by a wrong name or a file without permission; other errors are the machine's.
static bool is_missing(int error) {
    return error == ENOENT || error == ENOTDIR || error == EACCES || error == EPERM || error == ELOOP ||
           error == ENAMETOOLONG;
}

static ssize_t retry_interrupted(auto&& call) {
    ssize_t result;
    do result = call();
    while (result < 0 && errno == EINTR);
    return result;
}

// ---- reading

InputFile::InputFile(const std::string& path) : path(path) {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // opening a pipe without a writer would block forever
    if (fd < 0) fail_errno(is_missing(errno) ? EXIT_NO_INPUT : EXIT_IO, path, "open");
    struct stat status = {};
    const bool is_known = fstat(fd, &status) == 0;
    size = status.st_size;
    if (is_known && S_ISREG(status.st_mode)) return;
    close(fd);
    if (!is_known) fail(EXIT_IO, "%s: cannot read its size", path.c_str());
    fail(EXIT_BAD_DATA, "%s: is not a file, but a directory, device or pipe", path.c_str());
}

InputFile::InputFile(InputFile&& other) noexcept
    : path(std::move(other.path)), fd(std::exchange(other.fd, -1)), size(other.size) {}

InputFile::~InputFile() {
    if (fd >= 0) close(fd);
}

void InputFile::read_at(void* out, int64_t offset, int64_t bytes) const {
    if (offset < 0 || bytes < 0 || bytes > size - std::min(offset, size))
        fail(EXIT_BAD_DATA, "%s: cannot read %lld bytes at offset %lld: the file has %lld bytes", path.c_str(),
             static_cast<long long>(bytes), static_cast<long long>(offset), static_cast<long long>(size));
    char* to = static_cast<char*>(out);
    while (bytes > 0) {
        const size_t most = size_t(std::min<int64_t>(bytes, 1 << 30));  // the system limits a call to 2 GiB
        const ssize_t got = retry_interrupted([&] { return pread(fd, to, most, offset); });
        if (got < 0) fail_errno(EXIT_IO, path, format("read at byte %lld", static_cast<long long>(offset)));
        if (got == 0)
            fail(EXIT_BAD_DATA, "%s: became shorter while it was read: it ends at byte %lld instead of %lld",
                 path.c_str(), static_cast<long long>(offset), static_cast<long long>(size));
        to += got;
        offset += got;
        bytes -= got;
    }
}

std::string read_file(const std::string& path, int64_t max_bytes, bool or_pipe) {
    std::string content;
    const auto check_size = [&](int64_t bytes, const char* or_more) {
        if (bytes > max_bytes)
            fail(EXIT_BAD_DATA, "%s: has %s bytes%s, but such a file may have at most %s", path.c_str(),
                 with_commas(bytes).c_str(), or_more, with_commas(max_bytes).c_str());
        content.resize(size_t(bytes));
    };
    if (or_pipe && is_pipe(path)) {
        std::ifstream pipe(path);
        if (!pipe) fail_errno(EXIT_NO_INPUT, path, "open");
        content.resize(size_t(max_bytes) + 1);
        check_size(pipe.read(content.data(), max_bytes + 1).gcount(), " or more");
        return content;
    }
    const InputFile file(path);
    check_size(file.size, "");
    file.read_at(content.data(), 0, file.size);
    return content;
}

FileSum checksum_file(const std::string& path, const std::function<void()>& progress) {
    const InputFile file(path);
    XXH3_state_t hash;
    XXH3_64bits_reset(&hash);
    std::string chunk(1 << 20, '\0');
    for (int64_t at = 0; at < file.size; at += int64_t(chunk.size())) {
        const int64_t bytes = std::min(int64_t(chunk.size()), file.size - at);
        file.read_at(chunk.data(), at, bytes);
        XXH3_64bits_update(&hash, chunk.data(), size_t(bytes));
        if (progress) progress();
    }
    return {file.size, XXH3_64bits_digest(&hash)};
}

// ---- writing

OutputFile::OutputFile(const std::string& path)
    : path(path), hash(XXH3_createState(), [](XXH3_state_s* state) { XXH3_freeState(state); }) {
    XXH3_64bits_reset(hash.get());
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) fail_errno(EXIT_CANNOT_CREATE, path, "create");
}

OutputFile::~OutputFile() {
    if (fd >= 0) close(fd);
}

void OutputFile::write(const void* data, int64_t bytes) {
    XXH3_64bits_update(hash.get(), data, size_t(bytes));
    size += bytes;
    for (const char* from = static_cast<const char*>(data); bytes > 0;) {
        const ssize_t put = retry_interrupted([&] { return ::write(fd, from, size_t(bytes)); });
        if (put < 0) fail_errno(EXIT_IO, path, format("write %lld bytes", static_cast<long long>(bytes)));
        from += put;
        bytes -= put;
    }
#ifdef __linux__
    // The disk begins now, and not at fsync. Pieces of 8 MiB are large enough for it.
    if (size - written_back < 8 << 20) return;
    sync_file_range(fd, written_back, size - written_back, SYNC_FILE_RANGE_WRITE);
    written_back = size;
#endif
}

FileSum OutputFile::finish() {
    // A failed fsync is never retried: the system reports lost pages once, and then treats the file as clean.
    if (fsync(fd) != 0) fail_errno(EXIT_IO, path, "write to disk");
    if (close(std::exchange(fd, -1)) != 0) fail_errno(EXIT_IO, path, "close");
    return {size, XXH3_64bits_digest(hash.get())};
}

FileSum write_file(const std::string& path, const std::string& content) {
    OutputFile file(path);
    file.write(content.data(), int64_t(content.size()));
    return file.finish();
}

void replace_file(const std::string& path, const std::string& content) {
    replace_file(path, [&](OutputFile& file) { file.write(content.data(), int64_t(content.size())); });
}

void replace_file(const std::string& path, const std::function<void(OutputFile&)>& write) {
    const std::string temporary = path + ".tmp";
    remove_tree(temporary);
    try {
        OutputFile file(temporary);
        write(file);
        file.finish();
        rename_path(temporary, path);
    } catch (...) {
        unlink(temporary.c_str());  // frees the space
        throw;
    }
    sync_path(parent_directory(path));
}

void sync_path(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail_errno(EXIT_IO, path, "open");
    const int error = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    errno = error;
    if (error != 0 && error != EINVAL)  // EINVAL: this file system cannot sync directories
        fail_errno(EXIT_IO, path, "write to disk");
}

// ---- the lock

// Returns whether `path` still names the open file: its owner may have removed it, or the user may have moved it.
static bool is_at(int fd, const std::string& path) {
    struct stat ours, named;
    return fstat(fd, &ours) == 0 && lstat(path.c_str(), &named) == 0 && ours.st_dev == named.st_dev &&
           ours.st_ino == named.st_ino;
}

FileLock::FileLock(const std::string& path) : path(path) {
    for (;; close(fd)) {
        fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd < 0) fail_errno(EXIT_CANNOT_CREATE, path, "open");
        held = flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (!held && errno == EWOULDBLOCK) {
            close(fd);
            fail(EXIT_CANNOT_CREATE, "%s is in use by another run: %s; wait for it, or give another --output",
                 parent_directory(path).c_str(), printable(read_file(path, 1 << 10)).c_str());
        }
        if (!held || is_at(fd, path)) break;
    }
    const std::string owner = format("pid %d on %s", int(getpid()), host_name().c_str());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, owner.data(), owner.size(), 0) < 0) {
        // Probably a full disk. The lock is valid without the text.
    }
}

FileLock::~FileLock() {
    if (held && is_at(fd, path)) unlink(path.c_str());
    close(fd);
}

// ---- directories

bool path_exists(const std::string& path) {
    std::error_code ignored;
    return fs::exists(fs::symlink_status(path, ignored));
}

bool is_directory(const std::string& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored);
}

bool is_pipe(const std::string& path) {
    std::error_code ignored;
    return fs::is_fifo(path, ignored);
}

bool is_same_file(const std::string& a, const std::string& b) {
    std::error_code ignored;
    return fs::equivalent(a, b, ignored);
}

void check_directory(const std::string& dir) {
    struct stat status;
    if (lstat(dir.c_str(), &status) == 0 && S_ISREG(status.st_mode))
        fail(EXIT_NO_INPUT, "%s: is a file; give the directory that holds it", dir.c_str());
    if (lstat((dir + "/.").c_str(), &status) != 0)
        fail_errno(is_missing(errno) ? EXIT_NO_INPUT : EXIT_IO, dir, "open the directory");
}

// fail_errno for calls of std::filesystem, which report an error_code instead of errno.
[[noreturn]] static void fail_code(int exit_code, const std::string& path, const char* what, std::error_code error) {
    errno = error.value();
    fail_errno(exit_code, path, what);
}

std::vector<std::string> list_directory(const std::string& dir) {
    std::error_code error;
    std::vector<std::string> names;
    for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error))
        names.push_back(entry->path().filename().string());
    if (error) fail_code(is_missing(error.value()) ? EXIT_NO_INPUT : EXIT_IO, dir, "list the directory", error);
    std::sort(names.begin(), names.end());
    return names;
}

void make_directories(const std::string& dir) {
    if (is_directory(dir)) return;
    if (path_exists(dir)) fail(EXIT_CANNOT_CREATE, "%s is not a directory; give another name", dir.c_str());
    const std::string parent = parent_directory(dir);
    if (parent != dir) make_directories(parent);
    std::error_code error;
    fs::create_directory(dir, error);
    if (error) fail_code(EXIT_CANNOT_CREATE, dir, "create the directory", error);
    sync_path(parent);
}

void rename_path(const std::string& from, const std::string& to) {
    if (rename(from.c_str(), to.c_str()) != 0) fail_errno(EXIT_CANNOT_CREATE, from, "rename to " + to);
}

void exchange_paths(const std::string& a, const std::string& b) {
#ifdef RENAME_EXCHANGE
    if (renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
    if (errno != EINVAL && errno != ENOSYS) fail_errno(EXIT_CANNOT_CREATE, a, "exchange with " + b);
#endif
    const std::string aside = b + ".old.tmp";  // this file system cannot exchange them at once
    rename_path(b, aside);
    rename_path(a, b);
    rename_path(aside, a);
}

void remove_tree(const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail_code(EXIT_IO, path, "remove", error);
}

int64_t free_bytes(const std::string& dir) {
    std::error_code error;
    const fs::space_info space = fs::space(dir, error);
    if (error) fail_code(EXIT_IO, dir, "read its free space", error);
    return int64_t(std::min<uintmax_t>(space.available, INT64_MAX));
}

bool is_file_name(const std::string& name) {
    return !name.empty() && name.size() <= 255 && name != "." && name != ".." && name.find('/') == name.npos &&
           message_text(name) == name;
}

std::string parent_directory(const std::string& path) {
    const std::string parent = fs::path(path).parent_path().string();
    return parent.empty() ? "." : parent;
}

std::string current_directory() {
    std::error_code ignored;
    return fs::current_path(ignored).string();
}

std::string printable(const std::string& text) {
    return message_text(text.substr(0, 100)) + (text.size() > 100 ? "..." : "");
}
