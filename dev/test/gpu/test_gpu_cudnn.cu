// test_gpu_cudnn.cu: compares attention by cuDNN, deterministic and not, with the definition in cpu::reference, also
// where a micro-batch is processed in parts, and with timed plans. In the emulator, dev/simt/cudnn.cpp executes the
// graphs. A build without cuDNN skips the tests; with cuDNN, a fallback to our own kernels is a failure.
#include <cstring>

#include "cpu/variants.h"
#include "cuda/attention.cuh"
#include "cuda/autotune.h"
#include "gpu/on_gpu.h"
#include "support/refusal.h"

#ifdef SIMT_EMULATOR
#include <cudnn.h>
#endif

struct Shape {
    int B, T, NH, HS;
    int C() const { return NH * HS; }
    int64_t tokens() const { return int64_t(B) * T; }
};

struct Outputs {
    Tensor<bf16> out, dqkv;
    Tensor<float> lse;
    explicit Outputs(Shape s)
        : out(poisoned<bf16>(s.tokens() * s.C())),
          dqkv(poisoned<bf16>(s.tokens() * 3 * s.C())),
          lse(poisoned<float>(s.tokens() * s.NH)) {}
};

static bool is_built_in() {
    setenv("SIMT_CUDNN", "1", 1);
    const bool built_in = gpu::prepare_attention<bf16>(1, 64, 1, 64, true).find("built without") == std::string::npos;
    if (!built_in) skip_case("built without cuDNN");
    return built_in;
}

// Every shape in this file has engines on every GPU of compute capability 8.0 or later.
static void prepare(Shape s, bool deterministic, std::vector<int64_t> part_bytes = {256 << 20}) {
    gpu::set_attention({AttentionBackend::cudnn, deterministic, std::move(part_bytes)});
    const std::string line = gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true);
    INFO(line);
    REQUIRE(line.rfind("cuDNN", 0) == 0);
    REQUIRE(line.find("kernels of ours") == std::string::npos);
    REQUIRE((line.find("not deterministic") == std::string::npos) == deterministic);
}

// Fills the scratch memory with NaN. What the previous call left there could otherwise hide that this call does not
// write it.
static void poison_scratch(Shape s) {
    const int64_t bytes = gpu::attention_scratch_bytes<bf16>(s.B, s.T, s.NH, s.HS);
    device_reserve_scratch(bytes);
    check_cuda(cudaMemset(device_scratch(bytes), 0xff, size_t(bytes)));
}

// Runs forward and backward.
static Outputs computed(Shape s, Tensor<bf16>& qkv, Tensor<bf16>& dout) {
    Outputs r(s);
    const auto [B, T, NH, HS] = s;
    OnGpu<bf16> x(qkv), dy(dout), out(r.out), dqkv(r.dqkv);
    OnGpu<float> lse(r.lse);
    poison_scratch(s);
    gpu::attention_forward<bf16>(out, lse, x, B, T, NH, HS, nullptr);
    gpu::attention_backward<bf16>(dqkv, dy, out, lse, x, B, T, NH, HS, nullptr);
    check_cuda(cudaDeviceSynchronize());
    out.back(), lse.back(), dqkv.back();
    return r;
}

// Sequence b of a tensor (B, T, width).
template <class T>
static Tensor<T> sequence(const Tensor<T>& all, Shape s, int b, int width) {
    const int64_t size = int64_t(s.T) * width;
    Tensor<T> part(size);
    memcpy(part.data(), all.data() + b * size, size_t(size) * sizeof(T));
    return part;
}

// The tolerances are as in test_gpu_attention.cu on tensor cores: attention weights and their gradients are rounded to
// bf16 as operands. In addition, backward reads cuDNN's out, as in training, which differs from the definition's by up
// to half a bf16 step. This changes row_sums by about sqrt(HS) / 2 steps, and the gradients, which are divided by
// sqrt(HS), by half a step more.
static void compare_sequence(const Outputs& got, const Tensor<bf16>& qkv, const Tensor<bf16>& dout, Shape s, int b) {
    CAPTURE(b);
    const Shape one{1, s.T, s.NH, s.HS};
    const auto x = sequence(qkv, s, b, 3 * s.C()), dy = sequence(dout, s, b, s.C());
    Outputs want(one);
    cpu::reference::attention_forward(want.out.data(), want.lse.data(), x.data(), 1, s.T, s.NH, s.HS, nullptr);
    cpu::reference::attention_backward(want.dqkv.data(), dy.data(), want.out.data(), want.lse.data(), x.data(), 1, s.T,
                                       s.NH, s.HS, nullptr);
    const float sum_error = 4.0f * (std::sqrt(float(s.HS)) + std::sqrt(float(s.T))) * epsilon<float>();
    const float rounding = epsilon<bf16>(), operands = epsilon<bf16>();
    expect_close("out", sequence(got.out, s, b, s.C()), want.out, s.C(), rounding, sum_error + 0.85f * operands);
    expect_close("lse", sequence(got.lse, s, b, s.NH), want.lse, s.T, 8 * epsilon<float>(), sum_error);
    expect_close("dqkv", sequence(got.dqkv, s, b, 3 * s.C()), want.dqkv, 3 * s.C(), rounding,
                 4 * sum_error + 2.2f * operands);
}

static void compare(Shape s, bool deterministic, std::initializer_list<int> sequences,
                    std::vector<int64_t> part_bytes = {256 << 20}) {
    INFO("B ", s.B, " T ", s.T, " NH ", s.NH, " HS ", s.HS, " deterministic ", deterministic);
    prepare(s, deterministic, std::move(part_bytes));
    auto qkv = random_tensor<bf16>(s.tokens() * 3 * s.C(), 1), dout = random_tensor<bf16>(s.tokens() * s.C(), 2);
    const Outputs got = computed(s, qkv, dout);
    for (const int b : sequences) compare_sequence(got, qkv, dout, s, b);
}

TEST_CASE("cuDNN's attention with GPT-2's heads, and with heads of 128, agrees with the definition at any length") {
    if (!is_built_in()) return;
    for (const bool deterministic : {true, false}) {
        for (const int T : {7, 17, 63, 64, 65, 100, 127, 128, 129, 200}) compare({3, T, 2, 64}, deterministic, {0, 2});
        compare({2, 130, 3, 128}, deterministic, {0, 1});
        compare({2, 256, 3, 64}, deterministic, {0, 1});
        if (emulated) continue;
        compare({1, 1024, 12, 64}, deterministic, {0});
        compare({2, 1024, 5, 64}, deterministic, {1});
    }
}

TEST_CASE("backward for one token uses kernels of ours, and forward uses cuDNN; cuDNN alone is refused") {
    if (!is_built_in()) return;
    gpu::set_attention({});
    const Shape s{3, 1, 2, 64};
    const std::string line = gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true);
    CHECK(line.starts_with("cuDNN "));
    CHECK(line.find("; backward mma kernels of ours: ") != std::string::npos);
    CHECK(line.ends_with("backward for one token"));
    auto qkv = random_tensor<bf16>(s.tokens() * 3 * s.C(), 1), dout = random_tensor<bf16>(s.tokens() * s.C(), 2);
    const Outputs got = computed(s, qkv, dout);
    for (const int b : {0, 1, 2}) compare_sequence(got, qkv, dout, s, b);
    gpu::set_attention({.backend = AttentionBackend::cudnn});
    const std::string refused = refusal([&] { gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true); });
    CHECK(refused.starts_with(format("%d --attention cudnn: ", EXIT_USAGE)));
    CHECK(refused.ends_with("backward for one token; give --attention auto"));
}

// dS of a sequence has 2 * 70 * 70 elements, which are 19,600 bytes, so three sequences fit into 60,000 bytes.
TEST_CASE("deterministic backward processes a micro-batch in parts and agrees with the definition") {
    if (!is_built_in()) return;
    for (const int B : {9, 8}) {
        const Shape s{B, 70, 2, 64};
        compare(s, true, {0, 2, 3, 5, 6, B - 1}, {3 * 20000});
        const std::string line = gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true);
        CHECK(line.find(format("3 of %d sequences at a time", B)) != std::string::npos);
    }
    const Shape many{int(device_info().memory_bytes / 32 / (2 * 64 * 512 * 512)) + 1, 512, 64, 64};
    prepare(many, true, {0});  // a part may take 1/32 of the memory, and `many` has one sequence too many for one part
    const std::string line = gpu::prepare_attention<bf16>(many.B, many.T, many.NH, many.HS, true);
    CHECK(line.find(format("%d of %d sequences at a time", ceil_div(many.B, 2), many.B)) != std::string::npos);
    compare({9, 75, 1, 64}, true, {0, 3, 4, 8}, {1});  // parts of 4 sequences, so that each part's lse is aligned
    if (!emulated) compare({9, 1024, 16, 64}, true, {0, 4, 5, 8});  // parts of 5 and 4: dS has 32 MiB a sequence
}

static void expect_same_bits(const Outputs& a, const Outputs& b) {
    CHECK(memcmp(a.out.data(), b.out.data(), size_t(a.out.buffer.bytes())) == 0);
    CHECK(memcmp(a.lse.data(), b.lse.data(), size_t(a.lse.buffer.bytes())) == 0);
    CHECK(memcmp(a.dqkv.data(), b.dqkv.data(), size_t(a.dqkv.buffer.bytes())) == 0);
}

// Engines by number, as cuDNN 9.15 to 9.28 have them. Where a candidate has another engine, the first candidate runs.
TEST_CASE("deterministic attention by cuDNN, with any of its candidates, gives the same bits in every run") {
    if (!is_built_in()) return;
    const Shape s = emulated ? Shape{1, 100, 2, 64} : Shape{4, 999, 12, 64};
    prepare(s, true);
    auto qkv = random_tensor<bf16>(s.tokens() * 3 * s.C(), 1), dout = random_tensor<bf16>(s.tokens() * s.C(), 2);
    gpu::load_algorithms({});
    device_time_algorithms(true);
    computed(s, qkv, dout);
    device_time_algorithms(false);
    AlgorithmChoices choices = gpu::algorithms();
    const std::vector<int> engines = emulated ? std::vector<int>{6, 10, 14} : std::vector<int>{1, 2, 3, 5, 6, 7};
    for (int plan = 0; plan < 4; plan++)
        for (const int engine : engines) {
            CAPTURE(plan);
            CAPTURE(engine);
            for (auto& [key, choice] : choices) choice = format("%d engine %d part %d", plan, engine, s.B);
            gpu::load_algorithms(choices);
            const Outputs first = computed(s, qkv, dout);
            for (int again = 0; again < 3; again++) expect_same_bits(first, computed(s, qkv, dout));
        }
    gpu::load_algorithms({});
}

TEST_CASE("timed plans agree with the definition, and a stored choice is used again") {
    if (!is_built_in()) return;
    gpu::load_algorithms({});
    device_time_algorithms(true);
    compare({3, 120, 4, 64}, true, {0, 2});
    device_time_algorithms(false);
    AlgorithmChoices choices = gpu::algorithms();
    CHECK(choices.size() == 2);
    for (const auto& choice : choices) {
        CHECK(choice.first.ends_with(" B 3 T 120 NH 4 HS 64"));
        // The second plan cannot run, which must not end the timing. Of the others the last is the fastest: the third,
        // or for backward a fourth.
        const bool backward = choice.first.find("backward") != std::string::npos;
        const char* fastest = backward ? "5 engine 6 part 3 2.0000 ms" : "4 engine 14 part 3 3.0000 ms";
        if (emulated) CHECK(choice.second == std::string(fastest) + ", first 5.0000 ms");
    }

    // If there is a choice, nothing is timed again, even if cuDNN no longer offers the chosen plan.
    for (const char* chosen : {"4 engine 14 part 3", "4 engine 99 part 3", "4 engine 14 part 2", "4 engine 14 part 4",
                               "no plan", "18446744073709551615 engine 14 part 3"}) {
        CAPTURE(chosen);
        for (auto& [shape, choice] : choices) choice = chosen;
        gpu::load_algorithms(choices);
        compare({3, 120, 4, 64}, true, {0, 2});
        CHECK(gpu::algorithms() == choices);
    }
    gpu::load_algorithms({});
}

#ifdef SIMT_EMULATOR
// dS of eight sequences has 165,888 bytes. Three take 62,208, which fit into the emulated cache, so that three parts
// take 0.6 ms, less than the 2 ms of the best plan for eight sequences.
TEST_CASE("the size of the parts is timed, and a start with a kept choice makes its plans alone") {
    if (!is_built_in()) return;
    const Shape s{8, 72, 2, 64};
    const std::vector<int64_t> part_bytes = {21000, 3 * 21000, 0};
    gpu::load_algorithms({});
    const auto scratch = [&] { return gpu::attention_scratch_bytes<bf16>(s.B, s.T, s.NH, s.HS); };
    gpu::set_attention({.part_bytes = part_bytes});
    const int64_t most = scratch();
    device_time_algorithms(true);
    compare(s, true, {0, 2, 3, 7}, part_bytes);
    device_time_algorithms(false);
    const int64_t chosen = scratch();
    CHECK(chosen < most / 2);  // dS of three sequences in place of eight
    const std::string line = gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true);
    CHECK(line.ends_with("backward cuDNN 9.25.0, engine 10, deterministic, 3 of 8 sequences at a time"));
    AlgorithmChoices choices = gpu::algorithms();
    REQUIRE(choices.size() == 2);
    CHECK(choices.begin()->second.starts_with("0 engine 10 part 3 0.6000 ms, first 5.0000 ms"));

    // Another shape with these choices stands for another start, which has prepared nothing. Forward has one plan, and
    // backward two: for three sequences and for the last two.
    const Shape next{8, 68, 2, 64};
    AlgorithmChoices kept;
    for (const auto& [key, choice] : choices) kept[std::string(key).replace(key.find(" T 72 "), 6, " T 68 ")] = choice;
    gpu::load_algorithms(kept);
    const int before = simt_cudnn_plans;
    prepare(next, true, part_bytes);
    const int made = simt_cudnn_plans - before;
    CHECK(made == 3);
    compare(next, true, {0, 2, 3, 7}, part_bytes);
    CHECK(simt_cudnn_plans - before == made);
    gpu::load_algorithms({});
}
#endif

TEST_CASE("our own kernels run shapes that were not prepared, and everything where they are chosen") {
    if (!is_built_in()) return;
    compare({1, 64, 1, 64}, true, {0});
    gpu::set_attention({.backend = AttentionBackend::mma});
    const std::string line = gpu::prepare_attention<bf16>(1, 64, 1, 64, true);
    CHECK(line == "mma kernels of ours; backward mma kernels of ours");
    const Shape s{2, 77, 2, 64};
    auto qkv = random_tensor<bf16>(s.tokens() * 3 * s.C(), 1), dout = random_tensor<bf16>(s.tokens() * s.C(), 2);
    const Outputs unprepared = computed(s, qkv, dout);
    for (const int b : {0, 1}) compare_sequence(unprepared, qkv, dout, s, b);
    gpu::set_attention({});
}
