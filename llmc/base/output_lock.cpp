#include "base/output_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string_view>

#include "base/files.h"
#include "base/host.h"

// ---- directories

void MadeDirectories::make(const std::string& dir) {
    for (std::string missing = dir; !path_exists(missing); missing = parent_directory(missing)) {
        if (missing == parent_directory(missing)) break;  // "." or "/" exists, even if the process may not search it
        dirs.insert(dirs.begin(), missing);
    }
    make_directories(dir);
}

MadeDirectories::~MadeDirectories() {
    for (size_t i = dirs.size(); i-- > 0;) rmdir(dirs[i].c_str());  // leaves a directory that is not empty
}

// ---- the file

struct OpenedFile {
    int fd;
    bool created;
};

static OpenedFile open_or_create(const std::string& path) {
    for (;;) {
        int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) return {fd, true};
        if (errno != EEXIST) fail_errno(EXIT_CANNOT_CREATE, path, "create");
        fd = open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0) return {fd, false};
        if (errno != ENOENT) fail_errno(EXIT_CANNOT_CREATE, path, "open");  // ENOENT: its owner removed it just now
    }
}

// Whether `path` still names the open file. The lock's owner may have removed it between our open() and our flock(),
// and users may move it later.
static bool is_at(int fd, const std::string& path) {
    struct stat ours, named;
    return fstat(fd, &ours) == 0 && lstat(path.c_str(), &named) == 0 && ours.st_dev == named.st_dev &&
           ours.st_ino == named.st_ino;
}

// Seconds since the file was renewed, by the clock of the file system, which may be another machine's.
static double age(int fd, const std::string& path) {
    std::string probe = path + ".XXXXXX";
    const int now_fd = mkostemp(probe.data(), O_CLOEXEC);
    if (now_fd < 0) fail_errno(EXIT_CANNOT_CREATE, probe, "create");
    unlink(probe.c_str());
    struct stat now = {}, renewed = {};
    fstat(now_fd, &now);
    fstat(fd, &renewed);
    close(now_fd);
    return double(now.st_mtim.tv_sec - renewed.st_mtim.tv_sec) +
           1e-9 * double(now.st_mtim.tv_nsec - renewed.st_mtim.tv_nsec);
}

static void write_owner(int fd) {
    const time_t now = time(nullptr);
    tm parts;
    gmtime_r(&now, &parts);
    char since[32];
    strftime(since, sizeof(since), "%Y-%m-%d %H:%M UTC", &parts);
    const std::string text = format("pid %d on %s since %s\n", int(getpid()), host_name().c_str(), since);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, text.data(), text.size(), 0) < 0) {
        // Probably a full disk. The lock is valid without the text.
    }
}

static std::string read_owner(int fd) {
    char text[200];
    const ssize_t bytes = pread(fd, text, sizeof(text), 0);
    const std::string owner(text, bytes > 0 ? size_t(bytes) : 0);
    return owner.empty() ? "its run.lock does not name the process" : printable(owner.substr(0, owner.find('\n')));
}

// ---- the lock

[[noreturn]] static void refuse(const std::string& output, int fd, const std::string& how_long) {
    const std::string owner = read_owner(fd);
    close(fd);
    fail(EXIT_CANNOT_CREATE, "%s is in use by another run: %s; wait for it%s, or give another --output", output.c_str(),
         owner.c_str(), how_long.c_str());
}

// Refuses an output whose name is so long that the last files of a run would exceed PATH_MAX: the run would fail at
// its end.
static void check_length(const std::string& output) {
    constexpr size_t longest = std::string_view("/step_2147483647.10.tmp/generation_config.json").size();
    if (output.size() + longest >= PATH_MAX)
        fail(EXIT_CANNOT_CREATE,
             "%s...: the name of the directory has %zu bytes, so the names of files in it would be too long for the "
             "system; give a name of at most %zu bytes",
             output.substr(0, 100).c_str(), output.size(), PATH_MAX - 1 - longest);
}

static const char* kind_of_file(mode_t mode) {
    return S_ISREG(mode) ? "a file" : S_ISFIFO(mode) ? "a pipe" : S_ISSOCK(mode) ? "a socket" : "a device";
}

// Refuses an output if it, or the nearest parent that exists, is not a directory.
static void check_kind(const std::string& output) {
    std::string path = output;
    struct stat status;
    while (lstat(path.c_str(), &status) != 0 && path != parent_directory(path)) path = parent_directory(path);
    const std::string where = "--output " + output + (path == output ? "" : ": " + path);
    const bool followed = stat(path.c_str(), &status) == 0;
    if (!followed && errno == ENOENT && path_exists(path))
        fail(EXIT_CANNOT_CREATE, "%s is a link to %s, which does not exist; make that directory, or give another name",
             where.c_str(), std::filesystem::read_symlink(path).c_str());
    if (followed && !S_ISDIR(status.st_mode))
        fail(EXIT_CANNOT_CREATE, "%s is %s, not a directory; give another name", where.c_str(),
             kind_of_file(status.st_mode));
}

OutputLock::OutputLock(const std::string& output, LockCall lock, double beat_seconds) : path(output + "/run.lock") {
    const double dead_after = LOCK_BEATS * beat_seconds;
    check_length(output);
    check_kind(output);
    made.make(output);
    for (;;) {
        const OpenedFile file = open_or_create(path);
        fd = file.fd;
        const int error = lock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
        if (error == EWOULDBLOCK) refuse(output, fd, "");
        if (error == 0 && is_at(fd, path)) break;
        if (error != 0 && error != EINTR) {  // this file system has no locks
            if (file.created) {
                renew(beat_seconds);
                break;
            }
            if (age(fd, path) < dead_after)
                refuse(output, fd, format(" (if it is dead, for at most %.0f s)", dead_after));
            // Without locks, two runs that remove the file within the same millisecond may both continue.
            unlink(path.c_str());
        }
        close(fd);
    }
    write_owner(fd);
}

OutputLock::~OutputLock() {
    if (renewing.joinable()) {
        {
            const std::lock_guard<std::mutex> hold(mutex);
            ending = true;
        }
        changed.notify_one();
        renewing.join();
    }
    if (still_held()) unlink(path.c_str());
    close(fd);
}

bool OutputLock::still_held() const { return is_at(fd, path); }

void OutputLock::renew(double beat_seconds) {
    renewing = std::thread([this, beat = std::chrono::duration<double>(beat_seconds)] {
        std::unique_lock<std::mutex> hold(mutex);
        while (!changed.wait_for(hold, beat, [this] { return ending; })) futimens(fd, nullptr);
    });
}
