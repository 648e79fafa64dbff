// test_tokenize.cpp: compares the shards that `tokenize` writes with documents that are encoded one by one. Also tests
// that the bytes do not depend on the number of threads, and the text that is held out for validation.
#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>

#include "support/skip.h"
#include "support/small_tokenize.h"
#include "text/text_reader.h"

static std::string jsonl(const std::string& text) { return "{\"text\": \"" + text + "\"}\n"; }

TEST_CASE("files become documents after <|endoftext|>, in the order of names") {
    const struct {
        const char* what;
        Files files;
        SplitAt split;
        Texts documents;
    } cases[] = {
        {"a text file is one document, without its byte order mark",
         {{"b.txt", "the theme <|endoftext|> of these\n\nothers"}, {"a.md", "\xef\xbb\xbftheme"}},
         SplitAt::none,
         {"theme", "the theme <|endoftext|> of these\n\nothers"}},
        {"hidden files and unknown extensions are left out",
         {{"z/y/c.txt", "c"}, {"z/b.rst", "b"}, {".git/x.txt", "x"}, {".x.txt", "x"}, {"x", "x"}},
         SplitAt::none,
         {"b", "c"}},
        {"a line of JSONL is one document, but not a blank line or an empty text",
         {{"a.jsonl",
           "\xef\xbb\xbf{\"text\": \"\\n\\u00e9\\ud83d\\ude00\", \"n\": 1}\r\n\n" + jsonl("") + "  \n" + jsonl("two")},
          {"b.ndjson", R"({"text": "three"})"}},
         SplitAt::none,
         {"\né😀", "two", "three"}},
        {"--split lines, and a text that looks like JSON",
         {{"a.txt", "{\"text\": 1}\r\n\n two \nthree\r"}},
         SplitAt::lines,
         {"{\"text\": 1}", " two ", "three\r"}},
        {"JSON as an array, or with objects of several lines",
         {{"a.json", "\xef\xbb\xbf[{\"text\": \"[one}\\\"\"},\n{\"n\": [{}],\r\n \"text\": \"two\"}]\n"},
          {"b.jsonl", "{\n\"text\": \"three\"}\n{\"text\":\n\"four\"}"},
          {"c.JSON", "[]"},
          {"d.json", "\x1e{\n\"text\": \"five\"}\n\x1e" + jsonl("six")},  // RFC 7464
          {"e.json", "{\"text\": \"seven\"\n}\n{\"text\"\n:\"eight\"\n, \"n\": 1}"}},
         SplitAt::none,
         {"[one}\"", "two", "three", "four", "five", "six", "seven", "eight"}},
        {"a column of CSV and TSV, with line ends, delimiters and quotes in a field",
         {{"a.csv", "\xef\xbb\xbfid,text\r\n1,one\r\n2,\"two, \"\"2\"\"\r\n\"\r\n\r\n3,"},
          {"b.TSV", "text\tid\nthree,\"\t1\n\"four\t\"\t2"},
          {"c.csv", "id,text\r1,five\r"}},
         SplitAt::none,
         {"one", "two, \"2\"\r\n", "three,\"", "four\t", "five"}},
        {"a text that begins as Parquet does, and as cpio's",
         {{"a.txt", "PAR1 is"}, {"b.txt", "0707071234"}},
         SplitAt::none,
         {"PAR1 is", "0707071234"}},
        {"halves of surrogate pairs, and numbers that JSON has not, under keys that are not read",
         {{"a.jsonl", R"({"a": NaN, "b": [-Infinity,Infinity, -1e999], "text": "NaN, \"1e999"})"},
          {"b.jsonl",
           R"({"\ude00": "\\\ud83d", "a": ["x\ud83d\u0041", NaN, 1e400, "1e400"], "text": "\\ud83d \ud83d\ude00"})"}},
         SplitAt::none,
         {"NaN, \"1e999", "\\ud83d \U0001F600"}},
        {"--split blank-lines",
         {{"a.txt", "one\n\ntwo\r\n\r\nthree\n\n\n\n\nfour\n"}},
         SplitAt::blank_lines,
         {"one\n\n", "two\r\n\r\n", "three\n\n", "\nfour\n"}},
        {"--split end-of-text",
         {{"a.txt", "\n<|endoftext|>\none\n<|endoftext|>  two two <|endoftext|><|endoftext|>\nthree"}},
         SplitAt::end_of_text,
         {"one", "two two", "three"}},
    };
    for (const auto& c : cases) {
        CAPTURE(c.what);
        TokenizeRun run(c.files);
        run.options.split = c.split;
        CHECK(run.train() == documents(c.documents));
    }
}

TEST_CASE("a file without a name of text is JSON if it begins with an object that has a key or is empty") {
    for (const char* text : {"{\"text\": x", "{}", "{\n \"a\":"}) {
        TokenizeRun run(Files{{"a", text}});
        CHECK(open_input(run.folder / "in/a", Wanted::documents, "text").format != Format::text);
    }
    for (const char* text :
         {"{'text': 'x'}", "{\"a\"}", "{\"a", "{", "{name}", "x {\"text\": \"y\"}", "[\"x\"]", "[{name}]"}) {
        TokenizeRun run(Files{{"a", text}});
        CHECK(open_input(run.folder / "in/a", Wanted::documents, "text").format == Format::text);
    }
}

// A quadratic algorithm would take minutes.
TEST_CASE("a million blank lines are read in linear time") {
    TokenizeRun run(Files{{"a.txt", "a" + std::string(1 << 20, '\n') + "b"}});
    run.options.split = SplitAt::lines;
    CHECK(run.train() == documents({"a", "b"}));
}

TEST_CASE("the tokenizer is in the folder of the shards; a file is read once, whatever names it has, itself not") {
    TokenizeRun run(Files{{"a.txt", "a"}, {"c.dat", "c"}, {"z/d.dat", "d"}});
    const std::string folder = run.options.output = run.folder / "in";
    for (const auto& [target, name] : {std::pair{"../a.txt", "z/link.txt"}, {"..", "loop.txt"}, {"none", "none.txt"}})
        std::filesystem::create_symlink(target, folder + "/" + name);
    run.options.inputs = {folder, folder + "//c.dat", folder + "/z/../c.dat", folder + "/z", folder};
    CHECK(find_text_files(run.options.inputs, "text").left_out["already read"] ==
          Texts{folder + "/z/link.txt", folder + "/z/../c.dat", folder + "/z/link.txt", folder + "/a.txt",
                folder + "/z/link.txt"});
    CHECK(run.train() == documents({"a", "c"}));
    CHECK(load_tokenizer(folder).tokens == tokenizer().tokens);
    run.options.replace = true;
    CHECK(run.train() == documents({"a", "c"}));  // without merges.txt
}

// Only the first MiB of a larger file is checked. A character may begin in its last bytes and end after it.
TEST_CASE("the first byte that is not UTF-8 text is found in the first MiB") {
    const std::string mib(1 << 20, 'a');
    const std::pair<std::string, int64_t> cases[] = {{"café", -1},
                                                     {"caf\xe9 au lait", 3},
                                                     {mib.substr(2) + "\U0001f600", -1},
                                                     {mib.substr(1) + "\xe9", mib.size() - 1},
                                                     {mib + std::string("\0\xe9", 2), -1}};
    TokenizeRun run;
    for (const auto& [bytes, odd_byte] : cases) {
        run.file("a.txt", bytes);
        CHECK(find_text_files({run.folder / "in/a.txt"}, "text").texts[0].odd_byte == odd_byte);
    }
}

// Chunks have 64 KiB, so that their borders are inside of the documents, and a batch has 64 of them.
TEST_CASE("neither tokens nor a vocabulary that is trained depend on chunks or on the number of threads") {
    const Texts texts = {prose(5 << 19), std::string(5 << 19, 'x'), "short", std::string(5 << 19, 'y')};
    TokenizeRun run(Files{{"a.txt", texts[0]}, {"b.jsonl", jsonl(texts[1]) + jsonl(texts[2])}, {"c.txt", texts[3]}});
    run.options.replace = true;
    const Tokens want = documents(texts);
    PieceCounts counts;
    for (const std::string& text : texts) counts.add_text(text);
    const Tokenizer trained = train_bpe(counts, 290);
    for (int threads : {1, 3}) {
        omp_set_num_threads(threads);
        run.options.tokenizer = run.folder / "tokenizer.json", run.options.train_bpe = 0;
        CHECK(run.train() == want);
        run.options.tokenizer = "", run.options.train_bpe = 290;
        tokenize(run.options);
        CHECK(load_tokenizer(run.options.output).tokens == trained.tokens);
    }
}

TEST_CASE("every shard but the last has --shard-tokens tokens, and --val-tokens takes the first ones as llm.c does") {
    const std::string text = prose(5000);
    TokenizeRun run(Files{{"a.txt", text}, {"b.txt", text}});
    run.options.shard_tokens = 1000, run.options.val_tokens = 700;
    const Tokens all = documents({text, text});
    CHECK(run.train() == Tokens(all.begin() + 700, all.end()));
    CHECK(run.tokens("val_") == Tokens(all.begin(), all.begin() + 700));
    const int64_t train = int64_t(all.size()) - 700;
    for (int64_t i = 0; i <= train / 1000; i++)
        CHECK(open_shard(run.out(format("train_%06d.bin", int(i + 1)))).tokens ==
              std::min<int64_t>(1000, train - 1000 * i));
}

// ---- validation

// Checks which documents, or parts of them, are for training and which are held out.
static void check_held_out(const Files& files, double fraction, const Texts& train, const Texts& val) {
    TokenizeRun run(files);
    run.options.val_fraction = fraction;
    CHECK(run.train() == documents(train));
    CHECK(run.tokens("val_") == documents(val));
}

TEST_CASE("validation takes the end of a single small file, from the start of a line, or else from a space") {
    std::string text = prose(20000);
    size_t cut = text.find('\n', size_t(double(text.size()) * 0.9)) + 1;
    check_held_out({{"a.txt", text}}, 0.1, {text.substr(0, cut)}, {text.substr(cut)});
    text = prose(2000) + "the others " + std::string(50, 'x') + " " + std::string(50, 'x') + "\n";
    cut = text.rfind(' ');  // the last line is longer than the part to hold out
    check_held_out({{"a.txt", text}}, 0.04, {text.substr(0, cut)}, {text.substr(cut)});
}

TEST_CASE("validation takes the end of each document above 64 KiB, and every k-th of the others") {
    const std::string head(75000, 'z'), tail(25000, 'z');
    Files files;
    std::string lines;
    Texts train, val;
    for (int i = 0; i < 12; i++) {
        const std::string small = format("document %d", i);
        files.push_back({format("%02d.txt", i), i == 6 ? head + "\n" + tail : small});
        lines += jsonl(i == 6 ? head + "\\n" + tail : small);
        if (i == 6)
            train.push_back(head + "\n"), val.push_back(tail);
        else
            (i % 4 == 1 ? val : train).push_back(small);
    }
    check_held_out(files, 0.25, train, val);
    check_held_out({{"a.jsonl", lines}}, 0.25, train, val);
}

TEST_CASE("tinyshakespeare split at blank lines gives llm.c's shards, byte for byte") {
    const std::string data = "../shared/data";
    if (!path_exists(data + "/gpt2-bpe") || !path_exists(data + "/tinyshakespeare"))
        return skip_case("no gpt2-bpe and tinyshakespeare in " + data);
    TokenizeRun run;
    run.options.tokenizer = data + "/gpt2-bpe";
    run.options.inputs = {data + "/tinyshakespeare/input.txt"};
    run.options.split = SplitAt::blank_lines, run.options.val_tokens = 32768;
    tokenize(run.options);
    CHECK(sha256_of(run.out("val_000000.bin")) == "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62");
    CHECK(sha256_of(run.out("train_000001.bin")) == "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8");
}
