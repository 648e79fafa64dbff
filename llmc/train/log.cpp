#include "train/log.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <fcntl.h>
#include <optional>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/terminal.h"
#include "base/unicode.h"
#include "model/mfu.h"

using Json = nlohmann::ordered_json;

static constexpr int64_t LARGEST_LOG = int64_t(1) << 34;
static constexpr size_t MAX_UNWRITTEN = size_t(4) << 20;  // the lines of about 16,000 steps

// A live line needs a terminal that understands control sequences. Under mpirun stderr looks like a terminal even if it
// is a file, so --progress auto never chooses a live line under mpirun; --progress tty does.
static bool live_line_works(const std::string& progress) {
    if (progress != "auto") return progress == "tty";
    const char* term = getenv("TERM");
    const bool capable = term && *term && strcmp(term, "dumb") != 0;
    return capable && !getenv("OMPI_COMM_WORLD_SIZE") && isatty(STDOUT_FILENO) && isatty(STDERR_FILENO);
}

static int terminal_columns() {
    winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 120;
}

// ---- text

static std::string rate_text(double tokens_per_s) {
    if (tokens_per_s < 9999.5) return format("%.0f", tokens_per_s);
    if (tokens_per_s < 9999.5e3) return format("%.0fk", tokens_per_s / 1e3);
    return format("%.1fM", tokens_per_s / 1e6);
}

static std::vector<LinePart> step_parts(const LogOptions& o, const StepRecord& r, double tokens_per_s,
                                        double eta_seconds) {
    const int digits = int(std::to_string(o.total_steps).size());
    const double share = mfu(tokens_per_s, o.flops_per_token, o.peak_flops);
    std::vector<LinePart> parts = {
        {format("step %*lld/%lld", digits, static_cast<long long>(r.step), static_cast<long long>(o.total_steps)), 9},
        {format("loss %7.4f", double(r.loss)), 8},
        {format("norm %6.2f", double(r.grad_norm)), 1},
        {format("lr %.2e", double(r.lr)), 2},
        {r.step_ms < 1e5 ? format("%7.1f ms", r.step_ms) : format("%7.1f s ", r.step_ms / 1e3), 3},
        {format("%5s tok/s", rate_text(tokens_per_s).c_str()), 6}};
    if (o.peak_flops > 0) parts.push_back({share > 1.0 ? ">100% MFU" : format("%4.1f%% MFU", 100.0 * share), 4});
    parts.push_back({"eta " + duration_text(eta_seconds), 5});
    return parts;
}

static std::string join_parts(const std::vector<LinePart>& parts) {
    std::string line;
    for (const LinePart& part : parts) line += (line.empty() ? "" : " | ") + part.text;
    return line;
}

std::string step_line(const LogOptions& o, const StepRecord& r, double tokens_per_s, double eta_seconds) {
    return join_parts(step_parts(o, r, tokens_per_s, eta_seconds));
}

// Joins the parts, without those of lowest priority if all do not fit.
static std::string fit_line(std::vector<LinePart> parts, size_t columns) {
    const auto less = [](const LinePart& a, const LinePart& b) { return a.priority < b.priority; };
    while (parts.size() > 1 && join_parts(parts).size() > columns)
        parts.erase(std::min_element(parts.begin(), parts.end(), less));
    return join_parts(parts);
}

// ---- the terminal

static void clear_live_line(const Log& log) {
    if (!log.live_line.empty()) fputs("\r\033[K", stderr);
}

static void draw_live_line(Log& log) {
    const int columns = terminal_columns() - 1;
    std::string line = fit_line(log.live_line, size_t(columns));
    if (line.find("loss") == std::string::npos && !log.short_line.empty()) line = log.short_line;
    const ReaderWait wait;
    fprintf(stderr, "\r%.*s\033[K", columns, line.c_str());
    fflush(stderr);
    log.last_drawn = seconds_now();
}

// A failed write to stdout does not stop the run: it is reported once, and later lines are not printed.
static void print_line(Log& log, const std::string& text) {
    if (log.options.quiet || log.options.silent || log.stdout_broken) return;
    const ReaderWait wait;
    clear_live_line(log);
    const bool ok = fputs((text + "\n").c_str(), stdout) >= 0 && fflush(stdout) == 0;
    const int error = errno;
    if (!log.live_line.empty()) draw_live_line(log);
    if (ok) return;
    log.stdout_broken = true;
    log.warn(format("cannot write to stdout: %s; the run continues without it", strerror(error)));
}

// ---- log.jsonl

static void warn_above_peak(Log& log) {
    log.above_peak = true;
    log.warn(
        format("the run is faster than the peak of %s TFLOP/s, so MFU is unknown: a peak that is measured while the "
               "machine is busy is too low",
               plain_number(log.options.peak_flops / 1e12).c_str()));
}

static Json number(float value, const char* name, Json& object) {
    if (!std::isfinite(value)) {
        std::string names = object.value("non_finite", "");
        object["non_finite"] = names + (names.empty() ? "" : " ") + name;
        return nullptr;
    }
    char text[32] = {};  // the shortest digits that read back as this float: 0.0006, not 0.000600000028
    std::to_chars(text, text + sizeof(text) - 1, value);
    return Json(std::strtod(text, nullptr));
}

// Whether log.jsonl no longer names the open file, because that was removed or renamed. If the whole directory was
// moved, the file is still the log.
static bool is_removed(const Log& log) {
    struct stat open_file, named;
    if (fstat(log.fd, &open_file) != 0) return false;
    if (stat((log.options.output + "/log.jsonl").c_str(), &named) != 0)
        return errno == ENOENT && is_directory(log.options.output);
    return named.st_ino != open_file.st_ino || named.st_dev != open_file.st_dev;
}

// Writes all of the text, or sets errno and returns false.
static bool write_all(int fd, const std::string& text) {
    size_t done = 0;
    while (done < text.size()) {
        const ssize_t n = write(fd, text.data() + done, text.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        done += size_t(n);
    }
    return true;
}

static std::string what_stands_at(const std::string& path) {
    struct stat status = {};
    lstat(path.c_str(), &status);
    return S_ISDIR(status.st_mode)    ? "a directory"
           : S_ISLNK(status.st_mode)  ? "a link"
           : S_ISFIFO(status.st_mode) ? "a pipe"
                                      : "another file";
}

// Creates log.jsonl again after it was removed or renamed. Returns the reason of a failure; empty if the file was
// created. Another file of this name may belong to somebody else, so it is not used.
static std::string create_again(Log& log) {
    const std::string path = log.options.output + "/log.jsonl";
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST)
        return "the file was removed or renamed, and " + what_stands_at(path) + " stands in its place";
    if (fd < 0) return format("the file was removed or renamed, and cannot be created again: %s", strerror(errno));
    close(log.fd);
    log.fd = fd;
    log.written = 0;
    clear_live_line(log);
    print_message("warning: " + path + " was removed or renamed; it was created again, without the lines before");
    return "";
}

// Writes all lines of log.unwritten or none: if a write fails, the file is truncated to its earlier length. Returns
// the reason of the failure; empty if the lines were written.
static std::string write_lines(Log& log) {
    if (is_removed(log))
        if (const std::string reason = create_again(log); !reason.empty()) return reason;
    if (!write_all(log.fd, log.unwritten)) {
        const std::string reason = strerror(errno);
        const bool truncated = ftruncate(log.fd, log.written) == 0;
        return reason + (truncated ? "" : ", and its last line is incomplete");
    }
    log.written += int64_t(log.unwritten.size());
    log.unwritten.clear();
    log.unwritten_lines = 0;
    return "";
}

static void append_line(Log& log, const Json& object) {
    if (log.fd < 0) return;
    const std::string line = object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    if (std::find(log.of_resume_step.begin(), log.of_resume_step.end(), line) != log.of_resume_step.end()) return;
    const bool warned = log.unwritten_lines > 0;
    if (warned && log.unwritten.size() + line.size() > MAX_UNWRITTEN) {
        log.lost_lines++;
    } else {
        log.unwritten += line;
        log.unwritten_lines++;
    }
    const std::string reason = write_lines(log);
    if (reason.empty() || warned) return;
    clear_live_line(log);
    print_message(format(
        "warning: cannot write %s/log.jsonl: %s; the run continues and writes these lines if that becomes possible",
        log.options.output.c_str(), reason.c_str()));
}

static std::string utc_time() {
    const time_t now = time(nullptr);
    tm parts;
    gmtime_r(&now, &parts);
    char text[32];
    strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

static Json event(const char* kind, int64_t step) { return Json{{"kind", kind}, {"step", step}}; }

// The number of updates after which a line of an earlier start was written. A line of kind step counts the step's own
// update. -1: a line without a step (run, warning). No value: not a line of a log.
static std::optional<int64_t> step_of(const std::string& line) {
    const Json object = Json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("kind") || !object["kind"].is_string()) return {};
    if (!object.contains("step") || !object["step"].is_number_integer()) return -1;
    const int64_t step = object["step"].get<int64_t>();
    if (step < 0 || step > std::numeric_limits<int>::max()) return {};  // no run has such a step
    return object["kind"] == "step" ? step + 1 : step;
}

// Removes the lines that a run resumed at resume_step will write again. Returns the kept lines of resume_step itself.
static std::vector<std::string> cut_log(const std::string& path, int64_t resume_step) {
    std::vector<std::string> of_resume_step;
    if (!path_exists(path)) return of_resume_step;
    const std::string text = read_file(path, LARGEST_LOG);
    std::string kept;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\n', begin);
        if (end == std::string::npos) break;  // an incomplete last line
        const std::string line = text.substr(begin, end + 1 - begin);
        const std::optional<int64_t> step = step_of(line);
        if (step && *step <= resume_step) kept += line;
        if (step == resume_step) of_resume_step.push_back(line);
        begin = end + 1;
    }
    if (kept != text) replace_file(path, kept);
    return of_resume_step;
}

static std::string move_aside(const std::string& dir) {
    for (int i = 1;; i++) {
        const std::string to = format("%s/log.%d.jsonl", dir.c_str(), i);
        if (path_exists(to)) continue;
        rename_path(dir + "/log.jsonl", to);
        return to;
    }
}

Log::Log(const LogOptions& given) : options(given) {
    live = !options.quiet && live_line_works(options.progress);
    if (options.output.empty()) return;
    const std::string path = options.output + "/log.jsonl";
    if (options.resume_step >= 0) {
        of_resume_step = cut_log(path, options.resume_step);
    } else if (path_exists(path)) {
        note("the log of an earlier run was renamed to " + move_aside(options.output));
    }
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0 && errno == ELOOP)
        fail(EXIT_CANNOT_CREATE, "%s is a link, and the log is not written through links; remove or rename it",
             path.c_str());
    if (fd < 0) fail(EXIT_CANNOT_CREATE, "%s cannot be opened for writing: %s", path.c_str(), strerror(errno));
    written = lseek(fd, 0, SEEK_END);
}

Log::~Log() {
    finish();
    if (fd >= 0) close(fd);
}

// JSON cannot hold bytes that are not UTF-8, so run.json has U+FFFD instead. --resume refuses to read an
// option that contains U+FFFD.
static void warn_of_replaced_bytes(Log& log, const RunInfo& info) {
    const bool directory = !is_utf8(info.directory);
    if (log.options.output.empty() || (is_utf8(info.command_line) && !directory)) return;
    const Json options = info.options.empty() ? Json::object() : Json::parse(info.options);
    std::string again;
    for (const auto& [name, value] : options.items())
        if (name != "output" && value.is_string() && value.get<std::string>().find("\xef\xbf\xbd") != std::string::npos)
            again += " --" + name;
    log.warn("run.json has U+FFFD in place of bytes that are not UTF-8, so its command line cannot be repeated" +
             (again.empty() ? "" : "; --resume needs again" + again) +
             (directory ? "; --resume in another directory needs all paths again" : ""));
}

void Log::begin_run(const RunInfo& info) {
    Json json = {
        {"version", info.version},
        {"started", utc_time()},
        {"command_line", info.command_line},
        {"directory", info.directory},
        {"device", info.device},
        {"driver", info.driver},
        {"peak_flops", info.peak_flops},
        {"peak_source", info.peak_source},
        {"libraries", info.libraries},
        {"precision", info.precision},
        {"world_size", info.world_size},
        {"threads", info.threads},
        {"cpu_isa", info.cpu_isa},
        {"model",
         {{"layers", info.layers},
          {"heads", info.heads},
          {"channels", info.channels},
          {"vocab_size", info.vocab_size},
          {"positions", info.positions},
          {"parameters", info.parameters},
          {"flops_per_token", info.flops_per_token}}},
        {"data", {{"train", info.data}, {"tokens", info.train_tokens}, {"fingerprint", info.data_fingerprint}}},
        {"tokens_per_step", info.tokens_per_step},
        {"steps", info.steps},
        {"seed", info.seed},
        {"options", info.options.empty() ? Json::object() : Json::parse(info.options)}};
    if (info.cpu_isa.empty()) json.erase("cpu_isa");
    if (info.driver.empty()) json.erase("driver");
    if (options.resume_step >= 0) json["resumed_at"] = options.resume_step;
    Json line = {{"kind", "run"}};
    line.update(json);
    append_line(*this, line);
    if (!options.output.empty())
        replace_file(options.output + "/run.json", json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
    warn_of_replaced_bytes(*this, info);
}

void Log::table(const std::vector<Row>& rows) {
    for (const std::string& line : table_lines(rows)) print_line(*this, line);
}

void Log::note(const std::string& text) { print_line(*this, message_text(text)); }

void Log::warn(const std::string& text) {
    if (options.silent) return;
    clear_live_line(*this);
    print_message("warning: " + text);
    append_line(*this, Json{{"kind", "warning"}, {"text", text}});
}

// The means of time and of tokens have the same weights, so their quotient is the rate over the last steps.
static void update_means(Log& log, const StepRecord& r) {
    const double keep = 0.95;
    log.smoothed_ms = keep * log.smoothed_ms + (1.0 - keep) * r.step_ms;
    log.smoothed_tokens = keep * log.smoothed_tokens + (1.0 - keep) * double(r.step_tokens);
    log.weight = keep * log.weight + (1.0 - keep);
}

static double smoothed_rate(const Log& log) {
    return log.smoothed_ms > 0 ? 1e3 * log.smoothed_tokens / log.smoothed_ms : 0.0;
}

// The mean time starts at zero; dividing it by `weight` corrects for that.
static double remaining_seconds(const Log& log, int64_t step) {
    return 1e-3 * log.smoothed_ms / log.weight * double(log.options.total_steps - step - 1);
}

// Draws the live line, at most ten times a second, or prints every log_every-th line. The last step is always shown.
static void show_step(Log& log, const StepRecord& r) {
    const double tokens_per_s = smoothed_rate(log), eta = remaining_seconds(log, r.step);
    const bool last = r.step + 1 == log.options.total_steps;
    if (log.live) {
        log.live_line = log.last_step_line = step_parts(log.options, r, tokens_per_s, eta);
        log.short_line = format("%lld loss %.4f", static_cast<long long>(r.step), double(r.loss));
        if (last || seconds_now() - log.last_drawn >= 0.1) draw_live_line(log);
    } else if (last || r.step % log.options.log_every == 0) {
        print_line(log, step_line(log.options, r, tokens_per_s, eta));
    }
}

static void add_gpu(Json& json, const GpuSummary& gpu, bool several_ranks) {
    if (gpu.temperature_c > 0) {
        json["gpu_temperature_c"] = std::lround(gpu.temperature_c);
        if (several_ranks) json["gpu_hottest_rank"] = gpu.hottest_rank;
    }
    if (gpu.sm_mhz > 0) {
        json["gpu_sm_mhz"] = std::lround(gpu.sm_mhz);
        if (several_ranks) json["gpu_slowest_rank"] = gpu.slowest_rank;
    }
    if (gpu.power_w > 0) json["gpu_power_w"] = std::lround(gpu.power_w);
    if (gpu.clock_limits != 0) json["gpu_clock_limits"] = clock_limit_names(gpu.clock_limits);
}

// A step's line in log.jsonl. Its rate is that of this step alone.
static Json step_json(const LogOptions& o, const StepRecord& r) {
    Json json = event("step", r.step);
    json["tokens"] = r.tokens;
    json["loss"] = number(r.loss, "loss", json);
    json["grad_norm"] = number(r.grad_norm, "grad_norm", json);
    json["lr"] = number(r.lr, "lr", json);
    if (!r.skipped.empty()) json["skipped"] = r.skipped;
    const double rate = r.step_ms > 0 ? 1e3 * double(r.step_tokens) / r.step_ms : 0.0;
    json["step_ms"] = std::round(10.0 * r.step_ms) / 10.0;
    json["tokens_per_s"] = std::llround(rate);
    if (o.peak_flops > 0) json["mfu"] = std::round(1e4 * mfu(rate, o.flops_per_token, o.peak_flops)) / 1e4;
    json["loader_wait_ms"] = std::round(10.0 * r.loader_wait_ms) / 10.0;
    if (r.comm_bytes >= 0) {
        json["comm_exposed_ms"] = std::round(10.0 * r.comm_exposed_ms) / 10.0;
        json["comm_bytes"] = r.comm_bytes;
    }
    add_gpu(json, r.gpu, r.comm_bytes >= 0);
    return json;
}

void Log::step(const StepRecord& r) {
    update_means(*this, r);
    last_step = seconds_now();
    show_step(*this, r);
    if (!above_peak && mfu(smoothed_rate(*this), options.flops_per_token, options.peak_flops) > 1.0)
        warn_above_peak(*this);
    append_line(*this, step_json(options, r));
}

void Log::working(int64_t step, const char* what, int64_t done, int64_t of) {
    if (last_step == 0.0) last_step = seconds_now();
    const std::string text = format("%s %lld/%lld", what, static_cast<long long>(done), static_cast<long long>(of));
    const double now = seconds_now();
    if (live && now - last_step >= 1.0 && now - last_drawn >= 0.1) {
        live_line = last_step_line;
        live_line.push_back({text, 7});
        draw_live_line(*this);
    } else if (!live && now - last_step >= 60.0) {
        print_line(*this, format("step %lld/%lld | %s", static_cast<long long>(step),
                                 static_cast<long long>(options.total_steps), text.c_str()));
        last_step = now;
    }
}

void Log::val(int64_t step, double val_loss) {
    print_line(*this, format("step %*lld/%lld | val loss %.4f | perplexity %.2f",
                             int(std::to_string(options.total_steps).size()), static_cast<long long>(step),
                             static_cast<long long>(options.total_steps), val_loss, std::exp(val_loss)));
    Json json = event("val", step);
    json["val_loss"] = number(float(val_loss), "val_loss", json);
    append_line(*this, json);
}

void Log::sample(int64_t step, const std::string& text) {
    const std::string shown = stdout_is_terminal() ? terminal_text(text) : text;
    print_line(*this, format("--- sample at step %lld\n", static_cast<long long>(step)) + shown + "\n---");
    Json json = event("sample", step);
    json["text"] = text;
    append_line(*this, json);
}

void Log::checkpoint(int64_t step, const std::string& dir, double ms, double stall_ms) {
    print_line(*this, format("saved %s in %.1f s", message_text(dir).c_str(), 1e-3 * ms));
    Json json = event("checkpoint", step);
    json["dir"] = dir;
    json["ms"] = std::llround(ms);
    json["stall_ms"] = std::llround(stall_ms);
    append_line(*this, json);
}

int64_t Log::finish() {
    if (!live_line.empty()) {
        draw_live_line(*this);
        fputs("\n", stderr);
        live_line.clear();
    }
    if (unwritten_lines > 0) write_lines(*this);
    const int64_t missing = unwritten_lines + lost_lines;
    if (missing > 0)
        print_message(format("warning: %lld lines could not be written to %s/log.jsonl",
                             static_cast<long long>(missing), options.output.c_str()));
    unwritten.clear();
    unwritten_lines = lost_lines = 0;
    return missing;
}
