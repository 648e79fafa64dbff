// test_common.cpp: errors, checked integers, text for people, text that is safe for a terminal, and words for a shell.
#include "base/common.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/print.h"
#include "support/refusal.h"

TEST_CASE("errors have an exit code and a message of any length, which is made only if the condition is false") {
    const std::string longer(100000, 'x');
    CHECK(refusal([&] { fail(EXIT_BAD_DATA, "<%s> %d", longer.c_str(), 7); }) == "65 <" + longer + "> 7");
    CHECK(refusal([] { ENSURE(1 + 1 == 3, "no"); }) == "2 no");
    int evaluated = 0;
    ENSURE(true, "%d", ++evaluated);
    CHECK(evaluated == 0);
    CHECK(refusal([] { INVARIANT(7 % 2 == 0, "%d elements cannot be divided among %d ranks", 7, 2); }) ==
          "1 internal error: 7 elements cannot be divided among 2 ranks; please report it");
}

TEST_CASE("ceil_div and round_up round up, and narrow refuses numbers that do not fit in 32 bits") {
    CHECK(ceil_div(8, 8) == 1);
    CHECK(ceil_div(9, 8) == 2);
    CHECK(round_up<int64_t>(int64_t(1) << 40 | 1, 64) == (int64_t(1) << 40) + 64);
    CHECK(narrow(-2147483648LL) == -2147483647 - 1);
    CHECK(refusal([] { narrow(2147483648LL); }).ends_with("2147483648 does not fit in 32 bits"));
    CHECK(refusal([] { narrow(-2147483649LL); }) != "");
}

TEST_CASE("numbers for people: thousands, bytes and significant digits") {
    for (const auto& [number, text] : {std::pair<int64_t, std::string>(999, "999"),
                                       {-123456, "-123,456"},
                                       {INT64_MIN, "-9,223,372,036,854,775,808"}})
        CHECK(with_commas(number) == text);
    for (const auto& [bytes, text] :
         {std::pair<int64_t, std::string>(1023, "1023 B"), {1024, "1.00 KiB"}, {6593445888, "6.14 GiB"}})
        CHECK(human_bytes(bytes) == text);
    for (const auto& [number, text] :
         {std::pair(1034.5, "1,035"), std::pair(999.6, "1,000"), std::pair(12.34, "12.3"), std::pair(9.9996, "10"),
          std::pair(1.234e-5, "0.0000123"), std::pair(0.0, "0"), std::pair(1.0 / 0.0, "inf")})
        CHECK(plain_number(number) == text);
    CHECK(plain_number(101.246, 4) == "101.2");
}

// ---- print.h

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
    CHECK(table_text({{"output", "a\nb"}, {"x", ""}}) == "output  a\\x0ab\nx       \n");
}

TEST_CASE("shell_word quotes a word only where a shell needs it") {
    for (const char* text : {"data/x=1:2,3.bin", "--lr=1e-3"}) CHECK(shell_word(text) == text);
    CHECK(shell_word("") == "''");
    for (const char* text : {"two words", "a*", "$HOME", "~", "{a,b}", "\"", "#", "a\nb", "a;b", "[x]", "!"})
        CHECK(shell_word(text) == "'" + std::string(text) + "'");
    CHECK(shell_word("it's") == "'it'\\''s'");
}
