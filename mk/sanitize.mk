# sanitize.mk: flags of a build for sanitizers, SANITIZE=address,undefined, thread or memory.

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
