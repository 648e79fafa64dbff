#include "infer/tasks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/files.h"
#include "base/json.h"
#include "base/print.h"
#include "text/text_reader.h"

// ---- rows

struct Shape {
    const char *contexts, *continuations, *gold, *list;  // list: the key that must have one
    bool compares_differing;                             // acc_mean is over the part in which the choices differ
};
static constexpr Shape shapes[] = {{"context_options", "continuation", "gold", "context_options", true},
                                   {"context", "continuation", "gold", "", true},
                                   {"query", "choices", "gold", "choices", true},
                                   {"ctx", "endings", "label", "endings", false}};

static void check(bool fine, const std::string& where, const std::string& what) {
    if (!fine) fail(EXIT_BAD_DATA, "%s: %s", where.c_str(), what.c_str());
}

static std::vector<std::string> texts_of(const Json& row, const char* key, const char* list, const std::string& where) {
    const Json& value = row[key];
    const bool may_be_text = std::string_view(key) != list;
    if (value.type == Json::string && may_be_text) return {value.text};
    const auto is_text = [](const Json& item) { return item.type == Json::string; };
    check(value.items.size() >= 2 && std::ranges::all_of(value.items, is_text), where,
          format("\"%s\" must be %sa list of two texts or more", key, may_be_text ? "a text, or " : ""));
    return value.list<std::string>();
}

template <class Tokens>
static int common_length(const Tokens& a, const Tokens& b) {
    return int(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

static size_t size_without_white_end(const std::string& text) {
    for (const char *p = text.data() + text.size(), *before; p > text.data(); p = before) {
        const Char last = char_before(text.data(), p);
        before = p - last.bytes;
        if (!is_python_space(before, last)) return size_t(p - text.data());
    }
    return 0;
}

int64_t count_words(std::string_view text) {
    const char* const end = text.data() + text.size();
    int64_t words = 1;
    bool in_space = false;
    for (const char* p = text.data(); p < end;) {
        const Char c = char_at(p, end);
        words += !in_space && is_python_space(p, c);
        in_space = is_python_space(p, c);
        p += c.bytes;
    }
    return words;
}

// As in lm-eval, the context alone has n tokens, and token n of both texts together is the first one that is scored. If
// both have at most n, the continuation has merged into the context; the tokens after their common start are scored.
static Sequence make_sequence(Encoder& encoder, const std::string& context, const std::string& continuation) {
    const Tokenizer& tokenizer = encoder.tokenizer;
    Sequence s;
    std::vector<int> before;
    encode(encoder, context + continuation, s.tokens, true);
    encode(encoder, std::string_view(context).substr(0, size_without_white_end(context)), before, true);
    const bool is_left = before.size() < s.tokens.size();
    s.scored = is_left ? int(before.size()) : common_length(before, s.tokens);
    if (is_left) std::ranges::copy(before, s.tokens.begin());
    const bool alone = s.scored == 0 || s.tokens.size() == 1;
    const std::vector<int> start = alone ? text_start(tokenizer) : tokenizer.prefix;
    const int first = tokenizer.bos >= 0 ? tokenizer.bos : tokenizer.eos;
    const bool begun = alone ? !s.tokens.empty() && s.tokens[0] == start[0]
                             : first >= 0 && context.starts_with(tokenizer.tokens[size_t(first)]);
    if (!begun) {
        s.tokens.insert(s.tokens.begin(), start.begin(), start.end());
        s.scored += int(start.size());
    }
    s.scored = s.compared = s.tokens.size() == 1 ? 2 : std::max(1, s.scored);
    if (s.tokens.size() == 1) s.tokens.push_back(s.tokens[0]);  // the model needs an input, and no token is scored
    return s;
}

// Moves `compared` to the part of the tokens in which the choices differ: after their common start, or at the common
// end that follows several contexts.
static void find_differing(std::vector<Sequence>& choices, bool common_end) {
    const auto ordered = [&](const std::vector<int>& t) {
        return common_end ? std::vector<int>(t.rbegin(), t.rend()) : t;
    };
    const std::vector<int> first = ordered(choices[0].tokens);
    int common = int(first.size());
    for (const Sequence& s : choices) common = std::min(common, common_length(first, ordered(s.tokens)));
    for (Sequence& s : choices) {
        const int size = int(s.tokens.size());
        s.compared = std::min(common_end ? size - common : common, size - 1);
    }
}

static TaskRow read_row(const Json& row, Encoder& encoder, const std::string& where) {
    const Shape* shape = std::find_if(std::begin(shapes), std::end(shapes), [&](const Shape& s) {
        return row.contains(s.contexts) && row.contains(s.continuations);
    });
    check(shape != std::end(shapes), where,
          "a row needs the keys context and continuation; query, choices and gold; ctx, endings and label; or "
          "context_options, continuation and gold");
    const auto contexts = texts_of(row, shape->contexts, shape->list, where),
               continuations = texts_of(row, shape->continuations, shape->list, where);
    check(contexts.size() == 1 || continuations.size() == 1, where, "has lists of contexts and of continuations");
    const Json &given = row["delimiter"], delimiter = given.type == Json::null ? " " : given, &gold = row[shape->gold];
    check(delimiter.type == Json::string, where, "\"delimiter\" must be a text");
    TaskRow out;
    for (size_t i = 0; i < std::max(contexts.size(), continuations.size()); i++) {
        const std::string& continuation = continuations[i % continuations.size()];
        out.choices.push_back(make_sequence(encoder, contexts[i % contexts.size()], delimiter.text + continuation));
        out.choices.back().bytes = int64_t(continuation.size());
    }
    const size_t choices = out.choices.size();
    if (choices == 1) return out;
    // On the Hub, HellaSwag's label is a text, "1".
    Json number = gold;
    if (gold.type == Json::string) number.type = Json::number;
    check(number.is_index(int64_t(choices)), where,
          format("\"%s\" is %s, and must be the number of a choice, 0 to %zu", shape->gold,
                 row.contains(shape->gold) ? printable(json_text(gold)).c_str() : "missing", choices - 1));
    out.gold = number.get<int>();
    if (shape->compares_differing) find_differing(out.choices, contexts.size() > 1);
    return out;
}

// Reads an example of llm.c's format: 65535, its bytes, its index, label, number of completions; then the length and
// the tokens of the context and of each completion. Sets `at` to its end.
static TaskRow read_example(const std::vector<uint16_t>& data, size_t& at, const Tokenizer& tokenizer,
                            const std::string& where) {
    const size_t begin = at;
    const auto word = [&] {
        check(at < data.size(), where, "the file ends in it");
        return int(data[at++]);
    };
    const auto tokens = [&] {
        std::vector<int> out(static_cast<size_t>(word()));
        check(!out.empty(), where, "has a text without tokens");
        for (int& token : out) {
            token = word();
            check(token < tokenizer.vocab_size(), where, format("token %d is outside of the vocabulary", token));
        }
        return out;
    };
    check(word() == 65535, where, "its header is damaged");
    const size_t bytes = size_t(word());
    word();
    TaskRow row;
    row.gold = word();
    const int choices = word();
    check(choices >= 2 && row.gold < choices, where, format("has label %d of %d choices", row.gold, choices));
    const std::vector<int> context = tokens();
    for (int i = 0; i < choices; i++) {
        const std::vector<int> ending = tokens();
        const std::string text = decode(tokenizer, ending.data(), int64_t(ending.size()));
        row.choices.push_back({context, int(context.size()), int(context.size()), int64_t(text.size())});
        row.choices.back().bytes -= text.starts_with(' ');
        row.choices.back().tokens.insert(row.choices.back().tokens.end(), ending.begin(), ending.end());
    }
    check(2 * (at - begin) == bytes, where, format("has %zu bytes, and says %zu", 2 * (at - begin), bytes));
    return row;
}

static std::vector<TaskRow> read_examples(const std::string& path, const Tokenizer& tokenizer) {
    const std::string text = read_file(path, int64_t(1) << 31);
    int32_t header[256] = {};
    std::memcpy(header, text.data(), std::min(text.size(), sizeof header));
    check(text.size() >= sizeof header && text.size() % 2 == 0 && header[1] == 1 && header[2] > 0, path,
          format("its header has version %d and %d examples; llm.c writes version 1", header[1], header[2]));
    std::vector<uint16_t> data((text.size() - sizeof header) / 2);
    if (!data.empty()) std::memcpy(data.data(), text.data() + sizeof header, data.size() * 2);
    std::vector<TaskRow> rows;
    size_t at = 0;
    for (int i = 0; i < header[2]; i++)
        rows.push_back(read_example(data, at, tokenizer, format("%s: example %d", path.c_str(), i)));
    check(at == data.size(), path, format("has more than its %d examples", header[2]));
    return rows;
}

// ---- files

static std::vector<TaskRow> read_rows(const std::string& path, Encoder& encoder) {
    std::vector<TaskRow> rows;
    std::string keys = "delimiter";
    for (const Shape& s : shapes) keys += format("\n%s\n%s\n%s", s.contexts, s.continuations, s.gold);
    for_each_row(path, keys, [&](const Json& row, const std::string& where) {
        rows.push_back(read_row(row, encoder, where));
        check((rows.back().choices.size() > 1) == (rows[0].choices.size() > 1), where,
              "has one continuation, or choices, unlike the rows before it; give two files");
    });
    check(!rows.empty(), path, "has no rows");
    return rows;
}

static bool is_of_llmc(const std::string& path) {
    int32_t magic = 0;
    if (!std::filesystem::is_regular_file(path)) return false;  // the bytes of a pipe are read only once
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&magic), sizeof magic);
    return magic == 20240522;
}

// Puts end_of_text in front, if asked for, and leaves the newest T + 1 tokens. Returns whether the row lost tokens.
static bool fit(TaskRow& row, int end_of_text, bool prepend_eot, int T) {
    bool cut = false;
    for (Sequence& s : row.choices) {
        const int added = prepend_eot && s.tokens[0] != end_of_text,
                  lost = std::max(0, int(s.tokens.size()) + added - T - 1);
        if (added) s.tokens.insert(s.tokens.begin(), end_of_text);
        s.tokens.erase(s.tokens.begin(), s.tokens.begin() + lost);
        s.scored = std::max(1, s.scored + added - lost);
        s.compared = std::max(1, s.compared + added - lost);
        cut |= lost > 0;
    }
    return cut;
}

std::vector<Task> read_tasks(const std::string& files, const Tokenizer& tokenizer, bool prepend_eot, int T) {
    std::vector<Task> tasks;
    Encoder encoder(tokenizer);
    std::istringstream paths(files);
    for (std::string path; std::getline(paths, path);) {
        Task task = {std::filesystem::path(unpacked_name(path)).stem(), {}};
        if (std::ranges::count(tasks, task.name, &Task::name)) task.name = path;
        task.rows = is_of_llmc(path) ? read_examples(path, tokenizer) : read_rows(path, encoder);
        for (TaskRow& row : task.rows) task.cut += fit(row, tokenizer.end_of_text, prepend_eot, T);
        tasks.push_back(std::move(task));
    }
    return tasks;
}

std::vector<const Sequence*> Task::sequences() const {
    std::vector<const Sequence*> all;
    for (const TaskRow& row : rows)
        for (const Sequence& s : row.choices) all.push_back(&s);
    return all;
}

std::vector<Sequence> text_windows(const std::vector<int>& tokens, int start, int T, int stride) {
    std::vector<Sequence> windows;
    const int64_t size = int64_t(tokens.size());
    for (int64_t done = start, end; done < size; done = end) {
        end = std::min(size, done == start ? std::max<int64_t>(start, T) + 1 : done + stride);
        const int64_t begin = std::max<int64_t>(0, end - T - 1);
        windows.push_back({{tokens.begin() + begin, tokens.begin() + end}, int(done - begin), int(done - begin)});
    }
    return windows;
}

// ---- results

static double by_sum(const Sequence&, const Score& score) { return score.logprob; }
static double by_token(const Sequence& s, const Score& score) {
    return score.compared / double(std::max<int64_t>(1, int64_t(s.tokens.size()) - s.compared));
}
static double by_byte(const Sequence& s, const Score& score) {
    return score.logprob / double(std::max<int64_t>(1, s.bytes));
}

static int best_choice(const TaskRow& row, const Score* scores, double (*value)(const Sequence&, const Score&)) {
    size_t best = 0;
    for (size_t i = 1; i < row.choices.size(); i++)
        if (value(row.choices[i], scores[i]) > value(row.choices[best], scores[best])) best = i;
    return int(best);
}

TaskResult summarize(const Task& task, const std::vector<Score>& scores) {
    TaskResult r = {task.name, int64_t(task.rows.size()), task.cut, task.has_choices()};
    double sum = 0.0, unknown = 0.0;  // unknown: NaN if a score is
    for (const Score& score : scores) unknown += std::isnan(score.logprob) ? std::fabs(score.logprob) : 0.0;
    const Score* own = scores.data();
    for (const TaskRow& row : task.rows) {
        r.acc += r.has_choices ? best_choice(row, own, by_sum) == row.gold : own->greedy == 1.0;
        r.acc_mean += best_choice(row, own, by_token) == row.gold;
        r.acc_norm += best_choice(row, own, by_byte) == row.gold;
        sum += own->logprob;
        own += row.choices.size();
    }
    for (double* fraction : {&r.acc, &r.acc_mean, &r.acc_norm}) *fraction = (*fraction + unknown) / double(r.rows);
    r.perplexity = std::exp(unknown - sum / double(r.rows));
    return r;
}

double TaskResult::error_of(double fraction) const {
    return std::sqrt(fraction * (1.0 - fraction) / double(std::max<int64_t>(1, rows - 1)));
}

std::string TaskResult::text() const {
    const auto value = [&](const char* name, double x) { return format(", %s %.4f +- %.4f", name, x, error_of(x)); };
    std::string out = counted(rows, "row") + value("acc", acc);
    out += has_choices ? value("acc_mean", acc_mean) + value("acc_norm", acc_norm)
                       : format(", perplexity %.4f", perplexity);
    return out + (cut > 0 ? ", " + counted(cut, "row") + " cut to the context" : "");
}

std::string rows_json(const Task& task, const std::vector<Score>& scores) {
    std::string out;
    const Score* own = scores.data();
    for (size_t i = 0; i < task.rows.size(); i++) {
        const TaskRow& row = task.rows[i];
        std::vector<Json> logprobs, tokens, greedy;
        for (size_t k = 0; k < row.choices.size(); k++) {
            logprobs.push_back(own[k].logprob);
            tokens.push_back(int64_t(row.choices[k].tokens.size()) - row.choices[k].scored);
            greedy.push_back(own[k].greedy == 1.0);
        }
        Json line = {{"task", task.name}, {"row", i}, {"logprobs", logprobs}, {"tokens", tokens}, {"greedy", greedy}};
        if (task.has_choices()) line["prediction"] = best_choice(row, own, by_sum), line["gold"] = row.gold;
        out += json_text(line) + "\n";
        own += row.choices.size();
    }
    return out;
}
