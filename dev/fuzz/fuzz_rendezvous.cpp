// sources: llmc/parallel/rendezvous_messages.cpp llmc/base/common.cpp
//
// fuzz_rendezvous.cpp: parses any bytes as a message of the rendezvous, to rank 0 and from rank 0. An accepted message
// must be within the limits, must encode to the same bytes again, and must be incomplete without its last byte.
#include <cstdlib>

#include "parallel/rendezvous.h"

static void check_hello(std::string_view bytes) {
    Hello hello;
    if (parse_hello(bytes, hello) != Parsed::whole) return;
    if (hello.rank >= hello.world_size || hello.rank_info.size() > MAX_RANK_INFO || hello.run_id.size() > MAX_RUN_ID)
        abort();
    if (encode(hello) != bytes) abort();
    if (parse_hello(bytes.substr(0, bytes.size() - 1), hello) != Parsed::more) abort();
}

static void check_answer(std::string_view bytes, int world_size) {
    Answer answer;
    size_t used = 0;
    if (parse_answer(bytes, world_size, answer, used) != Parsed::whole) return;
    if (used > bytes.size() || encode(answer) != bytes.substr(0, used)) abort();
    if (answer.rank_infos.size() != (answer.status == Status::welcome ? size_t(world_size) : 0)) abort();
    if (parse_answer(bytes.substr(0, used - 1), world_size, answer, used) != Parsed::more) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string bytes(reinterpret_cast<const char*>(data), size);
    check_hello(bytes);
    for (int world_size : {1, 2, 5}) check_answer(bytes, world_size);
    // The same bytes as the body of a message with a valid header, to reach the checks of the body.
    std::string header = encode(Hello{}).substr(0, 12);
    for (const char* magic : {"GPT2RDZV", "GPT2MEET"}) {
        std::string framed = magic + header.substr(8);
        for (int i = 0; i < 4; i++) framed += char(size >> 8 * i & 0xff);
        framed += bytes;
        check_hello(framed);
        for (int world_size : {1, 2, 5}) check_answer(framed, world_size);
    }
    return 0;
}
