#include "text/text_reader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/files.h"
#include "base/print.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

static constexpr int64_t CHUNK_BYTES = 64 << 10;
static constexpr int64_t LONG_DOCUMENT = 64 << 10;  // bytes; the end of longer documents is held out
static constexpr int64_t CUT_WINDOW = 64 << 10;     // bytes in which the start of a line is searched
static constexpr int64_t LONGEST_ROW = 1 << 30;     // bytes

void measure_text(TextFile& file, const CorpusRules& rules, const std::function<void(int64_t)>& progress) {
    if (!file.unpacker || file.format != Format::text || rules.split != SplitAt::none || rules.val_fraction == 0.0)
        return;
    TextStream stream(file, "");
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

static Border next_border(std::string_view text, size_t from, Format format, SplitAt split) {
    const auto at = [](size_t end) { return Border{end, end}; };
    if (format == Format::json && text.substr(from).starts_with('{')) return at(json_object_end(text, from));
    if (format == Format::text && split == SplitAt::blank_lines) return at(section_end(text, from));
    const std::string_view mark = format == Format::text && split == SplitAt::end_of_text ? END_OF_TEXT : "\n";
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

static int64_t count_lines(std::string_view text) { return std::count(text.begin(), text.end(), '\n'); }

static void open_file(CorpusReader& reader) {
    const TextFile& file = reader.files[reader.file];
    reader.input = std::make_unique<TextStream>(file, reader.rules.text_key);
    reader.begin = reader.input->skip_mark();
    reader.size = reader.end = file.text_bytes;
    reader.lines = 0;
    reader.in_array = false;
    reader.many_documents = file.format != Format::text || reader.rules.split != SplitAt::none;
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

// Where the next JSON object starts, after white space and the commas and brackets of an array. Anything else is a bad
// row, up to the end of its line.
static size_t skip_to_object(CorpusReader& reader, std::string_view text, size_t at) {
    const size_t begin = std::min(text.find_first_not_of(" \t\r\n[],", at), text.size());
    const std::string_view between = text.substr(at, begin - at);
    const size_t bracket = between.find_last_of("[]");
    if (bracket != between.npos) reader.in_array = between[bracket] == '[';
    if (begin < text.size() && text[begin] != '{') reader.in_array = false;  // a bad row may have the end
    reader.lines += count_lines(between);
    return begin;
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
    const Format format = chunk.file->format;
    for (size_t begin = 0;;) {
        if (format == Format::json) begin = skip_to_object(reader, text, begin);
        Border border = next_border(text, begin, format, reader.rules.split);
        if (border.next == std::string_view::npos) {
            if (at_end && begin == text.size() && reader.in_array)
                fail(EXIT_BAD_DATA, "%s: is not valid JSON: the ] of its array is missing; it may be cut off",
                     chunk.file->path.c_str());
            if (!at_end || begin == text.size()) return begin;
            border = {text.size(), text.size()};
        }
        if (!is_blank(text.substr(begin, border.end - begin))) {
            const bool val = begin_document(reader);
            chunk.documents.push_back({begin, border.end, reader.lines + 1, true, val});
        }
        if (format == Format::json_lines)
            reader.lines++;
        else if (format != Format::text)
            reader.lines += count_lines(text.substr(begin, border.next - begin));
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
        settle_end(*this);
        const size_t used = list_documents(*this, chunk, begin == end);
        // No complete document yet: a long line, a long section, or a long run without white space.
        if (used == 0 && begin < end) {
            if (chunk.file->format != Format::text && int64_t(have) > LONGEST_ROW)
                fail(EXIT_BAD_DATA, "%s:%lld: has a row of more than 1 GiB; a quote or a brace may be missing",
                     chunk.file->path.c_str(), static_cast<long long>(lines + 1));
            continue;
        }
        rest = chunk.bytes.substr(used);
        chunk.bytes.resize(used);
        return true;
    }
}

// ---- documents

static std::string place_of(const Chunk& chunk, const Document& document) {
    return chunk.file->path + ":" + std::to_string(document.line);
}

static std::string bytes_of(const Chunk& chunk, const Document& document) {
    return chunk.bytes.substr(document.begin, document.end - document.begin);
}

// Whether a row of a JSON file cannot be an object. A value of an array ends where the file does, so it is not parsed.
static bool is_no_object(const Chunk& chunk, const Document& document) {
    return chunk.file->format == Format::json && chunk.bytes[document.begin] != '{';
}

// any_text: no matter whether its strings are texts.
static Json parse_row(const Chunk& chunk, const Document& document, bool any_text) {
    return parse_python_json(bytes_of(chunk, document), place_of(chunk, document),
                             "; each line of this file must be one whole object {...}", any_text);
}

static Json row_of(const Chunk& chunk, const Document& document) {
    const std::string where = place_of(chunk, document);
    if (is_no_object(chunk, document))
        fail(EXIT_BAD_DATA, "%s: is not an object {...}; a JSON file must consist of them", where.c_str());
    Json row = parse_row(chunk, document, true);
    if (row.type == Json::string && !chunk.file->table.empty())  // says what is wrong
        fail(EXIT_BAD_DATA, "%s: %s", where.c_str(), row.text.c_str());
    if (row.type != Json::object)
        fail(EXIT_BAD_DATA, "%s: is JSON, but not an object {...}; each line of this file must be one", where.c_str());
    return row;
}

static std::string text_of_row(const Json& row, const std::string& where, const std::string& key) {
    const Json* found = row.find(key);
    if (found && found->type == Json::string) return found->text;
    const std::string instead = !found ? "there is no such key" : format("its type is %s", found->type_name());
    std::string keys;
    for (const auto& [name, value] : row.members)
        if (value.type == Json::string) keys += (keys.empty() ? "" : ", ") + name;
    fail(EXIT_BAD_DATA, "%s: has no text under the key \"%s\" (--text-key): %s; keys with text: %s", where.c_str(),
         printable(key).c_str(), instead.c_str(), keys.empty() ? "none" : printable(keys).c_str());
}

static std::string_view without_white_ends(std::string_view text) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    return first == text.npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
}

// Calls f(row). If that fails because of a text with half of a surrogate pair, says so.
template <class F>
static void use_row(const Chunk& chunk, const Document& document, F f) try {
    f(row_of(chunk, document));
} catch (const Error&) {
    if (!is_no_object(chunk, document)) parse_row(chunk, document, false);
    throw;
}

// Reads the text of a row. Returns false if the row is bad and is skipped.
static bool read_row(std::string& text, Chunk& chunk, const Document& document, const CorpusRules& rules) try {
    use_row(chunk, document,
            [&](const Json& row) { text = text_of_row(row, place_of(chunk, document), rules.text_key); });
    return true;
} catch (const Error& error) {
    if (!rules.skip_bad_lines)
        fail(error.exit_code, "%s%s", error.what(), rules.may_skip ? "; --skip-bad-lines skips such lines" : "");
    if (chunk.bad_lines++ == 0) chunk.first_bad = error.what();
    return false;
}

void for_each_document(Chunk& chunk, const CorpusRules& rules,
                       const std::function<void(std::string_view text, bool starts, bool val)>& f) {
    for (const Document& document : chunk.documents) {
        std::string decoded;
        std::string_view text = std::string_view(chunk.bytes).substr(document.begin, document.end - document.begin);
        const bool is_text = chunk.file->format == Format::text;
        if (!is_text) {
            if (!read_row(decoded, chunk, document, rules)) continue;
            text = decoded;
        } else if (rules.split == SplitAt::lines) {
            if (text.ends_with('\r')) text.remove_suffix(1);
        } else if (rules.split == SplitAt::end_of_text) {
            text = without_white_ends(text);
        }
        // The reader has already cut a file that is one document into its training part and its held-out end.
        const bool file_is_document = is_text && rules.split == SplitAt::none;
        if (file_is_document || rules.val_fraction == 0.0 || int64_t(text.size()) < LONG_DOCUMENT) {
            f(text, document.starts, document.val);
            continue;
        }
        const size_t wanted = size_t(held_out_from(int64_t(text.size()), rules.val_fraction));
        const size_t start = part_start(text.substr(wanted, CUT_WINDOW));
        const size_t cut = start == text.npos ? text.size() : wanted + start;
        f(text.substr(0, cut), true, false);
        if (cut < text.size()) f(text.substr(cut), true, true);
    }
}

std::vector<std::string> read_documents(const std::string& path, const std::string& text_key) {
    const std::vector<TextFile> files = {open_input(path, Wanted::documents, text_key)};
    const CorpusRules rules{.text_key = text_key};
    CorpusReader reader(files, rules);
    std::vector<std::string> documents;
    for (Chunk chunk; reader.next(chunk);)
        for_each_document(chunk, rules, [&](std::string_view text, bool starts, bool) {
            if (starts) documents.emplace_back();
            documents.back() += text;
        });
    return documents;
}

void for_each_row(const std::string& path, const std::string& keys,
                  const std::function<void(const Json& row, const std::string& where)>& f) {
    const std::vector<TextFile> files = {open_input(path, Wanted::rows, "")};
    CorpusReader reader(files, {.text_key = keys});
    for (Chunk chunk; reader.next(chunk);)
        for (const Document& document : chunk.documents)
            use_row(chunk, document, [&](const Json& row) { f(row, place_of(chunk, document)); });
}
