#include "train/muon.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "model/memory.h"
#include "ops/ops.h"

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

// Elements of the largest matrix, and of the largest product of a matrix with its transpose.
static int64_t most_elements(const ParamLayout& layout) { return int64_t(4) * layout.config.C * layout.config.C; }
static int64_t most_of_product(const ParamLayout& layout) { return round_up(most_elements(layout) / 4, FLAT_ALIGN); }

template <class floatX>
Muon<floatX>::Muon(const ParamLayout& layout, const Groups& groups)
    : matrices(matrices_of(layout)),
      whole(most_elements(layout), PURPOSE),
      comm(groups.dp),
      tensor_comm(groups.tp),
      index(layout.shard.index),
      parts(layout.shard.count > 1 ? most_elements(layout) : 0, PURPOSE),
      squares(1, PURPOSE),
      sums(std::is_same_v<floatX, float> ? 0 : most_of_product(layout), PURPOSE),
      x(most_elements(layout), PURPOSE),
      next(most_elements(layout), PURPOSE),
      a(most_of_product(layout), PURPOSE),
      squared(most_of_product(layout), PURPOSE) {}

template <class floatX>
int64_t muon_bytes(const ParamLayout& layout) {
    const int64_t most = most_elements(layout), product = most_of_product(layout);
    const int64_t floats = most * (layout.shard.count > 1 ? 2 : 1) + 1 + (std::is_same_v<floatX, float> ? 0 : product);
    return floats * int64_t(sizeof(float)) + 2 * (most + product) * int64_t(sizeof(floatX));
}

template <class floatX>
const floatX* Muon<floatX>::newton_schulz(int rows, int cols, Stream stream) {
    const bool tall = rows > cols;
    const int n = std::min(rows, cols);
    const auto times_transposed = [&](floatX* out, const DeviceBuffer<floatX>& left, const DeviceBuffer<floatX>& right,
                                      int N, int IC, int OC) {
        ops::matmul_forward<floatX>(out, nullptr, nullptr, left.data, {right.data, nullptr}, nullptr, nullptr, N, IC,
                                    OC, stream);
    };
    ops::sum_of_squares(squares.data, whole.data, int64_t(rows) * cols, stream);
    ops::muon_normalize(x.data, whole.data, squares.data, int64_t(rows) * cols, stream);
    for (int i = 0; i < ITERATIONS; i++) {
        if (!tall) {
            times_transposed(a.data, x, x, rows, cols, rows);
        } else if constexpr (std::is_same_v<floatX, float>) {
            ops::matmul_backward<floatX>(nullptr, nullptr, a.data, nullptr, x.data, x.data, {}, nullptr, rows, cols,
                                         cols, false, stream);
        } else {
            ops::matmul_backward<floatX>(nullptr, nullptr, sums.data, nullptr, x.data, x.data, {}, nullptr, rows, cols,
                                         cols, false, stream);
            ops::round_gradients(a.data, sums.data, round_up(int64_t(n) * n, FLAT_ALIGN), stream);
        }
        times_transposed(squared.data, a, a, n, n, n);  // A is symmetric, and so is the polynomial
        const auto [first, second, third] = COEFFICIENTS;
        ops::muon_polynomial(squared.data, a.data, squared.data, n, first, second, third, stream);
        if (tall)
            times_transposed(next.data, x, squared, rows, cols, cols);
        else
            ops::matmul_backward<floatX>(next.data, nullptr, nullptr, nullptr, squared.data, nullptr, {x.data, nullptr},
                                         nullptr, rows, cols, rows, false, stream);
        std::swap(x, next);
    }
    return x.data;
}

// Completes the matrix in `whole`.
template <class floatX>
void Muon<floatX>::gather(const float* own, const MuonMatrix& m, Stream stream) {
    const int64_t bytes = m.size() * int64_t(sizeof(float)), row = m.cols * int64_t(sizeof(float));
    const int ranks = tensor_comm.world_size;
    const bool by_columns = m.cols < m.all_cols;
    float* const all = by_columns ? parts.data : whole.data;
    copy_on_device(all + index * m.size(), own, bytes, stream);
    tensor_comm.wait(tensor_comm.all_gather(all, ranks * bytes, stream), stream);
    for (int i = 0; by_columns && i < ranks; i++)
        copy_rows(whole.data + i * m.cols, ranks * row, parts.data + i * m.size(), row, row, m.rows, stream);
}

template <class floatX>
Comm::Ticket Muon<floatX>::orthogonalize(float* bucket, int l, Stream stream) {
    const auto owner = [&](size_t i) { return int((size_t(l) + i) % size_t(comm.world_size)); };
    const auto direction = [&](size_t i) { return reinterpret_cast<floatX*>(bucket + matrices[i].begin); };
    for (size_t i = 0; i < matrices.size(); i++) {
        const MuonMatrix& m = matrices[i];
        if (owner(i) != comm.shard_index) continue;
        gather(bucket + m.begin, m, stream);
        const floatX* all = newton_schulz(m.all_rows, m.all_cols, stream);
        const int64_t row = m.cols * int64_t(sizeof(floatX));
        if (m.cols < m.all_cols)
            copy_rows(direction(i), row, all + index * m.cols, tensor_comm.world_size * row, row, m.rows, stream);
        else
            copy_on_device(direction(i), all + index * m.size(), m.rows * row, stream);
    }
    Comm::Ticket last = 0;
    for (size_t i = 0; i < matrices.size(); i++) {
        const int64_t bytes = matrices[i].size() * int64_t(sizeof(floatX));
        last = comm.broadcast(direction(i), bytes, owner(i), stream);
        comm.bytes_sent += bytes / comm.world_size * (comm.world_size - 1);  // the mean over ranks
    }
    return last;
}

template struct Muon<float>;
template struct Muon<bf16>;
template int64_t muon_bytes<float>(const ParamLayout&);
template int64_t muon_bytes<bf16>(const ParamLayout&);
