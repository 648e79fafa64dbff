#include "train/state_collector.h"

#include <algorithm>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/threads.h"

int64_t part_bytes(const StatePart& part, int num_slots) { return num_slots * part.floats() * int64_t(sizeof(float)); }

StateCollector::StateCollector(Comm& comm, const ParamLayout& whole, const StatePart& own, int num_slots,
                               double silence)
    : own(own),
      num_slots(num_slots),
      rank(comm.rank),
      memory(static_cast<float*>(host_allocate(std::max<int64_t>(1, part_bytes(own, num_slots))))) {
    channel.silence = silence;
    const std::vector<std::string> parts =
        comm.all_gather_text(format("%d %d %d", own.layout.shard.index, own.shard_index, own.is_copy ? 1 : 0));
    why_not = channel.open(comm);
    if (rank > 0) return;
    for (int r = 0; r < comm.world_size; r++) {
        StatePart part = own;
        std::istringstream(parts[size_t(r)]) >> part.layout.shard.index >> part.shard_index >> part.is_copy;
        if (part.is_copy) continue;
        runs[r] = runs_of(part, whole);
        if (r > 0) bytes[r] = part_bytes(part, num_slots);
    }
}

StateCollector::~StateCollector() {
    channel.give_up();
    if (sender.joinable()) sender.join();
    host_free(memory);
}

std::optional<Error> StateCollector::finish() {
    if (sender.joinable()) sender.join();
    return std::exchange(failed, {});
}

void StateCollector::copy(const PartReader& read) {
    for (Slot s = 0; s < num_slots && !own.is_copy; s++) read(slot(s), s);
    saves++;
    if (rank == 0 || own.is_copy) return;
    try {
        sender = std::thread([this] {
            yield_to_training();
            send();
        });
    } catch (const std::system_error&) {  // this process may not have another thread (ulimit -u)
        send();
    }
}

void StateCollector::send() {
    try {
        channel.send(saves, reinterpret_cast<const char*>(memory), part_bytes(own, num_slots));
    } catch (const Error& error) {
        failed = error;
    }
}

void StateCollector::collect(const std::vector<float*>& slots) {
    const auto put = [&](int of_rank, int64_t floats, int64_t at, const float* values, int64_t count) {
        for (int64_t done = 0, taken; done < count; done += taken) {
            const int64_t begin = (at + done) % floats;
            taken = std::min(count - done, floats - begin);
            put_part(slots[size_t((at + done) / floats)], runs.at(of_rank), values + done, begin, taken);
        }
    };
    if (!own.is_copy) put(0, own.floats(), 0, memory, num_slots * own.floats());
    channel.receive(saves, bytes, [&](int of_rank, int64_t at, const char* piece, int64_t count) {
        constexpr int64_t size = sizeof(float);
        put(of_rank, bytes.at(of_rank) / num_slots / size, at / size, reinterpret_cast<const float*>(piece),
            count / size);
    });
}
