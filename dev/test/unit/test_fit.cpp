// test_fit.cpp: the layouts that plan --fit lists: they fit, none that fits is missing, and the fastest is first.
#include "train/fit.h"

#include <doctest/doctest.h>

#include "model/mfu.h"
#include "train/report.h"
#include "train/run_checks.h"

static constexpr FitDevices eight = {{8}, int64_t(4) << 30, 1e15, 300e9};

static Options options_of(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), {"train_gpt2", "plan", "--fit", "--model", "d12", "--precision", "bf16"});
    return parse_options(int(arguments.size()), arguments.data());
}

static std::vector<Layout> layouts(const Options& o, const FitDevices& devices) {
    return fitting_layouts(Dtype::bf16, o, model_config(o), 1024, devices);
}

static int64_t needed(Options o, const Layout& layout, int B) {
    o.tensor_parallel = layout.tensor_parallel;
    o.sequence_parallel = layout.sequence_parallel;
    o.zero = layout.zero;
    o.recompute = layout.recompute;
    const BatchPlan batch = plan_batch(B, 1024, o.global_batch_tokens, layout.batch.world_size);
    const MemoryOptions options = memory_options_of(o, layout.batch.world_size);
    return device_bytes(training_memory(Dtype::bf16, model_config(o), batch, options, o.optimizer));
}

TEST_CASE("every layout fits with its micro-batch, and the time never falls along the list") {
    const Options o = options_of({});
    const std::vector<Layout> all = layouts(o, eight);
    REQUIRE(all.size() >= 6);
    for (size_t i = 0; i < all.size(); i++) {
        CAPTURE(layout_options(all[i]));
        CHECK(all[i].bytes <= eight.memory);
        CHECK(all[i].bytes == needed(o, all[i], all[i].batch.B));
        if (i > 0) CHECK(all[i - 1].tokens_per_second() >= all[i].tokens_per_second());
    }
}

TEST_CASE("the layouts that are not listed do not fit with one sequence") {
    const Options o = options_of({});
    for (const int64_t memory : {int64_t(1200) << 20, int64_t(1600) << 20, int64_t(2) << 30, int64_t(3) << 30}) {
        FitDevices devices = eight;
        devices.memory = memory;
        const std::vector<Layout> all = layouts(o, devices);
        size_t fitting = 0;
        for (const int tp : {1, 2, 4})  // of the 12 heads on 8 ranks
            for (const bool sequence_parallel : {false, true})
                for (int zero = 0; zero <= 3; zero++)
                    for (const char* recompute : {"none", "gelu", "layer"}) {
                        const Layout layout = {tp, sequence_parallel, zero, recompute, {1, 1024, 8 / tp, 1, 0}, 0, {},
                                               0};
                        fitting += (tp > 1 || !sequence_parallel) && needed(o, layout, 1) <= memory;
                    }
        CHECK(all.size() == fitting);
    }
}

TEST_CASE("more memory is not slower, and recomputation is not faster than none with the same micro-batch") {
    const Options o = options_of({});
    FitDevices devices = eight;
    double fastest = 1e30;
    for (int64_t gib = 2; gib <= 32; gib *= 2) {
        devices.memory = gib << 30;
        const std::vector<Layout> all = layouts(o, devices);
        REQUIRE(!all.empty());
        CHECK(all[0].seconds <= fastest);
        fastest = all[0].seconds;
    }
    CHECK(layouts(o, devices)[0].recompute == "none");
    CHECK(layouts(o, devices)[0].zero == 1);  // gathers weights in bf16, where --zero 0 gathers gradients in fp32
}

TEST_CASE("one rank has no use for ZeRO, and sends nothing") {
    const FitDevices one = {{1}, int64_t(16) << 30, 1e15, 300e9};
    for (const Layout& layout : layouts(options_of({}), one)) {
        CHECK(layout.zero == 0);
        CHECK(layout.sent.total() == 0);
        CHECK(layout.batch.world_size == 1);
    }
}

TEST_CASE("the time of a layout is its FLOPs at the assumed MFU and its bytes") {
    const Options o = options_of({});
    const Layout first = layouts(o, eight)[0];
    const double flops = (6.0 * 124439808 + 6.0 * 12 * 768 * 1024) * 524288 / 8;
    CHECK(first.recompute == "none");
    CHECK(first.seconds == doctest::Approx(flops / (ASSUMED_MFU * 1e15) + double(first.sent.inside) / 300e9));
}

TEST_CASE("bytes to other machines take the time of the network") {
    const Options o = options_of({});
    FitDevices devices = eight;
    const Layout together = layouts(o, devices)[0];
    devices.places.hosts = 2;
    devices.network = 25e9;
    const Layout apart = layouts(o, devices)[0];
    CHECK(layout_options(apart) == layout_options(together));
    CHECK(apart.sent.total() == together.sent.total());
    CHECK(apart.sent.between == apart.sent.total() / 4);  // rings: one of a host's four ranks sends to the other host
    CHECK(apart.seconds - together.seconds ==
          doctest::Approx(double(apart.sent.between) * (1 / 25e9 - 1 / 300e9)).epsilon(1e-6));
}

TEST_CASE("if nothing fits, the smallest layout shards everything and recomputes") {
    const Options o = options_of({});
    FitDevices devices = eight;
    devices.memory = 100 << 20;
    CHECK(layouts(o, devices).empty());
    const Layout least = smallest_layout(Dtype::bf16, o, model_config(o), 1024, devices);
    CHECK(least.zero == 3);
    CHECK(least.recompute == "layer");
    CHECK(least.batch.B == 1);
    CHECK(least.bytes > devices.memory);
}

TEST_CASE("a global batch that one sequence per rank does not divide is refused") {
    CHECK_THROWS_WITH_AS(layouts(options_of({"--global-batch", "9216"}), eight),
                         doctest::Contains("is not a multiple of 8192 tokens"), Error);
    // Twelve sequences are three for each of four groups of two tensor-parallel ranks.
    for (const Layout& layout : layouts(options_of({"--global-batch", "12288"}), eight))
        CHECK(layout.tensor_parallel > 1);
}

TEST_CASE("a given option of the layout keeps its value, also that of its default") {
    const std::vector<std::vector<const char*>> cases = {{"--zero", "0"},
                                                         {"--zero", "2"},
                                                         {"--recompute", "none"},
                                                         {"--recompute", "layer"},
                                                         {"--tensor-parallel", "2"},
                                                         {"--sequence-parallel"}};
    for (const std::vector<const char*>& given : cases) {
        const std::string text = given[0] + (given.size() > 1 ? std::string(" ") + given[1] : "") + " ";
        CAPTURE(text);
        const std::vector<Layout> all = layouts(options_of(given), eight);
        CHECK(all.size() >= 6);
        CHECK(all.size() < layouts(options_of({}), eight).size());
        for (const Layout& layout : all) CHECK(layout_options(layout).find(text) != std::string::npos);
    }
    for (const Layout& layout : layouts(options_of({"--micro-batch", "2"}), eight)) CHECK(layout.batch.B == 2);
    for (const Layout& layout : layouts(options_of({"--tensor-parallel", "1"}), eight))
        CHECK(layout.tensor_parallel == 1);
    for (const Layout& layout : layouts(options_of({"--sequence-parallel=false"}), eight))
        CHECK(!layout.sequence_parallel);
    CHECK(layouts(options_of({"--micro-batch", "auto"}), eight).size() == layouts(options_of({}), eight).size());
}

TEST_CASE("with --deterministic-ranks every layout that is listed can start") {
    for (const char* n : {"4", "8"})
        for (const Layout& layout : layouts(options_of({"--deterministic-ranks", n}), eight)) {
            CAPTURE(layout_options(layout));
            check_virtual_ranks(options_of({"--deterministic-ranks", n}), layout.batch);
        }
    const Options twelve = options_of({"--deterministic-ranks", "8", "--global-batch", "196608"});
    const FitDevices devices = {{12}, int64_t(4) << 30, 1e15, 300e9};
    for (const Layout& layout : layouts(twelve, devices)) CHECK(layout.tensor_parallel % 3 == 0);
    CHECK_THROWS_WITH_AS(layouts(options_of({"--deterministic-ranks", "6"}), eight),
                         doctest::Contains("--deterministic-ranks 6 on 8 ranks: both must be powers of two"), Error);
}

TEST_CASE("the smallest layout has the given options, and options without a layout are refused") {
    FitDevices devices = eight;
    devices.memory = 100 << 20;
    const auto smallest = [&](std::vector<const char*> given) {
        const Options o = options_of(std::move(given));
        return layout_options(smallest_layout(Dtype::bf16, o, model_config(o), 1024, devices));
    };
    CHECK(smallest({"--zero", "1", "--recompute", "none", "--micro-batch", "4", "--tensor-parallel", "1"}) ==
          "--zero 1 --recompute none --micro-batch 4");
    CHECK_THROWS_WITH_AS(smallest({"--tensor-parallel", "5"}),
                         "--tensor-parallel 5 does not divide the 12 heads and the 8 ranks of a machine", Error);
    CHECK_THROWS_WITH_AS(smallest({"--micro-batch", "3"}),
                         doctest::Contains("--micro-batch 3 x --seq-len 1024 x 8 ranks"), Error);
    devices.places = {1};
    CHECK_THROWS_WITH_AS(smallest({"--sequence-parallel"}),
                         doctest::Contains("divides 12 heads, 1 ranks of a machine and 1024 tokens"), Error);
}
