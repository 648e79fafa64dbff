// common.h: errors with exit codes, formatted strings and checked integer arithmetic; included everywhere.
#pragma once
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

// Exit codes of the process. The values are those of sysexits.h where it has one.
enum ExitCode {
    EXIT_INTERNAL = 1,         // a bug, no memory, a failed device or network, or gradients that are not finite
    EXIT_USAGE = 2,            // invalid options
    EXIT_WEIGHTS_DIFFER = 17,  // ranks that must have the same weights have different ones: a machine is faulty
    EXIT_BAD_DATA = 65,        // a file exists, but its content is invalid
    EXIT_NO_INPUT = 66,        // a file is missing
    EXIT_CANNOT_CREATE = 73,   // an output cannot be created
    EXIT_IO = 74,              // reading or writing failed
    EXIT_PREEMPTED = 75,       // stopped on request after a save: --resume continues
    EXIT_WATCHDOG = 124,       // no progress until a deadline, because a rank, a device or a disk hangs
};

struct Error : std::runtime_error {
    int exit_code;
    Error(int exit_code, const std::string& what) : std::runtime_error(what), exit_code(exit_code) {}
};

// printf into a string.
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

// Throws Error. The text is one sentence for the user: what is wrong, the values, and what to try.
[[noreturn]] void fail(int exit_code, const char* text, ...) __attribute__((format(printf, 2, 3)));

// Throws Error (EXIT_USAGE) if options or a function's arguments are invalid. Use it for errors that a user can cause.
#define ENSURE(condition, ...)                           \
    do {                                                 \
        if (!(condition)) fail(EXIT_USAGE, __VA_ARGS__); \
    } while (0)

// Throws Error (EXIT_INTERNAL) if a condition is false that only a bug of this program can break. The text has the
// values: "internal error: 7 elements cannot be divided among 2 ranks; please report it".
#define INVARIANT(condition, ...)                                                                                     \
    do {                                                                                                              \
        if (!(condition)) fail(EXIT_INTERNAL, "internal error: %s; please report it", ::format(__VA_ARGS__).c_str()); \
    } while (0)

template <class Int>
constexpr Int ceil_div(Int a, Int b) {
    return (a + b - 1) / b;
}

template <class Int>
constexpr Int round_up(Int a, Int multiple) {
    return ceil_div(a, multiple) * multiple;
}

// Divides one memory block among arrays, which begin at multiples of `alignment` bytes. With base null it only counts
// bytes, so the plan and the allocation always agree. `used`: bytes from the base on.
struct Arena {
    void* base;
    int64_t used = 0, alignment = 256;

    template <class T>
    __attribute__((always_inline)) T* take(int64_t count) {
        const int64_t at = round_up<int64_t>(used, alignment);
        used = round_up<int64_t>(at + count * int64_t(sizeof(T)), alignment);
        return base ? reinterpret_cast<T*>(static_cast<char*>(base) + at) : nullptr;
    }
};

// Converts int64_t to int; refuses a value that does not fit.
inline int narrow(int64_t value) {
    ENSURE(value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
           "%lld does not fit in 32 bits", static_cast<long long>(value));
    return static_cast<int>(value);
}

std::string hex(uint64_t n);             // 16 digits
std::string with_commas(int64_t n);      // 124439808 -> "124,439,808"
std::string human_bytes(int64_t bytes);  // 6593445888 -> "6.14 GiB"
// A number of at least 0 with this many significant digits, or all digits before its point, and without an exponent:
// 1034.5 -> "1,035", 0.0001234 -> "0.000123", 4.0 -> "4".
std::string plain_number(double value, int digits = 3);
double seconds_now();     // monotonic clock
std::string host_name();  // the name of this machine

std::string version();                 // "train_gpt2 0.3.0 (commit 1234abc)"; without the commit if the build has none
extern const char SOURCES_CHECKSUM[];  // checksum of the sources that the program was built from
