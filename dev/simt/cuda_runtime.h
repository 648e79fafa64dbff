// cuda_runtime.h: stands in for CUDA's header.
#pragma once
#include "emulator.h"
