#include "text/text_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/files.h"
#include "text/tokenizer.h"

static constexpr int64_t CHUNK_BYTES = 64 << 10;
static constexpr int64_t LONG_DOCUMENT = 64 << 10;  // bytes; the end of longer documents is held out
static constexpr int64_t CUT_WINDOW = 64 << 10;     // bytes in which the start of a line is searched
static constexpr int64_t LONGEST_ROW = 1 << 30;     // bytes
static constexpr char BAD_ROW = '?';                // CorpusReader::last after an element that is no object

static bool is_one_document(const TextFile& file, const CorpusRules& rules) {
    return file.format == Format::text && rules.split == SplitAt::none;
}

void measure_text(TextFile& file, const CorpusRules& rules, const std::function<void(int64_t)>& progress) {
    if (file.command.empty() || !is_one_document(file, rules) || rules.val_fraction == 0.0) return;
    TextStream stream(file);
    std::string piece;
    file.text_bytes = 0;
    for (bool more = true; more; piece.clear()) {
        more = stream.read(piece, 1 << 20);
        file.text_bytes += int64_t(piece.size());
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
static std::pair<size_t, size_t> next_border(std::string_view text, size_t from, Format format, SplitAt split,
                                             bool in_array) {
    const auto at = [](size_t end) { return std::pair(end, end); };
    if (format == Format::json && text.substr(from).starts_with('{')) {  // a broken object ends at the next separator
        const size_t end = json_object_end(text, from);
        return at(std::min(end, text.substr(0, end).find('\x1e', from)));
    }
    if (format == Format::json) {  // another value ends with its line, or at the next comma or bracket
        const size_t last = text.substr(from).starts_with('"') ? json_string_end(text, from) : from;
        return at(text.find_first_of(in_array ? ",]\n" : "\x1e\n", std::min(last, text.size())));
    }
    if (format == Format::text && split == SplitAt::blank_lines) return at(section_end(text, from));
    const std::string_view mark = format == Format::text && split == SplitAt::end_of_text ? END_OF_TEXT : "\n";
    const size_t end = text.find(mark, from);
    return {end, end == text.npos ? text.npos : end + mark.size()};
}

// ---- reading

// Counts a document. Returns whether the document is held out.
static bool begin_document(CorpusReader& reader) {
    const double fraction = reader.rules.val_fraction;
    const int64_t number = reader.documents++;
    return fraction > 0.0 && number % std::max<int64_t>(2, std::llround(1.0 / fraction)) == 1;
}

static void open_file(CorpusReader& reader) {
    const TextFile& file = reader.files[reader.file];
    reader.input.emplace(file);
    const int64_t mark = reader.input->skip_mark();
    reader.lines = 0;
    reader.train_left = INT64_MAX;
    reader.last = ' ';
    reader.part_begun = reader.part_val = false;
    if (!is_one_document(file, reader.rules) || reader.input->peek(1).empty()) return;
    const double fraction = reader.rules.val_fraction;
    const bool chosen = begin_document(reader), few_files = double(reader.files.size()) * fraction < 1.0;
    if (fraction > 0.0 && (few_files || file.text_bytes >= LONG_DOCUMENT))
        reader.train_left = std::max<int64_t>(0, held_out_from(file.text_bytes, fraction) - mark);
    else
        reader.part_val = chosen;
}

// Appends more bytes of the file. Returns whether they end it, or its training part: train_left is 0 then.
static bool read_more(CorpusReader& reader, std::string& bytes) {
    const int64_t more = std::min(reader.train_left, std::max(CHUNK_BYTES, int64_t(bytes.size())));
    const bool at_end = !reader.input->read(bytes, more);
    reader.train_left -= more;
    if (reader.train_left > 0) return at_end;
    const size_t start = part_start(reader.input->peek(CUT_WINDOW));
    if (start != std::string::npos) return reader.input->read(bytes, int64_t(start));
    reader.train_left = INT64_MAX;
    return at_end;
}

// Passes [ , ] or { for an object, which JSON must allow after reader.last.
static void pass(CorpusReader& reader, char next) {
    constexpr std::string_view pairs = " [| {|[{|[]|,{|{,|{]";
    if (reader.last != BAD_ROW && pairs.find(std::string{reader.last, next}) == pairs.npos)
        fail(EXIT_BAD_DATA, "%s:%lld: is not valid JSON: a %c at a wrong place, or without a comma before it",
             reader.files[reader.file].path.c_str(), static_cast<long long>(reader.lines + 1), next);
    if (next != '{' || strchr("[,", reader.last)) reader.last = next == ']' ? ' ' : next;
}

// Where the next JSON object starts, after white space and the commas and brackets of an array. Anything else is a bad
// row (next_border has its end).
static size_t skip_to_object(CorpusReader& reader, std::string_view text, size_t at) {
    const size_t begin = std::min(text.find_first_not_of(" \t\r\n[],\x1e", at), text.size());
    for (const char c : text.substr(at, begin - at)) {
        reader.lines += c == '\n';
        if (c == '[' || c == ',' || c == ']') pass(reader, c);
    }
    if (begin < text.size() && text[begin] != '{' && reader.last != ' ') reader.last = BAD_ROW;
    return begin;
}

// Fills chunk.documents from its bytes. Returns the offset of the first incomplete document.
static size_t list_documents(CorpusReader& reader, Chunk& chunk, bool at_end) {
    const std::string_view text = chunk.bytes;
    if (is_one_document(*chunk.file, reader.rules)) {
        const size_t end = at_end ? text.size() : reader.rules.cut(text);
        if (end > 0) chunk.documents.push_back({0, end, 0, !reader.part_begun, reader.part_val});
        reader.part_begun |= end > 0;
        return end;
    }
    const Format format = chunk.file->format;
    for (size_t begin = 0;;) {
        if (format == Format::json) begin = skip_to_object(reader, text, begin);
        auto [end, next] = next_border(text, begin, format, reader.rules.split, reader.last != ' ');
        if (format == Format::json && next != text.npos && text[begin] == '{') pass(reader, '{');
        if (next == text.npos) {
            if (at_end && begin == text.size() && reader.last != ' ' && reader.last != BAD_ROW)
                fail(EXIT_BAD_DATA, "%s: is not valid JSON: the ] of its array is missing; it may be cut off",
                     chunk.file->path.c_str());
            if (!at_end || begin == text.size()) return begin;
            end = next = text.size();
        }
        if (text.substr(begin, end - begin).find_first_not_of(BLANK) != text.npos) {
            const bool val = begin_document(reader);
            chunk.documents.push_back({begin, end, reader.lines + 1, true, val});
        }
        reader.lines += format == Format::json ? std::ranges::count(text.substr(begin, next - begin), '\n') : 1;
        begin = next;
    }
}

int64_t CorpusReader::file_bytes_read() const { return file_bytes + (input ? input->file_position() : 0); }

bool CorpusReader::next(Chunk& chunk) {
    if (!input && file == files.size()) return false;
    if (!input) open_file(*this);
    chunk = {&files[file], std::exchange(rest, {})};
    bool at_end = false;
    size_t used = 0;
    while (used == 0 && !at_end) {  // no complete document yet: a long line, section, or run without white space
        if (chunk.file->format != Format::text && int64_t(chunk.bytes.size()) > LONGEST_ROW)
            fail(EXIT_BAD_DATA, "%s:%lld: has a row of more than 1 GiB; a quote or a brace may be missing",
                 chunk.file->path.c_str(), static_cast<long long>(lines + 1));
        at_end = read_more(*this, chunk.bytes);
        used = list_documents(*this, chunk, at_end);
    }
    rest = chunk.bytes.substr(used);
    chunk.bytes.resize(used);
    if (at_end && train_left == 0) {  // the held-out part follows
        train_left = INT64_MAX;
        part_begun = false;
        part_val = true;
    } else if (at_end) {
        file_bytes += files[file++].size;
        input.reset();
    }
    return true;
}

// ---- documents

static std::string place_of(const Chunk& chunk, const Document& document) {
    return chunk.file->path + ":" + std::to_string(document.line);
}

static std::string_view text_of(const Chunk& chunk, const Document& document) {
    return std::string_view(chunk.bytes).substr(document.begin, document.end - document.begin);
}

// any_text: no matter whether its strings are texts.
static Json row_of(const Chunk& chunk, const Document& document, bool any_text) {
    const std::string where = place_of(chunk, document);
    // A value of an array ends where the file does, so it is not parsed.
    if (chunk.file->format == Format::json && chunk.bytes[document.begin] != '{')
        fail(EXIT_BAD_DATA,
             "%s: is not an object {...}; a JSON file must consist of them: {\"text\": \"...\"}, not \"...\"",
             where.c_str());
    Json row = parse_python_json(std::string(text_of(chunk, document)), where,
                                 "; each line of this file must be one whole object {...}", any_text);
    if (row.type == Json::string && chunk.file->is_table)  // says what is wrong
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
    fail(EXIT_BAD_DATA, "%s: has no text under the key \"%s\" (--text-key): %s%s", where.c_str(),
         printable(key).c_str(), instead.c_str(),
         (keys.empty() ? keys : "; keys with text: " + printable(keys)).c_str());
}

// Calls f(row). If that fails because of a text with half of a surrogate pair, says so.
template <class F>
static void use_row(const Chunk& chunk, const Document& document, F f) try {
    f(row_of(chunk, document, true));
} catch (const Error&) {
    row_of(chunk, document, false);
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
    if (chunk.bad_rows++ == 0) chunk.first_bad = error.what();
    const std::string row(text_of(chunk, document)), key = '"' + rules.text_key + '"';
    int64_t rows = 0, lines = 1 + std::ranges::count(row.substr(0, row.find_last_not_of(BLANK)), '\n');
    for (size_t at = 0; chunk.file->format == Format::json && (at = row.find(key, at)) != row.npos; at++) rows++;
    chunk.bad_lines += std::max(lines, rows);
    return false;
}

void for_each_document(Chunk& chunk, const CorpusRules& rules,
                       const std::function<void(std::string_view text, bool starts, bool val)>& f) {
    for (const Document& document : chunk.documents) {
        std::string decoded;
        std::string_view text = text_of(chunk, document);
        if (chunk.file->format != Format::text) {
            if (!read_row(decoded, chunk, document, rules)) continue;
            text = decoded;
        } else if (rules.split == SplitAt::lines) {
            if (text.ends_with('\r') && document.end < chunk.bytes.size()) text.remove_suffix(1);  // ended with \r\n
        } else if (rules.split == SplitAt::end_of_text) {
            text = text.substr(0, text.find_last_not_of(BLANK) + 1);
            text.remove_prefix(std::min(text.find_first_not_of(BLANK), text.size()));
        }
        // The reader has already cut a file that is one document into its training part and its held-out end.
        const bool is_cut =
            !is_one_document(*chunk.file, rules) && rules.val_fraction > 0.0 && int64_t(text.size()) >= LONG_DOCUMENT;
        const size_t wanted = size_t(held_out_from(int64_t(text.size()), rules.val_fraction)),
                     start = is_cut ? part_start(text.substr(wanted, CUT_WINDOW)) : text.npos,
                     cut = start == text.npos ? text.size() : wanted + start;
        f(text.substr(0, cut), document.starts, document.val && !is_cut);
        if (cut < text.size()) f(text.substr(cut), true, true);
    }
}

std::vector<std::string> read_documents(const std::string& path, const std::string& text_key, bool warns) {
    const std::vector<TextFile> files = {open_input(path, Wanted::documents, text_key)};
    if (warns) warn_unless_utf8(files[0]);
    const CorpusRules rules{.text_key = text_key};
    CorpusReader reader{files, rules};
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
    const std::vector<TextFile> files = {open_input(path, Wanted::rows, keys)};
    CorpusReader reader{files, {}};
    for (Chunk chunk; reader.next(chunk);)
        for (const Document& document : chunk.documents)
            use_row(chunk, document, [&](const Json& row) { f(row, place_of(chunk, document)); });
}
