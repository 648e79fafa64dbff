// muon.h: the Muon optimizer (Jordan et al. 2024): the momentum of each matrix of a layer is made nearly orthogonal by
// five Newton-Schulz iterations, whose matmuls are the model's. q, k and v are matrices of their own. The update is
// scaled by 0.2 sqrt(max(rows, columns)), which gives it AdamW's root mean square, so that one --lr serves both (Liu et
// al. 2025). Embeddings, norms and biases are AdamW's (optimizer.h).
//
// Matrices of one shape, of several layers, are made orthogonal together: each of them is too small for a GPU. (With
// 46 launches for 1,860, and timed matmuls, the update of 124M takes 5.3 ms for 11.1 on an H200.) One with more rows
// than columns is transposed for it. A data-parallel rank orthogonalizes its share of the matrices, whole
// ones, and sends them to the others. With tensor parallelism all ranks of a group gather the matrix and compute the
// same.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/device.h"
#include "model/memory.h"
#include "model/params.h"
#include "ops/ops.h"
#include "parallel/comm.h"

// A matrix of a layer: what this tensor-parallel rank has of it, from element `begin` of the layer's bucket on.
struct MuonMatrix {
    int64_t begin;
    int rows, cols, all_rows, all_cols;  // the shard's sizes; the whole matrix's

    int64_t size() const { return int64_t(rows) * cols; }
    int short_side() const { return std::min(all_rows, all_cols); }
    int long_side() const { return std::max(all_rows, all_cols); }
    float scale() const { return 0.2f * std::sqrt(float(long_side())); }  // factor of the update
};

// Sizes of the memory in which matrices of one shape are made orthogonal together: as many as keep the device busy.
struct MuonStacks {
    int layers_at_once;
    int64_t elements, products;  // elements of the matrices; elements of their products with their transposes

    MuonStacks(const ParamLayout& layout, MemoryOptions options);
    // How many (n, m) matrices are in a stack at most.
    int capacity(int n, int m) const {
        const int64_t most = std::min(MuonBatch::MOST, layers_at_once * (n == m ? 4 : 2));
        return int(std::clamp<int64_t>(elements / (int64_t(n) * m), 1, most));
    }
};

template <class floatX>
struct Muon {
    static constexpr float MOMENTUM = 0.95f;
    static constexpr int ITERATIONS = 5;
    std::vector<MuonMatrix> matrices;  // matrices of one layer, in the order of memory
    MuonStacks stacks;

    // layout: that of the model.
    Muon(const ParamLayout& layout, MemoryOptions options, const Groups& groups);

    // Replaces each matrix in the buckets (fp32, whole on every data-parallel rank) by its direction: size() floatX
    // elements from the matrix's begin on. buckets: those of layer l and the layers after it, at most
    // layers_at_once. All ranks call it. The directions are complete when the ticket of the data-parallel group is.
    Comm::Ticket orthogonalize(const std::vector<float*>& buckets, int l, Stream stream);
    // Replaces each matrix of the batch, of capacity() matrices at most, by its direction.
    void newton_schulz(const MuonBatch& batch, Stream stream);
    // Computes with full stacks of any numbers, so that their matmuls are timed (device_time_algorithms).
    void time_matmuls(Stream stream);

  private:
    Comm &comm, &tensor_comm;
    int index;                                 // this rank's index in the tensor-parallel group
    std::pair<int, int> shapes[2];             // the sides of the matrices, the shorter one first
    DeviceBuffer<float> whole, parts;          // whole matrices, with tensor parallelism; the columns of each rank
    DeviceBuffer<floatX> x, next, a, squared;  // stacks of X and its successor; of A = X X^T and A^2

    int owner(int l, size_t matrix) const { return int((size_t(l) + matrix) % size_t(comm.world_size)); }
    void iterate(int count, int n, int m, Stream stream);
    void orthogonalize_own(const std::vector<float*>& buckets, int l, int n, int m, Stream stream);
    void gather(float* all, const float* own, const MuonMatrix& matrix, Stream stream);
    void take_own(float* own, const float* all, const MuonMatrix& matrix, Stream stream);
};

// Bytes of device memory that a Muon allocates.
template <class floatX>
int64_t muon_bytes(const ParamLayout& layout, MemoryOptions options);
