// test_print.cpp: tests text that is safe for a terminal, words for a shell, durations, and closed standard streams.
#include "base/print.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>

TEST_CASE("durations are printed in seconds, minutes, hours and days, and counts of one in the singular") {
    for (const auto& [seconds, text] :
         {std::pair(59.4, "59s"), std::pair(2570.0, "43m"), std::pair(3599.0, "1h00m"), std::pair(183600.0, "2d03h"),
          std::pair(86400.0 * 412, "412 days"), std::pair(-1.0, "0s"), std::pair(1.0 / 0.0, "?")})
        CHECK(duration_text(seconds) == text);
    CHECK(counted(1, "micro-batch") == "1 micro-batch");
    CHECK(counted(0, "micro-batch") == "0 micro-batches");
    CHECK(counted(1024, "token") == "1,024 tokens");
}

TEST_CASE("generated text cannot control the terminal") {
    const std::string harmless = "plain caf\xc3\xa9 \xe5\xad\x97 \xc2\xa0\xf0\x9f\x99\x82";
    CHECK(terminal_text(harmless + "\t\n") == harmless + "\t\n");
    CHECK(terminal_text("\x1b[2Jx\r\b\x7f") == "\\x1b[2Jx\\x0d\\x08\\x7f");
    CHECK(terminal_text("\xc2\x9b 2J \xc2\xa0") == "\\x9b 2J \xc2\xa0");  // CSI in UTF-8, and a space
    CHECK(terminal_text("\xc2") + terminal_text("\x9b") == "\\xc2\x9b");  // the same in two tokens
    // A name in a message must not begin a line either.
    CHECK(message_text(harmless) == harmless);
    CHECK(message_text("\x1b[2J\a\t\r\x7f\nerror: y\n") == "\\x1b[2J\\x07\\x09\\x0d\\x7f\\x0aerror: y\\x0a");
    CHECK(message_text(std::string(1, '\0')) == "\\x00");
    CHECK(table_lines({{"output", "a\nb"}, {"x", ""}}) == std::vector<std::string>{"output  a\\x0ab", "x       "});
}

TEST_CASE("shell_word quotes a word only where a shell needs it") {
    for (const char* text : {"data/x=1:2,3.bin", "--lr=1e-3"}) CHECK(shell_word(text) == text);
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
