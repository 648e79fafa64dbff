// autotune.cpp: the choices among algorithms (autotune.h).
#include "cuda/autotune.h"

#include "base/device.h"

namespace {

// One host thread queues all work of a GPU, so the choices need no lock.
struct Choices {
    AlgorithmChoices all;
    int version = 0;
    bool timing = false;
};

Choices& choices() {
    static Choices choices;
    return choices;
}

}  // namespace

bool gpu::timing_algorithms() { return choices().timing; }
int gpu::algorithms_version() { return choices().version; }

std::string gpu::choice_for(const std::string& key) {
    const auto found = choices().all.find(key);
    return found == choices().all.end() ? "" : found->second;
}

void gpu::keep_choice(const std::string& key, const std::string& choice, const Fastest& times) {
    choices().all[key] = choice + format(" %.4f ms, first %.4f ms", double(times.ms), double(times.first_ms));
}

bool gpu::is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

const AlgorithmChoices& gpu::algorithms() { return choices().all; }

void gpu::load_algorithms(const AlgorithmChoices& all) {
    choices().all = all;
    choices().version++;
}

void device_load_algorithms(const std::string& text) { gpu::load_algorithms(parse_choices(text)); }
std::string device_algorithms() { return choices_text(choices().all); }
void device_time_algorithms(bool on) { choices().timing = on; }
