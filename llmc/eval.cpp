#include "eval.h"

#include <cstring>

// A sample's losses are added on its rank, samples in their order by every rank, all in double: the mean over a large
// set keeps its digits.
template <class floatX>
double evaluate(GPT2<floatX>& model, DataLoader& loader, Comm& comm,
                const std::function<void(int64_t done, int64_t of)>& progress) {
    const int64_t batches = loader.num_batches, B = loader.config.B;
    std::vector<double> numbers;  // the sum of each sample, and at last how many tokens that were
    int64_t tokens = 0;
    for (int64_t i = 0; i < batches; i++) {
        progress(i, batches);
        const Batch batch = loader.next();
        model.forward(batch.tokens, batch.B, batch.T);
        model.token_losses(batch.targets, batch.B, batch.T);
        const std::vector<float> losses = to_host(model.acts.losses, int64_t(batch.B) * batch.T);
        for (int b = 0; b < batch.B; b++) {
            double sum = 0.0;
            for (int t = 0; t < batch.T; t++) sum += double(losses[int64_t(b) * batch.T + t]);
            numbers.push_back(sum);
        }
        tokens += batch.valid_tokens;
    }
    numbers.push_back(double(tokens));

    const auto all = comm.exchange({reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double)});
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

template double evaluate<float>(GPT2<float>&, DataLoader&, Comm&, const std::function<void(int64_t, int64_t)>&);
template double evaluate<bf16>(GPT2<bf16>&, DataLoader&, Comm&, const std::function<void(int64_t, int64_t)>&);
