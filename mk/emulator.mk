# emulator.mk: builds the CUDA backend with the host's compiler for the emulator (dev/simt), which runs
# kernels on a CPU.
#
# The emulator's own files are never instrumented. If a sanitizer is linked, they tell it which fiber runs.
# ThreadSanitizer is many times slower here with g++ than with clang.

EMU_TESTS    := $(patsubst dev/test/gpu/%.cu,$(BUILD)/emulator/%,$(wildcard dev/test/gpu/test_*.cu))
SIMT_TESTS   := $(filter %/test_simt %/test_simt_bugs,$(EMU_TESTS))
EMUFLAGS     := -std=c++20 -O1 $(INFO) $(WARN) -fno-strict-aliasing -DUSE_CUDA -DUSE_CUDNN $(INCLUDES) -Idev/simt
EMUFLAGS     += $(if $(filter 0,$(NCCL)),,-DUSE_NCCL)
EMU_COMPILE   = $(CXX) $(EMUFLAGS) $(SANFLAGS) -x c++ -include dev/simt/emulator.h
EMU_LIB      := emulator warp shared_memory cudart streams cublasLt cudnn nccl
EMU_LIB      := $(EMU_LIB:%=$(BUILD)/emulator/dev/simt/%.o)
EMU_OBJECTS  := $(patsubst %,$(BUILD)/emulator/%.o,$(sort $(GPU_NAMES) $(CUDNN_NAMES)))
$(BUILD)/emulator/llmc/parallel/comm_nccl.o: EMUFLAGS += $(MPI_FLAGS)
$(BUILD)/emulator/llmc/cuda/device.o: EMUFLAGS  += -DCUDA_ARCHS='"$(strip $(CUDA_ARCHS))"'

.PHONY: emulator
emulator: $(EMU_TESTS) $(BUILD)/emulator/test_gpt2cu $(BUILD)/emulator/group_ranks

$(BUILD)/emulator/libllmc.a: $(HOST_OBJECTS) $(OPS_OBJECTS) $(EMU_OBJECTS) $(EMU_LIB)
$(BUILD)/emulator/train_gpt2cu $(BUILD)/emulator/test_gpt2cu: $(BUILD)/emulator/%cu: $(BUILD)/%.o \
                                                               $(BUILD)/emulator/libllmc.a
	$(call link)

$(BUILD)/emulator/group_ranks: $(BUILD)/dev/test/ranks/group_ranks.o $(BUILD)/emulator/libllmc.a
	$(call link)

# Programs without NCCL, and without NCCL and MPI, as the one in the Makefile.
$(BUILD)/emulator/nonccl/train_gpt2cu: $(BUILD)/train_gpt2.o $(BUILD)/emulator/nonccl/llmc/parallel/comm_nccl.o
$(BUILD)/emulator/alone/train_gpt2cu: $(BUILD)/train_gpt2.o $(BUILD)/emulator/nonccl/llmc/parallel/comm_nccl.o \
                                      $(BUILD)/alone/llmc/parallel/comm.o
$(BUILD)/emulator/nonccl/train_gpt2cu $(BUILD)/emulator/alone/train_gpt2cu: $(BUILD)/emulator/libllmc.a
	@mkdir -p $(@D)
	$(call link)

$(BUILD)/emulator/nonccl/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (emulator without NCCL),$(EMU_COMPILE) -UUSE_NCCL)

# The objects that tests of kernels and of ranks link. The builds for ThreadSanitizer and MemorySanitizer have no other
# programs, so they compile no other sources.
KERNEL_TEST_HOST := $(patsubst %,$(BUILD)/llmc/%.o,base/% parallel/% model/params train/plan)
$(BUILD)/emulator/libkernels.a: $(filter $(BUILD)/llmc/cpu/% $(KERNEL_TEST_HOST),$(HOST_OBJECTS)) $(OPS_OBJECTS) \
                                $(EMU_OBJECTS) $(EMU_LIB)

$(EMU_TESTS): $(BUILD)/emulator/%: $(BUILD)/emulator/dev/test/gpu/%.o $(TEST_MAIN)
	$(call say,LINK  $@)
	$(Q)$(CXX) $(LDFLAGS) $(if $(filter %.a,$^),-fopenmp) $^ -o $@ $(if $(filter %.a,$^),$(LDLIBS))
# The tests of the emulator itself link no object of the model.
$(SIMT_TESTS): $(BUILD)/llmc/base/common.o $(EMU_LIB)
$(filter-out $(SIMT_TESTS),$(EMU_TESTS)): $(BUILD)/emulator/libkernels.a

$(BUILD)/emulator/%.o: %.cu $(RULES)
	$(call compile,CXX   $< (emulator),$(EMU_COMPILE))

$(BUILD)/emulator/llmc/%.o: llmc/%.cpp $(RULES)
	$(call compile,CXX   $< (emulator),$(EMU_COMPILE))

$(BUILD)/emulator/dev/simt/%.o: dev/simt/%.cpp $(RULES)
	$(call compile,CXX   $<,$(CXX) $(EMUFLAGS) -O3)
