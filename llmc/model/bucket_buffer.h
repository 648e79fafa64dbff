// bucket_buffer.h: device memory for a flat buffer of the model's parameters or gradients, bucket by bucket.
//
// With as many layer slots as layers, every bucket has memory of its own, in the order of the flat buffer. With fewer
// slots, only bucket 0 has memory of its own, and the layers l and l + layer_slots share theirs.
#pragma once
#include "base/device.h"
#include "model/params.h"

template <class T>
struct BucketBuffer {
    ParamLayout layout;
    int layer_slots;
    DeviceBuffer<T> memory;  // empty with 0 slots

    BucketBuffer(const ParamLayout& layout, int layer_slots, const char* purpose)
        : layout(layout), layer_slots(layer_slots), memory(elements(layout, layer_slots), purpose) {}

    static int64_t elements(const ParamLayout& layout, int layer_slots) {
        return layer_slots == 0 ? 0 : layout.bucket(0).end + layer_slots * layout.layer_stride;
    }
    // The number of a bucket's memory: 0 for bucket 0, 1 ... layer_slots for the layers.
    int slot(int b) const { return b == 0 ? 0 : 1 + (b - 1) % layer_slots; }
    T* bucket(int b) const {
        return memory.data + (b == 0 ? 0 : layout.bucket(0).end + (slot(b) - 1) * layout.layer_stride);
    }
    // Tensor p of layer l.
    T* tensor(Param p, int l) const {
        const int b = layout.bucket_of(p, l);
        return bucket(b) + layout.offset(p, l) - layout.bucket(b).begin;
    }
};
