#include "base/terminal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "base/common.h"
#include "base/unicode.h"

void prepare_standard_streams() {
    // stdout is opened read-only: a write to it then fails, and the program reports that its output is lost.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd < 2 ? O_RDONLY : O_WRONLY) != fd)
            fail(EXIT_IO, "standard stream %d is closed, and /dev/null cannot be opened instead: %s", fd,
                 strerror(errno));
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
}

static pid_t parent_of(pid_t process) {
    std::string line;
    std::getline(std::ifstream(format("/proc/%d/stat", int(process))), line);
    const size_t name_end = line.rfind(") ");  // 4711 (mpirun) S 4710 ...
    return name_end != line.npos && name_end + 4 < line.size() ? pid_t(atoi(line.c_str() + name_end + 4)) : 0;
}

// Whether mpirun's stdout is not a terminal, although mpirun gives each rank a terminal of its own. mpirun is an
// ancestor of the ranks on its host.
static bool mpirun_has_no_terminal() {
    if (!getenv("OMPI_COMM_WORLD_RANK")) return false;
    for (pid_t process = getppid(); process > 1; process = parent_of(process)) {
        const std::string folder = format("/proc/%d", int(process));
        std::string name;
        std::getline(std::ifstream(folder + "/comm"), name);
        if (name != "mpirun" && name != "mpiexec" && name != "orterun" && name != "prterun") continue;
        const int file = open((folder + "/fd/1").c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
        if (file < 0) return errno == ENXIO;  // a socket
        const bool terminal = isatty(file);
        close(file);
        return !terminal;
    }
    return false;
}

bool stdout_is_terminal() { return isatty(STDOUT_FILENO) && !mpirun_has_no_terminal(); }

ProgressLine::ProgressLine() : last(seconds_now()) {}

ProgressLine::~ProgressLine() {
    if (drawn) fputs("\n", stderr);
}

bool ProgressLine::due() const { return seconds_now() - last >= 1.0; }

void ProgressLine::show(const std::string& text) {
    last = seconds_now();
    drawn = isatty(STDERR_FILENO);
    fprintf(stderr, drawn ? "\r\033[K%s" : "%s\n", message_text(text).c_str());
}

void ProgressLine::clear() {
    if (drawn) fputs("\r\033[K", stderr);
    drawn = false;
}

void print_stdout(const std::string& text) {
    if (fwrite(text.data(), 1, text.size(), stdout) == text.size() && fflush(stdout) == 0) return;
    fail(EXIT_IO, "cannot write to standard output: %s", strerror(errno));
}

std::string counted(int64_t count, const std::string& noun) {
    const char* plural = noun.ends_with("ch") ? "es" : "s";
    return with_commas(count) + " " + noun + (count == 1 ? "" : plural);
}

std::string duration_text(double seconds) {
    constexpr double DAY = 86400.0, YEAR = 365.25 * DAY;
    if (!std::isfinite(seconds)) return "?";
    if (seconds >= 1000.0 * YEAR) return "1000+ years";
    if (seconds >= 10.0 * YEAR) return format("%.0f years", std::floor(seconds / YEAR));
    if (seconds >= 100.0 * DAY) return format("%.0f days", std::floor(seconds / DAY));
    const long long s = std::llround(std::max(seconds, 0.0));
    if (s < 60) return format("%llds", s);
    const long long minutes = (s + 30) / 60;
    if (minutes < 60) return format("%lldm", minutes);
    if (minutes < 24 * 60) return format("%lldh%02lldm", minutes / 60, minutes % 60);
    return format("%lldd%02lldh", s / 86400, s / 3600 % 24);
}

std::string terminal_text(const std::string& text) {
    TerminalText terminal;
    std::string out = terminal.add(text);
    return out + terminal.finish();
}

std::string message_text(const std::string& text) {
    std::string out;
    const char *p = text.data(), *end = p + text.size();
    for (Char c; p < end; p += c.bytes) {
        c = char_at(p, end);
        const std::string escape = c.valid ? escape_of(p, c) : format("\\x%02x", unsigned(uint8_t(*p)));
        if (escape.empty())
            out.append(p, size_t(c.bytes));
        else
            out += escape;
    }
    return out;
}

static std::string list_text(const std::string& message, const std::vector<std::string>& items) {
    std::string text = message_text(message);
    for (const std::string& item : items) text += "\n  " + message_text(item);
    return text;
}

ListError::ListError(int exit_code, const std::string& message, const std::vector<std::string>& items)
    : Error(exit_code, list_text(message, items)) {}

std::string error_text(const Error& error) {
    return dynamic_cast<const ListError*>(&error) ? error.what() : message_text(error.what());
}

void print_message(const std::string& text) {
    fprintf(stderr, "%s\n", message_text(text).c_str());
}

std::string shell_word(const std::string& text) {
    const auto harmless = [](char c) { return isalnum(static_cast<unsigned char>(c)) || strchr("_@%+=:,./-", c); };
    if (!text.empty() && std::all_of(text.begin(), text.end(), harmless)) return text;
    std::string out;
    for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
    return "'" + out + "'";
}

std::vector<std::string> table_lines(const std::vector<Row>& rows) {
    size_t width = 0;
    for (const Row& row : rows) width = std::max(width, row.first.size());
    std::vector<std::string> lines;
    for (const auto& [label, value] : rows)
        lines.push_back(format("%-*s  %s", int(width), label.c_str(), message_text(value).c_str()));
    return lines;
}
