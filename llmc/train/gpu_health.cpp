#include "train/gpu_health.h"

#include <algorithm>

#include "base/common.h"

GpuSummary summarize_gpus(const RankStatus* statuses, int world_size) {
    GpuSummary all;
    for (int rank = 0; rank < world_size; rank++) {
        const GpuReading& gpu = statuses[rank].gpu;
        if (gpu.temperature_c > all.temperature_c) {
            all.temperature_c = gpu.temperature_c;
            all.hottest_rank = rank;
        }
        if (gpu.sm_mhz > 0 && (all.sm_mhz == 0 || gpu.sm_mhz < all.sm_mhz)) {
            all.sm_mhz = gpu.sm_mhz;
            all.slowest_rank = rank;
        }
        all.power_w = std::max(all.power_w, gpu.power_w);
        all.clock_limits |= int(gpu.clock_limits);
    }
    return all;
}

std::vector<std::string> SlowdownWarnings::add(const RankStatus* statuses, const std::vector<std::string>& hosts) {
    warned.resize(hosts.size());
    std::vector<std::string> lines(static_cast<size_t>(Slowdown::none));
    for (size_t rank = 0; rank < hosts.size(); rank++) {
        const GpuReading& gpu = statuses[rank].gpu;
        const Slowdown slowdown = slowdown_of(gpu);
        const unsigned bit = 1u << unsigned(slowdown);
        if (slowdown == Slowdown::none || warned[rank] & bit) continue;
        warned[rank] |= bit;
        std::string& line = lines[size_t(slowdown)];
        if (line.empty())
            line = format("rank %zu on %s: %s limits the clock of its GPU: %s", rank, hosts[rank].c_str(),
                          slowdown_text(slowdown), describe_reading(gpu).c_str());
        else
            line += format("; also rank %zu on %s", rank, hosts[rank].c_str());
    }
    std::erase(lines, "");
    return lines;
}
