#include "base/common.h"

#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <ctime>

static std::string vformat(const char* text, va_list args) {
    va_list args_copy;
    va_copy(args_copy, args);
    const int length = vsnprintf(nullptr, 0, text, args);
    std::string out(length > 0 ? length : 0, '\0');
    vsnprintf(out.data(), out.size() + 1, text, args_copy);
    va_end(args_copy);
    return out;
}

std::string format(const char* text, ...) {
    va_list args;
    va_start(args, text);
    std::string out = vformat(text, args);
    va_end(args);
    return out;
}

void fail(int exit_code, const char* text, ...) {
    va_list args;
    va_start(args, text);
    const std::string out = vformat(text, args);
    va_end(args);
    throw Error(exit_code, out);
}

std::string hex(uint64_t n) { return format("%016llx", static_cast<unsigned long long>(n)); }

std::string with_commas(int64_t n) {
    std::string digits = std::to_string(n);
    const int first = n < 0;
    for (int i = int(digits.size()) - 3; i > first; i -= 3) digits.insert(i, 1, ',');
    return digits;
}

std::string human_bytes(int64_t bytes) {
    if (bytes < 1024) return format("%d B", int(bytes));
    static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = double(bytes);
    int unit = 0;
    for (; value >= 1024.0 && unit < 5; unit++) value /= 1024.0;
    return format(value < 10 ? "%.2f %s" : value < 100 ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

std::string plain_number(double value, int digits) {
    if (!std::isfinite(value)) return format("%g", value);
    const int before_point = value > 0.0 ? int(std::floor(std::log10(value))) + 1 : 1;  // 0 or less below 0.1
    if (before_point >= digits) return with_commas(std::llround(value));
    std::string text = format("%.*f", digits - before_point, value);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text;
}

double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

std::string host_name() {
    char name[256] = {};  // Linux allows 64
    if (gethostname(name, sizeof(name) - 1) != 0 || !name[0]) return "localhost";
    return name;
}
