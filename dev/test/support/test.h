// test.h: helpers of tests of operations: random and poisoned tensors, and comparison element by element.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/random.h"
#include "cpu/memory.h"
#include "ops/ops.h"
#include "support/random_tokens.h"
#include "support/skip.h"

// Marks a test case with large matmuls or long sequences: TEST_CASE("name" * LARGE). scripts/test.sh leaves it out
// where matrix instructions are emulated, because it would take minutes.
inline const doctest::test_suite LARGE("large");

// An owned array in host memory, aligned to 64 bytes, on which the CPU's operations work, also in programs of the CUDA
// backend.
template <class T>
struct Tensor {
    explicit Tensor(int64_t size)
        : memory(static_cast<T*>(cpu::allocate(size * int64_t(sizeof(T)), "a test tensor", true)), cpu::release),
          elements(size) {}
    T* data() { return memory.get(); }
    const T* data() const { return memory.get(); }
    int64_t size() const { return elements; }
    int64_t bytes() const { return elements * int64_t(sizeof(T)); }
    T& operator[](int64_t i) { return data()[i]; }
    const T& operator[](int64_t i) const { return data()[i]; }

  private:
    std::unique_ptr<T, void (*)(void*)> memory;
    int64_t elements;
};

// Standard normal numbers times scale, plus offset, rounded to T. The same seed gives the same numbers.
template <class T>
Tensor<T> random_tensor(int64_t size, uint64_t seed, float scale = 1.0f, float offset = 0.0f) {
    Tensor<T> tensor(size);
    const Philox random{seed, 0};
    for (int64_t i = 0; i < size; i++) tensor[i] = T(scale * random.normal(uint64_t(i)) + offset);
    return tensor;
}

template <class T>
Tensor<T> filled(int64_t size, float value) {
    Tensor<T> tensor(size);
    for (int64_t i = 0; i < size; i++) tensor[i] = T(value);
    return tensor;
}

// All elements are NaN, to detect elements that are never written.
template <class T>
Tensor<T> poisoned(int64_t size) {
    return filled<T>(size, std::numeric_limits<float>::quiet_NaN());
}

// Integers in [0, below).
inline Tensor<int> random_tokens(int64_t size, int below, uint64_t seed) {
    const std::vector<int> tokens = random_token_list(size, below, seed);
    Tensor<int> tensor(size);
    std::copy(tokens.begin(), tokens.end(), tensor.data());
    return tensor;
}

// Checks |got - want| <= absolute + relative * |want| for every element. NaN always fails. The message names the worst
// element as [row, column] of rows of `columns` elements.
template <class A, class B>
void expect_close(const std::string& name, const Tensor<A>& got, const Tensor<B>& want, int columns, float relative,
                  float absolute) {
    REQUIRE(got.size() == want.size());
    int64_t off = 0, worst = 0;
    float worst_ratio = -1.0f;
    for (int64_t i = 0; i < got.size(); i++) {
        const float g = float(got[i]), w = float(want[i]);
        const float tolerance = absolute + relative * std::fabs(w);
        if (std::fabs(g - w) <= tolerance) continue;  // false for NaN
        off++;
        const float ratio = std::isnan(g - w) ? std::numeric_limits<float>::infinity() : std::fabs(g - w) / tolerance;
        if (ratio > worst_ratio) worst_ratio = ratio, worst = i;
    }
    const std::string where =
        off ? format("%s: %lld of %lld off; worst at [%lld, %lld]: got %.9g, want %.9g (%.1f x the tolerance)",
                     name.c_str(), static_cast<long long>(off), static_cast<long long>(got.size()),
                     static_cast<long long>(worst / columns), static_cast<long long>(worst % columns),
                     double(float(got[worst])), double(float(want[worst])), double(worst_ratio))
            : name;
    CHECK_MESSAGE(off == 0, where);
}
