#include "base/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/common.h"
#include "base/device.h"
#include "base/print.h"

namespace {

constexpr char END[] = "\n]\n";

struct TraceFile {
    std::mutex mutex;  // guards the fields below
    std::string path;
    int file = -1;
    int rank = 0, steps = 0;
    int64_t end = 0;  // offset of END
};

TraceFile trace;
std::atomic<bool> is_open = false;

void close_trace() {
    is_open = false;
    close(trace.file);
    trace.file = -1;
}

// Writes the event in place of END, and END after it, by one call.
void append(const std::string& event) {
    const std::string text = (trace.end == 0 ? "[\n" : ",\n") + event + END;
    const ssize_t written = pwrite(trace.file, text.data(), text.size(), trace.end);
    if (written == ssize_t(text.size())) {
        trace.end += written - ssize_t(strlen(END));
        return;
    }
    print_message(format("warning: --trace %s: cannot be written: %s; it ends here", trace.path.c_str(),
                         written < 0 ? strerror(errno) : "no space is left"));
    [[maybe_unused]] const int cut = ftruncate(trace.file, trace.end);
    [[maybe_unused]] const ssize_t ended = pwrite(trace.file, END, strlen(END), trace.end);
    close_trace();
}

int own_thread() {
    static std::atomic<int> threads = 0;
    thread_local const int number = ++threads;
    return number;
}

// Whole microseconds, because viewers cut the fractions of a begin and of a duration separately, after which events
// overlap.
long long microseconds(double seconds) { return static_cast<long long>(std::floor(1e6 * seconds)); }

}  // namespace

void open_trace(const std::string& path, int rank, int world_size) {
    const std::lock_guard lock(trace.mutex);
    trace.path = rank == 0 ? path : format("%s.rank%d", path.c_str(), rank);
    trace.rank = rank;
    trace.steps = 0;
    trace.end = 0;
    const auto refuse = [&](const char* why) { fail(EXIT_CANNOT_CREATE, "--trace %s: %s", trace.path.c_str(), why); };
    const int file = open(trace.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) refuse(strerror(errno));
    struct stat info;
    char first[2];
    const ssize_t got = pread(file, first, sizeof first, 0);
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) refuse("is not a file");
    if (got > 0 && (got < 2 || memcmp(first, "[\n", 2) != 0))
        refuse("exists and is not a trace; name another file, or remove it");
    if (ftruncate(file, 0) != 0) refuse(strerror(errno));
    trace.file = file;
    append(format(R"({"name":"process_name","ph":"M","pid":%d,"tid":0,"args":{"name":"rank %d of %d"}})", rank, rank,
                  world_size));
    is_open = trace.file >= 0;
}

bool trace_is_open() { return is_open; }

void trace_event(const char* name, int64_t number, double begin, double end) {
    const long long from = microseconds(begin), to = microseconds(end);
    const std::string which = number < 0 ? "" : format(" %lld", static_cast<long long>(number));
    const int thread = own_thread();
    const std::lock_guard lock(trace.mutex);
    if (!is_open) return;
    append(format(R"({"name":"%s%s","ph":"X","pid":%d,"tid":%d,"ts":%lld,"dur":%lld})", name, which.c_str(), trace.rank,
                  thread, from, std::max(0LL, to - from)));
}

void trace_step(int64_t step, double begin, double end) {
    if (!is_open) return;
    trace_event("step", step, begin, end);
    const std::lock_guard lock(trace.mutex);
    if (is_open && ++trace.steps == TRACE_STEPS) close_trace();
}

ProfileRange::ProfileRange(const char* name, int64_t number)
    : name(name), number(number), begin(trace_is_open() ? seconds_now() : -1.0) {
    device_begin_range(name);
}

ProfileRange::~ProfileRange() {
    device_end_range();
    if (begin >= 0.0) trace_event(name, number, begin, seconds_now());
}
