// tokenizer_files.cpp: reads and writes a tokenizer's files. It reads files with Hugging Face's names and with
// OpenAI's.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "text/tokenizer.h"

using nlohmann::json;

// GPT-2 writes bytes as characters: 33-126, 161-172 and 174-255 as themselves, the other 68 as U+0100, U+0101, ...
// Ids 0-255 are the bytes in the order of these characters.
struct ByteAlphabet {
    int byte_of[0x144];  // by code point; -1: not in the alphabet
    int code_of[256];
    uint8_t in_order[256];
};

static constexpr ByteAlphabet alphabet = [] {
    ByteAlphabet a{};
    int others = 0, place = 0;
    for (int& byte : a.byte_of) byte = -1;
    for (int byte = 0; byte < 256; byte++) {
        const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        a.code_of[byte] = itself ? byte : 0x100 + others++;
        a.byte_of[a.code_of[byte]] = byte;
    }
    for (int code = 0; code < 0x144; code++)
        if (a.byte_of[code] >= 0) a.in_order[place++] = uint8_t(a.byte_of[code]);
    return a;
}();

static std::string to_alphabet(const std::string& bytes) {
    std::string out;
    for (const char byte : bytes) {
        const int code = alphabet.code_of[uint8_t(byte)];
        if (code < 0x80) {
            out += char(code);
        } else {
            out += char(0xc0 | code >> 6);
            out += char(0x80 | (code & 0x3f));
        }
    }
    return out;
}

// Returns false if the text has a character outside of the alphabet. The last code point of the alphabet, U+0143, takes
// two bytes in UTF-8.
static bool from_alphabet(const std::string& text, std::string& bytes) {
    bytes.clear();
    for (size_t i = 0; i < text.size(); i++) {
        int code = uint8_t(text[i]);
        if (code >= 0x80) {
            if (code > 0xdf || i + 1 == text.size()) return false;
            code = (code & 0x1f) << 6 | (uint8_t(text[++i]) & 0x3f);
        }
        if (code >= 0x144 || alphabet.byte_of[code] < 0) return false;
        bytes += char(alphabet.byte_of[code]);
    }
    return true;
}

static bool is_added(const Tokenizer& tokenizer, int id) {
    return std::ranges::binary_search(tokenizer.added, id, {}, &AddedToken::id);
}

// ---- reading

using Ids = std::unordered_map<std::string, int>;  // ids by the token's text in the file

static Ids read_vocab(const json& vocab, const std::string& where) {
    if (!vocab.is_object()) fail(EXIT_BAD_DATA, "%s: the vocabulary is not an object of tokens and ids", where.c_str());
    Ids ids;
    ids.reserve(vocab.size());
    for (const auto& [token, id] : vocab.items()) {
        if (!id.is_number_unsigned() || id.get<uint64_t>() >= MAX_VOCAB_SIZE)
            fail(EXIT_BAD_DATA, "%s: token \"%s\" has the id %s; ids must be whole numbers below %d", where.c_str(),
                 printable(token).c_str(), printable(id.dump()).c_str(), MAX_VOCAB_SIZE);
        ids.emplace(token, id.get<int>());
    }
    return ids;
}

// Adds a token, which is plain text and not made of bytes. If it is also in the vocabulary it must have the same id
// there.
static void add_token(Tokenizer& tokenizer, Ids& ids, const std::string& content, const AddedToken& token,
                      const std::string& where) {
    const auto [place, is_new] = ids.emplace(content, token.id);
    if (!is_new && place->second != token.id)
        fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has the id %d, but the id %d in the vocabulary", where.c_str(),
             printable(content).c_str(), token.id, place->second);
    tokenizer.added.push_back(token);
}

// Returns a setting of an added token.
static bool setting(const json& token, const char* name, const std::string& where) {
    const json value = token.value(name, json(false));
    if (!value.is_boolean())
        fail(EXIT_BAD_DATA, "%s: %s of an added token is %s, not true or false", where.c_str(), name,
             printable(value.dump()).c_str());
    return value.get<bool>();
}

static void read_added_tokens(Tokenizer& tokenizer, Ids& ids, const json& added, const std::string& where) {
    if (!added.is_array()) fail(EXIT_BAD_DATA, "%s: added_tokens is not a list", where.c_str());
    for (const json& token : added) {
        if (!token.is_object() || !token.contains("content") || !token["content"].is_string() ||
            !token.contains("id") || !token["id"].is_number_unsigned() || token["id"].get<uint64_t>() >= MAX_VOCAB_SIZE)
            fail(EXIT_BAD_DATA, "%s: an added token has no content or no id below %d: %s", where.c_str(),
                 MAX_VOCAB_SIZE, printable(token.dump()).c_str());
        const std::string content = token["content"].get<std::string>();
        if (setting(token, "single_word", where))
            fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has single_word, which is not supported; set it to false",
                 where.c_str(), printable(content).c_str());
        add_token(tokenizer, ids, content,
                  {token["id"].get<int>(), setting(token, "special", where), setting(token, "lstrip", where),
                   setting(token, "rstrip", where), setting(token, "normalized", where)},
                  where);
    }
}

// Sets the bytes of every token. Refuses ids with a gap, and two tokens with the same id.
static void fill_tokens(Tokenizer& tokenizer, const Ids& ids, const std::string& where) {
    const int vocab_size = int(ids.size());
    std::vector<bool> seen(ids.size());
    tokenizer.tokens.resize(ids.size());
    for (const auto& [text, id] : ids) {
        if (id >= vocab_size)
            fail(EXIT_BAD_DATA, "%s: has %d tokens, but \"%s\" has the id %d: ids must be 0 to %d without a gap",
                 where.c_str(), vocab_size, printable(text).c_str(), id, vocab_size - 1);
        if (seen[size_t(id)])
            fail(EXIT_BAD_DATA, "%s: two tokens have the id %d, one is \"%s\"", where.c_str(), id,
                 printable(text).c_str());
        seen[size_t(id)] = true;
        if (is_added(tokenizer, id))
            tokenizer.tokens[size_t(id)] = text;
        else if (!from_alphabet(text, tokenizer.tokens[size_t(id)]))
            fail(EXIT_BAD_DATA,
                 "%s: token %d, \"%s\", has a character that stands for no byte; is this a byte-level BPE?",
                 where.c_str(), id, printable(text).c_str());
    }
}

static void find_byte_tokens(Tokenizer& tokenizer, const Ids& ids, const std::string& where) {
    for (int byte = 0; byte < 256; byte++) {
        const auto found = ids.find(to_alphabet(std::string(1, char(byte))));
        if (found == ids.end() || is_added(tokenizer, found->second))
            fail(EXIT_BAD_DATA, "%s: there is no token for the byte %d; is this a byte-level BPE?", where.c_str(),
                 byte);
        tokenizer.byte_tokens[byte] = found->second;
    }
}

static int id_of(const Ids& ids, const std::string& text, size_t number, const std::string& where) {
    const auto found = ids.find(text);
    if (found == ids.end())
        fail(EXIT_BAD_DATA, "%s: merge %zu needs the token \"%s\", which is not in the vocabulary", where.c_str(),
             number, printable(text).c_str());
    return found->second;
}

static void add_merge(Tokenizer& tokenizer, const Ids& ids, const std::string& left, const std::string& right,
                      const std::string& where) {
    const size_t number = tokenizer.merges.size() + 1;
    const Merge merge{id_of(ids, left, number, where), id_of(ids, right, number, where),
                      id_of(ids, left + right, number, where)};
    for (const int id : {merge.left, merge.right, merge.token})
        if (is_added(tokenizer, id))
            fail(EXIT_BAD_DATA, "%s: merge %zu uses the added token %d", where.c_str(), number, id);
    for (const int id : {merge.left, merge.right})
        if (tokenizer.tokens[size_t(id)].empty())  // merges.txt cannot represent an empty token
            fail(EXIT_BAD_DATA, "%s: merge %zu uses token %d, which is empty", where.c_str(), number, id);
    if (number >= size_t(PairRanks::NONE))
        fail(EXIT_BAD_DATA, "%s: more than %d merges are not supported", where.c_str(), PairRanks::NONE - 1);
    tokenizer.merges.push_back(merge);
}

// Adds the merge of a line "left right". No token contains a space: the alphabet writes it as another character.
static void add_merge_line(Tokenizer& tokenizer, const Ids& ids, const std::string& line, const std::string& where) {
    const size_t space = line.find(' ');
    if (space == std::string::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string::npos)
        fail(EXIT_BAD_DATA, "%s: merge %zu is \"%s\", not two tokens with a space between them", where.c_str(),
             tokenizer.merges.size() + 1, printable(line).c_str());
    add_merge(tokenizer, ids, line.substr(0, space), line.substr(space + 1), where);
}

static void finish_tokenizer(Tokenizer& tokenizer, const std::string& where) {
    tokenizer.ranks.build(tokenizer.merges);
    for (size_t i = 0; i < tokenizer.merges.size(); i++) {
        const Merge& merge = tokenizer.merges[i];
        if (tokenizer.ranks.rank(merge.left, merge.right) != int(i))
            fail(EXIT_BAD_DATA, "%s: merge %zu occurs twice", where.c_str(), i + 1);
    }
}

// Completes the vocabulary, to which merges refer: the tokens' bytes, the special tokens and the tokens of single
// bytes.
static void finish_vocab(Tokenizer& tokenizer, const Ids& ids, const std::string& where) {
    const auto end_of_text = ids.find(END_OF_TEXT);
    if (end_of_text == ids.end())
        fail(EXIT_BAD_DATA, "%s: there is no token %s, which separates documents", where.c_str(), END_OF_TEXT);
    tokenizer.end_of_text = end_of_text->second;
    tokenizer.added.push_back({tokenizer.end_of_text});
    std::ranges::stable_sort(tokenizer.added, {}, &AddedToken::id);
    const auto same_id = [](const AddedToken& a, const AddedToken& b) { return a.id == b.id; };
    tokenizer.added.erase(std::unique(tokenizer.added.begin(), tokenizer.added.end(), same_id), tokenizer.added.end());
    fill_tokens(tokenizer, ids, where);
    find_byte_tokens(tokenizer, ids, where);
}

// Refuses any value of the key except `supported`. An absent key or null stands for its default, which is supported.
static void require_value(const json& object, const char* key, const json& supported, const std::string& where) {
    if (!object.contains(key) || object[key].is_null() || object[key] == supported) return;
    fail(EXIT_BAD_DATA, "%s: %s is %s; only %s, as in GPT-2, is supported", where.c_str(), key,
         printable(object[key].dump()).c_str(), supported.dump().c_str());
}

static void check_pipeline(const json& file, const json& model, const std::string& where) {
    require_value(file, "normalizer", nullptr, where);
    const json pre_tokenizer = file.value("pre_tokenizer", json());
    if (!pre_tokenizer.is_object() || pre_tokenizer.value("type", json()) != "ByteLevel" ||
        pre_tokenizer.value("use_regex", json(true)) != true ||
        pre_tokenizer.value("add_prefix_space", json(true)) != false)
        fail(EXIT_BAD_DATA,
             "%s: pre_tokenizer is %s; only GPT-2's is supported: ByteLevel, use_regex true, add_prefix_space false",
             where.c_str(), printable(pre_tokenizer.dump()).c_str());
    require_value(model, "type", "BPE", where);
    require_value(model, "dropout", nullptr, where);
    require_value(model, "continuing_subword_prefix", "", where);
    require_value(model, "end_of_word_suffix", "", where);
    require_value(model, "byte_fallback", false, where);
    require_value(model, "ignore_merges", false, where);
}

Tokenizer parse_tokenizer_json(const std::string& text, const std::string& where) {
    const json file = parse_json(text, where);
    if (!file.is_object() || !file.contains("model") || !file["model"].is_object() ||
        !file["model"].contains("vocab") || !file["model"].contains("merges") || !file["model"]["merges"].is_array())
        fail(EXIT_BAD_DATA, "%s: is not a tokenizer.json: it has no model with vocab and merges", where.c_str());
    const json& model = file["model"];
    check_pipeline(file, model, where);

    Tokenizer tokenizer;
    Ids ids = read_vocab(model["vocab"], where);
    if (file.contains("added_tokens")) read_added_tokens(tokenizer, ids, file["added_tokens"], where);
    finish_vocab(tokenizer, ids, where);
    for (const json& merge : model["merges"]) {  // "left right", or ["left", "right"] in files since 2024
        if (merge.is_string())
            add_merge_line(tokenizer, ids, merge.get<std::string>(), where);
        else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
            add_merge(tokenizer, ids, merge[0].get<std::string>(), merge[1].get<std::string>(), where);
        else
            fail(EXIT_BAD_DATA, "%s: merge %zu is %s, not a pair of tokens", where.c_str(), tokenizer.merges.size() + 1,
                 printable(merge.dump()).c_str());
    }
    finish_tokenizer(tokenizer, where);
    return tokenizer;
}

Tokenizer parse_vocab_and_merges(const std::string& vocab, const std::string& merges, const std::string& where,
                                 const std::string& added) {
    Tokenizer tokenizer;
    Ids ids = read_vocab(parse_json(vocab, where), where);
    if (!added.empty())
        for (const auto& [content, id] : read_vocab(parse_json(added, where), where))
            add_token(tokenizer, ids, content, {.id = id, .special = false, .normalized = true}, where);
    finish_vocab(tokenizer, ids, where);
    std::istringstream lines(merges);
    std::string line;
    if (merges.starts_with("#version")) std::getline(lines, line);
    while (std::getline(lines, line)) {
        if (line.ends_with('\r')) line.pop_back();
        if (!line.empty()) add_merge_line(tokenizer, ids, line, where);
    }
    finish_tokenizer(tokenizer, where);
    return tokenizer;
}

static std::string read_tokenizer_file(const std::string& path) { return read_file(path, int64_t(1) << 30); }

Tokenizer load_tokenizer(const std::string& path) {
    static constexpr const char* pairs[][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    const bool directory = is_directory(path);
    const std::string folder = directory ? path : parent_directory(path);
    const std::string name = directory ? "" : path.substr(path.rfind('/') + 1);
    if (directory && path_exists(path + "/tokenizer.json")) return load_tokenizer(path + "/tokenizer.json");
    for (const auto& [vocab, merges] : pairs) {
        const std::string vocab_path = folder + "/" + vocab, merges_path = folder + "/" + merges;
        if (directory ? !path_exists(vocab_path) && !path_exists(merges_path) : name != vocab && name != merges)
            continue;
        for (const std::string& part : {vocab_path, merges_path})
            if (!path_exists(part))
                fail(EXIT_NO_INPUT, "%s: is missing; a tokenizer needs both %s and %s", part.c_str(), vocab, merges);
        const std::string added_path = folder + "/added_tokens.json";
        return parse_vocab_and_merges(read_tokenizer_file(vocab_path), read_tokenizer_file(merges_path),
                                      vocab_path + " with " + merges,
                                      path_exists(added_path) ? read_tokenizer_file(added_path) : "");
    }
    if (directory)
        fail(EXIT_NO_INPUT, "%s: has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt",
             path.c_str());
    return parse_tokenizer_json(read_tokenizer_file(path), path);
}

// ---- writing

using nlohmann::ordered_json;

std::vector<std::string> written_tokens(const Tokenizer& tokenizer) {
    std::vector<std::string> written;
    for (int id = 0; id < tokenizer.vocab_size(); id++) {
        const std::string& bytes = tokenizer.tokens[size_t(id)];
        written.push_back(is_added(tokenizer, id) ? bytes : to_alphabet(bytes));
    }
    return written;
}

std::vector<std::string> written_merges(const Tokenizer& tokenizer) {
    const std::vector<std::string> tokens = written_tokens(tokenizer);
    std::vector<std::string> written;
    for (const Merge& merge : tokenizer.merges)
        written.push_back(tokens[size_t(merge.left)] + " " + tokens[size_t(merge.right)]);
    return written;
}

// Returns the tokens and their ids, in the order of the ids.
static ordered_json vocab_object(const std::vector<std::string>& written) {
    ordered_json::object_t vocab;
    for (size_t id = 0; id < written.size(); id++)
        vocab.push_back({written[id], id});  // a list underneath; operator[] would search it for each token
    return vocab;
}

static ordered_json tokenizer_json(const Tokenizer& tokenizer, const std::vector<std::string>& written) {
    ordered_json file = ordered_json::parse(R"({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false}
    })");
    for (const AddedToken& token : tokenizer.added)
        file["added_tokens"].push_back({{"id", token.id},
                                        {"content", tokenizer.tokens[size_t(token.id)]},
                                        {"single_word", false},
                                        {"lstrip", token.lstrip},
                                        {"rstrip", token.rstrip},
                                        {"normalized", token.normalized},
                                        {"special", token.special}});
    file["model"]["vocab"] = vocab_object(written);
    file["model"]["merges"] = written_merges(tokenizer);  // as strings: readers from before 2024 do not accept pairs
    return file;
}

void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory, int model_max_length) {
    const std::vector<std::string> written = written_tokens(tokenizer);
    std::string merges = "#version: 0.2\n";
    for (const std::string& merge : written_merges(tokenizer)) merges += merge + "\n";
    ordered_json special_tokens, config = {{"tokenizer_class", "GPT2Tokenizer"},
                                           {"model_max_length", model_max_length},
                                           {"add_prefix_space", false},
                                           {"clean_up_tokenization_spaces", false}};
    for (const char* name : {"bos_token", "eos_token", "unk_token"}) special_tokens[name] = END_OF_TEXT;
    config.update(special_tokens);
    const auto write = [&](const char* name, const ordered_json& content) {
        replace_file(directory + "/" + name, content.dump(2) + "\n");
    };
    write("tokenizer.json", tokenizer_json(tokenizer, written));
    write("vocab.json", vocab_object(written));
    replace_file(directory + "/merges.txt", merges);
    write("tokenizer_config.json", config);
    write("special_tokens_map.json", special_tokens);
}

Tokenizer tokenizer_from_merges(const std::vector<std::pair<int, int>>& merges) {
    Tokenizer tokenizer;
    std::unordered_map<std::string, int> ids;
    const auto add = [&](const std::string& bytes) {
        const auto [place, is_new] = ids.emplace(bytes, tokenizer.vocab_size());
        if (is_new) tokenizer.tokens.push_back(bytes);
        return place->second;
    };
    for (const uint8_t byte : alphabet.in_order) tokenizer.byte_tokens[byte] = add(std::string(1, char(byte)));
    for (const auto& [left, right] : merges)
        tokenizer.merges.push_back(
            {left, right, add(tokenizer.tokens[size_t(left)] + tokenizer.tokens[size_t(right)])});
    tokenizer.end_of_text = tokenizer.vocab_size();
    tokenizer.added = {{tokenizer.end_of_text}};
    tokenizer.tokens.push_back(END_OF_TEXT);
    tokenizer.ranks.build(tokenizer.merges);
    return tokenizer;
}
