// host_memory.h: how much memory of this machine the process can still allocate, under the limits of its control groups
// and of `ulimit -v`.
#pragma once
#include <cstdint>
#include <string>

constexpr int64_t HOST_BYTES_KEPT = 128 << 20;  // left to the rest of the process and of the machine

// The smallest memory limit of this process's control groups and their parents, and the bytes still available under
// them; INT64_MAX without a limit. root: "", or the folder that a test uses as /.
struct ControlGroups {
    int64_t limit, available;
};
ControlGroups control_groups(const std::string& root = "");

// The address space that `ulimit -v` permits this process, and the bytes of it that are left. INT64_MAX: no limit.
struct AddressSpace {
    int64_t limit, left;
};
AddressSpace address_space();

// Bytes that are free on the machine and under the control groups.
int64_t host_bytes_left();
// Bytes that each of `processes` processes of this machine can still allocate, apart from HOST_BYTES_KEPT.
int64_t host_bytes_free(int processes = 1);
