// test_report.cpp: tests the table that a run prints at its start: threads, instruction set, memory, schedule, and the
// peak FLOP/s of its MFU.
#include "train/report.h"

#include <doctest/doctest.h>

#include <omp.h>

#include <cstdlib>

#include <nlohmann/json.hpp>

#include "base/terminal.h"
#include "base/threads.h"
#include "cpu/isa.h"
#include "model/mfu.h"
#include "train/run_checks.h"

static const DeviceInfo fake_device = {.name = "a device",
                                       .memory_bytes = int64_t(1) << 30,
                                       .peak_flops_bf16 = 4e12,
                                       .peak_flops_fp32 = 1e12,
                                       .peak_source = "a test"};

static const char* const arguments[] = {"train_gpt2", "--train-data", "x",  "--layers",     "1",  "--heads",
                                        "1",          "--channels",   "16", "--vocab-size", "50", "--seq-len",
                                        "8"};

static RunInfo info_of(const DeviceInfo& device, const std::string& precision) {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    RunSource source = {};
    source.config = model_config(options);
    return run_info(options, source, plan_batch(2, 8, 0, 1), Corpus{}, device, precision, "train_gpt2");
}

// The row of the table with this name.
template <class floatX>
static std::string row(const DeviceInfo& device, const std::string& label, int64_t available = 0) {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    RunSource source = {};
    source.config = model_config(options);
    for (const Row& r : plan_table(dtype_of<floatX>, options, source, plan_batch(2, 8, 0, 1), device, available))
        if (r.first == label) return r.second;
    return "";
}

TEST_CASE("the peak belongs to the run's precision") {
    CHECK(info_of(fake_device, "bf16").peak_flops == 4e12);
    CHECK(info_of(fake_device, "fp32").peak_flops == 1e12);
    CHECK(info_of(fake_device, "bf16").peak_source == "a test");
    CHECK(row<bf16>(fake_device, "device") == "a device; peak 4 TFLOP/s in bf16, a test");
    CHECK(row<float>(fake_device, "device") == "a device; peak 1 TFLOP/s in fp32, a test");
}

TEST_CASE("the number of threads is from OpenMP") {
    const int before = omp_get_max_threads();
    for (const int threads : {1, 2, 3}) {
        omp_set_num_threads(threads);
        CHECK(info_of(fake_device, "fp32").threads == threads);
    }
    omp_set_num_threads(before);
}

TEST_CASE("a note names more threads than cores, and where their number is from") {
    const int before = omp_get_max_threads(), cores = omp_get_num_procs(), many = 3 * cores;
    const std::string end =
        format(" on %d core%s: threads that share a core take turns, which is slower than --threads %d", cores,
               cores == 1 ? "" : "s", cores);
    const char* variable = getenv("OMP_NUM_THREADS");
    const std::string saved = variable ? variable : "";
    omp_set_num_threads(cores);
    CHECK(note_on_threads(0) == "");
    CHECK(note_on_threads(cores) == "");
    omp_set_num_threads(many);
    CHECK(note_on_threads(many) == format("--threads %d", many) + end);
    setenv("OMP_NUM_THREADS", std::to_string(many).c_str(), 1);
    CHECK(note_on_threads(0) == format("OMP_NUM_THREADS=%d", many) + end);
    CHECK(note_on_threads(many).starts_with("--threads "));
    unsetenv("OMP_NUM_THREADS");
    CHECK(note_on_threads(0) == format("%d threads", many) + end);
    if (variable) setenv("OMP_NUM_THREADS", saved.c_str(), 1);
    omp_set_num_threads(before);
}

TEST_CASE("a plan names the available memory, and advice if the run does not fit") {
    const int64_t plenty = int64_t(1) << 29;
    const std::string needed = row<float>(fake_device, "memory").substr(0, row<float>(fake_device, "memory").find(':'));
    CHECK(row<float>(fake_device, "memory", plenty).starts_with(needed + " of 512 MiB available: weights "));
    CHECK(row<float>(fake_device, "memory", plenty).find("does not fit") == std::string::npos);
    CHECK(row<float>(fake_device, "memory", int64_t(1) << 60).starts_with(needed + " of 1.00 GiB available: "));
    CHECK(row<float>(fake_device, "memory", 1000)
              .starts_with(needed + " of 1000 B available, does not fit: try a smaller model"));
}

TEST_CASE("the instruction set is the one in use, and empty for a GPU") {
    CHECK(info_of(device_info(), "fp32").cpu_isa == isa_name(isa()));
    CHECK(info_of(fake_device, "fp32").cpu_isa == "");
}

TEST_CASE("the schedule is described without a final rate if the rate never falls") {
    const auto described = [](const char* schedule, int64_t warmup, int64_t steps) {
        Options options = parse_options(int(std::size(arguments)), arguments);
        options.schedule = schedule, options.warmup = warmup, options.steps = steps;
        const std::string text = describe_schedule(options);
        return text.substr(0, text.find(';'));
    };
    CHECK(described("cosine", 2, 30) == "cosine, lr 0.0006, 2 steps warmup, to 0.1 of it at step 30");
    CHECK(described("linear", 1, 2) == "linear, lr 0.0006, 1 step warmup, to 0.1 of it at step 2");
    CHECK(described("wsd", 0, 2) == "wsd, lr 0.0006, 0 steps warmup, to 0.1 of it at step 2");
    CHECK(described("wsd", 0, 1) == "wsd, lr 0.0006, 0 steps warmup");
    CHECK(described("cosine", 3, 3) == "cosine, lr 0.0006, 3 steps warmup");
    CHECK(described("constant", 1, 30) == "constant, lr 0.0006, 1 step warmup");
}

TEST_CASE("the table names the update rule and its state") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    CHECK(describe_schedule(options).ends_with("; AdamW 0.9/0.95, decay 0.1, clip 1"));
    CHECK(row<float>(fake_device, "precision") == "fp32");
    CHECK(row<bf16>(fake_device, "precision").starts_with("bf16, with fp32 master weights, gradients and moments"));
    CHECK(row<float>(fake_device, "memory").find(", moments ") != std::string::npos);
}

TEST_CASE("a resumed run names the options that changed, except those that may change") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    const std::string saved = options_json(options);
    CHECK(changed_options(saved, options) == "");
    options.quiet = true, options.trace_steps = 7, options.threads = 3, options.keep = 9;
    options.keep_every = 50, options.keep_best = true;
    options.resume_strict = true;
    options.max_time = 60;
    CHECK(changed_options(saved, options) == "");
    options.weight_decay = 0.2, options.given_warmup = 5, options.schedule = "wsd";
    CHECK(changed_options(saved, options) ==
          R"(--schedule "wsd" (was "cosine"), --warmup 5 (was not given), --weight-decay 0.2 (was 0.1))");
    CHECK(changed_options("{}", options) == "");
}

TEST_CASE("a resumed run names each parameter of the schedule and of the update rule that changed") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    const std::string saved = options_json(options);
    const std::pair<std::string, std::string> changed[] = {{"steps", "31"},
                                                           {"lr", "0.5"},
                                                           {"schedule", "linear"},
                                                           {"warmup", "3"},
                                                           {"final-lr-fraction", "0.5"},
                                                           {"weight-decay", "0.25"},
                                                           {"beta1", "0.5"},
                                                           {"beta2", "0.5"},
                                                           {"eps", "1e-06"},
                                                           {"grad-clip", "2"},
                                                           {"seed", "7"},
                                                           {"precision", "bf16"},
                                                           {"global-batch", "4096"}};
    for (const auto& [name, value] : changed) {
        std::vector<const char*> given(std::begin(arguments), std::end(arguments));
        const std::string option = "--" + name;
        given.insert(given.end(), {option.c_str(), value.c_str()});
        const std::string text = changed_options(saved, parse_options(int(given.size()), given.data()));
        CAPTURE(text);
        CHECK(text.starts_with(option + " "));
        CHECK(text.find(value) != std::string::npos);
    }
}

TEST_CASE("an older run's renamed option, or option that was a flag, is no change where its value is the same") {
    Options options = parse_options(int(std::size(arguments)), arguments);
    options.autotune = "off", options.logit_chunks = 3;
    CHECK(changed_options(R"({"autotune":false,"head-chunks":3})", options) == "");
    CHECK(changed_options(R"({"autotune":true,"head-chunks":4})", options) ==
          R"(--autotune "off" (was "on"), --logit-chunks 3 (was 4))");
}

TEST_CASE("ranks may differ in their number, GPU, threads and machine") {
    const Options options = parse_options(int(std::size(arguments)), arguments);
    CHECK(fields_of_one_rank(options) == std::vector<std::string>{"host", "machine", "device", "gpu", "CPU_ISA",
                                                                  "build", "--gpus", "--node-rank", "--rank",
                                                                  "--local-rank", "--threads"});
}

TEST_CASE("the first rank that may round differently than rank 0 is named") {
    const auto rank_info = [](const char* isa, const char* build) {
        return std::string(R"({"CPU_ISA":")") + isa + R"(","build":")" + build + R"("})";
    };
    const std::string a = rank_info("avx2", "1"), other_isa = rank_info("amx", "1"),
                      other_build = rank_info("avx2", "2");
    CHECK(differing_rounding({a}) == "");
    CHECK(differing_rounding({a, a, a}) == "");
    CHECK(differing_rounding({a, a, other_isa, other_build}) == "rank 2 has CPU_ISA=amx, rank 0 has avx2");
    CHECK(differing_rounding({a, other_build, other_isa}) == "rank 1 runs another build of the sources than rank 0");
}

TEST_CASE("files that differ are named with their sizes") {
    const auto corpus = [](std::vector<Shard> shards) {
        return Corpus{
            .shards = std::move(shards), .first_window = {}, .T = 8, .tokens = 0, .num_windows = 0, .fingerprint = 0};
    };
    const Shard a = {"x/a.bin", 100, 2, 0, 0, 4, 1}, longer = {"y/a.bin", 200, 2, 0, 0, 4, 2},
                other = {"y/a.bin", 100, 2, 0, 0, 4, 3}, b = {"x/b.bin", 50, 4, 0, 0, 4, 5};
    const auto differing = [&](std::vector<Shard> here, std::vector<Shard> there) {
        const Corpus own = corpus(std::move(here)), others = corpus(std::move(there));
        return differing_files(files_json(&own), files_json(&others), "here", "there");
    };
    CHECK(differing({a, b}, {a, b}) == "");
    CHECK(differing({longer, b}, {a, b}) == "a.bin has 1,424 bytes here, 1,224 bytes there");
    CHECK(differing({other}, {a}) == "a.bin has 1,224 bytes in both, but other tokens");
    CHECK(differing({a, b}, {a}) == "b.bin is only here");
    CHECK(differing({a}, {longer, b}) == "a.bin has 1,224 bytes here, 1,424 bytes there; b.bin is only there");
    Shard sampled = other;
    sampled.places = 2;  // hashes of other pieces cannot be compared
    CHECK(differing({sampled}, {a}) == "");
    std::vector<Shard> many(5, a);
    for (size_t i = 0; i < many.size(); i++) many[i].path = format("x/%zu.bin", i);
    CHECK(differing(many, {}) == "0.bin is only here; 1.bin is only here; 2.bin is only here; and 2 more");
    CHECK(files_json(nullptr) == "{}");
    // As in a trainer.json of another program. run.cpp refuses what makes the JSON library throw.
    const Corpus own = corpus({a});
    const auto from_file = [&](const std::string& there) {
        return differing_files(files_json(&own), there, "here", "there");
    };
    CHECK(from_file(R"({"a.bin":{"bytes":1e300,"places":-1e300}})") == "a.bin has 1,224 bytes here, 0 bytes there");
    CHECK_THROWS_AS(from_file(R"({"a.bin":7})"), nlohmann::json::exception);
    CHECK_THROWS_AS(from_file(R"({"a.bin":{"bytes":1224,"places":4,"hash":7}})"), nlohmann::json::exception);
}

TEST_CASE("the advice on --seq-len keeps to the positions of a model that exists") {
    const GPT2Config config = {10, 300, 1, 4, 16};
    Options options = parse_options(int(std::size(arguments)), arguments);
    options.tensor_parallel = 4, options.sequence_parallel = true;
    const auto refused = [&](int T, const char* advice) {
        CHECK_THROWS_WITH_AS(check_tensor_parallel(options, config, T, 4), doctest::Contains(advice), Error);
    };
    refused(9, "; give --seq-len 12");  // a new model has that many positions
    options.init = "x";
    refused(9, "; give --seq-len 8");
    refused(7, "; give --seq-len 8");
    options.tensor_parallel = 2;
    check_tensor_parallel(options, config, 10, 4);
    options.micro_batch = 2, options.global_batch_tokens = 18;
    refused(9, "; give --seq-len 10 and --global-batch 40");
    options.global_batch_tokens = 80;
    refused(9, "; give --seq-len 10");
    options.tensor_parallel = 8;
    refused(8, "does not divide the model's 4 heads; give 1, 2 or 4");
}

TEST_CASE("counts of one are in the singular") {
    Corpus corpus = {.shards = {{}}, .first_window = {}, .T = 8, .tokens = 9, .num_windows = 1, .fingerprint = 0};
    CHECK(describe_data(corpus, 1) == "1 shard, 9 tokens, 1 window of 8: an epoch is 1.0 steps");
    CHECK(describe_batch({1, 1, 1, 1, 1}) == "1 token per step = 1 sequence x 1 token x 1 rank x 1 micro-step");
    CHECK(describe_batch({2, 3, 2, 2, 24}, 2) ==
          "24 tokens per step = 2 sequences x 3 tokens x 2 groups of 2 tensor-parallel ranks x 2 micro-steps");
    CHECK(describe_model({1, 50, 1, 1, 16}).starts_with("1 layer, 1 head, 16 channels, 1 position, vocabulary 50 "));
    CHECK(counted(1, "micro-batch") == "1 micro-batch");
    CHECK(counted(0, "micro-batch") == "0 micro-batches");
    CHECK(counted(1024, "token") == "1,024 tokens");
    corpus.num_windows = 2;
    CHECK(describe_data(corpus, 1).find("2 windows of 8") != std::string::npos);
}
