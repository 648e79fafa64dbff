// eval.cpp: the command `eval`: computes the loss of a trained model on token shards.
#include "infer/eval.h"

#include <cmath>

#include "base/terminal.h"
#include "commands/commands.h"
#include "commands/load_model.h"
#include "train/report.h"

template <class floatX>
static int eval_loss(const Options& o, Comm& comm) {
    const Groups groups = make_groups(comm, o.tensor_parallel, o.tp_across_hosts);
    const bool prints = comm.rank == 0;
    const auto message = [&](const std::string& line) {
        if (prints) print_message(line);
    };
    const RunSource source = find_trained_model(o, false);
    for (const std::string& line : source.notes) message("warning: " + line);
    const int T = o.seq_len ? o.seq_len : source.config.max_T;
    DataLoaderConfig data = {o.val_data, "--val-data", o.micro_batch, T, source.config.V};
    data.rank = groups.dp.rank;
    data.world_size = groups.dp.world_size;
    data.in_order = true;
    data.max_batches = o.val_batches;
    DataLoader loader(data);
    const std::string warning = warn_of_tokenizer(source.weights, o.val_data);
    if (!warning.empty()) message("warning: " + warning);
    compare_ranks(comm, o, source, &loader.corpus);
    GPT2<floatX> model(source.config, Purpose::eval, o.micro_batch, T, shard_of(groups.tp));
    load_model(model, source, groups.tp);
    ProgressLine progress;
    loader.config.note = [&](const std::string& line) {
        progress.clear();
        message("note: " + line);
    };
    const auto show = [&](int64_t done, int64_t of, bool failed) {
        if (!failed && prints && progress.due())
            progress.show(format("%lld/%lld batches", static_cast<long long>(done), static_cast<long long>(of)));
        return !comm.any_rank(failed);
    };
    const std::optional<double> result = evaluate(model, loader, groups.dp, show);
    progress.clear();
    if (!result) fail(EXIT_BAD_DATA, "another rank could not read its part of %s", o.val_data.c_str());
    const double loss = *result;
    if (!std::isfinite(loss))
        fail(EXIT_BAD_DATA, "the loss of %s on %s is %s: with these weights, values exceed the range of %s",
             source.weights.c_str(), o.val_data.c_str(), std::isnan(loss) ? "NaN" : "infinite",
             dtype_name(dtype_of<floatX>));
    if (!prints) return 0;
    print_stdout(format("%s on %s: loss %.6f nats per token, perplexity %.4f, over %s window%s of %d tokens\n",
                        source.weights.c_str(), o.val_data.c_str(), loss, std::exp(loss),
                        with_commas(loader.num_windows).c_str(), loader.num_windows == 1 ? "" : "s", T));
    return 0;
}

int run_eval(const Options& o, Dtype dtype, Comm& comm) {
    return with_dtype(dtype, [&]<class floatX>(floatX) { return eval_loss<floatX>(o, comm); });
}
