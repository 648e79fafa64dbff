// test_log.cpp: tests the step line on the terminal, the lines of log.jsonl, the lines that a resumed run keeps, and
// output that cannot be written. Child processes set up terminals, pipes and limits.
#include "train/log.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <pty.h>
#include <sstream>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "support/temporary.h"

using Json = nlohmann::json;

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

static std::vector<std::string> lines_of(const std::string& path) {
    std::istringstream text(read_bytes(path));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
}

static StepRecord record(int64_t step, float loss = 3.8121f, double step_ms = 140.0) {
    return {step, (step + 1) * 524288, 524288, loss, 0.41f, 5.93e-4f, step_ms};
}

static LogOptions options(const std::string& output, int64_t total_steps = 100) {
    LogOptions o;
    o.output = output, o.total_steps = total_steps;
    return o;
}

static LogOptions quiet(const std::string& output, int64_t total_steps = 100) {
    LogOptions o = options(output, total_steps);
    o.quiet = true;
    return o;
}

// Runs code in a child process. Its stdout and stderr are the given descriptors, or new files where those are negative.
struct Child {
    int exit_code;
    std::string out, err;
};
static Child run_child(const std::function<void()>& code, int out_fd = -1) {
    TemporaryDirectory dir;
    fflush(stdout), fflush(stderr);
    const pid_t pid = fork();
    if (pid == 0) {
        const int out = out_fd >= 0 ? out_fd : open((dir.path + "/out").c_str(), O_CREAT | O_WRONLY, 0600);
        const int err = open((dir.path + "/err").c_str(), O_CREAT | O_WRONLY, 0600);
        dup2(out, 1), dup2(err, 2);
        int exit_code = 0;
        try {
            code();
        } catch (const Error& error) {
            fprintf(stderr, "error: %s\n", error.what());
            exit_code = error.exit_code;
        }
        fflush(stdout), fflush(stderr);
        _exit(exit_code);
    }
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    const std::string out = out_fd >= 0 ? "" : read_bytes(dir.path + "/out");
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), out, read_bytes(dir.path + "/err")};
}

// The same, with stdout and stderr on a pseudo terminal.
static Child run_on_terminal(const std::function<void()>& code, int columns) {
    winsize size = {24, static_cast<unsigned short>(columns), 0, 0};
    int terminal;
    fflush(stdout), fflush(stderr);
    const pid_t pid = forkpty(&terminal, nullptr, nullptr, &size);
    REQUIRE(pid >= 0);
    if (pid == 0) {
        code();
        fflush(stdout), fflush(stderr);
        _exit(0);
    }
    Child child{0, "", ""};
    char buffer[4096];
    for (ssize_t n; (n = read(terminal, buffer, sizeof(buffer))) > 0;) child.out.append(buffer, size_t(n));
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    close(terminal);
    child.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return child;
}

TEST_CASE("the step line has step, loss, norm, rate, time, speed, MFU and time left") {
    LogOptions o = options("", 19560);
    o.flops_per_token = 803261952.0, o.peak_flops = 8 * 989e12;
    CHECK(
        step_line(o, record(1200), 3745000, 2570) ==
        "step  1200/19560 | loss  3.8121 | norm   0.41 | lr 5.93e-04 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 43m");
    o.peak_flops = 0;
    CHECK(step_line(o, record(1200), 1509, 2570) ==
          "step  1200/19560 | loss  3.8121 | norm   0.41 | lr 5.93e-04 |   140.0 ms |  1509 tok/s | eta 43m");
}

TEST_CASE("a narrow step line drops whole columns, and last the speed and the time left") {
    LogOptions o = options("", 3000);
    o.flops_per_token = 803261952.0, o.peak_flops = 8 * 989e12;
    const auto line = [&](size_t width) { return step_line(o, record(2999), 3745000, 0, width); };
    CHECK(line(100) == "step 2999/3000 | loss  3.8121 | lr 5.93e-04 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 0s");
    CHECK(line(80) == "step 2999/3000 | loss  3.8121 |   140.0 ms | 3745k tok/s | 38.0% MFU | eta 0s");
    CHECK(line(60) == "step 2999/3000 | loss  3.8121 | 3745k tok/s | eta 0s");
    CHECK(line(50) == "step 2999/3000 | loss  3.8121 | 3745k tok/s");
    CHECK(line(30) == "step 2999/3000 | loss  3.8121");
}

TEST_CASE("log.jsonl has one object per line with its keys in order, timing last") {
    TemporaryDirectory dir;
    {
        LogOptions o = quiet(dir.path);
        o.flops_per_token = 803261952.0, o.peak_flops = 8 * 989e12;
        Log log(o);
        log.step(record(0));
        log.val(1, 3.25);
        log.sample(1, "say \"hi\"\n\x1b\xff");
        log.checkpoint(1, "out/step_000001", 830.4, 12.6);
        log.warn("slow");
    }
    const auto lines = lines_of(dir.path + "/log.jsonl");
    REQUIRE(lines.size() == 5);
    CHECK(lines[0] ==
          R"({"kind":"step","step":0,"tokens":524288,"loss":3.8121,"grad_norm":0.41,"lr":0.000593,"step_ms":140.0,)"
          R"("tokens_per_s":3744914,"mfu":0.3802,"loader_wait_ms":0.0})");
    CHECK(lines[1] == R"({"kind":"val","step":1,"val_loss":3.25})");
    CHECK(Json::parse(lines[2])["text"] == "say \"hi\"\n\x1b\xef\xbf\xbd");
    CHECK(lines[3] == R"({"kind":"checkpoint","step":1,"dir":"out/step_000001","ms":830,"stall_ms":13})");
    CHECK(Json::parse(lines[4])["text"] == "slow");
}

TEST_CASE("a line is in the file as soon as it is logged") {
    TemporaryDirectory dir;
    Log log(quiet(dir.path));
    log.step(record(0));
    CHECK(lines_of(dir.path + "/log.jsonl").size() == 1);
}

TEST_CASE("NaN and infinity are written as null, and the line names the field") {
    TemporaryDirectory dir;
    {
        Log log(quiet(dir.path));
        log.step(record(0, NAN));
        StepRecord both = record(1, INFINITY);
        both.grad_norm = -INFINITY;
        log.step(both);
        log.val(2, NAN);
    }
    const auto lines = lines_of(dir.path + "/log.jsonl");
    CHECK(Json::parse(lines[0])["loss"].is_null());
    CHECK(Json::parse(lines[0])["non_finite"] == "loss");
    CHECK(Json::parse(lines[1])["non_finite"] == "loss grad_norm");
    CHECK(Json::parse(lines[1])["grad_norm"].is_null());
    CHECK(Json::parse(lines[2])["non_finite"] == "val_loss");
}

TEST_CASE("resuming removes the lines after the checkpoint's step, and an unfinished line") {
    TemporaryDirectory dir;
    const std::string path = dir.path + "/log.jsonl";
    {
        Log log(quiet(dir.path));
        log.begin_run("{}");
        for (int step = 0; step < 6; step++) {
            if (step == 4) log.checkpoint(4, "out/step_000004", 1, 1);
            if (step % 2 == 0) log.val(step, 3.0 + step), log.sample(step, "text");
            log.step(record(step));
        }
        log.checkpoint(6, "out/step_000006", 1, 1);
    }
    const auto before = lines_of(path);
    FILE* file = fopen(path.c_str(), "a");
    fputs("{\"kind\":\"step\",\"st", file);
    fclose(file);

    std::vector<std::string> kept;  // the lines that must remain, in their order
    for (const std::string& line : before) {
        const Json json = Json::parse(line);
        const int64_t step = json.value("step", int64_t(-1));
        if (json["kind"] == "checkpoint" ? step <= 4 : step < 4) kept.push_back(line);
    }
    CHECK(kept.size() == 1 + 4 + 4 + 1);  // run, steps 0-3, val and sample of 0 and 2, the checkpoint of 4
    LogOptions o = quiet(dir.path);
    o.resume_step = 4;
    {
        Log log(o);
        log.val(4, 7.0), log.sample(4, "text");
        log.step(record(4));
    }
    const auto after = lines_of(path);
    REQUIRE(after.size() == kept.size() + 3);
    for (size_t i = 0; i < kept.size(); i++) CHECK(after[i] == kept[i]);
    CHECK_FALSE(path_exists(dir.path + "/log.1.jsonl"));
}

TEST_CASE("resuming works without a log, and with lines that are not log lines") {
    TemporaryDirectory dir;
    LogOptions o = quiet(dir.path);
    o.resume_step = 1;
    { Log log(o); }
    replace_file(dir.path + "/log.jsonl", "[1,2]\n\nnonsense\n{\"kind\":7}\n{\"kind\":\"step\",\"step\":0}\n{}\n");
    { Log log(o); }
    CHECK(read_bytes(dir.path + "/log.jsonl") == "{\"kind\":\"step\",\"step\":0}\n");
}

TEST_CASE("a new run renames an older log and loses nothing") {
    TemporaryDirectory dir;
    for (int run = 0; run < 3; run++) {
        Log log(quiet(dir.path));
        log.step(record(run));
    }
    for (int run = 0; run < 3; run++) {
        const std::string name = run == 2 ? "/log.jsonl" : format("/log.%d.jsonl", run + 1);
        CHECK(Json::parse(lines_of(dir.path + name)[0])["step"] == run);
    }
}

TEST_CASE("the first line of the log describes the run") {
    TemporaryDirectory dir;
    {
        Log log(quiet(dir.path));
        log.begin_run(R"({"device":"2 threads, amx","data":{"fingerprint":"abc"}})");
    }
    const Json line = Json::parse(lines_of(dir.path + "/log.jsonl")[0]);
    CHECK(line["kind"] == "run");
    CHECK(line["started"].get<std::string>().size() == strlen("2026-01-31T12:00:00Z"));
    CHECK(line["device"] == "2 threads, amx");
    CHECK(line["data"]["fingerprint"] == "abc");
    CHECK_FALSE(line.contains("resumed_at"));
}

TEST_CASE("without a terminal a plain line is printed every --log-every steps and for the last step") {
    TemporaryDirectory dir;
    const Child child = run_child([&] {
        LogOptions o = options(dir.path, 10);
        o.log_every = 4;
        Log log(o);
        log.table({{"model", "d12"}, {"precision", "bf16"}});
        for (int step = 0; step < 10; step++) log.step(record(step));
    });
    CHECK(child.exit_code == 0);
    CHECK(child.err == "");
    CHECK(contains(child.out, "model      d12\nprecision  bf16\n"));
    CHECK(std::count(child.out.begin(), child.out.end(), '\n') == 2 + 4);
    for (const char* step : {"step  0/10", "step  4/10", "step  8/10", "step  9/10"}) CHECK(contains(child.out, step));
    CHECK_FALSE(contains(child.out, "\r"));
    CHECK_FALSE(contains(child.out, "\033"));
    CHECK(lines_of(dir.path + "/log.jsonl").size() == 10);
}

TEST_CASE("--quiet prints warnings only") {
    const Child child = run_child([&] {
        Log log(quiet(""));
        log.table({{"model", "d12"}});
        log.note("note");
        log.step(record(0));
        log.val(1, 3.0);
        log.sample(1, "text");
        log.checkpoint(1, "dir", 1, 1);
        log.warn("careful");
    });
    CHECK(child.out == "");
    CHECK(child.err == "warning: careful\n");
}

static void many_steps_on_terminal() {
    LogOptions o = options("", 3000);
    Log log(o);
    log.note("begin");
    for (int step = 0; step < 3000; step++) {
        log.step(record(step));
        if (step == 1500) log.val(1500, 3.25);
    }
}

TEST_CASE("on a terminal one line is rewritten, at most ten times a second and no wider than the screen") {
    setenv("TERM", "xterm", 1);
    unsetenv("OMPI_COMM_WORLD_SIZE");
    const double start = seconds_now();
    const Child child = run_on_terminal(many_steps_on_terminal, 60);
    const double seconds = seconds_now() - start;
    CHECK(child.exit_code == 0);
    CHECK(contains(child.out, "begin"));
    CHECK(contains(child.out, "val loss 3.2500"));
    CHECK(contains(child.out, "step 2999/3000"));
    CHECK(contains(child.out, "\033[K"));
    // Ten lines per second, the first and the last, and the lines that are redrawn after the validation and at the end.
    const auto drawn = std::count(child.out.begin(), child.out.end(), '\033');
    CHECK(double(drawn) <= 10 * seconds + 8);
    size_t widest = 0, column = 0;
    for (const char c : child.out) {
        column = c == '\r' || c == '\n' ? 0 : column + 1;
        widest = std::max(widest, column);
    }
    CHECK(widest <= 59 + 3);  // and the three characters of ESC [ K
}

TEST_CASE("a dumb terminal and output through mpirun get plain lines") {
    setenv("TERM", "dumb", 1);
    CHECK_FALSE(contains(run_on_terminal(many_steps_on_terminal, 200).out, "\033"));
    setenv("TERM", "xterm", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    CHECK_FALSE(contains(run_on_terminal(many_steps_on_terminal, 200).out, "\033"));
    unsetenv("OMPI_COMM_WORLD_SIZE");
}

TEST_CASE("a closed stdout does not stop the run, and is reported once") {
    TemporaryDirectory dir;
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    close(ends[0]);
    const Child child = run_child(
        [&] {
            prepare_standard_streams();
            Log log(options(dir.path, 10));
            for (int step = 0; step < 10; step++) log.step(record(step));
        },
        ends[1]);
    close(ends[1]);
    CHECK(child.exit_code == 0);
    CHECK(child.err == "warning: cannot write to stdout: Broken pipe; the run continues without it\n");
    const auto lines = lines_of(dir.path + "/log.jsonl");
    CHECK(lines.size() == 11);
    CHECK(contains(lines[0], "\"warning\""));
}

static void limit_file_size(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);  // writes beyond the limit then fail with EFBIG
    rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = std::min(bytes, limit.rlim_max);
    setrlimit(RLIMIT_FSIZE, &limit);
}

TEST_CASE("lines that do not fit on a full disk are written later, in their order") {
    TemporaryDirectory dir;
    const Child child = run_child([&] {
        Log log(quiet(dir.path, 20));
        for (const int first : {0, 10}) {
            limit_file_size(first == 0 ? 500 : 2000);
            for (int step = first; step < first + 9; step++) log.step(record(step));
            limit_file_size(RLIM_INFINITY);
            log.step(record(first + 9));
        }
        if (!log.finish()) _exit(1);
    });
    CHECK(child.exit_code == 0);
    CHECK(contains(child.err, "log.jsonl: File too large; the run continues, and tries again with each line\n"));
    CHECK(std::count(child.err.begin(), child.err.end(), '\n') == 2);  // one message for each failure
    const auto lines = lines_of(dir.path + "/log.jsonl");
    REQUIRE(lines.size() == 20);
    for (size_t step = 0; step < 20; step++) CHECK(Json::parse(lines[step], nullptr, false)["step"] == step);
}

TEST_CASE("lines that never fit on a full disk are counted") {
    TemporaryDirectory dir;
    const Child child = run_child([&] {
        limit_file_size(500);
        Log log(quiet(dir.path, 10));
        for (int step = 0; step < 10; step++) log.step(record(step));
        if (log.finish()) _exit(1);
        if (!log.finish()) _exit(2);  // lost lines are reported once
    });
    CHECK(child.exit_code == 0);
    CHECK(contains(child.err, format(" lines could not be written to %s/log.jsonl\n", dir.path.c_str())));
    CHECK(std::count(child.err.begin(), child.err.end(), '\n') == 2);
}

TEST_CASE("the log of a resumed run is not written through a link") {
    TemporaryDirectory dir;
    const std::string outside = dir.path + "/outside", out = dir.path + "/out",
                      line = "{\"kind\":\"step\",\"step\":1}\n";
    make_directories(out);
    write_bytes(outside, line);
    REQUIRE(symlink(outside.c_str(), (out + "/log.jsonl").c_str()) == 0);
    LogOptions options;
    options.output = out;
    options.resume_step = 5;
    CHECK_THROWS_WITH_AS(Log{options}, doctest::Contains("log.jsonl cannot be opened for writing"), Error);
    CHECK(read_bytes(outside) == line);
}

TEST_CASE("an output directory that cannot be written is refused, and the message names it") {
    const Child missing = run_child([] { Log log(quiet("/nonexistent/out")); });
    CHECK(missing.exit_code == EXIT_CANNOT_CREATE);
    CHECK(contains(missing.err, "/nonexistent/out/log.jsonl cannot be opened for writing: No such file or directory"));
}

TEST_CASE("tokens per second and the time left are computed from the latest steps") {
    const Child child = run_child([] {
        LogOptions o = options("", 1000);
        Log log(o);
        log.step(record(0, 3.0f, 1000.0));
        for (int step = 1; step < 500; step++) log.step(record(step, 3.0f, 100.0));
    });
    // After the first step: 524288 tokens in 1 s, and 999 steps left. After 500 steps: 5242880 tokens per second, and
    // 500 steps of 0.1 s left.
    CHECK(contains(child.out,
                   "step    0/1000 | loss  3.0000 | norm   0.41 | lr 5.93e-04 |  1000.0 ms |  524k tok/s | eta 17m"));
    CHECK(contains(child.out,
                   "step  499/1000 | loss  3.0000 | norm   0.41 | lr 5.93e-04 |   100.0 ms | 5243k tok/s | eta 50s"));
}
