// llmc_bin.cpp: reads the model files of llm.c, gpt2_124M.bin (version 3, fp32) and gpt2_124M_bf16.bin (version 5).
//
// 256 int32: magic 20240326, version, positions, vocabulary, layers, heads, channels, padded vocabulary. Then the 16
// tensors in memory layout, each of all layers. The file's size is compared with the header before any memory is taken.
#include <bit>

#include "checkpoint/hf.h"

constexpr int64_t HEADER_BYTES = 256 * sizeof(int32_t);
constexpr Param file_order[] = {wte,  wpe,  ln1w, ln1b, qkvw,    qkvb,    attprojw, attprojb,
                                ln2w, ln2b, fcw,  fcb,  fcprojw, fcprojb, lnfw,     lnfb};
static_assert(std::size(file_order) == NUM_PARAMS);

namespace {
struct LlmcFile {
    InputFile file;
    GPT2Config config = {};
    int64_t element_bytes = 0, begin[NUM_PARAMS] = {};  // begin of the tensors, in bytes

    int64_t elements(Param p) const { return int64_t(dim_size(config, param_table[p].rows)) * cols(p); }
    int64_t cols(Param p) const { return dim_size(config, param_table[p].cols); }
};
}  // namespace

bool is_llmc_model(const std::string& path) {
    if (is_directory(path)) return false;
    const InputFile file(path);
    int32_t magic = 0;
    if (file.size >= HEADER_BYTES) file.read_at(&magic, 0, sizeof magic);
    return magic == 20240326;
}

static LlmcFile open_llmc(const std::string& path) {
    LlmcFile out = {InputFile(path)};
    int32_t header[8];
    out.file.read_at(header, 0, sizeof header);
    const auto [magic, version, max_T, V, L, NH, C, Vp] = header;
    if (version != 3 && version != 5)
        fail(EXIT_BAD_DATA, "%s: has version %d; versions 3 (fp32) and 5 (bf16) of llm.c's models can be read",
             path.c_str(), version);
    out.config = {max_T, V, L, NH, C};
    try {
        check_config(out.config);
    } catch (const Error& error) {
        fail(EXIT_BAD_DATA, "%s: %s", path.c_str(), error.what());
    }
    if (Vp < V) fail(EXIT_BAD_DATA, "%s: its header has %d tokens padded to %d", path.c_str(), V, Vp);
    out.element_bytes = version == 3 ? 4 : 2;
    int64_t at = HEADER_BYTES;
    for (const Param p : file_order) {
        out.begin[p] = at;
        const int64_t copies = param_table[p].scope == Scope::layer ? L : 1;
        at += (p == wte ? Vp * out.cols(p) : copies * out.elements(p)) * out.element_bytes;
    }
    if (at != out.file.size)
        fail(EXIT_BAD_DATA, "%s: has %s bytes, but a model of its header has %s; the file is damaged or incomplete",
             path.c_str(), with_commas(out.file.size).c_str(), with_commas(at).c_str());
    return out;
}

GPT2Config read_llmc_config(const std::string& path) { return open_llmc(path).config; }

void load_llmc_weights(const std::string& path, const ParamLayout& layout, const TensorWriter& write) {
    const LlmcFile in = open_llmc(path);
    INVARIANT(in.config == layout.config, "%s has changed while it was read", path.c_str());
    std::vector<float> memory;
    std::vector<uint16_t> upper;  // halves of the floats
    for_each_tensor(layout, [&](Param p, int l) {
        const int64_t count = in.elements(p), begin = in.begin[p] + l * count * in.element_bytes;
        memory.assign(size_t(layout.size(p)), 0.0f);  // padded rows stay zero
        upper.resize(in.element_bytes == 2 ? size_t(count) : 0);
        in.file.read_at(upper.empty() ? static_cast<void*>(memory.data()) : upper.data(), begin,
                        count * in.element_bytes);
        for (size_t i = 0; i < upper.size(); i++) memory[i] = std::bit_cast<float>(uint32_t(upper[i]) << 16);
        check_finite(path, hf_name(p, l), memory.data(), count);
        write(memory.data(), WEIGHTS, p, l);
    });
}
