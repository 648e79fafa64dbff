# make            train_gpt2 and test_gpt2 for the CPU, and train_gpt2cu and test_gpt2cu where there is a GPU
# make test       every test;  make help lists the rest

.DEFAULT_GOAL := all

CXX      ?= g++
SANITIZE ?=
DEBUG    ?= 0
ARCH     := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine)))
# A cross compiler (CXX=aarch64-linux-gnu-g++) finds no CUDA and no Open MPI: nvcc and mpicc are of this machine.
CROSS    := $(filter-out $(ARCH),$(subst arm64,aarch64,$(shell uname -m)))
CUDA     ?= $(if $(CROSS),0,auto)
CUDNN    ?= auto
MPI      ?= $(if $(CROSS),0,auto)
NCCL     ?= auto
WERROR   ?= 0

# clang says so where it does not vectorise a loop, which is all of them in a build for the sanitizers. Warnings are errors
# with WERROR=1 only, as in CI: a newer compiler has warnings that nobody has seen yet.
WARN := -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror) -Wno-pass-failed
# No -ffast-math: it reassociates the range reduction of exp and removes checks for NaN.
OPT  := -O3 -fno-math-errno -fno-trapping-math
INFO := -g
ifneq ($(SANITIZE),)
OPT  := -O1 -fno-math-errno -fno-trapping-math
INFO := -g1
endif
ifeq ($(DEBUG),1)
OPT  := -O0
endif
OPENMP   := -fopenmp
# LIBOMP_HOME names a folder with include/omp.h and lib/libomp: Apple's clang has no OpenMP library of its own.
ifeq ($(shell uname -s),Darwin)
HOMEBREW    := $(shell brew --prefix)
LIBOMP_HOME ?= $(HOMEBREW)/opt/libomp
CPPFLAGS    += -isystem $(HOMEBREW)/include
endif
ifneq ($(LIBOMP_HOME),)
OPENMP   := -Xpreprocessor -fopenmp
CPPFLAGS += -isystem $(LIBOMP_HOME)/include
LIBOMP   := -L$(LIBOMP_HOME)/lib -Wl,-rpath,$(LIBOMP_HOME)/lib -lomp
endif
# Initial weights have the same bits on every architecture, so no multiply-add is fused outside of the CPU's operations.
CONTRACT := -ffp-contract=off
CXXFLAGS  = -std=c++20 $(OPT) $(CONTRACT) $(INFO) $(WARN) $(OPENMP) $(CPPFLAGS) -pthread
LDLIBS   := $(LIBOMP)

comma := ,

# What is there. A probe asks for a header and links with the given flags.
HASH  := \#
probe = $(shell printf '$(HASH)if !__has_include(<$(1)>)\n$(HASH)error\n$(HASH)endif\nint main() {}\n' | $(CXX) -std=c++20 $(CPPFLAGS) -x c++ - -o /dev/null $(2) 2>/dev/null && echo 1)
need  = $(if $(call probe,$(1),$(2)),,$(error $(1) not found: apt-get install $(3) (./scripts/quickstart.sh installs everything)))

ifeq ($(filter clean help,$(MAKECMDGOALS)),)
$(call need,nlohmann/json.hpp,,nlohmann-json3-dev)
$(call need,CLI/CLI.hpp,,libcli11-dev)
$(call need,doctest/doctest.h,,doctest-dev)
$(call need,xxhash.h,,libxxhash-dev)
endif

# CUDA: the toolkit with nvcc, and what the GPUs here can run (90 = compute capability 9.0; 90a is all of an H100).
# WHEELS names CUDA_HOME, CUDNN_HOME and NCCL_HOME: the folder site-packages/nvidia, where pip has put NVIDIA's packages.
ifneq ($(WHEELS),)
override WHEELS := $(abspath $(WHEELS))
CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(wildcard $(WHEELS)/cu13/bin/nvcc))
CUDNN_HOME := $(WHEELS)/cudnn
NCCL_HOME  := $(WHEELS)/nccl
$(if $(CUDA_HOME),,$(error there is no $(WHEELS)/cu13/bin/nvcc: pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cublas nvidia-cudnn-cu13))
endif
ifneq ($(CUDA),0)
NVCC       := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
GPU_ARCHS  := $(patsubst 90,90a,$(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))))
endif
CUDA_ARCHS ?= $(or $(GPU_ARCHS),90a)
CUDA_ROOT  := $(NVCC:%/bin/nvcc=%)
CUDA_LIBS  := $(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib/$(ARCH)-linux-gnu $(CUDA_ROOT)/lib))
# pip's packages have libcublasLt.so.13, and no libcublasLt.so for -l to find.
cuda_lib    = $(if $(wildcard $(CUDA_LIBS)/lib$(1).so),-l$(1),$(or $(firstword $(wildcard $(CUDA_LIBS)/lib$(1).so.*)),-l$(1)))
ifneq ($(NVCC),)
CUDA_FOUND := CUDA $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p') for sm_$(subst $() ,$(comma)sm_,$(strip $(CUDA_ARCHS)))
endif
ifeq ($(CUDA),1)
$(if $(NVCC),,$(error CUDA=1, but there is no nvcc: install the CUDA Toolkit, or name it by CUDA_HOME=... or NVCC=...))
endif
# Programs for a GPU that is not here are built only when asked for.
CUDA_WANTED := $(if $(NVCC),$(if $(filter 1,$(CUDA))$(GPU_ARCHS),1))

# cuDNN: its version, if it is new enough (OLDEST_CUDNN in llmc/cuda/cudnn_plan.h). CUDNN_HOME names another place, like
# .../site-packages/nvidia/cudnn of the Python package.
ifneq ($(CUDNN),0)
ifneq ($(NVCC),)
CUDNN_HEADER := $(firstword $(wildcard $(addsuffix /cudnn_version.h,$(CUDNN_HOME:%=%/include) $(CUDA_ROOT)/include /usr/include /usr/include/$(ARCH)-linux-gnu /usr/local/include)))
CUDNN_LIB    := $(firstword $(wildcard $(addsuffix /libcudnn.so.9,$(CUDNN_HOME:%=%/lib) $(CUDA_LIBS) $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib /usr/lib/$(ARCH)-linux-gnu /usr/lib64 /usr/local/lib)))
endif
ifneq ($(and $(CUDNN_HEADER),$(CUDNN_LIB)),)
CUDNN_FOUND  := $(shell awk '/define CUDNN_MAJOR/ { a = $$3 } /define CUDNN_MINOR/ { b = $$3 } /define CUDNN_PATCHLEVEL/ { c = $$3 } \
                              END { if (a == 9 && b >= 10) print a "." b "." c }' $(CUDNN_HEADER))
endif
ifeq ($(CUDNN)$(CUDNN_FOUND),1)
$(error CUDNN=1, but there is no cuDNN 9.10 or later 9: install it, or name its folder by CUDNN_HOME=...)
endif
endif
CUDNN_FLAGS  := $(if $(CUDNN_FOUND),-DUSE_CUDNN $(addprefix -isystem ,$(filter-out /usr/include,$(patsubst %/,%,$(dir $(CUDNN_HEADER))))))
CUDNN_LDLIBS := $(if $(CUDNN_FOUND),$(CUDNN_LIB) -Wl$(comma)-rpath$(comma)$(dir $(CUDNN_LIB)))

# Open MPI joins ranks; without it there is one. MPICC=... names another place.
ifneq ($(MPI),0)
MPICC       ?= mpicc
MPI_VERSION := $(shell $(MPICC) --showme:version 2>/dev/null | sed -n 's/.*Open MPI \([0-9.]*\).*/\1/p')
ifneq ($(MPI_VERSION),)
MPI_FOUND := Open MPI $(MPI_VERSION)
MPI_FLAGS := -DUSE_MPI $(addprefix -isystem ,$(shell $(MPICC) --showme:incdirs))
LDLIBS    += -Wl$(comma)--as-needed $(addprefix -L,$(shell $(MPICC) --showme:libdirs)) -lmpi -Wl$(comma)--no-as-needed
else ifeq ($(MPI),1)
$(error MPI=1, but there is no Open MPI: apt-get install libopenmpi-dev openmpi-bin)
endif
endif

# NCCL joins ranks with a GPU each. NCCL_HOME names another place, like .../site-packages/nvidia/nccl.
ifneq ($(NCCL),0)
ifneq ($(NVCC),)
NCCL_HEADER := $(firstword $(wildcard $(addsuffix /nccl.h,$(NCCL_HOME:%=%/include) $(CUDA_ROOT)/include /usr/include /usr/include/$(ARCH)-linux-gnu /usr/local/include)))
NCCL_LIB    := $(firstword $(wildcard $(addsuffix /libnccl.so.2,$(NCCL_HOME:%=%/lib) $(CUDA_LIBS) /usr/lib/$(ARCH)-linux-gnu /usr/lib64 /usr/local/lib)))
endif
ifneq ($(and $(NCCL_HEADER),$(NCCL_LIB)),)
NCCL_FOUND  := NCCL $(shell awk '/define NCCL_M|define NCCL_PATCH/ { v = v "." $$3 } END { print substr(v, 2) }' $(NCCL_HEADER))
NCCL_FLAGS  := -DUSE_NCCL -isystem $(dir $(NCCL_HEADER)) $(MPI_FLAGS)
NCCL_LDLIBS := $(NCCL_LIB) -Wl$(comma)-rpath$(comma)$(dir $(NCCL_LIB))
else ifeq ($(NCCL),1)
$(error NCCL=1, but there is no NCCL: install libnccl-dev, or name its folder by NCCL_HOME=...)
endif
endif

# make V=1 shows the commands.
ifneq ($(V),1)
Q := @
endif
say = @echo "  $(1)"

# build/<config>: one folder for each set of options that changes the objects.
CONFIG := $(if $(SANITIZE),$(subst $(comma),+,$(SANITIZE)),release)
CONFIG := $(CONFIG)$(if $(filter 1,$(DEBUG)),-debug)$(if $(filter 0,$(CUDNN)),-nocudnn)$(if $(filter 0,$(MPI)),-nompi)$(if $(filter 0,$(NCCL)),-nonccl)$(if $(filter g++ c++,$(CXX)),,-$(notdir $(CXX)))
BUILD  := build/$(CONFIG)
ifneq ($(SANITIZE),)
SANFLAGS := -fsanitize=$(SANITIZE)
# Variables stay on the stack, not on one beside it. From g++ 13 on AddressSanitizer keeps them there, where those of
# AVX-512 are not aligned (GCC's bug 110027), and where it maps and unmaps memory for each CUDA thread of the emulator.
ifneq ($(findstring address,$(SANITIZE)),)
SANFLAGS += $(if $(findstring clang,$(CXX)),-fsanitize-address-use-after-return=never,--param=asan-use-after-return=0)
endif
# MemorySanitizer takes what code without it writes for never written. So it watches kernels and the device's memory and
# not the host's (emulator.cpp), the templates of libstdc++ are compiled here, not taken from the library, and parallel
# loops are loops: OpenMP's runtime would hand over their arguments.
ifeq ($(SANITIZE),memory)
SANFLAGS += -fsanitize-memory-track-origins -D_GLIBCXX_EXTERN_TEMPLATE=0 -mllvm -msan-poison-stack-with-call
LDFLAGS  += -Wl,--wrap=__msan_poison_stack
OPENMP   :=
LDLIBS   += $(if $(findstring clang,$(CXX)),-fopenmp)
endif
CXXFLAGS += $(SANFLAGS) -fno-omit-frame-pointer
LDFLAGS  += -fsanitize=$(SANITIZE)
endif

LIB_SOURCES  := $(filter-out $(if $(MPI_FOUND),,llmc/comm_mpi.cpp),$(wildcard llmc/*.cpp llmc/cpu/*.cpp))
LIB_OBJECTS  := $(LIB_SOURCES:%.cpp=$(BUILD)/%.o)
# With USE_CUDA ops:: is another backend: only the files that say it are compiled again.
OPS_SOURCES  := $(shell grep -l ops:: llmc/*.cpp)
OPS_OBJECTS  := $(OPS_SOURCES:%.cpp=$(BUILD)/cuda/%.o)
# Beside the CUDA backend stands all that does not name a backend, and the CPU's operations, which tests compare with.
HOST_OBJECTS := $(filter-out $(OPS_SOURCES:%.cpp=$(BUILD)/%.o) $(BUILD)/llmc/cpu/device.o,$(LIB_OBJECTS))
CUDNN_NAMES  := llmc/cuda/attention_cudnn llmc/cuda/cudnn_plan
GPU_NAMES    := $(filter-out $(if $(CUDNN_FOUND),,$(CUDNN_NAMES)),$(basename $(wildcard llmc/cuda/*.cu llmc/cuda/*.cpp)))
TESTS        := $(patsubst dev/test/%.cpp,$(BUILD)/%,$(wildcard dev/test/test_*.cpp))
BENCHES      := $(patsubst dev/bench/%.cpp,$(BUILD)/%,$(wildcard dev/bench/bench_*.cpp))
EMU_TESTS    := $(patsubst dev/test/%.cu,$(BUILD)/emulator/%,$(wildcard dev/test/test_*.cu))
SIMT_TESTS   := $(filter %/test_simt %/test_simt_bugs,$(EMU_TESTS))
GPU_TESTS    := $(patsubst $(BUILD)/emulator/%,$(BUILD)/cuda/%,$(filter-out $(SIMT_TESTS),$(EMU_TESTS)))
GPU_BENCHES  := $(addprefix $(BUILD)/cuda/,bench_ops bench_step)
FUZZERS      := $(patsubst dev/fuzz/%.cpp,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.cpp))

# Tests with the matrix instructions of the CPU in plain C++ (dev/test/emulated_units.h): build/<config>/units/test_*.
UNITS_TESTS  := $(if $(filter x86_64,$(ARCH)),$(addprefix $(BUILD)/units/,test_gpt2 test_matmul test_matrix_attention))
UNITS_NAMES  := $(addprefix llmc/cpu/,amx avx512bf16 isa)

# Code that runs once or in tests, with headers that take the optimizer long, and the sanitizers longer still.
QUICK := $(BUILD)/dev/test/%.o $(addprefix $(BUILD)/llmc/,arguments.o foreign_options.o hf_config.o json.o launch.o log.o options.o report.o setup.o trace.o)
$(QUICK): OPT  := $(if $(SANITIZE),-O0,-O1)
$(QUICK): INFO := $(if $(filter 1,$(DEBUG)),-g,-g1)
# These take g++ twice as long at -O1 as at -O0 once they are instrumented, and no test waits for them.
ifneq ($(SANITIZE),)
$(patsubst %,$(BUILD)/llmc/%.o,checkpoint comm comm_mpi corpus hf_weights rendezvous roll_call tokenizer_files): OPT := -O0
endif

$(BUILD)/llmc/cpu/%.o: CONTRACT :=

%/llmc/comm.o %/llmc/comm_mpi.o: CXXFLAGS += $(MPI_FLAGS)

# One translation unit per instruction set; which one runs is chosen at run time, by feature bits (llmc/cpu/isa.h).
ifeq ($(ARCH),x86_64)
AVX2   := -mavx2 -mfma -mf16c
AVX512 := $(AVX2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
$(BUILD)/llmc/cpu/avx2.o:   CXXFLAGS += $(AVX2)
$(BUILD)/llmc/cpu/avx512.o: CXXFLAGS += $(AVX512)
$(BUILD)/llmc/cpu/avx512bf16.o: CXXFLAGS += $(AVX512) -mavx512bf16
$(BUILD)/llmc/cpu/amx.o: CXXFLAGS += $(AVX512) -mavx512bf16 -mamx-tile -mamx-bf16
EMULATED := -DEMULATED_UNITS -include dev/test/emulated_units.h
$(BUILD)/units/llmc/cpu/amx.o $(BUILD)/units/llmc/cpu/avx512bf16.o: CXXFLAGS += $(AVX512) $(EMULATED)
$(BUILD)/units/llmc/cpu/isa.o: CXXFLAGS += -DEMULATED_UNITS
$(BUILD)/dev/test/units.o: CXXFLAGS += $(AVX512) -mavx512bf16 -mamx-tile -mamx-bf16
$(BUILD)/units/dev/test/units.o: CXXFLAGS += $(AVX512) $(EMULATED)
$(BUILD)/test_units: $(BUILD)/dev/test/units.o $(BUILD)/units/dev/test/units.o
endif

.PHONY: all found tests emulator gpu-tests gpu-bench bench fuzz test clean help always
all: found train_gpt2 test_gpt2 $(if $(CUDA_WANTED),train_gpt2cu test_gpt2cu)
	@$(if $(CUDA_WANTED),,echo "for the CPU only: $(if $(NVCC),no GPU here; CUDA=1 builds train_gpt2cu all the same,$(if $(filter 0,$(CUDA)),CUDA=0,no nvcc found; NVCC=... or CUDA_HOME=... names it))")

found:
	@echo "$(shell $(CXX) --version | head -1) | $(ARCH) | $(or $(CUDA_FOUND),CUDA off) | $(if $(CUDNN_FOUND),cuDNN $(CUDNN_FOUND),cuDNN off) | $(or $(NCCL_FOUND),NCCL off) | $(or $(MPI_FOUND),Open MPI off)$(if $(SANITIZE), | sanitize $(SANITIZE))        leave one out: CUDA=0 CUDNN=0 NCCL=0 MPI=0"

train_gpt2 test_gpt2: %: $(BUILD)/%
	@ln -sf $< $@
train_gpt2cu test_gpt2cu: %: $(BUILD)/cuda/%
	@ln -sf $< $@

$(BUILD)/libllmc.a: $(LIB_OBJECTS)
%.a:
	@rm -f $@
	$(call say,AR    $@)
	$(Q)ar rcs $@ $^

$(BUILD)/train_gpt2 $(BUILD)/test_gpt2: $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(TESTS): $(BUILD)/%: $(BUILD)/dev/test/%.o $(BUILD)/dev/test/main.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/units/test_gpt2: $(BUILD)/test_gpt2.o
$(filter-out %/test_gpt2,$(UNITS_TESTS)): $(BUILD)/units/%: $(BUILD)/dev/test/%.o $(BUILD)/dev/test/main.o
$(UNITS_TESTS): $(UNITS_NAMES:%=$(BUILD)/units/%.o) $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ $(LDLIBS)

# A rank that only meets the others: dev/test/test_slurm.sh and test_torchrun.sh start it.
$(BUILD)/meeting: $(patsubst %,$(BUILD)/%.o,dev/test/meeting llmc/common llmc/launch llmc/rendezvous llmc/rendezvous_messages)
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BENCHES): $(BUILD)/%: $(BUILD)/dev/bench/%.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/units/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (emulated units))
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -x c++ -c $< -o $@

# The CUDA backend. It warns of spilled registers.
NVCCFLAGS := -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr --extended-lambda -DUSE_CUDA $(CUDNN_FLAGS) \
             -Xcompiler -Wall,-Wextra,-fopenmp -Xptxas -warn-spills -I. -ccbin $(CXX) \
             $(if $(filter 1,$(WERROR)),-Werror all-warnings -Xptxas -Werror) \
             $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))
GPU_OBJECTS := $(GPU_NAMES:%=$(BUILD)/cuda/%.o)
# What the program says it was built for; what was for other GPUs is compiled again.
$(BUILD)/cuda/archs: always
	@mkdir -p $(@D)
	@echo "$(strip $(CUDA_ARCHS))" | cmp -s - $@ || echo "$(strip $(CUDA_ARCHS))" >$@
$(BUILD)/cuda/llmc/cuda/device.o:     NVCCFLAGS += -DCUDA_ARCHS='"$(strip $(CUDA_ARCHS))"'
$(BUILD)/emulator/llmc/cuda/device.o: EMUFLAGS  += -DCUDA_ARCHS='"$(strip $(CUDA_ARCHS))"'
GPU_LDLIBS   = $(foreach d,$(CUDA_LIBS),-L$(d) -Wl,-rpath,$(d)) $(call cuda_lib,cublasLt) $(call cuda_lib,cudart) $(CUDNN_LDLIBS) $(NCCL_LDLIBS)

$(BUILD)/cuda/%.o: %.cu Makefile $(BUILD)/cuda/archs
	@mkdir -p $(@D)
	$(call say,NVCC  $<)
	$(Q)$(or $(NVCC),$(error no nvcc found: NVCC=... or CUDA_HOME=... names it)) $(NVCCFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/cuda/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (CUDA))
	$(Q)$(CXX) $(CXXFLAGS) -DUSE_CUDA -isystem $(CUDA_ROOT)/include $(CUDNN_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/cuda/llmc/cuda/comm_nccl.o: CXXFLAGS += $(NCCL_FLAGS)

$(BUILD)/cuda/libllmc.a: $(HOST_OBJECTS) $(OPS_OBJECTS) $(GPU_OBJECTS)
$(BUILD)/cuda/train_gpt2cu $(BUILD)/cuda/test_gpt2cu: $(BUILD)/cuda/%cu: $(BUILD)/%.o $(BUILD)/cuda/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(GPU_LDLIBS) $(LDLIBS)

$(GPU_TESTS): $(BUILD)/cuda/%: $(BUILD)/cuda/dev/test/%.o $(BUILD)/dev/test/main.o $(BUILD)/cuda/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(GPU_LDLIBS) $(LDLIBS)

$(GPU_BENCHES): $(BUILD)/cuda/%: $(BUILD)/cuda/dev/bench/%.o $(BUILD)/cuda/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(GPU_LDLIBS) $(LDLIBS)

# cuDNN's plans, made without a GPU: dev/test/test_cudnn_plans.sh.
$(BUILD)/cuda/cudnn_plans: $(BUILD)/cuda/dev/test/cudnn_plans.o $(BUILD)/cuda/llmc/cuda/cudnn_plan.o $(BUILD)/dev/test/main.o \
                           $(patsubst %,$(BUILD)/llmc/%.o,common files xxhash)
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(CUDNN_LDLIBS) $(LDLIBS)

# How ranks get NCCL's id, without a GPU: dev/test/test_nccl_meeting.sh.
$(BUILD)/cuda/dev/test/nccl_meeting.o: CXXFLAGS += $(NCCL_FLAGS)
$(BUILD)/cuda/nccl_meeting: $(BUILD)/cuda/dev/test/nccl_meeting.o $(BUILD)/dev/test/main.o \
                            $(patsubst %,$(BUILD)/llmc/%.o,common launch rendezvous rendezvous_messages)
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(NCCL_LDLIBS) $(LDLIBS)

$(BUILD)/cuda/mock/libcuda.so.1: dev/test/mock_libcuda.c
	@mkdir -p $(@D)
	$(call say,CC    $<)
	$(Q)$(CC) -std=c11 -O1 $(WARN) -shared -fPIC $< -o $@ -ldl

# The CUDA backend as a CPU runs it. The emulator's own files are never instrumented: they tell a sanitizer, if one is
# linked, which fiber runs. g++'s ThreadSanitizer is many times slower here than clang's.
EMUFLAGS    := -std=c++20 -O1 $(INFO) $(WARN) -fno-strict-aliasing -DUSE_CUDA -DUSE_CUDNN -Idev/simt
EMUFLAGS    += $(if $(filter 0,$(NCCL)),,-DUSE_NCCL)
EMU_LIB     := $(patsubst %,$(BUILD)/emulator/dev/simt/%.o,emulator cudart cublasLt cudnn nccl)
EMU_OBJECTS := $(patsubst %,$(BUILD)/emulator/%.o,$(sort $(GPU_NAMES) $(CUDNN_NAMES)))
$(BUILD)/emulator/llmc/cuda/comm_nccl.o: EMUFLAGS += $(MPI_FLAGS)
EMU_COMPILE  = $(CXX) $(EMUFLAGS) $(SANFLAGS) -MMD -MP -x c++ -include dev/simt/emulator.h

$(BUILD)/emulator/libllmc.a: $(HOST_OBJECTS) $(OPS_OBJECTS) $(EMU_OBJECTS) $(EMU_LIB)
# The part of it that the tests of kernels and of ranks link. The builds for ThreadSanitizer and MemorySanitizer have no
# other programs, so that they need not compile the rest.
KERNEL_TEST_HOST := $(patsubst %,llmc/%.o,common comm comm_mpi files gpt2 gradients launch optimizer params plan rendezvous \
                                          rendezvous_messages roll_call trace xxhash)
KERNEL_TEST_HOST := $(filter $(BUILD)/llmc/cpu/% $(addprefix $(BUILD)/,$(KERNEL_TEST_HOST) $(KERNEL_TEST_HOST:%=cuda/%)), \
                             $(HOST_OBJECTS) $(OPS_OBJECTS))
$(BUILD)/emulator/libkernels.a: $(KERNEL_TEST_HOST) $(EMU_OBJECTS) $(EMU_LIB)
$(BUILD)/emulator/train_gpt2cu $(BUILD)/emulator/test_gpt2cu: $(BUILD)/emulator/%cu: $(BUILD)/%.o $(BUILD)/emulator/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(EMU_TESTS): $(BUILD)/emulator/%: $(BUILD)/emulator/dev/test/%.o $(BUILD)/dev/test/main.o
	$(call say,LINK  $@)
	$(Q)$(CXX) $(LDFLAGS) $(if $(filter %.a,$^),-fopenmp) $^ -o $@ $(if $(filter %.a,$^),$(LDLIBS))

# The emulator's own tests need nothing of the model.
$(SIMT_TESTS): $(BUILD)/llmc/common.o $(EMU_LIB)
$(filter-out $(SIMT_TESTS),$(EMU_TESTS)): $(BUILD)/emulator/libkernels.a

$(BUILD)/emulator/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (emulator))
	$(Q)$(EMU_COMPILE) -c $< -o $@

$(BUILD)/emulator/llmc/%.o: llmc/%.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (emulator))
	$(Q)$(EMU_COMPILE) -c $< -o $@

$(BUILD)/emulator/dev/simt/%.o: dev/simt/%.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(EMUFLAGS) -O3 -MMD -MP -c $< -o $@

# Coverage-guided fuzzing with clang's libFuzzer. A target's first line names the files it is linked with.
FUZZFLAGS := -std=c++20 -O1 -g $(WARN) -pthread -fsanitize=address,undefined
fuzz_sources = $(shell sed -n '1s@^// sources: @@p' $(1:build/fuzz/%=dev/fuzz/%.cpp))
$(foreach f,$(FUZZERS),$(eval $(f): $(f:build/fuzz/%=build/fuzz/dev/fuzz/%.o) $(patsubst %.cpp,build/fuzz/%.o,$(wildcard $(call fuzz_sources,$(f))))))

$(FUZZERS):
	$(call say,LINK  $@)
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer $^ -o $@ -lxxhash

build/fuzz/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (fuzz))
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c $< -o $@

tests: $(TESTS) $(UNITS_TESTS) $(BUILD)/test_gpt2 $(BUILD)/train_gpt2 $(BUILD)/meeting
emulator: $(EMU_TESTS) $(BUILD)/emulator/test_gpt2cu
gpu-tests: $(GPU_TESTS) $(BUILD)/cuda/test_gpt2cu $(BUILD)/cuda/train_gpt2cu
gpu-bench: $(GPU_BENCHES)
bench: $(BENCHES)
fuzz: $(FUZZERS)

test:
	./scripts/test.sh

clean:
	rm -rf build train_gpt2 test_gpt2 train_gpt2cu test_gpt2cu

help:
	@echo "make                          train_gpt2 and test_gpt2, into build/<config>/ and linked here; with a GPU train_gpt2cu and test_gpt2cu"
	@echo "make test                     build and run every test (./scripts/test.sh)"
	@echo "make tests                    build the test programs, build/<config>/test_*"
	@echo "make emulator                 build the tests of the CUDA backend for a CPU, build/<config>/emulator/test_*"
	@echo "make gpu-tests                build them for a GPU, build/<config>/cuda/test_*"
	@echo "make bench                    build the benchmarks, build/<config>/bench_*"
	@echo "make gpu-bench                build those of the operations for a GPU, build/<config>/cuda/bench_*"
	@echo "make fuzz                     build the fuzzers with clang's libFuzzer, build/fuzz/*"
	@echo "make clean                    remove build/"
	@echo "options: CXX=clang++  LIBOMP_HOME=... (OpenMP for a clang without it)  DEBUG=1  SANITIZE=address,undefined  WERROR=1 (warnings are errors)  V=1 (show commands)"
	@echo "         CUDA=0 (never) CUDA=1 (without a GPU too)  CUDNN=0  CUDNN_HOME=...  CUDA_ARCHS=\"80 90a\"  CUDA_HOME=/usr/local/cuda  NVCC=nvcc"
	@echo "         MPI=0  MPICC=mpicc  NCCL=0  NCCL_HOME=...  WHEELS=.../site-packages/nvidia (pip's packages of CUDA, cuDNN and NCCL)"

-include $(shell find $(BUILD) build/fuzz -name '*.d' 2>/dev/null)
