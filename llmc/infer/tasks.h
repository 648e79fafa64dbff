// tasks.h: evaluation tasks: files of rows, each a choice between continuations, or one continuation to predict.
// docs/evaluation.md has the shapes of rows. A file that begins with the magic 20240522 has rows of tokens, as llm.c
// writes them for HellaSwag and MMLU.
#pragma once
#include <string>
#include <vector>

#include "infer/eval.h"
#include "text/tokenizer.h"

struct TaskRow {
    std::vector<Sequence> choices;
    int gold = 0;
};

struct Task {
    std::string name;  // the file's, without folder and extension
    std::vector<TaskRow> rows;
    int64_t cut = 0;  // rows that lost tokens on the left, because they were longer than the context

    bool has_choices() const { return rows[0].choices.size() > 1; }
    std::vector<const Sequence*> sequences() const;  // the choices of all rows
};

// Reads tasks from files whose names have a line end between them. Sequences keep their newest T + 1 tokens.
// end_of_text is in front of each row with prepend_eot, text_start() in front of rows without a context, and the
// tokenizer's prefix in front of the others. Refuses (EXIT_BAD_DATA, with file and line) a row that is of no such
// shape, and a file with rows of one continuation and rows with choices.
//
// Sequence::scored is the first token after the context without its white end, as in lm-eval; the number of tokens for
// an empty continuation. Sequence::compared is the first token in which the choices differ, or that starts the common
// end of context_options, as in CORE; for HellaSwag's shapes it is `scored`, as in llm.c.
std::vector<Task> read_tasks(const std::string& files, const Tokenizer& tokenizer, bool prepend_eot, int T);
// The words of word perplexity: len(re.split(r"\s+", text)), as in lm-eval.
int64_t count_words(std::string_view text);
// Windows over the tokens of a text, the first `start` of which are only context. Each scores `stride` tokens (1 to T),
// the first up to T, after as much context as fits.
std::vector<Sequence> text_windows(const std::vector<int>& tokens, int start, int T, int stride);

struct TaskResult {
    std::string task;
    int64_t rows, cut;
    bool has_choices;
    // Fractions of rows. acc: the greatest sum of log-probabilities is that of gold, or all tokens are the likeliest.
    // acc_mean: the greatest mean per token, acc_norm: the greatest sum per byte; only with choices.
    double acc = 0.0, acc_mean = 0.0, acc_norm = 0.0;
    double perplexity = 0.0;  // exp(-mean of the rows' log-probabilities); only without choices

    double error_of(double fraction) const;  // standard error
    std::string text() const;                // "1,838 rows, acc 0.6251 +- 0.0113, ..."
};
// scores: of task.sequences(), with Score::greedy if the rows have no choices. Of equal choices the first counts.
TaskResult summarize(const Task& task, const std::vector<Score>& scores);
// A JSON object for each row, in lines: task, row, logprobs, tokens, greedy; with choices also prediction and gold.
std::string rows_json(const Task& task, const std::vector<Score>& scores);
