// cases.h: tools for the test cases that the CPU and the GPU backend share (cases_<op>.h). A case compares the outputs
// of ops::<op>, of the backend that the program is built for, with those of the definition, cpu::reference. Its
// argument is CpuBackend (cpu_backend.h), which repeats a check on every CPU variant, or GpuBackend
// (gpu/gpu_backend.h), which copies the tensors to the device and back.
#pragma once
#include <cstring>

#include "cpu/variants.h"
#include "support/test.h"

// One output of an operation, widened to float. It may differ from the definition's output d by
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

template <class... T>
Outputs outputs_of(T... all) {
    Outputs outputs;
    (outputs.push_back(std::move(all)), ...);
    return outputs;
}

inline void expect_close(const std::string& prefix, const Outputs& got, const Outputs& want) {
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < got.size(); i++)
        expect_close(prefix + want[i].name, got[i].values, want[i].values, want[i].columns, want[i].relative,
                     want[i].absolute);
}

template <class T>
bool same_bits(const Tensor<T>& a, const Tensor<T>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), size_t(a.bytes())) == 0;
}

inline void expect_same_bits(const std::string& prefix, const Outputs& a, const Outputs& b) {
    for (size_t i = 0; i < a.size(); i++) CHECK_MESSAGE(same_bits(a[i].values, b[i].values), prefix, a[i].name);
}

template <class T>
Tensor<T> copy_of(const Tensor<T>& tensor) {
    Tensor<T> copy(tensor.size());
    for (int64_t i = 0; i < tensor.size(); i++) copy[i] = tensor[i];
    return copy;
}

// The norm of the difference, relative to that of b.
template <class A, class B>
double distance(const Tensor<A>& a, const Tensor<B>& b) {
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < a.size(); i++) {
        difference += std::pow(double(float(a[i])) - double(float(b[i])), 2);
        norm += std::pow(double(float(b[i])), 2);
    }
    return std::sqrt(difference / norm);
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
auto host_argument(T& x) {
    if constexpr (requires { x->data(); })
        return x ? x->data() : nullptr;
    else if constexpr (requires { x.data(); })
        return x.data();
    else
        return x;
}

// Calls operations in the host's memory, like those of cpu::reference.
struct OnHost {
    template <class Op, class... Args>
    void call(const Op& op, Args&&... args) const {
        op(host_argument(args)..., nullptr);
    }
};
