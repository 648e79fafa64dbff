// skip.h: skips checks that cannot run on this machine. Each call prints a line "SKIP  <test case>: <reason>", the same
// line only once. scripts/test.sh counts and lists these lines.
#pragma once
#include <string>

// Skips the whole case: the caller returns after this call. The case does not count as passed, even if it had checked
// something before.
void skip_case(const std::string& reason);
// Skips a part of the case, which the line names. The case continues, and passes if its other checks pass.
void skip_part(const std::string& part, const std::string& reason);
