// flight_recorder.h: the last events of a rank: what the training thread has reached, and which collectives the rank
// has entered and left. The watchdog (watchdog.h) writes them to a file when the rank hangs.
//
// Any thread may record. An event costs a few stores and no lock.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

enum class FlightEvent : int64_t { reached, entered, left };

// The ranks that make a collective together. Without tensor parallelism there is only the world.
enum class RankGroup : int64_t { world, data_parallel, tensor_parallel };
constexpr int RANK_GROUPS = 3;

// A collective of this rank. Ranks of a group make the same collectives in the same order, so `index` identifies it.
struct Collective {
    const char* kind = nullptr;  // "all-reduce"; a string of static duration, like `name`
    const char* name = nullptr;  // trace label, "reduce bucket"; null: none
    int64_t number = -1;         // number of the bucket; -1: none
    int64_t step = -1, bytes = 0;
    RankGroup group = RankGroup::world;
    int64_t index = 0;  // counts the collectives of the group, from 1
};

struct FlightEntry {
    double time = 0.0;  // seconds_now()
    FlightEvent event = FlightEvent::reached;
    Collective collective;  // reached: kind is null, and `name`, `number` and `step` say what was reached
};

// "all-reduce of bucket 3", "vote", "forward of micro-step 2".
std::string what_happened(const FlightEntry& entry);

struct FlightRecorder {
    static constexpr int SIZE = 256;

    std::atomic<int64_t> step = -1;     // of the training thread; -1: before the first step
    std::atomic<int64_t> progress = 0;  // grows when the training thread reaches something and when a collective ends
    std::array<std::atomic<int64_t>, RANK_GROUPS> last_entered = {};  // the largest index; 0: none
    // Set by the watchdog: the training thread, if it waits for the device, aborts the collectives, because other
    // threads may not use its communicators. It sets `aborting` first.
    std::atomic<bool> must_abort = false, aborting = false;

    void reached(const char* name, int64_t number = -1);
    void entered(const Collective& collective);
    void left(const Collective& collective);
    std::vector<FlightEntry> entries() const;  // oldest first, without those that are being overwritten

  private:
    void add(FlightEvent event, const Collective& collective);

    // A writer takes a number, marks slot number % SIZE as being written, stores the event, and then the number + 1 in
    // `order`. An event is lost if another thread is still writing to its slot, SIZE events later. All stores release,
    // and all loads acquire: a reader that sees a field of a newer event also sees that `order` has changed, and drops
    // the slot.
    static constexpr int64_t BEING_WRITTEN = -1;
    struct Slot {
        std::atomic<int64_t> order = 0;  // 0: empty
        std::atomic<double> time = 0.0;
        std::atomic<FlightEvent> event = FlightEvent::reached;
        std::atomic<const char*> kind = nullptr, name = nullptr;
        std::atomic<int64_t> number = 0, step = 0, bytes = 0, index = 0;
        std::atomic<RankGroup> group = RankGroup::world;
    };
    std::atomic<int64_t> next = 0;
    std::array<Slot, SIZE> slots;
};

// Records that a rank enters a collective, and at the end of the block that it has left it; `to` may be null.
struct Flight {
    FlightRecorder* const to;
    const Collective collective;

    Flight(FlightRecorder* to, const Collective& collective) : to(to), collective(collective) {
        if (to) to->entered(collective);
    }
    Flight(const Flight&) = delete;
    ~Flight() {
        if (to) to->left(collective);
    }
};
