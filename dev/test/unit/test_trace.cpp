// test_trace.cpp: tests the file of --trace: its events, which are there at any time, its end, and refused paths.
#include "base/trace.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/device.h"
#include "support/refusal.h"
#include "support/temporary.h"
#include "support/test.h"

using Json = nlohmann::json;

// The list has its last bracket only when the recording has ended.
static Json list_in(const std::string& path) {
    const std::string text = read_bytes(path);
    return Json::parse(text.ends_with("\n]\n") ? text : text + "]");
}

static std::vector<Json> events_in(const std::string& path) {
    std::vector<Json> events;
    for (const Json& event : list_in(path))
        if (event["ph"] == "X") events.push_back(event);
    return events;
}

TEST_CASE("ranges are events of their thread, nested as the blocks are, and in the file at any time") {
    const TemporaryDirectory dir;
    open_trace(dir / "t.json", 3, 4);
    const std::string path = dir / "t.json.rank3";
    CHECK(events_in(path).empty());
    {
        const ProfileRange outer("step", 7);
        {
            const ProfileRange inner("forward");
            usleep(2000);
        }
        CHECK(events_in(path).size() == 1);
        std::thread([] { const ProfileRange range("read batch", 0); }).join();
    }
    const std::vector<Json> events = events_in(path);
    REQUIRE(events.size() == 3);
    const Json &forward = events[0], &batch = events[1], &step = events[2];
    CHECK((forward["name"] == "forward" && batch["name"] == "read batch 0" && step["name"] == "step 7"));
    for (const Json& event : events) CHECK(event["pid"] == 3);
    CHECK(forward["tid"] == step["tid"]);
    CHECK(batch["tid"] != step["tid"]);
    const auto end = [](const Json& event) { return event["ts"].get<int64_t>() + event["dur"].get<int64_t>(); };
    CHECK(forward["ts"] >= step["ts"]);
    CHECK(end(forward) <= end(step));
    CHECK(forward["dur"] >= 2000);
    CHECK(list_in(path)[0]["args"]["name"] == "rank 3 of 4");
}

TEST_CASE("the recording ends after its steps, and a range that has begun before is not written") {
    const TemporaryDirectory dir;
    const std::string path = dir / "t.json";
    open_trace(path, 0, 1);
    const double now = seconds_now();
    {
        const ProfileRange range("forward");
        for (int step = 0; step < TRACE_STEPS + 5; step++) trace_step(step, now, now);
    }
    CHECK_FALSE(trace_is_open());
    CHECK(read_bytes(path).ends_with("}\n]\n"));
    CHECK(events_in(path).size() == TRACE_STEPS);
    CHECK(events_in(path).back()["name"] == format("step %d", TRACE_STEPS - 1));

    open_trace(path, 0, 1);  // an older trace is replaced
    CHECK(events_in(path).empty());
    trace_step(0, now, now);
    CHECK(events_in(path).size() == 1);
}

TEST_CASE("a path that cannot be written is refused, and a file that is not a trace is left as it is") {
    const TemporaryDirectory dir;
    write_bytes(dir / "model", "weights");
    for (const auto& [name, message] : {std::pair("none/t.json", ": No such file or directory"), std::pair(".", ": "),
                                        std::pair("model", ": exists and is not a trace")})
        CHECK(refusal([&] { open_trace(dir / name, 0, 1); }).starts_with("73 --trace " + (dir / name) + message));
    CHECK(read_bytes(dir / "model") == "weights");
}

TEST_CASE("a disk that is full ends the recording with a warning") {
    const TemporaryDirectory dir;
    const std::string path = dir / "t.json";
    open_trace(path, 0, 1);
    const auto limited_to = [](rlim_t bytes) {
        const rlimit limit = {bytes, RLIM_INFINITY};
        return setrlimit(RLIMIT_FSIZE, &limit) == 0;
    };
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(limited_to(500));
    const double now = seconds_now();
    for (int i = 0; i < 20; i++) trace_event("forward", i, now, now);
    REQUIRE(limited_to(RLIM_INFINITY));
    CHECK_FALSE(trace_is_open());
    CHECK(read_bytes(path).size() <= 500);
}
