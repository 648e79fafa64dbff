#include "text/text_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/files.h"
#include "base/json.h"
#include "text/unicode.h"
#include "text/tokenizer.h"

namespace fs = std::filesystem;

static constexpr int64_t CHUNK_BYTES = 64 << 10;
static constexpr int64_t LONG_DOCUMENT = 64 << 10;  // bytes; the end of longer documents is held out
static constexpr int64_t CUT_WINDOW = 64 << 10;     // bytes in which the start of a line is searched

// ---- files that a program unpacks

static constexpr int64_t PEEKED = 64 << 10;    // bytes that peek reads at least
static constexpr int CANNOT_BE_STARTED = 127;  // exit code

struct Unpacker {
    std::string suffix;
    std::vector<const char*> command;
    const char* package;  // has the program
};

static const Unpacker* unpacker_of(const std::string& path) {
    static const Unpacker unpackers[] = {
        {".gz", {"gzip", "-dc"}, "gzip"},
        {".zst", {"zstd", "-dc", "--long=31"}, "zstd"},  // also what was packed with --long, in windows up to 2 GiB
        {".xz", {"xz", "-dc"}, "xz-utils"},
        {".parquet", {"python3"}, "python3"}};
    for (const Unpacker& unpacker : unpackers)
        if (path.ends_with(unpacker.suffix)) return &unpacker;
    return nullptr;
}

static bool is_packed(const std::string& path) { return unpacker_of(path) != nullptr; }

// a.jsonl.gz -> a.jsonl; .parquet stays
static std::string without_packing(const std::string& path) {
    if (!is_packed(path) || path.ends_with(".parquet")) return path;
    return path.substr(0, path.size() - unpacker_of(path)->suffix.size());
}

// The script is in the tree of the sources, where the program is too, or where `make install` puts it.
static std::string parquet_script() {
    std::error_code ignored;
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    for (const char* place : {"../share/train_gpt2", "scripts", "../../scripts", "../../../scripts"})
        if (const fs::path script = folder / place / "parquet_text.py"; path_exists(script)) return script;
    fail(EXIT_NO_INPUT, "scripts/parquet_text.py, which reads .parquet files, is neither in the sources nor installed");
}

// Reads a text file from its begin to its end. The program that unpacks it has the file as its standard input; no shell
// starts it.
struct TextStream {
    TextStream(const std::string& path, const std::string& text_key);  // text_key: the column of a .parquet file
    TextStream(const TextStream&) = delete;
    ~TextStream();  // ends the program

    // Both return the next bytes, fewer only at the end. There they refuse a file that the program could not unpack to
    // its end (EXIT_BAD_DATA), and a program that is not installed (EXIT_NO_INPUT). peek leaves the bytes to read.
    int64_t read(char* out, int64_t bytes);
    std::string_view peek(int64_t bytes);
    int64_t file_position() const;  // bytes of the file itself that were read

  private:
    void finish();
    int64_t fetch(char* out, int64_t bytes);

    InputFile file;
    const Unpacker* unpacker;                                       // null: none is needed
    int64_t position = 0;                                           // in a file without one
    pid_t program = -1;                                             // -1: it has ended
    int output = -1, status = 0;                                    // the end of its pipe; how it ended
    std::unique_ptr<FILE, int (*)(FILE*)> errors{nullptr, fclose};  // its standard error
    std::string ahead;                                              // read by peek
};

TextStream::TextStream(const std::string& path, const std::string& text_key) : file(path), unpacker(unpacker_of(path)) {
    if (!unpacker) return;
    const std::string script = unpacker->suffix == ".parquet" ? parquet_script() : "";
    std::vector<const char*> words = unpacker->command;
    if (!script.empty()) words.insert(words.end(), {script.c_str(), text_key.c_str()});
    words.push_back(nullptr);
    errors.reset(tmpfile());
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail_errno(EXIT_IO, file.path, "open a pipe to unpack it");
    program = fork();
    if (program == 0) {
        dup2(file.fd, 0), dup2(ends[1], 1);
        if (errors) dup2(fileno(errors.get()), 2);
        signal(SIGPIPE, SIG_DFL);  // ignored here; so the program ends when nobody reads its output any more
        execvp(words[0], const_cast<char**>(words.data()));
        _exit(CANNOT_BE_STARTED);
    }
    close(ends[1]);
    output = ends[0];
    if (program < 0) fail_errno(EXIT_IO, file.path, "start a process to unpack it");
}

TextStream::~TextStream() {
    if (output >= 0) close(output);
    if (program < 0) return;
    kill(program, SIGKILL);
    TEMP_FAILURE_RETRY(waitpid(program, &status, 0));
}

// Waits for the program, whose output has ended, and checks its exit code.
void TextStream::finish() {
    close(std::exchange(output, -1));
    TEMP_FAILURE_RETRY(waitpid(program, &status, 0));
    program = -1;
    if (status == 0) return;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == CANNOT_BE_STARTED)
        fail(EXIT_NO_INPUT, "%s: %s, which unpacks it, cannot be started: apt-get install %s", file.path.c_str(),
             unpacker->command[0], unpacker->package);
    std::string reason = format("exit code %d", code);
    if (errors) rewind(errors.get());
    for (char line[512]; errors && fgets(line, sizeof(line), errors.get());)
        if (line[0] != '\n') reason = std::string(line, strcspn(line, "\n"));
    fail(code == EXIT_NO_INPUT ? EXIT_NO_INPUT : EXIT_BAD_DATA, "%s: %s cannot read all of it: %s", file.path.c_str(),
         unpacker->command[0], reason.c_str());
}

// Reads some of the next bytes; 0: the end.
int64_t TextStream::fetch(char* out, int64_t bytes) {
    if (!unpacker) {
        bytes = std::min(bytes, file.size - position);
        file.read_at(out, position, bytes);
        position += bytes;
        return bytes;
    }
    ssize_t got = 0;
    while (output >= 0 && (got = ::read(output, out, size_t(bytes))) < 0)
        if (errno != EINTR) fail_errno(EXIT_IO, file.path, "read what is unpacked");
    if (output >= 0 && got == 0) finish();
    return got;
}

int64_t TextStream::read(char* out, int64_t bytes) {
    int64_t done = std::min(bytes, int64_t(ahead.size()));
    memcpy(out, ahead.data(), size_t(done));
    ahead.erase(0, size_t(done));
    for (int64_t got = 1; got > 0 && done < bytes; done += got) got = fetch(out + done, bytes - done);
    return done;
}

std::string_view TextStream::peek(int64_t bytes) {
    const int64_t more = std::max(bytes, PEEKED);
    for (int64_t got = 1; got > 0 && int64_t(ahead.size()) < bytes;) {
        ahead.resize(ahead.size() + size_t(more));
        got = fetch(ahead.data() + ahead.size() - more, more);
        ahead.resize(ahead.size() - size_t(more - got));
    }
    return std::string_view(ahead).substr(0, size_t(bytes));
}

// The program shares the position in the file: its standard input is the same open file.
int64_t TextStream::file_position() const { return unpacker ? lseek(file.fd, 0, SEEK_CUR) : position; }

// ---- finding the files

static bool has_extension(const std::string& path, std::initializer_list<const char*> extensions) {
    return std::any_of(extensions.begin(), extensions.end(), [&](const char* e) { return path.ends_with(e); });
}

static bool is_jsonl(const std::string& path) {
    return has_extension(without_packing(path), {".jsonl", ".ndjson", ".parquet"});
}

static bool is_text_name(const std::string& path) {
    return is_jsonl(path) || has_extension(without_packing(path), {".txt", ".text", ".md", ".markdown", ".rst"});
}

// Returns the offset of the first zero byte or invalid UTF-8; -1 if there is none. A file may continue after `text`.
static int64_t find_odd_byte(std::string_view text, bool continues) {
    const char *begin = text.data(), *end = begin + text.size();
    const char* border = continues ? end - 3 : end;  // a character may continue, too
    for (const char* p = begin; p < border;) {
        const Char c = char_at(p, end);
        if (!c.valid || *p == 0) return p - begin;
        p += c.bytes;
    }
    return -1;
}

// Refuses formats that users often download, and says what makes them text.
static void check_content(const std::string& path, std::string_view start) {
    struct Magic {
        std::string_view bytes;
        const char *what, *remedy;
    };
    static constexpr Magic known[] = {{"\x1f\x8b", "compressed (gzip)", "let its name end in .gz"},
                                      {"\x28\xb5\x2f\xfd", "compressed (zstd)", "let its name end in .zst"},
                                      {"\3757zXZ", "compressed (xz)", "let its name end in .xz"},
                                      {"PAR1", "a Parquet file", "let its name end in .parquet"},
                                      {"PK\x03\x04", "a zip archive", "unpack it with unzip"},
                                      {"%PDF-", "a PDF document", "convert it with pdftotext"},
                                      {"\xff\xfe", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
                                      {"\xfe\xff", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
                                      {"\x88\xd8\x34\x01", "a token shard", "it needs no tokenizing"}};
    for (const Magic& m : known)
        if (start.starts_with(m.bytes)) fail(EXIT_BAD_DATA, "%s: is %s, not text; %s", path.c_str(), m.what, m.remedy);
}

static TextFile inspect(const std::string& path) {
    TextFile file{path, InputFile(path).size, is_jsonl(path)};
    if (!is_packed(path)) file.text_bytes = file.size;
    if (path.ends_with(".parquet")) return file;
    TextStream stream(path, "");
    const std::string_view start = stream.peek((1 << 20) + 1);
    check_content(path, start);
    if (!file.jsonl) file.odd_byte = find_odd_byte(start.substr(0, 1 << 20), start.size() > 1 << 20);
    return file;
}

using FileId = std::pair<dev_t, ino_t>;

static FileId id_of(const std::string& path) {
    struct stat status = {};
    if (stat(path.c_str(), &status) != 0) fail_errno(EXIT_NO_INPUT, path, "open");
    return {status.st_dev, status.st_ino};
}

// The files in a folder. Links to folders are followed after all of its own folders, and only to folders that are new.
struct FolderWalk {
    std::vector<std::string> texts, others, links;
    std::set<FileId> seen;

    void walk(const std::string& folder) {
        if (!seen.insert(id_of(folder)).second) return;
        for (const std::string& name : list_directory(folder)) {
            const std::string path = fs::path(folder) / name;
            std::error_code ignored;
            if (name.starts_with(".") || name == "merges.txt") continue;
            if (is_directory(path))
                fs::is_symlink(path, ignored) ? links.push_back(path) : walk(path);
            else
                (is_text_name(name) && fs::is_regular_file(path, ignored) ? texts : others).push_back(path);
        }
    }
};

// Returns the text files of a folder, and adds its other files to `others`.
static std::vector<std::string> files_in(const std::string& folder, std::vector<std::string>& others) {
    FolderWalk found;
    found.walk(folder);
    for (size_t i = 0; i < found.links.size(); i++) found.walk(std::string(found.links[i]));
    std::sort(found.texts.begin(), found.texts.end());
    if (found.texts.empty())
        fail(EXIT_NO_INPUT,
             "%s: holds no text file (.txt .text .md .markdown .rst .jsonl .ndjson, also with .gz .zst .xz, or "
             ".parquet); name the files",
             folder.c_str());
    others.insert(others.end(), found.others.begin(), found.others.end());
    return found.texts;
}

FoundFiles find_text_files(const std::vector<std::string>& inputs) {
    FoundFiles found;
    std::set<FileId> seen;
    for (const std::string& input : inputs) {
        if (!path_exists(input)) fail(EXIT_NO_INPUT, "%s: there is no such file or folder", input.c_str());
        for (const std::string& path : is_directory(input) ? files_in(input, found.others) : std::vector{input})
            if (seen.insert(id_of(path)).second)
                found.texts.push_back(inspect(path));
            else
                found.again.push_back(path);
    }
    return found;
}

void measure_text(TextFile& file, const CorpusRules& rules, const std::function<void(int64_t)>& progress) {
    if (!is_packed(file.path) || file.jsonl || rules.split != "none" || rules.val_fraction == 0.0) return;
    TextStream stream(file.path, "");
    std::string piece(1 << 20, '\0');
    file.text_bytes = 0;
    for (int64_t got = 1; got > 0; file.text_bytes += got) {
        got = stream.read(piece.data(), int64_t(piece.size()));
        progress(stream.file_position());
    }
}

// ---- cutting

// Where a file may be cut within the window: after the first line end, else at the first space, else npos. A line end
// that is the last character does not count.
static size_t part_start(std::string_view window) {
    const size_t line = window.find('\n');
    return line < window.size() - 1 ? line + 1 : window.find(' ');
}

static int64_t held_out_from(int64_t size, double fraction) { return int64_t(double(size) * (1.0 - fraction)); }

// The position after the next blank line (\n\n or \n\r\n), or npos.
static size_t section_end(std::string_view text, size_t from) {
    for (size_t i = text.find('\n', from); i != std::string_view::npos; i = text.find('\n', i + 1)) {
        if (text.substr(i + 1).starts_with("\n")) return i + 2;
        if (text.substr(i + 1).starts_with("\r\n")) return i + 3;
    }
    return std::string_view::npos;
}

// The end of a document in a file with several documents, and the start of the next one. npos: the end of the document
// has not been read yet.
struct Border {
    size_t end, next;
};

static Border next_border(std::string_view text, size_t from, bool jsonl, const std::string& split) {
    if (!jsonl && split == "blank-lines") {
        const size_t end = section_end(text, from);
        return {end, end};
    }
    const std::string_view mark = jsonl ? "\n" : END_OF_TEXT;
    const size_t end = text.find(mark, from);
    return {end, end == text.npos ? text.npos : end + mark.size()};
}

static bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

// ---- reading

CorpusReader::CorpusReader(const std::vector<TextFile>& files, const CorpusRules& rules) : files(files), rules(rules) {
    few_files = double(files.size()) * rules.val_fraction < 1.0;
}

CorpusReader::~CorpusReader() = default;

// Counts a document. Returns whether the document is held out.
static bool begin_document(CorpusReader& reader) {
    const double fraction = reader.rules.val_fraction;
    const int64_t number = reader.documents++;
    return fraction > 0.0 && number % std::max<int64_t>(2, std::llround(1.0 / fraction)) == 1;
}

// Where the file ends, or its held-out part may begin, moves `end` to there.
static void settle_end(CorpusReader& reader) {
    if (reader.input->peek(1).empty()) reader.end = reader.size = reader.begin;
    if (reader.begin < reader.end || !reader.cut_follows) return;
    reader.cut_follows = false;
    const size_t start = part_start(reader.input->peek(CUT_WINDOW));
    reader.end = start == std::string::npos ? reader.size : reader.end + int64_t(start);
}

static void open_file(CorpusReader& reader) {
    const TextFile& file = reader.files[reader.file];
    reader.input = std::make_unique<TextStream>(file.path, reader.rules.text_key);
    char mark[3];
    reader.begin = reader.input->peek(3) == "\xef\xbb\xbf" ? reader.input->read(mark, 3) : 0;
    reader.size = reader.end = file.text_bytes;
    reader.lines = 0;
    reader.many_documents = file.jsonl || reader.rules.split != "none";
    reader.part_begun = reader.part_val = reader.cut_follows = false;
    settle_end(reader);
    if (reader.many_documents || reader.begin == reader.end) return;
    const bool chosen = begin_document(reader);
    if (reader.rules.val_fraction > 0.0 && (reader.few_files || reader.size >= LONG_DOCUMENT)) {
        reader.end = std::max(reader.begin, held_out_from(reader.size, reader.rules.val_fraction));
        reader.cut_follows = true;
        settle_end(reader);
    } else {
        reader.part_val = chosen;
    }
}

// Moves to the held-out part of the file, or to the next file. Returns false at the end of the input.
static bool next_part(CorpusReader& reader) {
    if (reader.input && reader.end < reader.size) {
        reader.end = reader.size;
        reader.part_begun = false;
        reader.part_val = true;
        return true;
    }
    if (reader.input) reader.file_bytes += reader.files[reader.file++].size;
    reader.input.reset();
    if (reader.file == reader.files.size()) return false;
    open_file(reader);
    return true;
}

// Fills chunk.documents from its bytes. Returns the offset of the first incomplete document.
static size_t list_documents(CorpusReader& reader, Chunk& chunk, bool at_end) {
    const std::string_view text = chunk.bytes;
    if (!reader.many_documents) {
        const size_t end = at_end ? text.size() : reader.rules.cut(text);
        if (end > 0) chunk.documents.push_back({0, end, 0, !reader.part_begun, reader.part_val});
        reader.part_begun |= end > 0;
        return end;
    }
    const bool jsonl = chunk.file->jsonl;
    for (size_t begin = 0;;) {
        Border border = next_border(text, begin, jsonl, reader.rules.split);
        if (border.next == std::string_view::npos) {
            if (!at_end || begin == text.size()) return begin;
            border = {text.size(), text.size()};
        }
        reader.lines += jsonl;
        if (!is_blank(text.substr(begin, border.end - begin))) {
            const bool val = begin_document(reader);
            chunk.documents.push_back({begin, border.end, reader.lines, true, val});
        }
        begin = border.next;
    }
}

int64_t CorpusReader::file_bytes_read() const { return file_bytes + (input ? input->file_position() : 0); }

bool CorpusReader::next(Chunk& chunk) {
    while (!input || begin == end)
        if (!next_part(*this)) return false;
    chunk.file = &files[file];
    chunk.documents.clear();
    chunk.bad_lines = 0;
    chunk.bytes = std::move(rest);
    rest.clear();
    for (;;) {
        const size_t have = chunk.bytes.size();
        const int64_t more = std::min(end - begin, std::max(CHUNK_BYTES, int64_t(have)));
        chunk.bytes.resize(have + size_t(more));
        const int64_t got = input->read(chunk.bytes.data() + have, more);
        chunk.bytes.resize(have + size_t(got));
        begin += got;
        bytes_read += got;
        settle_end(*this);
        const size_t used = list_documents(*this, chunk, begin == end);
        // No complete document yet: a long line, a long section, or a long run without white space.
        if (used == 0 && begin < end) continue;
        rest = chunk.bytes.substr(used);
        chunk.bytes.resize(used);
        return true;
    }
}

// ---- documents

static std::string text_of_line(const Chunk& chunk, const Document& document, const std::string& key) {
    const std::string where = chunk.file->path + ":" + std::to_string(document.line);
    const nlohmann::json line = parse_json(chunk.bytes.substr(document.begin, document.end - document.begin), where,
                                           "; each line of this file must be one whole object {...}");
    if (!line.is_object())
        fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}; each line of this file must be one", where.c_str());
    const auto found = line.find(key);
    if (found != line.end() && found->is_string()) return found->get<std::string>();
    const std::string instead =
        found == line.end() ? "there is no such key" : format("its type is %s", found->type_name());
    std::string keys;
    for (const auto& [name, value] : line.items())
        if (value.is_string()) keys += (keys.empty() ? "" : ", ") + name;
    fail(EXIT_BAD_DATA, "%s: has no text under the key \"%s\" (--text-key): %s; keys with text: %s", where.c_str(),
         printable(key).c_str(), instead.c_str(), keys.empty() ? "none" : printable(keys).c_str());
}

static std::string_view without_white_ends(std::string_view text) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    return first == text.npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
}

// Reads the text of a line. Returns false if the line is bad and is skipped.
static bool read_line(std::string& text, Chunk& chunk, const Document& document, const CorpusRules& rules) try {
    text = text_of_line(chunk, document, rules.text_key);
    return true;
} catch (const Error& error) {
    if (!rules.skip_bad_lines) fail(error.exit_code, "%s; --skip-bad-lines skips such lines", error.what());
    if (chunk.bad_lines++ == 0) chunk.first_bad = error.what();
    return false;
}

void for_each_document(Chunk& chunk, const CorpusRules& rules,
                       const std::function<void(std::string_view text, bool starts, bool val)>& f) {
    for (const Document& document : chunk.documents) {
        std::string from_json;
        std::string_view text = std::string_view(chunk.bytes).substr(document.begin, document.end - document.begin);
        if (chunk.file->jsonl) {
            if (!read_line(from_json, chunk, document, rules)) continue;
            text = from_json;
        } else if (rules.split == "end-of-text") {
            text = without_white_ends(text);
        }
        // The reader has already cut a file that is one document into its training part and its held-out end.
        const bool file_is_document = !chunk.file->jsonl && rules.split == "none";
        if (file_is_document || rules.val_fraction == 0.0 || int64_t(text.size()) < LONG_DOCUMENT) {
            if (!text.empty()) f(text, document.starts, document.val);
            continue;
        }
        const size_t wanted = size_t(held_out_from(int64_t(text.size()), rules.val_fraction));
        const size_t start = part_start(text.substr(wanted, CUT_WINDOW));
        const size_t cut = start == text.npos ? text.size() : wanted + start;
        f(text.substr(0, cut), true, false);
        if (cut < text.size()) f(text.substr(cut), true, true);
    }
}
