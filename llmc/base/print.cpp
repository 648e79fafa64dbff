#include "base/print.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

void prepare_standard_streams() {
    // stdout is opened read-only: a write to it then fails, and the program reports that its output is lost.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd < 2 ? O_RDONLY : O_WRONLY) != fd)
            fail(EXIT_IO, "standard stream %d is closed, and /dev/null cannot be opened: %s", fd, strerror(errno));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f`, write() then fails with EFBIG: a failed save, not a killed run
    setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
}

void print_stdout(const std::string& text) {
    if (fwrite(text.data(), 1, text.size(), stdout) == text.size() && fflush(stdout) == 0) return;
    fail(EXIT_IO, "cannot write to standard output: %s", strerror(errno));
}

void print_message(const std::string& text) { fprintf(stderr, "%s\n", message_text(text).c_str()); }

static int parent_of(int pid) {
    std::string line;
    std::ifstream stat(format("/proc/%d/stat", pid));  // 42 (name) S 41 ...
    std::getline(stat, line);
    int parent = 0;
    sscanf(line.c_str() + line.rfind(')') + 1, " %*c %d", &parent);
    return parent;
}

// Open MPI gives each rank a terminal of its own as stdout, and sends what comes there to the stdout of mpirun: the
// nearest process above this one that has another stdout. On other hosts that is a pipe.
bool stdout_is_terminal() {
    if (!getenv("OMPI_COMM_WORLD_SIZE") || !isatty(STDOUT_FILENO)) return isatty(STDOUT_FILENO);
    struct stat own, above, null;
    if (fstat(STDOUT_FILENO, &own) != 0 || stat("/dev/null", &null) != 0) return false;
    for (int pid = getppid(); stat(format("/proc/%d/fd/1", pid).c_str(), &above) == 0; pid = parent_of(pid))
        if (own.st_dev != above.st_dev || own.st_ino != above.st_ino)
            return S_ISCHR(above.st_mode) && above.st_rdev != null.st_rdev;
    return false;
}

std::string counted(int64_t count, const std::string& noun) {
    return with_commas(count) + " " + noun + (count == 1 ? "" : noun.ends_with("ch") ? "es" : "s");
}

std::string duration_text(double seconds) {
    if (!(seconds < 1e12)) return "?";
    const long long s = std::llround(std::max(seconds, 0.0)), minutes = (s + 30) / 60, days = s / 86400;
    if (s < 60) return format("%llds", s);
    if (minutes < 60) return format("%lldm", minutes);
    if (minutes < 24 * 60) return format("%lldh%02lldm", minutes / 60, minutes % 60);
    if (days < 100) return format("%lldd%02lldh", days, s / 3600 % 24);
    return format("%lld days", days);
}

// U+0080 to U+009F, in UTF-8 c2 80 to c2 9f, are control characters, too: U+009B starts escape codes like ESC [. A c2
// at the end may be the first half of one.
static std::string safe_text(const std::string& text, const char* kept) {
    std::string out;
    for (size_t i = 0; i < text.size(); i++) {
        const uint8_t c = uint8_t(text[i]), next = i + 1 < text.size() ? uint8_t(text[i + 1]) : 0x80;
        if (c == 0xc2 && next >= 0x80 && next < 0xa0)
            out += format("\\x%02x", i + 1 < text.size() ? uint8_t(text[++i]) : c);
        else if ((c < 0x20 || c == 0x7f) && (c == 0 || !strchr(kept, c)))
            out += format("\\x%02x", c);
        else
            out += text[i];
    }
    return out;
}

std::string message_text(const std::string& text) { return safe_text(text, ""); }

std::string terminal_text(const std::string& text) { return safe_text(text, "\n\t"); }

std::string shell_word(const std::string& text) {
    const auto harmless = [](char c) { return isalnum(static_cast<unsigned char>(c)) || strchr("_@%+=:,./-", c); };
    if (!text.empty() && std::all_of(text.begin(), text.end(), harmless)) return text;
    std::string out;
    for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
    return "'" + out + "'";
}

std::string table_text(const std::vector<Row>& rows) {
    size_t width = 0;
    for (const Row& row : rows) width = std::max(width, row.first.size());
    std::string text;
    for (const auto& [label, value] : rows)
        text += format("%-*s  %s\n", int(width), label.c_str(), message_text(value).c_str());
    return text;
}

void ProgressLine::show(const std::string& text) {
    last = seconds_now();
    drawn = isatty(STDERR_FILENO);
    fprintf(stderr, drawn ? "\r\033[K%s" : "%s\n", message_text(text).c_str());
}

void ProgressLine::clear() {
    if (drawn) fputs("\r\033[K", stderr);
    drawn = false;
}
