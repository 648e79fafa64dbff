#!/usr/bin/env bash
# torch_amx_signal_stack.sh: with an alternate signal stack of 8 KiB in a thread, torch runs without AMX, silently.
#
# Guess: only the CPU and the kernel decide whether torch multiplies bfloat16 matrices by AMX. A signal stack of
# SIGSTKSZ bytes, 8192, is large enough, and has no influence on a matmul.
# Behaviour: Linux gives a process AMX on request, and the frame of a signal then needs 11,952 bytes. If any thread has
# a smaller alternate stack, arch_prctl(ARCH_REQ_XCOMP_PERM) fails with ENOSPC. oneDNN then sees "Intel AVX 10.1", torch
# says nothing, and a matmul of 1024 x 1024 takes 25 ms for 2.2 (Emerald Rapids, one thread). The other way round,
# after torch's first bfloat16 matmul sigaltstack() refuses 8192 bytes with ENOMEM. getauxval(AT_MINSIGSTKSZ) has the
# size from the start. Threads that exist before the request are no obstacle, and get AMX, too.
# Versions: torch 2.15.0 (oneDNN 3.13.3) on a CPU, Python 3.11, Linux 6.18; a CPU with AMX-BF16, else the script says so
# and ends with 0. The installation takes several GB.
# Output seen: that of `want` below. Exit code 1 if it has changed.
set -euo pipefail

grep -qw amx_bf16 /proc/cpuinfo || {
    echo "this machine has no AMX-BF16"
    exit 0
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/stack.py" <<'CODE'
import ctypes
import errno
import sys

libc = ctypes.CDLL(None, use_errno=True)


class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def use_signal_stack(size):
    memory = ctypes.create_string_buffer(size)
    failed = libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, size)), None)
    print(f"stack of {size}:", errno.errorcode[ctypes.get_errno()] if failed else "taken", flush=True)
    return memory


def multiply():
    import torch

    a = torch.ones(256, 256, dtype=torch.bfloat16)
    a @ a


when, size = sys.argv[1], int(sys.argv[2])
if when == "before":
    memory = use_signal_stack(size)
multiply()
if when == "after":
    memory = use_signal_stack(size)
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.15.0 numpy==2.3.5
show() { # WHEN SIZE: what the stack and the matmul got
    echo "$1 the matmul, $2"
    ONEDNN_VERBOSE=1 "$folder/env/bin/python" "$folder/stack.py" "$@" >"$folder/log"
    grep '^stack' "$folder/log"
    if grep -q 'exec,cpu,matmul,brg_matmul:[a-z0-9_]*_amx,' "$folder/log"; then echo "matmul by AMX"
    elif grep -q 'exec,cpu,matmul,brg_matmul:avx512_core_bf16,' "$folder/log"; then echo "matmul by AVX512-BF16"
    else echo "another matmul"; fi
}
{ show before 16384; show before 8192; show after 16384; show after 8192; } | tee "$folder/got"

want="before the matmul, 16384
stack of 16384: taken
matmul by AMX
before the matmul, 8192
stack of 8192: taken
matmul by AVX512-BF16
after the matmul, 16384
stack of 16384: taken
matmul by AMX
after the matmul, 8192
stack of 8192: ENOMEM
matmul by AMX"
diff <(echo "$want") "$folder/got" && echo "as it was"
