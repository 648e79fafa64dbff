#include "train/silent_errors.h"

#include <inttypes.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <memory>

#include "base/common.h"
#include "base/host.h"

constexpr int64_t PIECE = 16 << 20;  // bytes that are copied at a time

uint64_t hash_of_device(const void* data, int64_t bytes, Stream stream) {
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(), XXH3_freeState);
    XXH3_64bits_reset(hash.get());
    std::vector<char> piece(size_t(std::min(bytes, PIECE)));
    for (int64_t at = 0; at < bytes; at += PIECE) {
        const int64_t count = std::min(PIECE, bytes - at);
        copy_to_host(piece.data(), static_cast<const char*>(data) + at, count, stream);
        wait_for_stream(stream);
        XXH3_64bits_update(hash.get(), piece.data(), size_t(count));
    }
    return XXH3_64bits_digest(hash.get());
}

[[noreturn]] static void refuse_weights(const std::string& who, int64_t step) {
    fail(EXIT_WEIGHTS_DIFFER,
         "step %lld: %s, although all add the same gradients: a memory or a processor is faulty. The weights are not "
         "saved; --resume continues from the last checkpoint, best without that machine",
         static_cast<long long>(step), who.c_str());
}

void check_weight_hashes(const std::vector<std::string>& of_ranks, int tensor_parallel, int64_t step) {
    const int world_size = int(of_ranks.size());
    for (int first = 0; first < tensor_parallel; first++) {
        std::map<std::string, std::vector<int>> ranks_with;
        for (int rank = first; rank < world_size; rank += tensor_parallel)
            ranks_with[of_ranks[size_t(rank)].substr(0, 16)].push_back(rank);
        if (ranks_with.size() == 1) continue;
        const auto larger = [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); };
        const auto most = std::max_element(ranks_with.begin(), ranks_with.end(), larger);
        const bool majority = int(most->second.size()) * tensor_parallel * 2 > world_size;
        std::string who;
        int differing = 0;
        for (int rank = first; rank < world_size; rank += tensor_parallel) {
            const std::string& of_rank = of_ranks[size_t(rank)];
            if (majority && of_rank.substr(0, 16) == most->first) continue;
            who += format("%srank %d on %s", who.empty() ? "" : ", ", rank, of_rank.substr(17).c_str());
            differing++;
        }
        const char* differ = differing == 1 ? " differs in its weights from the majority of the ranks"
                                            : " differ in their weights from the majority of the ranks";
        refuse_weights(who + (majority ? differ : ": their weights differ, and no majority has the same"), step);
    }
}

void compare_weights(const Groups& groups, const void* weights, int64_t bytes, int64_t step, Stream stream) {
    const uint64_t hash = hash_of_device(weights, bytes, stream);
    check_weight_hashes(groups.world.all_gather_text(format("%016" PRIx64 " %s", hash, host_name().c_str())),
                        groups.tp.world_size, step);
}

void RecomputeCheck::bucket_complete(int bucket, const void* gradients, int64_t bytes, Stream stream) {
    if (pass == off) return;
    const uint64_t hash = hash_of_device(gradients, bytes, stream);
    if (pass == first) return hashes.push_back(hash);
    if (hash == hashes[compared++]) return;
    fail(EXIT_RECOMPUTED,
         "step %lld: the gradients of bucket %d have other bits when they are computed again (--recompute-check): a "
         "memory or a processor is faulty. --resume continues from the last checkpoint; if it happens again on this "
         "machine, leave it out",
         static_cast<long long>(step), bucket);
}
