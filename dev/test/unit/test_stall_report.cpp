// test_stall_report.cpp: tests the flight recorder, the reports of ranks that hang, and the sentences that name late
// ranks.
#include "parallel/stall_report.h"

#include <doctest/doctest.h>

#include <thread>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "parallel/comm.h"
#include "support/refusal.h"
#include "support/temporary.h"

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

// ---- the ring

TEST_CASE("the flight recorder keeps the last events, oldest first") {
    FlightRecorder flights;
    flights.step = 7;
    CHECK(flights.entries().empty());
    flights.reached("forward of micro-step", 2);
    const Collective sum = {"all-reduce", "reduce bucket", 3, 7, 4096, RankGroup::data_parallel, 12};
    flights.entered(sum);
    flights.left(sum);
    const std::vector<FlightEntry> entries = flights.entries();
    REQUIRE(entries.size() == 3);
    CHECK(what_happened(entries[0]) == "forward of micro-step 2");
    CHECK(entries[0].collective.step == 7);
    CHECK(what_happened(entries[1]) == "all-reduce of bucket 3");
    CHECK(entries[1].event == FlightEvent::entered);
    CHECK(entries[2].event == FlightEvent::left);
    CHECK(entries[2].collective.bytes == 4096);
    CHECK(entries[2].collective.index == 12);
    CHECK(entries[0].time <= entries[2].time);
    CHECK(flights.progress == 2);  // to enter a collective is no progress
    CHECK(flights.last_entered[size_t(RankGroup::data_parallel)] == 12);
    CHECK(flights.last_entered[size_t(RankGroup::world)] == 0);
    CHECK(what_happened({0, FlightEvent::entered, {"vote"}}) == "vote");
    CHECK(what_happened({0, FlightEvent::entered, {"all-reduce", "reduce loss and norm"}}) ==
          "all-reduce (reduce loss and norm)");

    for (int i = 0; i < 1000; i++) flights.reached("batch", i);
    const std::vector<FlightEntry> last = flights.entries();
    REQUIRE(last.size() == FlightRecorder::SIZE);
    CHECK(last.front().collective.number == 1000 - FlightRecorder::SIZE);
    CHECK(last.back().collective.number == 999);
}

TEST_CASE("several threads record while another one reads") {
    FlightRecorder flights;
    std::atomic<bool> done = false;
    std::vector<std::thread> writers;
    for (int w = 0; w < 2; w++)
        writers.emplace_back([&flights, w] {
            // The fields of an event belong together, so that a reader finds a mixture of two events.
            for (int64_t i = 0; i < 20000; i++) flights.entered({"vote", nullptr, i, 2 * i, 3 * i, RankGroup(w), i});
        });
    int64_t read = 0;
    std::thread reader([&] {
        while (!done)
            for (const FlightEntry& entry : flights.entries()) {
                const Collective& c = entry.collective;
                read++;
                if (c.step != 2 * c.number || c.bytes != 3 * c.number || c.index != c.number) read = INT64_MIN / 2;
            }
    });
    for (std::thread& writer : writers) writer.join();
    done = true;
    reader.join();
    CHECK(read >= 0);
    CHECK(flights.entries().size() == FlightRecorder::SIZE);
}

TEST_CASE("a collective counts in its group, and carries the label and the step") {
    Comm world;
    world.flights = std::make_unique<FlightRecorder>();
    world.flights->step = 41;
    const std::unique_ptr<Comm> group = world.split(0);
    group->group_name = RankGroup::tensor_parallel;
    group->label_next("reduce bucket", 3);
    const Collective c = group->next_collective("all-reduce", 100, group->take_label());
    CHECK(what_happened({0, FlightEvent::entered, c}) == "all-reduce of bucket 3");
    CHECK(c.step == 41);
    CHECK(c.bytes == 100);
    CHECK(c.group == RankGroup::tensor_parallel);
    CHECK(c.index == 1);
    CHECK(group->next_collective("vote", 4).index == 2);
    CHECK(world.next_collective("vote", 4).index == 1);
}

// ---- who is late

static StallReport::Event event(FlightEvent kind, const std::string& what, int64_t index,
                                RankGroup group = RankGroup::world) {
    return {1.0, kind, what, 41, 4096, group, index};
}

// A report of a rank on host h<rank / 2>, which has left collective index - 1 of the group and entered `index`.
static StallReport waiting_rank(int rank, int world_size, int64_t index, RankGroup group = RankGroup::world,
                                int tensor_parallel = 1) {
    StallReport r;
    r.rank = rank;
    r.world_size = world_size;
    r.tensor_parallel = tensor_parallel;
    r.phase = "step";
    r.step = 41;
    r.waited = 120;
    for (int i = 0; i < world_size; i++) r.hosts.push_back("h" + std::to_string(i / 2));
    r.host = r.hosts[size_t(rank)];
    r.last_entered[size_t(group)] = index;
    r.events = {event(FlightEvent::entered, "all-reduce of bucket 4", index - 1, group),
                event(FlightEvent::left, "all-reduce of bucket 4", index - 1, group),
                event(FlightEvent::reached, "backward of micro-step 0", 0),
                event(FlightEvent::entered, "all-reduce of bucket 3", index, group)};
    return r;
}

static StallReport late_rank(int rank, int world_size, int64_t index, RankGroup group = RankGroup::world,
                             int tensor_parallel = 1) {
    StallReport r = waiting_rank(rank, world_size, index, group, tensor_parallel);
    r.last_entered[size_t(group)] = index - 1;
    r.events.pop_back();
    r.events.back().what = "data of micro-step 0";
    return r;
}

TEST_CASE("the sentence names the late rank and what it was doing") {
    CHECK(
        explain_stall({waiting_rank(0, 3, 9), waiting_rank(1, 3, 9), late_rank(2, 3, 9)}) ==
        "the all-reduce of bucket 3 in step 41 did not end: rank 2 on h1 never entered it; it was last seen in data of "
        "micro-step 0 of step 41");
    CHECK(explain_stall({waiting_rank(0, 3, 9), waiting_rank(1, 3, 9)}) ==
          "the all-reduce of bucket 3 in step 41 did not end: rank 2 on h1 did not answer");
    CHECK(explain_stall({waiting_rank(1, 4, 9)}) ==
          "the all-reduce of bucket 3 in step 41 did not end: ranks 0, 2 and 3 did not answer");
    CHECK(contains(explain_stall({waiting_rank(0, 2, 9), waiting_rank(1, 2, 9)}), "though every rank has entered it"));
}

TEST_CASE("a rank that waits for a late rank elsewhere is not the one that is named") {
    // Four ranks, two tensor-parallel groups {0, 1} and {2, 3}. Rank 3 reads data; rank 2 waits for it, and rank 0 and
    // 1 wait for rank 2 and 3 in their data-parallel groups {0, 2} and {1, 3}.
    const auto dp = RankGroup::data_parallel, tp = RankGroup::tensor_parallel;
    const std::vector<StallReport> reports = {waiting_rank(0, 4, 5, dp, 2), waiting_rank(1, 4, 5, dp, 2),
                                              waiting_rank(2, 4, 8, tp, 2), late_rank(3, 4, 8, tp, 2)};
    const std::string sentence = explain_stall(reports);
    CHECK(contains(sentence, "rank 3 on h1 never entered it; it was last seen in data of micro-step 0"));
    CHECK_FALSE(contains(sentence, "rank 2"));
}

TEST_CASE("without a common output nothing is said of ranks on other hosts") {
    StallReport own = waiting_rank(0, 4, 9);
    own.shares_output = false;
    CHECK(contains(explain_stall({own}), "rank 1 on h0 did not answer; the ranks share no --output"));
    own.hosts.clear();
    CHECK(explain_stall({own}) ==
          "the all-reduce of bucket 3 in step 41 did not end; the ranks share no --output, so "
          "nothing is known of those on other hosts");
}

TEST_CASE("a rank alone, and ranks that wait in no collective") {
    StallReport alone = late_rank(0, 1, 2);
    CHECK(explain_stall({alone}) == "it was last seen in data of micro-step 0 of step 41");
    StallReport slow = late_rank(1, 3, 2);
    slow.waited = 130;
    CHECK(explain_stall({late_rank(0, 3, 2), slow}) ==
          "no rank waits in a collective; rank 1 on h0 was last seen in data of micro-step 0 of step 41; rank 2 on h1 "
          "did not answer");
}

// ---- the file

TEST_CASE("a report reads back as it was written") {
    StallReport r = waiting_rank(1, 4, 9, RankGroup::tensor_parallel, 2);
    r.process = 312;
    const StallReport again = parse_stall_report(stall_report_json(r), "rank_1.json");
    CHECK(stall_report_json(again) == stall_report_json(r));
    CHECK(again.events.size() == 4);
    CHECK(again.hosts == r.hosts);
    CHECK(
        describe_stall(again) ==
        "h0, process 312: no progress in step 41 for 120.0 s; last seen in backward of micro-step 0 of step 41; last "
        "entered the all-reduce of bucket 3 in step 41 (4.00 KiB), 1.0 s before; last left the all-reduce of bucket 4 "
        "in step 41 (4.00 KiB), 1.0 s before");
    r.phase = "validation";
    CHECK(phase_text(r) == "the validation of step 41");
    r.phase = "start";
    CHECK(phase_text(r) == "the start");
}

TEST_CASE("a file that is no report is refused with its name") {
    const auto refused = [](const std::string& text) {
        return refusal([&] { parse_stall_report(text, "rank_1.json"); });
    };
    using Json = nlohmann::json;
    const Json good = Json::parse(stall_report_json(waiting_rank(1, 4, 9)));
    CHECK(contains(refused("{\"rank\":"), "65 rank_1.json"));
    CHECK(contains(refused("[1]"), "65 rank_1.json"));
    for (const auto& item : good.items()) {
        const std::string name = item.key();
        CAPTURE(name);
        Json without = good, wrong = good;
        without.erase(name);
        wrong[name] = Json::array({Json::object()});
        CHECK(contains(refused(without.dump()), "65 rank_1.json"));
        CHECK(contains(refused(wrong.dump()), "65 rank_1.json"));
    }
    const auto with = [&](const char* path, const Json& value) {
        Json changed = good;
        changed[Json::json_pointer(path)] = value;
        return changed.dump();
    };
    CHECK(contains(refused(with("/rank", 4)), "\"rank\" is 4"));
    CHECK(contains(refused(with("/rank", uint64_t(1) << 63)), "\"rank\" is 9223372036854775808"));
    CHECK(contains(refused(with("/world_size", 1 << 20)), "\"world_size\" is 1048576"));
    CHECK(contains(refused(with("/tensor_parallel", 3)), "\"tensor_parallel\" is 3"));
    CHECK(contains(refused(with("/hosts", Json::array({"h0"}))), "\"hosts\""));
    CHECK(contains(refused(with("/events/0/event", "slept")), "\"event\" is"));
    CHECK(contains(refused(with("/events/0/group", "none")), "\"group\" is"));
    CHECK(contains(refused(with("/last_entered/world", -1)), "\"world\" is -1"));
    CHECK(contains(refused(with("/events", Json(std::vector<Json>(257, good["events"][0])))), "\"events\" is"));
}

TEST_CASE("reports are found by their names") {
    const TemporaryDirectory dir;
    CHECK(find_stall_reports(dir.path + "/none").empty());
    for (const char* name : {"rank_10.json", "rank_2.json", "rank_2.json.tmp", "rank_.json", "rank_x.json",
                             "rank_-1.json", "rank_1x.json", "rank_99999999999.json"})
        write_file(dir.path + "/" + name, stall_report_json(waiting_rank(2, 4, 9)));
    const auto found = find_stall_reports(dir.path);
    REQUIRE(found.size() == 2);
    CHECK(found[0].first == 2);
    CHECK(found[1].second == dir.path + "/rank_10.json");
    CHECK(read_stall_report(found[0].second, 2).rank == 2);
    CHECK(contains(refusal([&] { read_stall_report(found[1].second, 10); }), "rank_10.json: is the report of rank 2"));
}
