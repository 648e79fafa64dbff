// tensorboard.h: the bytes of TensorBoard's event files, which train/log.cpp writes.
//
// A record is the length of its data (uint64), a checksum of these 8 bytes, the data, and a checksum of the data, all
// little-endian. The data are an Event of Protocol Buffers: 1 wall time (double), 2 step, and one of 3 version (text),
// 5 summary, 7 session. A summary has values (field 1), each with a tag (1) and a float (2).
#pragma once
#include <cstdint>
#include <string>

#include "base/json.h"

namespace tensorboard {

// CRC-32C, masked as in TFRecord.
inline uint32_t checksum(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char c : bytes) {
        crc ^= uint8_t(c);
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78u : crc >> 1;
    }
    return (~crc >> 15 | ~crc << 17) + 0xa282ead8u;
}

template <class T>
std::string bytes_of(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

inline std::string varint(uint64_t value) {
    return value < 128 ? std::string(1, char(value)) : char(value % 128 + 128) + varint(value / 128);
}

inline std::string field(int number, const std::string& bytes) {
    return varint(uint64_t(number) << 3 | 2) + varint(bytes.size()) + bytes;
}

inline std::string record(double wall_time, int64_t step, const std::string& fields) {
    const std::string data = "\x09" + bytes_of(wall_time) + (step ? "\x10" + varint(uint64_t(step)) : "") + fields;
    const std::string length = bytes_of(uint64_t(data.size()));
    return length + bytes_of(checksum(length)) + data + bytes_of(checksum(data));
}

// Returns a file's begin: version, and start of a session, with which TensorBoard forgets older files' later steps.
inline std::string begin_file(double wall_time, int64_t first_step) {
    return record(wall_time, 0, field(3, "brain.Event:2")) + record(wall_time, first_step, field(7, "\x08\x01"));
}

// Returns the event of a log line of kind step, val or eval, else "". Tags: step/loss, val/val_loss, eval/TASK/acc.
inline std::string event_of_line(double wall_time, const std::string& line) {
    const Json object = parse_json_object(line, "a line of the log");
    const std::string kind = object.value("kind", std::string()), task = object.value("task", std::string());
    if (kind != "step" && kind != "val" && kind != "eval") return "";
    std::string values;
    for (const auto& [name, value] : object.members) {
        const std::string tag = kind + "/" + task + (task.empty() ? "" : "/") + name;
        if (value.type == Json::number && name != "step")
            values += field(1, field(1, tag) + "\x15" + bytes_of(value.get<float>()));
    }
    return record(wall_time, object.value("step", int64_t(0)), field(5, values));
}

}  // namespace tensorboard
