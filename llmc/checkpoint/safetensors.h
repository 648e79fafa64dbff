// safetensors.h: reading and writing safetensors files; knows nothing about models.
//
// A file is the length of its header (8 bytes, little-endian), the header (a JSON object: for each tensor its dtype,
// shape and range of bytes) and the data, row-major. Read as untrusted: the header is checked as the format's reference
// implementation does (tensors tile the data without gap, overlap or rest, and each length is that of its shape) before
// anything of its size is allocated. What does not hold is EXIT_BAD_DATA, with the path and the tensor.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/files.h"

struct TensorInfo {
    std::string name;
    std::string dtype;           // as in the file: "F32", "BF16", "F16" can be read here, others only listed
    std::vector<int64_t> shape;  // empty for a scalar
    int64_t begin = 0, end = 0;  // bytes, counted from the start of the data
    int file = 0;                // index in Safetensors::files

    int64_t elements() const;
};
std::string to_string(const TensorInfo& tensor);  // "BF16 [1024, 3072]"
std::string shape_string(const std::vector<int64_t>& shape);

using Metadata = std::map<std::string, std::string>;  // __metadata__: strings only

// One file, or the files that an index joins.
struct Safetensors {
    std::string path;  // what was opened, for messages
    std::vector<InputFile> files;
    std::vector<int64_t> data_begin;            // of each file: where its data start
    std::map<std::string, TensorInfo> tensors;  // by name
    Metadata metadata;                          // of the first file

    const TensorInfo* find(const std::string& name) const;  // null: not there
    // Elements [first, first + count) as float; F32, BF16 and F16 are exact. Other dtypes are refused.
    void read(float* out, const TensorInfo& tensor, int64_t first, int64_t count) const;
    void read(float* out, const TensorInfo& tensor) const { read(out, tensor, 0, tensor.elements()); }
};

Safetensors open_safetensors(const std::string& path);
// model.safetensors.index.json: its weight_map names the file of each tensor, all in the directory of the index.
Safetensors open_safetensors_index(const std::string& path);

// Writes a file tensor by tensor, so that memory never holds more than the caller's current one.
struct SafetensorsWriter {
    OutputFile file;
    std::vector<TensorInfo> tensors;  // with their ranges, in the order of the file
    size_t next = 0;                  // the tensor whose data come next
    int64_t written = 0;              // elements of it already there

    // names, shapes and dtypes ("F32", "BF16") of all tensors, in the order in which their data will come. `metadata`
    // is written beside {"format": "pt"}, without which transformers refuses the file.
    SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors, const Metadata& metadata);
    // The next elements of the current tensor, rounded to its dtype (to nearest, ties to even).
    void write(const float* data, int64_t count);
    FileSum finish();  // refuses (a bug) if data are missing; then as OutputFile
};
// Bytes of the file that the writer makes for these tensors: header and data.
int64_t safetensors_bytes(const std::vector<TensorInfo>& tensors, const Metadata& metadata);
