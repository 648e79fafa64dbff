#!/usr/bin/env bash
# test_nccl_id.sh: tests that all ranks get NCCL's id (nccl_id.cpp), without a GPU.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if ! make found | grep -q '| NCCL [0-9]'; then
    skip "the exchange of NCCL's id" "there is no NCCL (NCCL_HOME=... names it)"
    exit 0
fi
make build/release/cuda/nccl_id || exit 1
build/release/cuda/nccl_id
