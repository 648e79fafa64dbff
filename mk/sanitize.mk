# sanitize.mk: the flags of SANITIZE=address,undefined, SANITIZE=thread, SANITIZE=memory and SANITIZE=stores. The last
# is no sanitizer: clang then shows the emulator each load and store of a kernel (dev/simt/chunks.cpp).

ifneq ($(SANITIZE),)
ifeq ($(SANITIZE),stores)
SANFLAGS := -fsanitize-coverage=func,trace-loads,trace-stores -DSIMT_SEES_STORES
else
SANFLAGS := -fsanitize=$(SANITIZE)
LDFLAGS  += -fsanitize=$(SANITIZE)
endif
# Keeps variables on the real stack. From g++ 13 on AddressSanitizer moves them to a "fake stack" by default. Variables
# of AVX-512 are not aligned there (GCC's bug 110027), and each CUDA thread of the emulator would map and unmap memory.
ifneq ($(findstring address,$(SANITIZE)),)
SANFLAGS += $(if $(findstring clang,$(CXX)),-fsanitize-address-use-after-return=never,--param=asan-use-after-return=0)
SANFLAGS += -DADDRESS_SANITIZER
endif
# MemorySanitizer does not see writes of code that is not instrumented. Therefore it checks kernels and device memory
# only, not the host's memory (emulator.cpp). Templates of libstdc++ are compiled here, because the library's are not
# instrumented. Destructors do not poison their memory: clang 19 does it by default, and libstdc++ reads the memory of a
# stream then. OpenMP is off, because its runtime, which is not instrumented, passes the arguments of parallel loops.
ifeq ($(SANITIZE),memory)
SANFLAGS += -fsanitize-memory-track-origins -fno-sanitize-memory-use-after-dtor \
            -D_GLIBCXX_EXTERN_TEMPLATE=0 -mllvm -msan-poison-stack-with-call
LDFLAGS  += -Wl,--wrap=__msan_poison_stack
OPENMP   :=
LDLIBS   += $(if $(findstring clang,$(CXX)),-fopenmp)
endif
CXXFLAGS += $(SANFLAGS) -fno-omit-frame-pointer
endif
