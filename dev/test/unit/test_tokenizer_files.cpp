// test_tokenizer_files.cpp: tests that tokenizer files are saved and loaded again, and that damaged ones are refused.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/files.h"
#include "base/json.h"
#include "support/parse.h"
#include "support/refusal.h"
#include "support/small_tokenizer.h"
#include "support/temporary.h"
#include "text/tokenizer.h"

static void check_equal(const Tokenizer& got, const Tokenizer& want) {
    CHECK(same_tokenizer(got, want));
    CHECK(std::equal(got.byte_tokens, got.byte_tokens + 256, want.byte_tokens));
}

TEST_CASE("a saved tokenizer is loaded by its directory, by each of its files, and by OpenAI's names") {
    const Tokenizer& tokenizer = small_tokenizer();
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path);
    for (const std::string name : {"", "/tokenizer.json", "/vocab.json", "/merges.txt"})
        check_equal(load_tokenizer(folder.path + name), tokenizer);
    std::filesystem::create_directory(folder / "openai");
    std::filesystem::rename(folder / "vocab.json", folder / "openai/encoder.json");
    std::filesystem::rename(folder / "merges.txt", folder / "openai/vocab.bpe");
    for (const std::string name : {"", "/encoder.json", "/vocab.bpe"})
        check_equal(load_tokenizer((folder / "openai") + name), tokenizer);
    CHECK_FALSE(contains(read_bytes(folder / "tokenizer_config.json"), "model_max_length"));
    Tokenizer of_model = tokenizer;
    set_model_max_length(of_model, 128);
    save_tokenizer(of_model, folder.path);
    CHECK(contains(read_bytes(folder / "tokenizer_config.json"), "\"model_max_length\": 128"));
}

TEST_CASE("merges.txt may lack its last newline and its first line, and may have Windows line ends and a mark") {
    TemporaryDirectory folder;
    save_tokenizer(small_tokenizer(), folder.path);
    const std::string vocab = read_bytes(folder / "vocab.json"), merges = read_bytes(folder / "merges.txt");
    std::string windows;
    for (const char c : merges) windows += c == '\n' ? "\r\n" : std::string(1, c);
    for (const std::string& text :
         {merges.substr(0, merges.size() - 1), merges.substr(merges.find('\n') + 1), windows, "\xef\xbb\xbf" + merges})
        check_equal(parse_tokenizer({{"vocab.json", vocab}, {"merges.txt", text}}, "test"), small_tokenizer());
}

static Tokenizer parse_one_file(const std::string& text, const std::string& where) {
    return parse_tokenizer({{"tokenizer.json", text}}, where);
}

static std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

static std::string small_json() {
    TemporaryDirectory folder;
    save_tokenizer(tokenizer_from_merges({{64, 65}, {256, 66}}), folder.path);  // a b, ab c
    return read_bytes(folder / "tokenizer.json");
}

TEST_CASE("tokenizer.json may have merges as pairs, settings without effect, and may lack some fields") {
    const std::string text = small_json();
    const Tokenizer want = parse_one_file(text, "test");
    CHECK(encode(want, "abcab") == std::vector<int>{257, 256});
    CHECK(contains(text, "\"Ń\": 255"));  // stands for byte 173, the soft hyphen
    std::string pairs = replaced(text, "\"a b\"", "[\"a\", \"b\"]");
    check_equal(parse_one_file(replaced(pairs, "\"ab c\"", "[\"ab\", \"c\"]"), "test"), want);
    for (const char* field : {"    \"ignore_merges\": false,\n", "    \"type\": \"BPE\",\n"})
        check_equal(parse_one_file(replaced(text, field, ""), "test"), want);
    const std::string nothing = replaced(text, "\"dropout\": null", "\"dropout\": 0.0"), null = "\"normalizer\": null";
    const std::string sequence = "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [";
    check_equal(parse_one_file(replaced(nothing, null, sequence + "]}"), "test"), want);
    CHECK_THROWS_AS(parse_one_file(replaced(nothing, null, sequence + "{\"type\": \"NFC\"}]}"), "test"), Error);
}

TEST_CASE("tokenizer.json: other added tokens are kept, and an empty token is accepted") {
    std::string text = replaced(small_json(), "\"<|endoftext|>\": 258", "\"<|endoftext|>\": 258,\n\"Ġ <pad>\": 259");
    const std::string pad = R"({"id": 259, "content": "Ġ <pad>", "special": true, "lstrip": true},)";
    text = replaced(text, "\"added_tokens\": [", "\"added_tokens\": [" + pad + R"({"id": 260, "content": "new"},)");
    const Tokenizer tokenizer = parse_one_file(text, "test");
    CHECK(tokenizer.added ==
          std::vector<AddedToken>{{258, END_OF_TEXT}, {259, "Ġ <pad>", true, true}, {260, "new", false}});
    CHECK(!same_tokenizer(tokenizer, parse_one_file(small_json(), "test")));
    CHECK(tokenizer.tokens[259] == "Ġ <pad>");
    CHECK(encode(tokenizer, "new") == std::vector<int>{260});
    const std::string with_empty = replaced(small_json(), "\"abc\": 257", "\"abc\": 257, \"\": 259");
    for (const Tokenizer& want : {tokenizer, parse_one_file(with_empty, "test")}) {
        TemporaryDirectory folder;
        save_tokenizer(want, folder.path);
        check_equal(load_tokenizer(folder.path), want);
        if (want.added.size() == 1) check_equal(load_tokenizer(folder / "vocab.json"), want);
    }
    // merges.txt cannot express a merge of the empty token: its line would be a space and one token.
    CHECK_THROWS_WITH_AS(parse_one_file(replaced(with_empty, "\"ab c\"", "[\"\", \"ab\"]"), "test"),
                         doctest::Contains("test: merge 2 is [\"\",\"ab\"]; it must be two tokens"), Error);
}

// As tokenizers 0.23 encodes and decodes.
TEST_CASE("tokenizer.json: an added word may be how a byte or a merge is written") {
    std::string text = replaced(small_json(), "\"a b\"", R"("a b", "é ĺ", "éĺ ¿", "Ġ a")");
    text = replaced(text, "\"<|endoftext|>\": 258", R"("<|endoftext|>": 258, "Ġa": 259, "éĺ": 260, "éĺ¿": 261)");
    text = replaced(text, "\"added_tokens\": [", R"("added_tokens": [{"id": 165, "content": "é"},
        {"id": 87, "content": "x"}, {"id": 220, "content": "Ġ", "special": true}, {"id": 259, "content": "Ġa"},
        {"id": 262, "content": "\n"},)");
    const Tokenizer tokenizer = parse_one_file(text, "");
    const std::vector<int> tokens = encode(tokenizer, "é Äx a\n");
    CHECK(tokens == std::vector<int>{165, 220, 127, 226, 87, 259, 262});
    CHECK(decode(tokenizer, tokens.data(), 7) == "\xe9 Äx a\n");
    CHECK(tokenizer.byte_tokens[uint8_t('\n')] == 198);
    CHECK(encode(tokenizer, "阿Ġa阿") == std::vector<int>{261, 259, 261});
    CHECK(decode(tokenizer, &tokenizer.merges[2].token, 1) == "阿");
    TemporaryDirectory folder;
    save_tokenizer(tokenizer, folder.path);
    check_equal(load_tokenizer(folder.path), tokenizer);
    CHECK((written_tokens(tokenizer)[165] == "é" && written_merges(tokenizer)[2] == "éĺ ¿"));
}

TEST_CASE("a directory's tokenizer has the roles of its files, and is written as it was read") {
    TemporaryDirectory folder, copy;
    save_tokenizer(tokenizer_from_merges({{64, 65}, {256, 66}}), folder.path);  // a b, ab c
    const auto change = [&](const std::string& name, const std::string& from, const std::string& to) {
        write_bytes(folder / name, replaced(read_bytes(folder / name), from, to));
    };
    change("tokenizer_config.json", "{",
           R"({"model_max_length": 1000000000000000019884624838656, "x": NaN,)"
           R"("pad_token": {"content": "<pad>", "rstrip": true}, "mask_token": "ab",)"
           R"("extra_special_tokens": {"image_token": "<i>"},)"
           R"("chat_template": [{"name": "default", "template": "T"}],)"
           R"("added_tokens_decoder": {"260": {"content": "new", "normalized": true}},)");
    change("tokenizer.json", "\"added_tokens\": [", R"("added_tokens": [{"id": 259, "content": "<b>"},)");
    change("tokenizer.json", R"("post_processor": {)", R"("post_processor": {"type": "Sequence", "processors": [
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "B"}}, {"Sequence": {"id": "A"}}],
         "special_tokens": {"B": {"ids": [259]}}}, {"type": "ByteLevel"}]}, "old": {)");
    const Tokenizer tokenizer = load_tokenizer(folder.path);
    CHECK(tokenizer.added == std::vector<AddedToken>{{256, "ab"},
                                                     {258, END_OF_TEXT},
                                                     {259, "<b>", false},
                                                     {260, "new", false, false, false, true},
                                                     {261, "<pad>", true, false, true},
                                                     {262, "<i>"}});
    CHECK((tokenizer.pad == 261 && tokenizer.bos == 258 && tokenizer.chat_template == "T"));
    CHECK(tokenizer.prefix == std::vector<int>{259});
    CHECK(encode_prompt(tokenizer, "abc <pad> ") == std::vector<int>{259, 256, 66, 220, 261});
    CHECK(encode_prompt(tokenizer, "") == std::vector<int>{259});
    save_tokenizer(tokenizer, copy.path);
    for (const std::string& name : list_directory(folder.path))
        if (name != "tokenizer_config.json") CHECK(read_bytes(copy / name) == read_bytes(folder / name));
    CHECK(
        contains(read_bytes(copy / "tokenizer_config.json"), "\"259\": {\n      \"content\": \"<b>\","));  // completed
    CHECK(contains(read_bytes(copy / "tokenizer_config.json"), R"("model_max_length": 1000000000000000019884624838656,
  "x": NaN,)"));
    check_equal(load_tokenizer(copy.path), tokenizer);
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) std::filesystem::remove(folder / file);
    write_bytes(folder / "tokenizer_config.json", R"({"add_bos_token": true})");
    CHECK(load_tokenizer(folder.path).prefix == std::vector<int>{258});
}

TEST_CASE("documents end with the token that the files name, where there is no <|endoftext|>") {
    TemporaryDirectory folder, copy;
    save_tokenizer(tokenizer_from_merges({{64, 65}}), folder.path);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) std::filesystem::remove(folder / name);
    const std::string vocab = read_bytes(folder / "vocab.json");
    const auto end = [&](const std::string& token, const char* file, const char* content) {
        for (const char* name : {"config.json", "tokenizer_config.json"}) std::filesystem::remove(folder / name);
        write_bytes(folder / "vocab.json", replaced(vocab, END_OF_TEXT, token));
        write_bytes(folder / file, content);
        const Tokenizer tokenizer = load_tokenizer(folder.path);
        save_tokenizer(tokenizer, copy.path);
        CHECK(same_tokenizer(load_tokenizer(copy.path), tokenizer));  // without config.json
        remove_tree(copy.path), make_directories(copy.path);
        return tokenizer.end_of_text;
    };
    CHECK(end("<end>", "tokenizer_config.json", R"({"eos_token": {"content": "<end>"}})") == 257);
    CHECK(end("<end>", "tokenizer_config.json", R"({"eos_token": "<end>"})") == 257);
    CHECK(end("<end>", "tokenizer_config.json", R"({"pad_token": "<|endoftext|>"})") == 258);  // added
    CHECK(end("<end>", "config.json", R"({"eos_token_id": 257})") == 257);
    CHECK(end("<end>", "config.json", R"({"eos_token_id": [50256, 3, 256, 257]})") == 257);  // the others are text
    CHECK(end("</s>", "config.json", R"({"eos_token_id": 50256})") == 257);
    CHECK(contains(refusal([&] { end("<end>", "config.json", "{}"); }), "no token ends documents: there is neither"));

    // As in transformers <|endoftext|> is text, if the three roles that it has by default are those of others.
    write_bytes(folder / "added_tokens.json", R"({"<bos>": 258, "<eos>": 259, "<unk>": 260})");
    CHECK(end(END_OF_TEXT, "tokenizer_config.json",
              R"({"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"})") == 259);
    CHECK(end(END_OF_TEXT, "tokenizer_config.json", R"({"bos_token": "<bos>", "eos_token": "<eos>"})") == 257);
}

TEST_CASE("added_tokens.json of older directories adds its tokens") {
    TemporaryDirectory folder;
    save_tokenizer(tokenizer_from_merges({{64, 65}}), folder.path);
    std::filesystem::remove(folder / "tokenizer.json");
    write_bytes(folder / "added_tokens.json", R"({"<b>": 259, "<a>": 258})");
    const Tokenizer tokenizer = load_tokenizer(folder.path);
    CHECK(tokenizer.vocab_size() == 260);
    CHECK(encode(tokenizer, "<a>a<b>", true) == std::vector<int>{258, 64, 259});
    write_bytes(folder / "added_tokens.json", R"({"<a>": 300})");
    CHECK(contains(refusal([&] { load_tokenizer(folder.path); }), "\"<a>\" has the id 300, but ids must be 0 to 258"));
    write_bytes(folder / "added_tokens.json", R"({"<b>": 259, "<a>": 258, "a<": 260})");
    write_bytes(folder / "special_tokens_map.json",
                R"({"sep_token": "<b>", "mask_token": {"content": "<a>", "lstrip": true, "normalized": true}})");
    for (int i = 0; i < 2; i++) {  // the second time from the tokenizer.json that is written
        const Tokenizer with_roles = load_tokenizer(folder.path);
        CHECK(encode(with_roles, "a<b>b <a>a<", true) == std::vector<int>{64, 259, 65, 220, 258, 260});
        save_tokenizer(with_roles, folder.path);
    }
    std::filesystem::remove(folder / "tokenizer.json");
    for (const auto& [config, message] :
         {std::pair(R"({"split_special_tokens": true})", "split_special_tokens is true; only false"),
          {R"({"tokenizer_class": "RobertaTokenizer"})", "tokenizer_class is RobertaTokenizer, which may give"}}) {
        write_bytes(folder / "tokenizer_config.json", config);
        CHECK(contains(refusal([&] { load_tokenizer(folder.path); }), message));
    }
    write_bytes(folder / "tokenizer.json", small_json());
    CHECK(contains(refusal([&] { load_tokenizer(folder.path); }), "make it PreTrainedTokenizerFast"));
    write_bytes(folder / "tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizerFast"})");
    CHECK_NOTHROW(load_tokenizer(folder.path));
}

// What roles give to tokens: L: lstrip, R: rstrip, T: their text alone. The tokens of "a <a> <|endoftext|>", which has
// the default roles of GPT2Tokenizer, are those of transformers 5.24.
static const struct {
    std::vector<std::pair<const char*, std::string>> roles;
    std::vector<int> tokens;
} several_settings[] = {
    {{{"eos", "T<a>"}, {"cls", "R<a>"}}, {64, 220, 258, 257}},
    {{{"bos", "T<a>"}, {"eos", "R<a>"}}, {64, 220, 258, 257}},
    {{{"cls", "L<a>"}, {"eos", "R<a>"}}, {64, 258, 220, 257}},
    {{{"eos", "R<a>"}, {"unk", "T<a>"}, {"cls", "L<a>"}}, {64, 258, 220, 257}},
    {{{"eos", "T<a>"}, {"unk", "R<a>"}, {"cls", "T<a>"}}, {64, 220, 258, 257}},
    {{{"bos", "R<a>"}, {"eos", "T<a>"}}, {64, 220, 258, 220, 257}},
    {{{"cls", "R<a>"}, {"mask", "T<a>"}}, {64, 220, 258, 220, 257}},
    {{{"mask", "T<a>"}, {"eos", "L<|endoftext|>"}}, {64, 220, 258, 257}},
    {{{"mask", "T<a>"}, {"bos", "L<|endoftext|>"}}, {64, 220, 258, 220, 257}},
};

TEST_CASE("where roles give a token several settings, it has the last new ones") {
    TemporaryDirectory folder;
    save_tokenizer(tokenizer_from_merges({{64, 65}}), folder.path);
    std::filesystem::remove(folder / "tokenizer.json");
    for (const auto& [roles, tokens] : several_settings) {
        Json config({});
        for (const auto& [name, given] : roles) {
            const std::string content = given.substr(1);
            const Json flags = {{"content", content}, {"lstrip", given[0] == 'L'}, {"rstrip", given[0] == 'R'}};
            config[std::string(name) + "_token"] = given[0] == 'T' ? Json(content) : flags;
        }
        write_bytes(folder / "tokenizer_config.json", json_text(config));
        CHECK(encode(load_tokenizer(folder.path), "a <a> <|endoftext|>", true) == tokens);
    }
}

TEST_CASE("extra tokens and those with names of their own are added, and special as in transformers 5.24") {
    TemporaryDirectory folder;
    save_tokenizer(tokenizer_from_merges({{64, 65}}), folder.path);
    std::filesystem::remove(folder / "tokenizer.json");
    const auto added = [&](const char* config, const char* map) {
        write_bytes(folder / "tokenizer_config.json", config);
        write_bytes(folder / "special_tokens_map.json", map);
        std::string out;
        for (const AddedToken& token : load_tokenizer(folder.path).added)
            if (token.content != END_OF_TEXT) out += token.content + (token.special ? "*" : "");
        return out;
    };
    CHECK(added(R"({"a_token": "<a>", "pad_token": "<p>"})", R"({"b_token": "<b>"})") == "<p>*<a>*<b>*");
    CHECK(added(R"({"extra_special_tokens": {"a": "<a>"}})", R"({"additional_special_tokens": ["<b>"]})") ==
          "<a>*<b>*");
    CHECK(added(R"({"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]})", "{}") == "<a>*");
    CHECK(added(R"({"additional_special_tokens": ["<a>"]})", R"({"additional_special_tokens": ["<b>"]})") == "<a>*");
    CHECK(added(R"({"pad_token": "<a>"})", R"({"pad_token": "<b>"})") == "<b>*");
    write_bytes(folder / "added_tokens.json", R"({"<a>": 258, "<b>": 259, "<c>": 260})");
    CHECK(added(R"({"pad_token": "<a>"})", R"({"additional_special_tokens": ["<b>"]})") == "<a>*<b><c>");
    CHECK(added("{}", R"({"extra_special_tokens": ["<b>"], "eos_token": "<c>"})") == "<a><b>*<c>*");
}

// Changes of small_json(), and what is said of the file then.
static const struct {
    const char *from, *to, *message;
} refused_changes[] = {
    // Not JSON, or a setting that GPT-2 does not have.
    {"\"version\"", "version", "test: is not valid JSON"},
    {"\"model\"", "\"madel\"", "is not a tokenizer.json"},
    {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", "normalizer is {\"type\":\"NFC\"}; only null"},
    {"\"type\": \"ByteLevel\"", "\"type\": \"Metaspace\"", "only GPT-2's is supported"},
    {"\"add_prefix_space\": false", "\"add_prefix_space\": true", "only GPT-2's is supported"},
    {"\"use_regex\": true", "\"use_regex\": false", "only GPT-2's is supported"},
    {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", "type is \"Unigram\"; only \"BPE\""},
    {"\"dropout\": null", "\"dropout\": 0.1", "dropout is 0.1"},
    {"\"end_of_word_suffix\": \"\"", "\"end_of_word_suffix\": \"</w>\"", "end_of_word_suffix is \"</w>\""},
    {"\"byte_fallback\": false", "\"byte_fallback\": true", "byte_fallback is true"},
    // Ids or bytes that are not complete.
    {"\"!\": 0", "\"!\": -1", "token \"!\" has the id -1"},
    {"\"!\": 0", "\"!\": 1e300", "has the id 1e300"},
    {"\"!\": 0", "\"!\": 1", "has the id 1, but ids must be 0 to 258, each once"},
    {"\"!\": 0", "\"!\": 300", "\"!\" has the id 300, but ids must be 0 to 258, each once"},
    {"\"!\": 0", "\"! \": 0", "token 0, \"! \", has a character that stands for no byte"},
    // An added token that is not in the vocabulary.
    {"\"content\": \"<|endoftext|>\"", "\"content\": 7", "an added token has no content"},
    {"\"single_word\": false", "\"single_word\": true", "added token \"<|endoftext|>\" has single_word"},
    {"\"lstrip\": false", "\"lstrip\": 1", "lstrip of an added token is 1, not true or false"},
    {"\"id\": 258", "\"id\": 257", "has the id 257, but the id 258 in the vocabulary"},
    {"\"Ā\": 188", "\"zz\": 188", "there is no token for the byte 0"},
    // A merge that is not two tokens of the vocabulary, or occurs twice.
    {"\"a b\"", "\"a  b\"", "merge 1 is \"a  b\"; it must be two tokens with a space between them"},
    {"\"a b\"", "\"a q\"", "merge 1 needs the token \"aq\", which is not in the vocabulary"},
    {"\"a b\"", "[\"a\"]", "merge 1 is [\"a\"]; it must be two tokens"},
    {"\"a b\"", "\"a b\", \"a b\"", "merge 2 occurs twice"},
    {"\"ab c\"", "\"<|endoftex t|>\"", "merge 2 needs the token \"<|endoftex\""},
};

TEST_CASE("tokenizer.json: files that are damaged, incomplete or of another tokenizer are refused") {
    const std::string text = small_json();
    const auto refused = [&](const std::string& from, const std::string& to) {
        return refusal([&] { parse_one_file(replaced(text, from, to), "test"); });
    };
    for (const auto& c : refused_changes) {
        CAPTURE(c.message);
        CHECK(refused(c.from, c.to).starts_with("65 test: "));
        CHECK(contains(refused(c.from, c.to), c.message));
    }
    CHECK(
        contains(refused("\"normalizer\": null", "\"normalizer\": " + std::string(1000000, '[')), "inside each other"));
    for (size_t length = 0; length + 2 < text.size(); length += 101)  // a file that was cut off
        CHECK_THROWS_AS(parse_one_file(text.substr(0, length), "test"), Error);
}

TEST_CASE("a missing tokenizer is EXIT_NO_INPUT, an incomplete one EXIT_BAD_DATA") {
    TemporaryDirectory folder;
    const auto refused = [](const std::string& path) { return refusal([&] { load_tokenizer(path); }); };
    CHECK(refused(folder / "missing").starts_with("66 "));
    const std::string message = "66 " + folder.path + ": is no whole tokenizer, which has tokenizer.json, or both ";
    CHECK(refused(folder.path) == message + "vocab.json and merges.txt");
    write_bytes(folder / "vocab.json", "{}");
    CHECK(refused(folder.path) == message + "vocab.json and merges.txt");
    write_bytes(folder / "merges.txt", "");
    CHECK(contains(refused(folder.path), "vocab.json with merges.txt: the file of merges is empty; get it again"));
    write_bytes(folder / "merges.txt", "\n");
    CHECK(contains(refused(folder.path), "vocab.json with merges.txt: there is no token for the byte 0"));
    CHECK(refused(folder.path).starts_with("65 "));
}
