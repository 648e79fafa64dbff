// async.h: the asynchronous instructions of Hopper (sm_90a), as kernels.h calls them, and the parts of the
// CUDA runtime and driver that they need. hopper.cpp says what the emulator does with them. emulator.h includes this.
#pragma once

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
struct alignas(64) CUtensorMap {
    uint64_t opaque[16];
};
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B = 1,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE = 0, CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

namespace simt {

// The address of dynamic shared memory in the 32 bits of descriptors. Swizzles act on its bits.
uint32_t shared_address(const void* p, SIMT_SITE);

int cluster_rank();
void cluster_barrier(Site site);
void named_barrier(int id, int threads, bool waits, Site site);
void set_registers(int registers, bool more, Site site);

void mbarrier_init(uint64_t* barrier, uint32_t arrivals, Site site);
void mbarrier_arrive(uint64_t* barrier, int block, uint32_t bytes, Site site);  // block: its rank in the cluster
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Site site);
void fence_barrier_init();
void fence_proxy();

// x, y and z count elements from the start of each dimension, the contiguous one first.
struct Box {
    int x, y, z;
};
void tensor_load(void* to, const CUtensorMap* map, Box at, uint64_t* barrier, unsigned blocks, Site site);
void tensor_store(const CUtensorMap* map, const void* from, Box at, Site site);
void store_commit();
void store_wait(int groups_kept, bool only_read);

// An instruction: D (64, n) = A (64, 16) B (16, n), plus D if `accumulate`. Transposed operands have their inner
// dimension in rows. With registers, A is in them, else at descriptor a.
struct Wgmma {
    int n;
    bool transposed_a, transposed_b, accumulate;
    uint64_t a, b;
    const uint32_t* registers;
};
// Accumulators of a pending product are this NaN, which multiplications and additions keep. expect_returned reports it.
constexpr uint32_t PENDING = 0x7feacc5a;
void expect_returned(float x, float y, Site site);
void wgmma_fence();
void wgmma(float* d, Wgmma w, Site site);
void wgmma_commit();
void wgmma_wait(int groups_kept, Site site);
// Bytes from shared address 0 to element (outer, k) of an operand; outer counts rows of A or columns of B.
int64_t operand_address(uint64_t descriptor, int outer, int k, bool transposed);

// stmatrix: gives the calling lane its row of 16 bytes, which it stores itself, so that sanitizers see it.
void exchange_matrices(const uint32_t* registers, void* row, uint64_t (&out)[2], Site site);

}  // namespace simt

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill);
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result);

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
union cudaLaunchAttributeValue {
    struct {
        unsigned x, y, z;
    } clusterDim;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
    simt::Site site = {__builtin_FILE(), __builtin_LINE()};
};
namespace simt {
cudaError_t enqueue(Call* call, const cudaLaunchConfig_t& config);
}
template <class... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...),
                               std::type_identity_t<P>... args) {
    return simt::enqueue(new simt::BoundCall<P...>(kernel, args...), *config);
}
