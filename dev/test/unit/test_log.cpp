// test_log.cpp: tests the step line on the terminal, the lines of log.jsonl, the lines that a resumed run keeps, and
// output that cannot be written.
#include "train/log.h"

#include <doctest/doctest.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/tensorboard.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/temporary.h"

using nlohmann::json;

static std::vector<std::string> lines_of(const std::string& path) {
    std::istringstream text(read_bytes(path));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
}

static StepRecord record(int64_t step, float loss = 3.8121f, double step_ms = 140.0) {
    return {step, (step + 1) * 524288, 524288, loss, 0.41f, 5.93e-4f, step_ms};
}

static LogOptions steps(int64_t total, int64_t log_every = 1) {
    LogOptions o;
    o.total_steps = total, o.log_every = log_every;
    return o;
}

static LogOptions quiet(const std::string& output) {
    LogOptions o;
    o.output = output, o.quiet = true;
    return o;
}

static LogOptions with_peak(LogOptions o) {
    o.flops_per_token = 803261952.0, o.peak_flops = 8 * 989e12;
    return o;
}

// Runs code in a child process, and returns what it prints on stdout and stderr, which are a pipe, or a terminal with
// so many columns.
static std::string output_of(const std::function<void()>& code, int columns = 0) {
    winsize size = {24, static_cast<unsigned short>(columns), 0, 0};
    int ends[2], status = 1;
    REQUIRE(pipe(ends) == 0);
    fflush(stdout);
    const pid_t pid = columns > 0 ? forkpty(&ends[0], nullptr, nullptr, &size) : fork();
    if (pid == 0) {
        if (columns == 0) dup2(ends[1], 1), dup2(ends[1], 2);
        code();
        fflush(stdout);
        _exit(0);
    }
    close(ends[1]);
    std::string out;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) out.append(buffer, size_t(n));
    waitpid(pid, &status, 0);
    CHECK(status == 0);
    close(ends[0]);
    return out;
}

TEST_CASE("the step line has all columns, without those that a narrow terminal has no place for") {
    const LogOptions o = with_peak(steps(3000));
    for (const auto& [width, line] :
         {std::pair(100,
                    "step 2999/3000 | loss  3.8121 | lr 5.93e-04 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 43m"),
          std::pair(80, "step 2999/3000 | loss  3.8121 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 43m"),
          std::pair(60, "step 2999/3000 | loss  3.8121 | 3745k tok/s | eta 43m"),
          std::pair(30, "step 2999/3000 | loss  3.8121")})
        CHECK(step_line(o, record(2999), 3745000, 2570, size_t(width)) == line);
    StepRecord not_finite = record(2999);
    not_finite.loss = -std::nanf("");
    const std::string line_of_nan = step_line(steps(3000), not_finite, 1509, 2570);
    CHECK(line_of_nan.find("loss     nan") != line_of_nan.npos);  // printf would print -nan
    CHECK(step_line(steps(3000), record(2999), 1509, 2570) ==
          "step 2999/3000 | loss  3.8121 | norm   0.41 | lr 5.93e-04 |   140.0 ms |  1509 tok/s | eta 43m");
}

TEST_CASE("log.jsonl has one object per line with its keys in order, timing last") {
    const TemporaryDirectory dir;
    Log log(with_peak(quiet(dir.path)));
    log.open();
    log.begin_run(R"({"device":"2 threads, amx"})");
    log.step(record(0));
    log.val(1, 3.25);
    log.sample(1, "say \"hi\"\n\x1b\xff");
    log.checkpoint(1, "out/step_000001", 830.4, 12.6);
    log.warn("slow");
    StepRecord bad = record(2, INFINITY);
    bad.grad_norm = -INFINITY, bad.skipped = "non_finite";
    log.step(bad);
    const auto lines = lines_of(dir / "log.jsonl");
    REQUIRE(lines.size() == 7);
    CHECK(lines[0].starts_with(R"({"kind":"run","started":"20)"));
    CHECK(lines[0].ends_with(R"(Z","device":"2 threads, amx"})"));
    CHECK(lines[1] ==
          R"({"kind":"step","step":0,"tokens":524288,"loss":3.8121,"grad_norm":0.41,"lr":0.000593,"step_ms":140.0,)"
          R"("tokens_per_s":3744914,"mfu":0.3802,"loader_wait_ms":0.0})");
    CHECK(lines[2] == R"({"kind":"val","step":1,"val_loss":3.25})");
    CHECK(json::parse(lines[3])["text"] == "say \"hi\"\n\x1b\xef\xbf\xbd");
    CHECK(lines[4] == R"({"kind":"checkpoint","step":1,"dir":"out/step_000001","ms":830,"stall_ms":13})");
    CHECK(lines[5] == R"({"kind":"warning","text":"slow"})");
    CHECK(contains(lines[6], R"("loss":null,"grad_norm":null,"lr":0.000593,"skipped":"non_finite","step_ms":140.0,)"));
    CHECK(lines[6].ends_with(R"("non_finite":"loss grad_norm"})"));
}

TEST_CASE("after a higher peak is found, MFU is a fraction of that, and the line has it") {
    const TemporaryDirectory dir;
    Log log(with_peak(quiet(dir.path)));
    log.open();
    for (const double factor : {0.5, 2.0}) {
        log.raise_peak(factor * 8 * 989e12);
        log.step(record(0));
    }
    const auto lines = lines_of(dir / "log.jsonl");
    CHECK(contains(lines[0], R"("mfu":0.3802,"loader_wait_ms")"));
    CHECK(contains(lines[1], R"("mfu":0.1901,"peak_flops":15824000000000000,"loader_wait_ms")"));
}

TEST_CASE("the time left counts the pauses to come: every N steps, and after the last") {
    PauseTimes pauses = {{{10, 6.0, 3}, {20, 5.0, 1}, {}, {}}};                 // validation, tasks, no samples
    CHECK(seconds_left(100, 49, 0.5, pauses) == 50 * 0.5 + 6 * 2.0 + 3 * 5.0);  // nothing is known of saves
    pauses[size_t(Pause::save)] = {40, 1.5, 1};
    CHECK(seconds_left(100, 49, 0.5, pauses) == 50 * 0.5 + 6 * 2.0 + 3 * 5.0 + 2 * 1.5);  // saves at 80 and 100
    CHECK(seconds_left(100, 99, 0.5, pauses) == 2.0 + 5.0 + 1.5);
    CHECK(seconds_left(95, 94, 0.5, pauses) == 2.0 + 5.0 + 1.5);
    const std::string out = output_of([] {
        Log log(steps(3));
        log.pauses[size_t(Pause::validation)] = {1, 240.0, 2};
        log.step(record(0, 3.0f, 1000.0));
    });
    CHECK(contains(out, "| eta 6m\n"));  // 2 steps of 1 s, 3 validations of 120 s
}

TEST_CASE("resuming removes the lines after the checkpoint's step, and those that are not whole lines of a log") {
    const TemporaryDirectory dir;
    const std::string path = dir / "log.jsonl";
    LogOptions o = quiet(dir.path);
    o.resume_step = 4;
    Log(o).open();  // there is no log
    CHECK(read_bytes(path) == "");
    const auto line = [](const char* kind, int step) {
        return format("{\"kind\":\"%s\",\"step\":%d,\"x\":1}\n", kind, step);
    };
    std::string kept = "{\"kind\":\"run\",\"started\":\"\"}\n", removed = "[1,2]\n\nnonsense\n{\"kind\":7}\n{}\n";
    for (const char* kind : {"val", "sample", "step"}) {
        kept += line(kind, 0) + line(kind, 3);
        removed += line(kind, 4) + line(kind, 6);
    }
    kept += line("checkpoint", 4);
    removed += line("checkpoint", 6);
    write_bytes(path, kept + removed + "{\"kind\":\"step\",\"st");
    const std::string before = read_bytes(path);
    Log log(o);
    log.step(record(4));
    CHECK(read_bytes(path) == before);  // a start that fails leaves it whole
    log.open();
    CHECK(read_bytes(path).substr(0, kept.size()) == kept);
    CHECK(read_bytes(path).substr(kept.size()).starts_with("{\"kind\":\"step\",\"step\":4,"));
}

static std::string hex(const std::string& bytes) {
    std::string digits;
    for (const char c : bytes) digits += format("%02x", unsigned(uint8_t(c)));
    return digits;
}

// The bytes are those that protoc reads.
TEST_CASE("events of TensorBoard have the bytes of the format") {
    using namespace tensorboard;
    CHECK(hex(begin_file(1.0, 7))
              .starts_with("1800000000000000a37f4b2209000000000000f03f"
                           "1a0d627261696e2e4576656e743a3286bf577a"));
    CHECK(hex(record(1.0, 7, field(5, field(1, field(1, "loss") + "\x15" + bytes_of(2.5f))))) ==
          "1a00000000000000129bd82d09000000000000f03f10072a0d0a0b0a046c6f7373150000204087ccc43d");
    CHECK(hex(varint(0) + varint(127) + varint(128) + varint(300)) == "007f8001ac02");
    CHECK(contains(event_of_line(1.0, R"({"kind":"eval","step":3,"task":"piqa","acc":0.5})"), "eval/piqa/acc\x15"));
    for (const char* line : {R"({"kind":"run","step":1})", R"({"kind":"checkpoint","step":1,"ms":2})"})
        CHECK(event_of_line(1.0, line) == "");
}

TEST_CASE("a validation says how far its loss is from that of the reference at the same step") {
    const TemporaryDirectory dir;
    const std::string out = output_of([&] {
        LogOptions o = steps(1000);
        o.output = dir.path, o.reference = {"a run", "", {{100, 4.0}, {400, 2.0}}};
        Log log(o);
        log.open();
        for (const int step : {0, 200}) log.val(step, 3.5);
        for (const double loss : {1.75, 1.99996, 2.00004, 2.00006}) log.val(400, loss);
        log.val(400, NAN);
    });
    CHECK(contains(out, "step    0/1000 | val loss 3.5000 | perplexity 33.12\n"));
    CHECK(contains(out, "step  200/1000 | val loss 3.5000 | perplexity 33.12 | 0.5000 above a run\n"));
    CHECK(contains(out, "perplexity 5.75 | 0.2500 below a run\n"));
    CHECK(contains(out,
                   "2.0000 | perplexity 7.39 | 0.0000 from a run\nstep  400/1000 | val loss 2.0000 | perplexity "
                   "7.39 | 0.0000 from a run\nstep  400/1000 | val loss 2.0001 | perplexity 7.39 | 0.0001 above"));
    CHECK(contains(out, "val loss nan | perplexity nan | nan above a run\n"));
    const auto lines = lines_of(dir / "log.jsonl");
    CHECK(lines[0] == R"({"kind":"val","step":0,"val_loss":3.5})");
    CHECK(lines[1] == R"({"kind":"val","step":200,"val_loss":3.5,"reference_loss":3.0})");
}

TEST_CASE("a new run renames an older log and loses nothing") {
    const TemporaryDirectory dir;
    for (int run = 0; run < 3; run++) {
        Log log(quiet(dir.path));
        log.step(record(run));
        log.open();
    }
    int run = 0;
    for (const char* name : {"log.1.jsonl", "log.2.jsonl", "log.jsonl"})
        CHECK(json::parse(lines_of(dir / name)[0])["step"] == run++);
}

TEST_CASE("without a terminal plain lines are printed, every --log-every steps and for the last step") {
    const std::string out = output_of([] {
        Log log(steps(1000, 400));
        log.table({{"model", "d12"}, {"precision", "bf16"}});
        log.step(record(0, 3.0f, 1000.0));
        for (int step = 1; step < 1000; step++) log.step(record(step, 3.0f, 100.0));
    });
    CHECK(out.starts_with("model      d12\nprecision  bf16\nstep    0/1000 "));
    CHECK(std::count(out.begin(), out.end(), '\n') == 2 + 4);
    // The speed and the time left are those of the latest steps: 524,288 tokens in 1 s, then in 0.1 s.
    CHECK(contains(out, " |  1000.0 ms |  524k tok/s | eta 17m\n"));
    CHECK(contains(out, " |   100.0 ms | 5243k tok/s | eta 20s\nstep  999/1000 "));
    CHECK(out.find_first_of("\r\033") == std::string::npos);
    const std::string of_quiet_run = output_of([] {
        Log log(quiet(""));
        log.table({{"model", "d12"}});
        log.step(record(0));
        log.sample(1, "text");
        log.checkpoint(1, "dir", 1, 1);
        log.warn("careful");
    });
    CHECK(of_quiet_run == "warning: careful\n");
}

static void many_steps_on_terminal() {
    Log log(steps(3000));
    log.note("begin");
    for (int step = 0; step < 3000; step++) {
        log.step(record(step));
        if (step == 1500) log.val(1500, 3.25);
    }
}

TEST_CASE("on a terminal one line is rewritten, but not for each step, and no wider than the screen") {
    setenv("TERM", "xterm", 1);
    unsetenv("OMPI_COMM_WORLD_SIZE");
    const std::string out = output_of(many_steps_on_terminal, 60);
    for (const char* text : {"begin", "val loss 3.2500", "step 2999/3000"}) CHECK(contains(out, text));
    CHECK(std::count(out.begin(), out.end(), '\033') < 1000);  // ten lines per second
    size_t widest = 0, column = 0;
    for (const char c : out) {
        column = c == '\r' || c == '\n' ? 0 : column + 1;
        widest = std::max(widest, column);
    }
    CHECK(widest <= 59 + 3);    // and the three characters of ESC [ K
    setenv("TERM", "dumb", 1);  // a terminal that cannot move the cursor has plain lines
    CHECK_FALSE(contains(output_of(many_steps_on_terminal, 200), "\033"));
}

static void limit_file_size(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);  // writes beyond the limit then fail with EFBIG
    rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = std::min(bytes, limit.rlim_max);
    setrlimit(RLIMIT_FSIZE, &limit);
}

TEST_CASE("lines that do not fit on a full disk are written later, in their order, or counted") {
    const TemporaryDirectory dir;
    const std::string out = output_of([&] {
        Log log(quiet(dir.path));
        log.open();
        for (const int first : {0, 10}) {
            limit_file_size(first == 0 ? 500 : 2000);
            for (int step = first; step < first + 9; step++) log.step(record(step));
            limit_file_size(RLIM_INFINITY);
            log.step(record(first + 9));
        }
        if (!log.finish()) _exit(1);
        limit_file_size(3000);
        for (int step = 20; step < 30; step++) log.step(record(step));
        if (log.finish()) _exit(2);
        if (!log.finish()) _exit(3);  // lost lines are reported once
    });
    CHECK(contains(out, "log.jsonl: File too large; the run continues, and tries again with each line\n"));
    CHECK(contains(out, format(" bytes could not be written to %s/log.jsonl\n", dir.path.c_str())));
    CHECK(std::count(out.begin(), out.end(), '\n') == 4);  // one message for each of three failures
    const auto lines = lines_of(dir / "log.jsonl");
    REQUIRE(lines.size() >= 20);
    for (size_t step = 0; step < 20; step++) CHECK(json::parse(lines[step], nullptr, false)["step"] == step);
}

TEST_CASE("a log that cannot be opened is refused") {
    const std::string refused = refusal([] { Log(quiet("/none")).open(); });
    CHECK(contains(refused, "73 /none/log.jsonl cannot be opened for writing: No such file"));
}
