#include "parallel/watchdog.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>

#include "base/common.h"
#include "base/device.h"
#include "base/files.h"
#include "base/host.h"
#include "base/terminal.h"
#include "parallel/local_ranks.h"

// Automatic limits. The factors leave room for a device or a disk that other programs slow down for a while.
static constexpr double LEAST_START_LIMIT = 300, LEAST_STEP_LIMIT = 120, LEAST_CHECKPOINT_LIMIT = 300;  // seconds
static constexpr double STEPS_IN_LIMIT = 20, SAVES_IN_LIMIT = 10;

const char* phase_name(Phase phase) {
    static constexpr const char* names[] = {"start",      "step", "validation", "sample",
                                            "checkpoint", "end",  "evaluation", "generation"};
    return names[int(phase)];
}

void StepTimes::add(double step_seconds) {
    if (seconds.size() < STEPS) seconds.push_back(0.0);
    seconds[next++ % STEPS] = step_seconds;
}

double StepTimes::median() const {
    if (seconds.empty()) return 0.0;
    std::vector<double> sorted = seconds;
    std::nth_element(sorted.begin(), sorted.begin() + long(sorted.size() / 2), sorted.end());
    return sorted[sorted.size() / 2];
}

static double start_limit(const PhaseTimes& times) { return std::max(LEAST_START_LIMIT, times.largest_read); }

// Until the first save has ended, the one in flight may be as slow as a slow disk.
static double checkpoint_limit(const PhaseTimes& times) {
    const double save = times.longest_save > 0 ? SAVES_IN_LIMIT * times.longest_save : times.first_save;
    return std::max(LEAST_CHECKPOINT_LIMIT, save);
}

// Of a step or a batch with this median.
static double unit_limit(double median) { return std::max(LEAST_STEP_LIMIT, STEPS_IN_LIMIT * median); }

double limit_of(Phase phase, const Timeouts& t, const PhaseTimes& times) {
    const auto limit = [](double timeout, double automatic) {
        return timeout < 0 ? automatic : timeout == 0 ? INFINITY : timeout;
    };
    const double start = limit(t.start, start_limit(times));
    if (phase == Phase::start) return start;
    const bool validates = phase == Phase::validation;
    const double median = validates && times.validation_batch > 0 ? times.validation_batch : times.step;
    double own = median > 0 ? unit_limit(median) : std::max(start, times.first_step);
    if (phase == Phase::checkpoint) own = checkpoint_limit(times);
    own = limit(phase == Phase::checkpoint ? t.checkpoint : validates ? t.validation : t.step, own);
    // Rank 0 may need all of the permitted time, and then comes to the collective in which this rank waits a step's
    // time later than this rank.
    return times.permitted > 0 ? std::max(own, times.permitted + times.step) : own;
}

// ---- the training thread

Watchdog::Watchdog(const WatchdogOptions& options, FlightRecorder& flights)
    : options(options),
      flights(flights),
      new_reports(options.output),
      limit(limit_of(Phase::start, options.timeouts, {})) {
    flights.reached(phase_name(Phase::start));
    thread = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
    {
        const std::lock_guard lock(mutex);
        ending = true;
    }
    changed.notify_all();
    thread.join();
}

void Watchdog::set_limit() {
    limit = limit_of(phase, options.timeouts, times);
    limit_is_permitted = limit > limit_of(phase, options.timeouts, times.without_permitted());
}

void Watchdog::begin(Phase new_phase, int64_t step) {
    flights.step = step;
    phase = new_phase;
    flights.reached(new_phase == Phase::step ? "begin" : phase_name(new_phase));
    set_limit();
}

void Watchdog::step_done(double seconds) {
    steps.add(seconds);
    times.step = steps.median();
    times.permitted = 0.0;
    permitted_phase = Phase::step;
    flights.progress++;
    set_limit();
}

void Watchdog::validation_batch_done(double seconds) {
    validation_batches.add(seconds);
    times.validation_batch = validation_batches.median();
    flights.progress++;
    set_limit();
}

void Watchdog::permit(double seconds, Phase of_rank_0) {
    times.permitted += seconds;
    if (permitted_phase != Phase::checkpoint) permitted_phase = of_rank_0;
    set_limit();
}

double Watchdog::checkpoint_limit() const {
    return limit_of(Phase::checkpoint, options.timeouts, times.without_permitted());
}

void Watchdog::permit_save() { permit(checkpoint_limit(), Phase::checkpoint); }

void Watchdog::set_largest_read(double seconds) {
    times.largest_read = seconds;
    set_limit();
}

void Watchdog::set_hosts(const std::vector<std::string>& of_ranks) {
    const std::lock_guard lock(mutex);
    hosts = of_ranks;
}

void Watchdog::set_output_is_shared(bool is_shared) {
    const std::lock_guard lock(mutex);
    output_is_shared = is_shared;
}

// ---- the watchdog's thread

NewReports::NewReports(const std::string& output) : output(output) {
    std::error_code ignored;
    for (const auto& [rank, path] : find()) old[path] = std::filesystem::last_write_time(path, ignored);
}

std::vector<std::pair<int, std::string>> NewReports::find() const {
    std::vector<std::pair<int, std::string>> found;
    if (output.empty()) return found;
    try {
        found = find_stall_reports(errors_directory(output));
    } catch (const Error&) {  // rank 0 removes the old ones
        return {};
    }
    std::erase_if(found, [&](const auto& report) {
        std::error_code ignored;
        const auto before = old.find(report.second);
        return before != old.end() && before->second == std::filesystem::last_write_time(report.second, ignored);
    });
    return found;
}

namespace {
// Looks for reports of other ranks in a thread of its own, because the disk may be what hangs.
struct Lookout {
    struct State {
        std::atomic<bool> ends = false, found = false;
    };
    const std::shared_ptr<State> state = std::make_shared<State>();

    explicit Lookout(const NewReports& reports) {
        std::thread([state = state, reports] {
            for (; !state->ends && !state->found;
                 std::this_thread::sleep_for(std::chrono::duration<double>(Watchdog::TICK)))
                state->found = !reports.find().empty();
        }).detach();
    }
    Lookout(const Lookout&) = delete;
    ~Lookout() { state->ends = true; }
};
}  // namespace

// A rank that is late must tell what it does when the others give up, also if its own limit is a little longer.
void Watchdog::watch() {
    StallClock clock;
    clock.last = seconds_now();
    std::unique_ptr<Lookout> lookout;  // while this rank has waited for more than half its limit
    std::unique_lock lock(mutex);
    double pause = TICK;
    while (!changed.wait_for(lock, std::chrono::duration<double>(pause), [&] { return ending; })) {
        const double limit_now = limit, waited = clock.tick(seconds_now(), flights.progress, ReaderWait::waiting);
        if (waited < limit_now / 2) lookout.reset();
        if (waited >= limit_now / 2 && !lookout && options.launch.world_size > 1)
            lookout = std::make_unique<Lookout>(new_reports);
        if (waited > limit_now || (lookout && lookout->state->found)) expire(waited, waited > limit_now);
        pause = std::clamp(limit_now - waited, 0.001, TICK);  // the look at the limit is not a TICK late
    }
}

StallReport Watchdog::make_report(double waited) const {
    StallReport report;
    report.rank = options.launch.rank;
    report.world_size = options.launch.world_size;
    report.tensor_parallel = options.tensor_parallel;
    report.host = host_name();
    report.process = getpid();
    report.phase = phase_name(phase);
    report.step = flights.step;
    report.waited = waited;
    report.shares_output = output_is_shared && !options.output.empty();
    report.hosts = hosts;
    for (int g = 0; g < RANK_GROUPS; g++) report.last_entered[size_t(g)] = flights.last_entered[size_t(g)];
    report.events = events_of(flights, seconds_now());
    return report;
}

// Readers see the whole file or none. It is not synced to disk, which may be what hangs.
static void write_report(const StallReport& report, const std::string& output) {
    std::error_code failed;
    const std::string dir = errors_directory(output), path = stall_report_path(dir, report.rank);
    std::filesystem::create_directories(dir, failed);
    std::ofstream file(path + ".tmp", std::ios::trunc);
    file << stall_report_json(report);
    file.close();
    if (file) std::filesystem::rename(path + ".tmp", path, failed);
    if (!file || failed) print_message(format("warning: %s cannot be written", path.c_str()));
}

// Waits for the reports of the other ranks. Returns all reports, with the own one.
std::vector<StallReport> Watchdog::gather(const StallReport& own) const {
    std::map<int, StallReport> found = {{own.rank, own}};
    const double end = seconds_now() + (options.output.empty() ? 0.0 : GATHER_SECONDS);
    for (bool last = false; !last && int(found.size()) < own.world_size;) {
        last = seconds_now() >= end;
        for (const auto& [rank, path] : new_reports.find()) {
            if (rank >= own.world_size || found.count(rank)) continue;
            try {
                found[rank] = read_stall_report(path, rank);
            } catch (const Error&) {  // a rank whose report is damaged does not answer
            }
        }
        if (!last) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::vector<StallReport> reports;
    for (auto& [rank, report] : found) reports.push_back(std::move(report));
    return reports;
}

// The option that sets the limit of a phase.
static const char* option_of(const std::string& phase) {
    for (const Phase own : {Phase::start, Phase::validation, Phase::checkpoint})
        if (phase == phase_name(own)) return phase_name(own);
    return phase_name(Phase::step);
}

// "rank 0 on h0: no progress in step 41 for 120 s (--timeout-step): the all-reduce ...".
std::string Watchdog::sentence(const StallReport& own, bool own_limit, const std::vector<StallReport>& reports) const {
    std::string text = own.world_size > 1 ? format("rank %d on %s: ", own.rank, own.host.c_str()) : "";
    text += std::string(NO_PROGRESS) + format("%s for %.0f s", phase_text(own).c_str(), own.waited);
    const bool waits_for_save = permitted_phase == Phase::checkpoint;
    if (own_limit && !limit_is_permitted) text += format(" (--timeout-%s)", option_of(own.phase));
    if (own_limit && limit_is_permitted)
        text += waits_for_save ? " (--timeout-checkpoint, because rank 0 saves before it)"
                               : " (the time that rank 0's sample before it may take)";
    text += ": " + explain_stall(reports);
    if (!options.output.empty()) text += "; train_gpt2 explain " + shell_word(options.output) + " says more";
    return text;
}

// Uses no stdio: another thread may hold the lock of stderr.
void Watchdog::print_once(const std::string& error) {
    if (printed.exchange(true)) return;
    // On a terminal the first newline ends a live line.
    const std::string text = format("%serror: %s\n", isatty(2) ? "\n" : "", message_text(error).c_str());
    [[maybe_unused]] const ssize_t written = write(2, text.data(), text.size());
}

void Watchdog::expire(double waited, bool own_limit) {
    const StallReport own = make_report(waited);
    // Whatever hangs below, such as a disk, the process ends, and with a sentence.
    std::thread([this, text = sentence(own, own_limit, {own})] {
        std::this_thread::sleep_for(std::chrono::duration<double>(LATEST_PRINT));
        print_once(text);
        std::this_thread::sleep_for(std::chrono::duration<double>(LAST_SECONDS - LATEST_PRINT));
        if (flights.aborting) std::this_thread::sleep_for(std::chrono::duration<double>(ABORT_SECONDS));
        _exit(EXIT_WATCHDOG);
    }).detach();
    if (!options.output.empty()) write_report(own, options.output);
    const std::vector<StallReport> reports = gather(own);
    const std::string text = sentence(own, own_limit, reports);
    write_error_file(options.launch, text);
    if (reports[0].rank == own.rank) {
        print_once(text);
    } else {
        printed = true;
        std::this_thread::sleep_for(std::chrono::duration<double>(PRINT_SECONDS));
    }
    flights.must_abort = true;
    std::this_thread::sleep_for(std::chrono::duration<double>(TICK));
    while (flights.aborting) std::this_thread::sleep_for(std::chrono::duration<double>(TICK));
    options.abort();
    _exit(EXIT_WATCHDOG);
}

// ---- start

void start_watchdog(Comm& comm, WatchdogOptions options) {
    if (!comm.flights) comm.flights = std::make_unique<FlightRecorder>();
    options.abort = [&comm] { comm.abort(EXIT_WATCHDOG); };
    comm.watchdog = std::make_shared<Watchdog>(options, *comm.flights);
}

double slow_device_seconds(double flops) { return flops / (device_memory_is_host() ? 2e9 : 1e12); }

double slow_disk_seconds(int64_t bytes) { return double(bytes) / 50e6; }
