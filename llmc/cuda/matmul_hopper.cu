// matmul_hopper.cu: our kernels for Hopper as a route of matmuls with an epilogue (matmul_routes.h). Not in ops.cu,
// for the reason in attention_hopper.cu.
#include "cuda/attention_routes.h"
#include "cuda/matmul_routes.h"
#include "cuda/matmul_wgmma.cuh"

static bool wgmma_computes(const gpu::MatmulShape& shape) {
    return gpu::runs_hopper_code() && shape.operands == gpu::Operands::bf16 && !shape.to_float &&
           shape.epilogue == gpu::Epilogue::exponentials;
}

static int64_t wgmma_scratch_bytes(const gpu::MatmulShape& shape) {
    return int64_t(ceil_div(shape.m, HeadExponentials::BN)) * shape.n * int64_t(sizeof(float));
}

static void run_wgmma(const gpu::MatmulCall<bf16>& call, Stream stream) {
    const int columns = call.shape.m, rows = call.shape.n, K = call.shape.k;
    const auto *a = static_cast<const bf16*>(call.b), *b = static_cast<const bf16*>(call.a);
    float* const tile_sums = static_cast<float*>(device_scratch(wgmma_scratch_bytes(call.shape)));
    const HeadExponentials epilogue{
        simt::tensor_map<bf16, 2>(static_cast<const bf16*>(call.out), {rows, columns}, {64, 64}), call.head, tile_sums,
        rows};
    launch_matmul_wgmma<HeadExponentials::BN, false>(a, b, epilogue, rows, columns, K, stream);
    gpu::sum_of_shards(call.head.sums, tile_sums, ceil_div(columns, HeadExponentials::BN), rows, stream);
}

gpu::MatmulKernels gpu::wgmma_matmul = {1, 32 << 20, wgmma_computes, wgmma_scratch_bytes, run_wgmma};
