#include "commands.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "checkpoint.h"
#include "eval.h"
#include "files.h"
#include "generate.h"
#include "gpt2.h"
#include "json.h"
#include "log.h"
#include "setup.h"
#include "tokenize.h"
#include "unicode.h"

// The start of a path or pattern decides; "{/a,/b}/train_*.bin" is absolute.
static bool is_relative(const std::string& path) {
    const size_t start = path.find_first_not_of('{');
    return start != std::string::npos && path[start] != '/' && path[start] != '~';
}

// A path as a shell pattern that matches nothing else.
static std::string as_pattern(const std::string& path) {
    std::string out;
    for (const char c : path) out += std::string(strchr("*?[]{}\\", c) ? "\\" : "") + c;
    return out;
}

// A directory that is not here any more is that of another machine, or of a tree that was moved with its data.
static void resolve_paths(nlohmann::json& options, const std::string& directory) {
    if (!is_directory(directory) || directory == current_directory()) return;
    for (const auto& [name, is_pattern] :
         {std::pair("train-data", true), {"val-data", true}, {"tokenizer", false}, {"init", false}}) {
        const auto path = options.find(name);
        if (path == options.end() || !path->is_string() || !is_relative(path->get<std::string>())) continue;
        *path = (is_pattern ? as_pattern(directory) : directory) + "/" + path->get<std::string>();
    }
}

std::string saved_options(const Options& o) {
    const std::string path = o.output + "/run.json";
    if (!path_exists(path) && (o.command == Command::plan || o.print_launch || !o.train_data.empty())) return "";
    ENSURE(path_exists(path),
           "--train-data is missing, and %s, from which --resume would take the options, is not there: give the "
           "--output of a run, or all options",
           path.c_str());
    nlohmann::json run = read_json_object(path, 16 << 20);
    const auto options = run.find("options");
    if (options == run.end() || !options->is_object())
        fail(EXIT_BAD_DATA, "%s: has no options; give --train-data and the others", path.c_str());
    if (const auto directory = run.find("directory"); directory != run.end() && directory->is_string())
        resolve_paths(*options, directory->get<std::string>());
    return options->dump();
}

template <class floatX>
static void load_model(GPT2<floatX>& model, const Start& start) {
    load_weights(start.weights, model.layout,
                 [&](const float* host, StateKind, Param p, int l) { model.set_param(p, l, host); });
    for (int b = 0; b < model.layout.num_buckets(); b++) model.pack_bucket(b);
}

template <class floatX>
int generate_text(const Options& o) {
    const Start start = find_trained_model(o, true);
    for (const std::string& line : start.notes) fprintf(stderr, "%s\n", line.c_str());
    const Tokenizer& tokenizer = *start.tokenizer;
    std::vector<int> prompt = {tokenizer.end_of_text};
    if (!o.prompt.empty()) prompt = encode(tokenizer, o.prompt);
    check_prompt(prompt, start.config.max_T);  // before it is printed
    GPT2<floatX> model(start.config, Purpose::generate, 1, start.config.max_T);
    load_model(model, start);
    Sampler sampler;
    sampler.temperature = float(o.temperature), sampler.top_k = o.top_k, sampler.top_p = float(o.top_p),
    sampler.seed = o.seed;
    for (int i = 0; i < o.num_samples; i++) {
        TerminalText terminal;  // only a terminal has to be protected from control characters
        const bool raw = !stdout_is_terminal();
        const auto print = [&](const std::string& bytes) { print_stdout(raw ? bytes : terminal.add(bytes)); };
        print(o.prompt);
        generate(model, prompt, o.max_tokens, sampler, uint64_t(i), [&](int token) {
            if (token == tokenizer.end_of_text || token >= tokenizer.vocab_size()) return false;
            print(tokenizer.tokens[token]);
            return true;
        });
        const std::string rest = raw ? "" : terminal.finish();
        print_stdout(rest + (i + 1 < o.num_samples ? "\n---\n" : "\n"));
    }
    return 0;
}

template <class floatX>
int eval_loss(const Options& o) {
    const Start start = find_trained_model(o, false);
    for (const std::string& line : start.notes) fprintf(stderr, "%s\n", line.c_str());
    const int T = o.seq_len ? o.seq_len : start.config.max_T;
    DataLoaderConfig data = {o.val_data, "--val-data", o.micro_batch, T, start.config.V};
    data.fixed_set = true, data.max_batches = o.val_batches;
    DataLoader loader(data);
    const std::string warning = warn_of_tokenizer(start.weights, o.val_data);
    if (!warning.empty()) fprintf(stderr, "warning: %s\n", warning.c_str());
    GPT2<floatX> model(start.config, Purpose::eval, o.micro_batch, T);
    load_model(model, start);
    Comm alone;
    const auto show = [last = seconds_now()](int64_t done, int64_t of, bool failed) mutable {
        if (failed || seconds_now() - last < 1.0) return !failed;
        last = seconds_now();
        fprintf(stderr, isatty(2) ? "\r%lld/%lld batches" : "%lld/%lld batches\n", static_cast<long long>(done),
                static_cast<long long>(of));
        return true;
    };
    const double loss = evaluate(model, loader, alone, show).value();
    if (isatty(2)) fprintf(stderr, "\r\033[K");
    if (!std::isfinite(loss))
        fail(EXIT_BAD_DATA, "the loss of %s on %s is %s: with these weights numbers leave the range of %s",
             start.weights.c_str(), o.val_data.c_str(), std::isnan(loss) ? "NaN" : "infinite", dtype_name<floatX>());
    print_stdout(format("%s on %s: loss %.6f nats per token, perplexity %.4f, over %s windows of %d tokens\n",
                        start.weights.c_str(), o.val_data.c_str(), loss, std::exp(loss),
                        with_commas(loader.num_samples).c_str(), T));
    return 0;
}

template int generate_text<float>(const Options&);
template int generate_text<bf16>(const Options&);
template int eval_loss<float>(const Options&);
template int eval_loss<bf16>(const Options&);
