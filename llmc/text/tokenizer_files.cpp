// tokenizer_files.cpp: reads and writes a tokenizer's files. It reads files with Hugging Face's names and with
// OpenAI's. Files that transformers wrote are kept as texts: each of its versions has settings that the others lack.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "text/tokenizer.h"

using nlohmann::json;
using nlohmann::ordered_json;

// GPT-2 writes bytes as characters: 33-126, 161-172 and 174-255 as themselves, the other 68 as U+0100, U+0101, ...
// Ids 0-255 are the bytes in the order of these characters.
struct ByteAlphabet {
    int byte_of[0x144];  // by code point; -1: not in the alphabet
    int code_of[256];
};

static constexpr ByteAlphabet alphabet = [] {
    ByteAlphabet a{};
    int others = 0;
    for (int& byte : a.byte_of) byte = -1;
    for (int byte = 0; byte < 256; byte++) {
        const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        a.code_of[byte] = itself ? byte : 0x100 + others++;
        a.byte_of[a.code_of[byte]] = byte;
    }
    return a;
}();

static std::string to_alphabet(const std::string& bytes) {
    std::string out;
    for (const char byte : bytes) {
        const int code = alphabet.code_of[uint8_t(byte)];
        if (code >= 0x80) out += char(0xc0 | code >> 6);
        out += char(code < 0x80 ? code : 0x80 | (code & 0x3f));
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

static constexpr const char* TEMPLATES = "additional_chat_templates";  // a folder
static constexpr const char* SIDE_FILES[] = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                                             "chat_template.jinja"};

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

// Returns a setting of an added token.
static bool setting(const json& token, const char* name, const std::string& where) {
    const json value = token.value(name, json(false));
    if (!value.is_boolean())
        fail(EXIT_BAD_DATA, "%s: %s of an added token is %s, not true or false", where.c_str(), name,
             printable(value.dump()).c_str());
    return value.get<bool>();
}

// Adds a token as the files write it, which is plain text and not made of bytes, or changes its settings. If it is also
// in the vocabulary it must have the same id there.
static void read_added_token(Tokenizer& tokenizer, Ids& ids, const json& token, const std::string& where) {
    if (!token.is_object() || !token.contains("content") || !token["content"].is_string() || !token.contains("id") ||
        !token["id"].is_number_unsigned() || token["id"].get<uint64_t>() >= MAX_VOCAB_SIZE)
        fail(EXIT_BAD_DATA, "%s: an added token has no content or no id below %d: %s", where.c_str(), MAX_VOCAB_SIZE,
             printable(token.dump()).c_str());
    const std::string content = token["content"].get<std::string>();
    const int id = token["id"].get<int>();
    if (setting(token, "single_word", where))
        fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has single_word, which is not supported; set it to false",
             where.c_str(), printable(content).c_str());
    const auto [place, is_new] = ids.emplace(content, id);
    if (!is_new && place->second != id)
        fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has the id %d, but the id %d in the vocabulary", where.c_str(),
             printable(content).c_str(), id, place->second);
    std::erase_if(tokenizer.added, [=](const AddedToken& known) { return known.id == id; });
    tokenizer.added.push_back({id, setting(token, "special", where), setting(token, "lstrip", where),
                               setting(token, "rstrip", where), setting(token, "normalized", where)});
}

// What transformers reads beside the vocabulary.
struct SideFiles {
    json config = json::object();  // tokenizer_config.json
    json roles = json::object();   // the same with the tokens of special_tokens_map.json
    json model = json::object();   // config.json

    SideFiles(const TokenizerFiles& files, const std::string& where) {
        const auto read = [&](const char* name, json& out) {
            if (files.contains(name)) out.update(parse_python_object(files.at(name), name + (" beside " + where)));
        };
        read("config.json", model);
        read("tokenizer_config.json", config);
        roles = config;
        if (!config.contains("added_tokens_decoder")) read("special_tokens_map.json", roles);
        if (config.value("add_prefix_space", json()) == true)
            fail(EXIT_BAD_DATA, "%s: tokenizer_config.json has add_prefix_space, which is not supported",
                 where.c_str());
    }

    // The text of a token, which is a string or an object; "": none.
    static std::string content(const json& token) {
        const json text = token.is_object() ? token.value("content", json()) : token;
        return text.is_string() ? text.get<std::string>() : "";
    }

    // The text of a role such as "bos_token". GPT2Tokenizer has <|endoftext|> for three of them.
    std::string role(const std::string& name) const {
        const bool gpt2 = content(config.value("tokenizer_class", json("GPT2Tokenizer"))).starts_with("GPT2Tokenizer");
        const bool by_default = gpt2 && (name == "bos_token" || name == "eos_token");
        return content(roles.value(name, by_default ? json(END_OF_TEXT) : json()));
    }
};

// Makes the tokens of the roles special. As transformers does, it adds those that the vocabulary lacks, at its end; but
// not <|endoftext|>, which is there by default only.
static void read_roles(Tokenizer& tokenizer, Ids& ids, const SideFiles& side, const std::string& where) {
    std::vector<json> tokens;
    for (const char* role : {"bos", "eos", "unk", "sep", "pad", "cls", "mask"})
        tokens.push_back(side.roles.value(std::string(role) + "_token", json()));
    for (const char* list : {"additional_special_tokens", "extra_special_tokens"})
        for (const json& token : side.roles.value(list, json::array())) tokens.push_back(token);
    for (const json& token : tokens) {
        const std::string content = SideFiles::content(token);
        const auto place = ids.find(content);
        if (content.empty() || (place == ids.end() && content == END_OF_TEXT)) continue;
        const int id = place == ids.end() ? int(ids.size()) : place->second;
        const auto known = std::ranges::find(tokenizer.added, id, &AddedToken::id);
        json written = token.is_object() ? token : json::object();
        written.update({{"id", unsigned(id)}, {"content", content}});
        if (known == tokenizer.added.end()) read_added_token(tokenizer, ids, written, where);
        std::ranges::find(tokenizer.added, id, &AddedToken::id)->special = true;
    }
}

// The added tokens of tokenizer_config.json, or of added_tokens.json, which older versions of transformers wrote.
static void read_side_tokens(Tokenizer& tokenizer, Ids& ids, const TokenizerFiles& files, const SideFiles& side,
                             const std::string& where) {
    if (const json tokens = side.config.value("added_tokens_decoder", json()); tokens.is_object()) {
        for (const auto& [id, written] : tokens.items()) {
            json token = written.is_object() ? written : json::object();
            const auto place = ids.find(SideFiles::content(token));
            token["id"] = unsigned(place == ids.end() ? std::atoi(id.c_str()) : place->second);
            read_added_token(tokenizer, ids, token, where);
        }
    } else if (files.contains("added_tokens.json")) {
        const json added = parse_json(files.at("added_tokens.json"), "added_tokens.json beside " + where);
        for (const auto& [content, id] : read_vocab(added, where))
            if (std::ranges::find(tokenizer.added, id, &AddedToken::id) == tokenizer.added.end())
                read_added_token(tokenizer, ids, {{"content", content}, {"id", unsigned(id)}, {"normalized", true}},
                                 where);
    }
    read_roles(tokenizer, ids, side, where);
    std::ranges::sort(tokenizer.added, {}, &AddedToken::id);
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
        if (found == ids.end() || tokenizer.tokens[size_t(found->second)] != std::string(1, char(byte)))
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
        if (const std::string& text = tokenizer.tokens[size_t(id)];
            is_added(tokenizer, id) && text != to_alphabet(text))
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
    if (space == line.npos || space == 0 || space + 1 == line.size() || line.rfind(' ') != space)
        fail(EXIT_BAD_DATA, "%s: merge %zu is \"%s\", not two tokens with a space between them", where.c_str(),
             tokenizer.merges.size() + 1, printable(line).c_str());
    add_merge(tokenizer, ids, line.substr(0, space), line.substr(space + 1), where);
}

// Finds the token that ends documents. No text may be merged into it. Returns whether transformers finds it, too.
static bool find_end_of_text(Tokenizer& tokenizer, const Ids& ids, const SideFiles& side, const std::string& where) {
    std::vector<int> candidates;
    const auto add = [&](const std::string& name) {
        if (const auto found = ids.find(name); found != ids.end()) candidates.push_back(found->second);
    };
    for (const std::string& name : {std::string(END_OF_TEXT), side.role("eos_token")}) add(name);
    const size_t named = candidates.size();
    add(SideFiles::content(side.config.value("eos_token", json())));  // special_tokens_map.json may name another one
    const json in_model = side.model.value("eos_token_id", json());
    for (const json& id : in_model.is_array() ? in_model : json::array({in_model}))
        if (id.is_number_unsigned() && id < tokenizer.vocab_size()) candidates.push_back(id.get<int>());
    for (const char* name : {"</s>", "<|end_of_text|>", "<eos>", "[EOS]"}) add(name);
    const auto is_text = [&](int id) {
        return std::ranges::count(tokenizer.byte_tokens, id) > 0 ||
               std::ranges::count(tokenizer.merges, id, &Merge::token) > 0;
    };
    const auto found = std::ranges::find_if_not(candidates, is_text);
    if (found == candidates.end())
        fail(EXIT_BAD_DATA,
             "%s: no token ends documents: there is neither %s, nor an eos_token in tokenizer_config.json, nor an "
             "eos_token_id in config.json; name one as eos_token in tokenizer_config.json",
             where.c_str(), END_OF_TEXT);
    tokenizer.end_of_text = *found;
    if (!is_added(tokenizer, *found)) tokenizer.added.push_back({*found});
    std::ranges::sort(tokenizer.added, {}, &AddedToken::id);
    std::ranges::find(tokenizer.added, *found, &AddedToken::id)->special = true;
    return size_t(found - candidates.begin()) < named;
}

// Returns the tokens that a post_processor of tokenizer.json puts in front of a text.
static std::vector<int> prefix_of(const json& processor, int vocab_size, const std::string& where) try {
    const json type = processor.is_null() ? json("ByteLevel") : processor.at("type");
    std::vector<int> prefix;
    if (type == "ByteLevel") return prefix;
    if (type == "Sequence") {
        for (const json& part : processor.at("processors")) {
            const std::vector<int> outer = prefix_of(part, vocab_size, where);
            prefix.insert(prefix.begin(), outer.begin(), outer.end());
        }
        return prefix;
    }
    const json single = type == "TemplateProcessing" ? processor.at("single") : json();
    bool supported = !single.empty() && single.back().contains("Sequence");  // no token behind the text
    for (size_t i = 0; supported && i + 1 < single.size(); i++) {
        const std::string name = single[i].at("SpecialToken").at("id").get<std::string>();
        for (const json& id : processor.at("special_tokens").at(name).at("ids")) {
            supported &= id.is_number_unsigned() && id < vocab_size;
            prefix.push_back(supported ? id.get<int>() : 0);
        }
    }
    if (supported) return prefix;
    fail(EXIT_BAD_DATA, "%s: post_processor is %s; only one that puts tokens in front of a text is supported",
         where.c_str(), printable(processor.dump()).c_str());
} catch (const json::exception&) {
    fail(EXIT_BAD_DATA, "%s: post_processor is not of the form of tokenizer.json: %s", where.c_str(),
         printable(processor.dump()).c_str());
}

// Returns the prefix of a tokenizer without tokenizer.json, beside which transformers ignores these settings.
static std::vector<int> prefix_of(const SideFiles& side, int bos, const std::string& where) {
    if (side.config.value("add_eos_token", json()) == true)
        fail(EXIT_BAD_DATA, "%s: tokenizer_config.json has add_eos_token, which is not supported", where.c_str());
    if (side.config.value("add_bos_token", json()) != true || bos < 0) return {};
    return {bos};
}

// Returns the template in chat_template.jinja, or else that of tokenizer_config.json, the default one of several.
static std::string chat_template_of(const TokenizerFiles& files, const SideFiles& side) {
    if (files.contains("chat_template.jinja")) return files.at("chat_template.jinja");
    const json in_config = side.config.value("chat_template", json());
    if (in_config.is_string()) return in_config.get<std::string>();
    for (const json& named : in_config)
        if (named.is_object() && named.value("name", json()) == "default" && named.contains("template"))
            return named["template"].is_string() ? named["template"].get<std::string>() : "";
    return "";
}

// Refuses any value of the key except `supported`. An absent key or null stands for its default, which is supported.
static void require_value(const json& object, const char* key, const json& supported, const std::string& where,
                          const char* note = "") {
    if (!object.contains(key) || object[key].is_null() || object[key] == supported) return;
    fail(EXIT_BAD_DATA, "%s: %s is %s; only %s, as in GPT-2, is supported%s", where.c_str(), key,
         printable(object[key].dump()).c_str(), supported.dump().c_str(), note);
}

// Neither version is followed, because a file that one of them reads would have other tokens in the other one.
static constexpr const char* which_version =
    " (beside a GPT-2 configuration, transformers 4 obeys this setting and 5 ignores it)";

static void check_pipeline(const json& file, const json& model, const std::string& where) {
    require_value(file, "normalizer", nullptr, where, which_version);
    const json pre_tokenizer = file.value("pre_tokenizer", json());
    if (!pre_tokenizer.is_object() || pre_tokenizer.value("type", json()) != "ByteLevel" ||
        pre_tokenizer.value("use_regex", json(true)) != true ||
        pre_tokenizer.value("add_prefix_space", json(true)) != false)
        fail(EXIT_BAD_DATA,
             "%s: pre_tokenizer is %s; only GPT-2's is supported: ByteLevel, use_regex true, add_prefix_space false%s",
             where.c_str(), printable(pre_tokenizer.dump()).c_str(), which_version);
    for (const auto& [key, supported] : {std::pair<const char*, json>("type", "BPE"),
                                         {"dropout", nullptr},
                                         {"continuing_subword_prefix", ""},
                                         {"end_of_word_suffix", ""},
                                         {"byte_fallback", false},
                                         {"ignore_merges", false}})
        require_value(model, key, supported, where);
}

static ordered_json added_token_json(const Tokenizer& tokenizer, const AddedToken& token) {
    return {{"content", tokenizer.tokens[size_t(token.id)]},
            {"single_word", false},
            {"lstrip", token.lstrip},
            {"rstrip", token.rstrip},
            {"normalized", token.normalized},
            {"special", token.special}};
}

// Adds to tokenizer_config.json what only tokenizer.json and config.json say: transformers 5 leaves out the added
// tokens of tokenizer.json where tokenizer_config.json has a list, and 4 does not.
static void complete_config(Tokenizer& tokenizer, bool end_is_named) {
    const auto config = tokenizer.files.find("tokenizer_config.json");
    if (config == tokenizer.files.end()) return;
    JsonMembers changes, added;
    if (!end_is_named) changes = {{"eos_token", json_quoted(tokenizer.tokens[size_t(tokenizer.end_of_text)])}};
    for (auto& [key, decoder] : json_members(config->second)) {
        if (key != "added_tokens_decoder" || !decoder.starts_with('{')) continue;
        const JsonMembers known = json_members(decoder);
        for (const AddedToken& token : tokenizer.added)
            if (const std::string id = std::to_string(token.id);
                std::ranges::find(known, id, &JsonMembers::value_type::first) == known.end())
                added.push_back({id, added_token_json(tokenizer, token).dump()});
        changes.push_back({key, with_members(decoder, added)});
    }
    config->second = with_members(config->second, changes);
}

static void read_merges(Tokenizer& tokenizer, const Ids& ids, const json& merges, const std::string& where) {
    for (const json& merge : merges) {  // "left right", or ["left", "right"] in files since 2024
        if (merge.is_string())
            add_merge_line(tokenizer, ids, merge.get<std::string>(), where);
        else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
            add_merge(tokenizer, ids, merge[0].get<std::string>(), merge[1].get<std::string>(), where);
        else
            fail(EXIT_BAD_DATA, "%s: merge %zu is %s, not a pair of tokens", where.c_str(), tokenizer.merges.size() + 1,
                 printable(merge.dump()).c_str());
    }
    tokenizer.ranks.build(tokenizer.merges);
    for (size_t i = 0; i < tokenizer.merges.size(); i++)
        if (tokenizer.ranks.rank(tokenizer.merges[i].left, tokenizer.merges[i].right) != int(i))
            fail(EXIT_BAD_DATA, "%s: merge %zu occurs twice", where.c_str(), i + 1);
}

// Returns the lines of merges.txt.
static json merge_lines(const std::string& merges) {
    std::istringstream lines(merges);
    json out = json::array();
    for (std::string line; std::getline(lines, line);) {
        if (line.ends_with('\r')) line.pop_back();
        if (!line.empty() && !(out.empty() && line.starts_with("#version"))) out.push_back(line);
    }
    return out;
}

// Reads tokenizer.json, unless there is none.
static json read_one_file(const TokenizerFiles& files, const std::string& where) {
    if (!files.contains("tokenizer.json")) return {};
    json file = parse_json(files.at("tokenizer.json"), where);
    if (!file.is_object() || !file.contains("model") || !file["model"].is_object() ||
        !file["model"].contains("vocab") || !file["model"].contains("merges") || !file["model"]["merges"].is_array())
        fail(EXIT_BAD_DATA, "%s: is not a tokenizer.json: it has no model with vocab and merges", where.c_str());
    check_pipeline(file, file["model"], where);
    return file;
}

Tokenizer parse_tokenizer(TokenizerFiles files, const std::string& where) {
    const SideFiles side(files, where);
    const json file = read_one_file(files, where);
    const bool one_file = !file.is_null();
    Tokenizer tokenizer;
    Ids ids = read_vocab(one_file ? file["model"]["vocab"] : parse_json(files.at("vocab.json"), where), where);
    const json added = one_file ? file.value("added_tokens", json::array()) : json::array();
    if (!added.is_array()) fail(EXIT_BAD_DATA, "%s: added_tokens is not a list", where.c_str());
    for (const json& token : added) read_added_token(tokenizer, ids, token, where);
    read_side_tokens(tokenizer, ids, files, side, where);
    fill_tokens(tokenizer, ids, where);
    find_byte_tokens(tokenizer, ids, where);
    read_merges(tokenizer, ids, one_file ? file["model"]["merges"] : merge_lines(files.at("merges.txt")), where);
    const bool end_is_named = find_end_of_text(tokenizer, ids, side, where);
    const auto id_of_role = [&](const char* role) {
        const auto found = ids.find(side.role(role));
        return found == ids.end() ? -1 : found->second;
    };
    tokenizer.bos = id_of_role("bos_token"), tokenizer.eos = id_of_role("eos_token");
    tokenizer.pad = id_of_role("pad_token");
    tokenizer.prefix = one_file ? prefix_of(file.value("post_processor", json()), tokenizer.vocab_size(), where)
                                : prefix_of(side, tokenizer.bos, where);
    tokenizer.chat_template = chat_template_of(files, side);
    files.erase("config.json");
    tokenizer.files = std::move(files);
    complete_config(tokenizer, end_is_named);
    return tokenizer;
}

static std::string read_tokenizer_file(const std::string& path) { return read_file(path, int64_t(1) << 30); }

Tokenizer load_tokenizer(const std::string& path) {
    static constexpr const char* pairs[][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    const bool directory = is_directory(path), one_file = directory && path_exists(path + "/tokenizer.json");
    const std::string folder = directory ? path : parent_directory(path);
    const std::string name = directory ? "" : path.substr(path.rfind('/') + 1);
    std::string where = directory ? path + "/tokenizer.json" : path;
    TokenizerFiles files;
    const auto read = [&](const std::string& file, const std::string& as) {
        if (path_exists(folder + "/" + file)) files[as] = read_tokenizer_file(folder + "/" + file);
    };
    for (const auto& [vocab, merges] : pairs) {
        const std::string vocab_path = folder + "/" + vocab, merges_path = folder + "/" + merges;
        if (directory ? !path_exists(vocab_path) && !path_exists(merges_path) : name != vocab && name != merges)
            continue;
        for (const std::string& part : {vocab_path, merges_path})
            if (!one_file && !path_exists(part))
                fail(EXIT_NO_INPUT, "%s: is missing; a tokenizer needs both %s and %s", part.c_str(), vocab, merges);
        if (!one_file) where = vocab_path + " with " + merges;
        read(vocab, "vocab.json"), read(merges, "merges.txt");
        break;
    }
    if (one_file) read("tokenizer.json", "tokenizer.json");
    if (directory && files.empty())
        fail(EXIT_NO_INPUT, "%s: has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt",
             path.c_str());
    const bool is_alone = files.empty() && name != "tokenizer.json";  // other files beside it need not be its own
    if (files.empty()) files["tokenizer.json"] = read_tokenizer_file(path);
    if (is_alone) return parse_tokenizer(std::move(files), where);
    for (const char* file : SIDE_FILES) read(file, file);
    read("config.json", "config.json");
    if (is_directory(folder + "/" + TEMPLATES))
        for (const std::string& file : list_directory(folder + "/" + TEMPLATES))
            if (file.ends_with(".jinja")) read(TEMPLATES + ("/" + file), TEMPLATES + ("/" + file));
    return parse_tokenizer(std::move(files), where);
}

// ---- writing

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
    for (const AddedToken& token : tokenizer.added) {
        ordered_json written_token = {{"id", token.id}};
        written_token.update(added_token_json(tokenizer, token));
        file["added_tokens"].push_back(written_token);
    }
    file["model"]["vocab"] = vocab_object(written);
    file["model"]["merges"] = written_merges(tokenizer);  // as strings: readers from before 2024 do not accept pairs
    if (tokenizer.prefix.empty()) return file;
    const std::string bos = tokenizer.tokens[size_t(tokenizer.prefix[0])];
    const auto text = [](const char* name, int type) {
        return ordered_json{{"Sequence", {{"id", name}, {"type_id", type}}}};
    };
    const auto token = [&](int type) { return ordered_json{{"SpecialToken", {{"id", bos}, {"type_id", type}}}}; };
    file["post_processor"] = {{"type", "TemplateProcessing"},
                              {"single", {token(0), text("A", 0)}},
                              {"pair", {token(0), text("A", 0), token(1), text("B", 1)}},
                              {"special_tokens", {{bos, {{"id", bos}, {"ids", tokenizer.prefix}, {"tokens", {bos}}}}}}};
    return file;
}

void set_model_max_length(Tokenizer& tokenizer, int length) {
    tokenizer.max_length = length;
    const auto config = tokenizer.files.find("tokenizer_config.json");
    if (config != tokenizer.files.end())
        config->second = with_members(config->second, {{"model_max_length", std::to_string(length)}});
}

void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory) {
    const std::vector<std::string> written = written_tokens(tokenizer);
    TokenizerFiles files = tokenizer.files;
    const auto missing = [&](const char* name) { return !files.contains(name); };
    const auto text = [](const ordered_json& content) { return content.dump(2) + "\n"; };
    if (missing("tokenizer.json")) files["tokenizer.json"] = text(tokenizer_json(tokenizer, written));
    if (missing("vocab.json")) files["vocab.json"] = text(vocab_object(written));
    if (missing("merges.txt")) {
        std::string& merges = files["merges.txt"] = "#version: 0.2\n";
        for (const std::string& merge : written_merges(tokenizer)) merges += merge + "\n";
    }
    if (missing("tokenizer_config.json")) {
        const std::string end = tokenizer.tokens[size_t(tokenizer.end_of_text)];
        const std::string bos = tokenizer.bos < 0 ? end : tokenizer.tokens[size_t(tokenizer.bos)];
        const ordered_json special_tokens = {{"bos_token", bos}, {"eos_token", end}, {"unk_token", end}};
        ordered_json config = {
            {"tokenizer_class", "GPT2Tokenizer"}, {"add_prefix_space", false}, {"clean_up_tokenization_spaces", false}};
        if (tokenizer.max_length > 0) config["model_max_length"] = tokenizer.max_length;
        config.update(special_tokens);
        files["tokenizer_config.json"] = text(config);
        if (missing("special_tokens_map.json")) files["special_tokens_map.json"] = text(special_tokens);
    }
    for (const char* name : SIDE_FILES)  // an earlier tokenizer may have left them
        if (missing(name)) remove_tree(directory + "/" + name);
    remove_tree(directory + "/" + TEMPLATES);
    if (files.lower_bound(TEMPLATES) != files.end() && files.lower_bound(TEMPLATES)->first.starts_with(TEMPLATES))
        make_directories(directory + "/" + TEMPLATES);
    replace_file(directory + "/tokenizer.json", files.at("tokenizer.json"));  // the largest: the disk may be full
    files.erase("tokenizer.json");
    for (const auto& [name, content] : files) replace_file(directory + "/" + name, content);
}

Tokenizer tokenizer_from_merges(const std::vector<std::pair<int, int>>& merges) {
    Tokenizer tokenizer;
    std::unordered_map<std::string, int> ids;
    const auto add = [&](const std::string& bytes) {
        const auto [place, is_new] = ids.emplace(bytes, tokenizer.vocab_size());
        if (is_new) tokenizer.tokens.push_back(bytes);
        return place->second;
    };
    for (const int byte : alphabet.byte_of)
        if (byte >= 0) tokenizer.byte_tokens[byte] = add(std::string(1, char(byte)));
    for (const auto& [left, right] : merges)
        tokenizer.merges.push_back(
            {left, right, add(tokenizer.tokens[size_t(left)] + tokenizer.tokens[size_t(right)])});
    tokenizer.end_of_text = tokenizer.bos = tokenizer.vocab_size();
    tokenizer.added = {{tokenizer.end_of_text}};
    tokenizer.tokens.push_back(END_OF_TEXT);
    tokenizer.ranks.build(tokenizer.merges);
    return tokenizer;
}
