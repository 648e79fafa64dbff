// test_common.cpp: formatted text, errors and checked integers.
#include "base/common.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "support/refusal.h"

TEST_CASE("fail() throws an Error with the exit code and a message of any length") {
    const std::string longer(100000, 'x');
    CHECK(refusal([&] { fail(EXIT_BAD_DATA, "<%s> %d", longer.c_str(), 7); }) == "65 <" + longer + "> 7");
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
}

TEST_CASE("ceil_div rounds quotients up, round_up rounds to a multiple") {
    CHECK(ceil_div(0, 8) == 0);
    CHECK(ceil_div(8, 8) == 1);
    CHECK(ceil_div(9, 8) == 2);
    CHECK(round_up(50304, 128) == 50304);
    CHECK(round_up<int64_t>(int64_t(1) << 40 | 1, 64) == (int64_t(1) << 40) + 64);
}

TEST_CASE("narrow refuses numbers that do not fit in 32 bits") {
    CHECK(narrow(2147483647) == 2147483647);
    CHECK(narrow(-2147483648LL) == -2147483647 - 1);
    CHECK(refusal([] { narrow(2147483648LL); }).ends_with("2147483648 does not fit in 32 bits"));
    CHECK(refusal([] { narrow(-2147483649LL); }) != "");
}

TEST_CASE("numbers for people: thousands, bytes and significant digits") {
    for (const auto& [number, text] : {std::pair<int64_t, std::string>(999, "999"),
                                       {124439808, "124,439,808"},
                                       {-999, "-999"},
                                       {-123456, "-123,456"},
                                       {INT64_MIN, "-9,223,372,036,854,775,808"}})
        CHECK(with_commas(number) == text);
    for (const auto& [bytes, text] : {std::pair<int64_t, std::string>(1023, "1023 B"),
                                      {1024, "1.00 KiB"},
                                      {15 << 20, "15.0 MiB"},
                                      {300 << 20, "300 MiB"},
                                      {6593445888, "6.14 GiB"}})
        CHECK(human_bytes(bytes) == text);
    for (const auto& [number, text] :
         {std::pair(1034.5, "1,035"), std::pair(999.6, "1,000"), std::pair(123.4, "123"), std::pair(12.34, "12.3"),
          std::pair(9.9996, "10"), std::pair(0.25, "0.25"), std::pair(1.234e-5, "0.0000123"), std::pair(0.0, "0"),
          std::pair(1.0 / 0.0, "inf")})
        CHECK(plain_number(number) == text);
    CHECK(plain_number(101.246, 4) == "101.2");
}
