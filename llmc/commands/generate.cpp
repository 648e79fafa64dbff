// generate.cpp: the command `generate`: continues a prompt with a trained model.
#include "infer/generate.h"

#include <cstdio>

#include "base/print.h"
#include "commands/commands.h"
#include "model/mfu.h"
#include "train/run.h"

template <class floatX>
static int generate_text(const Options& o, Comm& comm) {
    const Groups groups = make_groups(comm, o.tensor_parallel);
    const bool prints = comm.rank == 0;
    const RunStart source = find_trained_model(o, true, comm);
    check_tensor_parallel(o, source.config, source.config.max_T, comm.world_size);
    const Tokenizer& tokenizer = *source.tokenizer;
    std::vector<int> prompt = {tokenizer.end_of_text};
    if (!o.prompt.empty()) prompt = encode_added(tokenizer, o.prompt);
    check_prompt(prompt, source.config.max_T);  // before the prompt is printed
    const int kept = o.keep_prompt ? int(prompt.size()) : 0;
    ENSURE(kept <= source.config.max_T / 2,
           "--keep-prompt with a prompt of %d tokens leaves less than half of the context of %d to new text; shorten "
           "the prompt",
           kept, source.config.max_T);
    compare_ranks(comm, o, source, nullptr);
    GPT2<floatX> model(source.config, Purpose::generate, 1, source.config.max_T, shard_of(groups.tp));
    load_model(model, source, comm, groups.tp);
    Sampler sampler;
    sampler.temperature = float(o.temperature);
    sampler.top_k = o.top_k;
    sampler.top_p = float(o.top_p);
    sampler.seed = o.seed;
    sampler.vocab_size = tokenizer.vocab_size();
    for (int i = 0; i < o.num_samples; i++) {
        const bool raw = !stdout_is_terminal();
        const auto print = [&](const std::string& bytes) {
            if (prints) print_stdout(raw ? bytes : terminal_text(bytes));
        };
        print(o.prompt);
        int64_t number = 0;
        generate(
            model, prompt, o.max_tokens, sampler, uint64_t(i),
            [&](int token) {
                comm.reached("token", number++);
                if (token == tokenizer.end_of_text) return false;
                print(tokenizer.tokens[token]);
                return true;
            },
            kept);
        print(i + 1 < o.num_samples ? "\n---\n" : "\n");
    }
    comm.reached("the end");
    return 0;
}

int run_generate(const Options& o, Dtype dtype, Comm& comm) {
    const int ranks = comm.world_size;
    ENSURE(ranks == o.tensor_parallel,
           "generate needs as many ranks as --tensor-parallel %d says, and there %s %d; give --ranks %d",
           o.tensor_parallel, ranks == 1 ? "is" : "are", ranks, o.tensor_parallel);
    batch_memory_advice = device_memory_is_host() ? "free memory, or try a machine with more"
                                                  : "free memory, or try --tensor-parallel on more ranks";
    return with_dtype(dtype, [&]<class floatX>(floatX) { return generate_text<floatX>(o, comm); });
}
