// test_gpu_attention_routes.cu: the choice among the routes to compute attention. Other kernels take the place of ours
// for Hopper: wrong ones, which must be refused, and right ones, which are chosen where they are faster. In the
// emulator kernels take no time, so these take what a test says.
#include "cuda/attention.cuh"
#include "cuda/autotune.h"
#include "gpu/gpu_backend.h"
#include "support/cases_attention.h"
#include "support/refusal.h"

using gpu::AttentionCall;

static const GpuBackend gpu_backend;
static const attention_cases::Shape shape{2, 70, 2, 64};
static const int C = shape.C();

static const gpu::AttentionKernels own_mma = gpu::mma_attention, own_wgmma = gpu::wgmma_attention;

// The results of the test's kernels, and the time that they take.
struct Planted {
    std::function<void(const AttentionCall& call, Stream stream)> compute = own_mma.run;
    float ms = 1.0f, mma_ms = 4.0f;
    int runs = 0, mma_runs = 0;
};
static Planted planted;

// The test's kernels, on every GPU, and no choices. Without cuDNN in the emulator mma is the other route.
struct WithPlanted {
    explicit WithPlanted(Planted p) {
        setenv("SIMT_CUDNN", "0", 1);
        planted = p;
        gpu::mma_attention.run = [](const AttentionCall& call, Stream stream) {
            planted.mma_runs++;
            own_mma.run(call, stream);
            take_time(planted.mma_ms, stream);
        };
        gpu::wgmma_attention = {"wgmma", 1, [](const gpu::AttentionSizes&) { return std::string(); },
                                own_mma.scratch_bytes,
                                [](const AttentionCall& call, Stream stream) {
                                    planted.runs++;
                                    planted.compute(call, stream);
                                    take_time(planted.ms, stream);
                                }};
        gpu::set_attention({});
        gpu::load_algorithms({});
    }
    ~WithPlanted() {
        gpu::mma_attention = own_mma;
        gpu::wgmma_attention = own_wgmma;
        gpu::load_algorithms({});
    }
};

static std::string prepared_text(attention_cases::Shape s = shape) {
    return gpu::prepare_attention<bf16>(s.B, s.T, s.NH, s.HS, true);
}

// Forward and backward of prepared sizes. timed: the first call of each times the routes.
static Outputs computed(bool timed, attention_cases::Shape s = shape) {
    using attention_cases::tested;
    prepared_text(s);
    const auto qkv = random_tensor<bf16>(s.tokens() * 3 * C, 1), dout = random_tensor<bf16>(s.tokens() * C, 2);
    device_reserve_scratch(gpu::attention_scratch_bytes<bf16>(s.B, s.T, s.NH, s.HS));
    device_time_algorithms(timed);
    const auto r = attention_cases::forward(gpu_backend, tested<bf16>, s, qkv);
    const auto dqkv = attention_cases::backward(gpu_backend, tested<bf16>, s, qkv, dout, r);
    device_time_algorithms(false);
    return outputs_of(output("out", r.out, 1, 0, 0), output("lse", r.lse, 1, 0, 0), output("dqkv", dqkv, 1, 0, 0));
}

// A fault of one pass: what happens after a right computation, or in place of it.
struct Fault {
    const char* what;
    bool in_forward;
    void (*spoil)(const AttentionCall& call, Stream stream);
    bool computes = true;
};
static const Fault faults[] = {
    {"a row of a head is wrong", true, [](const AttentionCall& c, Stream s) { set_bytes(c.out + 77 * C, 0, 64, s); }},
    {"an element is NaN", true, [](const AttentionCall& c, Stream s) { set_bytes(c.out + 99 * C, 0xff, 1, s); }},
    {"an lse is wrong", true, [](const AttentionCall& c, Stream s) { set_bytes(c.lse + 99, 0, 1, s); }},
    {"one run in three is wrong", true,
     [](const AttentionCall& c, Stream s) { set_bytes(c.out, 0, planted.runs % 3 ? 0 : 64, s); }},
    {"a row of dK is wrong", false,
     [](const AttentionCall& c, Stream s) { set_bytes(c.dqkv + 3 * 70 * C + C, 0, 64, s); }},
    {"nothing is written", false, [](const AttentionCall&, Stream) {}, false}};

TEST_CASE("kernels whose results differ from the library's are refused, with a note, and cost no bit") {
    for (const Fault& fault : faults) {
        CAPTURE(fault.what);
        const WithPlanted there({.compute = [&](const AttentionCall& call, Stream stream) {
            const bool here = (call.key.pass == gpu::AttentionPass::forward) == fault.in_forward;
            if (!here || fault.computes) own_mma.run(call, stream);
            if (here) fault.spoil(call, stream);
        }});
        const Outputs got = computed(true);
        const std::string text = prepared_text();
        INFO(text);
        CHECK((text.find("refused: differ from ") < text.find("; backward")) == fault.in_forward);
        CHECK(text.find("refused: differ from ") != text.npos);
        for (const auto& [key, choice] : gpu::algorithms())
            if ((key.find("forward") != key.npos) == fault.in_forward) CHECK_FALSE(choice.starts_with("wgmma"));
        planted.compute = own_mma.run;  // the same choices, where no kernel is wrong
        expect_same_bits("", computed(false), got);
    }
}

TEST_CASE("a wrong row shows among many, and a small part beside a large one") {
    constexpr int64_t rows = 4000, width = 16;
    const auto values = [] {
        auto all = random_tensor<float>(rows * 2 * width, 1);
        for (int64_t i = 0; i < all.size(); i++)
            all.data()[i] *= i < 200 * 2 * width ? 0 : i / width % 2 ? 1000.0f : 1.0f;
        return all;
    };
    auto a = values(), b = values();
    for (int64_t i = width / 2; i < width; i++) b.data()[3000 * 2 * width + i] *= -1.0f;
    const OnGpu<float> x(a), y(b);
    DeviceBuffer<char> ratios(gpu::DIFFERENCE_BYTES, "ratios");
    const float ratio = gpu::largest_difference<float>(x, y, rows, 2, width, ratios.data, nullptr);
    CHECK(ratio > 0.1f);  // about 2 / sqrt(2 * 64)
    CHECK(ratio < 0.4f);
    CHECK(gpu::largest_difference<float>(x, x, rows, 2, width, ratios.data, nullptr) == 0.0f);
}

#ifdef SIMT_EMULATOR
TEST_CASE("kernels whose results agree are chosen if they are faster, kept, and used without another timing") {
    const WithPlanted there({});
    computed(true);
    CHECK(prepared_text() == "wgmma kernels of ours; backward wgmma kernels of ours");
    const AlgorithmChoices kept = gpu::algorithms();
    REQUIRE(kept.size() == 2);
    for (const auto& [key, choice] : kept) {
        CHECK(key.find("; wgmma 1; attention ") != key.npos);
        CHECK(choice == "wgmma 1.0000 ms, first 4.0000 ms");
    }
    // Another length stands for another start, which has prepared nothing.
    AlgorithmChoices of_next;
    for (const auto& [key, choice] : kept)
        of_next[std::string(key).replace(key.find(" B 2 T 70 "), 10, " B 4 T 35 ")] = choice;
    gpu::load_algorithms(of_next);
    planted.runs = planted.mma_runs = 0;
    computed(true, {4, 35, 2, 64});
    CHECK(planted.runs == 2);
    CHECK(planted.mma_runs == 0);
    CHECK(gpu::algorithms() == of_next);
}

TEST_CASE("kernels that are slower, or of another version than a kept choice, are not used") {
    WithPlanted there({.ms = 5.0f});
    computed(true);
    CHECK(prepared_text().starts_with("mma kernels of ours: cuDNN has no engine"));
    for (const auto& each : gpu::algorithms()) CHECK(each.second == "mma 4.0000 ms, first 4.0000 ms");
    AlgorithmChoices choices = gpu::algorithms();
    for (auto& [key, choice] : choices) choice = "wgmma 1.0000 ms, first 4.0000 ms";
    gpu::load_algorithms(choices);
    CHECK(prepared_text().starts_with("wgmma"));
    gpu::wgmma_attention.version = 2;
    CHECK(prepared_text().starts_with("mma"));
}
#endif

TEST_CASE("--attention fixes the kernels, or says why they cannot run") {
    const WithPlanted there({});
    gpu::set_attention({.backend = AttentionBackend::wgmma});
    computed(true);
    CHECK(planted.runs == 2);
    CHECK(gpu::algorithms().empty());
    gpu::wgmma_attention.reason = [](const gpu::AttentionSizes&) { return std::string("no"); };
    const std::string refused = format("%d --attention wgmma: no; give --attention auto", EXIT_USAGE);
    const std::function<void()> plan = [] { gpu::attention_scratch_bytes<bf16>(1, 16, 2, 64); };
    const std::function<void()> start = [] { prepared_text({1, 16, 2, 64}); };
    for (const auto& call : {plan, start}) CHECK(refusal(call) == refused);
    gpu::set_attention({});
    computed(true);
    CHECK(planted.runs == 2);
}
