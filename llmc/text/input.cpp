#include "text/input.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "base/json.h"
#include "base/print.h"
#include "text/unicode.h"

namespace fs = std::filesystem;
using namespace std::string_view_literals;

static constexpr int64_t INSPECTED = 1 << 20;  // bytes that decide what a file is
static constexpr int FIRST_OBJECTS = 32;       // objects that decide whether a file of a folder has text
static constexpr const char* BYTE_ORDER_MARK = "\xef\xbb\xbf";

// ---- names

using Suffixes = std::initializer_list<const char*>;

static constexpr Suffixes PACKED = {".gz", ".gzip", ".zst", ".zstd", ".xz", ".lzma", ".bz2"},
                          TEXT = {".txt", ".text", ".md", ".markdown", ".rst"},
                          JSON = {".json", ".jsonl", ".jsonlines", ".ndjson", ".jl"};

// Returns the length of the suffix of the name, in upper or lower case; 0 if it has none of them.
static size_t suffix_of(const std::string& name, Suffixes suffixes) {
    for (const std::string_view suffix : suffixes)
        if (name.size() > suffix.size() && strcasecmp(&name[name.size() - suffix.size()], suffix.data()) == 0)
            return suffix.size();
    return 0;
}

std::string unpacked_name(const std::string& path) {
    const std::string name = fs::path(path).filename();
    return name.substr(0, name.size() - suffix_of(name, PACKED));
}

static bool is_text_name(const std::string& path) {
    const std::string name = unpacked_name(path);
    return suffix_of(name, TEXT) || suffix_of(name, JSON) || suffix_of(name, {".csv", ".tsv", ".parquet"});
}

// ---- programs that unpack

static constexpr int64_t PEEKED = 64 << 10;    // bytes that peek reads at least
static constexpr int CANNOT_BE_STARTED = 127;  // exit code

// Makes the command of a file that unpacks it read its rows. The script is in the tree of the sources, where the
// program is too, or where `make install` puts it.
static void read_table(TextFile& file, const char* kind, const std::string& columns) {
    std::error_code ignored;
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    for (const char* place : {"../share/train_gpt2", "scripts", "../../scripts", "../../../scripts"}) {
        const std::string script = folder / place / "table_rows.py";
        if (!path_exists(script)) continue;
        file.command.insert(file.command.begin(), {"python3", script, kind, columns});
        file.package = "python3";
        file.is_table = true;
        file.format = Format::json_lines;
        return;
    }
    fail(EXIT_NO_INPUT,
         "scripts/table_rows.py, which reads .parquet, .csv and .tsv files, is neither in the sources nor installed");
}

TextStream::TextStream(const TextFile& text) : text(text), file(text.source) {
    file.path = text.path;
    if (file.size != text.size)
        fail(EXIT_BAD_DATA, "%s: changed since the start: it had %s bytes, and now has %s; start again with all of it",
             text.path.c_str(), with_commas(text.size).c_str(), with_commas(file.size).c_str());
    if (!text.command.empty()) start();
}

void TextStream::start() {
    std::vector<const char*> words;
    for (const std::string& word : text.command) words.push_back(word.c_str());
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
    TEMP_FAILURE_RETRY(waitpid(program, nullptr, 0));
}

// Waits for the program, whose output has ended, and checks its exit code.
void TextStream::finish() {
    int status = 0;
    close(std::exchange(output, -1));
    TEMP_FAILURE_RETRY(waitpid(std::exchange(program, -1), &status, 0));
    if (status == 0) return;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    const char *path = file.path.c_str(), *name = text.command[0].c_str();
    if (code == CANNOT_BE_STARTED)
        fail(EXIT_NO_INPUT, "%s: %s, which unpacks it, cannot be started: apt-get install %s", path, name,
             text.package);
    std::string reason = format("%s ended with exit code %d", name, code);
    if (errors) rewind(errors.get());
    // The last line has the reason; bzip2's advice comes after it.
    for (char line[2048]; errors && !reason.starts_with("bzip2: ") && fgets(line, sizeof(line), errors.get());)
        if (line[0] != '\n') reason = std::string(line, strcspn(line, "\n"));
    fail(code == EXIT_NO_INPUT ? EXIT_NO_INPUT : EXIT_BAD_DATA, "%s: %s%s%s", path, text.is_table ? "" : name,
         text.is_table ? "" : " cannot read all of it: ", reason.c_str());
}

// Appends some of the next bytes. Returns how many; 0: the end.
int64_t TextStream::fetch(std::string& out, int64_t bytes) {
    const size_t have = out.size();
    out.resize(have + size_t(bytes));
    int64_t got = 0;
    if (text.command.empty()) {
        got = std::min(bytes, file.size - position);
        file.read_at(out.data() + have, position, got);
        position += got;
    }
    while (output >= 0 && (got = ::read(output, out.data() + have, size_t(bytes))) < 0)
        if (errno != EINTR) fail_errno(EXIT_IO, file.path, "read what is unpacked");
    if (output >= 0 && got == 0) finish();
    out.resize(have + size_t(got));
    return got;
}

bool TextStream::read(std::string& out, int64_t bytes) {
    const size_t end = out.size() + size_t(bytes);
    out.append(ahead, 0, size_t(bytes));
    ahead.erase(0, size_t(bytes));
    while (out.size() < end && fetch(out, int64_t(end - out.size())) > 0) continue;
    return out.size() == end;
}

std::string_view TextStream::peek(int64_t bytes) {
    while (int64_t(ahead.size()) < bytes && fetch(ahead, std::max(bytes, PEEKED)) > 0) continue;
    return std::string_view(ahead).substr(0, size_t(bytes));
}

// The program shares the position in the file: its standard input is the same open file.
int64_t TextStream::file_position() const { return text.command.empty() ? position : lseek(file.fd, 0, SEEK_CUR); }

int64_t TextStream::skip_mark() {
    if (peek(3) != BYTE_ORDER_MARK) return 0;
    ahead.erase(0, 3);
    return 3;
}

// ---- what a file is

// Copies a pipe, which may be non-blocking, to a file without a name.
static std::shared_ptr<FILE> copy_of_pipe(const TextFile& file, int64_t max_bytes) {
    const char* folder = getenv("TMPDIR");
    std::string name = std::string(folder && *folder ? folder : "/tmp") + "/train_gpt2_XXXXXX";
    const int out = mkostemp(name.data(), O_CLOEXEC);
    if (out < 0)
        fail_errno(EXIT_CANNOT_CREATE, name, "create the copy of a pipe, for which TMPDIR may name another folder");
    unlink(name.c_str());
    std::shared_ptr<FILE> copy(fdopen(out, "w+"), fclose);
    pollfd pipe = {file.source == "/dev/stdin" ? dup(0) : open(file.source.c_str(), O_RDONLY | O_CLOEXEC), POLLIN, 0};
    if (pipe.fd < 0) fail_errno(EXIT_NO_INPUT, file.path, "open");
    const std::unique_ptr<const int, void (*)(const int*)> closer(&pipe.fd, [](const int* fd) { close(*fd); });
    std::string piece(size_t(INSPECTED), '\0');
    for (int64_t bytes = 0;;) {
        const ssize_t got = read(pipe.fd, piece.data(), piece.size());
        if (got == 0) return copy;
        if (got < 0 && errno != EINTR && (errno != EAGAIN || poll(&pipe, 1, -1) < 0))
            fail_errno(EXIT_NO_INPUT, file.path, "read");
        bytes += std::max<ssize_t>(got, 0);
        if (bytes > max_bytes)
            fail(EXIT_BAD_DATA, "%s has more than %s bytes", file.path.c_str(), with_commas(max_bytes).c_str());
        if (got > 0 && (fwrite(piece.data(), size_t(got), 1, copy.get()) != 1 || fflush(copy.get()) != 0))
            fail_errno(EXIT_IO, name, "write the copy of " + file.path + ", for which TMPDIR may name another folder");
    }
}

static TextFile locate(const std::string& path, int64_t max_bytes) {
    TextFile file{path, path};
    if (path == "-") file.path = "standard input", file.source = "/dev/stdin";
    struct stat status = {};
    if (stat(file.source.c_str(), &status) != 0) fail_errno(EXIT_NO_INPUT, file.path, "open");
    const bool in_the_middle = file.source == "/dev/stdin" && lseek(STDIN_FILENO, 0, SEEK_CUR) > 0;
    const bool is_file = S_ISREG(status.st_mode), has_no_size = is_file && status.st_size == 0;  // as in /proc
    if (in_the_middle || (!is_file && !S_ISDIR(status.st_mode)) ||
        (has_no_size && std::ifstream(file.source).peek() != EOF)) {
        file.copy = copy_of_pipe(file, max_bytes);
        file.source = "/proc/self/fd/" + std::to_string(fileno(file.copy.get()));
    }
    file.size = InputFile(file.source).size;
    if (file.size == 0 && (suffix_of(path, PACKED) || suffix_of(path, {".parquet"})))
        fail(EXIT_BAD_DATA, "%s: is empty, and its name says that it is packed; get it again", path.c_str());
    return file;
}

// Returns the offset of the first invalid UTF-8 in the first MiB; -1 if there is none.
static int64_t find_odd_byte(std::string_view start) {
    const std::string_view text = start.substr(0, size_t(INSPECTED));
    const char *begin = text.data(), *end = begin + text.size();
    const char* border = text.size() == start.size() ? end : end - 3;  // a character may continue, too
    for (const char* p = begin; p < border;) {
        const Char c = char_at(p, end);
        if (!c.valid) return p - begin;
        p += c.bytes;
    }
    return -1;
}

// Returns why a file that begins so is neither text nor the JSON or CSV that its name promises; "" if it may be.
static std::string why_refused(const TextFile& file, std::string_view start) {
    const ForeignContent* content = foreign_content(start);
    if (content && !(content->is_text && file.format == Format::text))
        return format("%s %s, not %s; %s", file.command.empty() ? "is" : "holds", content->what,
                      content->is_text ? "JSON or CSV" : "text", content->remedy);
    if (suffix_of(unpacked_name(file.path), {".parquet"})) return "is no Parquet file; get it again";
    const size_t zero = start.substr(0, size_t(INSPECTED)).find('\0');
    if (zero == start.npos) return "";
    return format("is no text: byte %s is zero; if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8",
                  with_commas(int64_t(zero) + 1).c_str());
}

// Whether a text that begins with { goes on like an object: with } or with a key.
static bool is_object(std::string_view text) {
    const size_t next = text.find_first_not_of(BLANK, 1);
    if (next == text.npos || text[next] != '"') return next != text.npos && text[next] == '}';
    const size_t end = std::min(json_string_end(text, next), text.size() - 1);
    const size_t colon = text.find_first_not_of(BLANK, end + 1);
    return colon != text.npos && text[colon] == ':';
}

// Whether the text begins with JSON, and of which format. named: it is JSON by its name.
static Format json_format(std::string_view start, bool named) {
    if (start.starts_with('\x1e')) return Format::json;  // a sequence as in RFC 7464
    start.remove_prefix(std::min(start.find_first_not_of(BLANK), start.size()));
    const size_t next = start.find_first_not_of(BLANK, 1);
    if (start.starts_with('[') &&
        (named || (next != start.npos && start[next] == '{' && is_object(start.substr(next)))))
        return Format::json;
    if (!start.starts_with('{') || !(named || is_object(start))) return named ? Format::json_lines : Format::text;
    const size_t line = std::min(start.find('\n'), start.size()), end = json_object_end(start, 0),
                 next_line = start.find_first_not_of(BLANK, line);
    const char last = start[start.find_last_not_of(BLANK, line)];
    if (end <= line) return strchr("{[,:", last) ? Format::json : Format::json_lines;
    // The object goes on in the next line, unless this line was cut off, or is longer than a MiB.
    const bool is_cut = next_line == start.npos || (start[next_line] == '{' && last != '[');
    return end == start.npos && is_cut ? Format::json_lines : Format::json;
}

// Whether most of the first whole objects of `start` have a string or null under the key. One is not enough: the log of
// a run has some. A list of strings or numbers has none. In a table's rows a string names an error of the table.
static bool first_have_text(const TextFile& file, std::string_view start, const std::string& key) try {
    if (file.format == Format::text) return true;
    int with_text = 0, objects = 0;
    for (size_t begin = start.find('{'); begin != start.npos && objects < FIRST_OBJECTS; objects++) {
        const size_t end = json_object_end(start, begin);
        if (end == start.npos) break;
        const Json row = parse_python_json(std::string(start.substr(begin, end - begin)), file.path);
        begin = start.find('{', end);
        const Json* value = row.find(key);
        with_text += value && (value->type == Json::string || value->type == Json::null);
    }
    const size_t first = start.find_first_not_of(" \t\r\n[");
    const bool is_list = !file.is_table && first < start.size() && strchr("\"-0123456789ntfNI", start[first]);
    return objects == 0 ? !is_list : 2 * with_text > objects;
} catch (const Error&) {
    return true;  // whoever reads the row refuses it
}

static TextFile inspect(const std::string& path, Wanted wanted, const std::string& keys) {
    TextFile file = locate(path, wanted == Wanted::prompt ? MAX_PROMPT_BYTES : INT64_MAX);
    const auto first_bytes = [&] { return std::string(TextStream(file).peek(INSPECTED + 1)); };
    std::string start = first_bytes();
    const ForeignContent* packed = foreign_content(start);
    if (packed && packed->package && packed->package == "python3"sv) {
        read_table(file, "parquet", keys);
        if (wanted == Wanted::prompt) file.refused = "is a Parquet file, not text; give the text itself";
        return file;
    }
    if (packed && packed->package) {
        file.package = packed->package;
        for (const char* const* word = packed->command; *word; word++) file.command.push_back(*word);
        start = first_bytes();
    }
    const std::string_view text = std::string_view(start).substr(start.starts_with(BYTE_ORDER_MARK) ? 3 : 0);
    const std::string name = unpacked_name(path);
    const char* table = suffix_of(name, {".csv"}) ? "csv" : suffix_of(name, {".tsv"}) ? "tsv" : nullptr;
    const bool is_text = wanted == Wanted::prompt || (wanted == Wanted::documents && suffix_of(name, TEXT));
    if (wanted == Wanted::prompt) table = nullptr;
    if (!is_text) file.format = json_format(text, table || wanted == Wanted::rows || suffix_of(name, JSON));
    file.refused = why_refused(file, start);
    if (!file.refused.empty()) return file;
    if (file.command.empty()) file.text_bytes = file.size;
    if (file.format == Format::text) file.odd_byte = find_odd_byte(start);
    if (table) read_table(file, table, keys);
    file.may_have_text = first_have_text(file, table ? TextStream(file).peek(PEEKED) : text, keys);
    return file;
}

TextFile open_input(const std::string& path, Wanted wanted, const std::string& keys) {
    TextFile file = inspect(path, wanted, keys);
    if (!file.refused.empty()) fail(EXIT_BAD_DATA, "%s: %s", file.path.c_str(), file.refused.c_str());
    return file;
}

void warn_unless_utf8(const TextFile& file) {
    if (file.odd_byte < 0) return;
    print_message(
        format("warning: %s: is not UTF-8 text (byte %s), and its bytes are tokenized as they are; if it is "
               "Latin-1, convert it with iconv -f ISO-8859-1 -t UTF-8",
               file.path.c_str(), with_commas(file.odd_byte + 1).c_str()));
}

std::string read_prompt(const std::string& path) {
    const TextFile file = open_input(path, Wanted::prompt, "");
    warn_unless_utf8(file);
    TextStream stream(file);
    stream.skip_mark();
    const std::string_view text = stream.peek(MAX_PROMPT_BYTES + 1);
    if (int64_t(text.size()) > MAX_PROMPT_BYTES)
        fail(EXIT_BAD_DATA, "%s has more than %s bytes", file.path.c_str(), with_commas(MAX_PROMPT_BYTES).c_str());
    return std::string(text);
}

// ---- folders

static constexpr const char* OTHER_KINDS = "of other kinds";

using FileId = std::pair<dev_t, ino_t>;

static FileId id_of(const std::string& path) {
    struct stat status = {};
    if (stat(path == "-" ? "/dev/stdin" : path.c_str(), &status) != 0) fail_errno(EXIT_NO_INPUT, path, "open");
    return {status.st_dev, status.st_ino};
}

// The files in a folder. None beside weights is text, such as a checkpoint's README.md. Links to folders are followed
// after all of its own folders, and only to folders that are new.
struct FolderWalk {
    std::vector<std::string> links, texts = {}, others = {};
    std::set<FileId> seen = {};

    void walk(const std::string& folder) {
        if (!seen.insert(id_of(folder)).second) return;
        const std::vector<std::string> names = list_directory(folder);
        const bool has_weights =
            std::ranges::any_of(names, [](const std::string& name) { return name.ends_with(".safetensors"); });
        for (const std::string& name : names) {
            const std::string path = fs::path(folder) / name;
            std::error_code ignored;
            if (name.starts_with(".") || name == "merges.txt" || name == "vocab.json" || name == "tokenizer.json")
                continue;
            if (is_directory(path))
                fs::is_symlink(path, ignored) ? links.push_back(path) : walk(path);
            else
                (!has_weights && is_text_name(name) && fs::is_regular_file(path, ignored) ? texts : others)
                    .push_back(path);
        }
    }
};

// Whether each file is in FoundFiles::texts.
using SeenFiles = std::map<FileId, bool>;

// Adds a file, once. One in a folder is left out if it has no text: why_none says so. Returns whether it has.
static bool add_file(FoundFiles& found, SeenFiles& seen, const std::string& path, const std::string& text_key,
                     std::string* why_none) {
    const auto [known, is_new] = seen.insert({id_of(path), false});
    if (known->second) return found.left_out["already read"].push_back(path), true;
    if (!is_new && why_none) return false;
    TextFile file =
        why_none ? inspect(path, Wanted::documents, text_key) : open_input(path, Wanted::documents, text_key);
    const bool is_text = file.refused.empty();
    known->second = is_text && (file.may_have_text || !why_none);
    if (known->second) return found.texts.push_back(std::move(file)), true;
    const std::string no_text = "without text under \"" + printable(text_key) + "\" (--text-key)";
    found.left_out[is_text ? no_text : OTHER_KINDS].push_back(path);
    *why_none = ": " + path + " " + (is_text ? "is " + no_text : file.refused);
    return false;
}

FoundFiles find_text_files(const std::vector<std::string>& inputs, const std::string& text_key) {
    FoundFiles found;
    SeenFiles seen;
    for (const std::string& input : inputs) {
        if (input != "-" && !path_exists(input))
            fail(EXIT_NO_INPUT, "%s: there is no such file or folder", input.c_str());
        if (!is_directory(input)) {
            add_file(found, seen, input, text_key, nullptr);
            continue;
        }
        FolderWalk folder{{input}};
        for (size_t i = 0; i < folder.links.size(); i++) folder.walk(std::string(folder.links[i]));
        std::ranges::sort(folder.texts);
        std::ranges::copy(folder.others, std::back_inserter(found.left_out[OTHER_KINDS]));
        std::string why;
        bool has_text = false;
        for (const std::string& path : folder.texts) has_text |= add_file(found, seen, path, text_key, &why);
        if (!folder.others.empty()) why += "; " + folder.others.back() + " is of another kind";
        if (!has_text)
            fail(EXIT_NO_INPUT,
                 "%s: holds no text file (.txt .text .md .markdown .rst .json .jsonl .jsonlines .ndjson .jl .csv "
                 ".tsv, also with .gz .zst .xz .lzma .bz2, or .parquet)%s; name the files",
                 input.c_str(), why.c_str());
    }
    return found;
}
