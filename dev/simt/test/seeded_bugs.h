// seeded_bugs.h: shared by the tests of what the emulator reports. A report ends its process, so each bug runs in a
// child process, and its output and exit status are checked.
#pragma once
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/common.h"
#include "gpu/child_process.h"

#if defined(__has_feature)
#define HAS_FEATURE(x) __has_feature(x)
#else
#define HAS_FEATURE(x) 0
#endif
enum Build { PLAIN, ADDRESS, THREAD, MEMORY, STORES };
#if defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer)
constexpr Build BUILD = ADDRESS;
#elif defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)
constexpr Build BUILD = THREAD;
#elif HAS_FEATURE(memory_sanitizer)
constexpr Build BUILD = MEMORY;
#elif defined(SIMT_SEES_STORES)
constexpr Build BUILD = STORES;
#else
constexpr Build BUILD = PLAIN;
#endif

extern "C" const char* __tsan_default_options() { return "halt_on_error=1:atexit_sleep_ms=0:report_bugs=1"; }
extern "C" const char* __ubsan_default_options() { return "halt_on_error=1"; }

// The text that each build must print; null if the build need not detect the bug.
struct Expected {
    const char *plain, *address, *thread, *memory, *stores;
    Expected(const char* plain, const char* address, const char* thread, const char* memory, const char* stores)
        : plain(plain), address(address), thread(thread), memory(memory), stores(stores) {}
    Expected(const char* plain, const char* address, const char* thread, const char* memory)
        : Expected(plain, address, thread, memory, plain) {}
    Expected(const char* text) : Expected(text, text, text, text) {}
    static Expected only_stores(const char* text) { return {nullptr, nullptr, nullptr, nullptr, text}; }
};
inline const char* const wrong = "wrong result";
inline const char* const asan = "ERROR: AddressSanitizer";
inline const char* const race = "WARNING: ThreadSanitizer: data race";
inline const char* const order = "and no barrier orders them";
inline const char* const msan = "WARNING: MemorySanitizer: use-of-uninitialized-value";

// The bug must be reported in at least one of the runs, each with its own environment.
using Environment = std::map<std::string, std::string>;
inline void expect_report(const Expected& expected, const std::vector<Environment>& runs,
                          const std::function<void()>& bug) {
    const int call = run_in_child([&] {
        if (BUILD != ADDRESS) signal(SIGSEGV, SIG_DFL);  // removes doctest's handler
        bug();
    });
    const char* const text[] = {expected.plain, expected.address, expected.thread, expected.memory, expected.stores};
    if (call < 0 || !text[BUILD]) return;
    std::string outputs;
    for (const Environment& environment : runs) {
        const Child child(call, environment);
        const Ending e = child.wait();
        const std::string output = format("%s\n-- status %d\n", e.output.substr(0, 4000).c_str(), e.status);
        if (e.status != 0 && output.find(text[BUILD]) != std::string::npos) return;
        outputs += output;
    }
    CHECK_MESSAGE(false, "no run printed \"" << std::string(text[BUILD]) << "\", but:\n" << outputs);
}

inline void require(bool right, const std::string& what) {
    if (right) return;
    fprintf(stderr, "wrong result: %s\n", what.c_str());
    exit(3);
}
