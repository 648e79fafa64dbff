// cases_device.h: the cases of device.h that test_device.cpp and test_gpu_device.cu share, about memory and copies.
#pragma once
#include <algorithm>
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

// The bytes between rows stay as they are.
inline void copies_of_rows() {
    struct Case {
        int64_t rows, row_bytes, to_stride, from_stride;
    };
    for (const Case& c :
         {Case{1, 1, 1, 1}, {7, 12, 12, 40}, {7, 12, 40, 12}, {1000, 6, 10, 14}, {0, 4, 8, 8}, {9, 0, 8, 8}}) {
        INFO(c.rows, " rows of ", c.row_bytes, " bytes");
        std::vector<char> from(size_t(c.rows * c.from_stride)), want(size_t(c.rows * c.to_stride));
        for (size_t i = 0; i < from.size(); i++) from[i] = char(1 + i % 127);
        for (int64_t row = 0; row < c.rows; row++)
            std::copy_n(from.begin() + row * c.from_stride, c.row_bytes, want.begin() + row * c.to_stride);
        DeviceBuffer<char> a(c.rows * c.from_stride, "a"), b(c.rows * c.to_stride, "b");
        copy_to_device(a.data, from.data(), a.size, nullptr);
        copy_rows(b.data, c.to_stride, a.data, c.from_stride, c.row_bytes, c.rows, nullptr);
        CHECK(to_host(b.data, b.size) == want);
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
