// rendezvous_messages.cpp: encodes and parses the messages of the rendezvous; rendezvous.h describes the format.
#include "parallel/rendezvous.h"

#include <algorithm>

// Two magics, so that a TCP connection of a socket to itself, which can happen on one host, is not taken for rank 0.
static constexpr std::string_view HELLO_MAGIC = "GPT2RDZV", ANSWER_MAGIC = "GPT2MEET";
static constexpr size_t HEADER = 16;      // magic, version, length
static constexpr size_t HELLO_HEAD = 32;  // bytes before run_id and rank_info
static constexpr size_t ANSWER_HEAD = 16;

static void append(std::string& out, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) out += char(value >> 8 * i & 0xff);
}

static std::string frame(std::string_view magic, const std::string& body) {
    std::string out(magic);
    append(out, RENDEZVOUS_VERSION, 4);
    append(out, body.size(), 4);
    return out + body;
}

std::string encode(const Hello& hello) {
    std::string body;
    for (uint32_t value : {hello.world_size, hello.rank, hello.attempt, hello.port}) append(body, value, 4);
    append(body, hello.process, 8);
    append(body, hello.run_id.size(), 4);
    append(body, hello.rank_info.size(), 4);
    return frame(HELLO_MAGIC, body + hello.run_id + hello.rank_info);
}

std::string encode(const Answer& answer) {
    std::string body;
    append(body, uint32_t(answer.status), 4);
    append(body, answer.text.size(), 4);
    append(body, answer.nccl_id.size(), 4);
    append(body, answer.rank_infos.size(), 4);
    body += answer.text + answer.nccl_id;
    for (const std::string& rank_info : answer.rank_infos) {
        append(body, rank_info.size(), 4);
        body += rank_info;
    }
    return frame(ANSWER_MAGIC, body);
}

namespace {
// Reads fields from the front of a body; an incomplete field sets `good` to false.
struct Fields {
    std::string_view rest;
    bool good = true;

    std::string_view bytes(size_t count) {
        good = good && count <= rest.size();
        const std::string_view taken = rest.substr(0, good ? count : 0);
        rest.remove_prefix(taken.size());
        return taken;
    }
    uint64_t number(int width) {
        const std::string_view taken = bytes(size_t(width));
        uint64_t value = 0;
        for (size_t i = 0; i < taken.size(); i++) value |= uint64_t(uint8_t(taken[i])) << 8 * i;
        return value;
    }
    uint32_t u32() { return uint32_t(number(4)); }
};
}  // namespace

// Finds the body of the first frame. A length above max_body is garbage at once, before the body has arrived.
static Parsed parse_frame(std::string_view magic, std::string_view bytes, size_t max_body, std::string_view& body) {
    if (bytes.substr(0, magic.size()) != magic.substr(0, bytes.size())) return Parsed::garbage;
    if (bytes.size() < magic.size() + 4) return Parsed::more;
    Fields fields{bytes.substr(magic.size())};
    if (fields.u32() != RENDEZVOUS_VERSION) return Parsed::other_version;
    if (bytes.size() < HEADER) return Parsed::more;
    const uint32_t length = fields.u32();
    if (length > max_body) return Parsed::garbage;
    if (fields.rest.size() < length) return Parsed::more;
    body = fields.rest.substr(0, length);
    return Parsed::whole;
}

Parsed parse_hello(std::string_view bytes, Hello& hello) {
    std::string_view body;
    const Parsed parsed = parse_frame(HELLO_MAGIC, bytes, HELLO_HEAD + MAX_RUN_ID + MAX_RANK_INFO, body);
    if (parsed != Parsed::whole) return parsed;
    Fields fields{body};
    for (uint32_t* value : {&hello.world_size, &hello.rank, &hello.attempt, &hello.port}) *value = fields.u32();
    hello.process = fields.number(8);
    const uint32_t run_id = fields.u32(), rank_info = fields.u32();
    hello.run_id = fields.bytes(run_id), hello.rank_info = fields.bytes(rank_info);
    const bool printable =
        std::all_of(hello.run_id.begin(), hello.run_id.end(), [](char c) { return c > ' ' && c < 0x7f; });
    const bool good = fields.good && fields.rest.empty() && bytes.size() == HEADER + body.size() && printable &&
                      run_id <= uint32_t(MAX_RUN_ID) && rank_info <= uint32_t(MAX_RANK_INFO) &&
                      hello.world_size <= uint32_t(MAX_RANKS) && hello.rank < hello.world_size;
    return good ? Parsed::whole : Parsed::garbage;
}

Parsed parse_answer(std::string_view bytes, int world_size, Answer& answer, size_t& used) {
    std::string_view body;
    const size_t max_body = ANSWER_HEAD + MAX_TEXT + MAX_NCCL_ID + size_t(world_size) * (4 + MAX_RANK_INFO);
    const Parsed parsed = parse_frame(ANSWER_MAGIC, bytes, max_body, body);
    if (parsed != Parsed::whole) return parsed;
    Fields fields{body};
    answer.status = Status(fields.u32());
    const uint32_t text = fields.u32(), nccl_id = fields.u32(), rank_infos = fields.u32();
    answer.text = fields.bytes(text), answer.nccl_id = fields.bytes(nccl_id);
    answer.rank_infos.clear();
    if (rank_infos > uint32_t(world_size)) return Parsed::garbage;
    for (uint32_t i = 0; i < rank_infos; i++) answer.rank_infos.emplace_back(fields.bytes(fields.u32()));
    used = HEADER + body.size();
    const bool one_line =
        std::none_of(answer.text.begin(), answer.text.end(), [](char c) { return uint8_t(c) < ' ' || c == 0x7f; });
    const bool complete = rank_infos == (answer.status == Status::welcome ? uint32_t(world_size) : 0);
    const bool good = fields.good && fields.rest.empty() && one_line && complete && answer.status <= Status::other;
    return good ? Parsed::whole : Parsed::garbage;
}
