// memory.h: allocates host memory: device memory of the CPU backend, and scratch memory of its operations. A CUDA build
// has both too, because its tests compare gpu:: with cpu::.
#pragma once
#include <cstdint>
#include <string>

namespace cpu {

// Allocates zeroed memory, aligned to at least 64 bytes. The error message of a failure names the purpose and the size.
// counted: whether bytes_allocated includes the block.
void* allocate(int64_t bytes, const char* purpose, bool counted);
void release(void* pointer);
int64_t bytes_allocated();
// Bytes that allocate can still give to each of `processes` processes of this host, with a reserve for the rest of the
// machine.
int64_t available_bytes(int processes = 1);

// The smallest memory limit of this process's control groups and their parents, and the bytes still available under
// them; INT64_MAX without a limit. root: "", or the folder that a test uses as /.
struct ControlGroups {
    int64_t limit, available;
};
ControlGroups control_groups(const std::string& root = "");

// What device.h's device_reserve_scratch and device_scratch do, for operations on the CPU.
void reserve_scratch(int64_t bytes);
void* scratch(int64_t bytes);

}  // namespace cpu
