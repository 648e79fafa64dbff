// test_trace.cpp: tests traces: spans and their times, the events in the file, clocks of several machines, and files
// that are refused. test_trace.sh traces real ranks.
#include "parallel/trace_file.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <thread>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "parallel/comm.h"
#include "support/temporary.h"

using Json = nlohmann::json;

static const Stream stream = nullptr;

static std::vector<Json> events_of(const std::string& file) { return Json::parse(file)["traceEvents"]; }

static std::vector<Json> events_of(const Trace& trace) { return events_of(trace_file({trace_events(trace, 0, "h")})); }

static std::vector<Json> spans_of(const std::vector<Json>& events) {
    std::vector<Json> spans;
    for (const Json& event : events)
        if (event["ph"] == "X") spans.push_back(event);
    return spans;
}

static void pass_time() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

static bool inside(const Json& inner, const Json& outer) {
    return inner["ts"] >= outer["ts"] &&
           int64_t(inner["ts"]) + int64_t(inner["dur"]) <= int64_t(outer["ts"]) + int64_t(outer["dur"]);
}

TEST_CASE("spans nest, in the time of the host and of the stream, and outer spans come first") {
    Trace trace;
    {
        const Span step(&trace, Track::training, stream, {"step", 7, 7, 4096});
        pass_time();
        {
            const Span forward(&trace, Track::training, stream, {.name = "forward"});
            const Span wait(&trace, Track::host, {.name = "wait for data"});
            pass_time();
        }
        const Span backward(&trace, Track::training, stream, {.name = "backward"});
        pass_time();
    }
    const Span never_ended(&trace, Track::loader, {.name = "read"});
    trace.read_timers(true);
    const std::vector<Json> spans = spans_of(events_of(trace));
    REQUIRE(spans.size() == 4);
    const char* names[] = {"step 7", "forward", "wait for data", "backward"};
    for (int i = 0; i < 4; i++) {
        CHECK(spans[i]["name"] == names[i]);
        CHECK(spans[i]["tid"] == spans[0]["tid"]);  // on the CPU the host thread trains
        CHECK(inside(spans[i], spans[0]));
        CHECK(int64_t(spans[i]["dur"]) >= 1900);
        CHECK(int64_t(spans[i]["dur"]) < 1'000'000);
    }
    CHECK(inside(spans[2], spans[1]));
    CHECK(int64_t(spans[3]["ts"]) >= int64_t(spans[1]["ts"]) + int64_t(spans[1]["dur"]));
    CHECK(spans[0]["args"] == Json({{"step", 7}, {"tokens", 4096}}));
    CHECK_FALSE(spans[1].contains("args"));
}

TEST_CASE("spans of the same microsecond keep their order") {
    Trace trace;
    for (const int64_t order : {2, 0, 3, 1})  // in the order in which they ended
        trace.add({{"span", order}, Track::training, order, trace.zero + 1.0, trace.zero + 1.0});
    const std::vector<Json> spans = spans_of(events_of(trace));
    for (int i = 0; i < 4; i++) CHECK(spans[i]["name"] == "span " + std::to_string(i));
}

TEST_CASE("times are whole microseconds, and rounding does not make neighbours overlap") {
    Trace trace;
    trace.zero = 100.0;
    for (int64_t i = 0; i < 1000; i++)
        trace.add({{"span", i}, Track::training, i, 100.0 + 1.37e-6 * double(i), 100.0 + 1.37e-6 * double(i + 1)});
    const std::vector<Json> spans = spans_of(events_of(trace));
    for (size_t i = 0; i + 1 < spans.size(); i++) {
        CHECK(spans[i]["ts"].is_number_integer());
        CHECK(int64_t(spans[i]["ts"]) + int64_t(spans[i]["dur"]) == int64_t(spans[i + 1]["ts"]));
    }
    CHECK(spans[1]["ts"] == 1);
    CHECK(spans[999]["ts"] == 1368);
}

TEST_CASE("names of hosts and spans are escaped") {
    Trace trace;
    trace.add({{"say \"hi\"\\\n", -1}, Track::loader, 0, trace.zero, trace.zero});
    const std::string host = "a\"b\\c\xff";
    const std::vector<Json> events = events_of(trace_file({trace_events(trace, 3, host)}));
    CHECK(events[0]["args"]["name"] == "rank 3 on a\"b\\c\xef\xbf\xbd");
    CHECK(events.back()["name"] == "say \"hi\"\\\n");
}

TEST_CASE("several threads record spans at the same time") {
    Trace trace;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([&trace, i] {
            for (int64_t n = 0; n < 1000; n++)
                const Span span(&trace, i < 2 ? Track::loader : Track::communication, {"span", n});
        });
    for (std::thread& thread : threads) thread.join();
    std::map<std::string, int> found;
    for (const Json& span : spans_of(events_of(trace))) found[span["name"]]++;
    CHECK(found.size() == 1000);
    for (const auto& [name, count] : found) CHECK(count == 4);
}

TEST_CASE("memory is bounded: a trace keeps a limited number of spans and reuses its timers") {
    Trace small(10);
    for (int64_t n = 0; n < 25; n++) const Span span(&small, Track::training, stream, {"span", n});
    small.read_timers(true);
    CHECK(small.records.size() == 10);
    CHECK(small.spans == 25);
    CHECK(small.records.back().label.number == 9);

    Trace trace;
    for (int64_t n = 0; n < 1000; n++) {
        const Span outer(&trace, Track::training, stream, {"outer", n});
        const Span inner(&trace, Track::training, stream, {"inner", n});
    }
    CHECK(trace.timers.size() + 2 * trace.queued.size() < 12);
    trace.read_timers(true);
    CHECK_FALSE(trace.timers.empty());
    CHECK(trace.records.size() == 2000);
}

TEST_CASE("no span is recorded without a trace, without a name, or after the recording") {
    const Span no_trace(nullptr, Track::training, stream, {.name = "span"});
    Trace trace;
    { const Span no_name(&trace, Track::training, stream, {}); }
    trace.recording = false;
    { const Span late(&trace, Track::training, stream, {.name = "span"}); }
    { const Span late(&trace, Track::loader, {.name = "span"}); }
    CHECK(trace.records.empty());
    CHECK(trace.queued.empty());
    CHECK(trace.spans == 0);
}

TEST_CASE("in the file ranks are processes and tracks are threads") {
    Trace first, second;
    for (Trace* trace : {&first, &second})
        for (Track track : {Track::communication, Track::training, Track::host, Track::loader})
            trace->add({{.name = "span"}, track, 0, trace->zero, trace->zero});
    const std::string file = trace_file({trace_events(first, 0, "h0"), trace_events(second, 1, "h1")});
    std::map<int, std::string> processes, threads;
    std::map<std::string, int> place;
    std::map<int, int> process_of;
    for (const Json& event : events_of(file)) {
        const int pid = event["pid"], tid = event["tid"];
        if (event["name"] == "process_name") processes[pid] = event["args"]["name"];
        if (event["name"] == "thread_name") threads[tid] = event["args"]["name"];
        if (event["name"] == "thread_sort_index") place[threads.at(tid)] = event["args"]["sort_index"];
        if (event["ph"] != "X") continue;
        CHECK(threads.contains(tid));  // the name comes before the spans
        CHECK((process_of.contains(tid) ? process_of[tid] : pid) == pid);
        process_of[tid] = pid;
        CHECK(tid > 0);
    }
    CHECK(processes == std::map<int, std::string>{{1, "rank 0 on h0"}, {2, "rank 1 on h1"}});
    CHECK(process_of.size() == 8);
    CHECK(place == std::map<std::string, int>{{"training", 0}, {"host", 1}, {"communication", 2}, {"loader", 3}});
    CHECK(std::count(file.begin(), file.end(), '\n') == int(events_of(file).size()) + 2);  // each event has a line
}

TEST_CASE("ranks of one machine share a clock, and clocks of machines are aligned by their collectives") {
    // The clock of machine b is 1000 s ahead of machine a's, and the clock of machine c 50 s behind. A rank enters a
    // collective up to 30 ms late. After 40 ms all are in it, and they leave up to 20 ms later, except for one
    // collective in which all ranks are quick.
    const double late[] = {20e-3, 0.0, 30e-3, 10e-6, 5e-3};
    const auto clock = [&](const char* machine, double ahead, double begin, size_t luck) {
        RankClock own = {machine, begin + ahead, {}, {}};
        for (size_t i = 0; i < 5; i++) {
            const double came = i == 3 ? 40e-3 - 20e-6 - 2e-6 * double(luck) : late[(i + luck) % 5];
            const double went = 40e-3 + (i == 3 ? 20e-6 : late[(2 * i + luck) % 5]);
            own.entered.push_back(ahead + 10.0 + double(i) + came), own.left.push_back(ahead + 10.0 + double(i) + went);
        }
        return own;
    };
    const std::vector<RankClock> clocks = {clock("a", 0.0, 5.0, 0), clock("b", 1000.0, 4.5, 1), clock("a", 0.0, 6.0, 2),
                                           clock("b", 1000.0, 5.5, 3), clock("c", -50.0, 5.0, 4)};
    const double zero = zero_of_clock(clocks, 0);
    CHECK(zero == doctest::Approx(4.5).epsilon(1e-4));  // rank 1 started first
    CHECK(std::fabs(zero_of_clock(clocks, 1) - zero - 1000.0) < 2e-5);
    CHECK(zero_of_clock(clocks, 2) == zero);
    CHECK(zero_of_clock(clocks, 3) == zero_of_clock(clocks, 1));  // equal, although the ranks have different times
    CHECK(std::fabs(zero_of_clock(clocks, 4) - zero + 50.0) < 2e-5);
}

TEST_CASE("a collective has the name of the last label_next(), the bytes that it sends and the time of its call") {
    Comm comm;
    comm.label_next("nobody listens");
    CHECK(comm.take_label().name == nullptr);
    comm.trace = std::make_unique<Trace>();
    comm.trace->begin_step(5);
    comm.bytes_sent = 100;
    comm.label_next("reduce bucket", 3);
    comm.bytes_sent += 60;
    const SpanLabel label = comm.take_label();
    CHECK(label.name == std::string("reduce bucket"));
    CHECK(label.number == 3);
    CHECK(label.step == 5);
    CHECK(label.bytes == 60);
    CHECK(comm.take_label().name == nullptr);
    pass_time();
    { const Span late(comm.trace.get(), Track::communication, label); }
    { const Span other(comm.trace.get(), Track::communication, {.name = "not queued"}); }
    const std::vector<Json> spans = spans_of(events_of(*comm.trace));
    CHECK(int64_t(spans[0]["args"]["queued_us"]) >= 2000);
    CHECK_FALSE(spans[1].contains("args"));
}

// Rank 0 of two ranks. The test prepares the data of rank 1.
struct Pair : Comm {
    std::vector<std::string> other;
    size_t said = 0;

    Pair() { world_size = 2; }
    std::vector<std::string> all_gather_text(const std::string& text) override {
        return {text, said < other.size() ? other[said++] : ""};
    }
};

TEST_CASE("rank 0 writes the spans of all ranks, of any length") {
    const TemporaryDirectory temporary;
    Pair comm;
    comm.trace = std::make_unique<Trace>(5000);
    for (int64_t step = 2; step < 8; step++) comm.trace->begin_step(step);
    for (int64_t n = 0; n < 6000; n++) const Span span(comm.trace.get(), Track::training, stream, {"own", n});
    Trace others;
    for (int64_t n = 0; n < 9000; n++) others.add({{"other", n}, Track::loader, n, others.zero, others.zero});
    const std::string text = trace_events(others, 1, "h1");
    constexpr size_t piece = 1 << 18;
    REQUIRE(text.size() > 2 * piece);
    comm.other = {""};
    for (size_t at = 0; at < text.size(); at += piece) comm.other.push_back(text.substr(at, piece));

    check_trace_file(temporary / "t.json");
    CHECK(write_trace(comm, temporary / "t.json") == "steps 2 to 7, without the last 1,000 spans of this rank");
    const std::vector<Json> spans = spans_of(events_of(read_bytes(temporary / "t.json")));
    CHECK(spans.size() == 5000 + 9000);
    CHECK(spans.back()["name"] == "other 8999");
    CHECK_FALSE(comm.trace->recording);
    check_trace_file(temporary / "t.json");  // an older trace may be replaced
    CHECK(list_directory(temporary.path) == std::vector<std::string>{"t.json"});
}

TEST_CASE("a trace may have one step or none") {
    const TemporaryDirectory temporary;
    Comm comm;
    comm.trace = std::make_unique<Trace>();
    CHECK(write_trace(comm, temporary / "t.json") == "no step");
    CHECK(spans_of(events_of(read_bytes(temporary / "t.json"))).empty());
    comm.trace = std::make_unique<Trace>();
    comm.trace->begin_step(0);
    CHECK(write_trace(comm, temporary / "t.json") == "step 0");
}

// The message of the Error, which must have EXIT_CANNOT_CREATE.
static std::string refusal(const std::string& path) {
    try {
        check_trace_file(path);
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_CANNOT_CREATE);
        return error.what();
    }
    return "";
}

TEST_CASE("a trace file that cannot be written, or has other content, is refused") {
    const TemporaryDirectory temporary;
    const auto refused = [&](const std::string& path, const char* why) {
        const std::string text = refusal(path);
        CAPTURE(text);
        CHECK(text.find("--trace " + path + ": ") == 0);
        CHECK(text.find(why) != std::string::npos);
    };
    refused(temporary.path, "is a directory");
    refused(temporary / "", "is a directory");
    refused(temporary / "none/t.json", "does not exist");
    write_bytes(temporary / "data.bin", "tokens");
    refused(temporary / "data.bin", "is not a trace");
    refused(temporary / "data.bin/t.json", "does not exist");
    refused("/dev/null", "is not a file");
    std::filesystem::create_symlink(temporary / "data.bin", temporary / "link");
    refused(temporary / "link", "is not a file");
    make_directories(temporary / "u.json.tmp");
    refused(temporary / "u.json", "its temporary file, with .tmp at the end of the name, is a directory");
    CHECK(refusal("/proc/t.json") != "");
    CHECK(refusal(temporary / "t.json") == "");
    CHECK_FALSE(path_exists(temporary / "t.json"));
    CHECK_FALSE(path_exists(temporary / "t.json.tmp"));
    CHECK(read_bytes(temporary / "data.bin") == "tokens");
}
