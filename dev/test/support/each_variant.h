// each_variant.h: the instruction sets that this machine can run, and the choice of one of them for a test.
#pragma once
#include <omp.h>

#include "cpu/variants.h"
#include "support/test.h"

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
