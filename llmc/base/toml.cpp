#include "base/toml.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "base/common.h"
#include "base/content.h"
#include "base/json.h"

static std::string trimmed(const std::string& text) {
    const char* const blanks = " \t\r\n\v\f";
    const size_t begin = std::min(text.find_first_not_of(blanks), text.size());
    return text.substr(begin, text.find_last_not_of(blanks) + 1 - begin);
}

// Takes the quoted text at the start of a line, and removes it there.
static std::string take_text(std::string& line, const std::string& where) {
    std::string value;
    const char quote = line[0];
    size_t at = 1;
    while (at < line.size() && line[at] != quote) {
        const bool escape = quote == '"' && line[at] == '\\';
        const std::string part = line.substr(at, !escape ? 1 : line.compare(at, 2, "\\u") == 0 ? 6 : 2);
        value += escape ? parse_json('"' + part + '"', where).get<std::string>() : part;
        at += part.size();
    }
    if (at == line.size()) fail(EXIT_BAD_DATA, "%s: the text has no closing %c", where.c_str(), quote);
    line = trimmed(line.substr(at + 1));
    return value;
}

static std::string take_value(std::string line, const std::string& where) {
    if (line.empty()) fail(EXIT_BAD_DATA, "%s: is not of the form name = value", where.c_str());
    if (line[0] == '[' || line[0] == '{')
        fail(EXIT_BAD_DATA,
             "%s: is a list or a table, and an option has one value; several patterns are one text: "
             "\"a/*.bin\\nb/*.bin\"",
             where.c_str());
    std::string value;
    if (line[0] == '"' || line[0] == '\'') {
        value = take_text(line, where);
        if (!line.empty() && line[0] != '#') fail(EXIT_BAD_DATA, "%s: text after the value", where.c_str());
    } else {
        value = trimmed(line.substr(0, line.find('#')));
        if (isdigit(value[0])) std::erase(value, '_');
    }
    if (value.find('\0') != value.npos)
        fail(EXIT_BAD_DATA, "%s: has a zero byte; if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8",
             where.c_str());
    return value;
}

std::vector<std::pair<std::string, std::string>> parse_toml(const std::string& text, const std::string& path) {
    if (const ForeignContent* other = foreign_content(std::string_view(text).substr(0, 512)))
        fail(EXIT_BAD_DATA, "%s: is %s, not lines of UTF-8 text; %s", path.c_str(), other->what, other->remedy);
    std::vector<std::pair<std::string, std::string>> items;
    std::istringstream lines(text.starts_with("\xef\xbb\xbf") ? text.substr(3) : text);  // a byte order mark
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        line = trimmed(line);
        if (line.empty() || line[0] == '#') continue;
        const std::string where = format("%s, line %d", path.c_str(), number);
        const bool quoted = line[0] == '"' || line[0] == '\'';
        const std::string name = quoted ? take_text(line, where) : line.substr(0, line.find('='));
        if (!quoted) line.erase(0, name.size());
        items.emplace_back(trimmed(name), take_value(line.starts_with('=') ? trimmed(line.substr(1)) : "", where));
    }
    return items;
}

std::string toml_quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text)
        if (c == '"' || c == '\\')
            out += std::string("\\") + c;
        else if (uint8_t(c) < 0x20 || c == 0x7f)
            out += format("\\u%04x", unsigned(c));
        else
            out += c;
    return out + '"';
}
