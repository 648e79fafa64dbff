// test_tokenize.cpp: compares the shards that `tokenize` writes with documents that are encoded one by one. Also tests
// that the bytes do not depend on the number of threads, and the text that is held out for validation.
#include <doctest/doctest.h>

#include "support/skip.h"
#include "support/small_tokenize.h"
#include "text/text_reader.h"

TEST_CASE("a text file is one document after <|endoftext|>, and the tokenizer is in the folder of the shards") {
    TokenizeRun run;
    run.file("b.txt", "the theme <|endoftext|> of these\n\nothers");
    run.file("a.md", "first");
    CHECK(tokenize(run.options) == 0);
    CHECK(run.tokens("train_") == documents({"first", "the theme <|endoftext|> of these\n\nothers"}));
    CHECK(list_directory(run.options.output) == std::vector<std::string>{"merges.txt", "special_tokens_map.json",
                                                                         "tokenizer.json", "tokenizer_config.json",
                                                                         "train_000001.bin", "vocab.json"});
    CHECK(load_tokenizer(run.options.output).tokens == tokenizer().tokens);
}

TEST_CASE("folders are read in the order of names, without hidden files and unknown extensions") {
    TokenizeRun run;
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

TEST_CASE("links to files are followed; links to folders and broken links are left out") {
    TokenizeRun run;
    std::filesystem::create_directory(run.folder / "in/z");
    run.file("a.txt", "a");
    run.file("c.csv", "c");
    run.file("z/d.csv", "d");
    const std::string folder = run.folder / "in";
    for (const auto& [target, name] : {std::pair{"../a.txt", "z/link.txt"}, {"..", "loop.txt"}, {"none", "none.txt"}})
        std::filesystem::create_symlink(target, folder + "/" + name);
    run.options.inputs = {folder, folder + "//c.csv"};
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a", "a", "c"}));
}

TEST_CASE("the merges.txt of an output is not read as text") {
    TokenizeRun run;
    run.file("a.txt", "a");
    run.options.output = run.folder / "in";
    tokenize(run.options);
    std::filesystem::remove(run.out("train_000001.bin"));
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"a"}));
}

TEST_CASE("a byte order mark is removed") {
    TokenizeRun run;
    run.file("a.txt", "\xef\xbb\xbfthe");
    run.file("b.jsonl", "\xef\xbb\xbf{\"text\": \"b\"}");
    run.file("c.txt", "\xef\xbb\xbf");
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"the", "b"}));
}

// Only the first MiB of a larger file is checked. A character may begin in its last bytes and end after it.
TEST_CASE("the first byte that is not UTF-8 text is found in the first MiB") {
    TokenizeRun run;
    const auto odd_byte = [&](const std::string& bytes) {
        run.file("a.txt", bytes);
        return find_text_files({run.folder / "in/a.txt"})[0].odd_byte;
    };
    const std::string mib(1 << 20, 'a');
    CHECK(odd_byte("") == -1);
    CHECK(odd_byte("café") == -1);
    CHECK(odd_byte("caf\xe9 au lait") == 3);
    CHECK(odd_byte(std::string("ab\0c", 4)) == 2);
    for (size_t before = 0; before < 5; before++) {
        CHECK(odd_byte(mib.substr(before) + "\U0001f600") == -1);
        CHECK(odd_byte(mib.substr(before) + "\xe9") == (before < 1 ? -1 : int64_t(mib.size() - before)));
    }
}

TEST_CASE("a line of JSONL is one document, and blank lines and empty texts are not documents") {
    TokenizeRun run;
    run.file("a.jsonl",
             "{\"text\": \"one\\n\\u00e9\\ud83d\\ude00\", \"n\": 1}\r\n\n{\"text\": \"\"}\n  \n{\"text\": \"two\"}");
    run.file("b.ndjson", "{\"text\": \"three\"}\n");
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"one\né😀", "two", "three"}));
}

TEST_CASE("--split makes documents at blank lines or at <|endoftext|>") {
    TokenizeRun run;
    run.file("a.txt", "one\n\ntwo\r\n\r\nthree\n\n\n\n\nfour\n");
    run.options.split = "blank-lines";
    tokenize(run.options);
    CHECK(run.tokens("train_") == documents({"one\n\n", "two\r\n\r\n", "three\n\n", "\nfour\n"}));

    TokenizeRun marked;
    marked.file("a.txt", "\n<|endoftext|>\none\n<|endoftext|>  two two <|endoftext|><|endoftext|>\nthree");
    marked.options.split = "end-of-text";
    tokenize(marked.options);
    CHECK(marked.tokens("train_") == documents({"one", "two two", "three"}));
}

// Chunks have 2 MiB, so that their borders are inside of the document.
TEST_CASE("tokens do not depend on chunks or on the number of threads") {
    const std::string text = prose(5 << 20);
    TokenizeRun run;
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

TEST_CASE("every shard but the last has exactly --shard-tokens tokens") {
    TokenizeRun run;
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

TEST_CASE("a vocabulary above 65536 gives shards of 4 bytes per token") {
    TokenizeRun run;
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

TEST_CASE("validation takes the end of a single small file, from the start of a line") {
    TokenizeRun run;
    const std::string text = prose(20000);
    run.file("a.txt", text);
    run.options.val_fraction = 0.1;
    tokenize(run.options);
    const size_t cut = text.find('\n', size_t(double(text.size()) * 0.9)) + 1;
    CHECK(run.tokens("train_") == documents({text.substr(0, cut)}));
    CHECK(run.tokens("val_") == documents({text.substr(cut)}));
    CHECK(path_exists(run.out("val_000000.bin")));
}

TEST_CASE("validation begins at a space if the last line is longer than the part to hold out") {
    TokenizeRun run;
    const std::string text = prose(2000) + "the others " + std::string(50, 'x') + " " + std::string(50, 'x') + "\n";
    run.file("a.txt", text);
    run.options.val_fraction = 0.04;
    tokenize(run.options);
    const size_t cut = text.rfind(' ');
    CHECK(run.tokens("train_") == documents({text.substr(0, cut)}));
    CHECK(run.tokens("val_") == documents({text.substr(cut)}));
}

TEST_CASE("validation takes the end of each document above 64 KiB, and every k-th of the others") {
    const std::string text = prose(100000);
    const size_t cut = text.find('\n', size_t(double(text.size()) * 0.75)) + 1;
    TokenizeRun run;
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

TEST_CASE("validation takes texts of JSONL by the same rule") {
    const std::string text(100000, 'z'), head(75000, 'z');
    TokenizeRun run;
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

TEST_CASE("validation gets about the fraction that is asked for") {
    for (double fraction : {0.01, 0.05, 0.2, 0.5}) {
        TokenizeRun run;
        std::string lines;
        for (int i = 0; i < 1000; i++) lines += "{\"text\": \"" + std::string(40, 'a') + "\"}\n";
        run.file("a.jsonl", lines);
        run.file("b.txt", prose(200000));
        run.options.val_fraction = fraction;
        tokenize(run.options);
        const double train = double(run.tokens("train_").size()), val = double(run.tokens("val_").size());
        CHECK(val / (train + val) ==
              doctest::Approx(fraction).epsilon(0.02));  // exact to a line of prose and to a document
    }
}

TEST_CASE("--val-tokens takes the first tokens, as llm.c does") {
    TokenizeRun run;
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

TEST_CASE("tinyshakespeare split at blank lines gives llm.c's shards, byte for byte") {
    const std::string data = "../shared/data";
    if (!path_exists(data + "/gpt2-bpe") || !path_exists(data + "/tinyshakespeare")) {
        skip_case("no gpt2-bpe and tinyshakespeare in " + data);
        return;
    }
    TokenizeRun run;
    run.options.tokenizer = data + "/gpt2-bpe";
    run.options.inputs = {data + "/tinyshakespeare/input.txt"};
    run.options.split = "blank-lines";
    run.options.val_tokens = 32768;
    tokenize(run.options);
    CHECK(sha256_of(run.out("val_000000.bin")) == "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62");
    CHECK(sha256_of(run.out("train_000001.bin")) == "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8");
}

// ---- a trained vocabulary

TEST_CASE("a vocabulary trained on the text does not depend on the number of threads") {
    TokenizeRun run;
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
