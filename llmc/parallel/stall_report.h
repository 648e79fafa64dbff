// stall_report.h: what a rank knows when it hangs, as the file OUTPUT/errors/rank_N.json, and what the files of all
// ranks say together: which rank is late. The watchdog writes the files; `train_gpt2 explain` reads them, too.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/flight_recorder.h"

struct StallReport {
    struct Event {
        double seconds_ago = 0.0;
        FlightEvent event = FlightEvent::reached;
        std::string what;  // what_happened
        int64_t step = -1, bytes = 0;
        RankGroup group = RankGroup::world;
        int64_t index = 0;
    };
    int rank = 0, world_size = 1, tensor_parallel = 1;
    std::string host;
    int64_t process = 0;
    std::string phase;  // phase_name in watchdog.h
    int64_t step = -1;
    double waited = 0.0;                                 // seconds without progress
    bool shares_output = true;                           // all ranks write their files into the same directory
    std::vector<std::string> hosts;                      // of all ranks; empty: not known yet
    std::array<int64_t, RANK_GROUPS> last_entered = {};  // index of the last collective of each group; 0: none
    std::vector<Event> events;                           // oldest first
};

// The entries of the recorder at this time (seconds_now()).
std::vector<StallReport::Event> events_of(const FlightRecorder& recorder, double now);

std::string stall_report_json(const StallReport& report);
// Refuses (EXIT_BAD_DATA, naming `where`) a text that is not a report.
StallReport parse_stall_report(const std::string& text, const std::string& where);

std::string errors_directory(const std::string& output);          // OUTPUT/errors
std::string stall_report_path(const std::string& dir, int rank);  // DIR/rank_N.json
// The paths of the reports in a directory, by rank; empty if there is no such directory.
std::vector<std::pair<int, std::string>> find_stall_reports(const std::string& dir);
// Reads a report. Refuses one of another rank than the name of the file says.
StallReport read_stall_report(const std::string& path, int rank);

// The sentence that names the ranks the others wait for: "the all-reduce of bucket 3 in step 41 did not end: rank 2 on
// h1 never entered it; it was last seen in forward of step 41". reports: one or more, of different ranks of one run.
std::string explain_stall(const std::vector<StallReport>& reports);
std::string phase_text(const StallReport& report);  // "the start", "step 41", "the validation of step 41"
// What one rank was doing: "h1, process 312: no progress in step 41 for 120.0 s; last seen in ...".
std::string describe_stall(const StallReport& report);
