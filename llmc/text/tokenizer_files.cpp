// tokenizer_files.cpp: reads and writes a tokenizer's files. It reads files with Hugging Face's names and with
// OpenAI's. Files that transformers wrote are kept as texts: each of its versions has settings that the others lack.
#include <algorithm>
#include <sstream>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "text/tokenizer.h"

// GPT-2 writes bytes as characters: 33-126, 161-172 and 174-255 as themselves, the other 68 as U+0100, U+0101, ...
// Ids 0-255 are the bytes in the order of these characters.
struct ByteAlphabet {
    int byte_of[0x144];  // byte of each code point; -1: it is not in the alphabet
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

// Returns the added token with the id, a new one if there is none.
static AddedToken& added_token(Tokenizer& tokenizer, int id, const std::string& content = "") {
    const auto place = std::ranges::lower_bound(tokenizer.added, id, {}, &AddedToken::id);
    return is_added(tokenizer, id) ? *place : *tokenizer.added.insert(place, AddedToken{id, content});
}

// ---- reading

static constexpr const char* TEMPLATES = "additional_chat_templates";  // a folder
static constexpr const char* SIDE_FILES[] = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                                             "chat_template.jinja"};

// Special tokens without a role in transformers 5, and in 4.
static constexpr const char *EXTRA = "extra_special_tokens", *OLD_EXTRA = "additional_special_tokens";

using Ids = std::unordered_map<std::string, int>;  // ids by the token's text in the file

struct TokenizerParser {
    const TokenizerFiles& files;
    const std::string& where;  // named in errors
    // config.json; tokenizer_config.json; its tokens and those of special_tokens_map.json
    const Json model, config, roles;
    Ids ids = {};
    Tokenizer tokenizer = {};
};

[[noreturn]] static void refuse(const TokenizerParser& p, const std::string& why) {
    fail(EXIT_BAD_DATA, "%s: %s", p.where.c_str(), why.c_str());
}

static std::string shown(const Json& value) { return printable(json_text(value)); }

static int checked_id(const TokenizerParser& p, const std::string& token, const Json& id) {
    if (!id.is_index(MAX_VOCAB_SIZE))
        refuse(p, format("token \"%s\" has the id %s; ids must be whole numbers below %d", printable(token).c_str(),
                         shown(id).c_str(), MAX_VOCAB_SIZE));
    return id.get<int>();
}

// Returns the id of a token; -1: there is none.
static int find_id(const TokenizerParser& p, const std::string& token) {
    const auto found = p.ids.find(token);
    return found == p.ids.end() ? -1 : found->second;
}

static Ids read_vocab(const TokenizerParser& p, const Json& vocab) {
    if (vocab.type != Json::object) refuse(p, "the vocabulary is not an object of tokens and ids");
    Ids ids;
    ids.reserve(vocab.members.size());
    for (const auto& [token, id] : vocab.members) ids[token] = checked_id(p, token, id);
    return ids;
}

// The text of a token, which is a string or an object; "": none.
static std::string content_of(const Json& token) {
    const Json& text = token.type == Json::object ? token["content"] : token;
    return text.type == Json::string ? text.text : "";
}

// Adds a token with the settings in `token`, or changes its settings. Added tokens are written as plain text, which is
// not made of bytes. One that is also in the vocabulary must have the same id there.
static void add_token(TokenizerParser& p, const Json& token, const Json& given_id) {
    const std::string content = content_of(token);
    if (content.empty()) refuse(p, "an added token has no content: " + shown(token));
    const int id = checked_id(p, content, given_id), known = p.ids.emplace(content, id).first->second;
    if (known != id)
        refuse(p, format("the added token \"%s\" has the id %d, but the id %d in the vocabulary",
                         printable(content).c_str(), id, known));
    const auto setting = [&](const char* name) {
        const Json& value = token[name];
        if (value.type != Json::boolean && value.type != Json::null)
            refuse(p, format("%s of an added token is %s, not true or false", name, shown(value).c_str()));
        return value == true;
    };
    if (setting("single_word"))
        refuse(p, format("the added token \"%s\" has single_word, which is not supported; set it to false",
                         printable(content).c_str()));
    added_token(p.tokenizer, id) = {
        id, content, setting("special"), setting("lstrip"), setting("rstrip"), setting("normalized")};
}

// Reads a file beside the vocabulary; no members: there is none.
static Json read_side_file(const TokenizerFiles& files, const char* name, const std::string& where) {
    return files.contains(name) ? parse_python_object(files.at(name), name + (" beside " + where)) : Json({});
}

// The text of a role such as "bos_token". GPT2Tokenizer has <|endoftext|> for three of them.
static std::string role(const TokenizerParser& p, const std::string& name) {
    const std::string type = content_of(p.config["tokenizer_class"]);
    const bool has_default = name == "bos_token" || name == "eos_token" || name == "unk_token",
               by_default = (type.empty() || type.starts_with("GPT2Tokenizer")) && has_default;
    return p.roles.contains(name) || !by_default ? content_of(p.roles[name]) : END_OF_TEXT;
}

// Adds special_tokens_map.json, whose values hold, to tokenizer_config.json. As in transformers 5 the config's extra
// tokens come before the map's, whatever their name.
static Json merge_roles(Json roles, const Json& map) {
    const Json extra = roles[EXTRA];
    if (extra.items.empty() && extra.members.empty()) roles[EXTRA] = std::exchange(roles[OLD_EXTRA], {});
    for (const auto& [name, value] : map.members) roles[name] = value;
    return roles;
}

// Tokens with a role, or a name such as "image_token". Default roles count only if the vocabulary has <|endoftext|>.
static std::vector<Json> named_tokens(const TokenizerParser& p) {
    const bool has_end = find_id(p, END_OF_TEXT) >= 0;
    std::vector<Json> named;
    for (const char* name :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
        named.push_back(p.roles.contains(name) || !has_end ? p.roles[name] : Json(role(p, name)));
    for (const auto& [name, token] : p.roles.members)
        if (name.ends_with("_token")) named.push_back(token);
    for (const auto& [name, token] : p.roles[EXTRA].members) named.push_back(token);
    return named;
}

// The added tokens of tokenizer_config.json, or of added_tokens.json, which older versions of transformers wrote. Named
// tokens are special, and as in transformers 5 they and the extra ones are added, with the last new settings of each.
static void read_side_tokens(TokenizerParser& p) {
    const std::vector<Json> named = named_tokens(p), &extra = p.roles[EXTRA].items;
    const auto is_among = [](const auto& tokens, const auto& text) {
        return std::ranges::count(tokens, text, content_of);
    };
    if (p.config["added_tokens_decoder"].type == Json::object) {
        for (const auto& [id, token] : p.config["added_tokens_decoder"].members) {
            const int known = find_id(p, content_of(token));
            add_token(p, token, known < 0 ? std::atoi(id.c_str()) : known);
        }
    } else if (p.files.contains("added_tokens.json")) {
        const Json added = parse_json(p.files.at("added_tokens.json"), "added_tokens.json beside " + p.where);
        for (const auto& [content, id] : read_vocab(p, added)) {
            const bool special = is_among(named, content) + is_among(extra, content) > 0;
            if (!is_added(p.tokenizer, id))
                add_token(p, {{"content", content}, {"special", special}, {"normalized", !special}}, id);
        }
    }
    std::vector<Json> tokens = named;
    std::ranges::copy(extra.empty() ? p.roles[OLD_EXTRA].items : extra, std::back_inserter(tokens));
    Json settings({});  // by the token's text
    for (auto token = tokens.begin(); token != tokens.end(); token++)
        if (!content_of(*token).empty() && std::find(tokens.begin(), token, *token) == token)
            settings[content_of(*token)] = *token;
    for (const auto& [content, token] : settings.members) {
        const int known = find_id(p, content), id = known < 0 ? int(p.ids.size()) : known;
        const bool is_new = !is_added(p.tokenizer, id);
        if (is_new) add_token(p, token, id);
        if (is_new || is_among(named, content) > 0) added_token(p.tokenizer, id).special = true;
    }
}

// Sets the bytes of every token. Refuses ids with a gap, two tokens with the same id, and a byte without a token.
static void fill_tokens(TokenizerParser& p) {
    const size_t vocab_size = p.ids.size();
    std::vector<bool> seen(vocab_size);
    p.tokenizer.tokens.resize(vocab_size);
    std::ranges::fill(p.tokenizer.byte_tokens, -1);
    for (const auto& [text, id] : p.ids) {
        if (size_t(id) >= vocab_size || seen[size_t(id)])
            refuse(p, format("\"%s\" has the id %d, but ids must be 0 to %zu, each once", printable(text).c_str(), id,
                             vocab_size - 1));
        seen[size_t(id)] = true;
        std::string& bytes = p.tokenizer.tokens[size_t(id)];
        const bool added = is_added(p.tokenizer, id), in_alphabet = from_alphabet(text, bytes);
        if (!added && !in_alphabet)
            refuse(p, format("token %d, \"%s\", has a character that stands for no byte; is this a byte-level BPE?", id,
                             printable(text).c_str()));
        if (added && !(in_alphabet && bytes.size() == 1)) bytes = text;
        if (in_alphabet && bytes.size() == 1) p.tokenizer.byte_tokens[uint8_t(bytes[0])] = id;
    }
    const auto missing = std::ranges::find(p.tokenizer.byte_tokens, -1);
    if (missing != std::end(p.tokenizer.byte_tokens))
        refuse(p, format("there is no token for the byte %d; is this a byte-level BPE?",
                         int(missing - p.tokenizer.byte_tokens)));
}

// Adds a merge: "left right", or ["left", "right"] in files since 2024. No token contains a space: the alphabet writes
// it as another character.
static void add_merge(TokenizerParser& p, const Json& written) {
    const auto refuse_merge = [&](const std::string& why) {
        refuse(p, format("merge %zu %s", p.tokenizer.merges.size() + 1, why.c_str()));
    };
    const std::string text =
        written.items.size() == 2 ? written.items[0].text + " " + written.items[1].text : written.text;
    if (std::ranges::count(text, ' ') != 1 || text.starts_with(' ') || text.ends_with(' '))
        refuse_merge("is " + shown(written) + "; it must be two tokens with a space between them, or a list of two");
    const std::string left = text.substr(0, text.find(' ')), right = text.substr(left.size() + 1);
    int ids[3];
    for (int i = 0; const std::string& token : {left, right, left + right}) {
        const int id = ids[i++] = find_id(p, token);
        if (id < 0) refuse_merge("needs the token \"" + printable(token) + "\", which is not in the vocabulary");
        if (i < 3 && is_added(p.tokenizer, id) && token != to_alphabet(p.tokenizer.tokens[size_t(id)]))
            refuse_merge(format("uses the added token %d", id));
    }
    p.tokenizer.tokens[size_t(ids[2])] = p.tokenizer.tokens[size_t(ids[0])] + p.tokenizer.tokens[size_t(ids[1])];
    p.tokenizer.merges.push_back({ids[0], ids[1], ids[2]});
}

static void read_merges(TokenizerParser& p, const Json& merges) {
    if (merges.items.size() >= size_t(PairRanks::NONE))
        refuse(p, format("more than %d merges are not supported", PairRanks::NONE - 1));
    for (const Json& merge : merges.items) add_merge(p, merge);
    Tokenizer& t = p.tokenizer;
    t.ranks.build(t.merges);
    for (size_t i = 0; i < t.merges.size(); i++)
        if (t.ranks.rank(t.merges[i].left, t.merges[i].right) != int(i))
            refuse(p, format("merge %zu occurs twice", i + 1));
}

// Finds the token that ends documents. No text may be merged into it. Returns whether transformers finds it, too.
// <|endoftext|> is text for transformers if it is no added token and has no role.
static bool find_end_of_text(TokenizerParser& p) {
    const int usual = find_id(p, END_OF_TEXT);
    bool is_special = is_added(p.tokenizer, usual);
    for (const char* name : {"bos_token", "eos_token", "unk_token"}) is_special |= role(p, name) == END_OF_TEXT;
    std::vector<int> candidates = {is_special ? usual : -1, find_id(p, role(p, "eos_token")),
                                   find_id(p, content_of(p.config["eos_token"]))};  // its role may be another file's
    const Json& in_model = p.model["eos_token_id"];
    for (const Json& id : in_model.type == Json::array ? in_model.items : std::vector{in_model})
        candidates.push_back(id.is_index(p.tokenizer.vocab_size()) ? id.get<int>() : -1);
    candidates.push_back(usual);
    for (const char* name : {"</s>", "<|end_of_text|>", "<eos>", "[EOS]"}) candidates.push_back(find_id(p, name));
    const auto found = std::ranges::find_if(candidates, [&](int id) {
        return id >= 0 && std::ranges::count(p.tokenizer.byte_tokens, id) == 0 &&
               std::ranges::count(p.tokenizer.merges, id, &Merge::token) == 0;
    });
    if (found == candidates.end())
        refuse(p,
               format("no token ends documents: there is neither %s, nor an eos_token in tokenizer_config.json or an "
                      "eos_token_id in config.json that no text is made of; name one in tokenizer_config.json",
                      END_OF_TEXT));
    p.tokenizer.end_of_text = *found;
    added_token(p.tokenizer, *found, p.tokenizer.tokens[size_t(*found)]).special = true;
    return found - candidates.begin() < 2;  // transformers reads the first two
}

// Returns the tokens that a post_processor of tokenizer.json puts in front of a text.
static std::vector<int> prefix_of(const TokenizerParser& p, const Json& processor) {
    std::vector<int> prefix;
    bool supported = true;
    for (const Json& part : processor["type"] == "Sequence" ? processor["processors"].items : std::vector{processor}) {
        const std::vector<Json>& single = part["single"].items;
        if (part.type == Json::null || part["type"] == "ByteLevel") continue;
        supported &= part["type"] == "TemplateProcessing" && prefix.empty() && !single.empty() &&
                     single.back().contains("Sequence");
        for (size_t i = 0; i + 1 < single.size(); i++) {
            const Json& ids = part["special_tokens"][content_of(single[i]["SpecialToken"]["id"])]["ids"];
            supported &= !ids.items.empty();
            for (const Json& id : ids.items) {
                supported &= id.is_index(p.tokenizer.vocab_size());
                if (supported) prefix.push_back(id.get<int>());
            }
        }
    }
    if (!supported)
        refuse(p, "post_processor is " + shown(processor) + "; only one that puts tokens before a text is supported");
    return prefix;
}

// Returns the template in chat_template.jinja, or else that of tokenizer_config.json, the default one of several.
static std::string chat_template_of(const TokenizerParser& p) {
    std::string text = p.files.contains("chat_template.jinja") ? p.files.at("chat_template.jinja") : "";
    std::erase(text, '\r');  // as Python reads line ends
    if (!text.empty()) return text;
    const Json& in_config = p.config["chat_template"];
    for (const Json& named : in_config.items)
        if (named["name"] == "default") return content_of(named["template"]);
    return content_of(in_config);
}

// Refuses any value of the key except `supported`. An absent key or null stands for its default, which is supported.
static void require_value(const TokenizerParser& p, const Json& object, const char* key, const Json& supported,
                          const char* note = "") {
    if (object[key].type == Json::null || object[key] == supported) return;
    refuse(p, format("%s is %s; only %s, as in GPT-2, is supported%s", key, shown(object[key]).c_str(),
                     json_text(supported).c_str(), note));
}

// Neither version is followed, because a file that one of them reads would have other tokens in the other one.
static constexpr const char* which_version =
    " (beside a GPT-2 configuration, transformers 4 obeys this setting and 5 ignores it)";

static void check_pipeline(const TokenizerParser& p, const Json& file) {
    if (file["normalizer"] != Json{{"type", "Sequence"}, {"normalizers", std::vector<Json>()}})
        require_value(p, file, "normalizer", nullptr, which_version);
    const Json& pre_tokenizer = file["pre_tokenizer"];
    if (pre_tokenizer["type"] != "ByteLevel" || pre_tokenizer["use_regex"] == false ||
        pre_tokenizer["add_prefix_space"] != false)
        refuse(p, "pre_tokenizer is " + shown(pre_tokenizer) +
                      "; only GPT-2's is supported: ByteLevel, use_regex true, add_prefix_space false" + which_version);
    for (const auto& [key, supported] : {std::pair<const char*, Json>("type", "BPE"),
                                         {"dropout", 0.0},
                                         {"continuing_subword_prefix", ""},
                                         {"end_of_word_suffix", ""},
                                         {"byte_fallback", false},
                                         {"ignore_merges", false}})
        require_value(p, file["model"], key, supported);
}

// Refuses classes for which transformers 5 makes another pipeline. It reads `others` from tokenizer.json as they are.
static void check_class(const TokenizerParser& p, const std::string& type, bool one_file) {
    const std::string own = "GPT2Tokenizer CodeGenTokenizer PreTrainedTokenizer TokenizersBackend ",
                      others =
                          "GPTNeoXTokenizer GPTJTokenizer OPTTokenizer BloomTokenizer LlamaTokenizer Qwen2Tokenizer ";
    if ((one_file ? own + others : own).find(type.substr(0, type.rfind("Fast")) + " ") == own.npos)
        refuse(p, "tokenizer_class is " + printable(type) + ", which may give other tokens than GPT-2's" +
                      (one_file ? "; if tokenizer.json holds as it is, make it PreTrainedTokenizerFast" : ""));
}

static Json added_token_json(const AddedToken& token) {
    return {{"content", token.content}, {"single_word", false},           {"lstrip", token.lstrip},
            {"rstrip", token.rstrip},   {"normalized", token.normalized}, {"special", token.special}};
}

// Adds to tokenizer_config.json what only tokenizer.json and config.json say: transformers 5 leaves out the added
// tokens of tokenizer.json where tokenizer_config.json has a list, and 4 does not.
static void complete_config(TokenizerParser& p, std::string& config, bool end_is_named) {
    Json changes;
    if (!end_is_named) changes["eos_token"] = p.tokenizer.tokens[size_t(p.tokenizer.end_of_text)];
    if (Json decoder = p.config["added_tokens_decoder"]; decoder.type == Json::object) {
        for (const AddedToken& token : p.tokenizer.added)
            if (const std::string id = std::to_string(token.id); !decoder.contains(id))
                decoder[id] = added_token_json(token);
        changes["added_tokens_decoder"] = decoder;
    }
    config = with_members(config, changes);
}

// Returns the content of vocab.json and merges.txt in the form of tokenizer.json.
static Json read_two_files(const TokenizerParser& p) {
    const std::string& text = p.files.at("merges.txt");
    if (text.empty()) refuse(p, "the file of merges is empty; get it again");
    std::istringstream lines(text.starts_with("\xef\xbb\xbf") ? text.substr(3) : text);  // a byte order mark
    Json model = {{"vocab", parse_json(p.files.at("vocab.json"), p.where)}, {"merges", std::vector<Json>()}};
    std::vector<Json>& merges = model["merges"].items;
    for (std::string line; std::getline(lines, line);) {
        if (line.ends_with('\r')) line.pop_back();
        if (!line.empty() && !(merges.empty() && line.starts_with("#version"))) merges.push_back(line);
    }
    return {{"model", model}};
}

static Json read_one_file(const TokenizerParser& p) {
    Json file = parse_json(p.files.at("tokenizer.json"), p.where);
    if (!file["model"].contains("vocab") || file["model"]["merges"].type != Json::array)
        refuse(p, "is not a tokenizer.json: it has no model with vocab and merges");
    if (file.contains("added_tokens") && file["added_tokens"].type != Json::array)
        refuse(p, "added_tokens is not a list");
    check_pipeline(p, file);
    return file;
}

Tokenizer parse_tokenizer(TokenizerFiles files, const std::string& where) {
    const Json config = read_side_file(files, "tokenizer_config.json", where);
    const bool has_list = config.contains("added_tokens_decoder");
    const Json map = has_list ? Json() : read_side_file(files, "special_tokens_map.json", where);
    TokenizerParser p{files, where, read_side_file(files, "config.json", where), config, merge_roles(config, map)};
    Tokenizer& tokenizer = p.tokenizer;
    const bool one_file = files.contains("tokenizer.json");
    require_value(p, config, "add_prefix_space", false, " in tokenizer_config.json");
    require_value(p, config, "split_special_tokens", false, " in tokenizer_config.json");
    if (!one_file)
        require_value(p, config, "add_eos_token", false, " beside vocab.json");  // else transformers ignores it
    check_class(p, content_of(config["tokenizer_class"]), one_file);
    const Json file = one_file ? read_one_file(p) : read_two_files(p);
    p.ids = read_vocab(p, file["model"]["vocab"]);
    for (const Json& token : file["added_tokens"].items) add_token(p, token, token["id"]);
    read_side_tokens(p);
    fill_tokens(p);
    read_merges(p, file["model"]["merges"]);
    const bool end_is_named = find_end_of_text(p);
    tokenizer.bos = find_id(p, role(p, "bos_token"));
    tokenizer.eos = find_id(p, role(p, "eos_token"));
    tokenizer.pad = find_id(p, role(p, "pad_token"));
    tokenizer.prefix = prefix_of(p, file["post_processor"]);
    if (!one_file && config["add_bos_token"] == true && tokenizer.bos >= 0) tokenizer.prefix = {tokenizer.bos};
    tokenizer.chat_template = chat_template_of(p);
    tokenizer.index_added();
    files.erase("config.json");
    if (files.contains("tokenizer_config.json")) complete_config(p, files["tokenizer_config.json"], end_is_named);
    tokenizer.files = std::move(files);
    return std::move(tokenizer);
}

Tokenizer load_tokenizer(const std::string& path) {
    constexpr int64_t MAX_BYTES = int64_t(1) << 30;
    const bool directory = is_directory(path);
    const std::string folder = (directory ? path : parent_directory(path)) + "/",
                      name = directory ? "" : path.substr(path.rfind('/') + 1);
    const auto has = [&](const std::string& file) { return path_exists(folder + file); };
    const bool openai =
        directory ? has("encoder.json") && !has("vocab.json") : name == "encoder.json" || name == "vocab.bpe";
    const std::string vocab = openai ? "encoder.json" : "vocab.json", merges = openai ? "vocab.bpe" : "merges.txt";
    const bool one_file = directory ? has("tokenizer.json") : name != vocab && name != merges;
    const std::string only = directory ? folder + "tokenizer.json" : path;
    TokenizerFiles files;
    const auto read = [&](const std::string& file, const std::string& as) {
        if (has(file)) files[as] = read_file(folder + file, MAX_BYTES);
    };
    if (directory || !one_file) read(vocab, "vocab.json"), read(merges, "merges.txt");
    if (!one_file && files.size() < 2)
        fail(EXIT_NO_INPUT, "%s: is no whole tokenizer, which has tokenizer.json, or both %s and %s%s", path.c_str(),
             vocab.c_str(), merges.c_str(),
             has("tokenizer.pkl") ? "; nanochat's tokenizer.pkl splits text otherwise; --train-bpe makes one" : "");
    if (one_file) files["tokenizer.json"] = read_file(only, MAX_BYTES);
    if (one_file && !directory && name != "tokenizer.json")  // other files beside it need not be its own
        return parse_tokenizer(std::move(files), path);
    for (const char* file : SIDE_FILES) read(file, file);
    read("config.json", "config.json");
    if (is_directory(folder + TEMPLATES))
        for (const std::string& file : list_directory(folder + TEMPLATES))
            if (file.ends_with(".jinja")) read(TEMPLATES + ("/" + file), TEMPLATES + ("/" + file));
    return parse_tokenizer(std::move(files), one_file ? only : folder + vocab + " with " + merges);
}

// ---- writing

std::vector<std::string> written_tokens(const Tokenizer& tokenizer) {
    std::vector<std::string> written;
    for (const std::string& bytes : tokenizer.tokens) written.push_back(to_alphabet(bytes));
    for (const AddedToken& token : tokenizer.added) written[size_t(token.id)] = token.content;
    return written;
}

std::vector<std::string> written_merges(const Tokenizer& tokenizer) {
    const std::vector<std::string> tokens = written_tokens(tokenizer);
    std::vector<std::string> written;
    for (const Merge& merge : tokenizer.merges)
        written.push_back(tokens[size_t(merge.left)] + " " + tokens[size_t(merge.right)]);
    return written;
}

static Json vocab_json(const Tokenizer& tokenizer) {
    Json vocab({});
    for (const std::string& token : written_tokens(tokenizer)) vocab.members.emplace_back(token, vocab.members.size());
    return vocab;
}

static Json tokenizer_json(const Tokenizer& tokenizer) {
    Json file = parse_json(R"({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false}
    })",
                           "");
    for (const AddedToken& token : tokenizer.added) {
        Json& written_token = file["added_tokens"].items.emplace_back(added_token_json(token));
        written_token.members.insert(written_token.members.begin(), {"id", token.id});
    }
    file["model"]["vocab"] = vocab_json(tokenizer);
    file["model"]["merges"] = written_merges(tokenizer);  // as strings: readers from before 2024 do not accept pairs
    if (tokenizer.prefix.empty()) return file;
    const std::string bos = tokenizer.tokens[size_t(tokenizer.prefix[0])];
    const auto part = [](const char* kind, const std::string& name, int type) {
        return Json{{kind, {{"id", name}, {"type_id", type}}}};
    };
    const std::vector<Json> first = {part("SpecialToken", bos, 0), part("Sequence", "A", 0)},
                            both = {first[0], first[1], part("SpecialToken", bos, 1), part("Sequence", "B", 1)};
    const Json tokens = {{"id", bos}, {"ids", tokenizer.prefix}, {"tokens", std::vector{bos}}};
    file["post_processor"] = {
        {"type", "TemplateProcessing"}, {"single", first}, {"pair", both}, {"special_tokens", {{bos, tokens}}}};
    return file;
}

static std::string config_file(const Tokenizer& tokenizer) {
    if (tokenizer.files.contains("tokenizer_config.json")) return tokenizer.files.at("tokenizer_config.json");
    const std::string end = tokenizer.tokens[size_t(tokenizer.end_of_text)];
    return json_file({{"tokenizer_class", "GPT2Tokenizer"},
                      {"add_prefix_space", false},
                      {"clean_up_tokenization_spaces", false},
                      {"bos_token", tokenizer.bos < 0 ? end : tokenizer.tokens[size_t(tokenizer.bos)]},
                      {"eos_token", end},
                      {"unk_token", end}});
}

void set_model_max_length(Tokenizer& tokenizer, int length) {
    tokenizer.files["tokenizer_config.json"] = with_members(config_file(tokenizer), {{"model_max_length", length}});
}

void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory) {
    TokenizerFiles files = tokenizer.files;
    const auto missing = [&](const char* name) { return !files.contains(name); };
    if (missing("tokenizer.json")) files["tokenizer.json"] = json_file(tokenizer_json(tokenizer));
    if (missing("vocab.json")) files["vocab.json"] = json_file(vocab_json(tokenizer));
    if (missing("merges.txt")) {
        std::string& merges = files["merges.txt"] = "#version: 0.2\n";
        for (const std::string& merge : written_merges(tokenizer)) merges += merge + "\n";
    }
    files["tokenizer_config.json"] = config_file(tokenizer);
    for (const char* name : SIDE_FILES)  // an earlier tokenizer may have left them
        if (missing(name)) remove_tree(directory + "/" + name);
    remove_tree(directory + "/" + TEMPLATES);
    replace_file(directory + "/tokenizer.json", files.at("tokenizer.json"));  // the largest: the disk may be full
    files.erase("tokenizer.json");
    for (const auto& [name, content] : files) {
        if (name.starts_with(TEMPLATES)) make_directories(directory + "/" + TEMPLATES);
        replace_file(directory + "/" + name, content);
    }
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
    tokenizer.added = {{tokenizer.end_of_text, END_OF_TEXT}};
    tokenizer.index_added();
    tokenizer.tokens.push_back(END_OF_TEXT);
    tokenizer.ranks.build(tokenizer.merges);
    return tokenizer;
}
