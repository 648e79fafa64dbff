// tokenize.cpp: the command `tokenize`: converts text to token shards (text/tokenize.h).
#include "text/tokenize.h"

#include "commands/commands.h"

int run_tokenize(const Options& o, const Launch& launch) {
    check_one_process(o, launch);
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
