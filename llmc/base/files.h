// files.h: files that survive a crash, and files that cannot be trusted.
//
// Errors name the path and what the system said: EXIT_NO_INPUT (missing), EXIT_BAD_DATA (not what it should be),
// EXIT_CANNOT_CREATE (an output cannot be made or given its name), EXIT_IO (reading or writing failed, disk full).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/common.h"

struct XXH3_state_s;  // xxhash.h

// What a file holds, to tell later whether it still does.
struct FileSum {
    int64_t size = 0;
    uint64_t xxh3 = 0;  // XXH3-64 of all bytes
    bool operator==(const FileSum&) const = default;
};

// An open regular file of a size that was asked once. Read by pread, not mapped: a file that shrinks while it is open
// becomes an error, not SIGBUS.
struct InputFile {
    std::string path;
    int fd = -1;
    int64_t size = 0;

    explicit InputFile(const std::string& path);  // refuses what is missing or no regular file
    InputFile(InputFile&& other) noexcept;
    ~InputFile();
    // All of [offset, offset + bytes), or an error. Safe to call from several threads.
    void read_at(void* out, int64_t offset, int64_t bytes) const;
};

// A new file, written from front to back. Nothing counts as written before finish(), which has it on disk; a file that
// is destroyed unfinished is only closed.
struct OutputFile {
    std::string path;
    int fd = -1;
    int64_t size = 0;
    std::unique_ptr<XXH3_state_s, void (*)(XXH3_state_s*)> hash;

    explicit OutputFile(const std::string& path);  // replaces nothing: refuses a path that exists
    OutputFile(const OutputFile&) = delete;
    ~OutputFile();
    void write(const void* data, int64_t bytes);
    FileSum finish();  // fsync and close
};

// The whole file, refused above max_bytes (EXIT_BAD_DATA).
std::string read_file(const std::string& path, int64_t max_bytes);
// A new file with this content, on disk when the call returns.
FileSum write_file(const std::string& path, const std::string& content);
// The same for a file that may exist: readers, and a crash, see the old content or the new, never a part.
void replace_file(const std::string& path, const std::string& content);
FileSum checksum_file(const std::string& path);
// Brings to disk what somebody else wrote.
void sync_file(const std::string& path);

bool path_exists(const std::string& path);
bool is_deleted(const std::string& path);  // nothing has that name; what cannot be asked for counts as there
bool is_directory(const std::string& path);
// f, which reads files of a directory. If it fails and the directory is gone, the error says so (EXIT_NO_INPUT).
void read_from(const std::string& dir, const std::function<void()>& f);
// Fails with EXIT_NO_INPUT where that is no directory, or one that may not be searched and so looks empty.
void check_directory(const std::string& dir);
bool is_denied(const std::string& dir);                           // it is there, but it or a file in it may not be read
std::vector<std::string> list_directory(const std::string& dir);  // names, sorted; missing: EXIT_NO_INPUT
void make_directories(const std::string& dir);                    // with its parents, all on disk; fine if it exists
void sync_directory(const std::string& dir);                      // names in it become durable
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);              // fine if it is missing; follows no links
int64_t free_bytes(const std::string& dir);             // for an ordinary user, on the file system of dir
int64_t free_files(const std::string& dir);             // that can still be made there
int64_t bytes_on_disk(const std::string& dir);          // that the files in it take
bool is_file_name(const std::string& name);             // of a file in the same directory: no path, not . or ..
std::string parent_directory(const std::string& path);  // "." for a bare name
std::string current_directory();                        // "" where it was removed

// Throws Error: "PATH: cannot WHAT: REASON", from errno.
[[noreturn]] void fail_errno(int exit_code, const std::string& path, const std::string& what);
// For a message: text from a file, cut at 100 bytes, control characters shown as \x1b.
std::string printable(const std::string& text);
