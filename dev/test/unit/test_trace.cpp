// test_trace.cpp: tests paths of --trace that are refused, and a full disk. test_trace.py has the events.
#include "base/trace.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <csignal>
#include <string>
#include <utility>

#include "base/common.h"
#include "support/refusal.h"
#include "support/temporary.h"

TEST_CASE("a path that cannot be written is refused, and a file that is not a trace is left as it is") {
    const TemporaryDirectory dir;
    write_bytes(dir / "model", "weights");
    for (const auto& [file, said] : {std::pair("none/t.json", ": No such file or directory"), std::pair(".", ": "),
                                     std::pair("model", ": exists and is not a trace")}) {
        const std::string path = dir / file;
        CHECK(refusal([&] { open_trace(path, 0, 1); }).starts_with("73 --trace " + path + said));
    }
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
    const size_t size = read_bytes(path).size();
    CHECK(size <= 500);
    trace_event("forward", 20, now, now);  // is not recorded any more
    CHECK(read_bytes(path).size() == size);
}
