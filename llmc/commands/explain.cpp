// explain.cpp: the command `explain`: reads the reports of a run that a watchdog has ended (parallel/watchdog.h), and
// says what each rank was doing and which rank was late.
#include "base/files.h"
#include "base/terminal.h"
#include "commands/commands.h"
#include "parallel/stall_report.h"

int run_explain(const Options& o) {
    const std::string& dir = o.inputs[0];
    auto files = find_stall_reports(errors_directory(dir));
    if (files.empty()) files = find_stall_reports(dir);
    if (files.empty())
        fail(EXIT_NO_INPUT,
             "%s: has no errors/rank_*.json: no watchdog has ended this run, or it has been started again",
             dir.c_str());
    std::vector<StallReport> reports;
    std::vector<Row> rows;
    for (const auto& [rank, path] : files) {
        reports.push_back(read_stall_report(path, rank));
        if (reports.back().world_size != reports[0].world_size)
            fail(EXIT_BAD_DATA, "%s: is of a run of %d ranks, and %s of one of %d", path.c_str(),
                 reports.back().world_size, files[0].second.c_str(), reports[0].world_size);
        rows.emplace_back(format("rank %d", rank), "on " + describe_stall(reports.back()));
    }
    std::string text;
    for (const std::string& line : table_lines(rows)) text += line + "\n";
    print_stdout(text + message_text(explain_stall(reports)) + "\n");
    return 0;
}
