// memory_directory.h: the directory of a fuzzer that writes files. It is in memory, if possible: on a disk, fsync takes
// milliseconds.
#pragma once
#include <unistd.h>

#include <cstdlib>

#include "support/temporary.h"

inline const TemporaryDirectory& memory_directory() {
    static const TemporaryDirectory directory = [] {
        if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
        return TemporaryDirectory();
    }();
    return directory;
}
