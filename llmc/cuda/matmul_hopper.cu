// matmul_hopper.cu: our kernels for Hopper as a route of matmuls with an epilogue (matmul_routes.h). Not in ops.cu,
// for the reason in attention_hopper.cu.
#include "cuda/attention_routes.h"
#include "cuda/matmul_routes.h"
#include "cuda/matmul_wgmma.cuh"

using gpu::Epilogue;

static bool wgmma_computes(const gpu::MatmulShape& s) {
    const bool adds = s.adds_residual && (s.epilogue == Epilogue::bias || s.epilogue == Epilogue::nothing);
    return gpu::runs_hopper_code() && s.operands == gpu::Operands::bf16 && s.kind == gpu::Kind::forward &&
           !s.to_float && (adds || s.epilogue == Epilogue::exponentials);
}

static int64_t wgmma_scratch_bytes(const gpu::MatmulShape& shape) {
    if (shape.epilogue != Epilogue::exponentials) return 0;
    return int64_t(ceil_div(shape.m, HeadExponentials::BN)) * shape.n * int64_t(sizeof(float));
}

// For 64 rows and columns of results.
static CUtensorMap map_of(const void* results, const gpu::MatmulShape& shape) {
    return simt::tensor_map<bf16, 2>(static_cast<const bf16*>(results), {shape.n, shape.m}, {64, 64});
}

template <int BN>
static void add_residual(const gpu::MatmulCall<bf16>& call, Stream stream) {
    const gpu::MatmulShape& shape = call.shape;
    launch_matmul_wgmma<BN>(
        call, BiasAndResidual<BN>{map_of(call.out, shape), map_of(call.residual, shape), call.bias, shape.m}, stream);
}

static void run_wgmma(const gpu::MatmulCall<bf16>& call, Stream stream) {
    const int rows = call.shape.n, columns = call.shape.m;
    if (call.shape.epilogue == Epilogue::exponentials) {
        float* const tile_sums = static_cast<float*>(device_scratch(wgmma_scratch_bytes(call.shape)));
        launch_matmul_wgmma<HeadExponentials::BN>(
            call, HeadExponentials{map_of(call.out, call.shape), call.head, tile_sums, rows}, stream);
        return gpu::sum_of_shards(call.head.sums, tile_sums, ceil_div(columns, HeadExponentials::BN), rows, stream);
    }
    // The wider tiles, unless they have more columns without results.
    if (round_up(columns, 192) <= round_up(columns, 128)) return add_residual<192>(call, stream);
    add_residual<128>(call, stream);
}

gpu::MatmulKernels gpu::wgmma_matmul = {1, 32 << 20, wgmma_computes, wgmma_scratch_bytes, run_wgmma};
