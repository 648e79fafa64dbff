// test_device.cpp: tests device.h on the CPU: allocations and their failures, copies, timers, and scratch memory.
#include <chrono>
#include <cmath>
#include <thread>

#include "base/host.h"
#include "cpu/variants.h"
#include "support/cases_device.h"
#include "support/temporary.h"
#include "support/test.h"

TEST_CASE("device_allocate returns zeroed, aligned memory and counts its bytes, small or mapped") {
    device_cases::allocation({1, 63, 100'000, (2 << 20) - 1, 2 << 20, (5 << 20) + 7});
}

TEST_CASE("too large a request is refused with its purpose and its size, and leaves nothing behind") {
    const int64_t before = device_bytes_allocated(), petabyte = int64_t(1) << 50;
    CHECK_THROWS_WITH_AS(device_allocate(petabyte, "weights"),
                         doctest::Contains("no memory for weights: 1,125,899,906,842,624 bytes asked"), OutOfMemory);
    CHECK(device_bytes_allocated() == before);
}

// A folder that stands for the root directory of a machine with control groups.
struct Machine {
    TemporaryDirectory root;

    explicit Machine(const std::string& lines) { write("/proc/self/cgroup", lines); }
    void write(const std::string& file, const std::string& text) const {
        const std::filesystem::path path = root.path + file;
        std::filesystem::create_directories(path.parent_path());
        write_bytes(path, text + "\n");
    }
    void check(int64_t limit, int64_t available) const {
        const MemoryLimit groups = control_groups(root.path);
        CHECK(groups.limit == limit);
        CHECK(groups.left == available);
    }
};

TEST_CASE("control groups of version 2: the lowest max or high of all levels counts; file cache is free memory") {
    const Machine machine("0::/a/b");
    const std::string a = "/sys/fs/cgroup/a/";
    machine.check(INT64_MAX, INT64_MAX);
    machine.write(a + "memory.max", "5000");
    machine.write(a + "memory.current", "1500");
    machine.write(a + "memory.stat", "anon 800\ninactive_file 300\nactive_file 200");
    machine.write(a + "b/memory.max", "max");
    machine.write(a + "b/memory.high", "max");
    machine.check(5000, 4000);
    machine.write(a + "b/memory.high", "4500");
    machine.write(a + "b/memory.current", "100");
    machine.check(4500, 4000);
    machine.write(a + "b/memory.current", "700");
    machine.check(4500, 3800);
}

TEST_CASE("control groups of version 1, also if the mount shows only the container's own group") {
    const Machine machine("9:cpu,cpuacct:/x\n8:memory:/docker/1f\n1:name=systemd:/y\n0::/z");
    const std::string mount = "/sys/fs/cgroup/memory/";
    machine.write(mount + "memory.limit_in_bytes", "9223372036854771712");
    machine.check(INT64_MAX, INT64_MAX);
    machine.write(mount + "memory.limit_in_bytes", "6000");
    machine.write(mount + "memory.usage_in_bytes", "2000");
    machine.write(mount + "memory.stat", "inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 50");
    machine.check(6000, 4150);
    machine.write(mount + "docker/1f/memory.limit_in_bytes", "3000");
    machine.check(3000, 3000);
}

TEST_CASE("the CPU quota is the least of all levels, in cores") {
    const Machine second("0::/a/b"), first("3:cpu,cpuacct:/x\n2:cpuset:/y\n0::/");
    const std::string a = "/sys/fs/cgroup/a/", mount = "/sys/fs/cgroup/cpu/";
    CHECK(cpu_quota(second.root.path) == INFINITY);
    second.write(a + "cpu.max", "150000 100000");
    second.write(a + "b/cpu.max", "max 100000");
    CHECK(cpu_quota(second.root.path) == 1.5);
    second.write(a + "b/cpu.max", "25000 50000");
    CHECK(cpu_quota(second.root.path) == 0.5);
    first.write(mount + "x/cpu.cfs_quota_us", "-1");
    first.write(mount + "x/cpu.cfs_period_us", "100000");
    CHECK(cpu_quota(first.root.path) == INFINITY);
    first.write(mount + "cpu.cfs_quota_us", "300000");
    first.write(mount + "cpu.cfs_period_us", "100000");
    CHECK(cpu_quota(first.root.path) == 3.0);
}

TEST_CASE("processes of a host share its memory") {
    const int64_t one = device_bytes_free(1), two = device_bytes_free(2);
    CHECK(two > 0);
    CHECK(double(two) < 0.6 * double(one));
}

TEST_CASE("copies and zeros, also where several threads share them, and host memory that is not counted") {
    device_cases::copies({0, 1, 1000, (5 << 20) + 3});
    device_cases::copies_of_rows();
    device_cases::host_memory();
}

TEST_CASE("a timer keeps the time at which it was recorded, and can be recorded again") {
    const Event before = create_timer(), after = create_timer();
    record_event(before, nullptr);
    const double start = seconds_now();
    while (seconds_now() - start < 0.01) continue;
    record_event(after, nullptr);
    CHECK(seconds_between(before, after) >= 0.01);
    record_event(before, nullptr);
    CHECK(seconds_between(before, after) <= 0.0);
    destroy_event(before), destroy_event(after);
}

TEST_CASE("scratch memory grows until it is reserved, and then a larger request is refused") {
    device_cases::scratch();
}

TEST_CASE("the measured peak is the rate of the fastest run, even if the first run was interrupted for long") {
    int runs = 0;
    const auto run = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(runs++ == 0 ? 40 : 0));
        return 1.0;
    };
    CHECK(cpu::peak_of(run) > 25.0);  // it would be less if the first run counted
}

TEST_CASE("device_info names the processor, the threads and the instructions, and measures a peak") {
    device_init(0, 1);
    const DeviceInfo info = device_info();
    CHECK(info.name.find("1 thread,") != std::string::npos);
    CHECK(info.memory_bytes > 0);
    CHECK(info.peak_flops_fp32 > 0.0);
    CHECK(info.peak_flops_bf16 > 0.0);
    CHECK(info.peak_source == "measured at start");
    CHECK(device_measure_peak(Dtype::bf16) >= info.peak_flops_bf16);  // the best measurement so far
}
