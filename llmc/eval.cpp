#include "eval.h"

template <class floatX>
double evaluate(GPT2<floatX>& model, DataLoader& loader,
                const std::function<void(int64_t done, int64_t of)>& progress) {
    double sum = 0.0;
    int64_t tokens = 0;
    for (int64_t i = 0; i < loader.num_batches; i++) {
        progress(i, loader.num_batches);
        const Batch batch = loader.next();
        model.forward(batch.tokens, batch.B, batch.T);
        model.token_losses(batch.targets, batch.B, batch.T);
        // In double and in order: the mean over a large set keeps its digits.
        for (float loss : to_host(model.acts.losses, int64_t(batch.B) * batch.T)) sum += double(loss);
        tokens += batch.valid_tokens;
    }
    return sum / double(tokens);
}

template double evaluate<float>(GPT2<float>&, DataLoader&, const std::function<void(int64_t, int64_t)>&);
template double evaluate<bf16>(GPT2<bf16>&, DataLoader&, const std::function<void(int64_t, int64_t)>&);
