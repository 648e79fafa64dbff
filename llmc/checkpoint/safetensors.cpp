#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <set>

#include "base/content.h"
#include "base/dtype.h"
#include "base/json.h"

static_assert(std::endian::native == std::endian::little, "the format is little-endian and read in place");

constexpr int64_t max_header_bytes = 10'000'000;  // GPT-2 XL's has about 60 kB; parsed, it takes up to 20 times as much
constexpr int64_t chunk_elements = 1 << 20;       // elements converted at a time, in a buffer that stays in the cache

int64_t TensorInfo::elements() const {
    int64_t count = 1;
    for (int64_t n : shape) count *= n;
    return count;
}

std::string shape_string(const std::vector<int64_t>& shape) {
    std::string out = "[";
    for (size_t i = 0; i < shape.size(); i++) out += (i ? ", " : "") + std::to_string(shape[i]);
    return out + "]";
}

std::string to_string(const TensorInfo& tensor) { return tensor.dtype + " " + shape_string(tensor.shape); }

static int dtype_bits(const std::string& dtype) {
    static const std::map<std::string, int> bits = {
        {"BOOL", 8},    {"U8", 8},      {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F4", 4},
        {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16}, {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},
        {"U32", 32},    {"F32", 32},    {"I64", 64}, {"U64", 64},    {"F64", 64},    {"C64", 64}};
    const auto found = bits.find(dtype);
    return found == bits.end() ? 0 : found->second;
}

// Returns the size of the tensor in bytes, or nothing if the size is not a whole number or overflows. Multiplies from
// left to right, as the reference implementation does, so that [2^40, 2^40, 0] is refused.
static std::optional<int64_t> shape_bytes(const TensorInfo& tensor) {
    int64_t bits = 1;
    for (int64_t n : tensor.shape)
        if (n < 0 || __builtin_mul_overflow(bits, n, &bits)) return {};
    if (__builtin_mul_overflow(bits, int64_t(dtype_bits(tensor.dtype)), &bits) || bits % 8 != 0) return {};
    return bits / 8;
}

// Reads a list of whole numbers that are not negative.
static std::vector<int64_t> read_numbers(const Json& list) {
    std::vector<int64_t> numbers;
    for (const uint64_t number : list.list<uint64_t>()) numbers.push_back(int64_t(number));
    return numbers;
}

static TensorInfo read_tensor_info(const std::string& name, const Json& entry, const std::string& path) {
    const std::string place = path + ": its header, tensor \"" + printable(name) + "\"";
    try {
        const std::vector<int64_t> range = read_numbers(entry.at("data_offsets"));
        if (range.size() != 2) fail(EXIT_BAD_DATA, "%s: data_offsets must be [begin, end]", place.c_str());
        return {name, entry.at("dtype").get<std::string>(), read_numbers(entry.at("shape")), range[0], range[1]};
    } catch (const JsonError&) {
        fail(EXIT_BAD_DATA, "%s: dtype, shape or data_offsets is missing or of the wrong type", place.c_str());
    }
}

static Metadata read_metadata(const Json& entry, const std::string& path) {
    try {
        Metadata metadata;
        if (entry.type != Json::null && entry.type != Json::object) throw JsonError("is no object");
        for (const auto& [key, value] : entry.members) metadata[key] = value.get<std::string>();
        return metadata;
    } catch (const JsonError&) {
        fail(EXIT_BAD_DATA, "%s: its header: __metadata__ must be an object of strings", path.c_str());
    }
}

// Checks that each tensor has a known dtype and the byte count of its shape, and that all together tile the data.
static void check_tensors(const Safetensors& file, int64_t data_bytes) {
    std::vector<TensorInfo> tensors;
    for (const auto& [name, tensor] : file.tensors) tensors.push_back(tensor);
    std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    int64_t at = 0;
    for (const TensorInfo& t : tensors) {
        const std::string place = file.path + ": tensor \"" + printable(t.name) + "\"";
        if (dtype_bits(t.dtype) == 0)
            fail(EXIT_BAD_DATA, "%s has the unknown dtype \"%s\"", place.c_str(), printable(t.dtype).c_str());
        if (t.begin != at || t.end < t.begin)
            fail(EXIT_BAD_DATA, "%s has bytes %lld to %lld of the data, but the tensor before it ends at %lld",
                 place.c_str(), static_cast<long long>(t.begin), static_cast<long long>(t.end),
                 static_cast<long long>(at));
        if (shape_bytes(t) != t.end - t.begin)
            fail(EXIT_BAD_DATA, "%s is %s, but %lld bytes long", place.c_str(), to_string(t).c_str(),
                 static_cast<long long>(t.end - t.begin));
        at = t.end;
    }
    if (at != data_bytes)
        fail(EXIT_BAD_DATA, "%s: its header describes %s bytes of data, the file has %s; it is damaged or incomplete",
             file.path.c_str(), with_commas(at).c_str(), with_commas(data_bytes).c_str());
}

// Refuses a file of another format by its name. A pickle, or the zip archive of one, is a PyTorch file that was
// renamed.
static void refuse_foreign(const InputFile& file) {
    std::string start(size_t(std::min<int64_t>(file.size, 512)), '\0');
    file.read_at(start.data(), 0, int64_t(start.size()));
    const ForeignContent* other = foreign_content(start);
    const bool pickle = start.starts_with("PK") || start.starts_with("\x80");
    if (other)
        fail(EXIT_BAD_DATA, "%s: is %s, not a safetensors file; %s", file.path.c_str(), other->what,
             pickle ? "convert it by save_pretrained() of transformers" : other->remedy);
}

Safetensors open_safetensors(const std::string& path) {
    Safetensors out;
    out.path = path;
    const InputFile& file = out.files.emplace_back(path);
    uint64_t header_bytes = 0;
    if (file.size < 8) fail(EXIT_BAD_DATA, "%s: has %d bytes, too few for a header", path.c_str(), int(file.size));
    file.read_at(&header_bytes, 0, 8);
    if (header_bytes > uint64_t(std::min(max_header_bytes, file.size - 8))) {
        refuse_foreign(file);
        fail(EXIT_BAD_DATA,
             "%s: a header of %llu bytes cannot be in a file of %lld; not a safetensors file, or damaged", path.c_str(),
             static_cast<unsigned long long>(header_bytes), static_cast<long long>(file.size));
    }
    std::string header(header_bytes, '\0');
    file.read_at(header.data(), 8, int64_t(header_bytes));
    const Json entries = parse_json_object(header, path + ": its header");
    for (const auto& [name, entry] : entries.members) {
        if (name == "__metadata__")
            out.metadata = read_metadata(entry, path);
        else
            out.tensors[name] = read_tensor_info(name, entry, path);
    }
    out.data_begin.push_back(8 + int64_t(header_bytes));
    check_tensors(out, file.size - out.data_begin[0]);
    return out;
}

Safetensors open_safetensors_index(const std::string& path) {
    constexpr size_t max_files = 512;  // all files are open at the same time
    const Json index = read_json_object(path, max_header_bytes);
    if (index["weight_map"].type != Json::object)
        fail(EXIT_BAD_DATA, "%s: has no weight_map, an object of tensor and file names", path.c_str());
    std::map<std::string, std::string> map;
    std::set<std::string> names;
    for (const auto& [tensor, file] : index["weight_map"].members) {
        if (file.type != Json::string) fail(EXIT_BAD_DATA, "%s: weight_map must hold only strings", path.c_str());
        names.insert(map[tensor] = file.text);
    }
    if (names.size() > max_files) fail(EXIT_BAD_DATA, "%s: names more than %zu files", path.c_str(), max_files);
    Safetensors out;
    out.path = path;
    for (const std::string& name : names) {
        if (!is_file_name(name))
            fail(EXIT_BAD_DATA, "%s: \"%s\" is not the name of a file in the same directory", path.c_str(),
                 printable(name).c_str());
        Safetensors opened = open_safetensors(parent_directory(path) + "/" + name);
        for (auto& [tensor_name, tensor] : opened.tensors) {
            tensor.file = int(out.files.size());
            if (const auto listed = map.find(tensor_name); listed != map.end() && listed->second == name)
                out.tensors[tensor_name] = tensor;
        }
        out.files.push_back(std::move(opened.files[0]));
        out.data_begin.push_back(opened.data_begin[0]);
    }
    for (const auto& [name, file] : map)
        if (!out.find(name))
            fail(EXIT_BAD_DATA, "%s: tensor \"%s\" is listed in weight_map for %s, which does not contain it",
                 path.c_str(), printable(name).c_str(), printable(file).c_str());
    return out;
}

const TensorInfo* Safetensors::find(const std::string& name) const {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : &found->second;
}

static float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * 0x1p-24f));
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;  // 31: infinity or NaN
    return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

void Safetensors::read(float* out, const TensorInfo& tensor, int64_t first, int64_t count) const {
    const InputFile& file = files[size_t(tensor.file)];
    const int64_t begin = data_begin[size_t(tensor.file)] + tensor.begin;
    if (tensor.dtype == "F32") return file.read_at(out, begin + first * 4, count * 4);
    const bool half = tensor.dtype == "F16";
    if (!half && tensor.dtype != "BF16")
        fail(EXIT_BAD_DATA, "%s: %s is %s; only F32, BF16 and F16 can be read", file.path.c_str(),
             printable(tensor.name).c_str(), tensor.dtype.c_str());
    std::vector<uint16_t> chunk(size_t(std::min(count, chunk_elements)));
    for (int64_t at = 0; at < count; at += chunk_elements) {
        const int64_t n = std::min(chunk_elements, count - at);
        file.read_at(chunk.data(), begin + (first + at) * 2, n * 2);
        for (int64_t i = 0; i < n; i++)
            out[at + i] = half ? half_to_float(chunk[i]) : std::bit_cast<float>(uint32_t(chunk[i]) << 16);
    }
}

void Safetensors::read_bytes(uint8_t* out, const TensorInfo& tensor) const {
    files[size_t(tensor.file)].read_at(out, data_begin[size_t(tensor.file)] + tensor.begin, tensor.end - tensor.begin);
}

// The header is padded with spaces, so that the data start at a multiple of 8. Names need no escapes: they are those of
// a GPT-2.
std::string safetensors_header(std::vector<TensorInfo>& tensors, const Metadata& metadata) {
    std::string text = R"({"__metadata__":{"format":"pt")";
    for (const auto& [key, value] : metadata) text += format(R"(,"%s":"%s")", key.c_str(), value.c_str());
    text += "}";
    int64_t at = 0;
    for (TensorInfo& t : tensors) {
        t.begin = at, t.end = at += *shape_bytes(t);
        const std::string shape = json_text(t.shape);
        text += format(R"(,"%s":{"dtype":"%s","shape":%s,"data_offsets":[%lld,%lld]})", t.name.c_str(), t.dtype.c_str(),
                       shape.c_str(), static_cast<long long>(t.begin), static_cast<long long>(t.end));
    }
    text += "}";
    text.resize(round_up<size_t>(text.size(), 8), ' ');
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

void write_elements(OutputFile& file, const std::string& dtype, const float* values, int64_t count) {
    if (dtype == "F32") return file.write(values, count * 4);
    INVARIANT(dtype == "BF16", "elements of dtype %s are written", dtype.c_str());
    std::vector<bf16> chunk(size_t(std::min(count, chunk_elements)));
    for (int64_t at = 0; at < count; at += chunk_elements) {
        const int64_t n = std::min(chunk_elements, count - at);
        for (int64_t i = 0; i < n; i++) chunk[i] = bf16(values[at + i]);
        file.write(chunk.data(), n * 2);
    }
}
