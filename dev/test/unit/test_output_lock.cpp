// test_output_lock.cpp: tests that one run at a time uses an output directory, on file systems with and without flock,
// that the lock of a dead run does not count, and that a run leaves neither its lock nor an empty directory.
#include "base/output_lock.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "base/files.h"
#include "support/faults.h"
#include "support/refusal.h"
#include "support/temporary.h"

static int no_locks(int, int) {
    errno = ENOLCK;
    return -1;
}

constexpr double BEAT = 0.02;  // without flock a lock file older than LOCK_BEATS * BEAT seconds does not count

static void set_age(const std::string& path, time_t seconds) {
    const timespec then = {time(nullptr) - seconds, 0}, times[2] = {then, then};
    REQUIRE(utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
}

TEST_CASE("a second run is refused with pid, host and time of the first, until the first ends") {
    for (const LockCall lock : {LockCall(flock), LockCall(no_locks)}) {
        const TemporaryDirectory dir;
        {
            const OutputLock held(dir / "out", lock, 20.0);
            char host[256];
            REQUIRE(gethostname(host, sizeof(host)) == 0);
            const std::string said = refusal([&] { OutputLock(dir / "out", lock, 20.0); });
            CAPTURE(said);
            CHECK(said.starts_with(format("73 %s is in use by another run: pid %d on %s since 20",
                                          (dir / "out").c_str(), int(getpid()), host)));
            CHECK(said.ends_with("or give another --output"));
            CHECK(list_directory(dir / "out") == std::vector<std::string>{"run.lock"});  // also after the refusal
        }
        CHECK_FALSE(path_exists(dir / "out"));
        make_directories(dir / "out");
        { const OutputLock next(dir / "out", lock, 20.0); }
        CHECK(list_directory(dir / "out").empty());  // a directory that existed before stays
    }
}

TEST_CASE("the lock of a killed process does not count") {
    const TemporaryDirectory dir;
    const int code = in_child([&] {
        const OutputLock held(dir / "out");
        kill(getpid(), SIGKILL);
        return 0;
    });
    CHECK(code == 128 + SIGKILL);
    CHECK(path_exists(dir / "out/run.lock"));
    CHECK(refusal([&] { OutputLock(dir / "out"); }) == "");
}

TEST_CASE("a child process does not keep the lock of its parent") {
    const TemporaryDirectory dir;
    pid_t child = -1;
    {
        const OutputLock held(dir / "out");
        child = fork();
        if (child == 0) execlp("sleep", "sleep", "60", nullptr), _exit(127);
        const std::string comm = format("/proc/%d/comm", int(child));
        for (int i = 0; i < 1000 && read_bytes(comm) != "sleep\n"; i++) usleep(10'000);
    }
    CHECK(refusal([&] { OutputLock(dir / "out"); }) == "");
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
}

TEST_CASE("without flock a live run renews its file, and an old file does not count") {
    const TemporaryDirectory dir;
    const std::string path = dir / "out/run.lock";
    make_directories(dir / "out");
    {
        const OutputLock held(dir / "out", no_locks, BEAT);
        set_age(path, 3600);
        struct stat status = {};
        for (int i = 0; i < 1000; i++) {
            REQUIRE(stat(path.c_str(), &status) == 0);
            if (status.st_mtim.tv_sec > time(nullptr) - 1800) break;
            usleep(10'000);
        }
        CHECK(status.st_mtim.tv_sec > time(nullptr) - 1800);
    }
    write_bytes(path, "pid 1 on a dead host\n");
    set_age(path, 100);
    CHECK(
        refusal([&] { OutputLock(dir / "out", no_locks, 20.0); }) ==
        "73 " + (dir / "out") +
            " is in use by another run: pid 1 on a dead host; wait for it (if it is dead, for at most 120 s), or give "
            "another --output");
    set_age(path, 130);
    CHECK(refusal([&] { OutputLock(dir / "out", no_locks, 20.0); }) == "");
    CHECK(list_directory(dir / "out").empty());
}

TEST_CASE("a paused run that was taken for dead does not remove the lock of the next run") {
    const TemporaryDirectory dir;
    const std::string path = dir / "out/run.lock";
    auto paused = std::make_unique<OutputLock>(dir / "out", no_locks, 20.0);
    set_age(path, 3600);
    const OutputLock successor(dir / "out", no_locks, 20.0);
    paused.reset();
    CHECK(path_exists(path));
    CHECK(refusal([&] { OutputLock(dir / "out", no_locks, 20.0); }).starts_with("73 "));
}

TEST_CASE("a lock is lost if its file or directory is moved or removed") {
    const TemporaryDirectory dir;
    const std::string out = dir / "out";
    const OutputLock lock(out);
    CHECK(lock.still_held());
    rename_path(out, dir / "gone");
    CHECK_FALSE(lock.still_held());
    {
        const OutputLock next(out);  // of another run
        CHECK_FALSE(lock.still_held());
        CHECK(next.still_held());
    }
    rename_path(dir / "gone", out);
    CHECK(lock.still_held());
    remove_tree(lock.path);
    CHECK_FALSE(lock.still_held());
    remove_tree(out);
    CHECK_FALSE(lock.still_held());
}

TEST_CASE("an output that cannot be created or locked is EXIT_CANNOT_CREATE, and leaves nothing") {
    const TemporaryDirectory dir;
    write_bytes(dir / "file", "x");
    CHECK(refusal([&] { OutputLock(dir / "file/out"); }).starts_with("73 "));
    CHECK(refusal([&] { OutputLock("/proc/none"); }).starts_with("73 "));
    make_directories(dir / "out/run.lock");
    CHECK(refusal([&] { OutputLock(dir / "out"); }).starts_with("73 " + (dir / "out/run.lock") + ": cannot open"));
    remove_tree(dir / "out/run.lock");
    REQUIRE(symlink("nowhere", (dir / "out/run.lock").c_str()) == 0);
    CHECK(refusal([&] { OutputLock(dir / "out"); }).starts_with("73 "));
    CHECK(list_directory(dir.path) == std::vector<std::string>{"file", "out"});
}

TEST_CASE("an output that is a file or below a file is refused, and the message says so") {
    const TemporaryDirectory dir;
    write_bytes(dir / "file", "x");
    REQUIRE(mkfifo((dir / "pipe").c_str(), 0600) == 0);
    REQUIRE(symlink("nowhere", (dir / "dangling").c_str()) == 0);
    REQUIRE(symlink("file", (dir / "link").c_str()) == 0);
    const auto refused = [&](const std::string& name, const std::string& what) {
        CHECK(refusal([&] { OutputLock(dir / name); }) == "73 --output " + (dir / name) + what);
    };
    const std::string other = "; give another name", no_link =
                                                         " is a link to nowhere, which does not exist; make that "
                                                         "directory, or give another name";
    refused("file", " is a file, not a directory" + other);
    refused("link", " is a file, not a directory" + other);
    refused("pipe", " is a pipe, not a directory" + other);
    refused("file/", ": " + (dir / "file") + " is a file, not a directory" + other);
    refused("file/a/b", ": " + (dir / "file") + " is a file, not a directory" + other);
    refused("dangling", no_link);
    refused("dangling/a", ": " + (dir / "dangling") + no_link);
    CHECK(list_directory(dir.path) == std::vector<std::string>{"dangling", "file", "link", "pipe"});
}

TEST_CASE("an output whose name is too long for the files of a checkpoint is refused") {
    const TemporaryDirectory dir;
    const std::string file = "/step_2147483647.10.tmp/generation_config.json";
    std::string out = dir.path;
    while (out.size() + file.size() + 100 < PATH_MAX) out += "/" + std::string(49, 'x');
    out += "/" + std::string(PATH_MAX - out.size() - file.size() - 2, 'y');
    const std::string said = refusal([&] { OutputLock(out + "y"); });
    CHECK(said.starts_with("73 " + dir.path));
    CHECK(said.ends_with(format("give a name of at most %zu bytes", out.size())));
    CHECK(list_directory(dir.path).empty());
    const OutputLock lock(out);
    make_directories(parent_directory(out + file));
    write_file(out + file, "x");
}

TEST_CASE("a relative output in a directory without search permission is refused at once") {
    const TemporaryDirectory dir;
    const int failed = as_ordinary_user(dir.path, [&] {
        if (chdir(dir.path.c_str()) != 0) return CHILD_SKIPPED;
        chmod(dir.path.c_str(), 0);
        alarm(20);
        const std::string said = refusal([] { OutputLock("out"); });
        chmod(dir.path.c_str(), 0700);
        return said.starts_with("73 .: ") && said.ends_with("Permission denied") ? 0 : 1;
    });
    CHECK(failed == 0);
}

TEST_CASE("a lock removes the directories that it created if they are empty") {
    const TemporaryDirectory dir;
    { const OutputLock held(dir / "a/b/c"); }
    CHECK(list_directory(dir.path).empty());
    {
        const OutputLock held(dir / "a/b/c");
        write_bytes(dir / "a/b/kept", "x");
    }
    CHECK(list_directory(dir / "a/b") == std::vector<std::string>{"kept"});
}

TEST_CASE("a run gets its lock on a full disk") {
    const TemporaryDirectory dir;
    const int failed = on_small_disk(dir.path, "64k", [&] {
        make_directories(dir / "out");
        refusal([&] {
            OutputFile file(dir / "ballast");
            for (;;) file.write(std::string(4096, 'x').data(), 4096);
        });
        const OutputLock held(dir / "out");
        const std::string said = refusal([&] { OutputLock(dir / "out"); });
        return said.find("run.lock does not name the process") == std::string::npos ? 1 : 0;
    });
    CHECK(failed == 0);
}
