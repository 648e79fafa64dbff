// unicode.cpp: looks up character classes in a table of 1.1 MB, one byte per code point, which is filled from runs at
// first use. A text touches only those few cache lines that hold its scripts. ASCII, the bulk of most texts, skips
// the table.
#include "text/unicode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "skip_letters() counts bytes from the low end");

#include "text/unicode_table.inc"

static constexpr uint32_t white[] = {0x09,   0x0a,   0x0b,   0x0c,   0x0d,   0x20,   0x85,   0xa0,   0x1680,
                                     0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                     0x2009, 0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000};

// A lambda would be constexpr: the compiler would then try to fill the table, for a second.
static std::vector<CharClass> all_classes() {
    std::vector<CharClass> all(0x110000, OTHER);
    const auto fill = [&](const auto& runs, CharClass type) {
        auto at = all.begin();
        for (size_t i = 0; i < std::size(runs); i += 2) at = std::fill_n(at + runs[i], runs[i + 1], type);
    };
    fill(letter_runs, LETTER);
    fill(number_runs, NUMBER);
    for (const uint32_t c : white) all[c] = WHITE;
    return all;
}

static CharClass class_of(uint32_t code) {
    static const std::vector<CharClass> classes = all_classes();
    return classes[code];
}

// Classes of single bytes; MULTI: the start of a longer character, or an invalid byte.
static constexpr CharClass MULTI = CharClass(4);

static constexpr std::array<CharClass, 256> byte_classes = [] {
    std::array<CharClass, 256> table{};
    for (int c = 0; c < 256; c++) {
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        const bool white = c == ' ' || (c >= '\t' && c <= '\r');
        table[c] = c >= 128 ? MULTI : letter ? LETTER : c >= '0' && c <= '9' ? NUMBER : white ? WHITE : OTHER;
    }
    return table;
}();

static CharClass byte_class(char c) { return byte_classes[uint8_t(c)]; }

// Decodes a character outside of ASCII. Overlong forms, surrogates and code points above U+10FFFF are invalid.
static Char multi_char_at(const char* p, const char* end) {
    static constexpr uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};  // code point, by number of bytes
    const Char invalid{OTHER, 1, false};
    const uint32_t first = uint8_t(*p);
    const int bytes = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first < 0xc2 || first > 0xf4 || end - p < bytes) return invalid;
    uint32_t code = first & (0x7f >> bytes);
    for (int i = 1; i < bytes; i++) {
        if ((p[i] & 0xc0) != 0x80) return invalid;
        code = code << 6 | (p[i] & 0x3f);
    }
    const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
    return code < least[bytes] || is_surrogate || code > 0x10ffff ? invalid : Char{class_of(code), bytes, true};
}

Char char_at(const char* p, const char* end) {
    return byte_class(*p) == MULTI ? multi_char_at(p, end) : Char{byte_class(*p), 1, true};
}

// Looks for a valid character of one to four bytes that ends at p. If there is none, the byte before p is invalid.
Char char_before(const char* begin, const char* p) {
    for (int bytes = 1; bytes <= 4 && bytes <= p - begin; bytes++) {
        const Char c = char_at(p - bytes, p);
        if (c.valid && c.bytes == bytes) return c;
    }
    return {OTHER, 1, false};
}

// Skips the ASCII letters at p, eight bytes at a time, because a loop over bytes mispredicts the end of every word. The
// word t holds the eight bytes with letters in lower case and high bits clear. A byte of from_a has its high bit set if
// the byte of t is at least 'a', and a byte of above_z if the byte of t is above 'z'.
static const char* skip_letters(const char* p, const char* end) {
    constexpr uint64_t ones = 0x0101010101010101, high = 0x80 * ones;
    while (end - p >= 8) {
        uint64_t x;
        memcpy(&x, p, 8);
        const uint64_t t = (x | 0x20 * ones) & ~high;
        const uint64_t from_a = t + (0x80 - 'a') * ones, above_z = t + (0x7f - 'z') * ones;
        const uint64_t others = ~(from_a & ~above_z & ~x) & high;
        if (others) return p + std::countr_zero(others) / 8;
        p += 8;
    }
    while (p < end && byte_class(*p) == LETTER) p++;
    return p;
}

static const char* end_of_run(const char* p, const char* end, CharClass type) {
    for (;;) {
        if (type == LETTER) p = skip_letters(p, end);
        while (p < end && byte_class(*p) == type) p++;
        if (p == end || byte_class(*p) != MULTI) return p;
        const Char c = multi_char_at(p, end);
        if (c.type != type) return p;
        p += c.bytes;
    }
}

// The length, with the apostrophe, of a contraction at p ('s, 't, 'm, 'd, 're, 've or 'll); 0 if there is none.
static int contraction(const char* p, const char* end) {
    if (end - p < 2) return 0;
    const char a = p[1], b = end - p > 2 ? p[2] : '\0';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

// The end of a piece of white space that starts at p. At the end of the text the piece is the whole run.
// Elsewhere the last character of the run is left for the next piece, unless the run is a single character.
static const char* end_of_white_piece(const char* p, const char* end) {
    const char* last = p;  // the run's last character
    for (const char* next = p; next < end;) {
        const Char c = char_at(next, end);
        if (c.type != WHITE) return last == p ? next : last;
        last = next;
        next += c.bytes;
    }
    return end;
}

const char* piece_end(const char* p, const char* end) {
    const char* start = p;
    if (*p == '\'') {
        if (const int length = contraction(p, end)) return p + length;
    } else if (*p == ' ' && end - p > 1) {
        start = p + 1;  // the piece includes one leading space, unless white space follows it
    }
    const Char c = char_at(start, end);
    return c.type == WHITE ? end_of_white_piece(p, end) : end_of_run(start + c.bytes, end, c.type);
}

size_t last_safe_cut(std::string_view text) {
    for (size_t i = text.size(); i-- > 1;)
        if (byte_class(text[i]) == WHITE && char_before(text.data(), text.data() + i).type != WHITE) return i;
    return 0;
}
