// test_gpu_cudnn.cu: the shared cases of causal attention (cases_attention.h) by cuDNN, deterministic and not, also
// where a micro-batch is processed in parts, and with timed plans. In the emulator, dev/simt/cudnn.cpp executes the
// graphs. A build without cuDNN skips the tests; with cuDNN, a fallback to our own kernels is a failure.
#include "cuda/attention.cuh"
#include "cuda/autotune.h"
#include "gpu/gpu_backend.h"
#include "support/cases_attention.h"
#include "support/refusal.h"

#ifdef SIMT_EMULATOR
#include <cudnn.h>
#endif

using attention_cases::Shape;

static std::string prepared_text(Shape s) { return gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true); }

static bool is_built_in() {
    setenv("SIMT_CUDNN", "1", 1);
    const bool built_in = prepared_text({1, 64, 1, 64}).find("built without") == std::string::npos;
    if (!built_in) skip_case("built without cuDNN");
    return built_in;
}

// Every shape in this file has engines on every GPU of compute capability 8.0 or later.
static void prepare(Shape s, bool deterministic, int64_t part_bytes = 0) {
    gpu::set_attention({AttentionBackend::cudnn, deterministic, part_bytes});
    const std::string line = prepared_text(s);
    INFO(line);
    REQUIRE(line.rfind("cuDNN", 0) == 0);
    REQUIRE(line.find("kernels of ours") == std::string::npos);
    REQUIRE((line.find("not deterministic") == std::string::npos) == deterministic);
}

static WithPoisonedScratch backend_for(Shape s) {
    const int64_t bytes = gpu::attention_scratch_bytes<bf16>(s.B, s.T, s.NH, s.HS);
    device_reserve_scratch(bytes);
    return {{}, bytes};
}

// As on tensor cores: attention weights and their gradients are rounded to bf16 as operands.
static void compare(Shape s) {
    attention_cases::compare<bf16>(backend_for(s), s, {epsilon<bf16>(), 8 * epsilon<float>()});
}

static void compare(Shape s, bool deterministic, int64_t part_bytes = 0) {
    CAPTURE(deterministic);
    prepare(s, deterministic, part_bytes);
    compare(s);
}

TEST_CASE("cuDNN's attention with GPT-2's heads, and with heads of 128, agrees with the definition at any length") {
    if (!is_built_in()) return;
    for (const bool deterministic : {true, false}) {
        for (const int T : {7, 17, 63, 64, 65, 100, 127, 128, 129, 200}) compare({2, T, 2, 64}, deterministic);
        compare({2, 130, 3, 128}, deterministic);
        compare({2, 256, 3, 64}, deterministic);
        if (!emulated) compare({1, 1024, 5, 64}, deterministic);
    }
}

TEST_CASE("backward for one token uses kernels of ours, and forward uses cuDNN; cuDNN alone is refused") {
    if (!is_built_in()) return;
    gpu::set_attention({});
    const Shape s{3, 1, 2, 64};
    const std::string line = prepared_text(s);
    CHECK(line.starts_with("cuDNN "));
    CHECK(line.find("; backward mma kernels of ours: ") != std::string::npos);
    CHECK(line.ends_with("backward for one token"));
    compare(s);
    gpu::set_attention({.backend = AttentionBackend::cudnn});
    const std::string refused = refusal([&] { prepared_text(s); });
    CHECK(refused.starts_with(format("%d --attention cudnn: ", EXIT_USAGE)));
    CHECK(refused.ends_with("backward for one token; give --attention auto"));
}

// dS of a sequence has 2 * 70 * 70 elements, which are 19,600 bytes, so three sequences fit into 60,000 bytes.
TEST_CASE("deterministic backward processes a micro-batch in parts and agrees with the definition") {
    if (!is_built_in()) return;
    for (const int B : {9, 8}) {
        const Shape s{B, 70, 2, 64};
        compare(s, true, 3 * 20000);
        CHECK(prepared_text(s).ends_with(format(", 3 of %d sequences at a time", B)));
    }
    const Shape many{int(device_info().memory_bytes / 32 / (2 * 64 * 512 * 512)) + 1, 512, 64, 64};
    prepare(many, true);  // a part may take 1/32 of the memory, and `many` has one sequence too many for one part
    CHECK(prepared_text(many).ends_with(format(", %d of %d sequences at a time", ceil_div(many.B, 2), many.B)));
    compare({9, 75, 1, 64}, true, 1);  // parts of 4 sequences, so that each part's lse is aligned
    if (!emulated) compare({9, 1024, 1, 64}, true, 10 << 20);  // parts of 5 and 4: dS has 2 MiB a sequence
}

// The result of `run` with the routes timed, and the choices.
template <class Run>
static AlgorithmChoices timed_choices(const Run& run) {
    gpu::load_algorithms({});
    device_time_algorithms(true);
    run();
    device_time_algorithms(false);
    return gpu::algorithms();
}

// Engines by number, as cuDNN 9.15 to 9.28 have them. Where a candidate has another engine, the first candidate runs.
TEST_CASE("deterministic attention by cuDNN, with any of its candidates, gives the same bits in every run") {
    if (!is_built_in()) return;
    const Shape s = emulated ? Shape{1, 100, 2, 64} : Shape{4, 999, 12, 64};
    prepare(s, true);
    const auto same_bits = [&] { attention_cases::same_bits_twice<bf16>(backend_for(s), s); };
    AlgorithmChoices choices = timed_choices(same_bits);
    const std::vector<int> engines = emulated ? std::vector<int>{10, 14} : std::vector<int>{1, 2, 3, 5, 7};
    for (int plan = 0; plan < 4; plan++)
        for (const int engine : engines) {
            CAPTURE(plan);
            CAPTURE(engine);
            for (auto& [key, choice] : choices) choice = format("%d engine %d", plan, engine);
            gpu::load_algorithms(choices);
            for (int again = 0; again < 2; again++) same_bits();
        }
    gpu::load_algorithms({});
}

TEST_CASE("timed plans agree with the definition, and a stored choice is used again") {
    if (!is_built_in()) return;
    const Shape s{3, 120, 4, 64};
    AlgorithmChoices choices = timed_choices([&] { compare(s, true); });
    CHECK(choices.size() == 2);
    for (const auto& [key, choice] : choices) {
        CHECK(key.ends_with(" B 3 T 120 NH 4 HS 64"));
        // The second plan cannot run, which must not end the timing. Of the others the third is the fastest.
        if (emulated) CHECK(choice == "4 engine 14 3.0000 ms, first 5.0000 ms");
    }

    // If there is a choice, nothing is timed again, even if cuDNN no longer offers the chosen plan.
    for (const char* chosen : {"4 engine 14", "4 engine 14 part 3", "4 engine 99", "no plan", "-1 engine 14",
                               "18446744073709551615 engine 14"}) {
        CAPTURE(chosen);
        for (auto& [key, choice] : choices) choice = chosen;
        gpu::load_algorithms(choices);
        compare(s, true);
        CHECK(gpu::algorithms() == choices);
    }
    gpu::load_algorithms({});
}

#ifdef SIMT_EMULATOR
TEST_CASE("a start with a kept choice makes its plans alone") {
    if (!is_built_in()) return;
    constexpr int64_t part_bytes = 3 * 21000;  // three sequences
    AlgorithmChoices kept;
    for (const auto& [key, choice] : timed_choices([&] { compare({8, 72, 2, 64}, true, part_bytes); }))
        kept[std::string(key).replace(key.find(" T 72 "), 6, " T 68 ")] = choice;
    // Another shape with these choices stands for another start, which has prepared nothing. Forward has one plan, and
    // backward two: for three sequences and for the last two.
    const Shape next{8, 68, 2, 64};
    gpu::load_algorithms(kept);
    const int before = simt_cudnn_plans;
    prepare(next, true, part_bytes);
    CHECK(simt_cudnn_plans - before == 3);
    compare(next);
    CHECK(simt_cudnn_plans - before == 3);
    gpu::load_algorithms({});
}
#endif

TEST_CASE("our own kernels run shapes that were not prepared, and everything where they are chosen") {
    if (!is_built_in()) return;
    compare({1, 64, 1, 64}, true);
    gpu::set_attention({.backend = AttentionBackend::mma});
    CHECK(prepared_text({1, 64, 1, 64}) == "mma kernels of ours; backward mma kernels of ours");
    compare({2, 77, 2, 64});
    gpu::set_attention({});
}
