// test_print.cpp: tests text that is safe for a terminal, words for a shell, durations, and closed standard streams.
#include "base/print.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>

TEST_CASE("durations are printed in seconds, minutes, hours and days") {
    const std::pair<double, const char*> cases[] = {{0, "0s"},
                                                    {59.4, "59s"},
                                                    {60, "1m"},
                                                    {2570, "43m"},
                                                    {3599, "1h00m"},
                                                    {3900, "1h05m"},
                                                    {86400, "1d00h"},
                                                    {183600, "2d03h"},
                                                    {86400.0 * 412, "412 days"},
                                                    {3.156e9, "36527 days"},
                                                    {1e12, "?"},
                                                    {-1, "0s"}};
    for (const auto& [seconds, text] : cases) CHECK(duration_text(seconds) == text);
    CHECK(duration_text(std::numeric_limits<double>::infinity()) == "?");
}

TEST_CASE("counts of one are in the singular") {
    CHECK(counted(1, "micro-batch") == "1 micro-batch");
    CHECK(counted(0, "micro-batch") == "0 micro-batches");
    CHECK(counted(1024, "token") == "1,024 tokens");
}

TEST_CASE("generated text cannot control the terminal") {
    CHECK(terminal_text("plain\ttext\n caf\xc3\xa9 \xe5\xad\x97") == "plain\ttext\n caf\xc3\xa9 \xe5\xad\x97");
    CHECK(terminal_text("\x1b[2Jx\r\b\x7f") == "\\x1b[2Jx\\x0d\\x08\\x7f");
    CHECK(terminal_text("\xc2\x9b 2J \xc2\xa0") == "\\x9b 2J \xc2\xa0");  // CSI in UTF-8, and a space
    CHECK(terminal_text("\xc2") + terminal_text("\x9b") == "\\xc2\x9b");  // the same in two tokens
}

TEST_CASE("names in messages cannot control the terminal or pretend to be messages") {
    CHECK(message_text("caf\xc3\xa9 \xe5\xad\x97 \xc2\xa0\xf0\x9f\x99\x82") ==
          "caf\xc3\xa9 \xe5\xad\x97 \xc2\xa0\xf0\x9f\x99\x82");
    CHECK(message_text("\x1b[2J\a\t\r\x7f") == "\\x1b[2J\\x07\\x09\\x0d\\x7f");
    CHECK(message_text("x\nerror: y\n") == "x\\x0aerror: y\\x0a");
    CHECK(message_text(std::string("\0", 1)) == "\\x00");
    CHECK(table_lines({{"output", "a\nb"}, {"x", ""}}) == std::vector<std::string>{"output  a\\x0ab", "x       "});
}

TEST_CASE("shell_word quotes a word only where a shell needs it") {
    CHECK(shell_word("data/x=1:2,3.bin") == "data/x=1:2,3.bin");
    CHECK(shell_word("--lr=1e-3") == "--lr=1e-3");
    CHECK(shell_word("") == "''");
    for (const char* text : {"two words", "a*", "$HOME", "~", "{a,b}", "\"", "#", "a\nb", "a;b", "[x]", "!"})
        CHECK(shell_word(text) == "'" + std::string(text) + "'");
    CHECK(shell_word("it's") == "'it'\\''s'");
}

TEST_CASE("files opened later never take the descriptor of a closed standard stream") {
    const pid_t child = fork();
    if (child == 0) {
        close(0), close(1);
        prepare_standard_streams();
        _exit(open("/dev/zero", O_RDONLY) < 3);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}
