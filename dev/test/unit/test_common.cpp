// test_common.cpp: formatted text, errors and checked integers.
#include "base/common.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <utility>

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
