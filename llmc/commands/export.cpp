// export.cpp: the command `export`: converts a model to a GGUF file (checkpoint/gguf.h).
#include <algorithm>

#include "base/print.h"
#include "checkpoint/gguf.h"
#include "commands/commands.h"

// Special tokens are those of the tokenizer, else those of config.json, as llama.cpp's converter has them. A model may
// have more tokens than its tokenizer: these get names that no text has.
static GGUFVocabulary vocabulary_of(const Tokenizer& tokenizer, const HFConfig& config, int V) {
    using Type = GGUFVocabulary::Type;
    GGUFVocabulary out;
    const auto choose = [&](int own, int other, int fallback) {
        return own >= 0 && own < V ? own : other >= 0 && other < V ? other : fallback;
    };
    out.eos = choose(tokenizer.eos, config.eos.empty() ? -1 : config.eos[0], tokenizer.end_of_text);
    out.add_bos = !tokenizer.prefix.empty();
    out.bos = out.add_bos ? tokenizer.prefix[0] : choose(tokenizer.bos, config.bos, out.eos);
    out.pad = choose(tokenizer.pad, config.pad, -1);
    if (tokenizer.prefix.size() > 1)
        fail(EXIT_BAD_DATA, "the tokenizer puts %zu tokens in front of each text, and a GGUF file can name only one",
             tokenizer.prefix.size());
    out.chat_template = tokenizer.chat_template;
    out.tokens = written_tokens(tokenizer), out.merges = written_merges(tokenizer);
    out.types.assign(size_t(std::max(V, tokenizer.vocab_size())), Type::unused);
    std::fill_n(out.types.begin(), tokenizer.vocab_size(), Type::normal);
    for (const AddedToken& token : tokenizer.added)
        out.types[size_t(token.id)] = token.special ? Type::control : Type::user_defined;
    while (int(out.tokens.size()) < V) out.tokens.push_back(format("[PAD%zu]", out.tokens.size()));
    out.tokens.resize(size_t(V)), out.types.resize(size_t(V));  // without tokens that have no embedding
    return out;
}

int run_export(const Options& o, const Launch& launch) {
    check_one_process(o, launch);
    const std::string path = o.inputs[1];
    if (path_exists(path))
        fail(EXIT_CANNOT_CREATE, "%s exists and is not replaced; remove it, or give another name", path.c_str());
    const RunStart source = find_trained_model(o, true, Comm());
    const std::string written = write_gguf(path, source.weights, source.config,
                                           vocabulary_of(*source.tokenizer, source.hf_config, source.config.V), o.type);
    print_stdout(format("%s: %s as %s, %s, %s\n", message_text(path).c_str(), message_text(source.weights).c_str(),
                        option_text(o, "type").c_str(), written.c_str(), human_bytes(InputFile(path).size).c_str()));
    return 0;
}
