// test_tasks.cpp: task files of every shape, what is scored of a row, bad rows, results by hand, and the scores of a
// random model against one forward pass for each row.
#include "infer/tasks.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/random.h"
#include "checkpoint/hf.h"
#include "support/refusal.h"
#include "support/small_tokenizer.h"
#include "support/temporary.h"

using nlohmann::json;
using Tokens = std::vector<int>;

static Tokens tokens_of(const std::string& text) { return encode(small_tokenizer(), text); }

static Task read(const std::string& content, bool prepend_eot = false, int T = 100) {
    const TemporaryDirectory dir;
    write_bytes(dir / "my.task.jsonl", content);
    write_bytes(dir / "my.task.json", content);  // a task of the same stem
    const auto tasks =
        read_tasks((dir / "my.task.jsonl\n") + (dir / "my.task.json"), small_tokenizer(), prepend_eot, T);
    CHECK(tasks[1].name == dir / "my.task.json");
    return tasks[0];
}

static Tokens part(const Sequence& s, int from) { return {s.tokens.begin() + from, s.tokens.end()}; }

TEST_CASE("a continuation is scored after the context without its white end, behind a space or the row's delimiter") {
    const Task task = read(R"({"context": "a good fortune \n", "continuation": "must be"})"
                           "\n\n"
                           R"({"context": "truth:", "continuation": "is", "delimiter": "\n"})");
    CHECK(task.name == "my.task");
    REQUIRE(task.rows.size() == 2);
    CHECK(!task.has_choices());
    CHECK(task.rows[0].choices[0].tokens == tokens_of("a good fortune \n must be"));
    CHECK(part(task.rows[0].choices[0], task.rows[0].choices[0].scored) == tokens_of(" \n must be"));
    CHECK(part(task.rows[1].choices[0], task.rows[1].choices[0].scored) == tokens_of("\nis"));
}

TEST_CASE("white space, words and what has no tokens of its own are counted as in lm-eval, by Python's str.isspace") {
    for (const std::string white : {"\u00a0", "\u3000", "\u0085", "\x1c", " \x1f\u2028"}) {
        const json row = {{"context", "This" + white}, {"continuation", "man"}, {"delimiter", ""}};
        const Sequence s = read(row.dump()).rows[0].choices[0];
        CHECK(part(s, s.scored) == part({tokens_of("This" + white + "man"), 0, 0, 0}, int(tokens_of("This").size())));
    }
    CHECK(count_words("") == 1);
    CHECK(count_words("one") == 1);
    CHECK(count_words(" one\x1c\u3000two \n") == 4);  // with the empty strings at both ends
    const int end = small_tokenizer().end_of_text;
    const auto sequence = [&](const char* row) { return read(row).rows[0].choices[0]; };
    const Sequence white = sequence(R"({"context": " \n", "continuation": "a"})");
    CHECK((white.tokens[0] == end && white.scored == 1));
    const Sequence empty = sequence(R"({"context": "a", "continuation": "", "delimiter": ""})");
    CHECK(empty.scored == int(empty.tokens.size()));
    for (const char* nothing : {"", END_OF_TEXT}) {
        const json row = {{"context", ""}, {"continuation", nothing}, {"delimiter", ""}};
        const Sequence only_bos = sequence(row.dump().c_str());
        CHECK((only_bos.tokens == Tokens{end, end} && only_bos.scored == 2 && only_bos.compared == 2));
    }
    const char* const null = R"({"context": "t", "continuation": "he", "delimiter": null})";  // of Parquet
    CHECK(sequence(null).tokens == sequence(R"({"context": "t", "continuation": "he"})").tokens);
    const Sequence merged = sequence(R"({"context": "t", "continuation": "he", "delimiter": ""})");
    CHECK(merged.tokens.size() == 2);  // one token after <|endoftext|>
    CHECK(merged.scored == 1);
    const Sequence rest = sequence(R"({"context": "t", "continuation": "he t", "delimiter": ""})");
    CHECK(tokens_of("the t")[0] != tokens_of("t")[0]);
    CHECK(rest.tokens == Tokens{tokens_of("t")[0], tokens_of("the t")[1]});  // t as the context has it
    CHECK(rest.scored == 1);
}

TEST_CASE("added tokens of a row stand for themselves, after the tokenizer's prefix") {
    Tokenizer tokenizer = small_tokenizer();
    const int SEP = tokenizer.vocab_size(), BOS = SEP + 1, end = tokenizer.end_of_text;
    for (const char* content : {"<sep>", "<s>"}) {
        tokenizer.added.push_back({tokenizer.vocab_size(), content});
        tokenizer.tokens.push_back(content);
    }
    tokenizer.index_added();
    const auto tokens = [&](const std::string& row, bool prepend_eot = false) {
        const TemporaryDirectory dir;
        write_bytes(dir / "t", row);
        return read_tasks(dir / "t", tokenizer, prepend_eot, 100)[0].rows[0].choices[0].tokens;
    };
    const auto text = [&](Tokens before, const char* after) {
        for (const int token : tokens_of(after)) before.push_back(token);
        return before;
    };
    const char* const row = R"({"context": "<sep>", "continuation": "A"})";
    CHECK(tokens(row) == text({SEP}, " A"));
    tokenizer.bos = -1, tokenizer.eos = BOS;
    CHECK(tokens(R"({"context": "", "continuation": "A"})") == text({BOS}, " A"));
    tokenizer.bos = BOS;
    CHECK(tokens(row) == text({SEP}, " A"));
    CHECK(tokens(R"({"context": "", "continuation": "A"})") == text({BOS}, " A"));
    tokenizer.prefix = {BOS};
    CHECK(tokens(row) == text({BOS, SEP}, " A"));
    CHECK(tokens(row, true) == text({end, BOS, SEP}, " A"));
    CHECK(tokens(R"({"context": "<s>x", "continuation": "A"})") == text({BOS}, "x A"));  // not twice
    tokenizer.bos = -1;                                                                  // eos is the same token
    CHECK(tokens(R"({"context": "<s>x", "continuation": "A"})") == text({BOS}, "x A"));
    tokenizer.bos = end;
    CHECK(tokens(R"({"context": "<s>x", "continuation": "A"})") == text({BOS, BOS}, "x A"));  // it is not bos
}

TEST_CASE("acc_mean compares the part in which choices differ, and HellaSwag's whole endings") {
    const Task choices = read(R"({"query": "This", "choices": ["man is", "man of éa"], "gold": 1})");
    const auto& [row, gold] = choices.rows[0];
    CHECK(gold == 1);
    CHECK(part(row[1], row[1].scored) == tokens_of(" man of éa"));
    CHECK(part(row[1], row[1].compared) == tokens_of(" of éa"));
    CHECK(row[1].bytes == 10);
    const TaskRow prefix = read(R"({"query": "a", "choices": ["man", "man is"], "gold": 0})").rows[0];
    CHECK(part(prefix.choices[0], prefix.choices[0].compared).size() == 1);  // a choice that starts another one
    const TaskRow ends = read(R"([{"ind": 3, "ctx": "This", "endings": ["man is", "man of"], "label": "1"}])").rows[0];
    CHECK(ends.gold == 1);
    CHECK(part(ends.choices[0], ends.choices[0].compared) == tokens_of(" man is"));
    const TaskRow schema =
        read(R"({"context_options": ["This man", "A wife"], "continuation": "is rich", "gold": 0})").rows[0];
    CHECK(schema.choices[1].tokens == tokens_of("A wife is rich"));
    for (const Sequence& s : schema.choices) {
        CHECK(part(s, s.compared) == tokens_of(" is rich"));
        CHECK(part(s, s.scored) == tokens_of(" is rich"));
    }
}

TEST_CASE("a row keeps its newest T + 1 tokens, and has <|endoftext|> in front if asked for or without a context") {
    const std::string row = R"({"context": "a b c d", "continuation": "a b"})";
    const int end = small_tokenizer().end_of_text;
    const Tokens all = tokens_of("a b c d a b");
    const int scored = int(tokens_of(" a b").size());
    for (const int T : {3, int(all.size()) - 1, int(all.size())})
        for (const bool prepend : {false, true}) {
            CAPTURE(T);
            const Task task = read(row, prepend, T);
            const Sequence& s = task.rows[0].choices[0];
            Tokens expected = all;
            if (prepend) expected.insert(expected.begin(), end);
            const bool is_longer = int(expected.size()) > T + 1;
            if (is_longer) expected.erase(expected.begin(), expected.end() - T - 1);
            CHECK(s.tokens == expected);
            CHECK(int(s.tokens.size()) - s.scored == scored);
            CHECK(task.cut == is_longer);
        }
    const Sequence alone = read(R"({"context": "", "continuation": "must", "delimiter": ""})").rows[0].choices[0];
    CHECK(alone.tokens[0] == end);
    CHECK(part(alone, alone.scored) == tokens_of("must"));
    CHECK(read(row, false, 1).rows[0].choices[0].scored == 1);  // a longer continuation than the context
}

TEST_CASE("bad rows are refused with file, line and reason") {
    const std::string good = R"({"query": "q", "choices": ["a", "b"], "gold": 0})"
                             "\n";
    const struct {
        std::string content;
        const char* message;
    } cases[] = {
        {good + "{\n", "jsonl:2: is not valid JSON"},
        {"\n" + good + "[1]\n", "jsonl:3: is JSON, but not an object"},
        {good + R"({"query": "q"})", "jsonl:2: a row needs the keys context and continuation; query, choices"},
        {good + R"({"query": "q", "choices": ["a"], "gold": 0})",
         "jsonl:2: \"choices\" must be a list of two texts or more"},
        {R"({"query": "q", "choices": ["a", 1], "gold": 0})", "jsonl:1: \"choices\" must be a list"},
        {R"({"ctx": "q", "endings": "[\"a\", \"b\"]", "label": 0})", "jsonl:1: \"endings\" must be a list"},
        {R"({"context_options": "q", "continuation": "a", "gold": 0})", "jsonl:1: \"context_options\" must be a list"},
        {R"({"query": 5, "choices": ["a", "b"], "gold": 0})", "jsonl:1: \"query\" must be a text"},
        {R"({"query": "q", "choices": ["a", "b"], "gold": 2})",
         "jsonl:1: \"gold\" is 2, and must be the number of a "
         "choice, 0 to 1"},
        {R"({"query": "q", "choices": ["a", "b"], "gold": -1})", "\"gold\" is -1"},
        {R"({"query": "q", "choices": ["a", "b"], "gold": 0.5})", "\"gold\" is 0.5"},
        {R"({"ctx": "q", "endings": ["a", "b"], "label": ""})", "\"label\" is \"\""},
        {R"({"ctx": "q", "endings": ["a", "b"], "label": "b"})", "\"label\" is \"b\""},
        {R"({"query": "q", "choices": ["a", "b"]})", "\"gold\" is missing, and must be"},
        {R"({"query": "q", "choices": ["a", "b"], "gold": null})", "\"gold\" is null"},
        {R"({"query": "q", "choices": ["a", "\ud800"], "gold": 0})",
         "jsonl:1: is not valid JSON at byte 40 of 53: invalid"},
        {R"({"query": ["q", "r"], "choices": ["a", "b"], "gold": 0})", "has lists of contexts and of continuations"},
        {R"({"context": "q", "continuation": "a", "delimiter": 1})", "\"delimiter\" must be a text"},
        {good + R"({"context": "q", "continuation": "a"})",
         "jsonl:2: has one continuation, or choices, unlike the rows before"},
        {"\n \n", "jsonl: has no rows"}};
    for (const auto& bad : cases) {
        CAPTURE(bad.content);
        const std::string error = refusal([&] { read(bad.content); });
        CHECK(error.starts_with("65 "));
        CHECK_MESSAGE(error.find(bad.message) != error.npos, error);
    }
}

// ---- llm.c's format

static std::string bytes_of(const std::vector<uint16_t>& words, int examples = 1) {
    int32_t header[256] = {20240522, 1, examples, 100};
    std::string out(reinterpret_cast<const char*>(header), sizeof header);
    return out.append(reinterpret_cast<const char*>(words.data()), words.size() * 2);
}

// An example of the context 5 6 and the endings 7 and 8 9; ends in the magic of a next one.
static const std::vector<uint16_t> example = {65535, 26, 0, 1, 2, 2, 5, 6, 1, 7, 2, 8, 9};

TEST_CASE("llm.c's rows of tokens are read") {
    std::vector<uint16_t> two = example;
    two.insert(two.end(), example.begin(), example.end());
    const Task task = read(bytes_of(two, 2));
    REQUIRE(task.rows.size() == 2);
    for (const TaskRow& row : task.rows) {
        CHECK(row.gold == 1);
        CHECK(row.choices[0].tokens == Tokens{5, 6, 7});
        CHECK(row.choices[1].tokens == Tokens{5, 6, 8, 9});
        CHECK((row.choices[1].scored == 2 && row.choices[1].compared == 2));
    }
}

TEST_CASE("damaged rows of tokens are refused, each 16-bit number and each length of the file") {
    for (size_t i = 0; i < example.size(); i++)
        for (const uint16_t value : {uint16_t(0), uint16_t(40000), uint16_t(65535), uint16_t(example[i] + 1)}) {
            std::vector<uint16_t> damaged = example;
            damaged[i] = value;
            const bool is_token = i == 6 || i == 7 || i == 9 || i > 10, index = i == 2, label = i == 3 && value == 0;
            const bool fine = value == example[i] || index || label || (is_token && value < 500);
            CAPTURE(i);
            CAPTURE(value);
            CHECK(exit_code_of([&] { read(bytes_of(damaged)); }) == (fine ? 0 : 65));
        }
    const std::string whole = bytes_of(example);
    for (size_t size = 4; size < whole.size(); size++) CHECK(exit_code_of([&] { read(whole.substr(0, size)); }) == 65);
    CHECK(refusal([&] { read(whole + "ab"); }).find("has more than its 1 examples") != std::string::npos);
    CHECK(refusal([&] { read(bytes_of(example, 2)); }).find("example 1: the file ends in it") != std::string::npos);
}

// ---- results

TEST_CASE("accuracies by sum, mean and bytes, standard error and perplexity, by hand") {
    // Sums -3 and -4, means -3 / 1 and -4 / 2, per byte -3 / 3 and -4 / 8.
    const Task task = {
        "t", {{{{{1, 2}, 1, 1, 3}, {{1, 2, 3}, 1, 1, 8}}, 0}, {{{{1, 2}, 1, 1, 3}, {{1, 2, 3}, 1, 1, 8}}, 1}}};
    const std::vector<Score> scores = {{-3, -3, 0}, {-4, -4, 0}, {-5, -3, 0}, {-5, -8, 0}};
    const TaskResult r = summarize(task, scores);
    CHECK(r.acc == 0.5);       // the first row; of the equal sums of the second row the first counts
    CHECK(r.acc_mean == 0.0);  // -2 beats -3; -3 beats -4
    CHECK(r.acc_norm == 0.5);  // -0.5 beats -1; -0.625 beats -1.67
    CHECK(r.error_of(r.acc) == 0.5);
    CHECK(r.text() == "2 rows, acc 0.5000 +- 0.5000, acc_mean 0.0000 +- 0.0000, acc_norm 0.5000 +- 0.5000");
    CHECK(std::isnan(summarize(task, {scores[0], scores[1], scores[2], {NAN, NAN, 0}}).acc));  // of a broken model
    const std::string line = rows_json(task, scores).substr(0, rows_json(task, scores).find('\n'));
    CHECK(line == R"({"gold":0,"greedy":[false,false],"logprobs":[-3.0,-4.0],"prediction":0,"row":0,"task":"t",)"
                  R"("tokens":[1,2]})");

    const Task words = {"w", {{{{{1, 2}, 1, 1}}}, {{{{1, 2}, 1, 1}}}, {{{{1, 2}, 1, 1}}}}, 1};
    const TaskResult w = summarize(words, {{-1, -1, 1}, {-2, -2, 0}, {-6, -6, 0}});
    CHECK(w.text() == "3 rows, acc 0.3333 +- 0.3333, perplexity 20.0855, 1 row cut to the context");
}

TEST_CASE("windows over a text score each token once, with as much context as fits") {
    for (const int size : {2, 5, 9, 10, 11, 40})
        for (const int stride : {1, 3, 8}) {
            Tokens tokens(static_cast<size_t>(size));
            for (int i = 0; i < size; i++) tokens[size_t(i)] = i;
            Tokens scored;
            for (const Sequence& s : text_windows(tokens, 1, 8, stride)) {
                CHECK((s.tokens.size() <= 9 && (s.tokens.size() == 9 || s.tokens[0] == 0)));
                for (const int token : part(s, s.scored)) scored.push_back(token);
            }
            CHECK(scored == Tokens(tokens.begin() + 1, tokens.end()));
            const size_t later = size > 9 ? size_t((size - 9 + stride - 1) / stride) : 0;
            CHECK(text_windows(tokens, 1, 8, stride).size() == 1 + later);
        }
}

// ---- scores

constexpr GPT2Config SHAPE = {12, 50, 2, 2, 16};  // 12 positions, 50 tokens

TEST_CASE("scores are those of each sequence alone, from its logits, in batches of any size") {
    const auto with_weights = [](int B) {
        auto model = std::make_unique<GPT2<float>>(SHAPE, Purpose::generate, B, SHAPE.max_T);
        std::vector<float> weights(size_t(model->layout.total));
        for (size_t i = 0; i < weights.size(); i++) weights[i] = 0.7f * Philox{7, 1}.normal(i);
        // Rows of wte are equal in pairs: the likeliest token has a probability of at most one half, as has the next.
        for (auto row = weights.begin(); row < weights.begin() + 50 * 16; row += 32) std::copy_n(row, 16, row + 16);
        copy_to_device(model->weights.memory.data, weights.data(), int64_t(weights.size() * 4), nullptr);
        return model;
    };
    const auto alone = with_weights(1), four = with_weights(4);
    std::vector<Sequence> sequences;
    std::vector<Score> expected;
    for (int i = 0; i < 60; i++) {
        Sequence s;
        for (int t = 0; t < 2 + i % 12; t++) s.tokens.push_back(int(Philox{uint64_t(i), 2}(uint64_t(t))[0] % 50));
        const int inputs = int(s.tokens.size()) - 1;
        s.scored = 1 + i % inputs, s.compared = 1 + (i / 2) % inputs;
        Score score = {0.0, 0.0, 1.0};
        for (int t = 0; t < inputs; t++) {
            alone->forward(s.tokens.data(), 1, inputs);
            const float* logits = alone->row_logits(t);
            const int best = int(std::max_element(logits, logits + 50) - logits);
            int second = best == 0;
            for (int v = 0; v < 50; v++)
                if (v != best && logits[v] > logits[second]) second = v;
            // A third is greedy, and a third but for its last token.
            if (i % 3 < 2 && t + 1 >= s.scored) s.tokens[size_t(t) + 1] = i % 3 == 1 && t + 1 == inputs ? second : best;
            double sum = 0.0;
            for (int v = 0; v < 50; v++) sum += std::exp(double(logits[v]));
            const int token = s.tokens[size_t(t) + 1];
            const double logprob = double(logits[token]) - std::log(sum);
            if (t + 1 >= s.scored) score.logprob += logprob, score.greedy *= token == best;
            if (t + 1 >= s.compared) score.compared += logprob;
        }
        sequences.push_back(s), expected.push_back(score);
    }
    std::vector<const Sequence*> all;
    for (const Sequence& s : sequences) all.push_back(&s);
    Comm one;
    int64_t batches = 0;
    const auto count = [&](int64_t, int64_t of) { return batches = of, true; };
    const auto scores = *score(*four, all, true, one, count), small = *score(*alone, all, true, one, count);
    CHECK(batches < 60);  // short ones share a batch
    for (size_t i = 0; i < all.size(); i++) {
        CAPTURE(i);
        CHECK(scores[i].logprob == doctest::Approx(expected[i].logprob).epsilon(1e-5));
        CHECK(scores[i].compared == doctest::Approx(expected[i].compared).epsilon(1e-5));
        CHECK(scores[i].greedy == expected[i].greedy);
        CHECK(std::memcmp(&scores[i], &small[i], sizeof(Score)) == 0);
    }
    CHECK(!score(*four, all, false, one, [](int64_t done, int64_t) { return done < 2; }));
}

// All logits are about 256, where neighbours in bf16 are 2 apart.
TEST_CASE("the likeliest token is found among logits that are equal in bf16") {
    GPT2<bf16> model(SHAPE, Purpose::eval, 1, SHAPE.max_T);
    for_each_tensor(model.layout, [&](Param p, int l) {
        std::vector<float> values(size_t(model.layout.size(p)));
        for (size_t i = 0; i < values.size(); i++) values[i] = 0.1f * Philox{7, uint64_t(p)}.normal(i);
        if (p == lnfw) values.assign(values.size(), 1.0f);
        if (p == lnfb) values[0] = 256.0f;
        for (int64_t v = 0; p == wte && v < model.layout.size(wte); v += SHAPE.C) values[size_t(v)] = 1.0f;
        model.set_param(p, l, values.data());
    });
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
    Comm one;
    for (int first = 0; first < SHAPE.V; first++) {
        model.forward(&first, 1, 1);
        std::vector<std::pair<double, int>> logits;
        for (int v = 0; v < SHAPE.V; v++) {
            double sum = 0.0;
            for (int c = 0; c < SHAPE.C; c++)
                sum += double(float(model.acts.lnf[c])) * float(model.w(wte)[v * SHAPE.C + c]);
            logits.push_back({-sum, v});
        }
        std::sort(logits.begin(), logits.end());
        for (const int rank : {0, 1}) {
            const Sequence s = {{first, logits[size_t(rank)].second}, 1, 1};
            CHECK((*score(model, {&s}, true, one, [](int64_t, int64_t) { return true; }))[0].greedy == 1 - rank);
        }
    }
}
