#include "train/background_save.h"

#include <sys/resource.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "base/device.h"

int64_t snapshot_bytes(const ParamLayout& layout, int num_slots) {
    return num_slots * layout.total * int64_t(sizeof(float));
}

void for_each_copy(const ParamLayout& layout, int num_slots, const std::function<void(Slot slot, Param p, int l)>& f) {
    for (Slot slot = 0; slot < num_slots; slot++) for_each_tensor(layout, [&](Param p, int l) { f(slot, p, l); });
}

Snapshot::Snapshot(const ParamLayout& layout, int num_slots) : layout(layout), slots(size_t(num_slots)) {
    try {
        for (float*& slot : slots) slot = static_cast<float*>(host_allocate(snapshot_bytes(layout, 1)));
    } catch (...) {
        for (float* slot : slots) host_free(slot);
        throw;
    }
}

Snapshot::~Snapshot() {
    for (float* slot : slots) host_free(slot);
}

void Snapshot::take(const TensorReader& read) {
    for_each_copy(layout, int(slots.size()),
                  [&](Slot slot, Param p, int l) { read(slots[size_t(slot)] + layout.offset(p, l), slot, p, l); });
}

TensorView Snapshot::view() const { return view_flat(layout, {slots.begin(), slots.end()}); }

// Gives this thread a lower priority. If it shared a core evenly with a thread of training, the other threads of
// training would wait for that one. Threads that it starts inherit the priority.
static void yield_to_training() {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, id_t(gettid()), 10);
#endif
}

void BackgroundSave::start(int64_t step_of_save, std::function<SaveResult()> write) {
    INVARIANT(!in_flight(), "a save begins while the one of step %lld is in flight", static_cast<long long>(step));
    step = step_of_save;
    const auto run = [this, write = std::move(write)] {
        yield_to_training();
        result = write();
        done = true;
    };
    try {
        thread = std::thread(run);
    } catch (const std::system_error&) {  // this process may not have another thread (ulimit -u)
        run();
    }
}

std::optional<SaveResult> BackgroundSave::finish(bool wait) {
    if (!in_flight() || (!wait && !done)) return {};
    if (thread.joinable()) thread.join();
    done = false;
    result.val_loss = std::exchange(val_loss, {});
    return std::move(result);
}
