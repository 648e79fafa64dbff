// sources: llmc/checkpoint/hf.cpp llmc/checkpoint/safetensors.cpp llmc/model/params.cpp llmc/base/common.cpp
// llmc/base/files.cpp llmc/base/content.cpp llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_hf_config.cpp: reads any text as config.json. It must be refused, or give a model whose layout can be computed.
// The config.json of that model must read back as the same model.
#include "checkpoint/hf.h"
#include "fuzz.h"

void fuzz(std::string_view input) {
    const HFConfig config = parse_hf_config(std::string(input), "config.json");
    require(ParamLayout(config.model).total >= count_parameters(config.model));
    HFConfig again;
    require(exit_code_of([&] { again = parse_hf_config(hf_config_json(config, "float32"), "config.json"); }) == 0);
    require(again.model == config.model && again.eos == config.eos);
}
