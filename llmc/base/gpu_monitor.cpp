#include "base/gpu_monitor.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/common.h"

// ---- what a reading says

Slowdown slowdown_of(const GpuReading& reading) {
    const int limits = int(reading.clock_limits);
    if (limits & (SW_THERMAL_SLOWDOWN | HW_THERMAL_SLOWDOWN)) return Slowdown::heat;
    if (limits & HW_POWER_BRAKE_SLOWDOWN) return Slowdown::power_brake;
    return limits & HW_SLOWDOWN ? Slowdown::hardware : Slowdown::none;
}

const char* slowdown_text(Slowdown slowdown) {
    static constexpr const char* texts[] = {"heat", "the power brake of its machine", "its hardware", "nothing"};
    return texts[int(slowdown)];
}

std::string clock_limit_names(int clock_limits) {
    static constexpr std::pair<int, const char*> names[] = {{SW_POWER_CAP, "sw_power_cap"},
                                                            {HW_SLOWDOWN, "hw_slowdown"},
                                                            {SW_THERMAL_SLOWDOWN, "sw_thermal_slowdown"},
                                                            {HW_THERMAL_SLOWDOWN, "hw_thermal_slowdown"},
                                                            {HW_POWER_BRAKE_SLOWDOWN, "hw_power_brake_slowdown"}};
    std::string text;
    for (const auto& [bit, name] : names)
        if (clock_limits & bit) text.append(text.empty() ? "" : " ").append(name);
    return text;
}

std::string describe_reading(const GpuReading& r) {
    std::string text;
    const auto add = [&](const std::string& part) { text.append(text.empty() ? "" : ", ").append(part); };
    if (r.temperature_c > 0) add(format("%.0f C", double(r.temperature_c)));
    if (r.sm_mhz > 0 && r.max_sm_mhz > 0) add(format("%.0f of %.0f MHz", double(r.sm_mhz), double(r.max_sm_mhz)));
    if (r.sm_mhz > 0 && r.max_sm_mhz == 0) add(format("%.0f MHz", double(r.sm_mhz)));
    if (r.power_w > 0) add(format("%.0f W", double(r.power_w)));
    const std::string limits = clock_limit_names(int(r.clock_limits));
    if (limits.empty()) return text;
    return text + (text.empty() ? "" : " ") + "(" + limits + ")";
}

// ---- NVML. Its functions, types and numbers, as its documentation has them.

namespace {
using Device = struct nvmlDevice_st*;
constexpr int SUCCESS = 0, NOT_SUPPORTED = 3, FUNCTION_NOT_FOUND = 13;
constexpr int TEMPERATURE_GPU = 0, CLOCK_SM = 1;

struct Nvml {
    int (*init)();
    int (*get_device)(const char* bus_id, Device* device);
    int (*get_driver)(char* text, unsigned length);
    const char* (*error_string)(int error);
    int (*get_temperature)(Device, int sensor, unsigned* celsius);
    int (*get_clock)(Device, int type, unsigned* mhz);
    int (*get_max_clock)(Device, int type, unsigned* mhz);
    int (*get_power)(Device, unsigned* milliwatts);
    int (*get_clock_limits)(Device, unsigned long long* bits);

    // Loads the library, which is never unloaded. Returns why it cannot be used; empty: it can.
    std::string load();
    std::string error_text(const char* function, int error) const;
};

// Null if the library has none of these names. A driver from before 2023 has only the second one of get_clock_limits.
template <class Function>
void find(void* library, Function*& function, const char* name, const char* other_name = nullptr) {
    void* found = dlsym(library, name);
    if (!found && other_name) found = dlsym(library, other_name);
    function = reinterpret_cast<Function*>(found);
}

std::string Nvml::load() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return dlerror();
    find(library, init, "nvmlInit_v2");
    find(library, get_device, "nvmlDeviceGetHandleByPciBusId_v2");
    find(library, get_driver, "nvmlSystemGetDriverVersion");
    find(library, error_string, "nvmlErrorString");
    find(library, get_temperature, "nvmlDeviceGetTemperature");
    find(library, get_clock, "nvmlDeviceGetClockInfo");
    find(library, get_max_clock, "nvmlDeviceGetMaxClockInfo");
    find(library, get_power, "nvmlDeviceGetPowerUsage");
    find(library, get_clock_limits, "nvmlDeviceGetCurrentClocksEventReasons",
         "nvmlDeviceGetCurrentClocksThrottleReasons");
    return init && get_device ? "" : "libnvidia-ml.so.1 lacks nvmlInit_v2 or nvmlDeviceGetHandleByPciBusId_v2";
}

std::string Nvml::error_text(const char* function, int error) const {
    return format("%s: %s (NVML's error %d)", function, error_string ? error_string(error) : "an error", error);
}
}  // namespace

// ---- the thread

// Shared with the thread, which may outlive the monitor.
struct GpuMonitor::State {
    Nvml nvml = {};
    Device device = nullptr;

    std::mutex mutex;  // guards the fields below; no call of NVML is made under it
    std::condition_variable changed;
    GpuReading newest;
    double read_at = 0.0;         // seconds_now() of `newest`
    std::set<std::string> known;  // functions whose error was reported
    std::vector<std::string> errors;
    bool ending = false, ended = false;

    // Calls a function of NVML and returns its value. Returns 0 if the GPU or the library lacks the value, or if the
    // call fails.
    template <class Number = unsigned, class Function, class... Arguments>
    float get(const char* name, Function* function, Arguments... arguments) {
        Number value = 0;
        const int error = function ? function(device, arguments..., &value) : FUNCTION_NOT_FOUND;
        if (error == SUCCESS) return float(value);
        if (error == NOT_SUPPORTED || error == FUNCTION_NOT_FOUND) return 0.0f;
        const std::lock_guard lock(mutex);
        if (known.insert(name).second) errors.push_back(nvml.error_text(name, error));
        return 0.0f;
    }
    GpuReading read(float max_sm_mhz, int& last_limits);
    void run();
};

// A limit of the clock counts if two readings in a row have it: a GPU that changes its clock may show one for a moment.
GpuReading GpuMonitor::State::read(float max_sm_mhz, int& last_limits) {
    constexpr int known_limits =
        SW_POWER_CAP | HW_SLOWDOWN | SW_THERMAL_SLOWDOWN | HW_THERMAL_SLOWDOWN | HW_POWER_BRAKE_SLOWDOWN;
    GpuReading r;
    r.temperature_c = get("nvmlDeviceGetTemperature", nvml.get_temperature, TEMPERATURE_GPU);
    r.sm_mhz = get("nvmlDeviceGetClockInfo", nvml.get_clock, CLOCK_SM);
    r.max_sm_mhz = max_sm_mhz;
    r.power_w = 1e-3f * get("nvmlDeviceGetPowerUsage", nvml.get_power);
    const int limits =
        known_limits & int(get<unsigned long long>("nvmlDeviceGetCurrentClocksEventReasons", nvml.get_clock_limits));
    r.clock_limits = float(limits & last_limits);
    last_limits = limits;
    return r;
}

void GpuMonitor::State::run() {
    const float max_sm_mhz = get("nvmlDeviceGetMaxClockInfo", nvml.get_max_clock, CLOCK_SM);
    int last_limits = 0;
    for (;;) {
        const GpuReading now = read(max_sm_mhz, last_limits);
        std::unique_lock lock(mutex);
        newest = now;
        read_at = seconds_now();
        if (changed.wait_for(lock, std::chrono::duration<double>(INTERVAL), [&] { return ending; })) break;
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
}

GpuMonitor::GpuMonitor(const std::string& bus_id) {
    if (bus_id.empty()) return;
    auto opened = std::make_shared<State>();
    Nvml& nvml = opened->nvml;
    why_no_reading = nvml.load();
    if (!why_no_reading.empty()) return;
    const char* function = "nvmlInit_v2";
    int error = nvml.init();
    if (error == SUCCESS) {
        char version[80] = "";
        if (nvml.get_driver && nvml.get_driver(version, sizeof version) == SUCCESS) driver = version;
        function = "nvmlDeviceGetHandleByPciBusId_v2";
        error = nvml.get_device(bus_id.c_str(), &opened->device);
    }
    if (error != SUCCESS) {
        why_no_reading = nvml.error_text(function, error);
        return;
    }
    state = opened;
    std::thread([opened] { opened->run(); }).detach();
}

GpuMonitor::~GpuMonitor() {
    if (!state) return;
    std::unique_lock lock(state->mutex);
    state->ending = true;
    state->changed.notify_all();
    state->changed.wait_for(lock, std::chrono::duration<double>(LAST_SECONDS), [&] { return state->ended; });
}

GpuReading GpuMonitor::reading() const {
    if (!state) return {};
    const std::lock_guard lock(state->mutex);
    return seconds_now() - state->read_at < LONGEST_AGE ? state->newest : GpuReading{};
}

std::string GpuMonitor::take_error() {
    if (!state) return "";
    const std::lock_guard lock(state->mutex);
    if (state->errors.empty()) return "";
    const std::string first = state->errors.front();
    state->errors.erase(state->errors.begin());
    return first;
}
