// each_variant.h: compares every variant of an operation that this machine can run with its reference, cpu::plain.
#pragma once
#include <cstring>
#include <functional>

#include <omp.h>

#include "cpu/variants.h"
#include "cpu/isa.h"
#include "support/test.h"

// One output (rows, columns), widened to float. Tolerance of an element: absolute + relative * |reference|.
struct Result {
    std::string name;
    Tensor<float> values;
    int columns;
    float relative, absolute;
};

template <class T>
Result result(const std::string& name, const Tensor<T>& tensor, int columns, float relative, float absolute) {
    Tensor<float> values(tensor.size());
    for (int64_t i = 0; i < tensor.size(); i++) values[i] = float(tensor[i]);
    return {name, std::move(values), columns, relative, absolute};
}

using Results = std::vector<Result>;

// Sets the instruction set and the number of threads of the operations until the end of the scope.
struct RunsOn {
    Isa isa_before = isa();
    int threads_before = omp_get_max_threads();
    RunsOn(Isa level, int threads) {
        set_isa(level);
        omp_set_num_threads(threads);
    }
    ~RunsOn() {
        set_isa(isa_before);
        omp_set_num_threads(threads_before);
    }
};

inline std::vector<Isa> available_isas(Isa highest = best_isa()) {
    std::vector<Isa> levels;
    for (int i = 0; i <= int(std::min(highest, best_isa())); i++) levels.push_back(Isa(i));
    return levels;
}

// Checks run() with each instruction set up to `highest`: its results are within the tolerance of the reference, and
// have the same bits on 1, 2 and 3 threads.
inline void check_variants(const Results& reference, const std::function<Results()>& run, Isa highest = best_isa()) {
    for (const Isa level : available_isas(highest)) {
        Results first;
        for (int threads = 1; threads <= 3; threads++) {
            const RunsOn setting(level, threads);
            Results got = run();
            REQUIRE(got.size() == reference.size());
            if (threads == 1) {
                for (size_t i = 0; i < got.size(); i++) {
                    const Result& want = reference[i];
                    expect_close(std::string(isa_name(level)) + " " + want.name, got[i].values, want.values,
                                 want.columns, want.relative, want.absolute);
                }
                first = std::move(got);
                continue;
            }
            for (size_t i = 0; i < got.size(); i++) {
                INFO(isa_name(level), " ", got[i].name, " on ", threads, " threads");
                CHECK(std::memcmp(got[i].values.data(), first[i].values.data(), got[i].values.buffer.bytes()) == 0);
            }
        }
    }
}

// Relative tolerance of two variants. bf16: one step, because each variant rounds the result once, perhaps in different
// directions. float: 8 steps, which cover the roundings inside every operation tested here.
template <class floatX>
constexpr float rounding() {
    return sizeof(floatX) == sizeof(float) ? 8 * epsilon<float>() : epsilon<floatX>();
}
