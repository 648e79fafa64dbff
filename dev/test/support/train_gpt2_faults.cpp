// train_gpt2_faults: train_gpt2 with the option --fault KIND:rank=1,step=7[,phase=allreduce][,ms=200][,times=1].
//
// KIND      what rank `rank` does in each step from `step` on, `times` times in all  phase, if not given
// kill      sends itself SIGKILL                                                     step
// hang      sends itself SIGSTOP                                                     step
// error     throws an Error                                                          step
// slow      sleeps for `ms` milliseconds; times: without end, if not given           step
// nan       writes NaN into its gradients                                            gradients
// bitflip   flips a bit of its weights; with phase=gradients, of its gradients       update
//
// `phase` is a name of FaultPoint. A start by --max-restarts counts the fault before it as one of the `times`.
//
// The linker makes the program of train_gpt2's own objects: with --wrap=main it calls __wrap_main instead of main,
// which it names __real_main. Ranks that the program starts find the fault in the environment.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include "base/common.h"
#include "base/device.h"
#include "base/fault.h"

extern "C" int __real_main(int argc, char** argv);

static const std::map<std::string, FaultPoint> phases = {{"step", FaultPoint::step},
                                                         {"gradients", FaultPoint::gradients},
                                                         {"allreduce", FaultPoint::allreduce},
                                                         {"update", FaultPoint::update},
                                                         {"save", FaultPoint::save},
                                                         {"part", FaultPoint::part},
                                                         {"validation", FaultPoint::validation}};
static constexpr const char* FAULT_VARIABLE = "TRAIN_GPT2_FAULT";

static struct {
    std::string kind;
    FaultPoint point = FaultPoint::step;
    int rank = 0, ms = 200, times = 1;
    int64_t step = 0;
} fault;
static int* fired;                 // in memory that is shared with ranks that are forked
static int own_rank = -1;          // this process, since its first step
static int64_t current_step = -1;  // of this process
static bool in_this_step = false;  // the fault has fired in the current step

static void set_field(const std::string& name, const std::string& value) {
    if (name == "rank") return void(fault.rank = std::stoi(value));
    if (name == "step") return void(fault.step = std::stoll(value));
    if (name == "ms") return void(fault.ms = std::stoi(value));
    if (name == "times") return void(fault.times = std::stoi(value));
    ENSURE(name == "phase" && phases.count(value), "--fault: %s=%s is not known", name.c_str(), value.c_str());
    fault.point = phases.at(value);
}

static void parse(const std::string& text) {
    std::istringstream words(text);
    std::getline(words, fault.kind, ':');
    const std::map<std::string, FaultPoint> kinds = {{"kill", FaultPoint::step},     {"hang", FaultPoint::step},
                                                     {"error", FaultPoint::step},    {"slow", FaultPoint::step},
                                                     {"nan", FaultPoint::gradients}, {"bitflip", FaultPoint::update}};
    ENSURE(kinds.count(fault.kind), "--fault %s is not known", text.c_str());
    fault.point = kinds.at(fault.kind);
    if (fault.kind == "slow") fault.times = std::numeric_limits<int>::max();
    for (std::string word; std::getline(words, word, ',');) {
        const size_t equals = word.find('=');
        ENSURE(equals != word.npos, "--fault: %s has no =", word.c_str());
        set_field(word.substr(0, equals), word.substr(equals + 1));
    }
}

static void change_memory(const FaultSite& site) {
    uint32_t word;
    INVARIANT(site.bytes >= int64_t(sizeof word), "the fault %s has no memory to change", fault.kind.c_str());
    copy_to_host(&word, site.data, sizeof word, site.stream);
    wait_for_stream(site.stream);
    // The highest bit of the mantissa, in a float and in the second of two bf16.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (fault.kind == "nan") std::memcpy(&word, &nan, sizeof word);
    if (fault.kind == "bitflip") word ^= 1u << 22;
    copy_to_device(site.data, &word, sizeof word, site.stream);
    wait_for_stream(site.stream);
}

static void strike(const FaultSite& site) {
    if (fault.kind == "kill") raise(SIGKILL);
    if (fault.kind == "hang") raise(SIGSTOP);
    if (fault.kind == "error") fail(EXIT_INTERNAL, "an injected fault in step %lld", static_cast<long long>(site.step));
    if (fault.kind == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(fault.ms));
    if (fault.kind == "nan" || fault.kind == "bitflip") change_memory(site);
}

static void reach(const FaultSite& site) {
    if (site.point == FaultPoint::step) {
        own_rank = site.rank;
        current_step = site.step;
        in_this_step = false;
    }
    FaultSite here = site;
    if (site.rank < 0) here.rank = own_rank, here.step = current_step;
    const bool here_and_now = here.point == fault.point && here.rank == fault.rank && here.step >= fault.step;
    if (!here_and_now || *fired >= fault.times ||
        (in_this_step && site.point != FaultPoint::save && site.point != FaultPoint::part))
        return;
    ++*fired;
    in_this_step = true;
    strike(here);
}

static void install(const std::string& text) {
    parse(text);
    void* shared = mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ENSURE(shared != MAP_FAILED, "no shared memory");
    fired = static_cast<int*>(shared);
    const char* restarts = std::getenv("TRAIN_GPT2_RESTARTS");  // of --ranks: the ranks of a restart are new programs
    *fired = restarts ? std::atoi(restarts) : 0;
    fault_hook = reach;
}

extern "C" int __wrap_main(int argc, char** argv) {
    for (int i = 1; i + 1 < argc; i++) {
        if (std::strcmp(argv[i], "--fault") != 0) continue;
        setenv(FAULT_VARIABLE, argv[i + 1], 1);
        std::copy(argv + i + 2, argv + argc + 1, argv + i);
        argc -= 2;
    }
    try {
        if (const char* text = std::getenv(FAULT_VARIABLE)) install(text);
    } catch (const std::exception& error) {  // also of std::stoi
        std::fprintf(stderr, "error: %s\n", error.what());
        return EXIT_USAGE;
    }
    return __real_main(argc, argv);
}
