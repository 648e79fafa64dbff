// tokenize.cpp: the command `tokenize`: converts text to token shards (text/tokenize.h).
#include "text/tokenize.h"

#include "commands/commands.h"

int run_tokenize(const Options& o, const Launch& launch) {
    ENSURE(launch.world_size == 1,
           "tokenize runs in one process, but %s started %d, which would all do the same; start it without %s",
           launch.launcher.c_str(), launch.world_size, launch.launcher.c_str());
    return tokenize({.inputs = o.inputs,
                     .output = o.output,
                     .replace = o.replace,
                     .tokenizer = o.tokenizer,
                     .special_tokens = o.special_tokens,
                     .train_bpe = o.train_bpe,
                     .val_fraction = o.val_fraction,
                     .val_tokens = o.val_tokens,
                     .shard_tokens = o.shard_tokens,
                     .split = o.split,
                     .text_key = o.text_key,
                     .skip_bad_lines = o.skip_bad_lines,
                     .quiet = o.quiet});
}
