#include "train/log.h"

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sstream>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/tensorboard.h"
#include "infer/tasks.h"
#include "model/mfu.h"

static constexpr int64_t LARGEST_LOG = int64_t(1) << 34;

// ---- lines of text

static std::string rate_text(double tokens_per_s) {
    if (tokens_per_s < 9999.5) return format("%.0f", tokens_per_s);
    if (tokens_per_s < 9999.5e3) return format("%.0fk", tokens_per_s / 1e3);
    return format("%.1fM", tokens_per_s / 1e6);
}

// "step  1200/19560", with the numbers of all steps equally wide.
static std::string step_of_all(const LogOptions& o, int64_t step) {
    const std::string total = std::to_string(o.total_steps);
    return format("step %*lld/%s", int(total.size()), static_cast<long long>(step), total.c_str());
}

// Returns NaN for -NaN, which printf would print as -nan.
static double printed(double x) { return std::isnan(x) ? std::fabs(x) : x; }

std::string step_line(const LogOptions& o, const StepRecord& r, double tokens_per_s, double eta_seconds, size_t width) {
    std::vector<std::string> columns = {
        step_of_all(o, r.step),
        format("loss %7.4f", printed(r.loss)),
        format("norm %6.2f", printed(r.grad_norm)),
        format("lr %.2e", double(r.lr)),
        r.step_ms < 1e5 ? format("%7.1f ms", r.step_ms) : format("%7.1f s ", r.step_ms / 1e3),
        format("%5s tok/s", rate_text(tokens_per_s).c_str()),
        o.peak_flops > 0 ? format("%4.1f%% MFU", 100.0 * mfu(tokens_per_s, o.flops_per_token, o.peak_flops)) : "",
        "eta " + duration_text(eta_seconds)};
    const auto joined = [&] {
        std::string line;
        for (const std::string& column : columns) line += (line.empty() || column.empty() ? "" : " | ") + column;
        return line;
    };
    constexpr int norm = 2, lr = 3, ms = 4, speed = 5, share = 6, eta = 7;
    for (const int column : {norm, lr, ms, share, eta, speed})
        if (joined().size() > width) columns[column].clear();
    return joined();
}

// ---- the live line

// The line needs a terminal that understands control sequences. Under mpirun a file looks like one, too.
static bool has_terminal() {
    const char* term = getenv("TERM");
    const bool capable = term && *term && strcmp(term, "dumb") != 0;
    return capable && !getenv("OMPI_COMM_WORLD_SIZE") && isatty(STDOUT_FILENO) && isatty(STDERR_FILENO);
}

static size_t terminal_columns() {
    winsize size;
    return (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 120) - 1;
}

void Log::draw() {
    fprintf(stderr, "\r%.*s\033[K", int(terminal_columns()), line.c_str());
    fflush(stderr);
    drawn = seconds_now();
}

void Log::clear() {
    if (!line.empty()) fputs("\r\033[K", stderr);
}

// Prints a line on stdout. A failed write does not stop the run: it is reported once, and later lines are not printed.
void Log::print_line(const std::string& text) {
    if (options.quiet || options.silent || stdout_broken) return;
    clear();
    const bool ok = fputs((text + "\n").c_str(), stdout) >= 0 && fflush(stdout) == 0;
    const int error = errno;
    if (!line.empty()) draw();
    if (ok) return;
    stdout_broken = true;
    warn(format("cannot write to stdout: %s; the run continues without it", strerror(error)));
}

// ---- log.jsonl

// A line of log.jsonl: an object whose fields have the order of the calls.
struct LogLine {
    std::string text, non_finite;

    explicit LogLine(const char* kind) : text("{\"kind\":" + json_quoted(kind)) {}
    LogLine& add(const char* name, const std::string& value) {
        text += "," + json_quoted(name) + ":" + value;
        return *this;
    }
    LogLine& add(const char* name, int64_t value) { return add(name, std::to_string(value)); }
    LogLine& add(const char* name, double value, int decimals) { return add(name, format("%.*f", decimals, value)); }
    // Adds the shortest digits that read back as this float: 0.0006, not 0.000600000028.
    LogLine& add_float(const char* name, float value) {
        if (!std::isfinite(value)) {
            non_finite += (non_finite.empty() ? "" : " ") + std::string(name);
            return add(name, "null");
        }
        std::string digits;
        for (int precision = 6; digits.empty() || strtof(digits.c_str(), nullptr) != value; precision++)
            digits = format("%.*g", precision, double(value));
        return add(name, digits + (digits.find_first_of(".e") == digits.npos ? ".0" : ""));
    }
    std::string finished() const {
        return text + (non_finite.empty() ? "" : ",\"non_finite\":" + json_quoted(non_finite)) + "}";
    }
};

bool GrowingFile::append(const std::string& bytes) {
    unwritten += bytes;
    while (!unwritten.empty()) {
        const ssize_t written = write(fd, unwritten.data(), unwritten.size());
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        unwritten.erase(0, size_t(written));
    }
    return true;
}

static double wall_time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void Log::append(GrowingFile& file, const std::string& bytes) {
    if (file.fd < 0) return;
    const bool warned = !file.unwritten.empty();
    if (file.append(bytes) || warned) return;
    const int error = errno;
    clear();
    print_message(format("warning: cannot write %s: %s; the run continues, and tries again with each line",
                         file.path.c_str(), strerror(error)));
}

void Log::append(const std::string& object) {
    if (!opened) return early.push_back(object);
    append(lines, object + "\n");
    if (options.tensorboard) append(events, tensorboard::event_of_line(wall_time(), object));
}

// Whether a line of an earlier start stays in the log of a resumed run, which repeats all from resume_step on.
static bool stays(const std::string& line, int64_t resume_step) {
    char kind[16];
    long long step;
    const int fields = sscanf(line.c_str(), "{\"kind\":\"%15[a-z]\",\"step\":%lld", kind, &step);
    if (fields < 2) return fields == 1;  // run, warning; not a line of a log
    return kind == std::string("checkpoint") ? step <= resume_step : step < resume_step;
}

static void cut_log(const std::string& path, int64_t resume_step) {
    const std::string text = path_exists(path) ? read_file(path, LARGEST_LOG) : "";
    std::string kept;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
        const std::string line = text.substr(begin, end + 1 - begin);
        if (stays(line, resume_step)) kept += line;
    }
    if (kept != text) replace_file(path, kept);
}

static std::string move_aside(const std::string& dir) {
    for (int i = 1;; i++) {
        const std::string to = format("%s/log.%d.jsonl", dir.c_str(), i);
        if (path_exists(to)) continue;
        rename_path(dir + "/log.jsonl", to);
        return to;
    }
}

static GrowingFile open_to_append(const std::string& path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) fail(EXIT_CANNOT_CREATE, "%s cannot be opened for writing: %s", path.c_str(), strerror(errno));
    return {path, fd};
}

Log::Log(const LogOptions& given)
    : options(given), first_peak(given.peak_flops), live(!given.quiet && !given.silent && has_terminal()) {}

void Log::open_lines() {
    const std::string path = options.output + "/log.jsonl";
    if (options.resume_step >= 0) {
        cut_log(path, options.resume_step);
    } else if (path_exists(path)) {
        note("the log of an earlier run was renamed to " + move_aside(options.output));
    }
    lines = open_to_append(path);
}

// TensorBoard reads the files of a folder in the order of their names.
void Log::open_events() {
    const double now = wall_time();
    events = open_to_append(format("%s/events.out.tfevents.%.6f.%s", options.output.c_str(), now, host_name().c_str()));
    append(events, tensorboard::begin_file(now, std::max<int64_t>(options.resume_step, 0)));
}

void Log::open() {
    if (!options.output.empty()) open_lines();
    if (!options.output.empty() && options.tensorboard) open_events();
    opened = true;
    for (const std::string& object : early) append(object);
}

Log::~Log() {
    finish();
    for (const GrowingFile& file : {lines, events})
        if (file.fd >= 0) close(file.fd);
}

// ---- the lines of a run

void Log::begin_run(const std::string& info) {
    char started[32];
    const time_t now = time(nullptr);
    strftime(started, sizeof(started), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    LogLine line("run");
    line.add("started", json_quoted(started));
    if (options.resume_step >= 0) line.add("resumed_at", options.resume_step);
    append(line.text + (info == "{}" ? "" : ",") + info.substr(1));
}

void Log::table(const std::vector<Row>& rows) {
    const std::string text = table_text(rows);
    print_line(text.substr(0, text.size() - 1));
}

void Log::warn(const std::string& text) {
    if (options.silent) return;
    clear();
    print_message("warning: " + text);
    append(LogLine("warning").add("text", json_quoted(text)).finished());
}

// Returns a step's line in log.jsonl. Its rate is that of this step alone.
static std::string step_json(const LogOptions& o, double first_peak, const StepRecord& r) {
    LogLine line("step");
    line.add("step", r.step).add("tokens", r.tokens);
    line.add_float("loss", r.loss).add_float("grad_norm", r.grad_norm).add_float("lr", r.lr);
    if (!r.skipped.empty()) line.add("skipped", json_quoted(r.skipped));
    const double rate = r.step_ms > 0 ? 1e3 * double(r.step_tokens) / r.step_ms : 0.0;
    line.add("step_ms", r.step_ms, 1).add("tokens_per_s", rate, 0);
    if (o.peak_flops > 0) line.add("mfu", mfu(rate, o.flops_per_token, o.peak_flops), 4);
    if (o.peak_flops > first_peak) line.add("peak_flops", o.peak_flops, 0);
    line.add("loader_wait_ms", r.loader_wait_ms, 1);
    if (r.comm_bytes >= 0) line.add("comm_exposed_ms", r.comm_exposed_ms, 1).add("comm_bytes", r.comm_bytes);
    return line.finished();
}

double seconds_left(int64_t total_steps, int64_t step, double step_seconds, const PauseTimes& pauses) {
    double seconds = double(total_steps - step - 1) * step_seconds;
    for (const PauseTime& p : pauses) {
        if (p.count == 0) continue;
        const int64_t left = total_steps / p.every - step / p.every + (total_steps % p.every != 0);
        seconds += double(left) * p.seconds / p.count;
    }
    return seconds;
}

// Draws the live line, at most ten times a second, or prints every log_every-th line. The last step is always shown.
void Log::step(const StepRecord& r) {
    const double keep = std::min(0.95, double(steps) / double(steps + 1));  // the first steps have equal weights
    mean_ms = keep * mean_ms + (1.0 - keep) * r.step_ms;
    mean_tokens = keep * mean_tokens + (1.0 - keep) * double(r.step_tokens);
    steps++;
    const double tokens_per_s = mean_ms > 0 ? 1e3 * mean_tokens / mean_ms : 0.0;
    const double eta = seconds_left(options.total_steps, r.step, 1e-3 * mean_ms, pauses);
    const bool last = r.step + 1 == options.total_steps;
    if (live) {
        line = step_line(options, r, tokens_per_s, eta, terminal_columns());
        if (last || seconds_now() - drawn >= 0.1) draw();
    } else if (last || r.step % options.log_every == 0) {
        print_line(step_line(options, r, tokens_per_s, eta));
    }
    append(step_json(options, first_peak, r));
}

void Log::val(int64_t step, double val_loss, double bytes_per_token) {
    LogLine line("val");
    line.add("step", step).add_float("val_loss", float(val_loss));
    std::string text = format("%s | val loss %.4f | perplexity %.2f", step_of_all(options, step).c_str(),
                              printed(val_loss), std::exp(printed(val_loss)));
    if (bytes_per_token > 0) {
        const double bits = printed(val_loss) / (bytes_per_token * std::log(2.0));
        line.add_float("bits_per_byte", float(bits));
        text += format(" | %.4f bits per byte", bits);
    }
    if (const auto loss = options.reference.loss_at(step)) {
        line.add_float("reference_loss", float(*loss));
        const double distance = printed(std::fabs(val_loss - *loss));
        const char* side = distance < 0.00005 ? "from" : val_loss < *loss ? "below" : "above";
        text += format(" | %.4f %s %s", distance, side, options.reference.name.c_str());
    }
    print_line(text);
    append(line.finished());
}

void Log::eval(int64_t step, const TaskResult& r) {
    print_line(format("%s | %s: ", step_of_all(options, step).c_str(), message_text(r.task).c_str()) + r.text());
    LogLine line("eval");
    line.add("step", step).add("task", json_quoted(r.task)).add("rows", r.rows).add_float("acc", float(r.acc));
    line.add_float("acc_stderr", float(r.error_of(r.acc)));
    if (r.has_choices)
        line.add_float("acc_mean", float(r.acc_mean)).add_float("acc_norm", float(r.acc_norm));
    else
        line.add_float("perplexity", float(r.perplexity));
    append(line.finished());
}

void Log::sample(int64_t step, const std::string& text) {
    const std::string shown = stdout_is_terminal() ? terminal_text(text) : text;
    print_line(format("--- sample at step %lld\n", static_cast<long long>(step)) + shown + "\n---");
    append(LogLine("sample").add("step", step).add("text", json_quoted(text)).finished());
}

void Log::checkpoint(int64_t step, const std::string& dir, double ms, double stall_ms) {
    print_line(format("saved %s in %.1f s", message_text(dir).c_str(), 1e-3 * ms));
    LogLine line("checkpoint");
    line.add("step", step).add("dir", json_quoted(dir)).add("ms", ms, 0).add("stall_ms", stall_ms, 0);
    append(line.finished());
}

bool Log::finish() {
    if (!line.empty()) {
        draw();
        fputs("\n", stderr);
        line.clear();
    }
    bool complete = true;
    for (GrowingFile* file : {&lines, &events}) {
        if (file->append("")) continue;
        print_message(
            format("warning: %zu bytes could not be written to %s", file->unwritten.size(), file->path.c_str()));
        file->unwritten.clear();
        complete = false;
    }
    return complete;
}

// ---- the curve of another run

// Compiled in, so that an installed program has them in any folder.
static constexpr std::pair<const char*, const char*> curves[] = {
#include <curves.inc>  // the files of data/curves, by mk/version.mk
};

std::optional<double> Reference::loss_at(int64_t step) const {
    const auto next = losses.lower_bound(step);
    if (next == losses.end()) return {};
    if (next->first == step) return next->second;
    if (next == losses.begin() || std::prev(next)->first <= 0) return {};
    const auto [x, loss] = *std::prev(next);
    const double part = std::log(double(step) / double(x)) / std::log(double(next->first) / double(x));
    return loss + part * (next->second - loss);
}

// Leaves out an incomplete last line, and losses that are not finite, which are null.
static Reference read_curve(const std::string& text, const std::string& path) {
    Reference curve = {path, "", {}};
    std::istringstream lines(text.substr(0, text.rfind('\n') + 1));
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        const bool is_val = line.starts_with("{\"kind\":\"val\""), is_run = line.starts_with("{\"kind\":\"run\"");
        if (!is_val && !is_run) continue;
        const Json object = parse_json_object(line, format("%s, line %d", path.c_str(), number));
        curve.name = object.value("name", curve.name);
        curve.source = object.value("source", curve.source);
        if (is_val && object.at("val_loss").type != Json::null)
            curve.losses[object.at("step").get<int64_t>()] = object["val_loss"].get<double>();
    }
    if (curve.losses.empty())
        fail(EXIT_BAD_DATA, "--reference %s has no validation losses; give the log of a run that has", path.c_str());
    return curve;
}

// Whether the object has all members of `part`, and of its objects theirs.
static bool has_all(const Json& object, const Json& part) {
    return std::ranges::all_of(part.members, [&](const auto& member) {
        const Json& own = object[member.first];
        return member.second.type == Json::object ? has_all(own, member.second) : own == member.second;
    });
}

Reference find_reference(const std::string& option, const std::string& run) try {
    if (option == "none") return {};
    const std::string path = option + (is_directory(option) ? "/log.jsonl" : "");
    if (!option.empty()) return read_curve(read_file(path, LARGEST_LOG), path);
    for (const auto& [name, curve] : curves) {
        const std::string text = curve;
        const Json head = parse_json_object(text.substr(0, text.find('\n')), name);
        if (has_all(parse_json(run, "the run"), head.at("match"))) return read_curve(text, name);
    }
    return {};
} catch (const JsonError& error) {
    fail(EXIT_BAD_DATA, "--reference %s has a line that is not one of a log: %s", option.c_str(), error.what());
}
