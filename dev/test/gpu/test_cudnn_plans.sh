#!/usr/bin/env bash
# test_cudnn_plans.sh: builds cudnn_plans.cpp and runs it with a stand-in for the driver, so that it needs no GPU.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

if ! make found | grep -q '| cuDNN [0-9]'; then
    skip "cuDNN's plans" "there is no cuDNN (CUDNN_HOME=... names it)"
    exit 0
fi
folder=build/release/cuda
make $folder/cudnn_plans $folder/mock/libcuda.so.1 || exit 1
LD_LIBRARY_PATH=$PWD/$folder/mock${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} $folder/cudnn_plans
