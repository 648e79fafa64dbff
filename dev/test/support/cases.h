// cases.h: tools for the test cases that the CPU and the GPU backend share (cases_<op>.h). A case calls an operation on
// host tensors and compares its outputs with the outputs of the definition, cpu::plain.
//
// The operation under test is ops::<op>, of the backend that the program is built for. A case takes its backend as an
// argument: CpuBackend (cpu_backend.h) repeats a check on every CPU variant, GpuBackend (gpu/gpu_backend.h) copies the
// tensors to the device and back.
#pragma once
#include <cstring>

#include "cpu/variants.h"
#include "support/test.h"

// One output of an operation, widened to float. It may differ from the definition's output, d, by
// absolute + relative * |d|.
struct Output {
    std::string name;
    Tensor<float> values;
    int columns;
    float relative, absolute;
};

using Outputs = std::vector<Output>;

template <class T>
Output output(const std::string& name, const Tensor<T>& tensor, int columns, float relative, float absolute) {
    Tensor<float> values(tensor.size());
    for (int64_t i = 0; i < tensor.size(); i++) values[i] = float(tensor[i]);
    return {name, std::move(values), columns, relative, absolute};
}

inline void expect_close(const std::string& prefix, const Outputs& got, const Outputs& want) {
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < got.size(); i++)
        expect_close(prefix + want[i].name, got[i].values, want[i].values, want[i].columns, want[i].relative,
                     want[i].absolute);
}

template <class T>
bool same_bits(const Tensor<T>& a, const Tensor<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), size_t(a.buffer.bytes())) == 0;
}

template <class T>
Tensor<T> copy_of(const Tensor<T>& tensor) {
    Tensor<T> copy(tensor.size());
    for (int64_t i = 0; i < tensor.size(); i++) copy[i] = tensor[i];
    return copy;
}

// Shard i of a vocabulary in `shards` shards of equal size. The last ones are smaller, or empty, if it does not divide.
inline VocabShard shard_of(int V, int shards, int i) {
    const int share = ceil_div(V, shards), first = std::min(V, i * share);
    return {first, std::min(share, V - first)};
}

// The allowed relative difference of two rounded results. In bf16 it is one rounding step: backend and definition round
// once, possibly in different directions. In float each operation rounds several times, and 8 epsilons are enough for
// the operations whose cases use this.
template <class floatX>
constexpr float rounding_step() {
    return sizeof(floatX) == sizeof(float) ? 8 * epsilon<float>() : epsilon<floatX>();
}

// Converts an argument for an operation on the host: a tensor, or a pointer to a tensor that may be null, becomes a
// pointer to the elements.
template <class T>
T* host_argument(Tensor<T>& tensor) {
    return tensor.data();
}
template <class T>
const T* host_argument(const Tensor<T>& tensor) {
    return tensor.data();
}
template <class T>
T* host_argument(Tensor<T>* tensor) {
    return tensor ? tensor->data() : nullptr;
}
template <class T>
const T* host_argument(const Tensor<T>* tensor) {
    return tensor ? tensor->data() : nullptr;
}
template <class T>
T host_argument(T scalar) {
    return scalar;
}

// Calls operations in the host's memory, like those of cpu::plain.
struct OnHost {
    template <class Op, class... Args>
    void call(const Op& op, Args&&... args) const {
        op(host_argument(args)..., nullptr);
    }
};
