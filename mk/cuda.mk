# cuda.mk: builds the CUDA backend with nvcc.

# With USE_CUDA the namespace ops is the CUDA backend. These sources call ops::, directly or through the model, so they
# are compiled once per backend.
OPS_SOURCES  := model/gpt2 model/memory train/gradients train/muon train/optimizer
OPS_OBJECTS  := $(OPS_SOURCES:%=$(BUILD)/cuda/llmc/%.o)
# All other sources are the same for both backends. Tests compare with the CPU's operations, so these are linked too.
NOT_HOST     := $(OPS_SOURCES:%=$(BUILD)/llmc/%.o) $(BUILD)/llmc/cpu/device.o $(BUILD)/llmc/parallel/comm_nccl.o
HOST_OBJECTS := $(filter-out $(NOT_HOST),$(LIB_OBJECTS))
CUDNN_NAMES  := llmc/cuda/attention_cudnn llmc/cuda/cudnn_plan
GPU_NAMES    := $(basename $(wildcard llmc/cuda/*.cu llmc/cuda/*.cpp) llmc/parallel/comm_nccl.cpp)
GPU_NAMES    := $(filter-out $(if $(CUDNN_FOUND),,$(CUDNN_NAMES)),$(GPU_NAMES))
GPU_OBJECTS  := $(GPU_NAMES:%=$(BUILD)/cuda/%.o)
GPU_TESTS    := $(patsubst dev/test/gpu/%.cu,$(BUILD)/cuda/%,$(wildcard dev/test/gpu/test_gpu_*.cu))
GPU_BENCHES  := $(addprefix $(BUILD)/cuda/,bench_ops bench_step)
GPU_LDLIBS    = $(foreach d,$(CUDA_LIBS),-L$(d) -Wl,-rpath,$(d)) $(call cuda_lib,cublasLt) $(call cuda_lib,cudart) \
                $(CUDNN_LDLIBS) $(NCCL_LDLIBS)

# nvcc warns of spilled registers.
NVCCFLAGS := -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr --extended-lambda -DUSE_CUDA $(CUDNN_FLAGS) \
             -Xcompiler -Wall,-Wextra,-fopenmp -Xptxas -warn-spills $(INCLUDES) -ccbin $(CXX) \
             $(if $(filter 1,$(WERROR)),-Werror all-warnings -Xptxas -Werror) \
             $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a))

.PHONY: gpu-tests gpu-bench
gpu-tests: $(GPU_TESTS) $(BUILD)/cuda/test_gpt2cu $(BUILD)/cuda/train_gpt2cu
gpu-bench: $(GPU_BENCHES)

train_gpt2cu test_gpt2cu: %: $(BUILD)/cuda/% always
	@ln -sf $< $@

# The objects have the list of GPUs for which they were built, so a change of CUDA_ARCHS compiles them again.
$(shell mkdir -p $(BUILD)/cuda && { echo "$(strip $(CUDA_ARCHS))" | cmp -s - $(BUILD)/cuda/archs || \
        echo "$(strip $(CUDA_ARCHS))" >$(BUILD)/cuda/archs; })
$(BUILD)/cuda/llmc/cuda/device.o: NVCCFLAGS += -DCUDA_ARCHS='"$(strip $(CUDA_ARCHS))"'

$(BUILD)/cuda/%.o: %.cu $(RULES) $(BUILD)/cuda/archs
	$(call compile,NVCC  $<,$(or $(NVCC),$(error no nvcc found: NVCC=... or CUDA_HOME=... names it)) $(NVCCFLAGS))

$(BUILD)/cuda/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (CUDA),$(CXX) $(CXXFLAGS) -DUSE_CUDA -isystem $(CUDA_ROOT)/include $(CUDNN_FLAGS))

$(BUILD)/cuda/llmc/parallel/comm_nccl.o: CXXFLAGS += $(NCCL_FLAGS)

$(BUILD)/cuda/libllmc.a: $(HOST_OBJECTS) $(OPS_OBJECTS) $(GPU_OBJECTS)
$(BUILD)/cuda/train_gpt2cu $(BUILD)/cuda/test_gpt2cu: $(BUILD)/cuda/%cu: $(BUILD)/%.o $(BUILD)/cuda/libllmc.a
	$(call link,$(GPU_LDLIBS))

$(GPU_TESTS): $(BUILD)/cuda/%: $(BUILD)/cuda/dev/test/gpu/%.o $(TEST_BASE) $(BUILD)/cuda/libllmc.a
	$(call link,$(GPU_LDLIBS))

$(GPU_BENCHES): $(BUILD)/cuda/%: $(BUILD)/cuda/dev/bench/%.o $(BUILD)/cuda/libllmc.a
	$(call link,$(GPU_LDLIBS))

# A test that makes cuDNN's plans without a GPU. dev/test/gpu/test_libraries.py runs it.
$(BUILD)/cuda/cudnn_plans: $(BUILD)/cuda/dev/test/gpu/cudnn_plans.o $(BUILD)/cuda/llmc/cuda/cudnn_plan.o $(TEST_MAIN) \
                           $(patsubst %,$(BUILD)/llmc/base/%.o,common files print)
	$(call link,$(CUDNN_LDLIBS))

$(BUILD)/cuda/mock/libcuda.so.1: dev/test/gpu/mock_libcuda.c
	@mkdir -p $(@D)
	$(call say,CC    $<)
	$(Q)$(CC) -std=c11 -O1 $(WARN) -shared -fPIC $< -o $@ -ldl
