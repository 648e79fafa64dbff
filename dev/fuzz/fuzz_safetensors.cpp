// sources: llmc/checkpoint/safetensors.cpp llmc/base/common.cpp llmc/base/files.cpp llmc/base/content.cpp
// llmc/base/json.cpp llmc/base/print.cpp
//
// fuzz_safetensors.cpp: reads any bytes as a safetensors file, or as an index of files; the first byte decides. They
// must be refused by an Error, or be readable to the last element. Half of the files get the right length of the
// header, to reach the checks of its content.
#include <vector>

#include "checkpoint/safetensors.h"
#include "fuzz.h"

static void read_all(const Safetensors& file) {
    for (const auto& [name, tensor] : file.tensors) {
        require(tensor.name == name);
        if (tensor.dtype != "F32" && tensor.dtype != "F16" && tensor.dtype != "BF16") continue;
        std::vector<float> values(size_t(tensor.elements()));
        file.read(values.data(), tensor);
    }
}

void fuzz(std::string_view input) {
    if (input.empty()) return;
    const int choice = uint8_t(input[0]) % 3;
    const std::string path = memory_directory() / (choice == 2 ? "index" : "a");
    std::string bytes(input.substr(1));
    if (choice == 1) {  // the header ends at the last }
        const uint64_t header = bytes.rfind('}') + 1;
        bytes.insert(0, std::string(reinterpret_cast<const char*>(&header), 8));
    }
    write_bytes(path, bytes);
    const int code =
        exit_code_of([&] { read_all(choice == 2 ? open_safetensors_index(path) : open_safetensors(path)); });
    // An index may name a file that is missing, or the file of an earlier input.
    require(code == 0 || code == EXIT_BAD_DATA || (code == EXIT_NO_INPUT && choice == 2));
}
