// muon.h: the Muon optimizer (Jordan et al. 2024): the momentum of each matrix of a layer is made nearly orthogonal by
// five Newton-Schulz iterations, whose matmuls are the model's. q, k and v are matrices of their own. The update is
// scaled by 0.2 sqrt(max(rows, columns)), which gives it AdamW's root mean square, so that one --lr serves both (Liu et
// al. 2025). Embeddings, norms and biases are AdamW's (optimizer.h).
//
// A data-parallel rank orthogonalizes its share of the matrices, whole ones, and sends them to the others. With tensor
// parallelism all ranks of a group gather the matrix and compute the same.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/device.h"
#include "model/params.h"
#include "parallel/comm.h"

// A matrix of a layer: what this tensor-parallel rank has of it, from element `begin` of the layer's bucket on.
struct MuonMatrix {
    int64_t begin;
    int rows, cols, all_rows, all_cols;  // the shard's sizes; the whole matrix's

    int64_t size() const { return int64_t(rows) * cols; }
    float scale() const { return 0.2f * std::sqrt(float(std::max(all_rows, all_cols))); }  // factor of the update
};

template <class floatX>
struct Muon {
    static constexpr float MOMENTUM = 0.95f;
    static constexpr int ITERATIONS = 5;
    std::vector<MuonMatrix> matrices;  // those of one layer, in the order of memory

    // layout: that of the model.
    Muon(const ParamLayout& layout, const Groups& groups);

    // Replaces each matrix in the bucket of layer l (fp32, whole on every data-parallel rank) by its direction: size()
    // elements of floatX, from the matrix's begin on. All ranks call it. They are complete when the ticket of the
    // data-parallel group is.
    Comm::Ticket orthogonalize(float* bucket, int l, Stream stream);
    // The direction of the matrix (rows, cols) in `whole`. Returns memory of this object.
    const floatX* newton_schulz(int rows, int cols, Stream stream);

    DeviceBuffer<float> whole;

  private:
    Comm &comm, &tensor_comm;
    int index;                                 // this rank's in the tensor-parallel group
    DeviceBuffer<float> parts;                 // with tensor parallelism: the columns of each rank
    DeviceBuffer<float> squares, sums;         // (1); X^T X in fp32, if floatX is bf16
    DeviceBuffer<floatX> x, next, a, squared;  // X and its successor; A = X X^T or X^T X, and A^2

    void gather(const float* own, const MuonMatrix& matrix, Stream stream);
};

// Bytes of device memory that a Muon allocates.
template <class floatX>
int64_t muon_bytes(const ParamLayout& layout);
