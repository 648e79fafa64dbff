// test_includes.cpp: tests that the folders of llmc/ include each other as docs/architecture.md says, and that no
// module includes itself through others. A module is a header and its source.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using Names = std::set<std::string>;
using Includes = std::map<std::string, Names>;

static std::string folder_of(const std::string& path) { return path.substr(0, path.find('/')); }
static std::string module_of(const std::string& path) { return path.substr(0, path.rfind('.')); }

// Returns the lines "folder: folders that it may include" of docs/architecture.md.
static std::vector<std::pair<std::string, Names>> read_rules() {
    std::ifstream page("docs/architecture.md");
    std::vector<std::pair<std::string, Names>> rules;
    std::string line;
    while (std::getline(page, line) && line != "```includes") continue;
    while (std::getline(page, line) && line != "```") {
        const size_t colon = line.find(':');
        std::istringstream rest(line.substr(colon + 1));
        Names folders;
        for (std::string name; rest >> name;) folders.insert(name);
        rules.emplace_back(line.substr(0, colon), folders);
    }
    return rules;
}

// Returns the includes of each file of llmc/ and of train_gpt2.cu. Paths are relative to llmc/.
static Includes read_includes() {
    std::vector<std::pair<std::string, std::filesystem::path>> files = {{"train_gpt2.cu", "train_gpt2.cu"}};
    for (const auto& entry : std::filesystem::recursive_directory_iterator("llmc"))
        if (entry.is_regular_file())
            files.emplace_back(std::filesystem::relative(entry.path(), "llmc").string(), entry.path());
    Includes includes;
    const std::string begin = "#include \"";
    for (const auto& [name, path] : files) {
        Names& found = includes[name];
        std::ifstream file(path);
        for (std::string line; std::getline(file, line);)
            if (line.starts_with(begin)) found.insert(line.substr(begin.size(), line.rfind('"') - begin.size()));
    }
    return includes;
}

// Returns the includes between parts, such as folders or modules. part_of names the part of a file.
static Includes between(std::string (*part_of)(const std::string&), const Includes& files) {
    Includes parts;
    for (const auto& [file, includes] : files)
        for (const std::string& include : includes)
            if (part_of(include) != part_of(file)) parts[part_of(file)].insert(part_of(include));
    return parts;
}

static std::string list_of(const Names& names) {
    std::string list;
    for (const std::string& name : names) list += " " + name;
    return list;
}

// Returns how `start` includes itself through others: "a > b > a"; empty if it does not.
static std::string circle(const Includes& modules, const std::string& start) {
    std::map<std::string, std::string> ways = {{start, start}};
    std::vector<std::string> open = {start};
    while (!open.empty()) {
        const std::string module = open.back();
        open.pop_back();
        const auto found = modules.find(module);
        if (found == modules.end()) continue;
        for (const std::string& next : found->second) {
            const std::string way = ways[module] + " > " + next;
            if (next == start) return way;
            if (ways.emplace(next, way).second) open.push_back(next);
        }
    }
    return "";
}

TEST_CASE("each folder includes the folders that docs/architecture.md lists for it, which come before it") {
    Includes used = between(folder_of, read_includes());
    Names before;
    for (const auto& [folder, allowed] : read_rules()) {
        CAPTURE(folder);
        CHECK(list_of(used[folder]) == list_of(allowed));
        used.erase(folder);
        for (const std::string& name : allowed) CHECK(before.count(name) == 1);
        before.insert(folder);
    }
    CHECK(before.size() > 10);
    for (const auto& [folder, names] : used) FAIL_CHECK("docs/architecture.md does not list " << folder);
}

TEST_CASE("no module includes itself through others") {
    const Includes modules = between(module_of, read_includes());
    CHECK(modules.size() > 50);
    for (const auto& [module, names] : modules) CHECK(circle(modules, module) == "");
}
