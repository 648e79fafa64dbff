// watchdog.h: ends a run in which a rank hangs.
//
// A thread of every rank looks for progress: something that the training thread reaches (a forward, a validation batch,
// a token of a sample), or the end of a collective. If there is none for the time that the phase permits, the rank
// writes what it knows to OUTPUT/errors/rank_N.json. The lowest of the ranks that did so reads these files and prints a
// sentence that names the ranks for which the others wait. Then all of them end with EXIT_WATCHDOG.
//
// Time in which this process did not run does not count: a stopped process that continues, a suspended machine.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm.h"
#include "parallel/flight_recorder.h"
#include "parallel/launch.h"
#include "parallel/stall_report.h"

// `end`: after the last step, until the ranks have disconnected. evaluation, generation: of the commands eval and
// generate.
enum class Phase { start, step, validation, sample, checkpoint, end, evaluation, generation };
const char* phase_name(Phase phase);

// Seconds without progress after which a run ends, --timeout-*. 0: no limit. Negative: follows from PhaseTimes.
struct Timeouts {
    double start = -1, step = -1, validation = -1, checkpoint = -1;  // step: also of the phases without an own limit
};

// What a rank knows of the durations of a run, in seconds. All ranks know nearly the same. 0: nothing is known yet.
struct PhaseTimes {
    double step = 0, validation_batch = 0;    // medians of the last ones
    double longest_save = 0;                  // of this start, on rank 0
    double first_step = 0;                    // a micro-step on a slow device (slow_device_seconds)
    double first_save = 0, largest_read = 0;  // a checkpoint and its largest tensor on a slow disk (slow_disk_seconds)
    double permitted = 0;                     // what rank 0 does alone, while this rank waits for it: a save, a sample

    PhaseTimes without_permitted() const {
        PhaseTimes own = *this;
        own.permitted = 0;
        return own;
    }
};

// The durations of the last steps or batches.
struct StepTimes {
    static constexpr size_t STEPS = 32;
    std::vector<double> seconds;
    size_t next = 0;

    void add(double step_seconds);
    double median() const;  // 0: no step has ended yet
};

// The limit of a phase in seconds; infinite: none.
double limit_of(Phase phase, const Timeouts& timeouts, const PhaseTimes& times);

// Measures the time without progress, without the time in which this process did not run.
struct StallClock {
    static constexpr double LONGEST_TICK = 0.5;  // seconds between two calls that count
    double last = 0.0, waited = 0.0;
    int64_t progress = -1;

    // now: seconds_now(). progress: FlightRecorder::progress. excused: the time since the last call does not count.
    // Returns the seconds without progress.
    double tick(double now, int64_t new_progress, bool excused = false) {
        const double passed = excused ? 0.0 : std::clamp(now - last, 0.0, LONGEST_TICK);
        waited = new_progress == progress ? waited + passed : 0.0;
        last = now;
        progress = new_progress;
        return waited;
    }
};

// Finds the reports in OUTPUT/errors that were written after its construction.
struct NewReports {
    std::string output;                                          // empty: there are none
    std::map<std::string, std::filesystem::file_time_type> old;  // of an earlier run, with the times of their files

    explicit NewReports(const std::string& output);
    std::vector<std::pair<int, std::string>> find() const;  // ranks and paths
};

struct WatchdogOptions {
    Timeouts timeouts;
    std::string output;  // empty: no files
    Launch launch;
    int tensor_parallel = 1;
    std::function<void()> abort =
        {};  // ends all ranks with EXIT_WATCHDOG; called on the watchdog's thread, and may hang
};

struct Watchdog {
    static constexpr double TICK = 0.1;            // seconds between two looks, at most
    static constexpr double GATHER_SECONDS = 0.5;  // wait for the files of other ranks
    static constexpr double PRINT_SECONDS = 0.3;   // wait of the ranks that print nothing for the one that does
    // From expiry to the sentence, whatever hangs. With the TICK after which a stall is seen, it is less than 1 s.
    static constexpr double LATEST_PRINT = 0.8;
    static constexpr double LAST_SECONDS = 1.0;    // from expiry to the end of the process, whatever hangs
    static constexpr double ABORT_SECONDS = 10.0;  // further time that NCCL gets to abort

    Watchdog(const WatchdogOptions& options, FlightRecorder& flights);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;

    // Called by the training thread. Each call is progress.
    void begin(Phase phase, int64_t step);
    void reached(const char* name, int64_t number = -1) { flights.reached(name, number); }
    void goes_on() { flights.progress++; }  // with what was reached last
    void step_done(double seconds);         // ends what permit() has permitted
    void validation_batch_done(double seconds);
    // Until the end of the next step, this rank may wait so long for rank 0, which first saves (Phase::checkpoint) or
    // writes a sample. Two calls add up.
    void permit(double seconds, Phase of_rank_0);
    void permit_save();
    // Before the first step or save, whose durations are not known yet: see PhaseTimes.
    void set_first_step(double seconds) { times.first_step = seconds; }
    void set_first_save(double seconds) { times.first_save = seconds; }
    void set_largest_read(double seconds);
    void set_longest_save(double seconds) { times.longest_save = seconds; }

    double median_step() const { return times.step; }
    double checkpoint_limit() const;  // for this rank's own save
    void set_hosts(const std::vector<std::string>& of_ranks);  // of all ranks
    void set_output_is_shared(bool is_shared);

  private:
    void set_limit();
    void watch();
    // own_limit: this rank's limit has passed, and not only that of another rank.
    [[noreturn]] void expire(double waited, bool own_limit);
    StallReport make_report(double waited) const;
    std::string sentence(const StallReport& own, bool own_limit, const std::vector<StallReport>& reports) const;
    void print_once(const std::string& error);
    std::vector<StallReport> gather(const StallReport& own) const;

    const WatchdogOptions options;
    FlightRecorder& flights;
    const NewReports new_reports;

    // Used by the training thread only.
    StepTimes steps, validation_batches;
    PhaseTimes times;

    // The training thread first makes progress and then sets a limit. The watchdog reads in the other order, so it
    // never compares a new limit with the time of an earlier phase.
    std::atomic<double> limit;
    std::atomic<Phase> phase = Phase::start;
    std::atomic<Phase> permitted_phase = Phase::step;  // of rank 0; step: nothing is permitted
    std::atomic<bool> limit_is_permitted = false;      // the limit is what rank 0 may take, and not this rank's own
    std::atomic<bool> printed = false;

    std::mutex mutex;  // guards the fields below; the watchdog's thread holds it while it works
    std::vector<std::string> hosts;
    bool output_is_shared = true, ending = false;
    std::condition_variable changed;
    std::thread thread;
};

// Starts the watchdog of a rank that has joined the others, in place of an earlier one. Sets options.abort.
void start_watchdog(Comm& comm, WatchdogOptions options);
// The longest time in seconds that so many FLOPs take on a slow device, for a first step, whose duration is not known
// yet.
double slow_device_seconds(double flops);
// The same for bytes that a slow disk reads or writes.
double slow_disk_seconds(int64_t bytes);
