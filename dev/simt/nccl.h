// nccl.h: the emulator's replacement for NCCL's header. It has the part of the interface that
// llmc/parallel/comm_nccl.cpp uses, with the same names and values. nccl.cpp connects processes of one machine, each
// with an emulated GPU.
//
// It is stricter than NCCL. It reports, with the source line: ranks that call different collectives or disagree on
// counts, types or roots; pointers that are not in device memory; ranges that go beyond their array; outputs that
// overlap inputs, except exactly in place; calls before the communicator is ready or after it was finalized;
// communicators that still exist at exit; a split during a collective; a communicator that is finalized before its
// groups; an abort that would wait for a collective of another communicator, because it is not in an NCCL group.
//
// Calls do not block, and return ncclInProgress wherever NCCL may. A collective that returned it is queued only when
// the caller polls ncclCommGetAsyncError. If a rank ends, the others get ncclRemoteError, and their collectives never
// complete.
#pragma once
#include "emulator.h"

#define NCCL_VERSION_CODE 22809
#define NCCL_UNIQUE_ID_BYTES 128

using ncclComm_t = struct ncclComm*;
struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
};

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};
enum ncclDataType_t { ncclInt8 = 0, ncclFloat = 7, ncclBfloat16 = 9 };
enum ncclRedOp_t { ncclSum = 0 };

struct ncclConfig_t {
    int blocking, minCTAs, maxCTAs;
};
#define NCCL_CONFIG_INITIALIZER \
    { 1, 0, 0 }

ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config,
                                    SIMT_SITE);
#define NCCL_SPLIT_NOCOLOR (-1)
// Returns ncclSuccess at once. While ncclCommGetAsyncError of comm reports ncclInProgress, *group is not set. After
// that, the group itself reports ncclInProgress until it is ready.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* group, ncclConfig_t* config, SIMT_SITE);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state, SIMT_SITE);
ncclResult_t ncclCommFinalize(ncclComm_t comm, SIMT_SITE);
ncclResult_t ncclCommDestroy(ncclComm_t comm, SIMT_SITE);
ncclResult_t ncclCommAbort(ncclComm_t comm, SIMT_SITE);

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream, SIMT_SITE);
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream, SIMT_SITE);
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream, SIMT_SITE);
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream, SIMT_SITE);
