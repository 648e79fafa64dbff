#!/usr/bin/env bash
# test_nccl_meeting.sh: builds nccl_meeting.cpp and runs it, without a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

if ! make found | grep -q '| NCCL [0-9]'; then
    echo "SKIP  the exchange of NCCL's id: there is no NCCL (NCCL_HOME=... names it)"
    exit 0
fi
make build/release/cuda/nccl_meeting || exit 1
exec build/release/cuda/nccl_meeting
