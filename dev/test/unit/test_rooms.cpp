// test_rooms.cpp: tests that the folders of llmc/ include each other as docs/architecture.md says, and that no header
// includes itself through others.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

using Names = std::set<std::string>;

// The lines of the block ```rooms of docs/architecture.md.
static std::vector<std::pair<std::string, Names>> read_rooms() {
    std::ifstream page("docs/architecture.md");
    std::vector<std::pair<std::string, Names>> rooms;
    std::string line;
    while (std::getline(page, line) && line != "```rooms") continue;
    while (std::getline(page, line) && line != "```") {
        const size_t colon = line.find(':');
        std::istringstream rest(line.substr(colon + 1));
        Names below;
        for (std::string name; rest >> name;) below.insert(name);
        rooms.emplace_back(line.substr(0, colon), below);
    }
    return rooms;
}

// For each file of llmc/ the files of llmc/ that it includes. Paths are relative to llmc/.
static std::map<std::string, Names> read_includes() {
    std::map<std::string, Names> includes;
    for (const auto& entry : std::filesystem::recursive_directory_iterator("llmc")) {
        if (!entry.is_regular_file()) continue;
        Names& of_file = includes[std::filesystem::relative(entry.path(), "llmc").string()];
        std::ifstream file(entry.path());
        for (std::string line; std::getline(file, line);) {
            const std::string begin = "#include \"";
            if (line.starts_with(begin)) of_file.insert(line.substr(begin.size(), line.rfind('"') - begin.size()));
        }
    }
    return includes;
}

static std::string room_of(const std::string& path) { return path.substr(0, path.find('/')); }

// Whether a file includes itself through other files.
static bool in_circle(const std::map<std::string, Names>& includes, const std::string& file) {
    Names seen;
    std::vector<std::string> open = {file};
    while (!open.empty()) {
        const auto found = includes.find(open.back());
        open.pop_back();
        if (found == includes.end()) continue;
        for (const std::string& next : found->second) {
            if (next == file) return true;
            if (seen.insert(next).second) open.push_back(next);
        }
    }
    return false;
}

TEST_CASE("each room includes exactly the rooms that docs/architecture.md lists for it") {
    std::map<std::string, Names> used;
    for (const auto& [file, includes] : read_includes()) {
        Names& of_room = used[room_of(file)];
        for (const std::string& include : includes)
            if (room_of(include) != room_of(file)) of_room.insert(room_of(include));
    }
    const auto rooms = read_rooms();
    CHECK(rooms.size() == used.size());
    for (const auto& [room, below] : rooms) {
        CAPTURE(room);
        CHECK(used[room] == below);
    }
}

TEST_CASE("each room includes only rooms listed before it") {
    Names before;
    for (const auto& [room, below] : read_rooms()) {
        CAPTURE(room);
        for (const std::string& name : below) CHECK(before.count(name) == 1);
        before.insert(room);
    }
    CHECK(before.size() > 10);
}

TEST_CASE("no file includes itself through others, and every include names a file") {
    const std::map<std::string, Names> includes = read_includes();
    CHECK(includes.size() > 100);
    for (const auto& [file, names] : includes) {
        CAPTURE(file);
        CHECK_FALSE(in_circle(includes, file));
        for (const std::string& name : names) CHECK(includes.count(name) == 1);
    }
}
