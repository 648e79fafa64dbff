// eval.cpp: the command `eval`: the loss of a trained model on token shards or on a text, and its accuracy in tasks.
#include "infer/eval.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "base/print.h"
#include "base/files.h"
#include "commands/commands.h"
#include "infer/tasks.h"
#include "text/text_reader.h"
#include "train/plan.h"

// Refuses a micro-batch that does not fit into memory, before any is allocated: the kernel gives memory page by page,
// so a lack of it would show only after many seconds.
template <class floatX>
static void check_memory(const Options& o, const GPT2Config& config, int T, const MemoryOptions& options,
                         int64_t available) {
    const auto bytes = [&](int B, int T) {
        const int64_t batches = 3 * 2 * int64_t(sizeof(int)) * B * T;  // tokens and targets in the loader
        const int64_t loading = device_memory_is_host() ? largest_tensor(config) * int64_t(sizeof(float)) : 0;
        return loading + batches + device_bytes(model_memory<floatX>(config, Purpose::eval, B, T, options));
    };
    int fits = o.micro_batch, shorter = T;
    while (fits > 0 && bytes(fits, T) > available) fits /= 2;
    if (fits == o.micro_batch) return;
    while (fits == 0 && shorter > 0 && bytes(1, shorter) > available) shorter /= 2;
    std::string advice = fits > 0      ? format("--micro-batch %d", fits)
                         : shorter > 0 ? format("--micro-batch 1 --seq-len %d", shorter)
                                       : "a machine with more";
    // CPU ranks that share a layer also share the memory of their machine.
    if (fits == 0 && !device_memory_is_host()) advice += ", or --tensor-parallel on more ranks";
    fail(EXIT_USAGE, "--micro-batch %d with --seq-len %d needs %s of memory, and %s are free; try %s", o.micro_batch, T,
         human_bytes(bytes(o.micro_batch, T)).c_str(), human_bytes(available).c_str(), advice.c_str());
}

// Reports progress to the watchdog, and on rank 0 to the user.
static std::function<bool(int64_t, int64_t)> report_batches(ProgressLine& progress, Comm& comm) {
    return [&](int64_t done, int64_t of) {
        comm.reached("batch", done);
        if (comm.rank == 0 && progress.due())
            progress.show(format("%lld/%lld batches", static_cast<long long>(done), static_cast<long long>(of)));
        return true;
    };
}

template <class floatX>
static void check_finite(double loss, const RunStart& source, const std::string& data) {
    if (!std::isfinite(loss))
        fail(EXIT_BAD_DATA, "the loss of %s on %s is %s: with these weights, values exceed the range of %s",
             source.weights.c_str(), data.c_str(), std::isnan(loss) ? "NaN" : "infinite", dtype_name(dtype_of<floatX>));
}

// Loads the model and scores the sequences of each task. Refuses a score that is not finite.
template <class floatX>
static std::vector<std::vector<Score>> score_all(const Options& o, Comm& comm, const Groups& groups,
                                                 const RunStart& source, int T, const std::vector<Task>& tasks) {
    compare_ranks(comm, o, {{"weights", source.weights}});
    GPT2<floatX> model(source.config, Purpose::eval, o.micro_batch, T, shard_of(groups.tp));
    load_model(model, source, comm, groups.tp);
    ProgressLine progress;
    std::vector<std::vector<Score>> scores;
    for (const Task& task : tasks) {
        const bool greedy = !task.has_choices() || !o.rows.empty();
        scores.push_back(*score(model, task.sequences(), greedy, groups.dp, report_batches(progress, comm)));
        for (const Score& s : scores.back()) check_finite<floatX>(s.logprob, source, task.name);
    }
    comm.reached("the end");
    return scores;
}

// Refuses a --rows that must not be replaced: a device, a pipe, or a file of --task.
static void check_rows(const Options& o) {
    std::error_code ignored;
    if (o.rows.empty() || !path_exists(o.rows)) return;
    if (!std::filesystem::is_regular_file(o.rows, ignored) ||
        std::filesystem::equivalent(o.rows, "/dev/stdout", ignored))
        fail(EXIT_CANNOT_CREATE, "--rows %s is no regular file, or stdout; give the name of a file, which is replaced",
             o.rows.c_str());
    std::istringstream files(o.task);
    for (std::string file; std::getline(files, file);)
        ENSURE(!std::filesystem::equivalent(file, o.rows, ignored), "--rows %s is a file of --task; give another name",
               o.rows.c_str());
}

// --task: prints a line for each task.
template <class floatX>
static void eval_tasks(const Options& o, Comm& comm, const Groups& groups, const RunStart& source, int T) {
    const std::vector<Task> tasks = read_tasks(o.task, *source.tokenizer, o.prepend_eot, T);
    const auto scores = score_all<floatX>(o, comm, groups, source, T, tasks);
    if (comm.rank != 0) return;
    std::vector<Row> table;
    std::string rows;
    for (size_t i = 0; i < tasks.size(); i++) {
        table.push_back({tasks[i].name, summarize(tasks[i], scores[i]).text()});
        if (!o.rows.empty()) rows += rows_json(tasks[i], scores[i]);
    }
    if (!o.rows.empty()) replace_file(std::filesystem::weakly_canonical(o.rows), rows);  // a link's target
    print_stdout(table_text(table));
}

// --text: each document after text_start(). A text file is one document.
template <class floatX>
static void eval_text(const Options& o, Comm& comm, const Groups& groups, const RunStart& source, int T) {
    ENSURE(o.stride <= T, "--stride %d is more than the %d tokens of a window; give that or less", o.stride, T);
    const std::vector<std::string> documents = read_documents(o.text, o.text_key, comm.rank == 0);
    double words = 0.0, loss = 0.0;
    int64_t bytes = 0, count = 0;
    std::vector<Sequence> windows;
    Encoder encoder(*source.tokenizer);
    for (const std::string& text : documents) {
        std::vector<int> tokens = text_start(*source.tokenizer);
        const int start = int(tokens.size());
        encode(encoder, text, tokens, true);
        std::ranges::move(text_windows(tokens, start, T, o.stride ? o.stride : T), std::back_inserter(windows));
        words += double(count_words(text));
        bytes += int64_t(text.size());
        count += int64_t(tokens.size()) - start;
    }
    if (bytes == 0) fail(EXIT_BAD_DATA, "--text %s has no text", o.text.c_str());
    const std::vector<Task> tasks = {{o.text, {{std::move(windows)}}}};
    const auto scores = score_all<floatX>(o, comm, groups, source, T, tasks);
    for (const Score& s : scores[0]) loss -= s.logprob;
    if (comm.rank != 0) return;
    const std::string of = documents.size() > 1 ? " of " + counted(int64_t(documents.size()), "document") : "";
    print_stdout(format("%s on %s: %.6f bits per byte, word perplexity %.4f, loss %.6f nats per token, over %s%s\n",
                        message_text(source.weights).c_str(), message_text(o.text).c_str(),
                        loss / double(bytes) / std::log(2.0), std::exp(loss / words), loss / double(count),
                        counted(count, "token").c_str(), of.c_str()));
}

template <class floatX>
static void eval_loss(const Options& o, Comm& comm, const Groups& groups, const RunStart& source, int T) {
    DataLoaderConfig data = {o.val_data, "--val-data", o.micro_batch, T, source.config.V};
    data.rank = groups.dp.rank, data.world_size = groups.dp.world_size;
    data.in_order = true, data.max_windows = windows_of(o.val_tokens, T);
    Corpus corpus = open_corpus(o.val_data, "--val-data", T);
    check_vocabulary(corpus, "--val-data", source, o);
    DataLoader loader(data, std::move(corpus));
    compare_ranks(comm, o, {{"weights", source.weights}, {"validation data", hex(loader.corpus.fingerprint)}});
    GPT2<floatX> model(source.config, Purpose::eval, o.micro_batch, T, shard_of(groups.tp));
    load_model(model, source, comm, groups.tp);
    ProgressLine progress;
    const double loss = *evaluate(model, loader, groups.dp, report_batches(progress, comm));
    comm.reached("the end");
    progress.clear();
    check_finite<floatX>(loss, source, o.val_data);
    if (comm.rank != 0) return;
    print_stdout(format("%s on %s: loss %.6f nats per token, perplexity %.4f, over %s of %s\n",
                        message_text(source.weights).c_str(), message_text(o.val_data).c_str(), loss, std::exp(loss),
                        counted(loader.num_windows, "window").c_str(), counted(T, "token").c_str()));
}

template <class floatX>
static int evaluate_model(const Options& o, Comm& comm, const Launch& launch) {
    const Groups groups = make_groups(comm, o.tensor_parallel);
    const RunStart source = find_trained_model(o, o.val_data.empty(), comm);
    check_tensor_parallel(o, source.config, source.config.max_T, comm.world_size);
    const int T = o.seq_len ? o.seq_len : source.config.max_T;
    check_tokens_at_once(o.micro_batch, T);
    check_memory<floatX>(o, source.config, T, shard_of(groups.tp),
                         device_bytes_free(std::max(1, launch.local_world_size)));
    if (!o.task.empty()) eval_tasks<floatX>(o, comm, groups, source, T);
    if (!o.text.empty()) eval_text<floatX>(o, comm, groups, source, T);
    if (!o.val_data.empty()) eval_loss<floatX>(o, comm, groups, source, T);
    return 0;
}

int run_eval(const Options& o, Dtype dtype, Comm& comm, const Launch& launch) {
    check_rows(o);
    return with_dtype(dtype, [&]<class floatX>(floatX) { return evaluate_model<floatX>(o, comm, launch); });
}
