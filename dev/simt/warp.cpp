// warp.cpp: the emulator's warp operations and barriers.
//
// A warp has three sets of lanes: live, ready, waiting. A lane that reaches a warp operation puts a slot on its stack
// and waits. The last lane of the mask computes the results of all and makes all lanes ready.
#include "block.h"

#include <cstring>

namespace simt {

enum class Op : uint8_t { barrier, shuffle, ballot, match, mma, ldmatrix, stmatrix };

// A lane's operands of a warp operation, and its result. The comments name the operations that use a field.
struct Slot {
    Op op;
    uint64_t bits[2] = {};                      // shuffle, match: the value; ballot: the vote; matrices: the row
    uint64_t result = 0;                        // shuffle, ballot, match
    int source_lane = 0;                        // shuffle
    const uint32_t *a = nullptr, *b = nullptr;  // mma, stmatrix
    float* acc = nullptr;                       // mma
    uint32_t* registers = nullptr;              // ldmatrix
    bool transpose = false;                     // ldmatrix
};

static float widened(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }

static void compute_mma(Slot** slots) {
    float A[16][16], B[16][8], D[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Slot& s = *slots[lane];
        const int g = lane / 4, t = lane % 4 * 2;
        for (int h = 0; h < 2; h++) {
            A[g][t + h] = widened(s.a[0], h);
            A[g + 8][t + h] = widened(s.a[1], h);
            A[g][t + 8 + h] = widened(s.a[2], h);
            A[g + 8][t + 8 + h] = widened(s.a[3], h);
            B[t + h][g] = widened(s.b[0], h);
            B[t + 8 + h][g] = widened(s.b[1], h);
            D[g][t + h] = s.acc[h];
            D[g + 8][t + h] = s.acc[2 + h];
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int h = 0; h < 2; h++) {
            slots[lane]->acc[h] = D[g][t + h];
            slots[lane]->acc[2 + h] = D[g + 8][t + h];
        }
    }
}

static void compute_ldmatrix(Slot** slots) {
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        for (int j = 0; j < 4; j++) {
            uint32_t pair = 0;
            for (int h = 0; h < 2; h++) {
                const int row = slots[lane]->transpose ? t + h : g, column = slots[lane]->transpose ? g : t + h;
                const uint64_t four = slots[j * 8 + row]->bits[column / 4];
                pair |= uint32_t(four >> (column % 4 * 16) & 0xffff) << (16 * h);
            }
            slots[lane]->registers[j] = pair;
        }
    }
}

static void compute_stmatrix(Slot** slots) {
    for (int lane = 0; lane < 32; lane++) {
        const int row = lane % 8, matrix = lane / 8;
        for (int i = 0; i < 8; i++) {
            const uint32_t pair = slots[row * 4 + i / 2]->a[matrix];
            slots[lane]->bits[i / 4] |= uint64_t(pair >> i % 2 * 16 & 0xffff) << i % 4 * 16;
        }
    }
}

static void compute(Op op, Slot** slots, unsigned lanes, Site site) {
    if ((op == Op::mma || op == Op::ldmatrix || op == Op::stmatrix) && lanes != ~0u)
        report("a tensor-core operation needs 32 lanes", site);
    if (op == Op::mma) compute_mma(slots);
    if (op == Op::ldmatrix) compute_ldmatrix(slots);
    if (op == Op::stmatrix) compute_stmatrix(slots);
    if (op == Op::shuffle)
        for_each_lane(lanes, [&](int lane) {
            const int source = slots[lane]->source_lane;
            if (source < 0 || source > 31 || !slots[source])
                report("a shuffle reads a lane that does not take part", site);
            slots[lane]->result = slots[source]->bits[0];
        });
    if (op == Op::ballot || op == Op::match)
        for_each_lane(lanes, [&](int lane) {
            const uint64_t value = op == Op::ballot ? 1 : slots[lane]->bits[0];
            for_each_lane(lanes, [&](int other) {
                if (slots[other]->bits[0] == value) slots[lane]->result |= lane_bit(other);
            });
        });
}

// Returns when all lanes of the mask have called it. Shuffles and votes create no happens-before edge, because in CUDA
// they do not order memory accesses.
static void warp_operation(unsigned mask, Slot& slot, Site site) {
    Block& b = *running;
    Thread& self = *b.current;
    Warp& w = b.warps[size_t(self.warp)];
    self.site = site;
    if (!(mask & lane_bit(self.lane))) report("the calling lane is not in its own mask", site);
    if (mask & ~w.live) report("the mask names a lane that has ended or does not exist", site);
    self.mask = mask;
    self.slot = &slot;
    self.state = State::at_warp_operation;
    w.waiting |= lane_bit(self.lane);
    w.ready &= ~lane_bit(self.lane);
    if ((w.waiting & mask) == mask) {
        Slot* slots[32] = {};
        for_each_lane(mask, [&](int lane) {
            const Thread& t = b.at(self.warp, lane);
            if (t.slot->op != slot.op || t.mask != mask || t.site.line != site.line)
                report("lanes of one mask meet in different warp operations", site);
            slots[lane] = t.slot;
        });
        compute(slot.op, slots, mask, site);
        w.waiting &= ~mask;
        w.ready |= mask;
    }
    yield(b);
}

void warp_barrier(unsigned mask, Site site) {
    char* edge = &running->warps[size_t(running->current->warp)].edge;
    Slot slot{.op = Op::barrier};
    release(edge);
    warp_operation(mask, slot, site);
    acquire(edge);
}

uint64_t shuffle(unsigned mask, uint64_t bits, int source_lane, Site site) {
    Slot slot{.op = Op::shuffle, .bits = {bits}, .source_lane = source_lane};
    warp_operation(mask, slot, site);
    return slot.result;
}

unsigned ballot(unsigned mask, bool vote, Site site) {
    Slot slot{.op = Op::ballot, .bits = {vote}};
    warp_operation(mask, slot, site);
    return unsigned(slot.result);
}

unsigned match(unsigned mask, uint64_t bits, Site site) {
    Slot slot{.op = Op::match, .bits = {bits}};
    warp_operation(mask, slot, site);
    return unsigned(slot.result);
}

void mma(float* acc, const uint32_t* a, const uint32_t* b, Site site) {
    Slot slot{.op = Op::mma, .a = a, .b = b, .acc = acc};
    warp_operation(~0u, slot, site);
}

void ldmatrix(uint32_t* registers, bool transpose, uint64_t low, uint64_t high, Site site) {
    Slot slot{.op = Op::ldmatrix, .bits = {low, high}, .registers = registers, .transpose = transpose};
    warp_operation(~0u, slot, site);
}

void stmatrix(const uint32_t* registers, uint64_t (&row)[2], Site site) {
    Slot slot{.op = Op::stmatrix, .a = registers};
    warp_operation(~0u, slot, site);
    row[0] = slot.bits[0];
    row[1] = slot.bits[1];
}

int lane() { return running->current->lane; }

void block_barrier(Site site) {
    Block& b = *running;
    Thread& self = *b.current;
    self.site = site;
    if (b.live != b.num_threads) report("__syncthreads after a thread of the block has ended", site);
    if (b.arrived && (b.barrier.line != site.line || strcmp(b.barrier.file, site.file) != 0))
        report("threads of one block meet in different __syncthreads", site);
    b.barrier = site;
    self.state = State::at_barrier;
    b.warps[size_t(self.warp)].ready &= ~lane_bit(self.lane);
    char* edge = &b.barrier_edge[b.phase];
    release(edge);
    if (++b.arrived == b.num_threads) {
        b.arrived = 0;
        b.phase ^= 1;
        for (Warp& w : b.warps) w.ready = w.live;
    }
    yield(b);
    acquire(edge);
}

}  // namespace simt
