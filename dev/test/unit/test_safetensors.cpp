// test_safetensors.cpp: tests that safetensors files read back as they were written, that their bytes follow the
// format, and that each defect of a header is refused with EXIT_BAD_DATA and the reason.
#include "checkpoint/safetensors.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/dtype.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"

static std::string file_bytes(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// Returns exit code and message of the refusal of a file with these bytes: "65 message". "" if it is accepted.
static std::string refusal_of(const std::string& bytes) {
    const TemporaryDirectory dir;
    write_bytes(dir / "x", bytes);
    return refusal([&] { open_safetensors(dir / "x"); });
}
static std::string header_refusal(const std::string& header, int data_bytes) {
    return refusal_of(file_bytes(header, std::string(size_t(data_bytes), 'x')));
}

// The header of a tensor "a": a_tensor(R"("F32")", "[1]", "[0,4]").
static std::string a_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

static std::string two(const std::string& a, const std::string& b) {  // two tensors of U8 at these offsets
    const std::string rest = R"(":{"dtype":"U8","shape":[2],"data_offsets":)";
    return R"({"a)" + rest + a + R"(},"b)" + rest + b + "}}";
}

static const std::string f32 = R"("F32")";

// Writes tensors whose elements are the values, one after the other.
static void write_tensors(const std::string& path, std::vector<TensorInfo> tensors, const float* values,
                          const Metadata& metadata = {}) {
    OutputFile file(path);
    const std::string header = safetensors_header(tensors, metadata);
    file.write(header.data(), int64_t(header.size()));
    for (const TensorInfo& t : tensors) {
        write_elements(file, t.dtype, values, t.elements());
        values += t.elements();
    }
    file.finish();
}

TEST_CASE("the bytes of a small file are as the format defines them; cut anywhere or too long it is refused") {
    const TemporaryDirectory dir;
    const float values[] = {1.0f, -2.0f, 1.0f, 1.00390625f, -3.0f};  // 1 + 2^-8 is a tie: to even, 1
    write_tensors(dir / "x", {{"a", "F32", {2, 1}}, {"b", "BF16", {3}}}, values, {{"step", "7"}});
    const std::string bytes = read_bytes(dir / "x");
    std::string header =
        R"({"__metadata__":{"format":"pt","step":"7"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
        R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    CHECK(bytes == file_bytes(header, std::string("\0\0\x80\x3f\0\0\0\xc0\x80\x3f\x80\x3f\x40\xc0", 14)));

    for (size_t length = 0; length < bytes.size(); length++) {
        CAPTURE(length);
        CHECK(refusal_of(bytes.substr(0, length)).starts_with("65 "));
    }
    CHECK(refusal_of(bytes + "x").starts_with("65 "));
}

TEST_CASE("tensors read back, whole and in parts") {
    const TemporaryDirectory dir;
    const int64_t n = (1 << 20) + 77, m = n / 7 * 7;  // more than one chunk of the conversion
    std::vector<float> values(n + 1 + m), got(n);
    for (size_t i = 0; i < values.size(); i++) values[i] = float(i % 1021) * 0.25f - 100.0f;  // too many bits for BF16
    write_tensors(dir / "x", {{"f", "F32", {n}}, {"scalar", "F32", {}}, {"h", "BF16", {7, n / 7}}}, values.data());

    const Safetensors file = open_safetensors(dir / "x");
    CHECK(file.find("none") == nullptr);
    file.read(got.data(), *file.find("f"));
    CHECK(std::equal(got.begin(), got.end(), values.begin()));
    float part[3];
    file.read(part, *file.find("scalar"));
    CHECK(part[0] == values[n]);
    file.read(part, *file.find("f"), n - 3, 3);
    CHECK(std::equal(part, part + 3, values.begin() + n - 3));
    file.read(got.data(), *file.find("h"));
    for (float& x : values) x = float(bf16(x));
    CHECK(std::equal(got.begin(), got.begin() + m, values.begin() + n + 1));
    file.read(part, *file.find("h"), m - 3, 3);
    CHECK(std::equal(part, part + 3, values.end() - 3));
}

TEST_CASE("every F16 value is read exactly") {
    std::string data(2 * 65536, '\0');
    for (uint32_t i = 0; i < 65536; i++) data[2 * i] = char(i & 255), data[2 * i + 1] = char(i >> 8);
    const TemporaryDirectory dir;
    write_bytes(dir / "x", file_bytes(a_tensor(R"("F16")", "[65536]", "[0,131072]"), data));
    const Safetensors file = open_safetensors(dir / "x");
    std::vector<float> got(65536);
    file.read(got.data(), *file.find("a"));
    int wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const int exponent = int(i >> 10 & 31), mantissa = int(i & 1023);
        float want = std::ldexp(float(exponent ? 1024 + mantissa : mantissa), std::max(exponent, 1) - 25);
        if (exponent == 31) want = mantissa ? NAN : INFINITY;
        const bool same = std::isnan(want) ? std::isnan(got[i]) : std::fabs(got[i]) == want;
        wrong += !same || (!std::isnan(want) && std::signbit(got[i]) != (i >> 15));
    }
    CHECK(wrong == 0);
}

TEST_CASE("every header that the reference implementation accepts is accepted") {
    const std::pair<std::string, int> cases[] = {
        // Header and bytes of data.
        {"{}      ", 0},
        {R"({"__metadata__":{}})", 0},
        {R"({"__metadata__":null})", 0},
        {a_tensor(f32, "[]", "[0,4]"), 4},
        {a_tensor(f32, "[0,3]", "[0,0]"), 0},
        {a_tensor(R"("F4")", "[4]", "[0,2]"), 2},
        {two("[2,4]", "[0,2]"), 4},  // in any order
        {a_tensor(R"("U8","more":{"dtype":[1,{"x":null}],"y":-1.5})", "[1]", "[0,1]"), 1},
    };
    for (const auto& [json, data_bytes] : cases) {
        const std::string header = json;
        CAPTURE(header);
        CHECK(header_refusal(header, data_bytes) == "");
    }
}

struct BadHeader {
    std::string header;
    const char* reason;
    int data_bytes = 4;
};

static void check_refusals(const std::vector<BadHeader>& cases) {
    for (const BadHeader& c : cases) {
        const std::string said = header_refusal(c.header, c.data_bytes);
        CAPTURE(c.header);
        CAPTURE(said);
        CHECK(said.starts_with("65 "));
        CHECK(contains(said, c.reason));
    }
}

TEST_CASE("a header that is not JSON, or has a missing field or one of a wrong type, is refused") {
    for (const char* text : {"", "{}x", R"({"a":{"shape":[1e999]}})", "{\"\xff\":{}}"})
        check_refusals({{text, "not valid JSON"}});
    for (const char* shape : {"1", R"(["1"])", "[[1]]", "[1.0]", "[-1]", "[99999999999999999999]"})
        check_refusals({{a_tensor(f32, shape, "[0,4]"), "wrong type"}});
    for (const char* metadata : {R"({"a":1})", R"(["a"])"})
        check_refusals({{format(R"({"__metadata__":%s})", metadata), "must be an object of strings"}});
    check_refusals({{"[]", "not an object"},
                    {R"({"a":5})", "wrong type"},
                    {a_tensor("32", "[1]", "[0,4]"), "wrong type"},
                    {a_tensor(f32, "[1]", "[0]"), "[begin, end]"},
                    {a_tensor(f32, "[1]", "[0,4,4]"), "[begin, end]"},
                    {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "is missing"},
                    {R"({"a\u001b[31m":5})", "\"a\\x1b[31m\""}});  // no escape codes in the message
}

TEST_CASE("a tensor whose size or place does not fit the data is refused") {
    check_refusals({
        {a_tensor(R"("F33")", "[1]", "[0,4]"), "unknown dtype \"F33\""},
        {a_tensor(f32, "[2]", "[0,4]"), "is F32 [2], but 4 bytes long"},
        {a_tensor(R"("F4")", "[3]", "[0,4]"), "is F4 [3], but 4 bytes long"},
        {a_tensor(f32, "[1]", "[4,0]"), "bytes 4 to 0"},
        {a_tensor(f32, "[1]", "[0,4]"), "describes 4 bytes of data, the file has 5", 5},
        {a_tensor(f32, "[1]", "[1,5]"), "the tensor before it ends at 0", 5},
        {two("[0,2]", "[3,5]"), "the tensor before it ends at 2", 5},
        {two("[0,2]", "[1,3]"), "the tensor before it ends at 2", 3},
        {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
         "the tensor before it ends at 0"},  // the second "a" replaces the first
        // Products and sums must not wrap around to the right value.
        {a_tensor(f32, "[4611686018427387905]", "[0,4]"), "but 4 bytes long"},
        {a_tensor(f32, "[4294967296,4294967296,1]", "[0,0]"), "but 0 bytes long", 0},
        {a_tensor(f32, "[1]", "[0,18446744073709551615]"), "bytes 0 to -1"},
        {a_tensor(R"("U8")", "[9223372036854775807]", "[0,9223372036854775807]"), "bytes long"},
    });
}

TEST_CASE("an impossible header length is refused before memory of that size is allocated") {
    for (uint64_t length : {uint64_t(3), uint64_t(10'000'001), uint64_t(1) << 40, ~uint64_t(0) - 7}) {
        const std::string bytes = std::string(reinterpret_cast<const char*>(&length), 8) + "{}";
        CHECK(contains(refusal_of(bytes), "header of " + std::to_string(length)));
    }
}

TEST_CASE("an index joins files, and one that names wrong tensors or files outside of its directory is refused") {
    const TemporaryDirectory dir;
    make_directories(dir / "in");
    for (const auto& [path, name, value] :
         {std::tuple{"outside", "a", 3.0f}, {"in/one", "a", 1.0f}, {"in/two", "b", 2.0f}})
        write_tensors(dir / path + ".safetensors", {{name, "F32", {1}}}, &value);
    // A link is its owner's choice, not the file's: the Hub's cache has links to the files of several revisions.
    std::filesystem::create_symlink("../outside.safetensors", dir / "in/link.safetensors");
    const std::string index = dir / "in/model.safetensors.index.json";
    const auto open_index = [&](const std::string& text) {
        write_bytes(index, text);
        return open_safetensors_index(index);
    };
    const auto code = [&](const std::string& text) { return exit_code_of([&] { open_index(text); }); };

    const Safetensors file =
        open_index(R"({"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
    float a = 0, b = 0;
    file.read(&a, *file.find("a")), file.read(&b, *file.find("b"));
    CHECK(std::pair(a, b) == std::pair(1.0f, 2.0f));
    CHECK(code(R"({"weight_map":{"a":"link.safetensors"}})") == 0);
    CHECK(code(R"({"weight_map":{"a":"missing.safetensors"}})") == EXIT_NO_INPUT);
    CHECK(exit_code_of([&] { open_safetensors(dir / "none"); }) == EXIT_NO_INPUT);
    write_bytes(index, file_bytes(a_tensor(R"("I32")", "[1]", "[0,4]"), "abcd"));
    const Safetensors integers = open_safetensors(index);  // can be listed, but not read
    CHECK(contains(refusal([&] { integers.read(&a, *integers.find("a")); }), "a is I32; only F32"));
    const std::string outside = "\"" + (dir / "outside.safetensors") + "\"";
    for (const char* value : {R"("../outside.safetensors")", outside.c_str(), R"("one.safetensors\u0000.txt")", "1"}) {
        CAPTURE(value);
        CHECK(code(std::string(R"({"weight_map":{"a":)") + value + "}}") == EXIT_BAD_DATA);
    }
    for (const char* text : {R"({"weight_map":{"b":"one.safetensors"}})", R"({"weight_map":["a"]})", "",
                             R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors"}})"})
        CHECK(code(text) == EXIT_BAD_DATA);
}
