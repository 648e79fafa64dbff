// terminal.h: text on standard output and on a terminal.
#pragma once
#include <string>
#include <utility>
#include <vector>

// For main, before anything is opened or printed: standard streams that the caller closed become /dev/null (else the
// next file would take their number and their output), a broken pipe becomes an error of write instead of a signal, and
// stdout is flushed line by line.
void prepare_standard_streams();

std::string duration_text(double seconds);  // 41s, 43m, 1h05m, 2d03h, 412 days, 42 years

// Text as a terminal may be sent it (TerminalText in unicode.h).
std::string terminal_text(const std::string& text);

// A word as a POSIX shell reads it back: in quotes, unless it has none but harmless characters.
std::string shell_word(const std::string& text);

bool stdout_is_terminal();

// Prints all of the text on stdout, or ends the command with EXIT_IO: for results, which nothing else has. What train
// prints is in log.jsonl too.
void print_stdout(const std::string& text);
using Row = std::pair<std::string, std::string>;  // label, value
// A line for each row, the labels padded to one width.
std::vector<std::string> table_lines(const std::vector<Row>& rows);
