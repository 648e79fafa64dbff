// sources: llmc/checkpoint/hf.cpp llmc/checkpoint/safetensors.cpp llmc/model/params.cpp llmc/base/common.cpp
// llmc/base/files.cpp llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_hf_config.cpp: reads any text as config.json. It must be refused by an Error, or give a model whose layout can
// be computed. The config.json of that model must read back as the same model.
#include <algorithm>

#include "checkpoint/hf.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    HFConfig config;
    try {
        config = parse_hf_config(as_text(data, size), "config.json");
    } catch (const Error&) {
        return 0;
    }
    const ParamLayout layout(config.model);
    if (layout.total < count_parameters(config.model)) abort();
    const HFConfig again = parse_hf_config(hf_config_json(config, "float32"), "config.json");
    const int V = config.model.V;  // an id outside of the vocabulary is unknown
    if (!(again.model == config.model) || std::min(again.end_of_text, V) != std::min(config.end_of_text, V)) abort();
    return 0;
}
