#include "train/background_save.h"

#include <system_error>
#include <utility>

#include "base/device.h"
#include "base/threads.h"

int64_t snapshot_bytes(const ParamLayout& layout, int num_slots) {
    return num_slots * layout.total * int64_t(sizeof(float));
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
    for (Slot slot = 0; slot < int(slots.size()); slot++)
        for_each_tensor(layout, [&](Param p, int l) { read(slots[size_t(slot)] + layout.offset(p, l), slot, p, l); });
}

TensorView Snapshot::view() const { return view_flat(layout, {slots.begin(), slots.end()}); }

void BackgroundSave::start(int64_t step_of_save, std::function<SaveResult()> write) {
    INVARIANT(!in_flight(), "a save begins while the one of step %lld is in flight", static_cast<long long>(step));
    step = step_of_save;
    const auto run = [this, write = std::move(write)] {
        result = write();
        done = true;
    };
    try {
        thread = std::thread([run] {
            yield_to_training();
            run();
        });
    } catch (const std::system_error&) {  // this process may not have another thread (ulimit -u)
        run();
    }
}

std::optional<SaveResult> BackgroundSave::finish(bool wait) {
    if (!in_flight() || (!wait && !done)) return {};
    if (thread.joinable()) thread.join();
    done = false;
    return std::move(result);
}
