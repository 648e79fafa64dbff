#include "base/trace.h"

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>

#include "base/common.h"
#include "base/device.h"
#include "base/print.h"

namespace {

struct TraceFile {
    std::mutex mutex;  // guards the fields below
    std::string path;
    FILE* file = nullptr;
    int rank = 0, steps = 0;
};

TraceFile trace;
std::atomic<bool> is_open = false;

void close_trace() {
    is_open = false;
    fclose(trace.file);
    trace.file = nullptr;
}

// The list ends behind each event, so that the file is whole at any time; the next event replaces that end.
void append(const std::string& text) {
    const std::string end = "\n]\n";
    if (fputs((text + end).c_str(), trace.file) >= 0 && fflush(trace.file) == 0 &&
        fseek(trace.file, -long(end.size()), SEEK_CUR) == 0)
        return;
    print_message(format("warning: --trace %s: cannot write: %s; it ends here", trace.path.c_str(), strerror(errno)));
    close_trace();
}

int own_thread() {
    static std::atomic<int> threads = 0;
    thread_local const int number = ++threads;
    return number;
}

// Whole microseconds: viewers cut the fractions of begin and duration separately, and events would overlap.
long long microseconds(double seconds) { return static_cast<long long>(std::floor(1e6 * seconds)); }

}  // namespace

void open_trace(const std::string& path, int rank, int world_size) {
    const std::lock_guard lock(trace.mutex);
    trace.path = rank == 0 ? path : format("%s.rank%d", path.c_str(), rank);
    trace.rank = rank;
    trace.steps = 0;
    const auto refuse = [](const char* why) { fail(EXIT_CANNOT_CREATE, "--trace %s: %s", trace.path.c_str(), why); };
    std::string begin(2, '\0');
    std::ifstream before(trace.path);
    before.read(begin.data(), 2);
    if (before.gcount() > 0 && begin != "[\n") refuse("exists and is not a trace; name another file, or remove it");
    trace.file = fopen(trace.path.c_str(), "we");  // e: not for child processes
    if (!trace.file) refuse(strerror(errno));
    is_open = true;
    append(format("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d of %d\"}}", rank,
                  rank, world_size));
}

void trace_event(const char* name, int64_t number, double begin, double end) {
    const long long from = microseconds(begin), to = microseconds(end);
    const std::string number_text = number < 0 ? "" : format(" %lld", static_cast<long long>(number));
    const int thread = own_thread();
    const std::lock_guard lock(trace.mutex);
    if (!is_open) return;
    append(
        format(",\n"
               R"({"name":"%s%s","ph":"X","pid":%d,"tid":%d,"ts":%lld,"dur":%lld})",
               name, number_text.c_str(), trace.rank, thread, from, std::max(0LL, to - from)));
}

void trace_step(int64_t step, double begin, double end) {
    if (!is_open) return;
    trace_event("step", step, begin, end);
    const std::lock_guard lock(trace.mutex);
    if (is_open && ++trace.steps == TRACE_STEPS) close_trace();
}

ProfileRange::ProfileRange(const char* name, int64_t number) : name(name), number(number), begin(seconds_now()) {
    device_begin_range(name);
}

ProfileRange::~ProfileRange() {
    device_end_range();
    if (is_open) trace_event(name, number, begin, seconds_now());
}
