#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

namespace fs = std::filesystem;

void fail_errno(int exit_code, const std::string& path, const std::string& what) {
    const int number = errno;
    const std::string reason = std::generic_category().message(number);
    throw SystemError(exit_code, format("%s: cannot %s: %s", path.c_str(), what.c_str(), reason.c_str()), number);
}

// Whether the user caused the error, by a wrong name or a file that this user may not open. Other errors are faults of
// the machine.
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

// The number of bytes for one call of read, which the system limits to 2 GiB.
static size_t limit_call(int64_t bytes) { return size_t(std::min<int64_t>(bytes, 1 << 30)); }

InputFile::InputFile(const std::string& path) : path(path) {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // opening a pipe without a writer would block forever
    if (fd < 0) fail_errno(is_missing(errno) ? EXIT_NO_INPUT : EXIT_IO, path, "open");
    struct stat status = {};
    const bool has_status = fstat(fd, &status) == 0;
    if (has_status && S_ISREG(status.st_mode)) {
        size = status.st_size;
        return;
    }
    close(fd);
    if (!has_status) fail(EXIT_IO, "%s: cannot read its size", path.c_str());
    fail(EXIT_BAD_DATA, "%s: is %s, not a file", path.c_str(),
         S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
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
        const ssize_t got = retry_interrupted([&] { return pread(fd, to, limit_call(bytes), offset); });
        if (got < 0) fail_errno(EXIT_IO, path, format("read at byte %lld", static_cast<long long>(offset)));
        if (got == 0)
            fail(EXIT_BAD_DATA, "%s: became shorter while it was read: it ends at byte %lld instead of %lld",
                 path.c_str(), static_cast<long long>(offset), static_cast<long long>(size));
        to += got;
        offset += got;
        bytes -= got;
    }
}

constexpr size_t DIRECT_ALIGN = 4096;  // what O_DIRECT needs of addresses, offsets and sizes, on any usual disk
constexpr int64_t BLOCK = 16 << 20;    // bytes in one write
constexpr int64_t CACHED = 64 << 10;  // bytes that are hashed and then copied, so that the copy finds them in the cache

using Block = std::unique_ptr<char, void (*)(void*)>;

static Block allocate_block(int64_t bytes) {
    char* block = static_cast<char*>(std::aligned_alloc(DIRECT_ALIGN, size_t(bytes)));
    if (!block) throw std::bad_alloc();
    return {block, std::free};
}

struct OutputFile::BlockWriter {
    const std::string& path;
    int fd;
    // The caller fills one, the thread writes the other. A small file needs only a small block.
    Block filling = allocate_block(CACHED), full = {nullptr, std::free};
    int64_t capacity = CACHED;  // of `filling`
    int64_t filled = 0;         // bytes in `filling`
    int64_t written = 0;        // bytes that the system has taken
    bool direct = false;        // O_DIRECT is set
    std::future<void> writing;  // of `full`

    BlockWriter(const std::string& path, int fd) : path(path), fd(fd) {}
    ~BlockWriter() {
        if (writing.valid()) writing.wait();
        if (fd >= 0) close(fd);
    }

    void wait_for_block() {
        if (writing.valid()) writing.get();
    }

    void enlarge_block() {
        Block large = allocate_block(BLOCK);
        std::memcpy(large.get(), filling.get(), size_t(filled));
        full = allocate_block(BLOCK);
        filling = std::move(large);
        capacity = BLOCK;
    }

    // Lets a thread write the block that is full, as soon as the one before it is written.
    void begin_block() {
        if (capacity < BLOCK) return enlarge_block();
        wait_for_block();
        std::swap(filling, full);
        filled = 0;
        const auto write_block = [this] {
            if (written == 0) set_direct(true);
            write_bytes(full.get(), BLOCK);
        };
        try {
            writing = std::async(std::launch::async, write_block);
        } catch (const std::system_error&) {  // this process may not have another thread (ulimit -u)
            write_block();
        }
    }

    // Some file systems refuse O_DIRECT here, others at the first write.
    void set_direct([[maybe_unused]] bool on) {
#ifdef O_DIRECT
        const int flags = fcntl(fd, F_GETFL);
        direct = fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && on;
#endif
    }

    void write_bytes(const char* from, int64_t bytes) {
        while (bytes > 0) {
            const ssize_t put = retry_interrupted([&] { return ::write(fd, from, size_t(bytes)); });
            if (put < 0 && direct && errno == EINVAL) {
                set_direct(false);
                continue;
            }
            if (put < 0)
                fail_errno(
                    EXIT_IO, path,
                    format("write %lld bytes at %lld", static_cast<long long>(bytes), static_cast<long long>(written)));
            from += put;
            written += put;
            bytes -= put;
        }
    }
};

OutputFile::OutputFile(const std::string& path)
    : path(path), hash(XXH3_createState(), [](XXH3_state_s* state) { XXH3_freeState(state); }) {
    XXH3_64bits_reset(hash.get());
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) fail_errno(EXIT_CANNOT_CREATE, path, "create");
    blocks = std::make_unique<BlockWriter>(this->path, fd);
}

OutputFile::~OutputFile() = default;

void OutputFile::write(const void* data, int64_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
        const int64_t piece = std::min({bytes, CACHED, blocks->capacity - blocks->filled});
        XXH3_64bits_update(hash.get(), from, size_t(piece));
        std::memcpy(blocks->filling.get() + blocks->filled, from, size_t(piece));
        from += piece;
        size += piece;
        bytes -= piece;
        blocks->filled += piece;
        if (blocks->filled == blocks->capacity) blocks->begin_block();
    }
}

FileSum OutputFile::finish() {
    BlockWriter& b = *blocks;
    b.wait_for_block();
    if (b.direct) b.set_direct(false);  // the last bytes may be less than a sector
    b.write_bytes(b.filling.get(), b.filled);
    // A failed fsync is never retried: the system reports lost pages once, and then treats the file as clean.
    if (fsync(b.fd) != 0) fail_errno(EXIT_IO, path, "write to disk");
    if (close(std::exchange(b.fd, -1)) != 0) fail_errno(EXIT_IO, path, "close");
    return {size, XXH3_64bits_digest(hash.get())};
}

std::string read_file(const std::string& path, int64_t max_bytes) {
    const InputFile file(path);
    if (file.size > max_bytes)
        fail(EXIT_BAD_DATA, "%s: has %s bytes, but such a file may have at most %s", path.c_str(),
             with_commas(file.size).c_str(), with_commas(max_bytes).c_str());
    std::string content(size_t(file.size), '\0');
    file.read_at(content.data(), 0, file.size);
    return content;
}

FileSum write_file(const std::string& path, const std::string& content) {
    OutputFile file(path);
    file.write(content.data(), int64_t(content.size()));
    return file.finish();
}

void replace_file(const std::string& path, const std::string& content) {
    const std::string temporary = path + ".tmp";
    remove_tree(temporary);
    try {
        write_file(temporary, content);
        rename_path(temporary, path);
    } catch (const Error&) {
        unlink(temporary.c_str());  // frees the space
        throw;
    }
    sync_directory(parent_directory(path));
}

FileSum checksum_file(const std::string& path, const std::function<void(int64_t done, int64_t of)>& progress) {
    const InputFile file(path);
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(), XXH3_freeState);
    XXH3_64bits_reset(hash.get());
    std::string chunk(size_t(std::min<int64_t>(file.size, 1 << 20)), '\0');
    for (int64_t at = 0; at < file.size; at += int64_t(chunk.size())) {
        const int64_t bytes = std::min(int64_t(chunk.size()), file.size - at);
        file.read_at(chunk.data(), at, bytes);
        XXH3_64bits_update(hash.get(), chunk.data(), size_t(bytes));
        if (progress) progress(at + bytes, file.size);
    }
    return {file.size, XXH3_64bits_digest(hash.get())};
}

void sync_file(const std::string& path) {
    const InputFile file(path);
    if (fsync(file.fd) != 0) fail_errno(EXIT_IO, path, "write to disk");
}

bool path_exists(const std::string& path) {
    std::error_code ignored;
    return fs::exists(fs::symlink_status(path, ignored));
}

bool is_deleted(const std::string& path) {
    struct stat status;
    return lstat(path.c_str(), &status) != 0 && errno == ENOENT;
}

void read_from(const std::string& dir, const std::function<void()>& f) {
    try {
        f();
    } catch (const Error&) {
        if (!is_deleted(dir)) throw;
        fail(EXIT_NO_INPUT,
             "%s: was deleted while it was read, probably by a run that deletes its older checkpoints: try again, or "
             "give that run a larger --keep",
             dir.c_str());
    }
}

bool is_link(const std::string& path) {
    std::error_code ignored;
    return fs::is_symlink(path, ignored);
}

bool is_directory(const std::string& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored);
}

void check_directory(const std::string& dir) {
    struct stat status;
    if (lstat(dir.c_str(), &status) == 0 && S_ISREG(status.st_mode))
        fail(EXIT_NO_INPUT, "%s: is a file; give the directory that holds it", dir.c_str());
    if (lstat((dir + "/.").c_str(), &status) != 0)
        fail_errno(is_missing(errno) ? EXIT_NO_INPUT : EXIT_IO, dir, "open the directory");
}

bool is_denied(const std::string& dir) {
    if (access((dir + "/.").c_str(), R_OK | X_OK) != 0) return errno == EACCES;
    for (const std::string& name : list_directory(dir))
        if (access((dir + "/" + name).c_str(), R_OK) != 0 && errno == EACCES) return true;
    return false;
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
    const std::string parent = parent_directory(dir);
    if (parent != dir) make_directories(parent);
    std::error_code error;
    fs::create_directory(dir, error);
    struct stat target;
    if (error == std::errc::file_exists && stat(dir.c_str(), &target) != 0)
        fail_errno(EXIT_CANNOT_CREATE, dir, "follow this link");
    if (error) fail_code(EXIT_CANNOT_CREATE, dir, "create the directory", error);
    sync_directory(parent);
}

void make_new_directory(const std::string& dir) {
    if (mkdir(dir.c_str(), 0777) != 0) fail_errno(EXIT_CANNOT_CREATE, dir, "create the directory");
    sync_directory(parent_directory(dir));
}

void sync_directory(const std::string& dir) {
    const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail_errno(EXIT_IO, dir, "open the directory");
    const bool failed = fsync(fd) != 0 && errno != EINVAL;  // EINVAL: this file system cannot sync directories
    const int reason = errno;
    close(fd);
    errno = reason;
    if (failed) fail_errno(EXIT_IO, dir, "write the directory to disk");
}

void rename_path(const std::string& from, const std::string& to) {
    if (rename(from.c_str(), to.c_str()) != 0) fail_errno(EXIT_CANNOT_CREATE, from, "rename to " + to);
}

void remove_tree(const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail_code(EXIT_IO, path, "remove", error);
}

int64_t free_bytes(const std::string& dir) {
    struct statvfs status;
    if (statvfs(dir.c_str(), &status) != 0) fail_errno(EXIT_IO, dir, "read its free space");
    int64_t bytes;  // some file systems report impossible numbers, whose product overflows
    if (__builtin_mul_overflow(status.f_bavail, status.f_frsize, &bytes)) return std::numeric_limits<int64_t>::max();
    return bytes;
}

int64_t free_files(const std::string& dir) {
    struct statvfs status;
    if (statvfs(dir.c_str(), &status) != 0) fail_errno(EXIT_IO, dir, "read its free space");
    constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
    if (status.f_files == 0) return unlimited;  // btrfs and some network file systems
    return int64_t(std::min<uint64_t>(status.f_favail, unlimited));
}

int64_t bytes_on_disk(const std::string& dir) {
    int64_t bytes = 0;
    for (const std::string& name : list_directory(dir)) {
        struct stat status;
        if (lstat((dir + "/" + name).c_str(), &status) == 0) bytes += int64_t(status.st_blocks) * 512;
    }
    return bytes;
}

bool is_file_name(const std::string& name) {
    const auto is_refused = [](unsigned char c) { return c == '/' || c < 0x20 || c == 0x7f; };
    return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
           std::none_of(name.begin(), name.end(), is_refused);
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
    std::string out;
    for (size_t i = 0; i < text.size() && i < 100; i++) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        out += c < 0x20 || c == 0x7f ? format("\\x%02x", c) : std::string(1, text[i]);
    }
    return text.size() > 100 ? out + "..." : out;
}
