#include "text/input.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "base/content.h"
#include "base/json.h"
#include "text/unicode.h"

namespace fs = std::filesystem;
using namespace std::string_view_literals;

static constexpr int64_t INSPECTED = 1 << 20;  // bytes that decide what a file is
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

// The script is in the tree of the sources, where the program is too, or where `make install` puts it.
static std::string table_script() {
    std::error_code ignored;
    const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
    for (const char* place : {"../share/train_gpt2", "scripts", "../../scripts", "../../../scripts"})
        if (const fs::path script = folder / place / "table_rows.py"; path_exists(script)) return script;
    fail(EXIT_NO_INPUT,
         "scripts/table_rows.py, which reads .parquet, .csv and .tsv files, is neither in the sources nor installed");
}

TextStream::TextStream(const TextFile& text, const std::string& columns)
    : file(text.source), table(text.table), unpacker(text.unpacker) {
    file.path = text.path;
    if (unpacker || !table.empty()) start(columns);
}

void TextStream::start(const std::string& columns) {
    const std::string script = table.empty() ? "" : table_script();
    std::vector<const char*> words;
    if (!script.empty()) words = {"python3", script.c_str(), table.c_str(), columns.c_str()};
    if (unpacker) words.insert(words.end(), std::begin(unpacker->command), std::end(unpacker->command));
    words.push_back(nullptr);
    program_name = words[0];
    if (table.empty()) package = unpacker->package;
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
             program_name, package);
    std::string reason = format("exit code %d", code);
    if (errors) rewind(errors.get());
    for (char line[512]; errors && fgets(line, sizeof(line), errors.get());)
        if (line[0] != '\n') reason = std::string(line, strcspn(line, "\n"));
    fail(code == EXIT_NO_INPUT ? EXIT_NO_INPUT : EXIT_BAD_DATA, "%s: %s cannot read all of it: %s", file.path.c_str(),
         program_name, reason.c_str());
}

// Reads some of the next bytes; 0: the end.
int64_t TextStream::fetch(char* out, int64_t bytes) {
    if (!is_piped()) {
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
int64_t TextStream::file_position() const { return is_piped() ? lseek(file.fd, 0, SEEK_CUR) : position; }

int64_t TextStream::skip_mark() {
    if (peek(3) != BYTE_ORDER_MARK) return 0;
    ahead.erase(0, 3);
    return 3;
}

// ---- what a file is

// Reads what a pipe has next, and waits for it, also if the pipe is non-blocking. Returns the bytes in `out`; 0: its
// end.
static size_t read_pipe(int fd, std::string& out, const std::string& name) {
    pollfd input = {fd, POLLIN, 0};
    for (;;) {
        const ssize_t got = read(fd, out.data(), out.size());
        if (got >= 0) return size_t(got);
        if (errno != EINTR && (errno != EAGAIN || poll(&input, 1, -1) < 0)) fail_errno(EXIT_NO_INPUT, name, "read");
    }
}

[[noreturn]] static void fail_too_long(const std::string& path, int64_t max_bytes) {
    fail(EXIT_BAD_DATA, "%s has more than %s bytes", path.c_str(), with_commas(max_bytes).c_str());
}

// Copies a pipe to a file without a name.
static std::shared_ptr<FILE> copy_of_pipe(const TextFile& file, int64_t max_bytes) {
    const char* folder = getenv("TMPDIR");
    std::string name = std::string(folder && *folder ? folder : "/tmp") + "/train_gpt2_XXXXXX";
    const int out = mkostemp(name.data(), O_CLOEXEC);
    if (out < 0)
        fail_errno(EXIT_CANNOT_CREATE, name, "create the copy of a pipe, for which TMPDIR may name another folder");
    unlink(name.c_str());
    std::shared_ptr<FILE> copy(fdopen(out, "w+"), fclose);
    const int pipe = file.source == "/dev/stdin" ? dup(0) : open(file.source.c_str(), O_RDONLY | O_CLOEXEC);
    if (pipe < 0) fail_errno(EXIT_NO_INPUT, file.path, "open");
    const std::unique_ptr<const int, void (*)(const int*)> closer(&pipe, [](const int* fd) { close(*fd); });
    std::string piece(size_t(INSPECTED), '\0');
    int64_t bytes = 0;
    while (const size_t got = read_pipe(pipe, piece, file.path)) {
        bytes += int64_t(got);
        if (bytes > max_bytes) fail_too_long(file.path, max_bytes);
        if (fwrite(piece.data(), 1, got, copy.get()) != got || fflush(copy.get()) != 0)
            fail_errno(EXIT_IO, name, "write the copy of " + file.path + ", for which TMPDIR may name another folder");
    }
    return copy;
}

static TextFile open_file(const std::string& path, int64_t max_bytes) {
    TextFile file{path, path};
    if (path == "-") file.path = "standard input", file.source = "/dev/stdin";
    struct stat status = {};
    if (stat(file.source.c_str(), &status) != 0) fail_errno(EXIT_NO_INPUT, file.path, "open");
    const bool in_the_middle = file.source == "/dev/stdin" && lseek(STDIN_FILENO, 0, SEEK_CUR) > 0;
    if (in_the_middle || (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))) {
        file.copy = copy_of_pipe(file, max_bytes);
        file.source = "/proc/self/fd/" + std::to_string(fileno(file.copy.get()));
    }
    const InputFile opened(file.source);
    file.size = opened.size;
    std::string start(size_t(std::min<int64_t>(16, file.size)), '\0');
    opened.read_at(start.data(), 0, int64_t(start.size()));
    const ForeignContent* content = foreign_content(start);
    const bool is_parquet = content && content->package && content->package == "python3"sv;
    if (is_parquet) file.table = "parquet";
    if (content && content->package && !is_parquet) file.unpacker = content;
    if (file.size == 0 && suffix_of(path, PACKED))
        fail(EXIT_BAD_DATA, "%s: is empty, and its name says that it is packed; get it again", path.c_str());
    return file;
}

// Returns the offset of the first zero byte or invalid UTF-8; -1 if there is none. A file may continue after `text`.
static int64_t find_odd_byte(std::string_view text, bool continues) {
    const char *begin = text.data(), *end = begin + text.size();
    const char* border = continues ? end - 3 : end;  // a character may continue, too
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
        return format("%s %s, not %s; %s", file.unpacker ? "holds" : "is", content->what,
                      content->is_text ? "JSON or CSV" : "text", content->remedy);
    if (suffix_of(file.path, {".parquet"})) return "is no Parquet file; get it again";
    const size_t zero = start.find('\0');
    if (zero == start.npos) return "";
    return format("is no text: byte %s is zero; if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8",
                  with_commas(int64_t(zero) + 1).c_str());
}

static bool is_object(const std::string& text) try {
    return parse_python_json(text, "", "", true).type == Json::object;
} catch (const Error&) {
    return false;
}

static constexpr const char* BLANK = " \t\r\n";

// Whether the text begins with JSON, and of which format. named: it is JSON by its name.
static Format json_format(std::string_view start, bool named) {
    const size_t first = std::min(start.find_first_not_of(BLANK), start.size());
    start.remove_prefix(first);
    const auto begins = [&](char c, const char* then) {
        const size_t next = start.find_first_not_of(BLANK, 1);
        return start.starts_with(c) && (named || (next != start.npos && strchr(then, start[next])));
    };
    if (begins('[', "{")) return Format::json;
    if (!begins('{', "\"}")) return named ? Format::json_lines : Format::text;
    const size_t line_end = start.find('\n');
    const std::string_view line = start.substr(0, line_end);
    if (strchr("{[,:", line[line.find_last_not_of(BLANK)])) return Format::json;  // the object goes on in the next line
    const bool whole = line_end != start.npos || int64_t(first + start.size()) < INSPECTED;
    return named || !whole || is_object(std::string(line)) ? Format::json_lines : Format::text;
}

static Format format_of(const std::string& name, std::string_view start, Wanted wanted) {
    if (wanted == Wanted::prompt) return Format::text;
    if (suffix_of(name, TEXT) && wanted == Wanted::documents) return Format::text;
    return json_format(start, wanted == Wanted::rows || suffix_of(name, JSON));
}

// Whether the first object, if `start` has all of it, has a text or null under the key.
static bool first_has_text(const TextFile& file, std::string_view start, const std::string& key) try {
    if (file.format == Format::text) return true;
    const size_t begin = start.find('{'), end = begin == start.npos ? begin : json_object_end(start, begin);
    if (end == start.npos) return true;
    const Json row = parse_python_json(std::string(start.substr(begin, end - begin)), file.path);
    const Json* value = row.find(key);
    return value && (value->type == Json::string || value->type == Json::null);
} catch (const Error&) {
    return true;  // whoever reads the row refuses it
}

static TextFile inspect(const std::string& path, Wanted wanted, const std::string& text_key) {
    TextFile file = open_file(path, wanted == Wanted::prompt ? MAX_PROMPT_BYTES : INT64_MAX);
    if (!file.table.empty()) {
        file.format = Format::json_lines;
        if (wanted == Wanted::prompt) file.refused = "is a Parquet file, not text; give the text itself";
        return file;
    }
    TextStream stream(file, text_key);
    std::string_view start = stream.peek(INSPECTED + 1);
    const bool continues = int64_t(start.size()) > INSPECTED;
    start = start.substr(0, size_t(INSPECTED));
    const int64_t odd_byte = find_odd_byte(start, continues);
    const std::string_view text = start.substr(start.starts_with(BYTE_ORDER_MARK) ? 3 : 0);
    const std::string name = unpacked_name(path);
    const bool is_table = wanted != Wanted::prompt && suffix_of(name, {".csv", ".tsv"});
    file.format = is_table ? Format::json_lines : format_of(name, text, wanted);
    file.refused = why_refused(file, start);
    if (!file.refused.empty()) return file;
    if (is_table) {
        file.table = suffix_of(name, {".csv"}) ? "csv" : "tsv";
        file.may_have_text = first_has_text(file, TextStream(file, text_key).peek(PEEKED), text_key);
        return file;
    }
    if (!file.unpacker) file.text_bytes = file.size;
    if (file.format == Format::text) file.odd_byte = odd_byte;
    file.may_have_text = first_has_text(file, text, text_key);
    return file;
}

TextFile open_input(const std::string& path, Wanted wanted, const std::string& text_key) {
    TextFile file = inspect(path, wanted, text_key);
    if (!file.refused.empty()) fail(EXIT_BAD_DATA, "%s: %s", file.path.c_str(), file.refused.c_str());
    return file;
}

std::string read_prompt(const std::string& path) {
    const TextFile file = open_input(path, Wanted::prompt, "");
    TextStream stream(file, "");
    stream.skip_mark();
    const std::string_view text = stream.peek(MAX_PROMPT_BYTES + 1);
    if (int64_t(text.size()) > MAX_PROMPT_BYTES) fail_too_long(file.path, MAX_PROMPT_BYTES);
    return std::string(text);
}

// ---- folders

using FileId = std::pair<dev_t, ino_t>;

static FileId id_of(const std::string& path) {
    struct stat status = {};
    if (stat(path == "-" ? "/dev/stdin" : path.c_str(), &status) != 0) fail_errno(EXIT_NO_INPUT, path, "open");
    return {status.st_dev, status.st_ino};
}

// The files in a folder. None beside weights is text, such as a checkpoint's README.md. Links to folders are followed
// after all of its own folders, and only to folders that are new.
struct FolderWalk {
    std::vector<std::string> texts, others, links;
    std::set<FileId> seen;

    void walk(const std::string& folder) {
        if (!seen.insert(id_of(folder)).second) return;
        const std::vector<std::string> names = list_directory(folder);
        const bool has_weights = std::any_of(names.begin(), names.end(),
                                             [](const std::string& name) { return name.ends_with(".safetensors"); });
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

static constexpr const char* AGAIN = "already read";

// Adds the text files of a folder. Refuses a folder without any (EXIT_NO_INPUT).
static void search_folder(FoundFiles& found, std::map<FileId, bool>& seen, const std::string& path,
                          const std::string& text_key) {
    FolderWalk folder;
    folder.walk(path);
    for (size_t i = 0; i < folder.links.size(); i++) folder.walk(std::string(folder.links[i]));
    std::sort(folder.texts.begin(), folder.texts.end());
    const std::string no_text = "without text under \"" + printable(text_key) + "\" (--text-key)";
    std::vector<std::string>& others = found.left_out["of other kinds"];
    others.insert(others.end(), folder.others.begin(), folder.others.end());
    bool has_text = false;
    std::string last;
    for (const std::string& name : folder.texts) {
        const auto [known, is_new] = seen.insert({id_of(name), false});
        has_text |= known->second;
        if (known->second) found.left_out[AGAIN].push_back(name);
        if (!is_new) continue;
        TextFile file = inspect(name, Wanted::documents, text_key);
        const bool is_text = file.refused.empty();
        if (is_text && file.may_have_text) {
            known->second = has_text = true;
            found.texts.push_back(std::move(file));
            continue;
        }
        last = ": " + name + " " + (is_text ? "is " + no_text : file.refused);
        (is_text ? found.left_out[no_text] : others).push_back(name);
    }
    if (has_text) return;
    fail(EXIT_NO_INPUT,
         "%s: holds no text file (.txt .text .md .markdown .rst .json .jsonl .jsonlines .ndjson .jl .csv .tsv, also "
         "with .gz .zst .xz .lzma .bz2, or .parquet)%s; name the files",
         path.c_str(), last.c_str());
}

FoundFiles find_text_files(const std::vector<std::string>& inputs, const std::string& text_key) {
    FoundFiles found;
    std::map<FileId, bool> seen;  // whether it is in found.texts
    for (const std::string& input : inputs) {
        if (input != "-" && !path_exists(input))
            fail(EXIT_NO_INPUT, "%s: there is no such file or folder", input.c_str());
        if (is_directory(input)) {
            search_folder(found, seen, input, text_key);
        } else if (bool& read = seen[id_of(input)]; read) {
            found.left_out[AGAIN].push_back(input);
        } else {
            found.texts.push_back(open_input(input, Wanted::documents, text_key));
            read = true;
        }
    }
    return found;
}
