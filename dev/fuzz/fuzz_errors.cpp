// sources: llmc/parallel/stall_report.cpp llmc/parallel/flight_recorder.cpp llmc/base/json.cpp llmc/base/files.cpp
// llmc/base/common.cpp
//
// fuzz_errors.cpp: reads any text as the reports of a run that a watchdog has ended: one report for each part of the
// input between zero bytes, once as it is and once as changes to a valid report. Each must be refused by an Error with
// exit code 65, or give the same text when it is written, read and written again. Those of the same number of ranks
// must be explained.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/json.h"
#include "parallel/stall_report.h"

static nlohmann::json valid_report() {
    StallReport report;
    report.world_size = 2;
    report.hosts = {"h0", "h1"};
    report.last_entered[0] = 7;
    report.events = {{2.0, FlightEvent::reached, "forward", 41},
                     {1.0, FlightEvent::entered, "all-reduce of bucket 3", 41, 4096, RankGroup::world, 7}};
    return nlohmann::json::parse(stall_report_json(report));
}

static void read_report(const std::string& text, std::vector<StallReport>& reports) {
    const StallReport report = parse_stall_report(text, "rank_0.json");
    const std::string again = stall_report_json(report);
    if (stall_report_json(parse_stall_report(again, "rank_0.json")) != again) abort();
    describe_stall(report);
    if (reports.empty() || report.world_size == reports[0].world_size) reports.push_back(report);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const nlohmann::json valid = valid_report();
    std::vector<StallReport> reports;
    const std::string all(reinterpret_cast<const char*>(data), size);
    for (size_t begin = 0; begin <= size;) {
        const size_t end = std::min(all.find('\0', begin), size);
        const std::string text = all.substr(begin, end - begin);
        try {
            nlohmann::json changed = valid;
            changed.merge_patch(parse_json(text, "rank_0.json"));
            read_report(changed.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), reports);
            read_report(text, reports);
        } catch (const Error& error) {
            if (error.exit_code != EXIT_BAD_DATA) abort();
        }
        begin = end + 1;
    }
    if (!reports.empty() && explain_stall(reports).empty()) abort();
    return 0;
}
