#include "data/shard.h"

#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/common.h"
#include "base/files.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and are read without conversion");

static constexpr int HEADER_BYTES = 1024;
static constexpr int32_t MAGIC = 20240520;
static constexpr int32_t MAX_VOCAB = 1 << 20;

// XXH3 of the whole file if it has at most `places` x 64 KiB, else of `places` pieces of 64 KiB, spread evenly from the
// first byte to the last. The hash tells apart shards of the same name and size, at a cost that does not grow with the
// file.
static uint64_t sampled_hash(const InputFile& file, int places) {
    constexpr int64_t piece = 64 << 10;
    const bool whole = file.size <= places * piece;
    std::vector<unsigned char> bytes(size_t(whole ? file.size : places * piece));
    if (whole) file.read_at(bytes.data(), 0, file.size);
    for (int i = 0; !whole && i < places; i++)
        file.read_at(bytes.data() + i * piece, i * (file.size - piece) / std::max(1, places - 1), piece);
    return XXH3_64bits(bytes.data(), bytes.size());
}

Shard open_shard(const std::string& path, int places) {
    const InputFile file(path);
    int32_t header[HEADER_BYTES / 4] = {};
    file.read_at(header, 0, std::min<int64_t>(file.size, HEADER_BYTES));
    if (header[0] != MAGIC)
        fail(EXIT_BAD_DATA,
             "%s: is not a token shard: it starts with %d, not %d; if it has NumPy's or bare uint16 tokens (nanoGPT's "
             "train.bin), convert it with data/to_shard.py (docs/data.md); if it is text, run train_gpt2 tokenize",
             path.c_str(), header[0], MAGIC);
    if (file.size < HEADER_BYTES)
        fail(EXIT_BAD_DATA,
             "%s: cut off after %d bytes, inside its header of %d; fetch or make it again (docs/data.md)", path.c_str(),
             int(file.size), HEADER_BYTES);
    if (header[1] != 1 && header[1] != 2)
        fail(EXIT_BAD_DATA, "%s: has shard version %d; this program reads versions 1 (uint16 tokens) and 2 (uint32)",
             path.c_str(), header[1]);

    Shard shard{path, header[2], header[1] == 1 ? 2 : 4, 0};
    if (header[1] == 2) shard.vocab_size = header[3];
    if (header[1] == 2 && (header[3] < 1 || header[3] > MAX_VOCAB))
        fail(EXIT_BAD_DATA, "%s: its header states a vocabulary of %d tokens, not 1 to %d; make it again with tokenize",
             path.c_str(), header[3], MAX_VOCAB);
    const int64_t promised = HEADER_BYTES + shard.tokens * shard.bytes_per_token;
    if (file.size != promised)  // refuses a negative count too, because the file has a whole header
        fail(EXIT_BAD_DATA,
             "%s: its header promises %s tokens, so %s bytes; the file has %s; fetch or make it again (docs/data.md)",
             path.c_str(), with_commas(shard.tokens).c_str(), with_commas(promised).c_str(),
             with_commas(file.size).c_str());
    shard.hash = sampled_hash(file, places);
    return shard;
}

void read_tokens(const Shard& shard, int64_t begin, int64_t count, int vocab_size, int* out) {
    static thread_local std::vector<unsigned char> bytes;  // reused: a training run calls read_tokens for every window
    bytes.resize(size_t(count * shard.bytes_per_token));

    const InputFile file(shard.path);
    const int64_t offset = HEADER_BYTES + begin * shard.bytes_per_token;
    if (file.size - offset < int64_t(bytes.size()))
        fail(EXIT_BAD_DATA, "%s: became shorter while it was in use: it had %s tokens, and now ends at byte %s",
             shard.path.c_str(), with_commas(shard.tokens).c_str(), with_commas(file.size).c_str());
    file.read_at(bytes.data(), offset, int64_t(bytes.size()));
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = 0;
        memcpy(&token, bytes.data() + i * shard.bytes_per_token, size_t(shard.bytes_per_token));
        if (token >= uint32_t(vocab_size))
            fail(EXIT_BAD_DATA, "%s: token %s (byte %s) is %u, but the vocabulary has %d tokens%s", shard.path.c_str(),
                 with_commas(begin + i).c_str(), with_commas(offset + i * shard.bytes_per_token).c_str(), token,
                 vocab_size,
                 token < uint32_t(shard.vocab_size)
                     ? format(", and the tokenizer %d: a new run with --init and --vocab-size %d adds the others",
                              shard.vocab_size, shard.vocab_size)
                           .c_str()
                     : " (made with another tokenizer?)");
        out[i] = int(token);
    }
}

static std::string temporary_name(const std::string& path) { return path + ".tmp"; }

static std::vector<std::string> matches(const std::string& pattern) {
    glob_t found = {};
    std::vector<std::string> files;
    if (glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE, nullptr, &found) == 0)
        files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    return files;
}

static std::vector<std::string> files_of(const std::string& pattern, const char* option) {
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) {  // a file whose name may contain brackets, not a pattern
        if (S_ISDIR(info.st_mode))
            fail(EXIT_NO_INPUT, "%s %s is a folder; give a pattern of the files in it, such as '%s/train_*.bin'",
                 option, pattern.c_str(), pattern.c_str());
        return {pattern};
    }
    for (const std::string& unfinished : matches(temporary_name(pattern)))
        fail(EXIT_BAD_DATA,
             "%s is not finished: tokenize is still running, or was killed; wait for it, or delete these shards and "
             "run it again",
             unfinished.c_str());
    const std::vector<std::string> files = matches(pattern);
    if (files.empty())
        fail(EXIT_NO_INPUT, "%s '%s' matches no file; the scripts in data/ fetch or make token shards (docs/data.md)%s",
             option, pattern.c_str(), pattern.find('[') == pattern.npos ? "" : "; write a [ in a name as \\[");
    return files;
}

std::vector<std::string> glob_files(const std::string& patterns, const char* option) {
    std::vector<std::string> files;
    for (size_t begin = 0, end; begin <= patterns.size(); begin = end + 1) {
        end = std::min(patterns.find('\n', begin), patterns.size());
        for (const std::string& file : files_of(patterns.substr(begin, end - begin), option)) files.push_back(file);
    }
    std::sort(files.begin(), files.end());  // by bytes in any locale: the windows are numbered in this order
    std::set<std::pair<dev_t, ino_t>> seen;
    std::erase_if(files, [&](const std::string& file) {
        struct stat info;
        return stat(file.c_str(), &info) == 0 && !seen.emplace(info.st_dev, info.st_ino).second;
    });
    return files;
}

ShardWriter::ShardWriter(const std::string& path, int vocab_size) : path(path), vocab_size(vocab_size) {
    const std::string name = temporary_name(path);
    unlink(name.c_str());  // a leftover, or a link: nothing is written into the file that it names
    file = fopen(name.c_str(), "wbxe");
    if (!file) fail_errno(EXIT_CANNOT_CREATE, name, "create");
    write_header();  // complete() replaces it
}

ShardWriter::~ShardWriter() {
    if (file) fclose(file);
    if (!finished) unlink(temporary_name(path).c_str());
}

static void write_all(FILE* file, const std::string& path, const void* data, size_t bytes) {
    if (bytes > 0 && fwrite(data, 1, bytes, file) != bytes) fail_errno(EXIT_IO, path, "write");
}

void ShardWriter::write_header() {
    const bool wide = vocab_size > 65536;
    const int32_t header[HEADER_BYTES / 4] = {MAGIC, wide ? 2 : 1, int32_t(tokens), wide ? vocab_size : 0};
    write_all(file, path, header, sizeof(header));
}

void ShardWriter::append(const int* data, int64_t count) {
    const size_t width = vocab_size <= 65536 ? 2 : 4;
    std::vector<unsigned char> bytes(size_t(count) * width);
    for (int64_t i = 0; i < count; i++) {
        ENSURE(data[i] >= 0 && data[i] < vocab_size, "%s: token %d is outside of the vocabulary of %d", path.c_str(),
               data[i], vocab_size);
        memcpy(bytes.data() + size_t(i) * width, &data[i], width);
    }
    write_all(file, path, bytes.data(), bytes.size());
    tokens += count;
}

void ShardWriter::complete() {
    rewind(file);
    write_header();
    // A full disk may show only here.
    if (fflush(file) != 0 || fsync(fileno(file)) != 0) fail_errno(EXIT_IO, path, "write");
    fclose(file);
    file = nullptr;
}

void ShardWriter::finish() {
    if (file) complete();
    rename_path(temporary_name(path), path);
    finished = true;
}
