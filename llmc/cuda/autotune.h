// autotune.h: chooses among the algorithms of a library by time, and keeps the choices (base/device.h). Used for
// cuBLASLt's algorithms and for the routes to compute attention. A candidate is what may be timed; a choice is the one
// that is kept, as a text for a file and for other ranks.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/device.h"

// ---- Choices as text. The text may have any content: lines and choices that cannot be read are ignored, and their
// shapes are timed again.

using AlgorithmChoices = std::map<std::string, std::string>;

// Writes one choice per line: "device; libraries; shape: algorithm".
std::string choices_text(const AlgorithmChoices& choices);
AlgorithmChoices parse_choices(const std::string& text);

// A matmul's choice: the index of the route, and cuBLASLt's algorithm, of which only cuBLASLt knows the meaning.
struct MatmulChoice {
    int route;
    std::array<uint64_t, 8> algorithm;
    bool operator==(const MatmulChoice&) const = default;
};
std::string choice_text(const MatmulChoice& choice);
std::optional<MatmulChoice> parse_matmul_choice(const std::string& text);

namespace gpu {

// ---- The current choices

// Whether a shape without a choice is to be timed now (device_time_algorithms).
bool timing_algorithms();
// The current choices. load_algorithms replaces them, and increases algorithms_version.
const AlgorithmChoices& algorithms();
void load_algorithms(const AlgorithmChoices& choices);
// Increases with each load_algorithms. A plan that was made at an earlier number is out of date.
int algorithms_version();
struct Fastest {
    size_t index;
    float ms, first_ms;  // times of the fastest candidate, and of the first that can run
};

// A choice; the key names the device, the library's version and the shape. choice_for returns "" if there is none.
// keep_choice adds the times.
std::string choice_for(const std::string& key);
void keep_choice(const std::string& key, const std::string& choice, const Fastest& times);

bool is_capturing(Stream stream);  // a graph: nothing can be timed then (device.cu)

// The largest |a - b| / |b| over pieces of `a` and `b` (rows, parts, width): a piece has a part of 64 or more rows. So
// a wrong row shows, and a small part beside a large one. NaN if an element or |b| = 0 leaves it undefined: no bound
// admits that. ratios: DIFFERENCE_BYTES of scratch memory. Waits for the stream.
constexpr int DIFFERENCE_PIECES = 1024, DIFFERENCE_PARTS = 3;
constexpr int64_t DIFFERENCE_BYTES = DIFFERENCE_PIECES * DIFFERENCE_PARTS * int64_t(sizeof(float));
template <class T>
float largest_difference(const T* a, const T* b, int64_t rows, int parts, int width, void* ratios, Stream stream);

// ---- Choice by time

struct Timers {
    Event start = create_timer(), stop = create_timer();
    Timers() = default;
    Timers(const Timers&) = delete;
    ~Timers() {
        destroy_event(start);
        destroy_event(stop);
    }
};

// Time in milliseconds of the work that `run` queues on the stream. Infinite if run returns false: it cannot run.
template <class Run>
float measure_ms(const Timers& timers, Stream stream, const Run& run) {
    record_event(timers.start, stream);
    if (!run()) return INFINITY;
    record_event(timers.stop, stream);
    wait_for_event(timers.stop);
    return float(1e3 * seconds_between(timers.start, timers.stop));
}

// Times `count` candidates; run(i) queues candidate i, and returns false if it cannot run. Before that it runs the
// first one for warm_ms, because an idle GPU has a low clock, at which the first would seem slow. Each candidate is run
// twice, first to load its kernels. Several within a tenth of the best are then timed in rows, after load_ms of work:
// in a training step the power limit lowers the clock, which favours others than a single call on a cool GPU does. A
// candidate replaces an earlier one only if it is clearly faster, so that noise does not choose. After max_ms of work
// the remaining candidates are not tried. Returns nothing if none can run.
template <class Run>
std::optional<Fastest> fastest(Stream stream, size_t count, const Run& run) {
    constexpr float warm_ms = 10.0f, max_ms = 120.0f, near_ratio = 1.1f, faster_ratio = 0.98f;
    constexpr float load_ms = 200.0f, row_ms = 10.0f;
    constexpr int rows = 4, max_warm_runs = 100;
    const Timers timers;
    const auto ms_of = [&](size_t i) { return measure_ms(timers, stream, [&] { return run(i); }); };
    float warmed = 0.0f;
    for (int n = 0; count > 0 && n < max_warm_runs && warmed < warm_ms; n++) warmed += ms_of(0);
    std::vector<float> ms(count, INFINITY);
    float spent = 0.0f;
    for (size_t i = 0; i < count && spent < max_ms; i++) {
        if (std::isinf(ms_of(i))) continue;
        ms[i] = ms_of(i);
        spent += 2 * ms[i];
    }
    const float limit = near_ratio * (count ? *std::min_element(ms.begin(), ms.end()) : INFINITY);
    // The mean time of candidate i in a row of about `wanted` ms.
    const auto ms_in_row = [&](size_t i, float wanted) {
        const int calls = ms[i] > 0.0f ? std::max(1, int(wanted / ms[i])) : 1;  // in the emulator a kernel takes 0 ms
        const auto row = [&] {
            for (int n = 0; n < calls; n++) run(i);
            return true;
        };
        return measure_ms(timers, stream, row) / float(calls);
    };
    std::vector<size_t> near;
    for (size_t i = 0; i < count; i++)
        if (ms[i] <= limit && !std::isinf(ms[i])) near.push_back(i);
    if (near.size() > 1) {
        ms_in_row(near[0], load_ms);
        std::vector<float> loaded(count, INFINITY);
        for (int row = 0; row < rows; row++)
            for (const size_t i : near) loaded[i] = std::min(loaded[i], ms_in_row(i, row_ms));
        for (const size_t i : near) ms[i] = loaded[i];
    }
    std::optional<Fastest> best;
    for (const size_t i : near)  // the others were not timed under load, and are slower
        if (!best || ms[i] < faster_ratio * best->ms) best = {i, ms[i], 0.0f};
    if (best) best->first_ms = *std::find_if_not(ms.begin(), ms.end(), [](float t) { return std::isinf(t); });
    return best;
}

}  // namespace gpu
