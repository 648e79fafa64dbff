// faults.h: runs code in a child process that is killed, or given an error, at its n-th system call; code that sees a
// full disk; and code whose changes of files are recorded. For tests of what must survive that.
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
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <vector>

#include "base/common.h"

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

// In the child: a user to whom permissions apply, and who owns `dir` and all that is in it; false where that cannot be.
inline bool become_ordinary(const std::string& dir) {
    if (geteuid() != 0) return true;
    const uid_t nobody = 65534;
    bool owns = chown(dir.c_str(), nobody, nobody) == 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir))
        owns = lchown(entry.path().c_str(), nobody, nobody) == 0 && owns;
    return owns && setgroups(0, nullptr) == 0 && setgid(nobody) == 0 && setuid(nobody) == 0 &&
           access(dir.c_str(), R_OK | W_OK | X_OK) == 0;
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

// A call that succeeded and changed files, or brought them to disk. create: of a file or directory; to: of a rename.
struct FileChange {
    enum Kind { create, write, sync, rename, remove } kind;
    std::string path, to;
};

#ifdef __x86_64__
// What the call that just returned did; false: nothing that FileChange knows. Paths of the child are absolute here.
inline bool describe_change(pid_t child, const user_regs_struct& regs, FileChange& change) {
    const auto text = [&](unsigned long long at) {
        std::string out(PATH_MAX, '\0');  // a read that ends at an unmapped page is cut there, not refused
        const long page = 4096, first = std::min<long>(PATH_MAX, page - long(at % page));
        iovec to = {out.data(), out.size()};
        iovec from[2] = {{reinterpret_cast<void*>(at), size_t(first)},
                         {reinterpret_cast<void*>(at + first), size_t(PATH_MAX - first)}};
        process_vm_readv(child, &to, 1, from, 2, 0);
        return std::string(out.c_str());
    };
    const auto link = [&](const std::string& name) {
        std::error_code ignored;
        const auto path = std::filesystem::read_symlink("/proc/" + std::to_string(child) + "/" + name, ignored);
        return path.string();
    };
    const auto of_fd = [&](unsigned long long fd) { return link("fd/" + std::to_string(int(fd))); };
    const auto path_at = [&](unsigned long long fd, unsigned long long at) {
        const std::filesystem::path folder = int(fd) == AT_FDCWD ? link("cwd") : of_fd(fd);
        return (folder / text(at)).lexically_normal().string();  // an absolute path replaces the folder
    };
    constexpr auto here = static_cast<unsigned long long>(AT_FDCWD);
    if (static_cast<long long>(regs.rax) < 0) return false;
    switch (regs.orig_rax) {
        case SYS_openat:
            return change = {FileChange::create, path_at(regs.rdi, regs.rsi), ""}, (regs.rdx & O_CREAT) != 0;
        case SYS_open:
            return change = {FileChange::create, path_at(here, regs.rdi), ""}, (regs.rsi & O_CREAT) != 0;
        case SYS_mkdir:
            return change = {FileChange::create, path_at(here, regs.rdi), ""}, true;
        case SYS_mkdirat:
            return change = {FileChange::create, path_at(regs.rdi, regs.rsi), ""}, true;
        case SYS_write:
        case SYS_writev:
        case SYS_pwrite64:
        case SYS_ftruncate:
            return change = {FileChange::write, of_fd(regs.rdi), ""}, true;
        case SYS_fsync:
        case SYS_fdatasync:
            return change = {FileChange::sync, of_fd(regs.rdi), ""}, true;
        case SYS_rename:
            return change = {FileChange::rename, path_at(here, regs.rdi), path_at(here, regs.rsi)}, true;
        case SYS_renameat:
        case SYS_renameat2:
            return change = {FileChange::rename, path_at(regs.rdi, regs.rsi), path_at(regs.rdx, regs.r10)}, true;
        case SYS_unlink:
        case SYS_rmdir:
            return change = {FileChange::remove, path_at(here, regs.rdi), ""}, true;
        case SYS_unlinkat:
            return change = {FileChange::remove, path_at(regs.rdi, regs.rsi), ""}, true;
        default:
            return false;
    }
}
#endif

struct FaultResult {
    int code;      // what child_result gave; 128 + SIGKILL when it was killed
    bool reached;  // there was an n-th call
    std::string call;
};

// Runs f in a child. Its n-th system call on files (from 0) is not made: the child is killed (error 0), or sees the
// call fail with `error`. A code of CHILD_SKIPPED: tracing is not permitted here. With n = -1 there is no fault;
// changes: what the child's main thread does to files is added (on x86-64 only).
inline FaultResult with_fault(const std::function<int()>& f, int n, int error,
                              std::vector<FileChange>* changes = nullptr) {
    const pid_t child = fork();
    if (child == 0) {
        omp_set_num_threads(1);  // clang's OpenMP opens files when it is first called: not among the calls of f
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
        const int pass_on =
            WSTOPSIG(status) == SIGSTOP || WSTOPSIG(status) == SIGTRAP || syscall_stop ? 0 : WSTOPSIG(status);
        ptrace(PTRACE_SYSCALL, child, nullptr, pass_on);
        waitpid(child, &status, 0);
    }
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return result;
}
