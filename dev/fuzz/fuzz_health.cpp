// sources: llmc/train/health.cpp llmc/base/json.cpp llmc/base/files.cpp llmc/base/common.cpp
//
// fuzz_health.cpp: reads any text as the health of a run in a checkpoint, once as it is and once as changes to a valid
// one. It must be refused with EXIT_BAD_DATA, or give the same text when it is written, read and written again. Steps
// can be examined with it.
#include <cmath>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/json.h"
#include "train/health.h"

static Health policies(const char* on_nan, const char* on_spike) {
    Health health;
    health.options = {on_nan, on_spike, 6.0};
    return health;
}

static nlohmann::json valid_health() {
    Health health = policies("rollback", "skip");
    for (int64_t step = 0; step < 128; step++) health.examine({step, step % 2 ? 4.0f : 2.0f, 1.0f, 1.0f});
    health.roll_back(7);
    return nlohmann::json::parse(health.json());
}

static void read_health(const std::string& text) {
    for (const char* policy : {"skip", "rollback"}) {
        Health health = policies(policy, policy), again = health;
        health.restore(text, "trainer.json");
        again.restore(health.json(), "trainer.json");
        if (again.json() != health.json()) abort();
        for (int64_t step = 127; step < 131; step++) {
            const float loss = step == 128 ? NAN : float(1 << (step - 120)), factor = step == 128 ? NAN : 1.0f;
            health.limits_of(step);
            health.examine({step, loss, loss, factor});
        }
        health.restore(health.json(), "trainer.json");
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const nlohmann::json valid = valid_health();
    const std::string text(reinterpret_cast<const char*>(data), size);
    try {
        nlohmann::json changed = valid;
        changed.merge_patch(parse_json(text, "trainer.json"));
        read_health(changed.dump());
        read_health(text);
    } catch (const Error& error) {
        if (error.exit_code != EXIT_BAD_DATA) abort();
    }
    return 0;
}
