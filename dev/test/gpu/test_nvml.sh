#!/usr/bin/env bash
# test_nvml.sh: tests what a run reads from NVML (llmc/base/gpu_monitor.cpp), in the emulator with a replacement for the library,
# mock_nvml.c: values in the log, values that a GPU lacks, GPUs that are slowed down, errors during a run, an old library, and none.
# shellcheck source=dev/test/support/functions.sh
source "$(dirname "$0")/../support/functions.sh"

emulated=$PWD/build/release/emulator/train_gpt2cu
if [ ! -x "$emulated" ]; then skip "NVML" "build/release/emulator/train_gpt2cu is not built" && exit 0; fi
make_shards "$scratch/data" 30000 || fail "no shards"
export SIMT_DEVICES=4 OMP_WAIT_POLICY=passive MOCK_NVML=$scratch/gpus
train=("$emulated" --train-data "$scratch/data/train_*.bin" --layers 1 --heads 1 --channels 32 --vocab-size 384 --seq-len 16 --micro-batch 1
       --global-batch 0 --threads 1 --precision fp32 --autotune off)
endless=("${train[@]}" --steps 1000000 --checkpoint-every 100000)
library() { mkdir -p "$scratch/$1" && "${CC:-cc}" -std=c11 -shared -fPIC "${@:2}" -o "$scratch/$1/libnvidia-ml.so.1" dev/test/gpu/mock_nvml.c; }
check "the replacement for NVML" library new
check "the replacement for an old NVML" library old -DOLD
# gpu INDEX VALUE...: what NVML says of this GPU. The file is replaced, so that no reading sees a part of it.
gpu() {
    mkdir -p "$MOCK_NVML"
    printf '%s\n' "${@:2}" >"$scratch/gpu"
    mv "$scratch/gpu" "$MOCK_NVML/FFFF:0$1:00.0"
}
well=("temperature 61" "sm_clock 1755" "max_sm_clock 1980" "power 310400" "limits 4")
# start LIBRARY OPTION...: starts a run in the background. Sets job; its output goes to job.log.
start() {
    rm -rf "$out"
    LD_LIBRARY_PATH=$scratch/$1 "${endless[@]}" --output "$out" "${@:2}" >"$scratch/job.log" 2>&1 </dev/null &
    job=$!
}
# stops NAME: the run continued until now; it is asked to end, and does.
stops() {
    kill -TERM "$job"
    wait "$job"
    check "$1: the run went on until it was asked to end" test $? = 75
}
logs() { wait_for "$out/log.jsonl" "\"kind\":\"step\".*$1"; }
# A GPU of the emulator is one that no driver knows, also where there is a real NVML.
out=$scratch/absent
check "no library, or one that knows no such GPU" "${train[@]}" --steps 3 --output "$out"
check "no library: the log has no field of a GPU" test "$(grep -c '"gpu_' "$out/log.jsonl")" = 0
mkdir "$scratch/broken" && echo "no library" >"$scratch/broken/libnvidia-ml.so.1"
LD_LIBRARY_PATH=$scratch/broken "${train[@]}" --steps 3 --output "$scratch/not_loaded" >"$scratch/job.log" 2>&1
check "a library that cannot be loaded: exit code" test $? = 0
check "a library that cannot be loaded: $(grep '^the log lacks' "$scratch/job.log")" grep -q \
    "^the log lacks the GPU's temperature, clock and power: .*libnvidia-ml.so.1: " "$scratch/job.log"
check "a library that cannot be loaded: the log has no field of a GPU" test "$(grep -c '"gpu_\|"driver"' "$scratch/not_loaded/log.jsonl")" = 0
LD_LIBRARY_PATH=$scratch/new "${train[@]}" --steps 3 --output "$scratch/unknown" >"$scratch/job.log" 2>&1
check "a GPU that NVML does not know: exit code" test $? = 0
check "a GPU that NVML does not know: $(grep '^the log lacks' "$scratch/job.log")" grep -qF \
    "the log lacks the GPU's temperature, clock and power: nvmlDeviceGetHandleByPciBusId_v2: Not Found (NVML's error 6)" "$scratch/job.log"
LD_LIBRARY_PATH=$scratch/new MOCK_NVML_INIT=999 "${train[@]}" --steps 3 --output "$scratch/no_init" >"$scratch/job.log" 2>&1
check "NVML does not start: $(grep '^the log lacks' "$scratch/job.log")" grep -qF \
    "clock and power: nvmlInit_v2: Unknown Error (NVML's error 999)" "$scratch/job.log"
check "the CPU's program does not say that a GPU's values are missing" test -z "$("$program" "${train[@]:1}" --autotune on --steps 2 --output '' | grep 'log lacks')"

# ---- the values of one GPU
gpu 0 "${well[@]}"
out=$scratch/one
start new
check "one GPU: all values are logged" logs '"gpu_temperature_c":61,"gpu_sm_mhz":1755,"gpu_power_w":310,"gpu_clock_limits":"sw_power_cap"}'
check "one GPU: run.json has the driver" grep -q '"driver": "580.65.06"' "$out/run.json"
gpu 0 "temperature 62" "power 300000"
check "one GPU: a value that is not supported is left out" logs '"gpu_temperature_c":62,"gpu_power_w":300}'
gpu 0 "${well[@]}" "temperature error 15"
check "one GPU: a value with an error is left out" logs '"loader_wait_ms":[0-9.]*,"gpu_sm_mhz":1755,"gpu_power_w":310'
check "an error during the run: a warning" wait_for "$out/log.jsonl" \
    "\"warning\",\"text\":\"rank 0 on $(hostname): the log lacks a value of its GPU: nvmlDeviceGetTemperature: GPU is lost (NVML's error 15)"
gpu 0 "${well[@]}" "temperature 63"
check "an error during the run: the value comes back" logs '"gpu_temperature_c":63,'
gpu 0 "${well[@]}" "temperature error 15"
check "the error comes again" logs '"loader_wait_ms":[0-9.]*,"gpu_sm_mhz":1755,"gpu_power_w":310'
gpu 0 "${well[@]}" "temperature 64"
check "the error has gone again" logs '"gpu_temperature_c":64,'
stops "one GPU"
check "one warning for the error" test "$(grep -c '^warning: rank 0 .*GPU is lost' "$scratch/job.log")" = 1
check "the power limit, which is usual, is no reason to warn" test "$(grep -c '^warning: .*limits the clock' "$scratch/job.log")" = 0

out=$scratch/old_library
start old
check "a library without the power, and with the limits' old name" logs '"gpu_temperature_c":64,"gpu_sm_mhz":1755,"gpu_clock_limits":"sw_power_cap"}'
stops "an old library"

# ---- a GPU that is slowed down
out=$scratch/hot
start new
check "a GPU that gets hot: the run trains" logs '"gpu_temperature_c":64,'
gpu 0 "temperature 91" "sm_clock 1140" "max_sm_clock 1980" "limits 104"  # hw_slowdown, and both of heat
check "a GPU that is too hot: the log" logs '"gpu_clock_limits":"hw_slowdown sw_thermal_slowdown hw_thermal_slowdown"'
check "a GPU that is too hot: a warning" wait_for "$scratch/job.log" "^warning: rank 0 on $(hostname): heat limits the clock of its GPU: \
91 C, 1140 of 1980 MHz (hw_slowdown sw_thermal_slowdown hw_thermal_slowdown)$"
gpu 0 "${well[@]}"
check "a GPU that has cooled: the log" logs '"gpu_temperature_c":61,'
gpu 0 "temperature 92" "limits 32"
check "a GPU that is too hot again: the log" logs '"gpu_temperature_c":92,"gpu_clock_limits":"sw_thermal_slowdown"'
gpu 0 "temperature 60" "limits 136"  # hw_slowdown and the power brake
check "another cause: a warning" wait_for "$scratch/job.log" "^warning: rank 0 on $(hostname): the power brake of its machine limits the \
clock of its GPU: 60 C (hw_slowdown hw_power_brake_slowdown)$"
stops "a GPU that is slowed down"
check "one warning for each cause" test "$(grep -c '^warning: .*limits the clock' "$scratch/job.log")" = 2

# ---- two ranks
gpu 1 "temperature 70" "sm_clock 1800" "power 200000"
gpu 3 "temperature 66" "sm_clock 1500" "power 250000"
out=$scratch/two
start new --gpus 1,3
check "two GPUs: the hottest and the slowest" logs \
    '"comm_bytes":[0-9]*,"gpu_temperature_c":70,"gpu_hottest_rank":0,"gpu_sm_mhz":1500,"gpu_slowest_rank":1,"gpu_power_w":250}'
gpu 3 "temperature error 999" "sm_clock 1200" "max_sm_clock 1980" "limits 8"
check "two GPUs: the warning names rank 1" wait_for "$scratch/job.log" \
    "^warning: rank 1 on $(hostname): its hardware limits the clock of its GPU: 1200 MHz (hw_slowdown)$"
check "two GPUs: an error of rank 1" wait_for "$scratch/job.log" \
    "warning: rank 1 on $(hostname): the log lacks a value of its GPU: nvmlDeviceGetTemperature: Unknown Error (NVML's error 999)"
stops "two GPUs"
finish
