#include "train/state_part.h"

#include <algorithm>

#include "checkpoint/hf_weights.h"

std::vector<PartRun> runs_of(const StatePart& part, const ParamLayout& whole) {
    std::vector<PartRun> runs;
    if (part.is_copy) return runs;
    for_each_tensor(part.layout, [&](Param p, int l) {
        const Bucket bucket = part.layout.bucket(part.layout.bucket_of(p, l));
        const int64_t count = (bucket.end - bucket.begin) / part.shards;
        const int64_t shard_begin = bucket.begin + part.shard_index * count, at = bucket.begin / part.shards;
        const int64_t offset = part.layout.offset(p, l);
        for_each_run(part.layout, p, [&](int64_t own, int64_t in_whole, int64_t length) {
            const int64_t begin = std::max(offset + own, shard_begin);
            const int64_t end = std::min(offset + own + length, shard_begin + count);
            if (begin >= end) return;
            runs.push_back(
                {at + begin - shard_begin, whole.offset(p, l) + in_whole + begin - offset - own, end - begin});
        });
    });
    std::sort(runs.begin(), runs.end(), [](const PartRun& a, const PartRun& b) { return a.part < b.part; });
    return runs;
}

void put_part(float* whole, const std::vector<PartRun>& runs, const float* part, int64_t begin, int64_t count) {
    const auto ends_before = [](const PartRun& run, int64_t at) { return run.part + run.count <= at; };
    for (auto run = std::lower_bound(runs.begin(), runs.end(), begin, ends_before);
         run != runs.end() && run->part < begin + count; ++run) {
        const int64_t from = std::max(run->part, begin), to = std::min(run->part + run->count, begin + count);
        std::copy(part + from - begin, part + to - begin, whole + run->whole + from - run->part);
    }
}
