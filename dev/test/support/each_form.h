// each_form.h: an operation in every form that this machine offers against its definition in cpu::plain.
#pragma once
#include <cstring>
#include <functional>

#include <omp.h>

#include "cpu/forms.h"
#include "cpu/isa.h"
#include "support/test.h"

// One output, widened to float, and how far the forms may be apart: absolute + relative * |definition|.
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

// Sets what the operations run on, and puts it back.
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

// At each level: the results are those of the definition, and have the same bits on 1, 2 and 3 threads.
inline void check_forms(const Results& definition, const std::function<Results()>& run, Isa highest = best_isa()) {
    for (const Isa level : available_isas(highest)) {
        Results first;
        for (int threads = 1; threads <= 3; threads++) {
            const RunsOn setting(level, threads);
            Results got = run();
            REQUIRE(got.size() == definition.size());
            if (threads == 1) {
                for (size_t i = 0; i < got.size(); i++) {
                    const Result& want = definition[i];
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

// The step from a rounded result to its neighbour: both forms round once, perhaps to different sides. For float there
// are more roundings on the way, of which 8 cover every operation here.
template <class floatX>
constexpr float rounding() {
    return sizeof(floatX) == sizeof(float) ? 8 * epsilon<float>() : epsilon<floatX>();
}
