// output_lock.h: one run at a time writes to an output directory.
//
// OUTPUT/run.lock is locked (flock) while the run lives. The kernel drops the lock when the process ends, in whatever
// way, so a dead run is no obstacle. The file says whose it is, for the message to a second run. Where the file system
// has no locks, as some network file systems, a thread renews the file's modification time instead, and a file that was
// not renewed for LOCK_BEATS beats belongs to nobody.
#pragma once
#include <sys/file.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

constexpr int LOCK_BEATS = 6;
using LockCall = int (*)(int fd, int operation);  // flock

// Directories that were missing, outermost first. Those that are still empty are removed with this.
struct MadeDirectories {
    std::vector<std::string> dirs;

    MadeDirectories() = default;
    MadeDirectories(const MadeDirectories&) = delete;
    ~MadeDirectories();
    void make(const std::string& dir);
};

struct OutputLock {
    std::string path;
    MadeDirectories made;
    int fd = -1;
    // Only without locks of the file system:
    std::thread renewing;
    std::mutex mutex;
    std::condition_variable changed;
    bool ending = false;

    // Makes the directory if it is missing. Refuses (EXIT_CANNOT_CREATE) one that another run uses, by pid, host and
    // time. The other arguments are for tests.
    explicit OutputLock(const std::string& output, LockCall lock = flock, double beat_seconds = 20.0);
    OutputLock(const OutputLock&) = delete;
    ~OutputLock();

    // False: the directory was moved or removed, or run.lock in it was. Another run may use that name now.
    bool still_held() const;

    void renew(double beat_seconds);
};
