// gpu_monitor.h: reads a GPU's temperature, clock and power once per second, in a thread of its own.
//
// The values come from NVML, the library libnvidia-ml.so.1 of NVIDIA's driver. It is loaded at run time, so neither the
// build nor the program needs it. A call of NVML takes up to 20 ms and hangs if the driver does; no step waits for it.
#pragma once
#include <memory>
#include <string>

// 0: unknown. All fields are floats, because ranks send a reading to each other (RankStatus in parallel/gradients.h).
struct GpuReading {
    float temperature_c = 0.0f;
    float sm_mhz = 0.0f, max_sm_mhz = 0.0f;  // clock of the multiprocessors: now, and the highest
    float power_w = 0.0f;
    float clock_limits = 0.0f;  // what keeps the clock below the highest, as bits of NVML's clocks event reasons
};

constexpr int SW_POWER_CAP = 0x04;  // the power limit; usual at full load
constexpr int HW_SLOWDOWN = 0x08;   // too hot, too much power, or the power brake
constexpr int SW_THERMAL_SLOWDOWN = 0x20;
constexpr int HW_THERMAL_SLOWDOWN = 0x40;
constexpr int HW_POWER_BRAKE_SLOWDOWN = 0x80;  // the power supply asks for it

// What slows a GPU down that has a fault or is badly cooled, most specific first.
enum class Slowdown { heat, power_brake, hardware, none };
Slowdown slowdown_of(const GpuReading& reading);
const char* slowdown_text(Slowdown slowdown);  // "heat"

// "sw_power_cap hw_thermal_slowdown", the names of nvidia-smi; empty: nothing limits the clock.
std::string clock_limit_names(int clock_limits);
// "87 C, 1140 of 1980 MHz, 310 W (sw_thermal_slowdown)", without what is unknown.
std::string describe_reading(const GpuReading& reading);

struct GpuMonitor {
    static constexpr double INTERVAL = 1.0;      // seconds between two readings
    static constexpr double LONGEST_AGE = 10.0;  // an older reading is out of date: the driver does not answer
    static constexpr double LAST_SECONDS = 1.0;  // what a call that hangs gets before the thread is left to itself

    std::string driver;          // version of the driver; empty: unknown
    std::string why_no_reading;  // empty: there are readings, or there is no GPU

    // bus_id: device_bus_id(). Empty: there is no GPU, and every reading is empty.
    explicit GpuMonitor(const std::string& bus_id);
    ~GpuMonitor();
    GpuMonitor(const GpuMonitor&) = delete;

    GpuReading reading() const;  // the newest one
    // The first error of NVML since the last call of this function; empty: none. Each function's error comes once.
    std::string take_error();

  private:
    struct State;
    std::shared_ptr<State> state;  // with the thread; null: there are no readings
};
