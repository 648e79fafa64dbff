// tokenize.cpp: the command `tokenize`: converts text to token shards (text/tokenize.h).
#include "text/tokenize.h"

#include "commands/commands.h"

int run_tokenize(const Options& o) {
    TokenizeOptions t;
    t.inputs = o.inputs;
    t.output = o.output;
    t.tokenizer = o.tokenizer;
    t.train_bpe = o.train_bpe;
    t.val_fraction = o.val_fraction;
    t.val_tokens = o.val_tokens;
    t.shard_tokens = o.shard_tokens;
    t.split = o.split;
    t.text_key = o.text_key;
    t.quiet = o.quiet;
    t.replace = o.replace;
    return tokenize(t);
}
