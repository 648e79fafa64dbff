// terminal.h: output to stdout and to a terminal.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"

// Call this first in main, before any file is opened or text printed. Standard streams that the caller closed become
// /dev/null; otherwise the next opened file would take their descriptor and receive their output. A broken pipe becomes
// an error of write instead of a signal. stdout is line-buffered.
void prepare_standard_streams();

// A number with its noun: "1 token", "1,024 tokens", "2 micro-batches".
std::string counted(int64_t count, const std::string& noun);
std::string duration_text(double seconds);  // 41s, 43m, 1h05m, 2d03h, 412 days, 42 years

// The text in a form that is safe to send to a terminal (TerminalText in unicode.h).
std::string terminal_text(const std::string& text);

// The text of a message with the characters of escape_of (unicode.h) and bytes that are not UTF-8 written out, as \x1b:
// names from the user and from files can contain them. A newline is written out, too: a name must not begin a line.
std::string message_text(const std::string& text);
// An error whose text is a line for the message and an indented line for each item, all in the form of message_text.
struct ListError : Error {
    ListError(int exit_code, const std::string& message, const std::vector<std::string>& items);
};
std::string error_text(const Error& error);  // what() in the form of message_text, or as it is if it is a ListError
// Prints the text of a message ("warning: ...") and a newline on stderr.
void print_message(const std::string& text);

// Quotes a word for a POSIX shell, unless all its characters are harmless.
std::string shell_word(const std::string& text);

// Whether the text on stdout ends on a terminal. Under mpirun this is mpirun's stdout, not that of the rank.
bool stdout_is_terminal();

// Progress of long work on stderr: on a terminal one line that is rewritten, else a line each second.
struct ProgressLine {
    double last;
    bool drawn = false;

    ProgressLine();
    ProgressLine(const ProgressLine&) = delete;
    ~ProgressLine();  // ends the line: an error message starts on a new one
    // Whether a second has passed since the last line. Check it before the text of show() is made.
    bool due() const;
    void show(const std::string& text);
    void clear();  // removes the line; call it before other text is printed
};

// Prints all of the text on stdout, or fails with EXIT_IO. Use it for results that are written nowhere else; the output
// of train is in log.jsonl too.
void print_stdout(const std::string& text);
using Row = std::pair<std::string, std::string>;  // label, value
// One line per row, in the form of message_text, with the labels padded to equal width.
std::vector<std::string> table_lines(const std::vector<Row>& rows);
