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
                            *TO_PARQUET = "convert it to Parquet or JSON lines", *NUMBERS = "it holds no text",
                            *WEIGHTS = "it holds the weights of a model";

// Long enough that no text begins so by chance.
static constexpr Magic known[] = {
    {0, "version https://git-lfs.github.com/"sv, {"a git-lfs pointer in place of the file", "run git lfs pull", false}},
    {0, "\x1f\x8b"sv, {"a file packed by gzip", "unpack it with gzip -d", false}},
    {0, "\x1f\x9d"sv, {"a file packed by compress", "unpack it with gzip -d", false}},
    {0, "\x28\xb5\x2f\xfd"sv, {"a file packed by zstd", "unpack it with zstd -d", false}},
    {0, "\3757zXZ\0"sv, {"a file packed by xz", "unpack it with xz -d", false}},
    {4, "1AY&SY"sv, {"a file packed by bzip2", "unpack it with bzip2 -d", false}},
    {0, "\x04\x22\x4d\x18"sv, {"a file packed by lz4", "unpack it with lz4 -d", false}},
    {257, "ustar"sv, {"a tar archive", "unpack it with tar -xf", false}},
    {0, "PK\3\4"sv, {"a zip archive (also .npz, .pt, .docx)", UNZIP, false}},
    {0, "PK\5\6"sv, {"an empty zip archive", UNZIP, false}},
    {0, "7z\xbc\xaf\x27\x1c"sv, {"a 7z archive", "unpack it with 7z x", false}},
    {0, "Rar!\x1a\x07"sv, {"a rar archive", "unpack it with unrar x", false}},
    {0, "PAR1\x15"sv, {"a Parquet file", "train_gpt2 tokenize reads it, unpacked", false}},
    {0, "ARROW1\0\0"sv, {"an Arrow file", TO_PARQUET, false}},
    {0, "\xff\xff\xff\xff"sv, {"an Arrow stream (a cache of Hugging Face's datasets)", TO_PARQUET, false}},
    {0, "FEA1\0\0\0\0"sv, {"a Feather file", TO_PARQUET, false}},
    {0, "Obj\1"sv, {"an Avro file", TO_PARQUET, false}},
    {0, "\x89HDF\r\n"sv, {"an HDF5 file", TO_PARQUET, false}},
    {0, "SQLite format 3\0"sv, {"an SQLite database", "export a table as CSV: sqlite3 -header -csv", false}},
    {0, "\x93NUMPY"sv, {"a NumPy array", "data/to_shard.py reads arrays of tokens", false}},
    {0, "MMIDIDX\0"sv, {"an index of Megatron's tokens", "data/to_shard.py reads the .bin file beside it", false}},
    {0, "\x88\xd8\x34\x01"sv, {"a token shard", "it needs no tokenizing", false}},
    {0, "\x8a\xd8\x34\x01"sv, {"a task of llm.c", "train_gpt2 eval --task reads it, unpacked", false}},
    {0, "\x80\2"sv, {"a Python pickle (also PyTorch's .pt)", NUMBERS, false}},
    {0, "\x80\3"sv, {"a Python pickle", NUMBERS, false}},
    {0, "\x80\4"sv, {"a Python pickle", NUMBERS, false}},
    {0, "\x80\5"sv, {"a Python pickle", NUMBERS, false}},
    {0, "GGUF\2\0\0\0"sv, {"a GGUF file", WEIGHTS, false}},
    {0, "GGUF\3\0\0\0"sv, {"a GGUF file", WEIGHTS, false}},
    {4, "\0\0\0\0{\""sv, {"a safetensors file", WEIGHTS, false}},
    {0, "%PDF-"sv, {"a PDF document", "convert it with pdftotext", false}},
    {0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, {"an old Office document", "save it as text", false}},
    {0, "{\\rtf"sv, {"an RTF document", "save it as text", false}},
    {0, "\xff\xfe"sv, {"UTF-16", TO_UTF8, false}},
    {0, "\xfe\xff"sv, {"UTF-16", TO_UTF8, false}},
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

const ForeignContent* foreign_content(std::string_view start) {
    static constexpr ForeignContent html = {"a web page (HTML)", "a download may have failed; download it again", true};
    for (const Magic& m : known)
        if (m.offset < start.size() && start.substr(m.offset).starts_with(m.bytes)) return &m.content;
    if (start.starts_with("\xef\xbb\xbf")) start.remove_prefix(3);
    return is_html(start) ? &html : nullptr;
}
