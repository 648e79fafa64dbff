#include "parallel/trace_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/host.h"

using Json = nlohmann::ordered_json;

static constexpr const char* track_names[] = {"training", "host", "communication", "loader"};
static constexpr const char* FILE_BEGIN = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";

// ---- the clocks of several machines

// The seconds by which clock a is ahead of clock b. No rank leaves an all-gather before all ranks have entered it, so
// each all-gather bounds the difference from both sides. The quickest all-gathers give the tightest bounds.
static double difference(const RankClock& a, const RankClock& b) {
    double least = -INFINITY, most = INFINITY;
    for (size_t i = 0; i < std::min(a.left.size(), b.left.size()); i++) {
        least = std::max(least, a.entered[i] - b.left[i]);
        most = std::min(most, a.left[i] - b.entered[i]);
    }
    return std::isinf(most) ? 0.0 : (least + most) / 2.0;
}

double zero_of_clock(const std::vector<RankClock>& clocks, int rank) {
    // The seconds by which a rank's clock is ahead of rank 0's. They are the same for all ranks of a machine.
    const auto ahead = [&](const RankClock& clock) {
        const auto first = std::find_if(clocks.begin(), clocks.end(),
                                        [&](const RankClock& other) { return other.machine == clock.machine; });
        return first == clocks.begin() ? 0.0 : difference(*first, clocks[0]);
    };
    double zero = clocks[0].begin;  // on rank 0's clock
    for (const RankClock& clock : clocks) zero = std::min(zero, clock.begin - ahead(clock));
    return zero + ahead(clocks[size_t(rank)]);
}

void align_trace(Comm& comm) {
    if (!comm.trace) return;
    std::vector<double> entered, left;
    for (int i = 0; i < 20; i++) {
        entered.push_back(seconds_now());
        comm.all_gather_text("");
        left.push_back(seconds_now());
    }
    const Json own = {{"machine", host_id()}, {"begin", comm.trace->begin}, {"entered", entered}, {"left", left}};
    std::vector<RankClock> clocks;
    for (const std::string& text : comm.all_gather_text(own.dump())) {
        const Json clock = Json::parse(text);
        clocks.push_back({clock["machine"], clock["begin"], clock["entered"], clock["left"]});
    }
    comm.trace->zero = zero_of_clock(clocks, comm.rank);
}

// ---- the file

// Whole microseconds: viewers truncate the fractions of a span's begin and of its duration separately, after which
// spans would overlap.
static int64_t microseconds(double seconds) { return int64_t(std::floor(1e6 * seconds)); }

static std::string line_of(const Trace::Record& r, double zero, int pid, int tid) {
    const int64_t begin = microseconds(r.begin - zero), end = microseconds(r.end - zero);
    std::string name = r.label.name;
    if (r.label.number >= 0) name += format(" %lld", static_cast<long long>(r.label.number));
    Json event = {{"name", name}, {"ph", "X"},   {"pid", pid},
                  {"tid", tid},   {"ts", begin}, {"dur", std::max<int64_t>(end - begin, 0)}};
    const std::pair<const char*, int64_t> args[] = {
        {"step", r.label.step},
        {"tokens", r.label.tokens},
        {"bytes", r.label.bytes},
        {"queued_us", r.label.queued < 0.0 ? -1 : std::max<int64_t>(begin - microseconds(r.label.queued - zero), 0)}};
    for (const auto& [what, value] : args)
        if (value >= 0) event["args"][what] = value;
    return event.dump();
}

// An event that sets the name or the position of a process, or of one of its threads.
static std::string metadata(const char* what, int pid, int tid, const Json& args) {
    return Json{{"name", what}, {"ph", "M"}, {"pid", pid}, {"tid", tid}, {"args", args}}.dump(
        -1, ' ', false, Json::error_handler_t::replace);
}

// Perfetto takes pid 0 or tid 0 for the idle thread, and does not accept the same tid in two processes.
std::string trace_events(const Trace& trace, int rank, const std::string& host) {
    constexpr int tracks = int(std::size(track_names));
    const int pid = 1 + rank;
    std::vector<Trace::Record> records = trace.records;
    std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) {  // outer spans before inner ones
        return std::pair(a.track, a.order) < std::pair(b.track, b.order);
    });
    std::string text = metadata("process_name", pid, 0, {{"name", format("rank %d on %s", rank, host.c_str())}}) +
                       ",\n" + metadata("process_sort_index", pid, 0, {{"sort_index", rank}});
    for (size_t i = 0; i < records.size(); i++) {
        const int track = int(records[i].track), tid = tracks * pid + track;
        if (i == 0 || records[i - 1].track != records[i].track)
            text += ",\n" + metadata("thread_name", pid, tid, {{"name", track_names[track]}}) + ",\n" +
                    metadata("thread_sort_index", pid, tid, {{"sort_index", track}});
        text += ",\n" + line_of(records[i], trace.zero, pid, tid);
    }
    return text;
}

std::string trace_file(const std::vector<std::string>& events) {
    std::string text = FILE_BEGIN;
    for (const std::string& of_rank : events) text += (&of_rank == &events[0] ? "" : ",\n") + of_rank;
    return text + "\n]}\n";
}

void check_trace_file(const std::string& path) {
    const auto refuse = [&](const char* why) { fail(EXIT_CANNOT_CREATE, "--trace %s: %s", path.c_str(), why); };
    if (is_directory(path)) refuse("is a directory; name a file in it");
    if (path_exists(path)) {
        if (!std::filesystem::is_regular_file(std::filesystem::symlink_status(path))) refuse("is not a file");
        const InputFile file(path);
        std::string begin(size_t(std::min<int64_t>(file.size, int64_t(strlen(FILE_BEGIN)))), '\0');
        file.read_at(begin.data(), 0, int64_t(begin.size()));
        if (begin != FILE_BEGIN) refuse("exists and is not a trace; name another file, or remove it");
    }
    if (!is_directory(parent_directory(path))) refuse("its directory does not exist; create it, or name another file");
    const std::string temporary = path + ".tmp";  // the name that replace_file will use
    if (is_directory(temporary)) refuse("its temporary file, with .tmp at the end of the name, is a directory");
    remove_tree(temporary);
    write_file(temporary, "");
    remove_tree(temporary);
}

// Returns the texts of all ranks, on rank 0 only. The texts are sent in pieces, because an all-gather copies each piece
// to all ranks.
static std::vector<std::string> gather(Comm& comm, const std::string& own) {
    constexpr size_t piece = 1 << 18;
    std::vector<std::string> all(size_t(comm.world_size));
    for (size_t at = 0;; at += piece) {
        const std::vector<std::string> parts = comm.all_gather_text(at < own.size() ? own.substr(at, piece) : "");
        bool more = false;
        for (size_t rank = 0; rank < parts.size(); rank++) {
            more |= parts[rank].size() == piece;
            if (comm.rank == 0) all[rank] += parts[rank];
        }
        if (!more) return all;
    }
}

std::string write_trace(Comm& comm, const std::string& path) {
    Trace& trace = *comm.trace;
    comm.all_gather_text("");  // waits for collectives that other threads still run, so that their spans are complete
    trace.read_timers(true);
    trace.recording = false;
    std::string text;
    {
        const std::lock_guard lock(trace.mutex);
        text = trace_events(trace, comm.rank, host_name());
        trace.records.clear();
    }
    const std::vector<std::string> events = gather(comm, text);
    const int64_t lost = std::max<int64_t>(0, trace.spans - trace.most_spans);
    std::string steps = "no step";
    if (trace.step > trace.first_step)
        steps =
            format("steps %lld to %lld", static_cast<long long>(trace.first_step), static_cast<long long>(trace.step));
    else if (trace.step >= 0)
        steps = format("step %lld", static_cast<long long>(trace.step));
    if (comm.rank == 0) replace_file(path, trace_file(events));
    if (lost) steps += format(", without the last %s spans of this rank", with_commas(lost).c_str());
    return steps;
}
