// hopper_kernels.cu: the kernels of hopper_kernels.cuh, for check_cuda.sh.
#include "gpu/hopper_kernels.cuh"

#define HOPPER_GEMM(TRANSPOSED_B, RESIDUAL)                                                                            \
    template __global__ void hopper_gemm_kernel<192, 2, TRANSPOSED_B, RESIDUAL, NoBugs>(                               \
        const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap, \
        const __grid_constant__ CUtensorMap, int, int, int, NoBugs)
HOPPER_GEMM(false, true);
HOPPER_GEMM(true, false);
template __global__ void hopper_chain_kernel<NoBugs>(const __grid_constant__ CUtensorMap,
                                                     const __grid_constant__ CUtensorMap,
                                                     const __grid_constant__ CUtensorMap, const float*, int, NoBugs);
