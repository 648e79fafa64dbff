// test_tokenize_refused.cpp: tests options, inputs and outputs that `tokenize` refuses, and the files that remain after
// a run that was refused, failed or was killed.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/files.h"
#include "support/faults.h"
#include "support/small_tokenize.h"

static void check_refused(TokenizeRun& run, int exit_code, const char* message) {
    CHECK_THROWS_WITH_AS(tokenize(run.options), doctest::Contains(message), Error);
    try {
        tokenize(run.options);
    } catch (const Error& error) {
        CHECK(error.exit_code == exit_code);
    }
    if (is_directory(run.options.output))
        for (const std::string& name : list_directory(run.options.output)) CHECK_FALSE(name.ends_with(".bin"));
}

TEST_CASE("impossible options are refused") {
    TokenizeRun run;
    run.file("a.txt", "a");
    const auto refused = [&](auto change, const char* message) {
        const TokenizeOptions before = run.options;
        change(run.options);
        check_refused(run, EXIT_USAGE, message);
        run.options = before;
    };
    refused([](TokenizeOptions& o) { o.inputs.clear(); }, "name files or folders");
    refused([](TokenizeOptions& o) { o.output = ""; }, "needs --output");
    refused([](TokenizeOptions& o) { o.tokenizer = ""; }, "needs either --train-bpe");
    refused([](TokenizeOptions& o) { o.train_bpe = 300; }, "needs either --train-bpe");
    refused([](TokenizeOptions& o) { o.tokenizer = "", o.train_bpe = 256; }, "--train-bpe 256 must be 257");
    refused([](TokenizeOptions& o) { o.shard_tokens = 0; }, "--shard-tokens 0 must be 1 to");
    refused([](TokenizeOptions& o) { o.shard_tokens = int64_t(1) << 31; }, "--shard-tokens 2147483648");
    refused([](TokenizeOptions& o) { o.split = "words"; }, "--split words is not known");
}

TEST_CASE("inputs that are missing, empty or not text are refused") {
    TokenizeRun run;
    run.options.inputs = {run.folder / "missing.txt"};
    check_refused(run, EXIT_NO_INPUT, "missing.txt: there is no such file or folder");
    run.options.inputs = {run.folder / "in"};
    check_refused(run, EXIT_NO_INPUT, "in: holds no text file (.txt ");
    struct {
        const char *name, *bytes, *message;
    } const cases[] = {{"a.txt", "%PDF-1.7\n%xxxx", "is a PDF document, not text; convert it with pdftotext"},
                       {"a.txt", "\x1f\x8b\x08xxxx", "is compressed (gzip), not text; unpack it with gunzip"},
                       {"a.txt",
                        "\x28\xb5\x2f\xfd"
                        "xxxx",
                        "is compressed (zstd)"},
                       {"a.txt",
                        "\xff\xfe"
                        "a",
                        "is UTF-16, not text; convert it with iconv"},
                       {"a.jsonl", "PAR1xxxx", "is a Parquet file"},
                       {"a.txt", "", "a.txt: is empty"},
                       {"a.jsonl", "\n", "the 1 input files hold no text (1 bytes)"}};
    for (const auto& c : cases) {
        run.file(c.name, c.bytes);
        check_refused(run, EXIT_BAD_DATA, c.message);
        std::filesystem::remove(run.folder / (std::string("in/") + c.name));
    }
}

TEST_CASE("broken JSONL is refused, and the message has the first bad line, for any number of threads") {
    TokenizeRun run;
    const std::string good = "{\"text\": \"" + std::string(1000, 'a') + "\"}\n";
    std::string many;
    for (int i = 0; i < 5000; i++) many += good;  // more than two chunks
    struct {
        const char *line, *message;
    } const cases[] = {
        {"{\"text\": \"a\"",
         "a.jsonl:5002: is not valid JSON: it ends in the middle of a value, after 12 bytes; each line of this file "
         "must "
         "be one whole object {...}"},
        {"{\"text\": a}", "a.jsonl:5002: is not valid JSON at byte 10 of 11"},
        {"[1]", "a.jsonl:5002: is JSON, but not an object {...}; each line of this file must be one"},
        {"{\"body\": \"x\", \"n\": 1, \"title\": \"y\"}",
         "a.jsonl:5002: has no text under the key \"text\" (--text-key); "
         "keys with text: body, title"},
        {"{\"text\": 7}", "keys with text: none"},
        {"{\"text\": \"\xff\"}", "a.jsonl:5002: is not valid JSON"},
    };
    for (const auto& c : cases)
        for (int threads : {1, 4}) {
            run.options.threads = threads;
            run.file("a.jsonl", many + "\n" + c.line + "\n" + many + "broken\n");
            check_refused(run, EXIT_BAD_DATA, c.message);
        }
}

TEST_CASE("JSONL with numbers out of range, deep lists or unbalanced brackets is refused") {
    TokenizeRun run;
    const auto nested = [](int depth) { return std::string(size_t(depth), '[') + std::string(size_t(depth), ']'); };
    struct {
        std::string fields;
        const char* message;  // empty: the line is accepted
    } const cases[] = {
        {R"("a": {"x": 1, "y": 2}, "b": {"x": 1}, "c": [{"x": 1}, {"x": 1}], "x": 1)", ""},
        {R"("a": , "b": 1, "b": 1)", "a.jsonl:1: is not valid JSON"},
        {R"("a": 1e999)", "a number is out of range"},
        {R"("a": [null, true, -1, 2.5, 1])", ""},
        {R"("a": "\"[[{\\", "b": "[")", ""},
        {"\"a\": " + nested(99), ""},
        {"\"a\": " + nested(100), "a.jsonl:1: has more than 100 lists and objects inside each other"},
        {"\"a\": " + nested(1000000), "inside each other"},
        {"\"a\": " + nested(90) + "]", "a.jsonl:1: is not valid JSON at byte"},
    };
    for (const auto& c : cases) {
        CAPTURE(c.fields);
        run.file("a.jsonl", "{\"text\": \"the\", " + c.fields + "}\n");
        if (*c.message) {
            check_refused(run, EXIT_BAD_DATA, c.message);
            continue;
        }
        tokenize(run.options);
        CHECK(run.tokens("train_") == documents({"the"}));
        remove_tree(run.options.output);
    }
}

TEST_CASE("text too short for the vocabulary or for validation is refused") {
    TokenizeRun run;
    run.file("a.txt", "a text of few words");
    run.options.tokenizer = "", run.options.train_bpe = 5000;
    check_refused(run, EXIT_BAD_DATA, "too short for a vocabulary of 5000 tokens");
    run.options.train_bpe = 257, run.options.val_tokens = 1000;
    check_refused(run, EXIT_BAD_DATA, "was held out; lower --val-tokens");
    run.options.train_bpe = 5000, run.options.val_tokens = 0;
    run.file("a.txt", std::string(5000, 'x') + " one or two words");
    check_refused(run, EXIT_BAD_DATA, "5,000 bytes are in words of more than 1024 bytes, which are ignored");
}

TEST_CASE("an output that exists is refused, unless --replace is given") {
    TokenizeRun run;
    run.file("a.txt", "a");
    run.options.output = run.folder / "in/a.txt/out";
    check_refused(run, EXIT_CANNOT_CREATE, "in/a.txt is not a directory; give another name");
    run.options.output = run.folder / "out";
    tokenize(run.options);
    const std::string before = read_bytes(run.out("train_000001.bin"));
    CHECK_THROWS_WITH_AS(tokenize(run.options), doctest::Contains("already has token shards (train_000001.bin)"),
                         Error);
    CHECK(read_bytes(run.out("train_000001.bin")) == before);
    write_file(run.out("train_000007.bin"), before);
    write_file(run.out("other.bin"), "kept");
    run.file("a.txt", "another text");
    run.options.replace = true;
    tokenize(run.options);
    CHECK(read_bytes(run.out("train_000001.bin")) != before);
    CHECK_FALSE(path_exists(run.out("train_000007.bin")));
    CHECK(read_bytes(run.out("other.bin")) == "kept");
}

TEST_CASE("--replace deletes nothing if another run uses the output or the tokenizer is missing") {
    TokenizeRun run;
    run.file("a.txt", "a");
    tokenize(run.options);
    const std::string before = read_bytes(run.out("train_000001.bin"));
    run.options.replace = true;
    {
        const FileLock other(run.out("run.lock"));
        CHECK_THROWS_WITH_AS(tokenize(run.options), doctest::Contains("is in use by another run"), Error);
    }
    run.options.tokenizer = run.folder / "none", run.options.train_bpe = 0;
    CHECK_THROWS_AS(tokenize(run.options), Error);
    CHECK(read_bytes(run.out("train_000001.bin")) == before);
}

TEST_CASE("a full disk is an error, and leaves nothing of the run") {
    TokenizeRun run;
    run.file("a.txt", prose(100000));
    run.options.shard_tokens = 1000, run.options.threads = 1;
    const int code = in_child([&] {
        limit_file_size(5000);  // the shards fit, but tokenizer.json does not
        return tokenize(run.options);
    });
    CHECK(code == EXIT_IO);
    CHECK(list_directory(run.options.output).empty());
}

TEST_CASE("a second run with the same output is refused and changes nothing") {
    TokenizeRun run;
    run.file("a.txt", "a");
    {
        make_directories(run.options.output);
        const FileLock first(run.out("run.lock"));
        write_bytes(run.out("train_000001.bin.tmp"), "of the first");
        check_refused(run, EXIT_CANNOT_CREATE, "out is in use by another run: pid");
        CHECK(read_bytes(run.out("train_000001.bin.tmp")) == "of the first");
    }
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a"}));
    CHECK_FALSE(path_exists(run.out("run.lock")));
}

// Whether training would read only some of the shards.
static bool takes_a_part(const TokenizeRun& run, size_t shards) {
    try {
        return glob_files(run.out("train_*.bin"), "--train-data").size() != shards;
    } catch (const Error&) {
        return false;
    }
}

TEST_CASE("a run killed at any system call leaves either all of its shards or no readable shard") {
    TokenizeRun run;
    run.file("a.txt", prose(3000));
    run.options.shard_tokens = 400, run.options.threads = 1, run.options.val_fraction = 0.1;
    tokenize(run.options);
    const std::vector<std::string> names = list_directory(run.options.output);
    const auto is_train = [](const std::string& name) { return name.starts_with("train_") && name.ends_with(".bin"); };
    const size_t shards = size_t(std::count_if(names.begin(), names.end(), is_train));
    REQUIRE(shards > 2);
    const FaultTest killed = {
        .least_calls = 20,
        .prepare = [&](const TemporaryDirectory&) { remove_tree(run.options.output); },
        .run = [&](const TemporaryDirectory&) { tokenize(run.options); },
        .check =
            [&](const TemporaryDirectory&, const FaultResult&) {
                CHECK_FALSE(takes_a_part(run, shards));
                if (!is_directory(run.options.output)) return;
                const auto is_shard = [](const std::string& name) { return name.ends_with(".bin"); };
                const std::vector<std::string> left = list_directory(run.options.output);
                if (std::any_of(left.begin(), left.end(), is_shard)) {
                    CHECK(path_exists(run.out("tokenizer.json")));
                    CHECK(path_exists(run.out("special_tokens_map.json")));
                    return;
                }
                write_bytes(run.out("train_000099.bin.tmp"), "of a longer text");
                tokenize(run.options);
                CHECK(list_directory(run.options.output) == names);
            },
    };
    fault_at_each_call(0, killed);
}
