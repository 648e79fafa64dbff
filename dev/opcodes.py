#!/usr/bin/env python3
"""Lists the instructions in the kernels of a cubin, without a disassembler, and checks that the
kernels use those they should.

    dev/opcodes.py FILE.cubin              checks the rules below; prints each violation, exit status 1
    dev/opcodes.py --list FILE.cubin       prints the counts of every kernel

A machine instruction of sm_80 to sm_120 is 16 bytes, with the opcode in its low 12 bits; loads and stores of global
memory have their width in bits 73 to 75, 6 for 128 bits.
"""
import argparse
import re
import struct
import subprocess
import sys
from collections import Counter

OPCODES = {0x23C: "HMMA", 0x9F0: "HGMMA", 0xDF0: "HGMMA", 0x83B: "LDSM", 0x844: "STSM", 0xFAE: "LDGSTS", 0x983: "LDL",
           0x387: "STL", 0x981: "LDG", 0x986: "STG", 0x5B4: "UTMALDG", 0x3B4: "UTMALDG", 0x3B5: "UTMASTG"}

# Names of kernels, instructions that they must have, and instructions that they must not have. LDL and STL access local
# memory: arrays that the compiler did not keep in registers.
RULES = [
    (r"attention_(forward|backward)_mma_kernel", ["HMMA", "LDSM", "LDGSTS", "STG.128"], ["LDL", "STL"]),
    (r"layernorm_forward_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"layernorm_backward_kernel", ["LDGSTS", "STG.128"], ["LDL", "STL"]),
    (r"bias_backward_kernel", ["LDG.128"], ["LDL", "STL"]),
    (r"head_(targets_kernel|exponentials_kernel<.*,false>)", ["LDG.128"], ["LDL", "STL"]),
    (r"head_(factors_kernel|exponentials_kernel<.*,true>)", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"add_residual_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"gelu_(forward|backward)_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"amax_kernel", ["LDG.128"], ["LDL", "STL"]),
    (r"fp8_cast_kernel<.*,true,false>", ["LDG.128"], ["LDL", "STL"]),
    (r"fp8_cast_kernel<.*,(true|false),true>", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"adamw_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"embedding_forward_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
    (r"(round|widen|accumulate|accumulate_rounded)_kernel", ["LDG.128", "STG.128"], ["LDL", "STL"]),
]
# The same for Hopper's kernels, which have no code for other GPUs.
HOPPER_RULES = [(r"(hopper_(gemm|chain)|(attention_(forward|backward)|matmul)_wgmma)_kernel",
                 ["HGMMA", "UTMALDG", "UTMASTG", "STSM"], ["LDL", "STL"])]


def kernels(path):
    """Name and code of each kernel: the sections .text.NAME of an ELF file of 64 bits."""
    with open(path, "rb") as file:
        data = file.read()
    if data[:5] != b"\x7fELF\x02":
        sys.exit(f"opcodes.py: {path} is not a cubin")
    (section_offset,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, section_offset + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, size in sections:
        text = data[names + name:data.index(b"\0", names + name)].decode()
        if text.startswith(".text."):
            yield text[len(".text."):], data[offset:offset + size]


def instructions(code):
    counts = Counter()
    for low, high in struct.iter_unpack("<QQ", code[:len(code) // 16 * 16]):
        name = OPCODES.get(low & 0xFFF)
        if name:
            counts[name] += 1
            if name in ("LDG", "STG") and high >> 9 & 7 == 6:
                counts[name + ".128"] += 1
    return counts


def readable(names):
    """The demangled names, without return type, spaces and parameters."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\(.*", "", re.sub(r"^void ", "", line)).replace(" ", "") for line in text.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the counts of every kernel")
    parser.add_argument("--hopper", action="store_true", help="check the kernels for Hopper")
    parser.add_argument("file")
    args = parser.parse_args()
    found = list(kernels(args.file))
    counted = list(zip(readable([name for name, _ in found]), [instructions(code) for _, code in found]))
    if args.list:
        for name, counts in counted:
            print(name, " ".join(f"{opcode} {n}" for opcode, n in sorted(counts.items())))
        return
    bad = False
    for pattern, required, forbidden in HOPPER_RULES if args.hopper else RULES:
        kernels_of_rule = [(name, counts) for name, counts in counted if re.match(pattern, name)]
        if not kernels_of_rule:
            print(f"FAIL  no kernel is called {pattern}")
            bad = True
        for name, counts in kernels_of_rule:
            wrong = [f"no {opcode}" for opcode in required if not counts[opcode]]
            wrong += [f"{counts[opcode]} {opcode}" for opcode in forbidden if counts[opcode]]
            if wrong:
                print(f"FAIL  {name}: {', '.join(wrong)}")
                bad = True
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
