// option_names.cpp: what is meant by names that are no options.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/common.h"
#include "train/options.h"

// Options and commands of version 0.2.0, which go from this table after 0.3.0, and options of nanoGPT and llm.c.
static constexpr struct {
    const char *names, *use;
} replaced[] = {
    {"--gpus", "--ranks N, or --ranks all; CUDA_VISIBLE_DEVICES chooses the GPUs"},
    {"--nnodes --node-rank --max-restarts", "torchrun, which starts several machines and starts ranks again"},
    {"--rank --world-size --local-rank --rendezvous --run-id",
     "the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or plan --ranks N"},
    {"--print-launch", "the table at the start, which has the ranks"},
    {"--rendezvous-timeout --timeout-start --timeout-step --timeout-validation --timeout-checkpoint", "--timeout"},
    {"--share-gpu", "one GPU for each rank"},
    {"--tp-across-hosts", "--tensor-parallel alone"},
    {"--max-time", "timeout -s TERM 3h50m, or Slurm's --signal=USR1@120"},
    {"--on-spike", "--spike-z Z, which leaves out such steps"},
    {"--hash-check --recompute-check", "--check-replicas"},
    {"--debug-sync", "the variable CUDA_LAUNCH_BLOCKING=1"},
    {"--comm-sms", "the variable NCCL_MAX_CTAS"},
    {"--threads", "the variable OMP_NUM_THREADS"},
    {"--progress", "--quiet, or a pipe, which gets plain lines"},
    {"--trace-steps", "--trace, which has the first 20 steps"},
    {"--fit --gpu-memory", "plan, once for each layout"},
    {"--head-chunks", "--logit-chunks"},
    {"--cudnn", "--attention auto in place of on, mma in place of off"},
    {"--resume=strict", "--resume, which warns of a damaged checkpoint and takes the one before it"},
    {"verify", "--resume or --init, which verify what they read"},
    {"explain", "the messages of the ranks, which say where each one is"},
    {"--batch-size", "--micro-batch, in sequences per rank; --global-batch is in tokens per step"},
    {"--gradient-accumulation-steps", "--global-batch, in tokens per step over all ranks"},
    {"--max-iters", "--steps"},
    {"--learning-rate", "--lr"},
    {"--block-size", "--seq-len"},
    {"-m --val-batches --batches --eval-iters", "--val-tokens, in tokens over all ranks"},
    {"-r", "--recompute none, gelu or layer"},
    {"-w", "--master-weights on or off"},
    {"-f", "--precision"},
};

std::string replacement(const std::string& name) {
    std::string dashed = name;
    if (name.starts_with("--")) std::replace(dashed.begin(), dashed.end(), '_', '-');
    for (const auto& row : replaced)
        if (format(" %s ", row.names).find(" " + dashed + " ") != std::string::npos)
            return format("there is no %s; use %s", name.c_str(), row.use);
    return "";
}

// Counts the insertions, deletions and substitutions that turn a into b.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); j++)
            diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])}));
    }
    return row[b.size()];
}

std::string unknown_option(const std::string& name, const std::vector<std::string>& known) {
    if (const std::string use = replacement(name); !use.empty()) return use;
    std::string nearest;
    size_t least = 1 + std::max<size_t>(2, name.size() / 3);
    for (const std::string& other : known) {
        const bool part = name.size() > 4 && other.find(name.substr(2)) != std::string::npos;  // --batch
        const size_t distance = part ? 1 : edit_distance(name, "--" + other);
        if (distance < least) nearest = "; did you mean --" + other + "?", least = distance;
    }
    return format("unknown option %s%s (see --help)", name.c_str(), name.starts_with("--") ? nearest.c_str() : "");
}
