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
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
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

#ifdef __x86_64__
// The kind of a system call that just returned: w(rites or creates), s(yncs), r(enames), u(nlinks), or 0 for others.
inline char kind_of_change(const user_regs_struct& regs) {
    const long call = long(regs.orig_rax);
    const bool creates = (call == SYS_openat ? regs.rdx : regs.rsi) & O_CREAT;
    if (static_cast<long long>(regs.rax) < 0) return 0;
    if (call == SYS_openat || call == SYS_open) return creates ? 'w' : 0;
    for (const auto& [kind, calls] : {std::pair{'w', std::vector{SYS_write, SYS_writev, SYS_mkdir, SYS_mkdirat}},
                                      {'s', {SYS_fsync, SYS_fdatasync}},
                                      {'r', {SYS_rename, SYS_renameat, SYS_renameat2}},
                                      {'u', {SYS_unlink, SYS_unlinkat, SYS_rmdir}}})
        if (std::count(calls.begin(), calls.end(), call)) return kind;
    return 0;
}
#endif

struct FaultResult {
    int code;      // exit code, as in_child returns it; CHILD_SKIPPED where ptrace is not permitted
    bool reached;  // f made an n-th call
    long call;     // its number
};

// Runs f in a child process and replaces its n-th system call on files (from 0) by a fault: the child is killed
// (error 0), or the call fails with `error`. n = -1: no fault. changes: gets the kinds of the changes that the child's
// main thread makes to files, in their order (on x86-64 only).
inline FaultResult with_fault(const std::function<int()>& f, int n, int error, std::string* changes = nullptr) {
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
            } else if (const char kind = kind_of_change(regs); !entry && changes && kind) {
                *changes += kind;
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
        const bool reported = result.code == EXIT_IO || result.code == EXIT_CANNOT_CREATE;
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
