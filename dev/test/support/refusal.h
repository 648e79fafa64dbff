// refusal.h: the Error that a call throws, as a value that a test can compare.
#pragma once
#include <cstdlib>
#include <functional>
#include <string>

#include "base/common.h"

// Exit code and message of the Error that `call` throws, as "65 message". Empty if `call` throws none.
inline std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return format("%d %s", error.exit_code, error.what());
    }
    return "";
}

// The exit code of the Error that `call` throws, or 0.
inline int exit_code_of(const std::function<void()>& call) { return std::atoi(refusal(call).c_str()); }
