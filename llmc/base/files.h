// files.h: durable writes (a crash loses no finished file), careful reads of untrusted files, directories and locks.
//
// Errors name the path and the system's reason: EXIT_NO_INPUT (missing), EXIT_BAD_DATA (invalid content),
// EXIT_CANNOT_CREATE (an output cannot be created or renamed), EXIT_IO (reading or writing failed, disk full).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/common.h"

struct XXH3_state_s;  // xxhash.h

// Size and hash of a file, to detect later damage.
struct FileSum {
    int64_t size = 0;
    uint64_t xxh3 = 0;  // XXH3-64 of all bytes
    bool operator==(const FileSum&) const = default;
};

// An open regular file; its size is read once. Read by pread, not mapped: a file that shrinks is an error, not SIGBUS.
struct InputFile {
    std::string path;
    int fd = -1;
    int64_t size = 0;

    explicit InputFile(const std::string& path);  // refuses a missing file, or one that is not regular
    InputFile(InputFile&& other) noexcept;
    ~InputFile();
    // Reads all of [offset, offset + bytes) or throws. Thread-safe.
    void read_at(void* out, int64_t offset, int64_t bytes) const;
};

// A new file, written sequentially. Data are on disk only after finish(); without it the destructor just closes it.
struct OutputFile {
    std::string path;
    int64_t size = 0;

    explicit OutputFile(const std::string& path);  // refuses a path that exists
    OutputFile(const OutputFile&) = delete;
    ~OutputFile();
    void write(const void* data, int64_t bytes);
    FileSum finish();  // fsync and close

  private:
    int fd;
    int64_t written_back = 0;  // bytes that the disk has or is writing
    std::unique_ptr<XXH3_state_s, void (*)(XXH3_state_s*)> hash;
};

// A lock on a file: one process at a time uses a directory. The kernel releases it when the process ends in any way.
struct FileLock {
    std::string path;
    int fd = -1;
    bool held = false;  // false: this file system has no locks, so nothing is locked

    // Makes the file, with this process's name. Refuses (EXIT_CANNOT_CREATE) one that another has locked, by name.
    explicit FileLock(const std::string& path);
    FileLock(const FileLock&) = delete;
    ~FileLock();  // removes the file
};

// Reads the whole file. Refuses a file larger than max_bytes (EXIT_BAD_DATA). or_pipe: it may also be a pipe.
std::string read_file(const std::string& path, int64_t max_bytes, bool or_pipe = false);
// Writes a new file; its content is on disk when the call returns.
FileSum write_file(const std::string& path, const std::string& content);
// Writes or replaces a file atomically: after a crash, and for readers, it is old or new. A failure leaves the old one.
void replace_file(const std::string& path, const std::string& content);
void replace_file(const std::string& path, const std::function<void(OutputFile&)>& write);
// `progress` is called for each part of the file that was read.
FileSum checksum_file(const std::string& path, const std::function<void()>& progress = {});
// Writes to disk what the system still holds of a file that other code wrote, or of the entries of a directory.
void sync_path(const std::string& path);

bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
bool is_pipe(const std::string& path);
bool is_same_file(const std::string& a, const std::string& b);  // false if one is missing
// Refuses (EXIT_NO_INPUT) a path that is not a directory, or a directory without search permission, which looks empty.
void check_directory(const std::string& dir);
// Returns the names in dir, sorted. Fails with EXIT_NO_INPUT if dir is missing.
std::vector<std::string> list_directory(const std::string& dir);
void make_directories(const std::string& dir);  // also makes the parents, and syncs them; dir may exist
void rename_path(const std::string& from, const std::string& to);
void exchange_paths(const std::string& a, const std::string& b);  // gives each path the name of the other, at once
void remove_tree(const std::string& path);                        // path may be missing; links are not followed
int64_t free_bytes(const std::string& dir);                       // available to an ordinary user on dir's file system
bool is_file_name(const std::string& name);                       // no path, not . or .., no control character
std::string parent_directory(const std::string& path);            // "." for a bare name
std::string current_directory();                                  // "" if the directory was removed

// Throws Error: "PATH: cannot WHAT: REASON", from errno.
[[noreturn]] void fail_errno(int exit_code, const std::string& path, const std::string& what);
// Text from a file, made safe for a message: cut at 100 bytes, control characters shown as \x1b.
std::string printable(const std::string& text);
