// test_skip.cpp: tests how test programs print and count skipped cases. The cases named "child: ..." run in a second
// process of this program.
#include "support/skip.h"

#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

TEST_CASE("child: passes" * doctest::skip()) { CHECK(true); }
TEST_CASE("child: fails" * doctest::skip()) { CHECK(false); }
TEST_CASE("child: cannot run" * doctest::skip()) {
    CHECK(true);
    for (int i = 0; i < 3; i++) skip_case("no tool");
}
TEST_CASE("child: misses a part" * doctest::skip()) {
    CHECK(true);
    skip_part("IPv6", "no network");
}
TEST_CASE("child: fails and then cannot go on" * doctest::skip()) {
    CHECK(false);
    skip_case("no tool");
}
TEST_CASE_TEMPLATE("child: of a type" * doctest::skip(), T, int, float) { skip_case("no tool"); }

// The lines that the child process prints, without doctest's own.
static std::string output_of(const std::string& cases) {
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0);
    const char* run_by = getenv("RUN_BY");  // the emulator for programs of another architecture: "qemu-aarch64 -L ..."
    const std::string command = std::string(run_by ? run_by : "") + " '" + self + "' --no-skip --test-case='" + cases +
                                "' --minimal 2>&1" + " | grep -aE '^SKIP|passed, '";
    FILE* pipe = popen(command.c_str(), "r");
    REQUIRE(pipe);
    std::string text;
    for (int c; (c = fgetc(pipe)) != EOF;) text += char(c);
    pclose(pipe);
    return text;
}

TEST_CASE("a case that is skipped does not count as passed") {
    CHECK(output_of("child: passes") == "1 passed, 0 failed, 0 skipped\n");
    CHECK(output_of("child: passes,child: cannot run") ==
          "SKIP  child: cannot run: no tool\n1 passed, 0 failed, 1 skipped\n");
}

TEST_CASE("a case of which a part is skipped counts as passed") {
    CHECK(output_of("child: misses a part") ==
          "SKIP  child: misses a part, IPv6: no network\n1 passed, 0 failed, 1 skipped\n");
}

TEST_CASE("a case that fails counts as failed, skipped or not") {
    CHECK(output_of("child: passes,child: fails") == "1 passed, 1 failed, 0 skipped\n");
    CHECK(output_of("child: fails and then*") ==
          "SKIP  child: fails and then cannot go on: no tool\n0 passed, 1 failed, 1 skipped\n");
}

TEST_CASE("skipped cases of a template are named with their types") {
    CHECK(output_of("child: of a type*") ==
          "SKIP  child: of a type<int>: no tool\nSKIP  child: of a type<float>: no tool\n"
          "0 passed, 0 failed, 2 skipped\n");
}
