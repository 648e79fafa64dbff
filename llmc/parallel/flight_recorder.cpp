#include "parallel/flight_recorder.h"

#include <algorithm>
#include <utility>

#include "base/common.h"

std::string what_happened(const FlightEntry& entry) {
    const Collective& c = entry.collective;
    const std::string name = c.name ? c.name : "";
    const long long number = c.number;
    if (!c.kind) return name + (number >= 0 ? format(" %lld", number) : "");
    if (number >= 0) return format("%s of bucket %lld", c.kind, number);
    return c.kind + (name.empty() ? "" : " (" + name + ")");
}

void FlightRecorder::add(FlightEvent event, const Collective& c) {
    constexpr auto release = std::memory_order_release;
    const int64_t number = next.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots[size_t(number % SIZE)];
    if (slot.order.exchange(BEING_WRITTEN) == BEING_WRITTEN) return;
    slot.time.store(seconds_now(), release);
    slot.event.store(event, release);
    slot.kind.store(c.kind, release);
    slot.name.store(c.name, release);
    slot.number.store(c.number, release);
    slot.step.store(c.step, release);
    slot.bytes.store(c.bytes, release);
    slot.group.store(c.group, release);
    slot.index.store(c.index, release);
    slot.order.store(number + 1, release);
}

void FlightRecorder::reached(const char* name, int64_t number) {
    add(FlightEvent::reached, {.name = name, .number = number, .step = step});
    progress++;
}

void FlightRecorder::entered(const Collective& c) {
    add(FlightEvent::entered, c);
    std::atomic<int64_t>& last = last_entered[size_t(c.group)];
    last = std::max<int64_t>(last, c.index);  // one thread makes all collectives
}

void FlightRecorder::left(const Collective& c) {
    add(FlightEvent::left, c);
    progress++;
}

std::vector<FlightEntry> FlightRecorder::entries() const {
    std::vector<std::pair<int64_t, FlightEntry>> found;
    for (const Slot& slot : slots) {
        const int64_t order = slot.order;
        const FlightEntry entry = {
            slot.time, slot.event, {slot.kind, slot.name, slot.number, slot.step, slot.bytes, slot.group, slot.index}};
        if (order > 0 && slot.order == order) found.emplace_back(order, entry);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<FlightEntry> entries;
    for (const auto& [order, entry] : found) entries.push_back(entry);
    return entries;
}
