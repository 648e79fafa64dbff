// test_tokenize.cpp: the files that `tokenize` writes against documents encoded one by one; the rule for validation;
// the same bytes for every number of threads; bad input.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>

#include "base/files.h"
#include "base/output_lock.h"
#include "base/random.h"
#include "data/shard.h"
#include "support/faults.h"
#include "support/skip.h"
#include "support/temporary.h"
#include "text/text_reader.h"
#include "text/tokenize.h"
#include "text/tokenizer.h"

using Tokens = std::vector<int>;

// Bytes only, and a few merges.
static const Tokenizer& tokenizer() {
    static const Tokenizer t = [] {
        PieceCounts counts;
        counts.add_text("the theme of these others is there in the thesis, in another thing");
        return train_bpe(counts, 257 + 20);
    }();
    return t;
}

struct Run {
    TemporaryDirectory folder;
    TokenizeOptions options;

    Run() {
        save_tokenizer(tokenizer(), folder.path, 128);
        std::filesystem::create_directory(folder / "in");
        options.tokenizer = folder / "tokenizer.json";
        options.output = folder / "out";
        options.inputs = {folder / "in"};
        options.val_fraction = 0.0;
        options.quiet = true;
    }
    void file(const std::string& name, const std::string& bytes) { write_bytes(folder / ("in/" + name), bytes); }
    std::string out(const std::string& name) const { return options.output + "/" + name; }

    // All tokens of train_* or val_*.
    Tokens tokens(const std::string& set) const {
        Tokens all;
        for (const std::string& name : list_directory(options.output)) {
            if (!name.starts_with(set)) continue;
            const Shard shard = open_shard(out(name));
            all.resize(all.size() + size_t(shard.tokens));
            read_tokens(shard, 0, shard.tokens, tokenizer().vocab_size(), all.data() + all.size() - shard.tokens);
        }
        return all;
    }
};

static Tokens documents(const std::vector<std::string>& texts) {
    Tokens out;
    for (const std::string& text : texts) {
        out.push_back(tokenizer().end_of_text);
        const Tokens tokens = encode(tokenizer(), text);
        out.insert(out.end(), tokens.begin(), tokens.end());
    }
    return out;
}

// Words over lines of ten, some with white space of more than one byte; at least that many bytes.
static std::string prose(size_t bytes, uint64_t seed = 1) {
    static const char* words[] = {"the", "theme", "others", "in", "it's", "there", "42", "\u3000", "caf\u00e9", "--"};
    const Philox random{seed, 0};
    std::string text;
    for (uint64_t i = 0; text.size() < bytes; i++) {
        text += words[random(i)[0] % std::size(words)];
        text += i % 10 == 9 ? "\n" : " ";
    }
    return text;
}

static void check_refused(Run& run, int exit_code, const char* message) {
    CHECK_THROWS_WITH_AS(tokenize(run.options), doctest::Contains(message), Error);
    try {
        tokenize(run.options);
    } catch (const Error& error) {
        CHECK(error.exit_code == exit_code);
    }
    if (is_directory(run.options.output))
        for (const std::string& name : list_directory(run.options.output)) CHECK_FALSE(name.ends_with(".bin"));
}

TEST_CASE("a text file is one document, after <|endoftext|>; the tokenizer is beside the shards") {
    Run run;
    run.file("b.txt", "the theme <|endoftext|> of these\n\nothers");
    run.file("a.md", "first");
    CHECK(tokenize(run.options) == 0);
    CHECK(run.tokens("train_") == documents({"first", "the theme <|endoftext|> of these\n\nothers"}));
    CHECK(list_directory(run.options.output) == std::vector<std::string>{"merges.txt", "special_tokens_map.json",
                                                                         "tokenizer.json", "tokenizer_config.json",
                                                                         "train_000001.bin", "vocab.json"});
    CHECK(load_tokenizer(run.options.output).tokens == tokenizer().tokens);
}

TEST_CASE("folders are searched by name; hidden and other files are left out, named files are taken") {
    Run run;
    std::filesystem::create_directories(run.folder / "in/z/y");
    std::filesystem::create_directories(run.folder / "in/.git");
    run.file("z/y/c.txt", "c");
    run.file("z/b.rst", "b");
    run.file("a.jsonl", "{\"text\": \"a\"}");
    run.file(".git/x.txt", "hidden");
    run.file(".x.txt", "hidden");
    run.file("z/x.py", "program");
    write_bytes(run.folder / "named", "named");
    run.options.inputs.push_back(run.folder / "named");
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a", "b", "c", "named"}));
}

TEST_CASE("a file that is given twice is taken once: by its name, its folder, a link") {
    Run run;
    std::filesystem::create_directory(run.folder / "in/z");
    run.file("a.txt", "a");
    run.file("b.txt", "b");
    run.file("c.csv", "c");
    run.file("z/d.csv", "d");
    run.file("z/e", "e");
    std::filesystem::create_symlink(run.folder / "in/a.txt", run.folder / "in/z/link.txt");
    std::filesystem::create_hard_link(run.folder / "in/b.txt", run.folder / "hard");
    const std::string folder = run.folder / "in";
    run.options.inputs = {folder + "/b.txt", folder, folder + "/./z", folder + "//c.csv", run.folder / "hard"};
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"b", "a", "c"}));
    const FoundFiles found = find_text_files(run.options.inputs, run.options.output);
    CHECK(found.left_out == std::set<std::string>{folder + "/z/d.csv", folder + "/z/e"});
    REQUIRE(found.repeated.size() == 4);
    CHECK(found.repeated[0] == std::pair{folder + "/b.txt", folder + "/b.txt"});
    CHECK(found.repeated[1] == std::pair{folder + "/z/link.txt", folder + "/a.txt"});
    CHECK(found.repeated[3] == std::pair{run.folder / "hard", folder + "/b.txt"});
}

TEST_CASE("the merges.txt of the output is no input") {
    Run run;
    run.file("a.txt", "a");
    run.options.output = run.folder / "in";
    tokenize(run.options);
    std::filesystem::remove(run.out("train_000001.bin"));
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a"}));
}

TEST_CASE("a byte order mark is dropped") {
    Run run;
    run.file("a.txt", "\xef\xbb\xbfthe");
    run.file("b.jsonl", "\xef\xbb\xbf{\"text\": \"b\"}");
    run.file("c.txt", "\xef\xbb\xbf");
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"the", "b"}));
}

// Of a file of more than a MiB the first MiB, in whose last bytes a character may begin.
TEST_CASE("text that is not UTF-8 is noticed") {
    Run run;
    const auto invalid_byte = [&](const std::string& bytes) {
        run.file("a.txt", bytes);
        return find_text_files({run.folder / "in/a.txt"}, run.options.output).files[0].invalid_utf8;
    };
    const std::string mib(1 << 20, 'a');
    CHECK(invalid_byte("") == -1);
    CHECK(invalid_byte("café") == -1);
    CHECK(invalid_byte("caf\xe9") == 3);
    CHECK(invalid_byte("caf\xe9 au lait") == 3);
    CHECK(invalid_byte("\xed\xa0\x80") == 0);  // a surrogate
    for (size_t before = 0; before < 5; before++) {
        CHECK(invalid_byte(mib.substr(before) + "\U0001f600") == -1);
        CHECK(invalid_byte(mib.substr(before) + "\xe9") == (before < 1 ? -1 : int64_t(mib.size() - before)));
    }
    CHECK(invalid_byte(mib.substr(4) + "\xe9" + mib) == int64_t(mib.size() - 4));
}

TEST_CASE("JSONL: one document a line, blank lines and empty texts left out, escapes decoded") {
    Run run;
    run.file("a.jsonl",
             "{\"text\": \"one\\n\\u00e9\\ud83d\\ude00\", \"n\": 1}\r\n\n{\"text\": \"\"}\n  \n{\"text\": \"two\"}");
    run.file("b.ndjson", "{\"text\": \"three\"}\n");
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"one\né😀", "two", "three"}));
}

TEST_CASE("split by blank lines, and by <|endoftext|>") {
    Run run;
    run.file("a.txt", "one\n\ntwo\r\n\r\nthree\n\n\n\n\nfour\n");
    run.options.split = "blank-lines";
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"one\n\n", "two\r\n\r\n", "three\n\n", "\nfour\n"}));

    Run marked;
    marked.file("a.txt", "\n<|endoftext|>\none\n<|endoftext|>  two two <|endoftext|><|endoftext|>\nthree");
    marked.options.split = "end-of-text";
    tokenize(marked.options);
    CHECK(marked.tokens("train_") == documents({"one", "two two", "three"}));
}

// Chunks are 2 MiB: the borders fall into the file's one document.
TEST_CASE("chunks and threads leave no trace") {
    const std::string text = prose(5 << 20);
    Run run;
    run.file("a.txt", text);
    run.file("b.jsonl", "{\"text\": \"" + std::string(3 << 20, 'x') + "\"}\n{\"text\": \"short\"}\n");
    run.file("c.txt", std::string(5 << 20, 'y'));
    Tokens first;
    for (int threads : {1, 2, 7}) {
        run.options.threads = threads;
        tokenize(run.options);
        const Tokens got = run.tokens("train_");
        if (threads == 1) first = documents({text, std::string(3 << 20, 'x'), "short", std::string(5 << 20, 'y')});
        CHECK(got == first);
        remove_tree(run.options.output);
    }
}

TEST_CASE("chunks leave no trace in split files") {
    std::string text;
    std::vector<std::string> sections;
    for (uint64_t i = 0; i < 3000; i++) sections.push_back(prose(1000, i) + "x\n\n");
    for (const std::string& section : sections) text += section;
    Run run;
    run.file("a.txt", text);
    run.options.split = "blank-lines";
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents(sections));
}

TEST_CASE("shards are filled to the token") {
    Run run;
    const std::string text = prose(20000);
    run.file("a.txt", text);
    run.options.shard_tokens = 1000;
    tokenize(run.options);
    const Tokens want = documents({text});
    CHECK(run.tokens("train_") == want);
    for (int i = 1; i <= int(want.size()) / 1000; i++)
        CHECK(open_shard(run.out(format("train_%06d.bin", i))).tokens == 1000);
    CHECK(open_shard(run.out(format("train_%06d.bin", int(want.size()) / 1000 + 1))).tokens ==
          int64_t(want.size()) % 1000);
}

TEST_CASE("a vocabulary above 65536 gives shards of version 2") {
    Run run;
    std::vector<std::pair<int, int>> merges;
    for (int i = 0; i < 65536 - 256; i++) merges.push_back({i / 256, i % 256});  // all pairs of bytes but the last 256
    for (int i = 0; i < 10; i++) merges.push_back({256 + i, 0});
    save_tokenizer(tokenizer_from_merges(merges), run.folder.path, 128);
    run.file("a.txt", "!!!");
    tokenize(run.options);
    const Shard shard = open_shard(run.out("train_000001.bin"));
    CHECK(shard.bytes_per_token == 4);
    Tokens tokens(2);
    REQUIRE(shard.tokens == 2);
    read_tokens(shard, 0, 2, 65536 + 11, tokens.data());
    CHECK(tokens == Tokens{65546, 65536});
}

// ---- validation

TEST_CASE("validation: a single small file gives its end, from a line's start") {
    Run run;
    const std::string text = prose(20000);
    run.file("a.txt", text);
    run.options.val_fraction = 0.1;
    tokenize(run.options);
    const size_t cut = text.find('\n', size_t(double(text.size()) * 0.9)) + 1;
    CHECK(run.tokens("train_") == documents({text.substr(0, cut)}));
    CHECK(run.tokens("val_") == documents({text.substr(cut)}));
    CHECK(path_exists(run.out("val_000000.bin")));
}

TEST_CASE("validation: a last line that is longer than what is held out is cut at a space") {
    Run run;
    const std::string text = prose(2000) + "the others " + std::string(50, 'x') + " " + std::string(50, 'x') + "\n";
    run.file("a.txt", text);
    run.options.val_fraction = 0.04;
    tokenize(run.options);
    const size_t cut = text.rfind(' ');
    CHECK(run.tokens("train_") == documents({text.substr(0, cut)}));
    CHECK(run.tokens("val_") == documents({text.substr(cut)}));
}

TEST_CASE("validation: every document of 64 KiB gives its end, of others the second of every k") {
    const std::string text = prose(100000);
    const size_t cut = text.find('\n', size_t(double(text.size()) * 0.75)) + 1;
    Run run;
    std::vector<std::string> train, val;
    for (int i = 0; i < 12; i++) {
        const std::string small = prose(50, uint64_t(i));
        run.file(format("%02d.txt", i), i == 6 ? text : small);
        if (i == 6)
            train.push_back(text.substr(0, cut)), val.push_back(text.substr(cut));
        else
            (i % 4 == 1 ? val : train).push_back(small);
    }
    run.options.val_fraction = 0.25;
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents(train));
    CHECK(run.tokens("val_") == documents(val));
}

TEST_CASE("validation: lines of JSONL by the same rule") {
    const std::string text(100000, 'z'), head(75000, 'z');
    Run run;
    std::vector<std::string> train, val;
    std::string lines;
    for (int i = 0; i < 10; i++) {
        const std::string small = format("document %d", i);
        lines += "{\"text\": \"" + (i == 5 ? head + "\\n" + std::string(25000, 'z') : small) + "\"}\n";
        if (i == 5)
            train.push_back(head + "\n"), val.push_back(std::string(25000, 'z'));
        else
            (i % 4 == 1 ? val : train).push_back(small);
    }
    run.file("a.jsonl", lines);
    run.options.val_fraction = 0.25;
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents(train));
    CHECK(run.tokens("val_") == documents(val));
}

TEST_CASE("validation: about the fraction that was asked for") {
    for (double fraction : {0.01, 0.05, 0.2, 0.5}) {
        Run run;
        std::string lines;
        for (int i = 0; i < 1000; i++) lines += "{\"text\": \"" + std::string(40, 'a') + "\"}\n";
        run.file("a.jsonl", lines);
        run.file("b.txt", prose(200000));
        run.options.val_fraction = fraction;
        tokenize(run.options);
        const double train = double(run.tokens("train_").size()), val = double(run.tokens("val_").size());
        CHECK(val / (train + val) ==
              doctest::Approx(fraction).epsilon(0.02));  // a line of prose, and one document in k
    }
}

TEST_CASE("validation: the first tokens, as llm.c has them") {
    Run run;
    const std::string text = prose(5000);
    run.file("a.txt", text);
    run.file("b.txt", text);
    run.options.val_tokens = 700;
    run.options.val_fraction = 0.1;
    tokenize(run.options);
    const Tokens all = documents({text, text});
    CHECK(run.tokens("val_") == Tokens(all.begin(), all.begin() + 700));
    CHECK(run.tokens("train_") == Tokens(all.begin() + 700, all.end()));
}

TEST_CASE("tinyshakespeare, cut at blank lines, is llm.c's, byte for byte") {
    const std::string data = "../shared/data";
    if (!path_exists(data + "/gpt2-bpe") || !path_exists(data + "/tinyshakespeare")) {
        skip_case("no gpt2-bpe and tinyshakespeare in " + data);
        return;
    }
    Run run;
    run.options.tokenizer = data + "/gpt2-bpe";
    run.options.inputs = {data + "/tinyshakespeare/input.txt"};
    run.options.split = "blank-lines";
    run.options.val_tokens = 32768;
    tokenize(run.options);
    CHECK(sha256_of(run.out("val_000000.bin")) == "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62");
    CHECK(sha256_of(run.out("train_000001.bin")) == "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8");
}

// ---- a trained vocabulary

TEST_CASE("a vocabulary trained on the text: the same for every number of threads") {
    Run run;
    run.file("a.txt", prose(3 << 20, 1));
    run.file("b.jsonl", "{\"body\": \"the others\"}\n");
    run.options.tokenizer = "", run.options.train_bpe = 290, run.options.text_key = "body";
    std::string first;
    for (int threads : {1, 3}) {
        run.options.threads = threads;
        tokenize(run.options);
        const std::string merges = read_bytes(run.out("merges.txt")) + read_bytes(run.out("train_000001.bin"));
        if (threads == 1) first = merges;
        CHECK(merges == first);
        remove_tree(run.options.output);
    }
    PieceCounts counts;
    counts.add_text(prose(3 << 20, 1)), counts.add_text("the others");
    tokenize(run.options);
    CHECK(load_tokenizer(run.options.output).tokens == train_bpe(counts, 290).tokens);
}

// ---- what is refused

TEST_CASE("options that cannot be") {
    Run run;
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
    refused([](TokenizeOptions& o) { o.threads = -1; }, "--threads -1");
}

TEST_CASE("inputs that are not there, or are no text") {
    Run run;
    run.options.inputs = {run.folder / "missing.txt"};
    check_refused(run, EXIT_NO_INPUT, "missing.txt: there is no such file or folder");
    run.options.inputs = {run.folder / "in"};
    check_refused(run, EXIT_NO_INPUT, "in: holds no text file (.txt ");
    struct {
        const char *name, *bytes, *message;
    } const cases[] = {{"a.txt", "\x1f\x8b\x08xxxx", "is compressed (gzip), not text; unpack it with gunzip"},
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

TEST_CASE("broken JSONL: the file and the line, the first of them with any number of threads") {
    Run run;
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

// A parser that searches the whole list at the end of each object in it takes minutes of CPU for this line, others less
// than a second. The limit is one of CPU time, and of what a sanitizer needs.
TEST_CASE("JSONL: a long list of objects takes no longer than as much of anything else") {
    Run run;
    std::string list;
    for (int i = 0; i < 600000; i++) list += i ? ",{\"a\":1}" : "{\"a\":1}";
    run.file("a.jsonl", "{\"text\": \"the others\", \"spans\": [" + list + "]}\n");
    run.options.threads = 1;
    const int code = in_child([&] {
        const rlimit limit{30, 30};
        setrlimit(RLIMIT_CPU, &limit);
        return tokenize(run.options);
    });
    CHECK(code == 0);
}

TEST_CASE("JSON: what is checked beside the syntax") {
    Run run;
    const auto nested = [](int depth) { return std::string(size_t(depth), '[') + std::string(size_t(depth), ']'); };
    struct {
        std::string fields;
        const char* message;  // empty: it is taken
    } const cases[] = {
        {R"("a": {"x": 1, "y": 2}, "b": {"x": 1}, "c": [{"x": 1}, {"x": 1}], "x": 1)", ""},
        {R"("a": [{"x": 1}, {"x": 1, "y": [], "x": 2}])", "a.jsonl:1: the key \"x\" occurs twice"},
        {R"("a": {"x": {"x": 1}, "x": 1})", "a.jsonl:1: the key \"x\" occurs twice"},
        {R"("a": 1, "a": )", "a.jsonl:1: the key \"a\" occurs twice"},
        {R"("a": , "b": 1, "b": 1)", "a.jsonl:1: is not valid JSON"},
        {R"("a": 1e999)", "a number is out of range"},
        {R"("a": [null, true, -1, 2.5, 1])", ""},
        {"\"a\": " + nested(31), ""},
        {"\"a\": " + nested(32), "a.jsonl:1: lists or objects are nested deeper than 32"},
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

TEST_CASE("too little text for the vocabulary, or for what is held out") {
    Run run;
    run.file("a.txt", "a text of few words");
    run.options.tokenizer = "", run.options.train_bpe = 5000;
    check_refused(run, EXIT_BAD_DATA, "too short for a vocabulary of 5000 tokens");
    run.options.train_bpe = 257, run.options.val_tokens = 1000;
    check_refused(run, EXIT_BAD_DATA, "was held out; lower --val-tokens");
    run.options.train_bpe = 5000, run.options.val_tokens = 0;
    run.file("a.txt", std::string(5000, 'x') + " one or two words");
    check_refused(run, EXIT_BAD_DATA, "5,000 bytes are in words of more than 1024 bytes, which are ignored");
}

TEST_CASE("output that cannot be written") {
    Run run;
    run.file("a.txt", "a");
    run.options.output = run.folder / "in/a.txt/out";
    check_refused(run, EXIT_CANNOT_CREATE, "cannot create the directory");
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

TEST_CASE("--replace deletes nothing while another run writes to the output, or without a tokenizer") {
    Run run;
    run.file("a.txt", "a");
    tokenize(run.options);
    const std::string before = read_bytes(run.out("train_000001.bin"));
    run.options.replace = true;
    {
        const OutputLock other(run.options.output);
        CHECK_THROWS_WITH_AS(tokenize(run.options), doctest::Contains("is in use by another run"), Error);
    }
    run.options.tokenizer = run.folder / "none", run.options.train_bpe = 0;
    CHECK_THROWS_AS(tokenize(run.options), Error);
    CHECK(read_bytes(run.out("train_000001.bin")) == before);
}

TEST_CASE("a full disk: the error is told, and no shard of the run remains") {
    Run run;
    run.file("a.txt", prose(100000));
    run.options.shard_tokens = 1000, run.options.threads = 1;
    const int code = in_child([&] {
        limit_file_size(5000);  // the shards fit, tokenizer.json does not
        return tokenize(run.options);
    });
    CHECK(code == EXIT_IO);
    for (const std::string& name : list_directory(run.options.output)) CHECK_FALSE(name.ends_with(".bin"));
}

TEST_CASE("two at a time into one output: the second is refused and touches nothing") {
    Run run;
    run.file("a.txt", "a");
    {
        const OutputLock first(run.options.output);
        write_bytes(run.out("train_000001.bin.tmp"), "of the first");
        check_refused(run, EXIT_CANNOT_CREATE, "out is in use by another run: pid");
        CHECK(read_bytes(run.out("train_000001.bin.tmp")) == "of the first");
    }
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a"}));
    CHECK_FALSE(path_exists(run.out("run.lock")));
}

TEST_CASE("a refused call leaves no directory that it made") {
    Run run;
    run.file("a.jsonl", "broken");
    run.options.output = run.folder / "new/out";
    check_refused(run, EXIT_BAD_DATA, "is not valid JSON");
    CHECK_FALSE(path_exists(run.folder / "new"));
}

// Whether training would take a part of the shards for all.
static bool takes_a_part(const Run& run, size_t shards) {
    try {
        return glob_files(run.out("train_*.bin"), "--train-data").size() != shards;
    } catch (const Error&) {
        return false;
    }
}

TEST_CASE("killed at any call: no shard is read without the others, and the next call starts anew") {
    Run run;
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
