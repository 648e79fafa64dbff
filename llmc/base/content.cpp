#include "base/content.h"

#include <strings.h>

using namespace std::string_view_literals;

namespace {
struct Magic {
    size_t offset;
    std::string_view bytes;
    ForeignContent content;
};
}  // namespace

static constexpr const char *UNZIP = "unpack it with unzip", *TO_UTF8 = "convert it with iconv -f UTF-16 -t UTF-8",
                            *UTF32_TO_UTF8 = "convert it with iconv -f UTF-32 -t UTF-8",
                            *TO_PARQUET = "convert it to Parquet or JSON lines", *NUMBERS = "it holds no text",
                            *WEIGHTS = "it holds the weights of a model";

// --long: also what was packed with it, up to 2 GiB.
static constexpr ForeignContent  //
    GZIP = {"a file packed by gzip", "unpack it with gzip -d", false, "gzip", {"gzip", "-dc"}},
    ZSTD = {"a file packed by zstd", "unpack it with zstd -d", false, "zstd", {"zstd", "-dc", "--long=31"}},
    XZ = {"a file packed by xz", "unpack it with xz -d", false, "xz-utils", {"xz", "-dc"}},
    BZIP2 = {"a file packed by bzip2", "unpack it with bzip2 -d", false, "bzip2", {"bzip2", "-dc"}},
    PARQUET = {"a Parquet file", "train_gpt2 tokenize reads it, unpacked", false, "python3", {"python3"}},
    PICKLE = {"a Python pickle", TO_PARQUET};

// Long enough that no text begins so by chance.
static constexpr Magic known[] = {
    {0, "version https://git-lfs.github.com/"sv, {"a git-lfs pointer in place of the file", "run git lfs pull"}},
    {0, "\x1f\x8b"sv, GZIP},
    {0, "\x1f\x9d"sv, {"a file packed by compress", "unpack it with gzip -d"}},
    {0, "\x28\xb5\x2f\xfd"sv, ZSTD},
    {1, "\x2a\x4d\x18"sv, ZSTD},  // begins with a skippable frame, as of pzstd
    {0, "\3757zXZ\0"sv, XZ},
    {4, "1AY&SY"sv, BZIP2},
    {4, "\x17\x72\x45\x38\x50\x90"sv, BZIP2},  // an empty file, packed
    {0, "\x04\x22\x4d\x18"sv, {"a file packed by lz4", "unpack it with lz4 -d"}},
    {0, "IQ== 0\nIg== 1\n"sv, {"a vocabulary of tiktoken", "give its model's tokenizer.json", true}},
    {257, "ustar\0"sv, {"a tar archive", "unpack it with tar -xf"}},    // POSIX. "mustard" is text
    {257, "ustar  \0"sv, {"a tar archive", "unpack it with tar -xf"}},  // GNU
    {0, "PK\3\4"sv, {"a zip archive (also .npz, .pt, .docx)", UNZIP}},
    {0, "PK\5\6"sv, {"an empty zip archive", UNZIP}},
    {0, "7z\xbc\xaf\x27\x1c"sv, {"a 7z archive", "unpack it with 7z x"}},
    {0, "Rar!\x1a\x07"sv, {"a rar archive", "unpack it with unrar x"}},
    {0, "!<arch>\n"sv, {"an ar archive (also .a, .deb)", "unpack it with ar x"}},
    {0, "PAR1\x15"sv, PARQUET},
    {0, "ARROW1\0\0"sv, {"an Arrow file", TO_PARQUET}},
    {0, "\xff\xff\xff\xff"sv, {"an Arrow stream (a cache of Hugging Face's datasets)", TO_PARQUET}},
    {0, "FEA1\0\0\0\0"sv, {"a Feather file", TO_PARQUET}},
    {0, "Obj\1"sv, {"an Avro file", TO_PARQUET}},
    {0, "\x89HDF\r\n"sv, {"an HDF5 file", TO_PARQUET}},
    {0, "SQLite format 3\0"sv, {"an SQLite database", "export a table as CSV: sqlite3 -header -csv"}},
    {0, "\x93NUMPY"sv, {"a NumPy array", "data/to_shard.py reads arrays of tokens"}},
    {0, "MMIDIDX\0"sv, {"an index of Megatron's tokens", "data/to_shard.py reads the .bin file beside it"}},
    {0, "\x88\xd8\x34\x01"sv, {"a token shard", "it needs no tokenizing"}},
    {0, "\x8a\xd8\x34\x01"sv, {"a task of llm.c", "train_gpt2 eval --task reads it, unpacked"}},
    {0, "\x80\2"sv, {"a Python pickle (also PyTorch's .pt)", NUMBERS}},
    {0, "\x80\3"sv, PICKLE},
    {0, "\x80\4"sv, PICKLE},
    {0, "\x80\5"sv, PICKLE},
    {0, "}q\0"sv, PICKLE},  // protocol 1: a dict, a list
    {0, "]q\0"sv, PICKLE},
    {0, "(dp0\n"sv, PICKLE},  // protocol 0
    {0, "(lp0\n"sv, PICKLE},
    {0, "(dp1\n"sv, PICKLE},  // by Python 2
    {0, "(lp1\n"sv, PICKLE},
    {0, "GGUF\2\0\0\0"sv, {"a GGUF file", WEIGHTS}},
    {0, "GGUF\3\0\0\0"sv, {"a GGUF file", WEIGHTS}},
    {4, "\0\0\0\0{\""sv, {"a safetensors file", WEIGHTS}},
    {0, "\x5d\0\0"sv, XZ},  // lzma's format; a safetensors file may begin so, too
    {0, "%PDF-"sv, {"a PDF document", "convert it with pdftotext"}},
    {0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, {"an old Office document", "save it as text"}},
    {0, "{\\rtf"sv, {"an RTF document", "save it as text"}},
    {0, "\xff\xfe\0\0"sv, {"UTF-32", UTF32_TO_UTF8}},
    {0, "\0\0\xfe\xff"sv, {"UTF-32", UTF32_TO_UTF8}},
    {0, "\xff\xfe"sv, {"UTF-16", TO_UTF8}},
    {0, "\xfe\xff"sv, {"UTF-16", TO_UTF8}},
};

// Whether this is the start of an HTML page: <!DOCTYPE html, <html or <head, after white space.
static bool is_html(std::string_view start) {
    const size_t first = start.find_first_not_of(" \t\r\n");
    if (first == start.npos) return false;
    start.remove_prefix(first);
    for (const std::string_view tag : {"<!doctype html"sv, "<html"sv, "<head"sv})
        if (start.size() > tag.size() && strncasecmp(start.data(), tag.data(), tag.size()) == 0) return true;
    return false;
}

// Whether this is the start of a cpio archive (-H newc, crc or odc): a header of 76 digits or more.
static bool is_cpio(std::string_view start) {
    return start.size() > 76 && start.starts_with("07070") &&
           start.substr(0, 76).find_first_not_of("0123456789abcdefABCDEF") == start.npos;
}

const ForeignContent* foreign_content(std::string_view start) {
    static constexpr ForeignContent html = {"a web page (HTML)", "a download may have failed; download it again", true},
                                    cpio = {"a cpio archive", "unpack it with cpio -i"};
    for (const Magic& m : known)
        if (m.offset < start.size() && start.substr(m.offset).starts_with(m.bytes)) return &m.content;
    if (is_cpio(start)) return &cpio;
    if (start.starts_with("\xef\xbb\xbf")) start.remove_prefix(3);
    return is_html(start) ? &html : nullptr;
}
