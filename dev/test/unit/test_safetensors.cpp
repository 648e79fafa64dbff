// test_safetensors.cpp: tests that safetensors files read back as they were written, that their bytes follow the
// format, and that each defect of a header is refused with EXIT_BAD_DATA and the reason.
#include "checkpoint/safetensors.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "base/dtype.h"
#include "support/refusal.h"
#include "support/temporary.h"

static std::string file_bytes(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// The message of the Error for a file with these bytes, or its exit code if that is not EXIT_BAD_DATA. "" if it is
// accepted.
static std::string refusal(const std::string& bytes) {
    const TemporaryDirectory dir;
    write_bytes(dir / "x", bytes);
    try {
        open_safetensors(dir / "x");
    } catch (const Error& error) {
        return error.exit_code == EXIT_BAD_DATA ? error.what() : format("exit code %d", error.exit_code);
    }
    return "";
}
static std::string header_refusal(const std::string& header, int data_bytes) {
    return refusal(file_bytes(header, std::string(size_t(data_bytes), 'x')));
}

static TensorInfo tensor(const char* name, const char* dtype, std::vector<int64_t> shape) {
    TensorInfo out;
    out.name = name, out.dtype = dtype, out.shape = std::move(shape);
    return out;
}

TEST_CASE("the bytes of a small file are as the format defines them") {
    const TemporaryDirectory dir;
    SafetensorsWriter writer(dir / "x", {tensor("a", "F32", {2, 1}), tensor("b", "BF16", {3})}, {{"step", "7"}});
    const float a[] = {1.0f, -2.0f}, b[] = {1.0f, 1.00390625f, -3.0f};  // 1 + 2^-8 is a tie: to even, 1
    writer.write(a, 2);
    writer.write(b, 3);
    const FileSum sum = writer.finish();
    const std::string bytes = read_bytes(dir / "x");
    std::string header =
        R"({"__metadata__":{"format":"pt","step":"7"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
        R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    CHECK(bytes == file_bytes(header, std::string("\0\0\x80\x3f\0\0\0\xc0\x80\x3f\x80\x3f\x40\xc0", 14)));
    CHECK(sum == checksum_file(dir / "x"));
    CHECK(safetensors_bytes(writer.tensors, {{"step", "7"}}) == int64_t(bytes.size()));
}

TEST_CASE("elements beyond the end of a tensor are an internal error") {
    const TemporaryDirectory dir;
    float values[7] = {};
    SafetensorsWriter writer(dir / "x", {tensor("t", "F32", {6})}, {});
    CHECK(refusal([&] { writer.write(values, 7); }) ==
          "1 internal error: t: 7 of 6 elements are written; please report it");
    writer.write(values, 6);
    CHECK(refusal([&] { writer.write(values, 1); }) ==
          "1 internal error: more than 1 tensors are written; please report it");
    writer.finish();
    const Safetensors file = open_safetensors(dir / "x");
    CHECK(refusal([&] { file.read(values, *file.find("t"), 5, 2); }) ==
          "1 internal error: t: elements 5 to 7 of 6 are read; please report it");
}

TEST_CASE("tensors written in pieces read back, whole and in parts") {
    const TemporaryDirectory dir;
    const int64_t n = (1 << 20) + 77;  // more than one chunk of the conversion
    std::vector<float> values(n), got(n);
    for (int64_t i = 0; i < n; i++) values[size_t(i)] = float(i % 1021) * 0.25f - 100.0f;  // too many bits for BF16
    SafetensorsWriter writer(
        dir / "x", {tensor("f", "F32", {n}), tensor("scalar", "F32", {}), tensor("h", "BF16", {7, n / 7 + 0})}, {});
    writer.write(values.data(), 5);
    writer.write(values.data() + 5, n - 5);
    writer.write(values.data() + 1, 1);
    const int64_t m = n / 7 * 7;
    writer.write(values.data(), m);
    writer.finish();

    const Safetensors file = open_safetensors(dir / "x");
    CHECK(file.tensors.size() == 3);
    CHECK(file.metadata == Metadata{{"format", "pt"}});
    CHECK(file.find("none") == nullptr);
    REQUIRE(file.find("f"));
    CHECK(file.find("f")->shape == std::vector<int64_t>{n});
    file.read(got.data(), *file.find("f"));
    CHECK(got == values);
    float one[3];
    file.read(one, *file.find("scalar"));
    CHECK(one[0] == values[1]);
    file.read(one, *file.find("f"), n - 3, 3);
    CHECK(std::memcmp(one, &values[size_t(n - 3)], sizeof(one)) == 0);
    file.read(got.data(), *file.find("h"));
    int64_t wrong = 0;
    for (int64_t i = 0; i < m; i++) wrong += got[size_t(i)] != float(bf16(values[size_t(i)]));
    CHECK(wrong == 0);
    file.read(one, *file.find("h"), m - 3, 3);
    CHECK(one[2] == float(bf16(values[size_t(m - 1)])));
}

TEST_CASE("every F16 value is read exactly") {
    std::string data(2 * 65536, '\0');
    for (uint32_t i = 0; i < 65536; i++) data[2 * i] = char(i & 255), data[2 * i + 1] = char(i >> 8);
    const TemporaryDirectory dir;
    write_bytes(dir / "x", file_bytes(R"({"a":{"dtype":"F16","shape":[65536],"data_offsets":[0,131072]}})", data));
    const Safetensors file = open_safetensors(dir / "x");
    std::vector<float> got(65536);
    file.read(got.data(), *file.find("a"));
    int wrong = 0;
    for (uint32_t i = 0; i < 65536; i++) {
        const int exponent = int(i >> 10 & 31), mantissa = int(i & 1023);
        double want = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        if (exponent == 31) want = mantissa ? NAN : INFINITY;
        if (i & 0x8000) want = -want;
        const bool same =
            std::isnan(want) ? std::isnan(got[i]) : double(got[i]) == want && std::signbit(got[i]) == bool(i & 0x8000);
        wrong += !same;
    }
    CHECK(wrong == 0);
}

TEST_CASE("a file cut at any length, or one byte too long, is refused") {
    const TemporaryDirectory dir;
    SafetensorsWriter writer(dir / "x", {tensor("a", "F32", {4}), tensor("b", "BF16", {2, 2})}, {});
    const float values[] = {1, 2, 3, 4};
    writer.write(values, 4), writer.write(values, 4);
    writer.finish();
    const std::string bytes = read_bytes(dir / "x");
    CHECK(refusal(bytes) == "");
    for (size_t length = 0; length < bytes.size(); length++) {
        CAPTURE(length);
        CHECK(refusal(bytes.substr(0, length)) != "");
    }
    CHECK(refusal(bytes + "x") != "");
}

TEST_CASE("every header that the reference implementation accepts is accepted") {
    CHECK(header_refusal("{}", 0) == "");
    CHECK(header_refusal("{}      ", 0) == "");
    CHECK(header_refusal(R"({"__metadata__":{}})", 0) == "");
    CHECK(header_refusal(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4) == "");
    CHECK(header_refusal(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]}})", 0) == "");
    CHECK(header_refusal(R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},)"
                         R"("a":{"data_offsets":[0,4],"shape":[4],"dtype":"BOOL"}})",
                         12) == "");  // any order
    CHECK(header_refusal(R"({"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2) == "");
    CHECK(header_refusal(
              R"({"a":{"dtype":"U8","more":{"dtype":[1,{"x":null}],"y":-1.5},"shape":[1],"data_offsets":[0,1]}})", 1) ==
          "");
    CHECK(header_refusal("{\"\xc3\xa9\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1) == "");
}

struct BadHeader {
    const char *header, *reason;
    int data_bytes = 4;
};

static void check_refusals(const std::vector<BadHeader>& cases) {
    for (const BadHeader& c : cases) {
        CAPTURE(c.header);
        CHECK(header_refusal(c.header, c.data_bytes).find(c.reason) != std::string::npos);
    }
}

TEST_CASE("a header that is not JSON, or has a missing field or one of a wrong type, is refused") {
    // clang-format off
    check_refusals({
        {"", "not valid JSON", 0},
        {"[]", "not an object", 0},
        {"{", "not valid JSON", 0},
        {"{}x", "not valid JSON", 0},
        {"{} {}", "not valid JSON", 0},
        {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "not valid JSON"},
        {R"({"a":5})", "wrong type"},
        {R"({"a":[]})", "wrong type"},
        {R"({"a":null})", "wrong type"},
        {R"({"a":{}})", "is missing"},
        {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "is missing"},
        {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "is missing"},
        {R"({"a":{"dtype":"F32","shape":[1]}})", "is missing"},
        {R"({"a":{"dtype":32,"shape":[1],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":{"0":1},"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "[begin, end]"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", "[begin, end]"},
        {R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", "not valid JSON"},
    });
    // clang-format on
    CHECK(header_refusal(R"({"a\u001b[31m":5})", 0).find("\"a\\x1b[31m\"") != std::string::npos);  // no escape codes
}

TEST_CASE("a tensor whose size or place does not fit the data is refused") {
    // clang-format off
    check_refusals({
        {R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", "unknown dtype \"F33\""},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "is F32 [2], but 4 bytes long"},
        {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,4]}})", "is F4 [3], but 4 bytes long"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "bytes 4 to 0"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "describes 4 bytes of data, the file has 5", 5},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "describes 4 bytes of data, the file has 3", 3},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})", "the tensor before it ends at 0", 5},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
         R"("b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})",
         "the tensor before it ends at 4", 6},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
         R"("b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}})",
         "the tensor before it ends at 4"},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
         R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
         "the tensor before it ends at 4"},
    });
    // clang-format on
}

// Products and sums must not wrap around to the right value.
TEST_CASE("sizes and places that overflow 64 bits are refused") {
    // clang-format off
    check_refusals({
        {R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", "but 4 bytes long"},
        {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,1],"data_offsets":[0,0]}})", "but 0 bytes long", 0},
        {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}})", "but 0 bytes long", 0},
        {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", "bytes 0 to -1"},
        {R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}})", "wrong type"},
        {R"({"a":{"dtype":"U8","shape":[18446744073709551615,18446744073709551615],"data_offsets":[0,1]}})",
         "bytes long", 1},
        {R"({"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}})", "bytes long"},
    });
    // clang-format on
}

TEST_CASE("a name that occurs twice, so that bytes have no tensor, and metadata that is not text, is refused") {
    // clang-format off
    check_refusals({
        {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
         "has bytes 2 to 4 of the data, but the tensor before it ends at 0"},
        {R"({"__metadata__":{"a":1}})", "must be an object of strings", 0},
        {R"({"__metadata__":{"a":{}}})", "must be an object of strings", 0},
        {R"({"__metadata__":"a"})", "must be an object of strings", 0},
        {R"({"__metadata__":["a"]})", "must be an object of strings", 0},
    });
    // clang-format on
}

TEST_CASE("an impossible header length is refused before memory of that size is allocated") {
    for (uint64_t length :
         {uint64_t(3), uint64_t(10'000'001), uint64_t(1) << 40, uint64_t(1) << 63, ~uint64_t(0), ~uint64_t(0) - 7}) {
        CAPTURE(length);
        const std::string bytes = std::string(reinterpret_cast<const char*>(&length), 8) + "{}";
        CHECK(refusal(bytes).find("header of " + std::to_string(length)) != std::string::npos);
    }
}

TEST_CASE("a tensor of another dtype can be listed, but not read") {
    const TemporaryDirectory dir;
    write_bytes(dir / "x", file_bytes(R"({"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}})", "abcd"));
    const Safetensors file = open_safetensors(dir / "x");
    CHECK(to_string(*file.find("a")) == "I32 [1]");
    float out[1];
    CHECK_THROWS_WITH_AS(file.read(out, *file.find("a")), doctest::Contains("a is I32; only F32"), Error);
}

TEST_CASE("a missing file is EXIT_NO_INPUT") {
    const TemporaryDirectory dir;
    try {
        open_safetensors(dir / "none");
        FAIL("was opened");
    } catch (const Error& error) {
        CHECK(error.exit_code == EXIT_NO_INPUT);
    }
}

TEST_CASE("finishing a file without all of its tensors is an error") {
    const TemporaryDirectory dir;
    SafetensorsWriter writer(dir / "x", {tensor("a", "F32", {2})}, {});
    const float one = 1.0f;
    writer.write(&one, 1);
    CHECK_THROWS_WITH_AS(writer.finish(), doctest::Contains("tensor a was not written"), Error);
}

static void write_one(const std::string& path, const char* name, float value) {
    SafetensorsWriter writer(path, {tensor(name, "F32", {1})}, {});
    writer.write(&value, 1);
    writer.finish();
}

TEST_CASE("an index joins several files") {
    const TemporaryDirectory dir;
    write_one(dir / "one.safetensors", "a", 1.0f);
    write_one(dir / "two.safetensors", "b", 2.0f);
    const std::string index = dir / "model.safetensors.index.json";
    write_bytes(index, R"({"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
    const Safetensors file = open_safetensors_index(index);
    CHECK(file.tensors.size() == 2);
    float a = 0, b = 0;
    file.read(&a, *file.find("a")), file.read(&b, *file.find("b"));
    CHECK(a == 1.0f);
    CHECK(b == 2.0f);
}

TEST_CASE("an index that names wrong tensors or files outside of its directory is refused") {
    const TemporaryDirectory dir;
    make_directories(dir / "in");
    write_one(dir / "outside.safetensors", "a", 1.0f);
    write_one(dir / "in/one.safetensors", "a", 1.0f);
    const std::string index = dir / "in/model.safetensors.index.json";
    const auto code = [&](const std::string& text) {
        write_bytes(index, text);
        try {
            open_safetensors_index(index);
        } catch (const Error& error) {
            return error.exit_code;
        }
        return 0;
    };
    CHECK(code(R"({"weight_map":{"a":"one.safetensors"}})") == 0);
    // A link is its owner's choice, not the file's: the Hub's cache has links to the files of several revisions.
    std::filesystem::create_symlink("../outside.safetensors", dir / "in/link.safetensors");
    CHECK(code(R"({"weight_map":{"a":"link.safetensors"}})") == 0);
    CHECK(code(R"({"weight_map":{"a":"../outside.safetensors"}})") == EXIT_BAD_DATA);
    CHECK(code("{\"weight_map\":{\"a\":\"" + (dir / "outside.safetensors") + "\"}}") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":"one.safetensors\u0000.txt"}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":".."}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":"/etc/passwd"}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":""}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":1}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"b":"one.safetensors"}})") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":["a"]})") == EXIT_BAD_DATA);
    CHECK(code(R"({})") == EXIT_BAD_DATA);
    CHECK(code(R"([])") == EXIT_BAD_DATA);
    CHECK(code("") == EXIT_BAD_DATA);
    CHECK(code(R"({"weight_map":{"a":"missing.safetensors"}})") == EXIT_NO_INPUT);
    std::string many = R"({"weight_map":{"a":"one.safetensors")";
    for (int i = 0; i < 40; i++) many += format(",\"t%d\":\"one.safetensors\"", i);
    CHECK(code(many + "}}") == EXIT_BAD_DATA);  // the index names files that do not exist
}
