// cuda.h: stands in for the header of CUDA's driver.
#pragma once
#include "emulator.h"
