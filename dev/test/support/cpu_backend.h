// cpu_backend.h: runs the shared cases of an operation (cases_<op>.h) on every CPU variant that this machine has.
#pragma once
#include <omp.h>

#include "support/cases.h"

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

struct CpuBackend : OnHost {
    std::vector<Isa> levels = available_isas();

    template <class Check>
    void on_each_variant(const Check& check) const {
        for (const Isa level : levels) {
            const RunsOn setting(level, 2);
            const std::string variant = isa_name(level);
            CAPTURE(variant);
            check();
        }
    }

    // On one thread the outputs of every variant are close to the definition's. On 2 and 3 threads they have the same
    // bits as on one.
    template <class Run>
    void compare(const Outputs& definition, const Run& run) const {
        for (const Isa level : levels) {
            Outputs first;
            for (int threads = 1; threads <= 3; threads++) {
                const RunsOn setting(level, threads);
                Outputs got = run();
                if (threads > 1) {
                    expect_same_bits(format("%s on %d threads ", isa_name(level), threads), got, first);
                    continue;
                }
                expect_close(std::string(isa_name(level)) + " ", got, definition);
                first = std::move(got);
            }
        }
    }
};
