#include "parallel/local_ranks.h"

#include <fcntl.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/common.h"
#include "base/terminal.h"

// A program that ends a job may send its signal to a process and then to the process's group: that is one request.
static constexpr double SAME_REQUEST = 0.5;  // seconds
// mpirun loses a signal that it gets before it has started its ranks, so a request is repeated after this time, then
// after twice the time, and so on, until a rank says that it stops. A rank takes all of them as one request, but they
// would end an mpirun whose ranks have ended.
static constexpr double FIRST_REPEAT = 1;        // seconds
static constexpr size_t LONGEST_LINE = 1 << 16;  // bytes; a longer line is printed in pieces
// An error waits this long for other ranks that print the same, unless all ranks end before.
static constexpr double ERROR_WAITS = 1;  // seconds

// ---- signals

static constexpr int handled[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD};
static struct sigaction before[std::size(handled)];  // the caller's actions
static sigset_t mask_before;
static volatile sig_atomic_t arrived[NSIG];
static int first_request;
static double first_request_time;

static void on_signal(int number) { arrived[number] = 1; }

// The signals are blocked except while this process waits in pselect. None can arrive between a check and the wait.
Supervisor::Supervisor() {
    sigset_t mask;
    sigemptyset(&mask);
    for (int number : handled) {
        sigaddset(&mask, number);
        arrived[number] = 0;
    }
    sigprocmask(SIG_BLOCK, &mask, &mask_before);
    struct sigaction action = {};
    action.sa_handler = on_signal;
    for (size_t i = 0; i < std::size(handled); i++) {
        sigaction(handled[i], nullptr, &before[i]);
        if (before[i].sa_handler != SIG_IGN || handled[i] == SIGCHLD) sigaction(handled[i], &action, nullptr);
    }
    first_request = 0;
}

static void restore_signals() {
    for (size_t i = 0; i < std::size(handled); i++) sigaction(handled[i], &before[i], nullptr);
    sigprocmask(SIG_SETMASK, &mask_before, nullptr);
}

int Supervisor::request() const { return first_request; }

Supervisor::~Supervisor() { restore_signals(); }

namespace {
struct Ready {
    fd_set readable, writable;
};
}  // namespace

// Waits until a file can be read or written, a signal arrives or the time has come.
static Ready wait_for_files(const std::vector<int>& read, const std::vector<int>& written, double seconds) {
    Ready ready;
    int most = -1;
    for (const auto& [files, set] : {std::pair(&read, &ready.readable), {&written, &ready.writable}}) {
        FD_ZERO(set);
        for (int file : *files) {
            FD_SET(file, set);
            most = std::max(most, file);
        }
    }
    const double whole = std::floor(seconds);
    const timespec limit = {time_t(whole), long(1e9 * (seconds - whole))};
    if (pselect(most + 1, &ready.readable, &ready.writable, nullptr, &limit, &mask_before) < 0) {
        FD_ZERO(&ready.readable);
        FD_ZERO(&ready.writable);
    }
    return ready;
}

namespace {
enum class Request { none, stop, end };
}

// What the signals ask that have arrived since the last call.
static Request take_request() {
    Request request = Request::none;
    for (int number : {SIGUSR1, SIGINT, SIGTERM, SIGHUP}) {
        if (!arrived[number]) continue;
        arrived[number] = 0;
        const double now = seconds_now();
        const bool again = first_request != 0 && first_request != SIGUSR1 && now - first_request_time > SAME_REQUEST;
        if (request != Request::end) request = again && number != SIGUSR1 ? Request::end : Request::stop;
        if (first_request == 0 || (first_request == SIGUSR1 && number != SIGUSR1))
            first_request = number, first_request_time = now;
    }
    return request;
}

bool Supervisor::pause(double seconds) {
    const double end = seconds_now() + seconds;
    while (first_request == 0 && seconds_now() < end) {
        wait_for_files({}, {}, end - seconds_now());
        take_request();
    }
    return first_request == 0;
}

// ---- output of the ranks

namespace {
// The stdout or stderr of a rank.
struct Stream {
    int file = -1;  // the end of the pipe that this process reads; -1: there is none, or the rank has closed its end
    int to = 1;
    std::string rest;    // the beginning of a line
    std::string notice;  // lines of mpirun, from a line of dashes to the next such line
    int error = -1;      // index in Ranks::errors of the error whose lines are being read
};

// What this process still has to write to its stdout or stderr. A reader that does not read, such as `less`, must not
// block this process, which handles signals; nor may one that has ended.
struct Output {
    std::string waiting;
    bool broken = false;
};

struct RankProcess {
    int rank = 0;
    pid_t pid = -1;
    bool running = false;
    bool stopped = false;  // by SIGSTOP or the like
    Stream out, err;
};

// A line "error: rank 3 on h1: TEXT", which other ranks may print as well. Lines after it that begin with two spaces
// belong to it.
struct RankError {
    int rank;
    std::string text;  // " on h1: TEXT"
    int to = 2;
    double print_time = 0;
    bool printed = false;
};

struct Ranks {
    const LocalRanks& options;
    std::vector<RankProcess> processes;
    std::vector<RankError> errors;
    std::set<std::string> printed;  // errors that name no rank
    int lost_rank = -1;             // the rank that a signal has ended, as mpirun says; -1: unknown
    Output outputs[2];
    Outcome outcome;
    bool preempted = false;
    bool ended = false;             // by a second signal
    double repeat_time = INFINITY;  // when the request to stop is repeated
    double repeat_pause = FIRST_REPEAT;
    double kill_time = INFINITY;          // when the remaining ranks are killed
    double stopped_kill_time = INFINITY;  // when those of them are killed that are stopped
    double next_look = 0.0;               // at the ranks that are left
    bool had_ranks = false;               // this process has seen ranks of its program
    double only_stopped_since = INFINITY, without_ranks_since = INFINITY;
};
}  // namespace

static void print(Ranks& ranks, int to, const std::string& text) {
    Output& output = ranks.outputs[to - 1];
    if (!output.broken) output.waiting += text;
}

static std::vector<int> files_to_write(const Ranks& ranks) {
    std::vector<int> files;
    for (int to : {1, 2})
        if (!ranks.outputs[to - 1].waiting.empty()) files.push_back(to);
    return files;
}

// Returns where the line names the rank: "rank 3", but not "rank 31".
static size_t find_rank(const std::string& line, const std::string& name) {
    for (size_t at = line.find(name); at != std::string::npos; at = line.find(name, at + 1))
        if (at + name.size() == line.size() || !isdigit(uint8_t(line[at + name.size()]))) return at;
    return std::string::npos;
}

// "rank 3", "ranks 0 and 3", "ranks 0 to 6 and 8"
static std::string list_ranks(const std::set<int>& ranks) {
    std::vector<std::string> parts;
    for (auto first = ranks.begin(); first != ranks.end();) {
        auto last = first;
        for (auto next = std::next(last); next != ranks.end() && *next == *last + 1; next++) last = next;
        if (*last - *first >= 2)
            parts.push_back(format("%d to %d", *first, *last));
        else
            for (int rank = *first; rank <= *last; rank++) parts.push_back(std::to_string(rank));
        first = std::next(last);
    }
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < parts.size(); i++) text += (i == 0 ? "" : i + 1 < parts.size() ? ", " : " and ") + parts[i];
    return text;
}

// The first rank's live line may be where a line of a rank is printed.
static void print_whole_line(Ranks& ranks, int to, const std::string& line) {
    const bool may_be_live = ranks.options.program.empty() && isatty(to);
    print(ranks, to, (may_be_live ? "\r\033[K" : "") + line + "\n");
}

static constexpr std::string_view RANKS_ERROR = "error: rank ";  // each error of a rank begins with these words

// Puts a line break before each error of a rank that follows other text. The mpirun of Open MPI 5 can write the last
// text of a rank's stdout into stderr, and that text may have no line break at its end.
static void begin_line_at_error(std::string& text) {
    for (size_t at = 1; (at = text.find(RANKS_ERROR, at)) != text.npos; at += RANKS_ERROR.size())
        if (text[at - 1] != '\n') text.insert(at++, 1, '\n');
}

// Keeps the lines of an error until print_errors. Returns false for other lines.
static bool keep_error(Ranks& ranks, Stream& stream, const std::string& line) {
    if (stream.error >= 0 && line.starts_with("  ") && !ranks.errors[size_t(stream.error)].printed) {
        ranks.errors[size_t(stream.error)].text += "\n" + line;
        return true;
    }
    stream.error = -1;
    const size_t number = RANKS_ERROR.size();
    if (!line.starts_with(RANKS_ERROR) || number == line.size() || !isdigit(uint8_t(line[number]))) return false;
    char* end = nullptr;
    const int rank = int(strtol(line.c_str() + number, &end, 10));
    stream.error = narrow(int64_t(ranks.errors.size()));
    const double wait = strstr(end, (": " + std::string(NO_PROGRESS)).c_str()) ? 0.0 : ERROR_WAITS;
    ranks.errors.push_back({rank, end, stream.to, seconds_now() + wait, false});
    return true;
}

// Prints the errors that other ranks may have printed until `time`.
static void print_errors(Ranks& ranks, double time) {
    for (const RankError& error : ranks.errors) {
        if (error.printed || error.print_time > time) continue;
        std::set<int> same;
        bool printed = false;
        for (RankError& other : ranks.errors) {
            if (other.text != error.text) continue;
            same.insert(other.rank);
            printed |= std::exchange(other.printed, true);
        }
        if (!printed) print_whole_line(ranks, error.to, "error: " + list_ranks(same) + error.text);
    }
}

// The time at which print_errors will have something to print; INFINITY: no error waits.
static double next_error_time(const Ranks& ranks) {
    double next = INFINITY;
    for (const RankError& error : ranks.errors)
        if (!error.printed) next = std::min(next, error.print_time);
    return next;
}

static void print_line(Ranks& ranks, const RankProcess& process, Stream& stream, const std::string& line) {
    const int to = stream.to;
    const std::string name = format("rank %d", process.rank);
    if (line.starts_with(STOPPING)) ranks.repeat_time = INFINITY;
    if (keep_error(ranks, stream, line)) return;
    if (ranks.options.program.empty() && find_rank(line, name) == std::string::npos)
        return print_whole_line(ranks, to, name + ": " + line);
    if (line.starts_with("error: ") && !ranks.printed.insert(line).second) return;
    print_whole_line(ranks, to, line);
}

// Takes a whole notice of mpirun. Those about ranks that end are not printed, because the ranks and note_end say the
// same in one sentence, and others are printed as they are.
static void take_notice(Ranks& ranks, Stream& stream) {
    const std::string notice = std::exchange(stream.notice, "");
    constexpr std::string_view about_signal = "noticed that process rank ";  // rank 1 with PID 4711 on node h1 exited
    if (const size_t at = notice.find(about_signal); at != notice.npos) {
        if (ranks.lost_rank < 0) ranks.lost_rank = atoi(notice.c_str() + at + about_signal.size());
        return;
    }
    for (const char* about_end : {"Primary job", "MPI_ABORT was invoked", "processes exited with non-zero status"})
        if (notice.find(about_end) != notice.npos) return;
    print(ranks, stream.to, notice);
}

// Open MPI 4 prints such a line if it loses one of its notices, usually the one about a rank that ends:
//   [h1:4711] [[4175,0],0] ORTE_ERROR_LOG: Data unpack would read past end of buffer in file .../show_help.c at line
//   513
static bool is_about_lost_notice(const std::string& line) {
    return line.find("] ORTE_ERROR_LOG: ") != line.npos && line.find("/show_help.c at line ") != line.npos;
}

// Keeps the lines of a notice of mpirun until it is complete. Returns false for the ranks' lines.
static bool keep_notice(Ranks& ranks, Stream& stream, const std::string& line) {
    if (ranks.options.program.empty() || stream.to != 2) return false;
    if (line.starts_with("mpirun: Forwarding signal ") || is_about_lost_notice(line)) return true;
    constexpr size_t dashes = 70;  // at least; Open MPI 4 prints 74
    const bool is_rule = line.size() >= dashes && line.find_first_not_of('-') == line.npos;
    if (stream.notice.empty() && !is_rule) return false;
    const bool is_whole = is_rule && !stream.notice.empty();
    stream.notice += line + "\n";
    if (is_whole || stream.notice.size() > LONGEST_LINE) take_notice(ranks, stream);
    return true;
}

static void close_stream(Ranks& ranks, RankProcess& process, Stream& stream) {
    if (!stream.notice.empty()) take_notice(ranks, stream);
    if (!stream.rest.empty()) print_line(ranks, process, stream, stream.rest);
    stream.rest.clear();
    if (stream.file >= 0) close(stream.file);
    stream.file = -1;
}

// Reads what the rank has written; prints the whole lines.
static void relay(Ranks& ranks, RankProcess& process, Stream& stream) {
    char buffer[8192];
    while (stream.file >= 0) {
        const ssize_t got = read(stream.file, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) return close_stream(ranks, process, stream);
        stream.rest.append(buffer, size_t(got));
        std::erase(stream.rest, '\0');  // the mpirun of Open MPI 5 ends its own messages with one
        if (!ranks.options.program.empty() && stream.to == 2) begin_line_at_error(stream.rest);
        for (size_t end; (end = stream.rest.find('\n')) != std::string::npos; stream.rest.erase(0, end + 1))
            if (const std::string line = stream.rest.substr(0, end); !keep_notice(ranks, stream, line))
                print_line(ranks, process, stream, line);
        if (stream.rest.size() > LONGEST_LINE) {
            print_line(ranks, process, stream, stream.rest);
            stream.rest.clear();
        }
        // A live line of a program's first rank, which has no end.
        if (!ranks.options.program.empty() && stream.rest.find('\r') != std::string::npos)
            print(ranks, stream.to, std::exchange(stream.rest, ""));
    }
}

// ---- processes

static int errors_to_supervisor = -1;  // in the process of the first rank: a pipe

void send_errors_to_supervisor() {
    if (errors_to_supervisor < 0) return;
    fflush(stderr);
    dup2(errors_to_supervisor, 2);
    close(errors_to_supervisor);
    errors_to_supervisor = -1;
}

// Runs in the new process: undoes what this file changed in the process that it was forked from.
static void become_rank(const Ranks& ranks, int index, pid_t parent, const int (&write_ends)[2]) {
    restore_signals();
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, ranks.options.end_signal);
    if (getppid() != parent) _exit(EXIT_INTERNAL);  // it ended before prctl
#else
    (void)parent;
#endif
    if (ranks.options.own_group) setpgid(0, 0);
    const bool keeps_streams = index == 0 && ranks.options.program.empty();
    if (keeps_streams) errors_to_supervisor = write_ends[1];
    for (int i = 0; i < 2 && !keeps_streams; i++) dup2(write_ends[i], i + 1), close(write_ends[i]);
    for (const RankProcess& other : ranks.processes)
        for (const int file : {other.out.file, other.err.file})
            if (file >= 0) close(file);
}

static void start(Ranks& ranks, int index) {
    RankProcess& process = ranks.processes[size_t(index)];
    process.rank = ranks.options.first_rank + index;
    process.err.to = 2;
    const bool keeps_stdout = index == 0 && ranks.options.program.empty();
    int write_ends[2] = {-1, -1};
    for (int i = keeps_stdout; i < 2; i++) {
        int ends[2];
        if (pipe(ends) != 0) fail(EXIT_INTERNAL, "rank %d cannot be started: %s", process.rank, strerror(errno));
        if (ends[0] >= FD_SETSIZE)  // pselect cannot wait for it
            fail(EXIT_INTERNAL, "rank %d cannot be started: %d files are open, and at most %d are supported",
                 process.rank, ends[0], FD_SETSIZE);
        (i == 0 ? process.out : process.err).file = ends[0];
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        write_ends[i] = ends[1];
    }
    fflush(nullptr);  // otherwise the rank would print buffered text again
    const pid_t parent = getpid();
    process.pid = fork();
    if (process.pid == 0) {
        become_rank(ranks, index, parent, write_ends);
        exit(ranks.options.run(index));
    }
    const int error = errno;
    for (int end : write_ends)
        if (end >= 0) close(end);
    if (process.pid < 0) fail(EXIT_INTERNAL, "rank %d cannot be started: %s", process.rank, strerror(error));
    process.running = true;
}

static void signal_all(const Ranks& ranks, int number) {
    for (const RankProcess& process : ranks.processes)
        if (process.running) kill(process.pid, number);
}

static bool any_running(const Ranks& ranks) {
    return std::any_of(ranks.processes.begin(), ranks.processes.end(), [](const auto& p) { return p.running; });
}

static void request_stop(Ranks& ranks) {
    signal_all(ranks, SIGUSR1);
    ranks.repeat_time = seconds_now() + ranks.repeat_pause;
    ranks.repeat_pause *= 2;
}

// Gives the remaining ranks the time to end by themselves.
static void limit_rest(Ranks& ranks) {
    const double now = seconds_now();
    ranks.kill_time = std::min(ranks.kill_time, now + ranks.options.last.rank);
    // A rank that is stopped when a watchdog ends the run is what the watchdog has waited for.
    const double last_stopped = ranks.outcome.exit_code == EXIT_WATCHDOG ? 0.0 : ranks.options.last.stopped;
    ranks.stopped_kill_time = std::min(ranks.stopped_kill_time, now + last_stopped);
}

// Asks the remaining ranks to end, and kills them if they do not.
static void end_all(Ranks& ranks) {
    ranks.ended = true;
    ranks.repeat_time = INFINITY;
    signal_all(ranks, ranks.options.end_signal);
    limit_rest(ranks);
}

// Writes as much as cannot block, once pselect has found room for it.
static void write_some(Ranks& ranks, int to) {
    Output& output = ranks.outputs[to - 1];
    const ssize_t written = write(to, output.waiting.data(), std::min<size_t>(output.waiting.size(), PIPE_BUF));
    if (written > 0) output.waiting.erase(0, size_t(written));
    if (written >= 0 || errno == EINTR || errno == EAGAIN) return;
    output = {"", true};
    if (to != 1) return;
    if (!ranks.options.stdout_is_result)
        return print(ranks, 2,
                     format("warning: cannot write to stdout: %s; the run continues without it\n", strerror(errno)));
    print(ranks, 2, format("error: cannot write to standard output: %s\n", strerror(errno)));
    end_all(ranks);
}

static std::string signal_text(int number) {
    return format("signal %d (%s%s)", number, strsignal(number), number == SIGKILL ? "; out of memory?" : "");
}

// Notes how a rank ended. The first failure decides the exit code.
static void note_end(Ranks& ranks, const RankProcess& process, int status) {
    Outcome& outcome = ranks.outcome;
    const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    ranks.preempted |= code == EXIT_PREEMPTED;
    if (code == 0 || code == EXIT_PREEMPTED || !outcome.failure.empty()) return;
    const std::string name = ranks.options.program.empty() ? format("rank %d", process.rank) : ranks.options.program;
    outcome.exit_code = code;
    outcome.failure = name + format(" ended with exit code %d", code);
    const bool of_program = !ranks.options.program.empty() && !WIFSIGNALED(status);  // mpirun ends with 128 + signal
    if (WIFSIGNALED(status) || (of_program && code > 128 && code < 128 + NSIG)) {
        const std::string rank = ranks.lost_rank < 0 ? "a rank" : format("rank %d", ranks.lost_rank);
        outcome.failure = (of_program ? rank : name) + " was ended by " + signal_text(code - 128);
        const std::string advice = ranks.options.advice ? ranks.options.advice() : "";
        if (first_request == 0) print_message("error: " + outcome.failure + (advice.empty() ? "" : "; ") + advice);
    }
    limit_rest(ranks);
}

static void reap(Ranks& ranks) {
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;)
        for (RankProcess& process : ranks.processes) {
            if (process.pid != pid) continue;
            process.stopped = WIFSTOPPED(status);
            if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
            process.running = false;
            for (Stream* stream : {&process.out, &process.err}) {
                relay(ranks, process, *stream);
                close_stream(ranks, process, *stream);
            }
            note_end(ranks, process, status);
        }
}

// Kills the ranks whose time to end by themselves is over.
static void kill_late(Ranks& ranks) {
    const double now = seconds_now();
    for (RankProcess& process : ranks.processes) {
        const bool stopped = process.stopped && now >= ranks.stopped_kill_time;
        if (!process.running || (!stopped && now < ranks.kill_time)) continue;
        if (first_request == 0)
            print_message(stopped ? format("warning: rank %d is stopped, and is killed", process.rank)
                                  : format("warning: rank %d did not end within %g s, and is killed", process.rank,
                                           ranks.options.last.rank));
        kill(process.pid, SIGKILL);
        process.stopped = false;
    }
    if (now >= ranks.kill_time) ranks.kill_time = INFINITY;
}

// The time at which kill_late will have something to do; INFINITY: no rank has failed.
static double next_kill_time(const Ranks& ranks) {
    const bool any_stopped = std::any_of(ranks.processes.begin(), ranks.processes.end(),
                                         [](const auto& p) { return p.running && p.stopped; });
    return any_stopped ? std::min(ranks.kill_time, ranks.stopped_kill_time) : ranks.kill_time;
}

// The processes that a process has started (Linux).
static std::vector<pid_t> children_of(pid_t parent) {
    std::vector<pid_t> children;
    std::error_code none;
    const std::string tasks = format("/proc/%d/task", int(parent));
    for (const auto& task : std::filesystem::directory_iterator(tasks, none)) {
        std::ifstream file(task.path() / "children");
        for (pid_t child; file >> child;) children.push_back(child);
    }
    return children;
}

// The state of a process as in /proc: T if SIGSTOP or the like has stopped it, Z if it has ended; 0: unknown.
static char state_of(pid_t pid) {
    std::ifstream file(format("/proc/%d/stat", int(pid)));
    std::string stat;
    std::getline(file, stat);
    const size_t name_end = stat.rfind(") ");
    return name_end == std::string::npos ? 0 : stat[name_end + 2];
}

static std::vector<pid_t> ranks_left(const Ranks& ranks) {
    std::vector<pid_t> left;
    if (!ranks.options.program.empty()) left = children_of(ranks.processes[0].pid);
    std::erase_if(left, [](pid_t pid) { return state_of(pid) == 'Z'; });
    for (const RankProcess& process : ranks.processes)
        if (process.running && ranks.options.program.empty()) left.push_back(process.pid);
    return left;
}

static void set_since(double& since, bool holds) { since = holds ? std::min(since, seconds_now()) : INFINITY; }

static void fail_and_kill(Ranks& ranks, int exit_code, const std::string& failure,
                          const std::vector<pid_t>& processes) {
    ranks.outcome.exit_code = exit_code;
    ranks.outcome.failure = failure;
    print_message(format("error: %s; %s killed", failure.c_str(), processes.size() == 1 ? "it is" : "they are"));
    for (const pid_t pid : processes) kill(pid, SIGKILL);
}

// If all ranks that are left have been stopped for a while, this function kills them, because no other rank can notice
// them. It also kills a program that does not end after its ranks: the mpirun of Open MPI 4 sometimes hangs at its end.
static void look_at_ranks_left(Ranks& ranks) {
    const bool is_program = !ranks.options.program.empty();
    const LastSeconds& last = ranks.options.last;
    const double now = seconds_now();
    if (now < ranks.next_look || !ranks.outcome.failure.empty()) return;
    ranks.next_look = now + 1;
    const std::vector<pid_t> left = ranks_left(ranks);
    ranks.had_ranks |= !left.empty();
    const size_t all = size_t(is_program ? ranks.options.ranks_of_program : ranks.options.count);
    const bool all_stopped = std::all_of(left.begin(), left.end(), [](pid_t pid) { return state_of(pid) == 'T'; });
    set_since(ranks.only_stopped_since, !left.empty() && left.size() < all && all_stopped);
    set_since(ranks.without_ranks_since, is_program && ranks.had_ranks && left.empty());
    if (now - ranks.only_stopped_since >= last.rank)
        fail_and_kill(ranks, EXIT_WATCHDOG,
                      format("%zu rank%s stopped and cannot end, and all others have ended", left.size(),
                             left.size() == 1 ? " is" : "s are"),
                      left);
    else if (now - ranks.without_ranks_since >= last.program)
        fail_and_kill(
            ranks, EXIT_INTERNAL,
            format("%s has not ended within %g s after its ranks", ranks.options.program.c_str(), last.program),
            {ranks.processes[0].pid});
}

// Waits for the next event, for at most a second.
static void supervise(Ranks& ranks) {
    std::vector<int> files;
    for (const RankProcess& process : ranks.processes)
        for (const int file : {process.out.file, process.err.file})
            if (file >= 0) files.push_back(file);
    const std::vector<int> written = files_to_write(ranks);
    const double next = std::min(next_kill_time(ranks), next_error_time(ranks));
    const Ready ready = wait_for_files(files, written, std::clamp(next - seconds_now(), 0.01, 1.0));
    for (int to : written)
        if (FD_ISSET(to, &ready.writable)) write_some(ranks, to);
    for (RankProcess& process : ranks.processes)
        for (Stream* stream : {&process.out, &process.err})
            if (stream->file >= 0 && FD_ISSET(stream->file, &ready.readable)) relay(ranks, process, *stream);
    switch (take_request()) {
        case Request::none:
            break;
        case Request::stop:
            request_stop(ranks);
            break;
        case Request::end:
            print_message("ended by a second signal: the steps since the last checkpoint are lost");
            end_all(ranks);
            break;
    }
    if (seconds_now() >= ranks.repeat_time) request_stop(ranks);
    reap(ranks);
    print_errors(ranks, seconds_now());
    kill_late(ranks);
    look_at_ranks_left(ranks);
}

// Writes what the ranks have printed last. If a signal has asked to stop, it waits for a reader only this long: a
// scheduler will soon send SIGKILL.
static void write_rest(Ranks& ranks) {
    constexpr double longest = 2;  // seconds
    const double begin = seconds_now();
    for (std::vector<int> files; !(files = files_to_write(ranks)).empty();) {
        take_request();
        if (first_request != 0 && seconds_now() - begin > longest) return;
        const Ready ready = wait_for_files({}, files, 0.5);
        for (int to : files)
            if (FD_ISSET(to, &ready.writable)) write_some(ranks, to);
    }
}

Outcome Supervisor::run(const LocalRanks& options) {
    ENSURE(options.count >= 1 && options.count <= MAX_LOCAL_RANKS, "%d ranks on a machine: 1 to %d are supported",
           options.count, MAX_LOCAL_RANKS);
    Ranks ranks{options, std::vector<RankProcess>(size_t(options.count)), {}, {}, -1, {}, {}};
    try {
        for (int i = 0; i < options.count; i++) start(ranks, i);
    } catch (const Error&) {
        signal_all(ranks, SIGKILL);
        throw;
    }
    if (options.started) options.started();
    while (any_running(ranks)) supervise(ranks);
    print_errors(ranks, INFINITY);
    write_rest(ranks);
    Outcome& outcome = ranks.outcome;
    outcome.request = first_request;
    if (outcome.failure.empty() && ranks.preempted) outcome.exit_code = EXIT_PREEMPTED;
    // SIGUSR1 also ends ranks that do not handle signals, and SIGKILL those that a second signal ends. An mpirun that
    // is ended has the exit code 1.
    const bool by_signal = outcome.exit_code > 128 || (ranks.ended && outcome.exit_code == EXIT_INTERNAL);
    if (outcome.request != 0 && by_signal) outcome.exit_code = 128 + outcome.request;
    if (options.stdout_is_result && ranks.outputs[0].broken) outcome.exit_code = EXIT_IO;
    return outcome;
}

// ---- a call in a child process

int call_in_child(const std::function<int()>& function) {
    int ends[2];
    if (pipe(ends) != 0) fail(EXIT_INTERNAL, "no pipe can be made: %s", strerror(errno));
    fflush(nullptr);
    const pid_t pid = fork();
    if (pid < 0) fail(EXIT_INTERNAL, "no process can be started: %s", strerror(errno));
    if (pid == 0) {
        std::string answer;
        try {
            answer = format("0 %d", function());
        } catch (const Error& error) {
            answer = format("%d %s", error.exit_code, error.what());
        }
        _exit(write(ends[1], answer.data(), answer.size()) == ssize_t(answer.size()) ? 0 : EXIT_INTERNAL);
    }
    close(ends[1]);
    std::string answer;
    char buffer[1024];
    for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) != 0;) {
        if (got < 0 && errno != EINTR) break;
        if (got > 0) answer.append(buffer, size_t(got));
    }
    close(ends[0]);
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    const size_t space = answer.find(' ');
    if (space == std::string::npos && WIFSIGNALED(status))
        fail(EXIT_INTERNAL, "a helper process was ended by %s", signal_text(WTERMSIG(status)).c_str());
    if (space == std::string::npos) fail(EXIT_INTERNAL, "a helper process ended without an answer");
    const int code = std::atoi(answer.c_str());
    if (code != 0) throw Error(code, answer.substr(space + 1));
    return std::atoi(answer.c_str() + space);
}
