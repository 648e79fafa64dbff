// sources: llmc/checkpoint/safetensors.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/json.cpp
// llmc/base/print.cpp
//
// fuzz_safetensors.cpp: reads any bytes as a safetensors file, or as an index of files; the first byte decides. They
// must be refused by an Error, or be readable to the last element. Half of the files get the right length of the
// header, to reach the checks of its content.
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fuzz.h"

static void read_all(const Safetensors& file) {
    for (const auto& [name, tensor] : file.tensors) {
        if (tensor.name != name) abort();
        if (tensor.dtype != "F32" && tensor.dtype != "F16" && tensor.dtype != "BF16") continue;
        std::vector<float> values(size_t(tensor.elements()));
        file.read(values.data(), tensor);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const TemporaryDirectory& dir = memory_directory();
    if (size == 0) return 0;
    const int choice = data[0] % 3;
    std::string bytes = as_text(data + 1, size - 1);
    try {
        if (choice == 2) {
            write_bytes(dir / "index", bytes);
            read_all(open_safetensors_index(dir / "index"));  // the index may name files of earlier inputs
            return 0;
        }
        if (choice == 1) {  // the header ends at the last }
            const uint64_t header = bytes.rfind('}') + 1;
            bytes.insert(0, std::string(reinterpret_cast<const char*>(&header), 8));
        }
        write_bytes(dir / "a", bytes);
        read_all(open_safetensors(dir / "a"));
    } catch (const Error& error) {
        if (error.exit_code == EXIT_INTERNAL) abort();  // an INVARIANT failed
    }
    return 0;
}
