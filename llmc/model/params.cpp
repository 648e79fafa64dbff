#include "model/params.h"

#include <algorithm>
#include <cmath>

#include "base/print.h"
#include "base/random.h"

GPT2Config config_by_name(const std::string& name) {
    struct Named {
        const char *name, *hf_name;
        int T, L, NH, C;
    };
    // Table 2.1 of Brown et al. 2020, with GPT-2's dense attention in all layers. Two rows of that table have widths
    // that are not heads x channels per head: 1.3b has 16 heads of 128 channels here, instead of 24, and 13b 5,120
    // channels, not 5,140.
    static constexpr Named sizes[] = {
        {"d12", "gpt2", 1024, 12, 12, 768},        {"d24", "gpt2-medium", 1024, 24, 16, 1024},
        {"d36", "gpt2-large", 1024, 36, 20, 1280}, {"d48", "gpt2-xl", 1024, 48, 25, 1600},
        {"gpt3-125m", "", 2048, 12, 12, 768},      {"gpt3-350m", "", 2048, 24, 16, 1024},
        {"gpt3-760m", "", 2048, 24, 16, 1536},     {"gpt3-1.3b", "", 2048, 24, 16, 2048},
        {"gpt3-2.7b", "", 2048, 32, 32, 2560},     {"gpt3-6.7b", "", 2048, 32, 32, 4096},
        {"gpt3-13b", "", 2048, 40, 40, 5120}};
    std::string known;
    for (const Named& s : sizes) {
        if (name == s.name || (*s.hf_name && name == s.hf_name)) return {s.T, 50257, s.L, s.NH, s.C};
        known += (known.empty() ? "" : ", ") + std::string(s.name);
        if (*s.hf_name) known += format(" (%s)", s.hf_name);
    }
    fail(EXIT_USAGE, "--model %s is not known; give one of %s, or --layers, --heads and --channels", name.c_str(),
         known.c_str());
}

std::string describe_model(const GPT2Config& config) {
    return format("%s, %s, %d channels, %s, vocabulary %d (%d in memory), %s parameters",
                  counted(config.L, "layer").c_str(), counted(config.NH, "head").c_str(), config.C,
                  counted(config.max_T, "position").c_str(), config.V, config.Vp(),
                  with_commas(count_parameters(config)).c_str());
}

void check_config(const GPT2Config& config) {
    const auto bounded = [](int value, const char* what, int most) {
        ENSURE(value >= 1 && value <= most, "a model cannot have %d %s: the limits are 1 and %d", value, what, most);
    };
    bounded(config.L, "layers", 1024);
    bounded(config.C, "channels", 65536);
    bounded(config.NH, "heads", 1024);
    bounded(config.max_T, "positions", 1 << 20);
    bounded(config.V, "tokens in the vocabulary", 1 << 20);
    ENSURE(config.C % config.NH == 0, "%d channels are not a multiple of %d heads; try --channels %d", config.C,
           config.NH, round_up(config.C, config.NH));
    constexpr int max_head_channels = 256;  // the limit of the attention kernels
    ENSURE(config.C / config.NH <= max_head_channels,
           "heads of %d channels: at most %d; %d channels need at least %d heads", config.C / config.NH,
           max_head_channels, config.C, ceil_div(config.C, max_head_channels));
}

int ParamLayout::rows(Param p) const {
    if (p == wte) return round_up(config.V, 128 * shard.count) / shard.count;
    const int whole = dim_size(config, param_table[p].rows);
    const Split split = param_table[p].split;
    const bool is_bias = param_table[p].rows == Dim::one;
    return !is_bias && (split == Split::output || split == Split::heads) ? whole / shard.count : whole;
}

int ParamLayout::cols(Param p) const {
    const int whole = dim_size(config, param_table[p].cols);
    const Split split = param_table[p].split;
    const bool is_bias = param_table[p].rows == Dim::one;
    return split == Split::input || (is_bias && split != Split::none) ? whole / shard.count : whole;
}

ParamLayout::ParamLayout(const GPT2Config& config, int virtual_ranks, TensorShard shard)
    : config(config), shard(shard) {
    check_config(config);
    ENSURE(config.NH % shard.count == 0,
           "--tensor-parallel %d does not divide the model's %d heads; give one that does", shard.count, config.NH);
    int64_t at[2] = {0, 0};  // end of the model's tensors, end of a layer's tensors
    for (Scope scope : {Scope::model, Scope::layer})
        for (bool decay : {true, false})
            for (const ParamSpec& p : param_table) {
                if (p.scope != scope || p.decay != decay) continue;
                int64_t& end = at[scope == Scope::layer];
                offsets[p.id] = end;
                end += round_up<int64_t>(size(p.id), FLAT_ALIGN);
            }
    for (int64_t& end : at) end = round_up(end, virtual_ranks * FLAT_ALIGN);
    for (const ParamSpec& p : param_table)
        if (p.scope == Scope::layer) offsets[p.id] += at[0];
    layer_stride = at[1];
    total = at[0] + config.L * layer_stride;
}

Bucket ParamLayout::bucket(int b) const {
    if (b == 0) return {0, offsets[lnfw], offsets[qkvw]};
    const int64_t begin = offset(qkvw, b - 1);
    return {begin, offset(ln1w, b - 1), begin + layer_stride};
}

DecayPattern ParamLayout::decay_pattern() const {
    const Bucket model = bucket(0), layer = bucket(1);
    return {model.end, model.decayed_end, layer_stride, layer.decayed_end - layer.begin};
}

VocabShard ParamLayout::vocab() const {
    const int first = shard.index * rows(wte);
    return {first, std::clamp(config.V - first, 0, rows(wte))};
}

void take_shard(float* own, const float* whole, const ParamLayout& layout, Param p) {
    std::fill(own, own + layout.size(p), 0.0f);
    for_each_run(layout, p, [&](int64_t at, int64_t from, int64_t count) {
        std::copy(whole + from, whole + from + count, own + at);
    });
}

void put_shard(float* whole, const float* own, const ParamLayout& layout, Param p) {
    for_each_run(layout, p,
                 [&](int64_t at, int64_t to, int64_t count) { std::copy(own + at, own + at + count, whole + to); });
}

void init_param(float* out, const GPT2Config& config, Param p, int l, uint64_t seed, int64_t begin, int64_t end) {
    const ParamSpec& spec = param_table[p];
    // Elements from `drawn` on belong to padded rows and stay zero.
    const int64_t drawn = std::clamp(int64_t(dim_size(config, spec.rows)) * dim_size(config, spec.cols), begin, end);
    std::fill(out + drawn - begin, out + end - begin, 0.0f);
    if (spec.init == Init::zeros || spec.init == Init::ones) {
        std::fill(out, out + drawn - begin, spec.init == Init::ones ? 1.0f : 0.0f);
        return;
    }
    const Philox random{seed, uint64_t(p) << 32 | uint64_t(l)};
    const float residual = 1.0f / std::sqrt(2.0f * float(config.L));
    const float scale = 0.02f * (spec.init == Init::residual ? residual : 1.0f);
    constexpr int64_t BLOCK = 64;  // pairs of values drawn at a time
#pragma omp parallel for schedule(static)
    for (int64_t block = begin / 2; block < ceil_div<int64_t>(drawn, 2); block += BLOCK) {
        uint32_t words[BLOCK][4];
        for (int64_t i = 0; i < BLOCK; i++) random.words(words[i], uint64_t(block + i));
        float values[2 * BLOCK];
        for (int64_t i = 0; i < BLOCK; i++) {
            const auto pair = box_muller(words[i][0], words[i][1]);
            values[2 * i] = scale * pair[0], values[2 * i + 1] = scale * pair[1];
        }
        const int64_t from = std::max(begin, 2 * block), to = std::min(drawn, 2 * (block + BLOCK));
        std::copy(values + (from - 2 * block), values + (to - 2 * block), out + (from - begin));
    }
}
