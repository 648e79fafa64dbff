// attention_cudnn.h: the routes of cuDNN to compute attention.
#pragma once
#include <string>
#include <vector>

#include "cuda/attention_route.h"

namespace gpu {

#ifdef USE_CUDNN
std::string cudnn_version();      // "cuDNN 9.19.0"
std::string cudnn_unavailable();  // why it computes no attention; empty if it can

// The route of a kept choice; null if cuDNN does not offer it. part_bytes: as in AttentionOptions.
OwnedRoute cudnn_chosen_route(const AttentionKey& key, int64_t part_bytes, const std::string& kept);

// The route with the first plan; null, with the reason, if there is none.
OwnedRoute cudnn_first_route(const AttentionKey& key, int64_t part_bytes, std::string& reason);

// The routes with the first plans.
std::vector<OwnedRoute> cudnn_candidates(const AttentionKey& key, int64_t part_bytes);

// Upper bound of the scratch_bytes of a route.
int64_t cudnn_scratch_limit(const AttentionKey& key, int64_t part_bytes);
#else
inline std::string cudnn_version() { return "without cuDNN"; }
inline std::string cudnn_unavailable() { return "built without cuDNN"; }
inline OwnedRoute cudnn_chosen_route(const AttentionKey&, int64_t, const std::string&) { return nullptr; }
inline OwnedRoute cudnn_first_route(const AttentionKey&, int64_t, std::string&) { return nullptr; }
inline std::vector<OwnedRoute> cudnn_candidates(const AttentionKey&, int64_t) { return {}; }
inline int64_t cudnn_scratch_limit(const AttentionKey&, int64_t) { return 0; }
#endif

}  // namespace gpu
