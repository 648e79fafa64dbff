#include "train/muon.h"

#include <algorithm>

// a X + b (X X^T) X + c (X X^T)^2 X, five times, brings singular values of 0.01 to 1 into 0.68 to 1.21. Jordan et al.
// have chosen the coefficients for a steep slope at 0.
constexpr float COEFFICIENTS[] = {3.4445f, -4.7750f, 2.0315f};
constexpr const char* PURPOSE = "Newton-Schulz (--optimizer adamw has none)";

static std::vector<MuonMatrix> matrices_of(const ParamLayout& layout) {
    std::vector<MuonMatrix> matrices;
    for (const Param p : layer_matrices) {
        const Split split = param_table[p].split;
        const int thirds = split == Split::heads ? 3 : 1, count = layout.shard.count;
        MuonMatrix m = {layout.offset(p) - layout.bucket(1).begin, layout.rows(p) / thirds, layout.cols(p), 0, 0};
        m.all_rows = split == Split::input ? m.rows : m.rows * count;
        m.all_cols = split == Split::input ? m.cols * count : m.cols;
        for (int i = 0; i < thirds; i++, m.begin += m.size()) matrices.push_back(m);
    }
    return matrices;
}

static int64_t most_elements(const ParamLayout& layout) { return int64_t(4) * layout.config.C * layout.config.C; }

MuonStacks::MuonStacks(const ParamLayout& layout, MemoryOptions options) {
    // 28 matrices (768, 3072) or 6 (1600, 6400) fill a GPU, 14 (192, 768) are work for a CPU's cores.
    const int64_t enough = device_memory_is_host() ? 2 << 20 : 64 << 20;
    const int64_t C = layout.config.C, least = 4 * C * C, layer = 2 * least;
    // Layers share the memory of their gradients with sums_apart.
    layers_at_once = options.sums_apart() ? 1 : layout.config.L;
    if (device_memory_is_host()) layers_at_once = int(std::clamp<int64_t>(enough / layer, 1, layers_at_once));
    elements = std::max(least, std::min(enough, layers_at_once * layer));
    products = std::max(capacity(int(C), int(C)), capacity(int(C), 4 * int(C))) * C * C;
}

template <class floatX>
Muon<floatX>::Muon(const ParamLayout& layout, MemoryOptions options, const Groups& groups)
    : matrices(matrices_of(layout)),
      stacks(layout, options),
      comm(groups.dp),
      tensor_comm(groups.tp),
      index(layout.shard.index),
      shapes{{layout.config.C, layout.config.C}, {layout.config.C, 4 * layout.config.C}},
      whole(layout.shard.count > 1 ? stacks.elements : 0, PURPOSE),
      parts(layout.shard.count > 1 ? most_elements(layout) : 0, PURPOSE),
      x(stacks.elements, PURPOSE),
      next(stacks.elements, PURPOSE),
      a(stacks.products, PURPOSE),
      squared(stacks.products, PURPOSE) {}

template <class floatX>
int64_t muon_bytes(const ParamLayout& layout, MemoryOptions options) {
    const MuonStacks stacks(layout, options);
    const int64_t gathered = layout.shard.count > 1 ? stacks.elements + most_elements(layout) : 0;
    return gathered * int64_t(sizeof(float)) + 2 * (stacks.elements + stacks.products) * int64_t(sizeof(floatX));
}

template <class floatX>
void Muon<floatX>::iterate(int count, int n, int m, Stream stream) {
    const auto [first, second, third] = COEFFICIENTS;
    for (int i = 0; i < ITERATIONS; i++) {
        ops::matmul_batch(a.data, x.data, x.data, true, count, n, m, n, stream);
        ops::matmul_batch(squared.data, a.data, a.data, true, count, n, n, n, stream);  // A is symmetric
        ops::muon_polynomial(squared.data, a.data, squared.data, count, n, first, second, third, stream);
        ops::matmul_batch(next.data, squared.data, x.data, false, count, n, n, m, stream);
        std::swap(x, next);
    }
}

template <class floatX>
void Muon<floatX>::newton_schulz(const MuonBatch& batch, Stream stream) {
    ops::muon_stack(x.data, batch, stream);
    iterate(batch.count, batch.rows, batch.cols, stream);
    ops::muon_unstack(batch, x.data, stream);
}

template <class floatX>
void Muon<floatX>::time_matmuls(Stream stream) {
    for (const auto& [n, m] : shapes) iterate(stacks.capacity(n, m), n, m, stream);
}

// Completes the matrix, of which `own` is this tensor-parallel rank's part.
template <class floatX>
void Muon<floatX>::gather(float* all, const float* own, const MuonMatrix& m, Stream stream) {
    const int64_t bytes = m.size() * int64_t(sizeof(float)), row = m.cols * int64_t(sizeof(float));
    const int ranks = tensor_comm.world_size;
    const bool by_columns = m.cols < m.all_cols;
    float* const gathered = by_columns ? parts.data : all;
    copy_on_device(gathered + index * m.size(), own, bytes, stream);
    tensor_comm.wait(tensor_comm.all_gather(gathered, ranks * bytes, stream), stream);
    for (int i = 0; by_columns && i < ranks; i++)
        copy_rows(all + i * m.cols, ranks * row, parts.data + i * m.size(), row, row, m.rows, stream);
}

// The reverse for directions, which are floatX in the same memory.
template <class floatX>
void Muon<floatX>::take_own(float* own, const float* all, const MuonMatrix& m, Stream stream) {
    const auto* directions = reinterpret_cast<const floatX*>(all);
    const int64_t row = m.cols * int64_t(sizeof(floatX));
    if (m.cols < m.all_cols)
        copy_rows(own, row, directions + index * m.cols, tensor_comm.world_size * row, row, m.rows, stream);
    else
        copy_on_device(own, directions + index * m.size(), m.rows * row, stream);
}

// Orthogonalizes this data-parallel rank's matrices with sides of n and m.
template <class floatX>
void Muon<floatX>::orthogonalize_own(const std::vector<float*>& buckets, int l, int n, int m, Stream stream) {
    const bool has_parts = tensor_comm.world_size > 1;
    MuonBatch batch = {0, n, m, {}, {}};
    std::vector<std::pair<float*, const MuonMatrix*>> own;
    const auto finish = [&] {
        if (batch.count > 0) newton_schulz(batch, stream);
        for (size_t i = 0; i < own.size() && has_parts; i++)
            take_own(own[i].first, batch.matrices[i], *own[i].second, stream);
        own.clear();
        batch.count = 0;
    };
    for (size_t layer = 0; layer < buckets.size(); layer++)
        for (size_t i = 0; i < matrices.size(); i++) {
            const MuonMatrix& matrix = matrices[i];
            if (owner(l + int(layer), i) != comm.shard_index || matrix.short_side() != n || matrix.long_side() != m)
                continue;
            float* const memory = buckets[layer] + matrix.begin;
            float* const all = has_parts ? whole.data + int64_t(batch.count) * n * m : memory;
            if (has_parts) gather(all, memory, matrix, stream);
            own.emplace_back(memory, &matrix);
            batch.add(all, matrix.all_rows > matrix.all_cols);
            if (batch.count == stacks.capacity(n, m)) finish();
        }
    finish();
}

template <class floatX>
Comm::Ticket Muon<floatX>::orthogonalize(const std::vector<float*>& buckets, int l, Stream stream) {
    for (const auto& [n, m] : shapes) orthogonalize_own(buckets, l, n, m, stream);
    Comm::Ticket last = 0;
    for (size_t layer = 0; layer < buckets.size(); layer++)
        for (size_t i = 0; i < matrices.size(); i++) {
            const int64_t bytes = matrices[i].size() * int64_t(sizeof(floatX));
            last = comm.broadcast(buckets[layer] + matrices[i].begin, bytes, owner(l + int(layer), i), stream);
            comm.bytes_sent += bytes / comm.world_size * (comm.world_size - 1);  // the mean over ranks
        }
    return last;
}

template struct Muon<float>;
template struct Muon<bf16>;
template int64_t muon_bytes<float>(const ParamLayout&, MemoryOptions);
template int64_t muon_bytes<bf16>(const ParamLayout&, MemoryOptions);
