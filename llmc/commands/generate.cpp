// generate.cpp: the command `generate`: continues a prompt with a trained model.
#include "infer/generate.h"

#include <algorithm>
#include <cstdio>
#include <iostream>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "base/files.h"
#include "base/print.h"
#include "commands/commands.h"
#include "text/input.h"
#include "train/plan.h"

// Reads a prompt that is piped into the program. A caller may leave its end of the pipe open, and never write.
static std::string read_stdin() {
    if ((fcntl(STDIN_FILENO, F_GETFL) & O_ACCMODE) == O_WRONLY) return "";  // as nohup leaves it
    pollfd input = {STDIN_FILENO, POLLIN, 0};
    if (poll(&input, 1, 10'000) == 0)
        fail(EXIT_NO_INPUT,
             "standard input is open, but nothing came in 10 s; give --prompt TEXT, or </dev/null for none "
             "(--prompt-file /dev/stdin waits longer)");
    return read_prompt("-");
}

// Returns the tokens of a prompt. option: where it comes from.
static std::vector<int> tokens_of_prompt(const Options& o, const RunStart& source, const std::string& text,
                                         const char* option) {
    const std::vector<int> prompt = encode_prompt(*source.tokenizer, text);
    check_prompt(prompt, source.config.max_T, option);
    ENSURE(!o.keep_prompt || int(prompt.size()) <= source.config.max_T / 2,
           "--keep-prompt with a prompt of %zu tokens leaves less than half of the context of %d to new text; shorten "
           "the prompt",
           prompt.size(), source.config.max_T);
    return prompt;
}

// Calls f with each line that a person types, until Ctrl-D. Prints the errors that a line causes.
static void for_each_line(const Comm& comm, const std::function<void(const std::string& line)>& f) {
    pollfd terminal = {STDIN_FILENO, POLLIN, 0};  // it hands over one line at a time
    for (std::string line;;) {
        fputs("> ", stderr);
        while (poll(&terminal, 1, 1000) < 1) comm.reached("the prompt");  // a person may take longer than --timeout
        if (!std::getline(std::cin, line)) break;
        try {
            if (!line.empty()) f(line);
        } catch (const Error& error) {
            if (error.exit_code != EXIT_USAGE) throw;
            print_message(std::string("error: ") + error.what());
        }
    }
    fputs("\n", stderr);
}

template <class floatX>
static int generate_text(const Options& o, Comm& comm) {
    const Groups groups = make_groups(comm, o.tensor_parallel);
    const RunStart source = find_trained_model(o, true, comm);
    check_tensor_parallel(o, source.config, source.config.max_T, comm.world_size);
    const bool has_file = !o.prompt_file.empty(), talks = o.reads_stdin && !has_file && isatty(STDIN_FILENO);
    const bool reads = has_file || (o.reads_stdin && !talks);
    std::string text = o.prompt;
    if (reads)
        text = comm.all_gather_text(comm.rank > 0 ? "" : has_file ? read_prompt(o.prompt_file) : read_stdin())[0];
    if (reads && text.ends_with('\n')) text.resize(text.size() - (text.ends_with("\r\n") ? 2 : 1));
    const char* option = has_file ? "--prompt-file" : reads ? "standard input" : "--prompt";
    const std::vector<int> prompt = tokens_of_prompt(o, source, text, option);
    compare_ranks(comm, o, {{"weights", source.weights}});
    GPT2<floatX> model(source.config, Purpose::generate, 1, source.config.max_T, shard_of(groups.tp));
    load_model(model, source, comm, groups.tp);
    Sampler sampler = {float(o.temperature),        o.top_k, float(o.top_p),
                       float(o.repetition_penalty), o.seed,  source.tokenizer->vocab_size()};
    int64_t texts = 0, tokens = 0;
    double seconds = 0.0;
    const auto print = [&, raw = !stdout_is_terminal()](const std::string& bytes) {
        if (comm.rank == 0) print_stdout(raw ? bytes : terminal_text(bytes));
    };
    const auto write = [&](const std::string& text, const std::vector<int>& prompt) {
        for (int i = 0; i < o.num_samples; i++) {
            print(text);
            StopTexts end = {o.stop, "", false};
            const auto emit = [&](int token) {
                comm.reached("token", tokens++);
                if (token == source.tokenizer->end_of_text || std::ranges::count(source.hf_config.eos, token))
                    return false;
                print(end.add(source.tokenizer->tokens[token]));
                return !end.found;
            };
            const double begin = seconds_now();
            generate(model, prompt, o.max_tokens, sampler, texts++, emit, o.keep_prompt ? int(prompt.size()) : 0);
            seconds += seconds_now() - begin;
            print(end.held + (i + 1 < o.num_samples ? "\n---\n" : "\n"));
        }
    };
    const auto answer = [&](const std::string& line) { write(line, tokens_of_prompt(o, source, line, "the line")); };
    talks ? for_each_line(comm, answer) : write(text, prompt);
    // Open MPI 5.0.7's mpirun sends the end of stdout to its stderr if a message on stderr follows at once.
    if (getenv("OMPI_COMM_WORLD_SIZE")) usleep(100'000);
    if (comm.rank == 0)
        print_message(format("%s in %.1f s: %.1f tokens/s", counted(tokens, "token").c_str(), seconds,
                             double(tokens) / std::max(seconds, 1e-9)));
    comm.reached("the end");
    return 0;
}

int run_generate(const Options& o, Dtype dtype, Comm& comm) {
    const int ranks = comm.world_size;
    ENSURE(ranks == o.tensor_parallel,
           "generate needs as many ranks as --tensor-parallel %d says, and there %s %d; start it with --ranks %d, or "
           "by a launcher with as many",
           o.tensor_parallel, ranks == 1 ? "is" : "are", ranks, o.tensor_parallel);
    return with_dtype(dtype, [&]<class floatX>(floatX) { return generate_text<floatX>(o, comm); });
}
