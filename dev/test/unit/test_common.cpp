// test_common.cpp: formatted text, errors and checked integers.
#include "base/common.h"

#include <doctest/doctest.h>

#include "support/refusal.h"

TEST_CASE("format makes text of any length") {
    CHECK(format("%s", "") == "");
    CHECK(format("%d of %s", 3, "four") == "3 of four");
    const std::string longer(100000, 'x');
    CHECK(format("<%s>", longer.c_str()) == "<" + longer + ">");
}

TEST_CASE("fail() throws an Error with the message and the exit code") {
    CHECK(exit_code_of([] { fail(EXIT_BAD_DATA, "no"); }) == 65);
    CHECK_THROWS_WITH_AS(fail(EXIT_IO, "%s: %d bytes", "file", 7), "file: 7 bytes", Error);
}

TEST_CASE("ENSURE throws exit code 2 if its condition is false, and only then formats its message") {
    CHECK(exit_code_of([] { ENSURE(1 + 1 == 3, "no"); }) == 2);
    CHECK(exit_code_of([] { ENSURE(true, "no"); }) == 0);
    int evaluated = 0;
    ENSURE(true, "%d", ++evaluated);
    CHECK(evaluated == 0);
}

TEST_CASE("INVARIANT reports a bug, with the exit code of an internal error") {
    CHECK(refusal([] { INVARIANT(7 % 2 == 0, "%d elements cannot be divided among %d ranks", 7, 2); }) ==
          "1 internal error: 7 elements cannot be divided among 2 ranks; please report it");
    CHECK(refusal([] { INVARIANT(8 % 2 == 0, "no"); }) == "");
}

TEST_CASE("ceil_div rounds quotients up, round_up rounds to a multiple") {
    CHECK(ceil_div(0, 8) == 0);
    CHECK(ceil_div(1, 8) == 1);
    CHECK(ceil_div(8, 8) == 1);
    CHECK(ceil_div(9, 8) == 2);
    CHECK(round_up(50257, 128) == 50304);
    CHECK(round_up(50304, 128) == 50304);
    CHECK(round_up<int64_t>(int64_t(1) << 40 | 1, 64) == (int64_t(1) << 40) + 64);
}

TEST_CASE("narrow refuses numbers that do not fit in 32 bits") {
    CHECK(narrow(2147483647) == 2147483647);
    CHECK(narrow(-2147483648LL) == -2147483647 - 1);
    CHECK_THROWS_WITH_AS(narrow(2147483648LL), "2147483648 does not fit in 32 bits", Error);
    CHECK_THROWS_AS(narrow(-2147483649LL), Error);
}

TEST_CASE("with_commas separates thousands") {
    CHECK(with_commas(0) == "0");
    CHECK(with_commas(999) == "999");
    CHECK(with_commas(1000) == "1,000");
    CHECK(with_commas(124439808) == "124,439,808");
    CHECK(with_commas(-1) == "-1");
    CHECK(with_commas(-999) == "-999");
    CHECK(with_commas(-123456) == "-123,456");
    CHECK(with_commas(std::numeric_limits<int64_t>::min()) == "-9,223,372,036,854,775,808");
}

TEST_CASE("human_bytes keeps three digits") {
    CHECK(human_bytes(0) == "0 B");
    CHECK(human_bytes(1023) == "1023 B");
    CHECK(human_bytes(1024) == "1.00 KiB");
    CHECK(human_bytes(15 << 20) == "15.0 MiB");
    CHECK(human_bytes(int64_t(300) << 20) == "300 MiB");
    CHECK(human_bytes(6593445888) == "6.14 GiB");
}

TEST_CASE("plain_number keeps significant digits, and has no exponent") {
    CHECK(plain_number(1034.5) == "1,035");
    CHECK(plain_number(1e6) == "1,000,000");
    CHECK(plain_number(999.6) == "1,000");
    CHECK(plain_number(123.4) == "123");
    CHECK(plain_number(12.34) == "12.3");
    CHECK(plain_number(9.9996) == "10");
    CHECK(plain_number(4.0) == "4");
    CHECK(plain_number(0.25) == "0.25");
    CHECK(plain_number(1.234e-5) == "0.0000123");
    CHECK(plain_number(0.0) == "0");
    CHECK(plain_number(1012.46, 4) == "1,012");
    CHECK(plain_number(101.246, 4) == "101.2");
    CHECK(plain_number(std::numeric_limits<double>::infinity()) == "inf");
}

TEST_CASE("the clock of seconds_now never goes back") {
    const double a = seconds_now(), b = seconds_now();
    CHECK(b >= a);
}
