// attention_cudnn.h: the routes of cuDNN to compute attention.
#pragma once
#include <string>
#include <vector>

#include "cuda/attention_route.h"

namespace gpu {

using PartBytes = std::vector<int64_t>;  // AttentionOptions::part_bytes

#ifdef USE_CUDNN
std::string cudnn_version();      // "cuDNN 9.19.0"
std::string cudnn_unavailable();  // why it computes no attention; empty if it can

// The route of a kept choice; null if cuDNN does not offer it.
OwnedRoute cudnn_chosen_route(const AttentionKey& key, const std::string& kept);

// The route with the first plan and the largest part; null, with the reason, if there is none.
OwnedRoute cudnn_first_route(const AttentionKey& key, const PartBytes& part_bytes, std::string& reason);

// The first plans with the largest part, and smaller parts with the first of these plans that stores dS. A small dS may
// stay in the L2 cache.
std::vector<OwnedRoute> cudnn_candidates(const AttentionKey& key, const PartBytes& part_bytes);

// Upper bound of the scratch_bytes of a route.
int64_t cudnn_scratch_limit(const AttentionKey& key, const PartBytes& part_bytes);
#else
inline std::string cudnn_version() { return "without cuDNN"; }
inline std::string cudnn_unavailable() { return "built without cuDNN"; }
inline OwnedRoute cudnn_chosen_route(const AttentionKey&, const std::string&) { return nullptr; }
inline OwnedRoute cudnn_first_route(const AttentionKey&, const PartBytes&, std::string&) { return nullptr; }
inline std::vector<OwnedRoute> cudnn_candidates(const AttentionKey&, const PartBytes&) { return {}; }
inline int64_t cudnn_scratch_limit(const AttentionKey&, const PartBytes&) { return 0; }
#endif

}  // namespace gpu
