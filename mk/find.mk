# find.mk: finds the compiler, libraries and GPUs of this machine. CUDA=0 leaves a library out, CUDA=1 requires it.

ARCH  := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine)))
# With a cross compiler (CXX=aarch64-linux-gnu-g++) CUDA and Open MPI are off: nvcc and mpicc are for this machine.
CROSS := $(filter-out $(ARCH),$(subst arm64,aarch64,$(shell uname -m)))
CUDA  ?= $(if $(CROSS),0,auto)
CUDNN ?= auto
CRYPTO ?= auto
MPI   ?= $(if $(CROSS),0,auto)
NCCL  ?= auto

OPENMP := -fopenmp
# LIBOMP_HOME names a folder with include/omp.h and lib/libomp: Apple's clang has no OpenMP library of its own.
ifeq ($(shell uname -s),Darwin)
HOMEBREW    := $(shell brew --prefix)
LIBOMP_HOME ?= $(HOMEBREW)/opt/libomp
CPPFLAGS    += -isystem $(HOMEBREW)/include
endif
ifneq ($(LIBOMP_HOME),)
OPENMP   := -Xpreprocessor -fopenmp
CPPFLAGS += -isystem $(LIBOMP_HOME)/include
LDLIBS   := -L$(LIBOMP_HOME)/lib -Wl,-rpath,$(LIBOMP_HOME)/lib -lomp
endif

# $(call probe,HEADER,FLAGS,LIBRARIES): 1 if the compiler finds the header, and the libraries.
HASH  := \#
probe = $(shell printf '$(HASH)if !__has_include(<$(1)>)\n$(HASH)error\n$(HASH)endif\nint main() {}\n' | \
                $(CXX) -std=c++20 $(CPPFLAGS) $(2) -x c++ - -x none $(3) -o /dev/null 2>/dev/null && echo 1)
need  = $(if $(call probe,$(1)),,$(error $(1) not found: apt-get install $(2) \
                                         (./scripts/quickstart.sh installs everything)))

GOALS := $(or $(MAKECMDGOALS),all)
ifneq ($(filter-out clean help dist,$(GOALS)),)
$(call need,nlohmann/json.hpp,nlohmann-json3-dev)
$(call need,CLI/CLI.hpp,libcli11-dev)
$(call need,xxhash.h,libxxhash-dev)
$(call need,omp.h,libomp$(patsubst clang++%,%,$(filter clang++-%,$(notdir $(CXX))))-dev)
endif
ifneq ($(filter test tests emulator gpu-tests %/test_% cudnn_plans,$(filter-out %/test_gpt2 %/test_gpt2cu,$(GOALS))),)
$(call need,doctest/doctest.h,doctest-dev)
endif

# CUDA: the toolkit with nvcc, and the architectures of the GPUs here (90 = compute capability 9.0; 90a has all features
# of an H100). WHEELS names the folder site-packages/nvidia of pip's packages. It sets CUDA_HOME, CUDNN_HOME and
# NCCL_HOME.
ifneq ($(WHEELS),)
override WHEELS := $(abspath $(WHEELS))
CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(wildcard $(WHEELS)/cu13/bin/nvcc))
CUDNN_HOME := $(WHEELS)/cudnn
NCCL_HOME  := $(WHEELS)/nccl
$(if $(CUDA_HOME),,$(error there is no $(WHEELS)/cu13/bin/nvcc: \
    pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cublas nvidia-cudnn-cu13))
endif
ifneq ($(CUDA),0)
NVCC       := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) \
                                       $(wildcard /usr/local/cuda/bin/nvcc)))
GPU_ARCHS  := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)
GPU_ARCHS  := $(patsubst 90,90a,$(sort $(subst .,,$(GPU_ARCHS))))
endif
CUDA_ARCHS ?= $(or $(GPU_ARCHS),90a)
CUDA_ROOT  := $(NVCC:%/bin/nvcc=%)
CUDA_LIBS  := $(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib/$(ARCH)-linux-gnu $(CUDA_ROOT)/lib))
# pip's packages have libcublasLt.so.13, but not the libcublasLt.so that -l needs.
cuda_lib    = $(if $(wildcard $(CUDA_LIBS)/lib$(1).so),-l$(1),\
                   $(or $(firstword $(wildcard $(CUDA_LIBS)/lib$(1).so.*)),-l$(1)))
ifneq ($(NVCC),)
CUDA_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
CUDA_FOUND := CUDA $(CUDA_VERSION) for sm_$(subst $() ,$(comma)sm_,$(strip $(CUDA_ARCHS)))
endif
ifeq ($(CUDA),1)
$(if $(NVCC),,$(error CUDA=1, but there is no nvcc: install the CUDA Toolkit, or name it by CUDA_HOME=... or NVCC=...))
endif
# Without a GPU here the CUDA programs are built only with CUDA=1.
CUDA_WANTED := $(if $(NVCC),$(if $(filter 1,$(CUDA))$(GPU_ARCHS),1))
NO_NVCC     := no nvcc found; NVCC=... or CUDA_HOME=... names it
NO_CUDA     := $(if $(filter 0,$(CUDA)),CUDA=0,$(NO_NVCC))
NO_CUDA     := $(if $(NVCC),no GPU here; CUDA=1 builds train_gpt2cu all the same,$(NO_CUDA))

# $(call find_file,FILE,FOLDERS): the path of the file in the first folder that has it.
find_file    = $(firstword $(wildcard $(addsuffix /$(1),$(2))))
HEADER_PLACES := $(CUDA_ROOT)/include /usr/include /usr/include/$(ARCH)-linux-gnu /usr/local/include
LIB_PLACES    := $(CUDA_LIBS) $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib /usr/lib/$(ARCH)-linux-gnu /usr/lib64 /usr/local/lib

# cuDNN, if it is new enough (OLDEST_CUDNN in llmc/cuda/cudnn_plan.h). CUDNN_HOME names another folder, like
# .../site-packages/nvidia/cudnn of the Python package.
ifneq ($(CUDNN),0)
ifneq ($(NVCC),)
CUDNN_HEADER := $(call find_file,cudnn_version.h,$(CUDNN_HOME:%=%/include) $(HEADER_PLACES))
CUDNN_LIB    := $(call find_file,libcudnn.so.9,$(CUDNN_HOME:%=%/lib) $(LIB_PLACES))
endif
ifneq ($(and $(CUDNN_HEADER),$(CUDNN_LIB)),)
CUDNN_FOUND  := $(shell awk '/define CUDNN_MAJOR/ { a = $$3 } /define CUDNN_MINOR/ { b = $$3 } \
                              /define CUDNN_PATCHLEVEL/ { c = $$3 } \
                              END { if (a == 9 && b * 100 + c >= 1501) print a "." b "." c }' $(CUDNN_HEADER))
endif
ifeq ($(CUDNN)$(CUDNN_FOUND),1)
$(error CUDNN=1, but there is no cuDNN 9.15.1 or later 9: install it, or name its folder by CUDNN_HOME=...)
endif
endif
CUDNN_INCLUDE := $(filter-out /usr/include,$(patsubst %/,%,$(dir $(CUDNN_HEADER))))
CUDNN_FLAGS  := $(if $(CUDNN_FOUND),-DUSE_CUDNN $(addprefix -isystem ,$(CUDNN_INCLUDE)))
CUDNN_LDLIBS := $(if $(CUDNN_FOUND),$(CUDNN_LIB) -Wl$(comma)-rpath$(comma)$(dir $(CUDNN_LIB)))

# Open MPI connects the ranks; without it there is one rank. MPICC=... names another mpicc.
ifneq ($(MPI),0)
MPICC       ?= mpicc
MPI_VERSION := $(shell $(MPICC) --showme:version 2>/dev/null | sed -n 's/.*Open MPI \([0-9.]*\).*/\1/p')
ifneq ($(MPI_VERSION),)
MPI_FOUND := Open MPI $(MPI_VERSION)
MPI_FLAGS := -DUSE_MPI $(addprefix -isystem ,$(shell $(MPICC) --showme:incdirs))
MPI_LIBS  := $(foreach d,$(shell $(MPICC) --showme:libdirs),-L$(d) -Wl$(comma)-rpath$(comma)$(d)) -lmpi
LDLIBS    += -Wl$(comma)--as-needed $(MPI_LIBS) -Wl$(comma)--no-as-needed
else ifeq ($(MPI),1)
$(error MPI=1, but there is no Open MPI: apt-get install libopenmpi-dev openmpi-bin)
endif
endif

# GCC's libgomp is linked statically where it can be: base/host.cpp can set its environment only then. -fno-openmp
# leaves libgomp.so.1 out, whose constructor would bind the process to one core before the other runtime counts them.
ifeq ($(SANITIZE)$(LIBOMP_HOME)$(findstring clang,$(CXX)),)
GOMP   := $(filter /%,$(shell $(CXX) -print-file-name=libgomp.a))
LDLIBS += $(if $(GOMP),-fno-openmp $(GOMP) -ldl)
endif

# OpenSSL's libcrypto proves the secret of ranks that find each other by TCP. pkg-config names its folder, if it is not
# where the compiler looks.
ifneq ($(CRYPTO),0)
CRYPTO_FLAGS := $(if $(CROSS),,$(shell pkg-config --cflags libcrypto 2>/dev/null))
CRYPTO_LIBS  := $(or $(if $(CROSS),,$(shell pkg-config --libs libcrypto 2>/dev/null)),-lcrypto)
ifneq ($(call probe,openssl/hmac.h,$(CRYPTO_FLAGS),$(CRYPTO_LIBS)),)
CRYPTO_FOUND := libcrypto
LDLIBS       += -Wl$(comma)--as-needed $(CRYPTO_LIBS) -Wl$(comma)--no-as-needed
else ifeq ($(CRYPTO),1)
$(error CRYPTO=1, but there is no libcrypto: apt-get install libssl-dev)
endif
endif

# NCCL connects ranks with one GPU each. NCCL_HOME names another folder, like .../site-packages/nvidia/nccl.
ifneq ($(NCCL),0)
ifneq ($(NVCC),)
NCCL_HEADER := $(call find_file,nccl.h,$(NCCL_HOME:%=%/include) $(HEADER_PLACES))
NCCL_LIB    := $(call find_file,libnccl.so.2,$(NCCL_HOME:%=%/lib) $(LIB_PLACES))
endif
ifneq ($(and $(NCCL_HEADER),$(NCCL_LIB)),)
NCCL_FOUND  := NCCL $(shell awk '/define NCCL_M|define NCCL_PATCH/ { v = v "." $$3 } END { print substr(v, 2) }' \
                                $(NCCL_HEADER))
NCCL_FLAGS  := -DUSE_NCCL -isystem $(dir $(NCCL_HEADER)) $(MPI_FLAGS)
NCCL_LDLIBS := $(NCCL_LIB) -Wl$(comma)-rpath$(comma)$(dir $(NCCL_LIB))
else ifeq ($(NCCL),1)
$(error NCCL=1, but there is no NCCL: install libnccl-dev, or name its folder by NCCL_HOME=...)
endif
endif

FOUND = $(shell $(CXX) --version | head -1) | $(ARCH) | $(or $(CUDA_FOUND),CUDA off) | \
        cuDNN $(or $(CUDNN_FOUND),off) | $(or $(NCCL_FOUND),NCCL off) | $(or $(MPI_FOUND),Open MPI off) | \
        $(or $(CRYPTO_FOUND),libcrypto off)
