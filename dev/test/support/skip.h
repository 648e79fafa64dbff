// skip.h: how a test says that it cannot check something here. Each call prints a line "SKIP  <test case>: <reason>",
// once, which scripts/test.sh counts and lists.
#pragma once
#include <string>

// The whole case: the caller returns after this call. The case does not count as passed, whatever it had checked
// before.
void skip_case(const std::string& reason);
// A part of the case, named in the line. The case goes on, and counts as passed when its other checks pass.
void skip_part(const std::string& part, const std::string& reason);
