// memory.h: host memory: the CPU backend's device memory, and the working memory of its operations, which a CUDA build
// has too (its tests compare gpu with cpu).
#pragma once
#include <cstdint>
#include <string>

namespace cpu {

// Zeroed, aligned to 64 bytes at least; fails with the purpose and what was asked for. counted: by bytes_allocated.
void* allocate(int64_t bytes, const char* purpose, bool counted);
void release(void* pointer);
int64_t bytes_allocated();
// That allocate could still give each of so many processes of this host, with some left for the rest of the machine.
int64_t available_bytes(int processes = 1);

// The least that this process's control groups and those above them allow in all, and what they still allow;
// INT64_MAX where there is no limit. root: "", or the folder that a test takes for /.
struct ControlGroups {
    int64_t limit, available;
};
ControlGroups control_groups(const std::string& root = "");

// device.h's reserve_scratch and scratch for operations on the CPU.
void reserve_scratch(int64_t bytes);
void* scratch(int64_t bytes);

}  // namespace cpu
