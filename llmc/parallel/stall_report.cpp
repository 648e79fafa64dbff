#include "parallel/stall_report.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "base/common.h"
#include "base/files.h"
#include "base/json.h"
#include "parallel/launch.h"

using nlohmann::json;

static constexpr int64_t LARGEST_REPORT = 16 << 20;  // bytes; the names of 65,536 hosts are most of it
static constexpr const char* event_names[] = {"reached", "entered", "left"};
static constexpr const char* group_names[RANK_GROUPS] = {"world", "data-parallel", "tensor-parallel"};

// ---- the file

std::vector<StallReport::Event> events_of(const FlightRecorder& recorder, double now) {
    std::vector<StallReport::Event> events;
    for (const FlightEntry& entry : recorder.entries()) {
        const Collective& c = entry.collective;
        events.push_back({now - entry.time, entry.event, what_happened(entry), c.step, c.bytes, c.group, c.index});
    }
    return events;
}

std::string stall_report_json(const StallReport& r) {
    nlohmann::ordered_json events = nlohmann::ordered_json::array(), entered;
    for (int g = 0; g < RANK_GROUPS; g++) entered[group_names[g]] = r.last_entered[size_t(g)];
    for (const StallReport::Event& e : r.events) {
        auto& event = events.emplace_back();
        event = {
            {"seconds_ago", e.seconds_ago}, {"event", event_names[int(e.event)]}, {"what", e.what}, {"step", e.step}};
        if (e.event == FlightEvent::reached) continue;
        event["bytes"] = e.bytes;
        event["group"] = group_names[int(e.group)];
        event["index"] = e.index;
    }
    const nlohmann::ordered_json report = {{"rank", r.rank},
                                           {"world_size", r.world_size},
                                           {"tensor_parallel", r.tensor_parallel},
                                           {"host", r.host},
                                           {"process", r.process},
                                           {"phase", r.phase},
                                           {"step", r.step},
                                           {"seconds_without_progress", r.waited},
                                           {"shares_output", r.shares_output},
                                           {"last_entered", entered},
                                           {"events", events},
                                           {"hosts", r.hosts}};
    return report.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

namespace {
// The fields of an object in a report.
struct Fields {
    const json& object;
    const std::string& where;

    const json& at(const char* name) const {
        const auto found = object.is_object() ? object.find(name) : object.end();
        if (!object.is_object() || found == object.end())
            fail(EXIT_BAD_DATA, "%s: is no report of a watchdog: it has no \"%s\"", where.c_str(), name);
        return *found;
    }
    [[noreturn]] void refuse(const char* name) const {
        fail(EXIT_BAD_DATA, "%s: is no report of a watchdog: \"%s\" is %s", where.c_str(), name,
             printable(at(name).dump(-1, ' ', false, json::error_handler_t::replace)).c_str());
    }
    int64_t integer(const char* name, int64_t least, int64_t most) const {
        const json& value = at(name);
        const bool fits =
            value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
        if (!fits || value.get<int64_t>() < least || value.get<int64_t>() > most) refuse(name);
        return value.get<int64_t>();
    }
    double number(const char* name) const {
        if (!at(name).is_number()) refuse(name);
        return at(name).get<double>();
    }
    std::string text(const char* name) const {
        if (!at(name).is_string()) refuse(name);
        return at(name).get<std::string>();
    }
    template <class Names>
    int one_of(const char* name, const Names& names) const {
        const auto found = std::find(std::begin(names), std::end(names), text(name));
        if (found == std::end(names)) refuse(name);
        return int(found - std::begin(names));
    }
    const json& list(const char* name, size_t most) const {
        if (!at(name).is_array() || at(name).size() > most) refuse(name);
        return at(name);
    }
};
}  // namespace

static StallReport::Event parse_event(const Fields& f) {
    StallReport::Event e;
    e.seconds_ago = f.number("seconds_ago");
    e.event = FlightEvent(f.one_of("event", event_names));
    e.what = f.text("what");
    e.step = f.integer("step", -1, INT64_MAX);
    if (e.event == FlightEvent::reached) return e;
    e.bytes = f.integer("bytes", 0, INT64_MAX);
    e.group = RankGroup(f.one_of("group", group_names));
    e.index = f.integer("index", 0, INT64_MAX);
    return e;
}

StallReport parse_stall_report(const std::string& text, const std::string& where) {
    const json root = parse_json(text, where);
    const Fields f{root, where};
    StallReport r;
    r.world_size = int(f.integer("world_size", 1, MAX_RANKS));
    r.rank = int(f.integer("rank", 0, r.world_size - 1));
    r.tensor_parallel = int(f.integer("tensor_parallel", 1, r.world_size));
    if (r.world_size % r.tensor_parallel != 0) f.refuse("tensor_parallel");
    r.host = f.text("host");
    r.process = f.integer("process", 0, INT64_MAX);
    r.phase = f.text("phase");
    r.step = f.integer("step", -1, INT64_MAX);
    r.waited = f.number("seconds_without_progress");
    if (!f.at("shares_output").is_boolean()) f.refuse("shares_output");
    r.shares_output = f.at("shares_output").get<bool>();
    const Fields entered{f.at("last_entered"), where};
    for (int g = 0; g < RANK_GROUPS; g++) r.last_entered[size_t(g)] = entered.integer(group_names[g], 0, INT64_MAX);
    for (const json& event : f.list("events", FlightRecorder::SIZE)) r.events.push_back(parse_event({event, where}));
    const json& hosts = f.list("hosts", size_t(r.world_size));
    if (!hosts.empty() && hosts.size() != size_t(r.world_size)) f.refuse("hosts");
    for (const json& host : hosts) {
        if (!host.is_string()) f.refuse("hosts");
        r.hosts.push_back(host.get<std::string>());
    }
    return r;
}

std::string errors_directory(const std::string& output) { return output + "/errors"; }
std::string stall_report_path(const std::string& dir, int rank) { return format("%s/rank_%d.json", dir.c_str(), rank); }

std::vector<std::pair<int, std::string>> find_stall_reports(const std::string& dir) {
    std::vector<std::pair<int, std::string>> found;
    if (!is_directory(dir)) return found;
    for (const std::string& name : list_directory(dir)) {
        if (!name.starts_with("rank_") || !name.ends_with(".json")) continue;
        int rank = -1;
        const char* const end = name.data() + name.size() - 5;
        const auto [rest, error] = std::from_chars(name.data() + 5, end, rank);
        if (error == std::errc() && rest == end && rank >= 0 && rank < MAX_RANKS)
            found.emplace_back(rank, dir + "/" + name);
    }
    std::sort(found.begin(), found.end());
    return found;
}

StallReport read_stall_report(const std::string& path, int rank) {
    const StallReport report = parse_stall_report(read_file(path, LARGEST_REPORT), path);
    if (report.rank != rank) fail(EXIT_BAD_DATA, "%s: is the report of rank %d", path.c_str(), report.rank);
    return report;
}

// ---- who is late

// Ranks of the group in which rank `rank` makes collectives (parallel/groups.h).
static std::vector<int> members_of(RankGroup group, int rank, int world_size, int tensor_parallel) {
    std::vector<int> members;
    for (int r = 0; r < world_size; r++) {
        const bool same_model_part = r % tensor_parallel == rank % tensor_parallel;
        const bool same_data = r / tensor_parallel == rank / tensor_parallel;
        if (group == RankGroup::world || (group == RankGroup::data_parallel ? same_model_part : same_data))
            members.push_back(r);
    }
    return members;
}

// The first collective that the rank has entered and not left; null: there is none.
static const StallReport::Event* find_pending(const StallReport& report) {
    std::set<std::pair<RankGroup, int64_t>> ended;
    for (const StallReport::Event& e : report.events)
        if (e.event == FlightEvent::left) ended.emplace(e.group, e.index);
    for (const StallReport::Event& e : report.events)
        if (e.event == FlightEvent::entered && ended.count({e.group, e.index}) == 0) return &e;
    return nullptr;
}

static const StallReport::Event* last_event(const StallReport& report, FlightEvent kind) {
    const auto found = std::find_if(report.events.rbegin(), report.events.rend(),
                                    [&](const StallReport::Event& e) { return e.event == kind; });
    return found == report.events.rend() ? nullptr : &*found;
}

static std::string place(const StallReport::Event& e, const char* preposition) {
    if (e.step < 0) return printable(e.what);
    return format("%s %s step %lld", printable(e.what).c_str(), preposition, static_cast<long long>(e.step));
}

static std::string last_seen(const StallReport& report) {
    const StallReport::Event* last = last_event(report, FlightEvent::reached);
    return last ? place(*last, "of") : printable(report.phase);
}

namespace {
// A collective that did not end, and the ranks that never entered it.
struct Stall {
    const StallReport* waiting = nullptr;  // the report of a rank that waits
    const StallReport::Event* pending = nullptr;
    std::vector<int> late, silent;  // with a report, and without one
    bool is_cause = false;          // one of these ranks waits for no other collective itself
    bool unknown = false;           // some ranks report elsewhere
};
}  // namespace

using ReportsByRank = std::map<int, const StallReport*>;

static Stall stall_of(const StallReport& waiting, const StallReport::Event& pending, const ReportsByRank& reports) {
    Stall stall{&waiting, &pending, {}, {}};
    for (int r : members_of(pending.group, waiting.rank, waiting.world_size, waiting.tensor_parallel)) {
        const auto found = reports.find(r);
        if (found == reports.end()) {
            const bool elsewhere =
                !waiting.shares_output && (waiting.hosts.empty() || waiting.hosts[size_t(r)] != waiting.host);
            stall.unknown |= elsewhere;
            if (!elsewhere) stall.silent.push_back(r);
        } else if (found->second->last_entered[size_t(pending.group)] < pending.index) {
            stall.late.push_back(r);
            stall.is_cause |= !find_pending(*found->second);
        }
    }
    stall.is_cause |= !stall.silent.empty();
    return stall;
}

// "rank 2 on h1", "ranks 2, 5 and 7", at most eight of them.
static std::string name_ranks(const std::vector<int>& ranks, const std::vector<std::string>& hosts) {
    if (ranks.size() == 1)
        return format("rank %d", ranks[0]) + (hosts.empty() ? "" : " on " + printable(hosts[size_t(ranks[0])]));
    constexpr size_t most = 8;
    std::string text = format("ranks %d", ranks[0]);
    for (size_t i = 1; i < std::min(ranks.size(), most); i++)
        text += format("%s %d", i + 1 == ranks.size() ? " and" : ",", ranks[i]);
    return text + (ranks.size() > most ? format(" and %zu more", ranks.size() - most) : "");
}

static std::string describe(const Stall& stall, const ReportsByRank& reports) {
    const std::vector<std::string>& hosts = stall.waiting->hosts;
    std::string text = format("the %s did not end", place(*stall.pending, "in").c_str());
    if (!stall.late.empty()) text += ": " + name_ranks(stall.late, hosts) + " never entered it";
    if (stall.late.size() == 1) text += "; it was last seen in " + last_seen(*reports.at(stall.late[0]));
    if (!stall.silent.empty())
        text += (stall.late.empty() ? ": " : "; ") + name_ranks(stall.silent, hosts) + " did not answer";
    if (stall.unknown) text += "; the ranks share no --output, so nothing is known of those on other hosts";
    if (stall.late.empty() && stall.silent.empty() && !stall.unknown)
        text += ", though every rank has entered it: the network or a device does not answer";
    return text;
}

std::string explain_stall(const std::vector<StallReport>& all) {
    ReportsByRank reports;
    for (const StallReport& report : all) reports[report.rank] = &report;
    Stall first;
    for (const auto& [rank, report] : reports) {
        const StallReport::Event* pending = find_pending(*report);
        if (!pending) continue;
        const Stall stall = stall_of(*report, *pending, reports);
        if (!first.pending || (stall.is_cause && !first.is_cause)) first = stall;
    }
    if (first.pending) return describe(first, reports);
    const auto longest = std::max_element(reports.begin(), reports.end(), [](const auto& a, const auto& b) {
        return a.second->waited < b.second->waited;
    });
    const StallReport& report = *longest->second;
    if (report.world_size == 1) return "it was last seen in " + last_seen(report);
    std::vector<int> silent;
    for (int r = 0; r < report.world_size && report.shares_output; r++)
        if (reports.count(r) == 0) silent.push_back(r);
    return format("no rank waits in a collective; rank %d on %s was last seen in %s", report.rank,
                  printable(report.host).c_str(), last_seen(report).c_str()) +
           (silent.empty() ? "" : "; " + name_ranks(silent, report.hosts) + " did not answer");
}

std::string phase_text(const StallReport& report) {
    if (report.phase == "start") return "the start";
    if (report.phase == "end") return "the end of the run";
    if (report.step < 0) return "the " + printable(report.phase);  // of eval or generate
    const std::string step = format("step %lld", static_cast<long long>(report.step));
    return report.phase == "step" ? step : "the " + printable(report.phase) + " of " + step;
}

std::string describe_stall(const StallReport& report) {
    std::string text = format("%s, process %lld: no progress in %s for %.1f s; last seen in %s",
                              printable(report.host).c_str(), static_cast<long long>(report.process),
                              phase_text(report).c_str(), report.waited, last_seen(report).c_str());
    for (const FlightEvent kind : {FlightEvent::entered, FlightEvent::left}) {
        const StallReport::Event* last = last_event(report, kind);
        if (!last) continue;
        text += format("; last %s the %s (%s), %.1f s before", event_names[int(kind)], place(*last, "in").c_str(),
                       human_bytes(last->bytes).c_str(), last->seconds_ago);
    }
    return text;
}
