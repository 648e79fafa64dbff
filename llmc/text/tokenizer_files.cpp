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
static AddedToken& added_token(Tokenizer& tokenizer, int id) {
    const auto place = std::ranges::lower_bound(tokenizer.added, id, {}, &AddedToken::id);
    return is_added(tokenizer, id) ? *place : *tokenizer.added.insert(place, AddedToken{id});
}

// ---- reading

static constexpr const char* TEMPLATES = "additional_chat_templates";  // a folder
static constexpr const char* SIDE_FILES[] = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                                             "chat_template.jinja"};

using Ids = std::unordered_map<std::string, int>;  // ids by the token's text in the file

static int id_of(const std::string& token, const Json& id, const std::string& where) {
    if (!id.is_index(MAX_VOCAB_SIZE))
        fail(EXIT_BAD_DATA, "%s: token \"%s\" has the id %s; ids must be whole numbers below %d", where.c_str(),
             printable(token).c_str(), printable(json_text(id)).c_str(), MAX_VOCAB_SIZE);
    return id.get<int>();
}

static Ids read_vocab(const Json& vocab, const std::string& where) {
    if (vocab.type != Json::object)
        fail(EXIT_BAD_DATA, "%s: the vocabulary is not an object of tokens and ids", where.c_str());
    Ids ids;
    ids.reserve(vocab.members.size());
    for (const auto& [token, id] : vocab.members) ids[token] = id_of(token, id, where);
    return ids;
}

// The text of a token, which is a string or an object; "": none.
static std::string content_of(const Json& token) {
    const Json& text = token.type == Json::object ? token["content"] : token;
    return text.type == Json::string ? text.text : "";
}

// Adds a token with the settings in `token`, or changes its settings. Added tokens are written as plain text, which is
// not made of bytes. One that is also in the vocabulary must have the same id there.
static void add_token(Tokenizer& tokenizer, Ids& ids, const Json& token, const Json& given_id,
                      const std::string& where) {
    const std::string content = content_of(token);
    if (content.empty())
        fail(EXIT_BAD_DATA, "%s: an added token has no content: %s", where.c_str(),
             printable(json_text(token)).c_str());
    const int id = id_of(content, given_id, where);
    const auto setting = [&](const char* name) {
        const Json& value = token[name];
        if (value.type != Json::boolean && value.type != Json::null)
            fail(EXIT_BAD_DATA, "%s: %s of an added token is %s, not true or false", where.c_str(), name,
                 printable(json_text(value)).c_str());
        return value == true;
    };
    if (setting("single_word"))
        fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has single_word, which is not supported; set it to false",
             where.c_str(), printable(content).c_str());
    const auto [place, is_new] = ids.emplace(content, id);
    if (!is_new && place->second != id)
        fail(EXIT_BAD_DATA, "%s: the added token \"%s\" has the id %d, but the id %d in the vocabulary", where.c_str(),
             printable(content).c_str(), id, place->second);
    added_token(tokenizer, id) = {id, setting("special"), setting("lstrip"), setting("rstrip"), setting("normalized")};
}

// Files that transformers reads beside the vocabulary.
struct SideFiles {
    Json model, config, roles;  // config.json; tokenizer_config.json; its tokens and those of special_tokens_map.json

    SideFiles(const TokenizerFiles& files, const std::string& where) {
        const auto read = [&](const char* name, Json& out) {
            if (!files.contains(name)) return;
            for (auto& [key, value] : parse_python_object(files.at(name), name + (" beside " + where)).members)
                out[key] = std::move(value);
        };
        read("config.json", model);
        read("tokenizer_config.json", config);
        roles = config;
        if (!config.contains("added_tokens_decoder")) read("special_tokens_map.json", roles);
        const auto refuse = [&](const char* key) {
            if (config[key] != true) return;
            fail(EXIT_BAD_DATA, "%s: tokenizer_config.json has %s, which is not supported", where.c_str(), key);
        };
        refuse("add_prefix_space");
        if (!files.contains("tokenizer.json")) refuse("add_eos_token");  // beside it transformers ignores this
    }

    // The text of a role such as "bos_token". GPT2Tokenizer has <|endoftext|> for three of them.
    std::string role(const std::string& name) const {
        const std::string type = content_of(config["tokenizer_class"]);
        const bool by_default = (type.empty() || type.starts_with("GPT2Tokenizer")) && name != "pad_token";
        return roles.contains(name) || !by_default ? content_of(roles[name]) : END_OF_TEXT;
    }
};

// Makes the tokens of the roles special. As transformers does, it adds those that the vocabulary lacks, at its end; but
// not <|endoftext|>, which is there by default only.
static void read_roles(Tokenizer& tokenizer, Ids& ids, const SideFiles& side, const std::string& where) {
    std::vector<Json> tokens;
    for (const char* role : {"bos", "eos", "unk", "sep", "pad", "cls", "mask"})
        tokens.push_back(side.roles[std::string(role) + "_token"]);
    for (const char* list : {"additional_special_tokens", "extra_special_tokens"})
        tokens.insert(tokens.end(), side.roles[list].items.begin(), side.roles[list].items.end());
    for (const Json& token : tokens) {
        const std::string content = content_of(token);
        const auto place = ids.find(content);
        if (content.empty() || (place == ids.end() && content == END_OF_TEXT)) continue;
        const int id = place == ids.end() ? int(ids.size()) : place->second;
        if (!is_added(tokenizer, id)) add_token(tokenizer, ids, token, id, where);
        added_token(tokenizer, id).special = true;
    }
}

// The added tokens of tokenizer_config.json, or of added_tokens.json, which older versions of transformers wrote.
static void read_side_tokens(Tokenizer& tokenizer, Ids& ids, const TokenizerFiles& files, const SideFiles& side,
                             const std::string& where) {
    if (side.config["added_tokens_decoder"].type == Json::object) {
        for (const auto& [id, token] : side.config["added_tokens_decoder"].members) {
            const auto place = ids.find(content_of(token));
            add_token(tokenizer, ids, token, place == ids.end() ? std::atoi(id.c_str()) : place->second, where);
        }
    } else if (files.contains("added_tokens.json")) {
        const Json added = parse_json(files.at("added_tokens.json"), "added_tokens.json beside " + where);
        for (const auto& [content, id] : read_vocab(added, where))
            if (!is_added(tokenizer, id))
                add_token(tokenizer, ids, {{"content", content}, {"normalized", true}}, id, where);
    }
    read_roles(tokenizer, ids, side, where);
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

// Adds a merge: "left right", or ["left", "right"] in files since 2024. No token contains a space: the alphabet writes
// it as another character.
static void add_merge(Tokenizer& tokenizer, const Ids& ids, const Json& written, const std::string& where) {
    const auto place = [&] { return format("%s: merge %zu", where.c_str(), tokenizer.merges.size() + 1); };
    std::vector<std::string> pair;
    if (written.type == Json::string) {
        const size_t space = written.text.find(' ');
        pair = {written.text.substr(0, space), space == std::string::npos ? "" : written.text.substr(space + 1)};
        if (pair[0].empty() || pair[1].empty() || pair[1].find(' ') != std::string::npos)
            fail(EXIT_BAD_DATA, "%s is \"%s\", not two tokens with a space between them", place().c_str(),
                 printable(written.text).c_str());
    } else {
        for (const Json& token : written.items)
            if (token.type == Json::string) pair.push_back(token.text);
        if (pair.size() != 2 || written.items.size() != 2)
            fail(EXIT_BAD_DATA, "%s is %s, not a pair of tokens", place().c_str(),
                 printable(json_text(written)).c_str());
    }
    int found[3];
    for (int i = 0; const std::string& text : {pair[0], pair[1], pair[0] + pair[1]}) {
        const auto token = ids.find(text);
        if (token == ids.end())
            fail(EXIT_BAD_DATA, "%s needs the token \"%s\", which is not in the vocabulary", place().c_str(),
                 printable(text).c_str());
        const int id = found[i++] = token->second;
        if (is_added(tokenizer, id) && text != to_alphabet(text))
            fail(EXIT_BAD_DATA, "%s uses the added token %d", place().c_str(), id);
        if (text.empty())  // merges.txt cannot represent an empty token
            fail(EXIT_BAD_DATA, "%s uses token %d, which is empty", place().c_str(), id);
    }
    tokenizer.merges.push_back({found[0], found[1], found[2]});
}

// Finds the token that ends documents. No text may be merged into it. Returns whether transformers finds it, too.
static bool find_end_of_text(Tokenizer& tokenizer, const Ids& ids, const SideFiles& side, const std::string& where) {
    std::vector<int> candidates;
    const auto add = [&](const std::string& name) {
        if (const auto found = ids.find(name); found != ids.end()) candidates.push_back(found->second);
    };
    for (const std::string& name : {std::string(END_OF_TEXT), side.role("eos_token")}) add(name);
    const size_t named = candidates.size();
    add(content_of(side.config["eos_token"]));  // special_tokens_map.json may name another one
    const Json& in_model = side.model["eos_token_id"];
    for (const Json& id : in_model.type == Json::array ? in_model.items : std::vector{in_model})
        if (id.is_index(tokenizer.vocab_size())) candidates.push_back(id.get<int>());
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
    added_token(tokenizer, *found).special = true;
    return size_t(found - candidates.begin()) < named;
}

// Returns the tokens that a post_processor of tokenizer.json puts in front of a text.
static std::vector<int> prefix_of(const Json& processor, int vocab_size, const std::string& where) {
    const Json &type = processor["type"], &single = processor["single"];
    std::vector<int> prefix;
    if (processor.type == Json::null || type == "ByteLevel") return prefix;
    for (const Json& part : processor["processors"].items) {
        const std::vector<int> outer = prefix_of(part, vocab_size, where);
        prefix.insert(prefix.begin(), outer.begin(), outer.end());
    }
    if (type == "Sequence") return prefix;
    const size_t count = single.items.size();
    bool supported = type == "TemplateProcessing" && count > 0 && single.items.back().contains("Sequence");
    for (size_t i = 0; supported && i + 1 < count; i++) {
        const Json& ids = processor["special_tokens"][content_of(single.items[i]["SpecialToken"]["id"])]["ids"];
        supported = !ids.items.empty();
        for (const Json& id : ids.items) {
            supported &= id.is_index(vocab_size);
            prefix.push_back(supported ? id.get<int>() : 0);
        }
    }
    if (!supported)
        fail(EXIT_BAD_DATA, "%s: post_processor is %s; only one that puts tokens in front of a text is supported",
             where.c_str(), printable(json_text(processor)).c_str());
    return prefix;
}

// Returns the template in chat_template.jinja, or else that of tokenizer_config.json, the default one of several.
static std::string chat_template_of(const TokenizerFiles& files, const SideFiles& side) {
    if (files.contains("chat_template.jinja")) return files.at("chat_template.jinja");
    const Json& in_config = side.config["chat_template"];
    for (const Json& named : in_config.items)
        if (named["name"] == "default") return content_of(named["template"]);
    return content_of(in_config);
}

// Refuses any value of the key except `supported`. An absent key or null stands for its default, which is supported.
static void require_value(const Json& object, const char* key, const Json& supported, const std::string& where,
                          const char* note = "") {
    if (object[key].type == Json::null || object[key] == supported) return;
    fail(EXIT_BAD_DATA, "%s: %s is %s; only %s, as in GPT-2, is supported%s", where.c_str(), key,
         printable(json_text(object[key])).c_str(), json_text(supported).c_str(), note);
}

// Neither version is followed, because a file that one of them reads would have other tokens in the other one.
static constexpr const char* which_version =
    " (beside a GPT-2 configuration, transformers 4 obeys this setting and 5 ignores it)";

static void check_pipeline(const Json& file, const std::string& where) {
    require_value(file, "normalizer", nullptr, where, which_version);
    const Json& pre_tokenizer = file["pre_tokenizer"];
    if (pre_tokenizer["type"] != "ByteLevel" || pre_tokenizer["use_regex"] == false ||
        pre_tokenizer["add_prefix_space"] != false)
        fail(EXIT_BAD_DATA,
             "%s: pre_tokenizer is %s; only GPT-2's is supported: ByteLevel, use_regex true, add_prefix_space false%s",
             where.c_str(), printable(json_text(pre_tokenizer)).c_str(), which_version);
    for (const auto& [key, supported] : {std::pair<const char*, Json>("type", "BPE"),
                                         {"dropout", nullptr},
                                         {"continuing_subword_prefix", ""},
                                         {"end_of_word_suffix", ""},
                                         {"byte_fallback", false},
                                         {"ignore_merges", false}})
        require_value(file["model"], key, supported, where);
}

static Json added_token_json(const Tokenizer& tokenizer, const AddedToken& token) {
    return {{"content", tokenizer.tokens[size_t(token.id)]},
            {"single_word", false},
            {"lstrip", token.lstrip},
            {"rstrip", token.rstrip},
            {"normalized", token.normalized},
            {"special", token.special}};
}

// Adds to tokenizer_config.json what only tokenizer.json and config.json say: transformers 5 leaves out the added
// tokens of tokenizer.json where tokenizer_config.json has a list, and 4 does not.
static void complete_config(Tokenizer& tokenizer, const SideFiles& side, bool end_is_named) {
    const auto config = tokenizer.files.find("tokenizer_config.json");
    if (config == tokenizer.files.end()) return;
    Json changes;
    if (!end_is_named) changes["eos_token"] = tokenizer.tokens[size_t(tokenizer.end_of_text)];
    if (Json decoder = side.config["added_tokens_decoder"]; decoder.type == Json::object) {
        for (const AddedToken& token : tokenizer.added)
            if (const std::string id = std::to_string(token.id); !decoder.contains(id))
                decoder[id] = added_token_json(tokenizer, token);
        changes["added_tokens_decoder"] = decoder;
    }
    config->second = with_members(config->second, changes);
}

static void read_merges(Tokenizer& tokenizer, const Ids& ids, const Json& merges, const std::string& where) {
    if (merges.items.size() >= size_t(PairRanks::NONE))
        fail(EXIT_BAD_DATA, "%s: more than %d merges are not supported", where.c_str(), PairRanks::NONE - 1);
    for (const Json& merge : merges.items) add_merge(tokenizer, ids, merge, where);
    tokenizer.ranks.build(tokenizer.merges);
    for (size_t i = 0; i < tokenizer.merges.size(); i++)
        if (tokenizer.ranks.rank(tokenizer.merges[i].left, tokenizer.merges[i].right) != int(i))
            fail(EXIT_BAD_DATA, "%s: merge %zu occurs twice", where.c_str(), i + 1);
}

// Returns the content of vocab.json and merges.txt in the form of tokenizer.json.
static Json read_two_files(const TokenizerFiles& files, const std::string& where) {
    std::istringstream lines(files.at("merges.txt"));
    Json file, merges = std::vector<Json>();
    for (std::string line; std::getline(lines, line);) {
        if (line.ends_with('\r')) line.pop_back();
        if (!line.empty() && !(merges.items.empty() && line.starts_with("#version"))) merges.items.push_back(line);
    }
    file["model"]["vocab"] = parse_json(files.at("vocab.json"), where);
    file["model"]["merges"] = std::move(merges);
    return file;
}

static Json read_one_file(const TokenizerFiles& files, const std::string& where) {
    Json file = parse_json(files.at("tokenizer.json"), where);
    if (!file["model"].contains("vocab") || file["model"]["merges"].type != Json::array)
        fail(EXIT_BAD_DATA, "%s: is not a tokenizer.json: it has no model with vocab and merges", where.c_str());
    check_pipeline(file, where);
    return file;
}

Tokenizer parse_tokenizer(TokenizerFiles files, const std::string& where) {
    const SideFiles side(files, where);
    const bool one_file = files.contains("tokenizer.json");
    const Json file = one_file ? read_one_file(files, where) : read_two_files(files, where);
    Tokenizer tokenizer;
    Ids ids = read_vocab(file["model"]["vocab"], where);
    if (file.contains("added_tokens") && file["added_tokens"].type != Json::array)
        fail(EXIT_BAD_DATA, "%s: added_tokens is not a list", where.c_str());
    for (const Json& token : file["added_tokens"].items) add_token(tokenizer, ids, token, token["id"], where);
    read_side_tokens(tokenizer, ids, files, side, where);
    fill_tokens(tokenizer, ids, where);
    find_byte_tokens(tokenizer, ids, where);
    read_merges(tokenizer, ids, file["model"]["merges"], where);
    const bool end_is_named = find_end_of_text(tokenizer, ids, side, where);
    const auto id_of_role = [&](const char* role) {
        const auto found = ids.find(side.role(role));
        return found == ids.end() ? -1 : found->second;
    };
    tokenizer.bos = id_of_role("bos_token"), tokenizer.eos = id_of_role("eos_token");
    tokenizer.pad = id_of_role("pad_token");
    tokenizer.prefix = prefix_of(file["post_processor"], tokenizer.vocab_size(), where);
    if (!one_file && side.config["add_bos_token"] == true && tokenizer.bos >= 0) tokenizer.prefix = {tokenizer.bos};
    tokenizer.chat_template = chat_template_of(files, side);
    files.erase("config.json");
    tokenizer.files = std::move(files);
    complete_config(tokenizer, side, end_is_named);
    return tokenizer;
}

Tokenizer load_tokenizer(const std::string& path) {
    const bool directory = is_directory(path);
    const std::string folder = directory ? path : parent_directory(path);
    const std::string name = directory ? "" : path.substr(path.rfind('/') + 1);
    TokenizerFiles files;
    const auto exists = [&](const std::string& file) { return path_exists(folder + "/" + file); };
    const auto read = [&](const std::string& file, const std::string& as) {
        if (exists(file)) files[as] = read_file(folder + "/" + file, int64_t(1) << 30);
    };
    const bool openai =
        directory ? !exists("vocab.json") && !exists("merges.txt") : name == "encoder.json" || name == "vocab.bpe";
    const std::string vocab = openai ? "encoder.json" : "vocab.json", merges = openai ? "vocab.bpe" : "merges.txt";
    if (directory || name == vocab || name == merges) read(vocab, "vocab.json"), read(merges, "merges.txt");
    const bool one_file = name == "tokenizer.json" || (directory && exists("tokenizer.json")), none = files.empty();
    if (!directory && none && !(one_file && exists(name)))  // other files beside it need not be its own
        return parse_tokenizer({{"tokenizer.json", read_file(path, int64_t(1) << 30)}}, path);
    if (directory && !one_file && none)
        fail(EXIT_NO_INPUT, "%s: has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt%s",
             path.c_str(),
             exists("tokenizer.pkl") ? "; tokenizer.pkl of nanochat is a pickle, which is not read, and splits text "
                                       "otherwise than GPT-2; make a tokenizer with tokenize --train-bpe"
                                     : "");
    for (const std::string& part : {vocab, merges})
        if (!one_file && !exists(part))
            fail(EXIT_NO_INPUT, "%s/%s: is missing; a tokenizer needs both %s and %s", folder.c_str(), part.c_str(),
                 vocab.c_str(), merges.c_str());
    if (one_file) read("tokenizer.json", "tokenizer.json");
    for (const char* file : SIDE_FILES) read(file, file);
    read("config.json", "config.json");
    if (is_directory(folder + "/" + TEMPLATES))
        for (const std::string& file : list_directory(folder + "/" + TEMPLATES))
            if (file.ends_with(".jinja")) read(TEMPLATES + ("/" + file), TEMPLATES + ("/" + file));
    return parse_tokenizer(std::move(files), directory && one_file ? path + "/tokenizer.json"
                                             : one_file            ? path
                                                                   : folder + "/" + vocab + " with " + merges);
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
static Json vocab_object(const std::vector<std::string>& written) {
    Json vocab({});
    for (const std::string& token : written) vocab.members.emplace_back(token, vocab.members.size());
    return vocab;
}

static Json tokenizer_json(const Tokenizer& tokenizer, const std::vector<std::string>& written) {
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
        Json& written_token = file["added_tokens"].items.emplace_back(added_token_json(tokenizer, token));
        written_token.members.insert(written_token.members.begin(), {"id", token.id});
    }
    file["model"]["vocab"] = vocab_object(written);
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

void set_model_max_length(Tokenizer& tokenizer, int length) {
    tokenizer.max_length = length;
    const auto config = tokenizer.files.find("tokenizer_config.json");
    if (config != tokenizer.files.end()) config->second = with_members(config->second, {{"model_max_length", length}});
}

void save_tokenizer(const Tokenizer& tokenizer, const std::string& directory) {
    const std::vector<std::string> written = written_tokens(tokenizer);
    TokenizerFiles files = tokenizer.files;
    const auto missing = [&](const char* name) { return !files.contains(name); };
    if (missing("tokenizer.json")) files["tokenizer.json"] = json_file(tokenizer_json(tokenizer, written));
    if (missing("vocab.json")) files["vocab.json"] = json_file(vocab_object(written));
    if (missing("merges.txt")) {
        std::string& merges = files["merges.txt"] = "#version: 0.2\n";
        for (const std::string& merge : written_merges(tokenizer)) merges += merge + "\n";
    }
    if (missing("tokenizer_config.json")) {
        const std::string end = tokenizer.tokens[size_t(tokenizer.end_of_text)];
        const std::string bos = tokenizer.bos < 0 ? end : tokenizer.tokens[size_t(tokenizer.bos)];
        const Json special_tokens = {{"bos_token", bos}, {"eos_token", end}, {"unk_token", end}};
        Json config = {
            {"tokenizer_class", "GPT2Tokenizer"}, {"add_prefix_space", false}, {"clean_up_tokenization_spaces", false}};
        if (tokenizer.max_length > 0) config["model_max_length"] = tokenizer.max_length;
        config.members.insert(config.members.end(), special_tokens.members.begin(), special_tokens.members.end());
        files["tokenizer_config.json"] = json_file(config);
        if (missing("special_tokens_map.json")) files["special_tokens_map.json"] = json_file(special_tokens);
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
