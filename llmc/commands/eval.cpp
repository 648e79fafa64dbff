// eval.cpp: the command `eval`: computes the loss of a trained model on token shards.
#include "infer/eval.h"

#include <algorithm>
#include <cmath>

#include "base/print.h"
#include "commands/commands.h"
#include "model/mfu.h"
#include "train/run.h"

static std::string gib(int64_t bytes) { return plain_number(double(bytes) / double(1 << 30)) + " GiB"; }

// Refuses a micro-batch that does not fit into memory, before any is allocated: the kernel gives memory page by page,
// so a lack of it would show only after many seconds.
template <class floatX>
static void check_memory(const Options& o, const GPT2Config& config, int T, const MemoryOptions& options,
                         int64_t available) {
    const auto bytes = [&](int B) {
        const int64_t batches = 3 * 2 * int64_t(sizeof(int)) * B * T;  // tokens and targets in the loader
        return batches + device_bytes(model_memory<floatX>(config, Purpose::eval, B, T, options));
    };
    if (bytes(o.micro_batch) <= available) return;
    int fits = o.micro_batch;
    while (fits > 0 && bytes(fits) > available) fits /= 2;
    std::string advice = fits > 0 ? format("--micro-batch %d", fits) : "a smaller --seq-len";
    // CPU ranks that share a layer also share the memory of their machine.
    if (fits == 0 && !device_memory_is_host()) advice += ", or --tensor-parallel on more ranks";
    fail(EXIT_USAGE, "--micro-batch %d with --seq-len %d needs %s of memory, and %s are free; try %s", o.micro_batch, T,
         gib(bytes(o.micro_batch)).c_str(), gib(available).c_str(), advice.c_str());
}

template <class floatX>
static int eval_loss(const Options& o, Comm& comm, const Launch& launch) {
    const Groups groups = make_groups(comm, o.tensor_parallel);
    const bool prints = comm.rank == 0;
    const RunStart source = find_trained_model(o, false, comm);
    check_tensor_parallel(o, source.config, source.config.max_T, comm.world_size);
    const int T = o.seq_len ? o.seq_len : source.config.max_T;
    check_tokens_at_once(o.micro_batch, T);
    check_memory<floatX>(o, source.config, T, shard_of(groups.tp),
                         device_bytes_free(std::max(1, launch.local_world_size)));
    DataLoaderConfig data = {o.val_data, "--val-data", o.micro_batch, T, source.config.V};
    data.rank = groups.dp.rank;
    data.world_size = groups.dp.world_size;
    data.in_order = true;
    data.max_windows = windows_of(o.val_tokens, T);
    DataLoader loader(data);
    check_vocabulary(loader.corpus, "--val-data", source, o);
    compare_ranks(comm, o, source, &loader.corpus);
    GPT2<floatX> model(source.config, Purpose::eval, o.micro_batch, T, shard_of(groups.tp));
    load_model(model, source, comm, groups.tp);
    ProgressLine progress;
    const auto show = [&](int64_t done, int64_t of) {
        comm.reached("batch", done);
        if (prints && progress.due())
            progress.show(format("%lld/%lld batches", static_cast<long long>(done), static_cast<long long>(of)));
        return true;
    };
    const double loss = *evaluate(model, loader, groups.dp, show);
    comm.reached("the end");
    progress.clear();
    if (!std::isfinite(loss))
        fail(EXIT_BAD_DATA, "the loss of %s on %s is %s: with these weights, values exceed the range of %s",
             source.weights.c_str(), o.val_data.c_str(), std::isnan(loss) ? "NaN" : "infinite",
             dtype_name(dtype_of<floatX>));
    if (!prints) return 0;
    print_stdout(format("%s on %s: loss %.6f nats per token, perplexity %.4f, over %s of %s\n",
                        message_text(source.weights).c_str(), message_text(o.val_data).c_str(), loss, std::exp(loss),
                        counted(loader.num_windows, "window").c_str(), counted(T, "token").c_str()));
    return 0;
}

int run_eval(const Options& o, Dtype dtype, Comm& comm, const Launch& launch) {
    batch_memory_advice = "lower --micro-batch or --seq-len";
    return with_dtype(dtype, [&]<class floatX>(floatX) { return eval_loss<floatX>(o, comm, launch); });
}
