#include "infer/eval.h"

#include <cstring>

// Each rank sums the losses of each of its windows. Then every rank sums these numbers in the order of the windows. All
// sums are in double, so that the mean over a large set is precise.
template <class floatX>
std::optional<double> evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm,
                               const std::function<bool(int64_t done, int64_t of)>& go_on) {
    const int64_t batches = loader.num_batches, B = loader.config.B;
    std::vector<double> numbers;  // the loss sum of each window, then the number of tokens
    int64_t tokens = 0;
    for (int64_t i = 0; i < batches && go_on(i, batches); i++) {
        const Batch batch = loader.next();
        model.forward(batch.tokens, batch.B, batch.T);
        model.token_losses(batch.targets, batch.B, batch.T);  // tensor-parallel ranks compute both together
        const std::vector<float> losses = to_host(model.acts.losses, int64_t(batch.B) * batch.T);
        for (int b = 0; b < batch.B; b++) {
            double sum = 0.0;
            for (int t = 0; t < batch.T; t++) sum += double(losses[int64_t(b) * batch.T + t]);
            numbers.push_back(sum);
        }
        tokens += batch.valid_tokens;
    }
    numbers.push_back(double(tokens));

    const size_t whole = size_t(batches * B + 1) * sizeof(double);
    const auto all =
        comm.all_gather_text({reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double)});
    for (const std::string& of_rank : all)
        if (of_rank.size() != whole) return {};
    const auto number = [&](size_t rank, int64_t i) {
        double value;
        std::memcpy(&value, all[rank].data() + i * int64_t(sizeof value), sizeof value);
        return value;
    };
    double sum = 0.0, count = 0.0;
    for (int64_t i = 0; i < batches; i++)
        for (size_t rank = 0; rank < all.size(); rank++)
            for (int64_t b = 0; b < B; b++) sum += number(rank, i * B + b);
    for (size_t rank = 0; rank < all.size(); rank++) count += number(rank, batches * B);
    return sum / count;
}

template std::optional<double> evaluate<float>(GPT2<float>&, DataLoader&, Comm&,
                                               const std::function<bool(int64_t, int64_t)>&);
template std::optional<double> evaluate<bf16>(GPT2<bf16>&, DataLoader&, Comm&,
                                              const std::function<bool(int64_t, int64_t)>&);
