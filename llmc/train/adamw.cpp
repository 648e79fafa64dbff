// adamw.cpp: AdamW (Loshchilov and Hutter 2019). The arithmetic is ops::adamw, one kernel for a whole array.
#include "train/update_rule.h"

template <class floatX>
void adamw_update(const UpdateArgs<floatX>& a) {
    const Hyperparameters& c = a.constants;
    const AdamWConfig config = {c.beta1, c.beta2, c.eps, c.weight_decay, c.seed};
    ops::adamw(a.weights, a.master, a.state[0], a.state[1], a.grads, a.factor, a.begin, a.count, a.decay, config, a.lr,
               a.step, a.stream);
}

template void adamw_update<float>(const UpdateArgs<float>&);
template void adamw_update<bf16>(const UpdateArgs<bf16>&);
