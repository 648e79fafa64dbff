#include "data/shard.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/common.h"
#include "base/files.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and are read without conversion");

static constexpr int HEADER_BYTES = 1024;
static constexpr int32_t MAGIC = 20240520;
static constexpr int64_t MAX_TOKENS = std::numeric_limits<int32_t>::max();  // the header's count is an int32
static constexpr const char* CONVERT = "convert it with data/to_shard.py (docs/data.md)";

// Recognizes the formats of other trainers, so that the error can say how to convert the file.
[[noreturn]] static void refuse_foreign_file(const std::string& path, const int32_t* header) {
    const int32_t magic = header[0];
    if (memcmp(header, "\x93NUMPY", 6) == 0)
        fail(EXIT_BAD_DATA, "%s: is a NumPy array, not a token shard; %s", path.c_str(), CONVERT);
    if (magic == 20240801)
        fail(EXIT_BAD_DATA, "%s: has Llama 3's tokens (magic 20240801); GPT-2 needs shards with magic %d", path.c_str(),
             MAGIC);
    if (magic == 20240522)
        fail(EXIT_BAD_DATA, "%s: is an evaluation file (magic 20240522), not a token shard", path.c_str());
    fail(EXIT_BAD_DATA,
         "%s: is not a token shard: it starts with %d, not %d; if it has bare uint16 tokens (nanoGPT's train.bin), %s; "
         "if it is text, run train_gpt2 tokenize",
         path.c_str(), magic, MAGIC, CONVERT);
}

Shard open_shard(const std::string& path, int places) {
    const InputFile file(path);
    int32_t header[HEADER_BYTES / 4] = {};
    if (file.size < 8)
        fail(EXIT_BAD_DATA, "%s: has %d bytes, too few for a token shard: the header alone has %d", path.c_str(),
             int(file.size), HEADER_BYTES);
    file.read_at(header, 0, std::min<int64_t>(file.size, HEADER_BYTES));
    if (header[0] != MAGIC) refuse_foreign_file(path, header);
    if (file.size < HEADER_BYTES)
        fail(EXIT_BAD_DATA,
             "%s: cut off after %d bytes, inside its header of %d; fetch or make it again (docs/data.md)", path.c_str(),
             int(file.size), HEADER_BYTES);
    if (header[1] != 1 && header[1] != 2)
        fail(EXIT_BAD_DATA, "%s: has shard version %d; this program reads versions 1 (uint16 tokens) and 2 (uint32)",
             path.c_str(), header[1]);

    Shard shard{path, header[2], header[1] == 1 ? 2 : 4, 0};
    const int64_t promised = HEADER_BYTES + shard.tokens * shard.bytes_per_token;
    if (file.size != promised)  // refuses a negative count too, because the file has a whole header
        fail(EXIT_BAD_DATA,
             "%s: its header promises %s tokens, so %s bytes; the file has %s; fetch or make it again (docs/data.md)",
             path.c_str(), with_commas(shard.tokens).c_str(), with_commas(promised).c_str(),
             with_commas(file.size).c_str());
    shard.hash = sampled_hash(path, places);
    return shard;
}

uint64_t sampled_hash(const std::string& path, int places) {
    constexpr int64_t piece = 64 << 10;
    const InputFile file(path);
    const bool whole = file.size <= places * piece;
    std::vector<unsigned char> bytes(size_t(whole ? file.size : places * piece));
    if (whole) file.read_at(bytes.data(), 0, file.size);
    for (int i = 0; !whole && i < places; i++)
        file.read_at(bytes.data() + i * piece, i * (file.size - piece) / std::max(1, places - 1), piece);
    return XXH3_64bits(bytes.data(), bytes.size());
}

template <class Stored>
static void widen(const std::vector<unsigned char>& bytes, int64_t count, int* out) {
    for (int64_t i = 0; i < count; i++) {
        Stored token;
        memcpy(&token, bytes.data() + i * int64_t(sizeof(Stored)), sizeof(Stored));
        out[i] = token > uint32_t(std::numeric_limits<int>::max()) ? -1 : int(token);  // -1 is refused by read_tokens
    }
}

void read_tokens(const Shard& shard, int64_t begin, int64_t count, int vocab_size, int* out) {
    ENSURE(begin >= 0 && count >= 0 && count <= shard.tokens - begin,
           "%s: cannot read %s tokens from token %s on: it has %s", shard.path.c_str(), with_commas(count).c_str(),
           with_commas(begin).c_str(), with_commas(shard.tokens).c_str());
    static thread_local std::vector<unsigned char> bytes;  // reused: a training run calls read_tokens for every window
    bytes.resize(size_t(count * shard.bytes_per_token));

    const InputFile file(shard.path);
    const int64_t offset = HEADER_BYTES + begin * shard.bytes_per_token;
    if (file.size - offset < int64_t(bytes.size()))
        fail(EXIT_BAD_DATA, "%s: became shorter while it was in use: it had %s tokens, and now ends at byte %s",
             shard.path.c_str(), with_commas(shard.tokens).c_str(), with_commas(file.size).c_str());
    file.read_at(bytes.data(), offset, int64_t(bytes.size()));
    if (shard.bytes_per_token == 2)
        widen<uint16_t>(bytes, count, out);
    else
        widen<uint32_t>(bytes, count, out);

    for (int64_t i = 0; i < count; i++)
        if (out[i] < 0 || out[i] >= vocab_size)
            fail(EXIT_BAD_DATA,
                 "%s: token %s (byte %s) is %d, but the vocabulary has %d tokens; made with another tokenizer?",
                 shard.path.c_str(), with_commas(begin + i).c_str(),
                 with_commas(offset + i * shard.bytes_per_token).c_str(), out[i], vocab_size);
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

std::vector<std::string> glob_files(const std::string& pattern, const char* option) {
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) {  // a file whose name may contain brackets, not a pattern
        if (S_ISDIR(info.st_mode))
            fail(EXIT_NO_INPUT, "%s %s is a folder; give a pattern of the files in it, such as '%s/train_*.bin'",
                 option, pattern.c_str(), pattern.c_str());
        return {pattern};
    }
    for (const std::string& unfinished : matches(temporary_name(pattern)))
        fail(
            EXIT_BAD_DATA,
            "%s is not finished: tokenize is still running, or was killed; wait for it, or delete these shards and run "
            "it again",
            unfinished.c_str());
    std::vector<std::string> files = matches(pattern);
    if (files.empty())
        fail(EXIT_NO_INPUT, "%s '%s' matches no file; the scripts in data/ fetch or make token shards (docs/data.md)",
             option, pattern.c_str());
    std::sort(files.begin(), files.end());  // by bytes in any locale: the windows are numbered in this order
    return files;
}

ShardWriter::ShardWriter(const std::string& path, int vocab_size)
    : path(path), vocab_size(vocab_size), buffer(HEADER_BYTES) {
    const std::string name = temporary_name(path);
    unlink(name.c_str());  // a leftover, or a link: nothing is written into the file that it names
    fd = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) fail(EXIT_CANNOT_CREATE, "%s: cannot be created: %s", name.c_str(), strerror(errno));
}

ShardWriter::~ShardWriter() {
    if (fd >= 0) close(fd);
    if (!finished) unlink(temporary_name(path).c_str());
}

static void write_all(int fd, const std::string& path, const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t put = write(fd, static_cast<const char*>(data) + done, bytes - done);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail(EXIT_IO, "%s: writing failed: %s", path.c_str(), strerror(errno));
        done += size_t(put);
    }
}

void ShardWriter::append(const int* data, int64_t count) {
    ENSURE(count <= MAX_TOKENS - tokens, "%s: a shard holds at most %s tokens; lower --shard-tokens", path.c_str(),
           with_commas(MAX_TOKENS).c_str());
    const size_t width = vocab_size <= 65536 ? 2 : 4;
    for (int64_t i = 0; i < count; i++) {
        ENSURE(data[i] >= 0 && data[i] < vocab_size, "%s: token %d is outside of the vocabulary of %d", path.c_str(),
               data[i], vocab_size);
        const uint32_t token = uint32_t(data[i]);
        const auto* first = reinterpret_cast<const unsigned char*>(&token);
        buffer.insert(buffer.end(), first, first + width);
    }
    tokens += count;
    if (buffer.size() < (1 << 20)) return;
    write_all(fd, path, buffer.data(), buffer.size());
    buffer.clear();
}

void ShardWriter::complete() {
    const std::string name = temporary_name(path);
    write_all(fd, path, buffer.data(), buffer.size());
    buffer = {};
    const bool wide = vocab_size > 65536;
    int32_t header[HEADER_BYTES / 4] = {MAGIC, wide ? 2 : 1, int32_t(tokens), wide ? vocab_size : 0};
    if (lseek(fd, 0, SEEK_SET) != 0) fail(EXIT_IO, "%s: seeking failed: %s", name.c_str(), strerror(errno));
    write_all(fd, path, header, sizeof(header));
    if (fsync(fd) != 0)
        fail(EXIT_IO, "%s: writing failed: %s", name.c_str(), strerror(errno));  // maybe the first sign of a full disk
    close(fd);
    fd = -1;
}

void ShardWriter::finish() {
    if (fd >= 0) complete();
    if (rename(temporary_name(path).c_str(), path.c_str()) != 0)
        fail(EXIT_CANNOT_CREATE, "%s: cannot be created: %s", path.c_str(), strerror(errno));
    finished = true;
}
