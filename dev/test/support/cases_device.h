// cases_device.h: the cases of device.h that test_device.cpp and test_gpu_device.cu share, about memory and copies.
#pragma once
#include <cstring>

#include "base/device.h"
#include "support/test.h"

namespace device_cases {

// New memory is zero, aligned and counted, even if a freed block of the same size held other bytes.
inline void allocation(const std::vector<int64_t>& sizes) {
    const int64_t before = device_bytes_allocated();
    for (const int64_t bytes : sizes)
        for (int block = 0; block < 2; block++) {
            CAPTURE(bytes);
            char* memory = static_cast<char*>(device_allocate(bytes, "a test"));
            CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
            CHECK(to_host(memory, bytes) == std::vector<char>(size_t(bytes)));
            CHECK(device_bytes_allocated() == before + bytes);
            const std::vector<char> ones(size_t(bytes), 1);
            copy_to_device(memory, ones.data(), bytes, nullptr);
            wait_for_device();
            device_free(memory);
            CHECK(device_bytes_allocated() == before);
        }
    CHECK(device_allocate(0, "nothing") == nullptr);
    device_free(nullptr);
}

inline void host_memory() {
    const int64_t before = device_bytes_allocated();
    void* memory = host_allocate(1000);
    memset(memory, 1, 1000);
    CHECK(device_bytes_allocated() == before);
    host_free(memory);
    host_free(nullptr);
    CHECK(host_allocate(0) == nullptr);
}

inline void copies(const std::vector<int64_t>& sizes) {
    for (const int64_t size : sizes) {
        CAPTURE(size);
        std::vector<char> from(static_cast<size_t>(size));
        for (int64_t i = 0; i < size; i++) from[size_t(i)] = char(i * 31 % 127);
        DeviceBuffer<char> a(size, "a"), b(size, "b");
        copy_to_device(a.data, from.data(), size, nullptr);
        copy_on_device(b.data, a.data, size, nullptr);
        CHECK(to_host(b.data, size) == from);
        fill_zero(b.data, size, nullptr);
        CHECK(to_host(b.data, size) == std::vector<char>(size_t(size)));
    }
}

// Reserves scratch memory for the rest of the process, so it must run after tests whose scratch memory grows.
inline void scratch() {
    device_scratch(1000);
    device_scratch(2000);
    device_reserve_scratch(5000);
    const int64_t allocated = device_bytes_allocated();
    CHECK(device_scratch(5000) == device_scratch(1));
    CHECK(device_bytes_allocated() == allocated);
    CHECK_THROWS_WITH_AS(device_scratch(5001), doctest::Contains("5,001 bytes of working memory, 5,000 are reserved"),
                         Error);
}

}  // namespace device_cases
