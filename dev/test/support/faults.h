// faults.h: runs code in a child process under a fault: the process is killed or a system call fails, the disk is full,
// or the user lacks permissions. It can also record which files the child changes. For tests that no fault loses data.
#pragma once
#include <fcntl.h>
#include <grp.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>
#include <vector>

#include <doctest/doctest.h>

#include "base/common.h"
#include "support/skip.h"
#include "support/temporary.h"

constexpr int CHILD_SKIPPED = 99;  // exit code of a child that lacks the permission to set up its fault

// The result of f, or the exit code of the Error that f throws. For the child process.
inline int child_result(const std::function<int()>& f) {
    omp_set_num_threads(1);  // a forked process does not have the OpenMP threads of its parent
    try {
        return f();
    } catch (const Error& error) {
        return error.exit_code;
    } catch (...) {
        return EXIT_INTERNAL;
    }
}

inline int exit_code_of_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// Runs f in a child process. Returns the exit code: child_result, or 128 + the signal that ended the child.
inline int in_child(const std::function<int()>& f) {
    const pid_t child = fork();
    if (child == 0) _exit(child_result(f));
    int status = 0;
    return waitpid(child, &status, 0) < 0 ? CHILD_SKIPPED : exit_code_of_status(status);
}

// Runs f in a child process, where `set_up` changes what f may do. f returns the number of the failed check, or 0.
// Where set_up returns false the case is skipped, and the result is 0.
inline int in_changed_child(const char* change, const std::function<bool()>& set_up, const std::function<int()>& f) {
    const int code = in_child([&] { return set_up() ? f() : CHILD_SKIPPED; });
    if (code == CHILD_SKIPPED) skip_case(std::string(change) + " is not permitted here");
    return code == CHILD_SKIPPED ? 0 : code;
}

// f runs as a user to whom permissions apply, and who owns `dir` and its contents.
inline int as_ordinary_user(const std::string& dir, const std::function<int()>& f) {
    namespace fs = std::filesystem;
    const auto become_ordinary = [&] {
        const uid_t nobody = 65534;
        if (geteuid() != 0) return true;
        bool owns = chown(dir.c_str(), nobody, nobody) == 0;
        for (const auto& entry : fs::recursive_directory_iterator(dir))
            owns = lchown(entry.path().c_str(), nobody, nobody) == 0 && owns;
        return owns && setgroups(0, nullptr) == 0 && setgid(nobody) == 0 && setuid(nobody) == 0 &&
               access(dir.c_str(), R_OK | W_OK | X_OK) == 0;
    };
    const int code = in_changed_child("becoming an ordinary user", become_ordinary, f);
    for (const auto& entry : fs::recursive_directory_iterator(dir))  // so that it can be removed
        if (entry.is_directory()) fs::permissions(entry.path(), fs::perms::owner_all);
    return code;
}

// f sees a file system of the given size in place of `dir`.
inline int on_small_disk(const std::string& dir, const char* size, const std::function<int()>& f) {
    const auto mount_it = [&] {
        if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
        return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               mount("none", dir.c_str(), "tmpfs", 0, (std::string("size=") + size).c_str()) == 0;
    };
    return in_changed_child("mounting a small disk", mount_it, f);
}

// In the child: limits the size of every file that it writes.
inline void limit_file_size(int64_t bytes) {
    signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG
    const rlimit limit{rlim_t(bytes), rlim_t(bytes)};
    setrlimit(RLIMIT_FSIZE, &limit);
}

// Whether with_fault can interrupt the child at this system call on files. A kill between two changes of files leaves
// what a kill at the second one leaves, so it counts only calls that may change them.
inline bool is_file_call(long number, bool may_change) {
    static const std::vector<long> changes = {
        SYS_write, SYS_pwrite64, SYS_openat,   SYS_renameat2, SYS_unlinkat, SYS_mkdirat,
#ifdef __x86_64__
        SYS_open,  SYS_rename,   SYS_renameat, SYS_unlink,    SYS_rmdir,    SYS_mkdir,
#endif
    };
    static const std::vector<long> others = {
        SYS_fsync,      SYS_fdatasync, SYS_close, SYS_getdents64, SYS_statfs,
        SYS_fstatfs,    SYS_pread64,   SYS_fstat, SYS_read,
#ifdef __x86_64__
        SYS_newfstatat, SYS_stat,      SYS_lstat,
#endif
    };
    const auto has = [&](const std::vector<long>& calls) { return std::count(calls.begin(), calls.end(), number) > 0; };
    return has(changes) || (!may_change && has(others));
}

// A successful system call that changed a file or flushed it to disk. `create` is for files and directories; `to` is
// the new name in a rename.
struct FileChange {
    enum Kind { create, write, sync, rename, remove } kind;
    std::string path, to;
};

#ifdef __x86_64__
// Describes the system call that just returned. Returns false if it is none of FileChange's kinds. Relative paths of
// the child become absolute.
inline bool describe_change(pid_t child, const user_regs_struct& regs, FileChange& change) {
    using Register = unsigned long long;
    const Register call = regs.orig_rax, first = regs.rdi, second = regs.rsi, here = Register(AT_FDCWD);
    const std::string proc = "/proc/" + std::to_string(child);
    const auto of_fd = [&](Register fd) {
        std::error_code ignored;
        const std::string link = int(fd) == AT_FDCWD ? "/cwd" : "/fd/" + std::to_string(int(fd));
        return std::filesystem::read_symlink(proc + link, ignored).string();
    };
    const auto path_at = [&](Register fd, Register at) {
        std::string text;
        std::getline(std::ifstream(proc + "/mem", std::ios::binary).seekg(std::streamoff(at)), text, '\0');
        return (std::filesystem::path(of_fd(fd)) / text).lexically_normal().string();  // text may be an absolute path
    };
    const auto is = [&](FileChange::Kind kind, const std::string& path, const std::string& to = "") {
        change = {kind, path, to};
        return true;
    };
    if (static_cast<long long>(regs.rax) < 0) return false;
    if (call == SYS_openat) return (regs.rdx & O_CREAT) && is(FileChange::create, path_at(first, second));
    if (call == SYS_open) return (second & O_CREAT) && is(FileChange::create, path_at(here, first));
    if (call == SYS_mkdir) return is(FileChange::create, path_at(here, first));
    if (call == SYS_mkdirat) return is(FileChange::create, path_at(first, second));
    if (call == SYS_fsync || call == SYS_fdatasync) return is(FileChange::sync, of_fd(first));
    if (call == SYS_rename) return is(FileChange::rename, path_at(here, first), path_at(here, second));
    if (call == SYS_renameat || call == SYS_renameat2)
        return is(FileChange::rename, path_at(first, second), path_at(regs.rdx, regs.r10));
    if (call == SYS_unlink || call == SYS_rmdir) return is(FileChange::remove, path_at(here, first));
    if (call == SYS_unlinkat) return is(FileChange::remove, path_at(first, second));
    for (const Register write : {SYS_write, SYS_writev, SYS_pwrite64, SYS_ftruncate})
        if (call == write) return is(FileChange::write, of_fd(first));
    return false;
}
#endif

struct FaultResult {
    int code;      // exit code, as in_child returns it; CHILD_SKIPPED where ptrace is not permitted
    bool reached;  // f made an n-th call
    long call;     // its number
};

// Runs f in a child process and replaces its n-th system call on files (from 0) by a fault: the child is killed
// (error 0), or the call fails with `error`. n = -1: no fault. changes: gets the changes that the child's main thread
// makes to files (on x86-64 only).
inline FaultResult with_fault(const std::function<int()>& f, int n, int error,
                              std::vector<FileChange>* changes = nullptr) {
    const pid_t child = fork();
    if (child == 0) {
        omp_set_num_threads(1);  // clang's OpenMP opens files at its first call: before the calls of f are counted
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(CHILD_SKIPPED);
        raise(SIGSTOP);
        _exit(child_result(f));
    }
    FaultResult result{CHILD_SKIPPED, false, 0};
    if (child < 0) return result;  // kill(-1) would signal every process
    int status = 0, seen = 0;
    waitpid(child, &status, 0);
    if (WIFSTOPPED(status)) ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    bool entry = false, failing = false;
    while (WIFSTOPPED(status)) {
        const bool syscall_stop = WSTOPSIG(status) == (SIGTRAP | 0x80);
        auto next = PTRACE_SYSCALL;
        if (syscall_stop) entry = !entry;
#ifdef __x86_64__
        if (syscall_stop) {
            user_regs_struct regs;
            ptrace(PTRACE_GETREGS, child, nullptr, &regs);
            const long number = long(regs.orig_rax);
            if (entry && is_file_call(number, error == 0) && seen++ == n) {
                result.reached = true, result.call = number;
                if (error == 0) kill(child, SIGKILL);
                failing = error != 0;
                if (failing) regs.orig_rax = ~0ull;
                ptrace(PTRACE_SETREGS, child, nullptr, &regs);
            } else if (!entry && failing) {
                regs.rax = static_cast<unsigned long long>(-error);
                ptrace(PTRACE_SETREGS, child, nullptr, &regs);
                next = PTRACE_DETACH;  // the child's other calls need no stop
            } else if (FileChange change; !entry && changes && describe_change(child, regs, change)) {
                changes->push_back(change);
            }
        }
#else
        if (syscall_stop && entry && error == 0 && seen++ == n) {  // any call; errors are injected on x86-64 only
            result.reached = true;
            kill(child, SIGKILL);
        }
        (void)failing, (void)changes;
#endif
        const bool own_stop = syscall_stop || WSTOPSIG(status) == SIGSTOP || WSTOPSIG(status) == SIGTRAP;
        ptrace(next, child, nullptr, own_stop ? 0 : WSTOPSIG(status));
        waitpid(child, &status, 0);
    }
    result.code = exit_code_of_status(status);
    return result;
}

// A test that interrupts the code `run` at its system calls, in a new directory each time.
struct FaultTest {
    int least_calls;                                         // that `run` makes on x86-64; half of them change files
    std::function<void(const TemporaryDirectory&)> prepare;  // before `run`
    std::function<void(const TemporaryDirectory&)> run;      // in the child process
    std::function<void(const TemporaryDirectory&, const FaultResult&)> check;  // checks what the fault left behind
    std::vector<int> codes = {EXIT_IO, EXIT_CANNOT_CREATE};  // exit codes with which `run` may report a failed call
};

// Runs the test with a fault at each system call of test.run in turn (with_fault). Returns false where ptrace is not
// permitted; the case is then skipped.
inline bool fault_at_each_call(int error, const FaultTest& test) {
    for (int n = 0;; n++) {
        const TemporaryDirectory dir;
        test.prepare(dir);
        const FaultResult result = with_fault([&] { return test.run(dir), 0; }, n, error);
        if (result.code == CHILD_SKIPPED) {
            skip_case("tracing is not permitted here");
            return false;
        }
        CAPTURE(n);
        CAPTURE(error);
        CAPTURE(result.call);
        const bool reported = std::count(test.codes.begin(), test.codes.end(), result.code) > 0;
        const bool expected = result.reached && error == 0 ? result.code == 128 + SIGKILL
                                                           : result.code == 0 || (result.reached && reported);
        CAPTURE(result.code);
        CHECK(expected);
        test.check(dir, result);
        if (result.reached) continue;
#ifdef __x86_64__
        CHECK(n >= (error == 0 ? test.least_calls / 2 : test.least_calls));
#endif
        return true;
    }
}
