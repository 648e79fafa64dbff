#include "infer/score.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/common.h"

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
        const std::vector<floatX> logits = to_host(model.row_logits(row + t), model.config.V);
        const auto likelier = [](floatX a, floatX b) { return float(a) < float(b); };
        if (std::max_element(logits.begin(), logits.end(), likelier) - logits.begin() != s.tokens[size_t(t) + 1])
            return false;
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
            return -std::accumulate(losses.begin() + b * T + from - 1, losses.begin() + b * T + inputs_of(s), 0.0);
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
                                        Comm& comm, const std::function<bool(int64_t done, int64_t of)>& go_on) {
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

    const auto all = comm.all_gather_text({reinterpret_cast<const char*>(own.data()), own.size() * sizeof(Score)});
    std::vector<Score> scores(sequences.size());
    std::vector<size_t> taken(ranks);  // bytes of each rank
    for (size_t i = 0; i < batches.size(); i++)
        for (const size_t sequence : batches[i]) {
            const std::string& of_rank = all[i % ranks];
            size_t& at = taken[i % ranks];
            if (at + sizeof(Score) > of_rank.size()) return {};
            std::memcpy(&scores[sequence], of_rank.data() + at, sizeof(Score));
            at += sizeof(Score);
        }
    return scores;
}

template std::optional<std::vector<Score>> score<float>(GPT2<float>&, const std::vector<const Sequence*>&, bool, Comm&,
                                                        const std::function<bool(int64_t, int64_t)>&);
template std::optional<std::vector<Score>> score<bf16>(GPT2<bf16>&, const std::vector<const Sequence*>&, bool, Comm&,
                                                       const std::function<bool(int64_t, int64_t)>&);
