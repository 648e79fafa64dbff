// print.h: output to stdout and stderr, and text that is safe for a terminal.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/common.h"

// Call this first in main, before any file is opened or text printed. Standard streams that the caller closed become
// /dev/null; otherwise the next opened file would take their descriptor and receive their output. A broken pipe, and a
// file that is longer than ulimit -f, become errors of write instead of signals. stdout is line-buffered.
void prepare_standard_streams();

// Prints all of the text on stdout, or fails with EXIT_IO. It is for results that are written nowhere else.
void print_stdout(const std::string& text);
// Prints the text of a message ("warning: ...") and a newline on stderr.
void print_message(const std::string& text);
bool stdout_is_terminal();  // under mpirun: whether mpirun's stdout is one

std::string counted(int64_t count, const std::string& noun);  // "1 token", "1,024 tokens", "2 micro-batches"
std::string duration_text(double seconds);                    // 41s, 43m, 1h05m, 2d03h, 412 days

// Returns the text with control characters written out, as \x1b: names and generated text can contain them.
// message_text makes one line: a name must not begin a line. terminal_text keeps newlines and tabs.
std::string message_text(const std::string& text);
std::string terminal_text(const std::string& text);
std::string shell_word(const std::string& text);  // quoted for a POSIX shell, unless all its characters are harmless

using Row = std::pair<std::string, std::string>;  // label, value
// Returns one line per row, in the form of message_text, with the labels padded to equal width.
std::string table_text(const std::vector<Row>& rows);

// Progress of long work on stderr: on a terminal one line that is rewritten, else a line each second.
struct ProgressLine {
    double last = seconds_now();
    bool drawn = false;

    ~ProgressLine() { clear(); }
    // Returns whether a second has passed since the last line. Check it before the text of show() is made.
    bool due() const { return seconds_now() - last >= 1.0; }
    void show(const std::string& text);
    void clear();  // removes the line; call it before other text is printed
};
