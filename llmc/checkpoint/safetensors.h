// safetensors.h: reads and writes safetensors files. This code does not depend on the model.
//
// A file consists of the header's length (8 bytes, little-endian), the header (a JSON object with the dtype, shape and
// byte range of each tensor) and the data, row-major. Files are untrusted: before any allocation of the stated sizes,
// the header is checked as the reference implementation does (tensors tile the data without gap, overlap or rest, and
// each byte range has the length of its shape). Errors (EXIT_BAD_DATA) name the path and the tensor.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/files.h"

struct TensorInfo {
    std::string name;
    std::string dtype;           // name in the file; "F32", "BF16" and "F16" can be read, others only listed
    std::vector<int64_t> shape;  // empty for a scalar
    int64_t begin = 0, end = 0;  // bytes, counted from the start of the data
    int file = 0;                // index in Safetensors::files

    int64_t elements() const;
};
std::string to_string(const TensorInfo& tensor);  // "BF16 [1024, 3072]"
std::string shape_string(const std::vector<int64_t>& shape);

using Metadata = std::map<std::string, std::string>;  // __metadata__: strings only

// One file, or all files of an index.
struct Safetensors {
    std::string path;  // the file or index that was opened, for messages
    std::vector<InputFile> files;
    std::vector<int64_t> data_begin;            // the offset of the data in each file
    std::map<std::string, TensorInfo> tensors;  // tensors by their names
    Metadata metadata;                          // empty for an index

    const TensorInfo* find(const std::string& name) const;  // null if there is no such tensor
    // Elements [first, first + count) as float; F32, BF16 and F16 are exact. Other dtypes are refused.
    void read(float* out, const TensorInfo& tensor, int64_t first, int64_t count) const;
    void read_bytes(uint8_t* out, const TensorInfo& tensor) const;  // the tensor is U8
    void read(float* out, const TensorInfo& tensor) const { read(out, tensor, 0, tensor.elements()); }
};

Safetensors open_safetensors(const std::string& path);
// Opens model.safetensors.index.json. Its weight_map names the file of each tensor, in the directory of the index.
Safetensors open_safetensors_index(const std::string& path);

// Places the tensors one after the other, and returns what is in a file before their data. Their dtypes are "F32",
// "BF16" and "U8". `metadata` is added to {"format": "pt"}, without which transformers refuses the file.
std::string safetensors_header(std::vector<TensorInfo>& tensors, const Metadata& metadata);
// Writes elements of a tensor, rounded to its dtype, "F32" or "BF16" (to nearest, ties to even).
void write_elements(OutputFile& file, const std::string& dtype, const float* values, int64_t count);
