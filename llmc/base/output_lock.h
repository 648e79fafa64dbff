// output_lock.h: a lock on an output directory, so that only one run at a time writes to it.
//
// The run holds an flock on OUTPUT/run.lock. The kernel releases the lock when the process ends in any way, so a dead
// run never blocks another. The file identifies its owner, for the message to a second run. Some network file systems
// have no locks. On such a file system a thread renews the file's modification time instead, and a file that was not
// renewed for LOCK_BEATS beats counts as abandoned.
#pragma once
#include <sys/file.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

constexpr int LOCK_BEATS = 6;
using LockCall = int (*)(int fd, int operation);  // flock

// Creates missing directories and remembers them, outermost first. The destructor removes those that are still empty.
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
    // Used only if the file system has no locks:
    std::thread renewing;
    std::mutex mutex;
    std::condition_variable changed;
    bool ending = false;

    // Creates the directory if it is missing. Refuses (EXIT_CANNOT_CREATE) a directory that another run uses; the error
    // names that run's pid, host and start time. Only tests give `lock` and `beat_seconds`.
    explicit OutputLock(const std::string& output, LockCall lock = flock, double beat_seconds = 20.0);
    OutputLock(const OutputLock&) = delete;
    ~OutputLock();

    // False if the directory, or run.lock in it, was moved or removed: another run may now use that name.
    bool still_held() const;

    void renew(double beat_seconds);
};
