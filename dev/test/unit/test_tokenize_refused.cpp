// test_tokenize_refused.cpp: tests options, inputs and outputs that `tokenize` refuses, and the files that remain after
// a run that was refused, failed or was killed.
#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <functional>

#include "base/files.h"
#include "support/faults.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/small_tokenize.h"
#include "text/text_reader.h"

static std::string jsonl(const std::string& text) { return "{\"text\": \"" + text + "\"}\n"; }

static bool has_shards(const TokenizeRun& run) {
    if (!is_directory(run.options.output)) return false;
    const Texts names = list_directory(run.options.output);
    return std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.ends_with(".bin"); });
}

static void check_refused(TokenizeRun& run, int exit_code, const std::string& message) {
    const std::string refused = refusal([&] { tokenize(run.options); });
    CAPTURE(refused);
    CHECK(refused.starts_with(std::to_string(exit_code) + " "));
    CHECK(contains(refused, message));
}

TEST_CASE("impossible options are refused, and text too short for them") {
    const struct {
        int exit_code;
        const char* message;
        std::function<void(Options&)> change;
    } cases[] = {
        {EXIT_NO_INPUT, "none.txt: there is no such file or folder", [](auto& o) { o.inputs = {"none.txt"}; }},
        {EXIT_BAD_DATA, "were held out; lower --val-tokens", [](auto& o) { o.val_tokens = 10000; }},
        {EXIT_BAD_DATA, "5,000 bytes are in words of more than 1024 bytes, which are ignored",
         [](auto& o) { o.tokenizer = "", o.train_bpe = 5000; }},
    };
    for (const auto& c : cases) {
        TokenizeRun run(Files{{"a.txt", std::string(5000, 'x') + " a text of few words"}});
        c.change(run.options);
        check_refused(run, c.exit_code, c.message);
        CHECK_FALSE(has_shards(run));
    }
}

TEST_CASE("inputs that are empty or not text are refused, and JSONL that is broken") {
    const auto nested = [](int depth) { return std::string(size_t(depth), '[') + std::string(size_t(depth), ']'); };
    const struct {
        std::string name, bytes, message;
    } cases[] = {
        {"a.txt", "%PDF-1.7\n%xxxx", "is a PDF document, not text; convert it with pdftotext"},
        {"a.txt", "PK\3\4xxxx", "is a zip archive (also .npz, .pt, .docx), not text; unpack it with unzip"},
        {"a", "!<arch>\na.txt/          0           0     0     644     2         `\nab", "is an ar archive"},
        {"a", std::string("ab\0c", 4), "a: is no text: byte 3 is zero; if it is UTF-16"},
        {"a.txt", "(dp0\nVtext\np1\nVabc\np2\ns.", "is a Python pickle, not text; convert it to Parquet or JSON lines"},
        {"a.txt", "070707" + std::string(70, '0') + "b", "is a cpio archive, not text; unpack it with cpio -i"},
        {"a", "070701" + std::string(104, 'A') + "b", "is a cpio archive"},
        {"a.txt", std::string("]q\0X\3\0\0\0abcq\1a.", 15), "is a Python pickle, not text"},
        {"a.jsonl", "version https://git-lfs.github.com/spec/v1\n",
         "is a git-lfs pointer in place of the file, not text"},
        {"a.json", "<html>", "is a web page (HTML), not JSON or CSV; a download may have failed"},
        {"a.parquet", "x", "a.parquet: is no Parquet file; get it again"},
        {"a.Parquet.gz", "x", "a.Parquet.gz: is no Parquet file; get it again"},
        {"a.txt.gz", "", "is empty, and its name says that it is packed"},
        {"a.parquet", "", "is empty, and its name says that it is packed"},
        {"a.txt", "\xff\xfe.", "is UTF-16, not text; convert it with iconv"},
        {"a.txt", std::string("\xff\xfe\0\0.\0\0\0", 8), "is UTF-32, not text; convert it with iconv -f UTF-32"},
        {"a.txt", std::string("\0\0\xfe\xff\0\0\0.", 8), "is UTF-32, not text; convert it with iconv -f UTF-32"},
        {"a.txt", "", "a.txt: is empty"},
        {"a.jsonl", "\n", "the input (1 file) has no documents: it has no rows, or blank lines only"},
        {"a.csv", "text\n", "the input (1 file) has no documents"},
        {"a.csv", "text\ncaf\xe9\n", "a.csv:2: is not UTF-8; if it is Latin-1, convert the file with iconv"},
        {"a.csv", "text,\xe9t\xe9\nthe,1\n", "a.csv:1: is not UTF-8; if it is Latin-1"},
        {"a.csv", "text,id\n,1\n,2\n", "the input (1 file) has no text: 2 documents without any"},
        {"a.jsonl", "\n{\"text\": \"a\"\n",
         "a.jsonl:2: is not valid JSON: it ends in the middle of a value, after 12 bytes"},
        {"a.jsonl", "{\"text\": a}", "a.jsonl:1: is not valid JSON at byte 10 of 11"},
        {"a.jsonl", "{\"body\": \"x\", \"n\": 1}",
         "a.jsonl:1: has no text under the key \"text\" (--text-key): there is no such key; keys with text: body; "
         "--skip-bad-lines skips such lines"},
        {"a.jsonl", R"({"text": null})", "under the key \"text\" (--text-key): its type is null; --skip"},
        {"a.jsonl", R"({"text": ["x"]})", "its type is array"},
        {"a.jsonl", R"({"text": "a \ud800 b"})",
         "at byte 19 of 22: invalid string: surrogate U+D800..U+DBFF must be followed by U+DC00..U+DFFF"},
        {"a.jsonl", R"({"text": "a \udc00"})", "surrogate U+DC00..U+DFFF must follow U+D800..U+DBFF"},
        {"a.jsonl", "{\"text\": \"caf\xe9\"}", "invalid string: ill-formed UTF-8 byte"},
        {"a.jsonl", "{\"text\": \"a\tb\"}", "invalid string: control character U+0009 (HT) must be escaped"},
        {"a.jsonl", "{\"text\": \"x\"}\n{\"text\": \"y\", \"a\": \"\\ud800\t\"}", "a.jsonl:2: is not valid JSON"},
        {"a.jsonl", R"({"text": "x", "a": NaN, "b": "\q"})", "invalid string: forbidden character after backslash"},
        {"a.jsonl", R"({"text": "x", "\ud8zz": 1})", "invalid string: '\\u' must be followed by 4 hex digits"},
        {"a.jsonl", R"({"text": 1e999})", "its type is number"},
        {"a.jsonl", R"({"text": "x", "a": NaNa})", "is not valid JSON at byte"},
        {"a.jsonl", R"({"text": "x", "a": 1e999e5})", "is not valid JSON"},
        {"a", R"({"text": "x"} {"text": "y"})", "a:1: is not valid JSON at byte 15 of 27"},
        {"a", R"({"te\"xt" : "x" "y"})", "a:1: is not valid JSON"},
        {"a", R"({"text": "x)", "a:1: is not valid JSON: it ends in the middle of a value"},
        {"a.json", "[{\"text\": \"x\"}\n", "is not valid JSON: the ] of its array is missing"},
        {"a.json", R"([{"text": "x"},,{"text": "y"}])", "is not valid JSON: a , at a wrong place"},
        {"a.json", R"([{"text": "x"} {"text": "y"}])", "is not valid JSON: a { at a wrong place"},
        {"a.json", R"([{"text": "x"},])", "is not valid JSON: a ] at a wrong place"},
        {"a.json", R"(["a", 2])", R"(a.json:1: is not an object {...}; a JSON file must consist of them: {"text": )"},
        {"a.json", "[{\"text\": \"x\"}] 5", "a.json:1: is not an object"},
        {"a.json", "[\n{\"text\": \"x\n\"}]", "a.json:2: is not valid JSON"},
        {"a.csv", "id,body\n1,x\n", "a.csv:2: has no text under the key \"text\" (--text-key): there is no such key"},
        {"a.csv", "id,text\n1,x\n2,x,y\n", "a.csv:3: has 3 fields, and the first line has 2"},
        {"a.csv", "text,id,text\nx,1,y\n", "a.csv:1: names 2 columns \"text\"; give them different names"},
        {"a.tsv", "text\n\"x\n", "a.tsv:2: the quotes of a field have no end"},
        {"a.csv", "id,\"text\n1,x\n2,y\n", "a.csv:1: the quotes of a field have no end"},
        {"a.csv", "text,id\nx,1\n\"x\" y,1\n", "a.csv:3: has text behind the quotes of a field"},
        {"a.tsv", "text\tid\n\"x\t1\ny\t2\n\"z\t3\n", "a.tsv:2: has text behind the quotes of a field"},
        {"a.jsonl", R"({"text": "x", "a": )" + nested(100) + "}", "more than 100 lists and objects inside each other"},
    };
    for (const auto& c : cases) {
        CAPTURE(c.name);
        TokenizeRun run(Files{{c.name, c.bytes}});
        run.options.inputs = {run.folder / ("in/" + c.name)};
        check_refused(run, EXIT_BAD_DATA, c.message);
        CHECK_FALSE(has_shards(run));
    }
    TokenizeRun run(Files{{"a.jsonl", R"({"text": "the", "b": "\"[[{\\", "a": )" + nested(99) + "}\n"}});
    CHECK(run.train() == documents({"the"}));
}

TEST_CASE("a folder's text is read, and neither a run's log, a model's JSON, nor what is no text") {
    TokenizeRun run(Files{{"run/log.jsonl", "{\"kind\":\"run\"}\n{\"kind\":\"sample\",\"text\":\"x\"}\n"},
                          {"run/step_000001/README.md", "a model"},
                          {"run/step_000001/model.safetensors", ""},
                          {"config.json", "{\n  \"n_layer\": 2\n}\n"},
                          {"vocab.json", "{\"text\": \"x\"}"},
                          {"a.txt", "%PDF-1.7"},
                          {"a_labels.json", "[\"a\", {}]"},
                          {"a_sizes.json", " [ [-1, 2] ]"},
                          {"a_null.json", "null\n"},
                          {"a_truths.json", "[true, false]"},
                          {"b.csv", "id,n\n1,2\n"}});
    check_refused(run, EXIT_NO_INPUT, "in: holds no text file (.txt ");
    check_refused(run, EXIT_NO_INPUT,
                  "log.jsonl is without text under \"text\" (--text-key); " + run.folder / "in/run/step");
    run.file("c4/a.json", "{\"id\":1}\n" + jsonl("the") + jsonl("the"));
    check_refused(run, EXIT_BAD_DATA, "c4/a.json:1: has no text under the key");  // most have one
    run.file("c4/a.json", jsonl("the"));
    CHECK(run.train() == documents({"the"}));
    FoundFiles found = find_text_files({run.folder / "in"}, "text");
    CHECK(found.left_out["of other kinds"].size() == 3);
    CHECK(found.left_out["without text under \"text\" (--text-key)"].size() == 7);
}

TEST_CASE("the message has the first line that is broken, for any number of threads") {
    std::string many;
    for (int i = 0; i < 2500; i++) many += "{\"text\": \"" + std::string(1000, 'a') + "\"}\n";  // more than a chunk
    TokenizeRun run(Files{{"a.jsonl", many + "[1]\n" + many + "broken\n"}});
    for (int threads : {1, 4}) {
        omp_set_num_threads(threads);
        check_refused(run, EXIT_BAD_DATA, "a.jsonl:2501: is JSON, but not an object");
    }
}

TEST_CASE("--skip-bad-lines skips up to 1 % of the documents, for any number of threads and a vocabulary of the text") {
    std::string line = "{\"text\": \"";
    while (line.size() < 11000) line += "the theme ";
    line += "\"}\n";
    const auto file = [&](int bad) {
        std::string bytes;  // more than a chunk
        for (int i = 0; i < 200; i++) bytes += i % 60 == 50 && i / 60 < bad ? "{\"text\": null}\n" : line;
        return Files{{"a.jsonl", bytes}};
    };
    for (int threads : {1, 4}) {
        omp_set_num_threads(threads);
        TokenizeRun two(file(2)), three(file(3));
        for (TokenizeRun* run : {&two, &three}) {
            run->options.skip_bad_lines = true;
            if (threads == 4) run->options.tokenizer = "", run->options.train_bpe = 258;
        }
        const Tokens tokens = two.train();
        CHECK(std::count(tokens.begin(), tokens.end(), tokens[0]) == 198);
        check_refused(three, EXIT_BAD_DATA,
                      "3 bad lines in 200 documents, more than the 1 % that --skip-bad-lines skips; the first: " +
                          (three.folder / "in/a.jsonl:51: has no text"));
        CHECK_FALSE(has_shards(three));
    }
    std::string array = "[";  // of one line: what is no object costs no object
    for (int i = 0; i < 300; i++) array += i == 100 ? "null, " : i == 200 ? "\"a, ]b\", " : "{\"text\": \"the\"}, ";
    TokenizeRun one_line(Files{{"a.json", array + "{\"text\": \"the\"}]"}});
    one_line.options.skip_bad_lines = true;
    const Tokens tokens = one_line.train();
    CHECK(std::count(tokens.begin(), tokens.end(), tokens[0]) == 299);
}

TEST_CASE("--skip-bad-lines goes on behind a broken row, or counts all lines that it has taken") {
    const std::string rs = "\x1e", pretty = "{\n\"text\": \"the\"\n}\n";
    const struct {
        const char* name;
        std::string first, row, broken;
        const char* refused;  // "": 300 rows are read
    } cases[] = {
        {"a.jsonl", "{\"text\": \"cut\",\n", jsonl("the"), jsonl("the"), ""},
        {"a.jsonl", jsonl(std::string(1 << 20, ',')), jsonl("the"), "oops, \n", ""},
        {"a.json", pretty, jsonl("the"), "oops, \n", ""},
        {"a.json", pretty, pretty, "{\"n\": {\n", "298 bad lines in 202 documents"},
        {"a.json", rs + jsonl("the"), rs + jsonl("the"), rs + "{\"text\": \"cut\", \"n\": 1\n", ""},
        {"a.json", "[{\"text\": \"the\"}\n", ", {\"text\": \"the\"}",
         ", {\"text\": \"cut}, {\"text\": \"the\"}, {\"text\": \"the\"}, {\"text\": \"}\"}", "5 bad lines"},
        {"a.csv", "text,id\n", "the,1\n", "\"the,1\n", "100 bad lines in 300 documents"},
        {"a.csv", "text,id\n", "the,1\n", "\"the,1\n\"the\",1\nthe,1\n", ""},
    };
    for (const auto& c : cases) {
        std::string bytes = c.first;
        for (int i = 0; i < 300; i++) bytes += i == 200 ? c.broken : c.row;
        if (bytes[0] == '[') bytes += "]";
        TokenizeRun run(Files{{c.name, bytes}});
        run.options.inputs = {run.folder / ("in/" + std::string(c.name))};
        run.options.skip_bad_lines = true;
        CAPTURE(c.broken);
        if (*c.refused) {
            check_refused(run, EXIT_BAD_DATA, c.refused);
        } else {
            const Tokens tokens = run.train();
            CHECK(std::count(tokens.begin(), tokens.end(), tokens[0]) == 300);
        }
    }
}

TEST_CASE("an output that exists is refused, unless --replace is given") {
    TokenizeRun run(Files{{"a.txt", "a"}});
    run.options.output = run.folder / "in/a.txt/out";
    check_refused(run, EXIT_CANNOT_CREATE, "in/a.txt is not a directory; give another name");
    run.options.output = run.folder / "out";
    tokenize(run.options);
    const std::string before = read_bytes(run.out("train_000001.bin"));
    check_refused(run, EXIT_CANNOT_CREATE, "out/train_000001.bin already exists; delete the shards with --replace");
    run.options.replace = true;
    run.options.tokenizer = run.folder / "none";
    check_refused(run, EXIT_NO_INPUT, "none");
    CHECK(read_bytes(run.out("train_000001.bin")) == before);

    run.options.tokenizer = run.folder / "tokenizer.json";
    write_file(run.out("train_000007.bin"), before);
    write_file(run.out("other.bin"), "kept");
    run.file("a.txt", "another text");
    CHECK(run.train() == documents({"another text"}));
    CHECK(read_bytes(run.out("other.bin")) == "kept");
}

TEST_CASE("a second run with the same output is refused and changes nothing") {
    TokenizeRun run(Files{{"a.txt", "a"}});
    run.options.replace = true;
    make_directories(run.options.output);
    write_bytes(run.out("train_000001.bin"), "of the first");
    {
        const FileLock first(run.out("run.lock"));
        check_refused(run, EXIT_CANNOT_CREATE, "out is in use by another run: pid");
        CHECK(read_bytes(run.out("train_000001.bin")) == "of the first");
    }
    CHECK(run.train() == documents({"a"}));
    CHECK_FALSE(path_exists(run.out("run.lock")));
}

TEST_CASE("a full disk is an error, and leaves nothing of the run") {
    TokenizeRun run(Files{{"a.txt", prose(100000)}});
    run.options.shard_tokens = 1000;
    omp_set_num_threads(1);  // a fork has no threads
    // The shards fit, but tokenizer.json does not.
    CHECK(in_child([&] { return limit_file_size(5000), tokenize(run.options); }) == EXIT_IO);
    CHECK(list_directory(run.options.output).empty());
}

TEST_CASE("a run killed at any system call leaves either all of its shards or no readable shard") {
    TokenizeRun run(Files{{"a.txt", prose(1000)}});
    run.options.shard_tokens = 300, run.options.val_fraction = 0.1;
    omp_set_num_threads(1);
    tokenize(run.options);
    const Texts names = list_directory(run.options.output);
    const size_t shards = glob_files(run.out("train_*.bin"), "--train-data").size();
    REQUIRE(shards > 1);
    const FaultTest killed = {
        .least_calls = 20,
        .prepare = [&](const TemporaryDirectory&) { remove_tree(run.options.output); },
        .run = [&](const TemporaryDirectory&) { tokenize(run.options); },
        .check =
            [&](const TemporaryDirectory&, const FaultResult&) {
                size_t read = shards;  // by training, which may refuse them, but not take some of them
                exit_code_of([&] { read = glob_files(run.out("train_*.bin"), "--train-data").size(); });
                CHECK(read == shards);
                if (has_shards(run)) {
                    CHECK(load_tokenizer(run.options.output).tokens == tokenizer().tokens);
                } else if (is_directory(run.options.output)) {
                    write_bytes(run.out("train_000099.bin.tmp"), "of a longer text");
                    tokenize(run.options);
                    CHECK(list_directory(run.options.output) == names);
                }
            },
    };
    fault_at_each_call(0, killed);
}
