#include "infer/eval.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <numeric>

// Returns the numbers of each rank.
template <class T>
static std::vector<std::vector<T>> gather_numbers(Comm& comm, const std::vector<T>& own) {
    std::vector<std::vector<T>> all;
    for (const auto& of_rank :
         comm.all_gather_text({reinterpret_cast<const char*>(own.data()), own.size() * sizeof(T)}))
        std::memcpy(all.emplace_back(of_rank.size() / sizeof(T)).data(), of_rank.data(), of_rank.size());
    return all;
}

// ---- the loss of windows

// Each rank sums the losses of each of its windows. Then every rank sums these numbers in the order of the windows. All
// sums are in double, so that the mean over a large set is precise.
template <class floatX>
std::optional<double> evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm, const GoOn& go_on) {
    const int64_t batches = loader.num_batches, B = loader.config.B;
    std::vector<double> numbers;  // the loss sum of each window, then the number of tokens
    int64_t tokens = 0;
    for (int64_t i = 0; i < batches && go_on(i, batches); i++) {
        const Batch batch = loader.next();
        model.forward(batch.tokens, batch.B, batch.T);
        model.token_losses(batch.targets, batch.B, batch.T);  // tensor-parallel ranks compute both together
        const std::vector<float> losses = to_host(model.acts.losses, int64_t(batch.B) * batch.T);
        for (auto window = losses.begin(); window < losses.end(); window += batch.T)
            numbers.push_back(std::accumulate(window, window + batch.T, 0.0));
        tokens += batch.valid_tokens;
    }
    numbers.push_back(double(tokens));

    const auto all = gather_numbers(comm, numbers);
    double sum = 0.0, count = 0.0;
    for (const auto& of_rank : all) {
        if (int64_t(of_rank.size()) != batches * B + 1) return {};
        count += of_rank.back();
    }
    for (int64_t i = 0; i < batches; i++)
        for (const auto& of_rank : all)
            for (int64_t b = 0; b < B; b++) sum += of_rank[size_t(i * B + b)];
    return sum / count;
}

// ---- the scores of sequences

static int inputs_of(const Sequence& s) { return int(s.tokens.size()) - 1; }

// Tokens of each row of a batch whose longest sequence is s. On a GPU a new number costs the choice of algorithms, so
// there are few.
template <class floatX>
static int batch_T(const GPT2<floatX>& model, const Sequence& s) {
    const int T = round_up(inputs_of(s), device_memory_is_host() ? 1 : 16);
    return model.divisible_tokens(std::min(model.T, T));
}

using ScoreBatch = std::vector<size_t>;  // indices of sequences, the longest first

// The longest sequences come first, so that memory that is too small shows at once.
template <class floatX>
static std::vector<ScoreBatch> make_batches(const GPT2<floatX>& model, const std::vector<const Sequence*>& sequences) {
    ScoreBatch order(sequences.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return inputs_of(*sequences[a]) > inputs_of(*sequences[b]); });
    std::vector<ScoreBatch> batches;
    size_t fit = 0;  // sequences in the last batch when it is full
    for (const size_t i : order) {
        if (batches.empty() || batches.back().size() == fit) {
            batches.emplace_back();
            fit = size_t(int64_t(model.B) * model.T / batch_T(model, *sequences[i]));
        }
        batches.back().push_back(i);
    }
    return batches;
}

// Whether each scored token is the likeliest one. The least likely one mostly is not, so its logits are the first to be
// computed, and one with a probability above one half needs none. losses: of the sequence's inputs, which are the
// model's rows from `row` on.
template <class floatX>
static bool is_greedy(GPT2<floatX>& model, const Sequence& s, const float* losses, int row) {
    std::vector<int> order(s.tokens.size() - size_t(s.scored));
    std::iota(order.begin(), order.end(), s.scored - 1);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return losses[a] > losses[b]; });
    for (const int t : order) {
        if (losses[t] < 0.69f) return true;  // less than log 2
        const std::vector<float> logits = to_host(model.row_logits(row + t), model.config.V);
        if (std::max_element(logits.begin(), logits.end()) - logits.begin() != s.tokens[size_t(t) + 1]) return false;
    }
    return true;
}

// Appends the scores of a batch.
template <class floatX>
static void score_batch(GPT2<floatX>& model, const std::vector<const Sequence*>& sequences, const ScoreBatch& batch,
                        const DeviceBuffer<int>& device, bool greedy, std::vector<Score>& out) {
    const int B = int(batch.size()), T = batch_T(model, *sequences[batch[0]]), N = B * T;
    std::vector<int> host(size_t(2 * N), 0);  // tokens, targets
    std::fill(host.begin() + N, host.end(), -1);
    for (int b = 0; b < B; b++) {
        const Sequence& s = *sequences[batch[size_t(b)]];
        std::copy(s.tokens.begin(), s.tokens.end() - 1, host.begin() + b * T);
        const int first = std::min(s.scored, s.compared);
        std::copy(s.tokens.begin() + first, s.tokens.end(), host.begin() + N + b * T + first - 1);
    }
    copy_to_device(device.data, host.data(), 2 * N * int64_t(sizeof(int)), model.stream);
    model.forward(device.data, B, T);
    model.token_losses(device.data + N, B, T);
    const std::vector<float> losses = to_host(model.acts.losses, N);
    for (int b = 0; b < B; b++) {
        const Sequence& s = *sequences[batch[size_t(b)]];
        const auto sum = [&](int from) {
            return 0.0 - std::accumulate(losses.begin() + b * T + from - 1, losses.begin() + b * T + inputs_of(s), 0.0);
        };
        const bool likeliest = greedy && is_greedy(model, s, losses.data() + b * T, b * T);
        out.push_back({sum(s.scored), sum(s.compared), double(likeliest)});
    }
}

static void check_same_sequences(const std::vector<const Sequence*>& sequences, Comm& comm) {
    uint64_t hash = sequences.size();
    for (const Sequence* s : sequences)
        hash = XXH3_64bits_withSeed(s->tokens.data(), s->tokens.size() * sizeof(int), hash + uint64_t(s->scored));
    const std::vector<std::string> hashes = comm.all_gather_text(std::to_string(hash));
    for (size_t rank = 1; rank < hashes.size(); rank++)
        if (hashes[rank] != hashes[0])
            fail(EXIT_BAD_DATA, "rank %zu has other rows to evaluate than rank 0: give all ranks the same files", rank);
}

template <class floatX>
std::optional<std::vector<Score>> score(GPT2<floatX>& model, const std::vector<const Sequence*>& sequences, bool greedy,
                                        Comm& comm, const GoOn& go_on) {
    check_same_sequences(sequences, comm);
    const std::vector<ScoreBatch> batches = make_batches(model, sequences);
    const DeviceBuffer<int> device(2 * int64_t(model.B) * model.T, "the rows to evaluate");
    const size_t ranks = size_t(comm.world_size), rounds = ceil_div(batches.size(), ranks);
    std::vector<Score> own;
    for (size_t i = 0; i < rounds && go_on(int64_t(i), int64_t(rounds)); i++) {
        // A rank without a batch repeats the last one: with ZeRO-3 all ranks exchange weights in forward.
        const size_t batch = std::min(i * ranks + size_t(comm.rank), batches.size() - 1);
        score_batch(model, sequences, batches[batch], device, greedy, own);
        if (batch < i * ranks + size_t(comm.rank)) own.resize(own.size() - batches[batch].size());
    }
    const auto all = gather_numbers(comm, own);
    std::vector<Score> scores(sequences.size());
    std::vector<size_t> taken(ranks);  // scores of each rank
    for (size_t i = 0; i < batches.size(); i++)
        for (const size_t sequence : batches[i]) {
            size_t& next = taken[i % ranks];
            if (next == all[i % ranks].size()) return {};
            scores[sequence] = all[i % ranks][next++];
        }
    return scores;
}

INSTANTIATE(evaluate);
INSTANTIATE(score);
