// faults.h: runs code in a child process that is killed, or given an error, at its n-th system call; and code that sees
// a full disk. For tests of what must survive that.
#pragma once
#include <fcntl.h>
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

#include <cerrno>
#include <functional>
#include <string>

#include "../../llmc/common.h"

constexpr int CHILD_SKIPPED = 99;  // the child found that this machine does not allow what it needs

// What f returns, or the exit code of the Error that it throws, in a process of its own.
inline int child_result(const std::function<int()>& f) {
    omp_set_num_threads(1);  // the threads of the parent's pool are not there after a fork
    try {
        return f();
    } catch (const Error& error) {
        return error.exit_code;
    } catch (...) {
        return EXIT_INTERNAL;
    }
}

inline int in_child(const std::function<int()>& f) {
    const pid_t child = fork();
    if (child == 0) _exit(child_result(f));
    if (child < 0) return CHILD_SKIPPED;
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// In the child: no file may become larger than that.
inline void limit_file_size(int64_t bytes) {
    signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG
    const rlimit limit{rlim_t(bytes), rlim_t(bytes)};
    setrlimit(RLIMIT_FSIZE, &limit);
}

// In the child: a file system of that size in place of dir; false where mounting is not permitted.
inline bool mount_small_disk(const std::string& dir, const char* size) {
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount("none", dir.c_str(), "tmpfs", 0, (std::string("size=") + size).c_str()) == 0;
}

// The system calls that touch files, which are the ones that can fail.
inline bool is_file_call(long number) {
    for (long call :
         {SYS_write,    SYS_pwrite64, SYS_fsync,      SYS_fdatasync, SYS_close,   SYS_openat,  SYS_renameat2,
          SYS_unlinkat, SYS_mkdirat,  SYS_getdents64, SYS_statfs,    SYS_fstatfs, SYS_pread64, SYS_fstat,
#ifdef __x86_64__
          SYS_open,     SYS_rename,   SYS_renameat,   SYS_unlink,    SYS_rmdir,   SYS_mkdir,   SYS_newfstatat,
          SYS_stat,     SYS_lstat,
#endif
          SYS_read})
        if (number == call) return true;
    return false;
}

struct FaultResult {
    int code;      // what child_result gave; 128 + SIGKILL when it was killed
    bool reached;  // there was an n-th call
    std::string call;
};

// Runs f in a child. Its n-th system call on files (from 0) is not made: the child is killed (error 0), or sees the
// call fail with `error`. A code of CHILD_SKIPPED: tracing is not permitted here.
inline FaultResult with_fault(const std::function<int()>& f, int n, int error) {
    const pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(CHILD_SKIPPED);
        raise(SIGSTOP);
        _exit(child_result(f));
    }
    FaultResult result{CHILD_SKIPPED, false, ""};
    if (child < 0) return result;  // and never kill(-1): that is everybody
    int status = 0, seen = 0;
    waitpid(child, &status, 0);
    if (WIFSTOPPED(status)) ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    bool entry = false, failing = false;
    while (WIFSTOPPED(status)) {
        const bool syscall_stop = WSTOPSIG(status) == (SIGTRAP | 0x80);
        if (syscall_stop) entry = !entry;
#ifdef __x86_64__
        if (syscall_stop) {
            user_regs_struct regs;
            ptrace(PTRACE_GETREGS, child, nullptr, &regs);
            const long number = long(regs.orig_rax);
            if (entry && is_file_call(number) && seen++ == n) {
                result.reached = true, result.call = std::to_string(number);
                if (error == 0) kill(child, SIGKILL);
                failing = error != 0;
                regs.orig_rax = failing ? ~0ull : regs.orig_rax;
                ptrace(PTRACE_SETREGS, child, nullptr, &regs);
            } else if (!entry && failing) {
                failing = false;
                regs.rax = static_cast<unsigned long long>(-error);
                ptrace(PTRACE_SETREGS, child, nullptr, &regs);
            }
        }
#else
        if (syscall_stop && entry && error == 0 && seen++ == n) {  // any call; errors are injected on x86-64 only
            result.reached = true;
            kill(child, SIGKILL);
        }
        (void)failing;
#endif
        const int pass_on =
            WSTOPSIG(status) == SIGSTOP || WSTOPSIG(status) == SIGTRAP || syscall_stop ? 0 : WSTOPSIG(status);
        ptrace(PTRACE_SYSCALL, child, nullptr, pass_on);
        waitpid(child, &status, 0);
    }
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
}
