# emulator.mk: builds the CUDA backend with the host's compiler for the emulator (dev/simt), which runs
# kernels on a CPU.
#
# The emulator's own files are never instrumented, so all sanitizers' builds share those of the build without one, in
# SIMT. If a sanitizer is linked, they tell it which fiber runs.
# ThreadSanitizer is many times slower here with g++ than with clang.

# MATH=gpu builds them into another folder, with the fused multiply-adds of nvcc and for SIMT_MATH=gpu (emulator.h). At
# -O1 g++ fuses only with -fexpensive-optimizations, which clang does not know.
EMU          := $(BUILD)$(if $(filter gpu,$(MATH)),-gpumath,/emulator)
EMU_MATH     := $(if $(filter gpu,$(MATH)),-mfma -ffp-contract=fast -DSIMT_FUSED \
                $(if $(findstring clang,$(CXX)),,-fexpensive-optimizations))
EMU_TESTS    := $(patsubst dev/test/gpu/%.cu,$(EMU)/%,$(wildcard dev/test/gpu/test_*.cu))
SIMT_TESTS   := $(patsubst dev/simt/test/%.cu,$(EMU)/%,$(wildcard dev/simt/test/test_*.cu))
EMUFLAGS     := -std=c++20 -O1 $(INFO) $(WARN) -fno-strict-aliasing -DUSE_CUDA -DUSE_CUDNN $(INCLUDES) -Idev/simt
EMUFLAGS     += $(EMU_MATH) -Wno-psabi
EMUFLAGS     += $(if $(filter 0,$(NCCL)),,-DUSE_NCCL)
EMU_COMPILE   = $(CXX) $(EMUFLAGS) $(SANFLAGS) -x c++ -include dev/simt/kernels.h
EMU_LIB      := emulator warp shared_memory hopper chunks clocks barriers tma wgmma occupancy cudart streams capture
EMU_LIB      += cublasLt cudnn nccl
SIMT         := $(patsubst build/$(subst $(comma),+,$(or $(SANITIZE),release))%,build/release%,$(EMU))
EMU_LIB      := $(EMU_LIB:%=$(SIMT)/dev/simt/%.o)
EMU_OBJECTS  := $(patsubst %,$(EMU)/%.o,$(sort $(GPU_NAMES) $(CUDNN_NAMES)))
$(EMU)/llmc/parallel/comm_nccl.o: EMUFLAGS += $(MPI_FLAGS)
$(EMU)/llmc/cuda/device.o: EMUFLAGS  += -DCUDA_ARCHS='"$(strip $(CUDA_ARCHS))"'

# Exports the symbols of kernels, by which the emulator finds them in dev/cuda_budget.txt.
$(EMU)/%: override LDFLAGS += -rdynamic
$(SIMT)/dev/simt/occupancy.o: dev/cuda_budget.txt

.PHONY: emulator simt
emulator: $(EMU_TESTS) $(SIMT_TESTS) $(EMU)/test_gpt2cu $(EMU)/group_ranks
simt: $(SIMT)/libsimt.a
$(SIMT)/libsimt.a: $(EMU_LIB)

$(EMU)/libllmc.a: $(HOST_OBJECTS) $(OPS_OBJECTS) $(EMU_OBJECTS) $(EMU_LIB)
$(EMU)/train_gpt2cu $(EMU)/test_gpt2cu: $(EMU)/%cu: $(BUILD)/%.o \
                                                               $(EMU)/libllmc.a
	$(call link)

$(EMU)/group_ranks: $(BUILD)/dev/test/ranks/group_ranks.o $(EMU)/libllmc.a
	$(call link)

# Programs without NCCL, and without NCCL and MPI, as the one in the Makefile.
$(EMU)/nonccl/train_gpt2cu: $(BUILD)/train_gpt2.o $(EMU)/nonccl/llmc/parallel/comm_nccl.o
$(EMU)/alone/train_gpt2cu: $(BUILD)/train_gpt2.o $(EMU)/nonccl/llmc/parallel/comm_nccl.o \
                                      $(BUILD)/alone/llmc/parallel/comm.o
$(EMU)/nonccl/train_gpt2cu $(EMU)/alone/train_gpt2cu: $(EMU)/libllmc.a
	@mkdir -p $(@D)
	$(call link)

$(EMU)/nonccl/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (emulator without NCCL),$(EMU_COMPILE) -UUSE_NCCL)

# The objects that tests of kernels and of ranks link. The builds for ThreadSanitizer and MemorySanitizer have no other
# programs, so they compile no other sources.
KERNEL_TEST_HOST := base/% parallel/% model/params train/plan train/fits train/option%
KERNEL_TEST_HOST := $(KERNEL_TEST_HOST:%=$(BUILD)/llmc/%.o)
$(EMU)/libkernels.a: $(filter $(BUILD)/llmc/cpu/% $(KERNEL_TEST_HOST),$(HOST_OBJECTS)) $(OPS_OBJECTS) \
                                $(EMU_OBJECTS) $(EMU_LIB)

$(EMU_TESTS): $(EMU)/%: $(EMU)/dev/test/gpu/%.o $(TEST_BASE) $(EMU)/libkernels.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(LDFLAGS) -fopenmp $^ -o $@ $(LDLIBS)
$(SIMT_TESTS): $(EMU)/%: $(EMU)/dev/simt/test/%.o $(TEST_MAIN) $(BUILD)/llmc/base/common.o $(SIMT)/libsimt.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(LDFLAGS) $^ -o $@

$(EMU)/%.o: %.cu $(RULES)
	$(call compile,CXX   $< (emulator),$(EMU_COMPILE))

$(EMU)/llmc/%.o: llmc/%.cpp $(RULES)
	$(call compile,CXX   $< (emulator),$(EMU_COMPILE))

$(SIMT)/dev/simt/%.o: dev/simt/%.cpp $(RULES)
	$(call compile,CXX   $<,$(CXX) $(EMUFLAGS) -O3)
