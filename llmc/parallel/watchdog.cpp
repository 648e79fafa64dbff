#include "parallel/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/common.h"
#include "base/host.h"

Watchdog::Watchdog(double timeout, int rank, int world_size) : timeout(timeout), rank(rank), world_size(world_size) {
    if (timeout > 0) thread = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
    end.set_value();
    if (thread.joinable()) thread.join();
}

std::string Watchdog::where() const {
    std::string text = step < 0 ? "" : format("step %lld, ", static_cast<long long>(step));
    text += what;
    if (number >= 0) text += format(" %lld", static_cast<long long>(number));
    if (world_size == 1) return text;
    const long long count = begun;
    return text + format(count > ended ? ", in collective %lld" : ", after %lld collectives", count);
}

void Watchdog::at_each_look(std::function<void()> call) {
    const std::lock_guard lock(mutex);
    look = std::move(call);
}

// A look that is late means that this process was stopped; that time does not count.
void Watchdog::watch() {
    int64_t seen = -1;
    double waited = 0.0, last = seconds_now();
    const auto ends = end.get_future();
    while (ends.wait_for(std::chrono::duration<double>(LOOK)) == std::future_status::timeout) {
        if (const std::lock_guard lock(mutex); look) look();
        const double now = seconds_now();
        waited = progress == seen ? waited + std::min(now - last, 2.0 * LOOK) : 0.0;
        seen = progress;
        last = now;
        if (waited >= timeout) expire(waited);
    }
}

void Watchdog::expire(double waited) const {
    const std::string who = world_size > 1 ? format("rank %d on %s: ", rank, host_name().c_str()) : "";
    const std::string hint = world_size > 1 ? "; look at the ranks that print no such line, or another place" : "";
    const std::string line = format("%serror: %sno progress for %.0f s (--timeout): %s%s\n", isatty(2) ? "\n" : "",
                                    who.c_str(), waited, where().c_str(), hint.c_str());
    // stdio may be locked by what hangs, and nobody may read what is written.
    const auto written = std::async(std::launch::async, [&] { return write(2, line.data(), line.size()); });
    written.wait_for(std::chrono::duration<double>(LAST_WORDS));
    // The launcher ends the other ranks as soon as this one has ended.
    if (world_size > 1) std::this_thread::sleep_for(std::chrono::duration<double>(LAST_WORDS));
    _exit(EXIT_WATCHDOG);
}
