// cpu_backend.h: runs the shared cases of an operation (cases_<op>.h) on every CPU variant that this machine has.
#pragma once
#include "support/cases.h"
#include "support/each_variant.h"

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
