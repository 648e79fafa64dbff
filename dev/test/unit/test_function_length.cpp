// test_function_length.cpp: tests that no function of the program, its tests and its benches has more than 60 lines,
// with its signature, but two tensor-core kernels.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

// The end of the comment, literal or preprocessor directive that begins at text[begin]; `begin` if there is none.
static size_t end_of_non_code(const std::string& text, size_t begin) {
    const auto past = [&](const std::string& mark, size_t from) {
        const size_t found = text.find(mark, from);
        return found == text.npos ? text.size() : found + mark.size();
    };
    const char c = text[begin];
    if (c == '#') {
        size_t end = text.find('\n', begin);
        while (end != text.npos && text[end - 1] == '\\') end = text.find('\n', end + 1);
        return std::min(end, text.size());
    }
    if (text.compare(begin, 2, "//") == 0) return std::min(text.find('\n', begin), text.size());
    if (text.compare(begin, 2, "/*") == 0) return past("*/", begin + 2);
    if (text.compare(begin, 2, "R\"") == 0) {
        const size_t bracket = text.find('(', begin);
        return past(")" + text.substr(begin + 2, bracket - begin - 2) + "\"", bracket);
    }
    const bool separates_digits = c == '\'' && begin > 0 && isxdigit(text[begin - 1]);
    if ((c != '"' && c != '\'') || separates_digits) return begin;
    size_t end = begin + 1;
    while (end < text.size() && text[end] != c) end += text[end] == '\\' ? 2 : 1;
    return end + 1;
}

// The text without comments, literals and preprocessor directives, with the same lines.
static std::string code_of(const std::string& text) {
    std::string code;
    for (size_t i = 0; i < text.size();) {
        const size_t end = std::min(end_of_non_code(text, i), text.size());
        if (end == i) {
            code += text[i++];
            continue;
        }
        code += std::string(size_t(std::count(text.begin() + long(i), text.begin() + long(end), '\n')), '\n');
        i = end;
    }
    return code;
}

// Whether `head`, the code before a brace, begins a namespace or a type, which contains functions and is none itself.
static bool contains_functions(std::string head) {
    if (head.starts_with("template")) {
        size_t i = head.find('<');
        for (int depth = 0; i < head.size(); i++) {
            depth += (head[i] == '<') - (head[i] == '>');
            if (depth == 0) break;
        }
        head = head.substr(std::min(i + 1, head.size()));
    }
    std::istringstream words(head);
    std::string word;
    words >> word;
    if (word == "inline") words >> word;
    return std::set<std::string>{"namespace", "struct", "class", "union", "enum", "extern"}.count(word) == 1;
}

struct Function {
    std::string head;  // the signature
    int first_line, lines;
};

static std::vector<Function> functions_of(const std::string& text) {
    std::vector<Function> functions;
    std::string head;
    int line = 1, first_line = 0, depth = 0;  // depth: open braces in the present function
    for (const char c : code_of(text)) {
        line += c == '\n';
        if (depth > 0) {
            depth += (c == '{') - (c == '}');
            const bool is_table = head.ends_with("= ") || head.ends_with("=");
            if (depth == 0 && !is_table) functions.push_back({head, first_line, line - first_line + 1});
            if (depth == 0) head.clear();
        } else if (c == '{' && !contains_functions(head)) {
            depth = 1;
        } else if (c == '{' || c == '}' || c == ';') {
            head.clear();
        } else if (!isspace(c) || !head.empty()) {
            if (head.empty()) first_line = line;
            head += isspace(c) ? ' ' : c;
        }
    }
    return functions;
}

static std::vector<std::string> sources() {
    std::vector<std::string> files = {"train_gpt2.cu", "test_gpt2.cu"};
    for (const char* folder : {"llmc", "dev"})
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
            const std::string extension = entry.path().extension().string();
            if (std::set<std::string>{".h", ".c", ".cpp", ".cu", ".cuh"}.count(extension) == 1)
                files.push_back(entry.path().string());
        }
    return files;
}

TEST_CASE("the lines of a function are counted from its signature or template to its last brace") {
    const auto found = functions_of(R"text(// not { this
#define MACRO(x) \
    {
namespace a {
struct B {
    int member() const { return 1'000; }
    char brace = '{';
};
static const int table[] = {
    1,
};
template <class T, int N>
int long_one(T x,
             const char* text = "}") {
    /* } */
    if (x) { return R"(
})"[0]; }
    return 0;
}
}  // namespace a
)text");
    REQUIRE(found.size() == 2);
    CHECK(found[0].first_line == 6);
    CHECK(found[0].lines == 1);
    CHECK(found[1].first_line == 12);
    CHECK(found[1].lines == 8);
}

TEST_CASE("no function has more than 60 lines but the forward and backward kernels on tensor cores") {
    const std::set<std::string> tensor_core = {"attention_forward_mma_kernel", "attention_backward_mma_kernel"};
    size_t functions = 0, exceptions = 0;
    for (const std::string& file : sources()) {
        std::ostringstream text;
        text << std::ifstream(file).rdbuf();
        for (const Function& f : functions_of(text.str())) {
            functions++;
            if (f.lines <= 60) continue;
            INFO(file << ":" << f.first_line << ": " << f.head);
            const bool allowed = std::any_of(tensor_core.begin(), tensor_core.end(),
                                             [&](const std::string& name) { return f.head.find(name) != f.head.npos; });
            exceptions += allowed;
            if (!allowed) CHECK(f.lines <= 60);
        }
    }
    CHECK(functions > 3000);
    CHECK(exceptions == tensor_core.size());
}
