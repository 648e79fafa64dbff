// main.cpp: main() of every test program. The last line on stdout is "N passed, N failed, N skipped", in test cases.
// doctest itself would count a skipped case as passed.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "support/skip.h"

namespace {

std::string current_case;
bool current_skipped = false;
int skipped_cases = 0;  // skipped as a whole, without a failure
std::vector<std::string> skips;

void print_skip(const std::string& line) {
    if (std::find(skips.begin(), skips.end(), line) != skips.end()) return;  // in a loop or a subcase
    skips.push_back(line);
    printf("SKIP  %s\n", line.c_str());
    fflush(stdout);
}

struct SkipCounter : doctest::IReporter {
    explicit SkipCounter(const doctest::ContextOptions&) {}

    void test_case_start(const doctest::TestCaseData& test_case) override {
        current_case = test_case.m_name;
        current_skipped = false;
    }
    void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
        if (current_skipped && stats.testCaseSuccess) skipped_cases++;
    }
    void test_run_end(const doctest::TestRunStats& stats) override {
        const int failed = int(stats.numTestCasesFailed);
        const int passed = int(stats.numTestCasesPassingFilters) - failed - skipped_cases;
        printf("%d passed, %d failed, %d skipped\n", passed, failed, int(skips.size()));
        fflush(stdout);
    }

    void report_query(const doctest::QueryData&) override {}
    void test_run_start() override {}
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}
};

REGISTER_LISTENER("skips", 1, SkipCounter);

}  // namespace

void skip_case(const std::string& reason) {
    current_skipped = true;
    print_skip(current_case + ": " + reason);
}

void skip_part(const std::string& part, const std::string& reason) {
    print_skip(current_case + ", " + part + ": " + reason);
}
