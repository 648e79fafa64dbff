// unicode.h: UTF-8, character classes, and GPT-2's splitting of text into pieces for byte-level BPE.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

// The class of a character in GPT-2's pattern, by Unicode 16.0: \p{L}, \p{N}, \s (not U+180E, U+FEFF), or other.
enum CharClass : uint8_t { OTHER, LETTER, NUMBER, WHITE };

// The character at a position in a text. A byte that is not part of valid UTF-8 (overlong forms and surrogates are
// invalid) is a separate character, of class OTHER.
struct Char {
    CharClass type;
    int bytes;
    bool valid;
};
// Whether Python's str.isspace and \s in its re count the character: WHITE and U+001C to U+001F.
inline bool is_python_space(const char* p, const Char& c) { return c.type == WHITE || (*p >= 0x1c && *p <= 0x1f); }
Char char_at(const char* p, const char* end);        // p < end
Char char_before(const char* begin, const char* p);  // begin < p; the result of char_at when reading from begin

// The end of the piece that starts at p < end, by GPT-2's pattern:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Pieces are split off the front of a text one after another. Time is linear in the piece's length.
const char* piece_end(const char* p, const char* end);

// The last position at which text can be cut so that the two parts split into the same pieces as the whole: before a
// white ASCII character that follows a character that is not white. 0: there is none.
size_t last_safe_cut(std::string_view text);
