// unicode.h: character classes, and the cutting of text into the pieces that a byte-level BPE works on.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

// As GPT-2's pattern sees a character: \p{L}, \p{N}, \s, or none of them. \s is 25 code points: U+0009-000D, 0020,
// 0085, 00A0, 1680, 2000-200A, 2028, 2029, 202F, 205F, 3000; so neither U+180E nor U+FEFF. Unicode 16.0.
enum CharClass : uint8_t { OTHER, LETTER, NUMBER, WHITE };

// What a position in a text holds. A byte that is no part of valid UTF-8 (overlong forms and surrogates are not) is a
// character of its own, of class OTHER.
struct Char {
    CharClass type;
    int bytes;
    bool valid;
};
Char char_at(const char* p, const char* end);        // p < end
Char char_before(const char* begin, const char* p);  // begin < p; what char_at finds there, reading from begin

// The end of the piece that starts at p < end, by GPT-2's pattern:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// A piece is taken off the front of a text, the next one off what remains. Time is linear in its length.
const char* piece_end(const char* p, const char* end);

// The last place in text where it can be cut so that both parts have the pieces of the whole: before a white ASCII
// character that follows a character that is not white. 0: there is none.
size_t last_safe_cut(std::string_view text);

// Turns the bytes of tokens, as they come, into what a terminal may be sent: only whole characters, invalid bytes as
// U+FFFD, and control characters other than \n and \t written out, as \x1b, so that a model cannot send escape codes.
struct TerminalText {
    std::string pending;  // the start of a character whose end has not come yet

    std::string add(std::string_view bytes);
    std::string finish();  // what is pending will stay incomplete
};
