# make            train_gpt2 and test_gpt2, with whatever libraries are found
# make test       every test;  make help lists the rest

CXX      ?= g++
SANITIZE ?=
DEBUG    ?= 0

ARCH := $(firstword $(subst -, ,$(shell $(CXX) -dumpmachine)))
# clang says so where it does not vectorise a loop, which is all of them in a build for the sanitizers.
WARN := -Wall -Wextra -Werror -Wno-pass-failed
# No -ffast-math: it reassociates the range reduction of exp and removes checks for NaN.
OPT  := -O3 -fno-math-errno -fno-trapping-math
ifneq ($(SANITIZE),)
OPT  := -O1 -fno-math-errno -fno-trapping-math
endif
ifeq ($(DEBUG),1)
OPT  := -O0
endif
CXXFLAGS  = -std=c++20 $(OPT) -g $(WARN) -fopenmp -pthread
LDLIBS   := -lxxhash

# What is there. A probe asks for a header and links with the given flags.
HASH  := \#
probe = $(shell printf '$(HASH)if !__has_include(<$(1)>)\n$(HASH)error\n$(HASH)endif\nint main() {}\n' | $(CXX) -std=c++20 -x c++ - -o /dev/null $(2) 2>/dev/null && echo 1)
need  = $(if $(call probe,$(1),$(2)),,$(error $(1) not found: apt-get install $(3) (./scripts/quickstart.sh installs everything)))

ifeq ($(filter clean help,$(MAKECMDGOALS)),)
$(call need,nlohmann/json.hpp,,nlohmann-json3-dev)
$(call need,CLI/CLI.hpp,,libcli11-dev)
$(call need,doctest/doctest.h,,doctest-dev)
$(call need,xxhash.h,-lxxhash,libxxhash-dev)
endif

# make V=1 shows the commands.
ifneq ($(V),1)
Q := @
endif
say = @echo "  $(1)"

# build/<config>: one folder for each set of options that changes the objects.
comma  := ,
CONFIG := $(if $(SANITIZE),$(subst $(comma),+,$(SANITIZE)),release)
CONFIG := $(CONFIG)$(if $(filter 1,$(DEBUG)),-debug)$(if $(filter g++ c++,$(CXX)),,-$(notdir $(CXX)))
BUILD  := build/$(CONFIG)
ifneq ($(SANITIZE),)
CXXFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer
LDFLAGS  += -fsanitize=$(SANITIZE)
endif

LIB_SOURCES  := $(wildcard llmc/*.cpp llmc/cpu/*.cpp)
LIB_OBJECTS  := $(LIB_SOURCES:%.cpp=$(BUILD)/%.o)
TESTS        := $(patsubst dev/test/%.cpp,$(BUILD)/%,$(wildcard dev/test/test_*.cpp))
BENCHES      := $(patsubst dev/bench/%.cpp,$(BUILD)/%,$(wildcard dev/bench/bench_*.cpp))
EMU_TESTS    := $(patsubst dev/test/%.cu,$(BUILD)/emulator/%,$(wildcard dev/test/test_*.cu))
FUZZERS      := $(patsubst dev/fuzz/%.cpp,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.cpp))

# Code that runs once or in tests, with headers that take the optimizer long.
$(BUILD)/dev/test/%.o $(addprefix $(BUILD)/llmc/,arguments.o hf_config.o json.o log.o options.o setup.o): OPT := -O1

# One translation unit per instruction set; which one runs is chosen at run time, by feature bits (llmc/cpu/isa.h).
ifeq ($(ARCH),x86_64)
AVX2   := -mavx2 -mfma -mf16c
AVX512 := $(AVX2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
$(BUILD)/llmc/cpu/avx2.o:   CXXFLAGS += $(AVX2)
$(BUILD)/llmc/cpu/avx512.o: CXXFLAGS += $(AVX512)
$(BUILD)/llmc/cpu/amx.o $(BUILD)/llmc/cpu/amx_attention.o: CXXFLAGS += $(AVX512) -mavx512bf16 -mamx-tile -mamx-bf16
endif

.PHONY: all found tests emulator bench fuzz test clean help
all: found train_gpt2 test_gpt2

found:
	@echo "$(shell $(CXX) --version | head -1) | $(ARCH) | CPU backend$(if $(SANITIZE), | sanitize $(SANITIZE))"

train_gpt2 test_gpt2: %: $(BUILD)/%
	@ln -sf $< $@

$(BUILD)/libllmc.a: $(LIB_OBJECTS)
	@rm -f $@
	$(call say,AR    $@)
	$(Q)ar rcs $@ $^

$(BUILD)/train_gpt2 $(BUILD)/test_gpt2: $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(TESTS): $(BUILD)/%: $(BUILD)/dev/test/%.o $(BUILD)/dev/test/main.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BENCHES): $(BUILD)/%: $(BUILD)/dev/bench/%.o $(BUILD)/libllmc.a
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(CXXFLAGS) -MMD -MP -x c++ -c $< -o $@

# CUDA sources as a CPU runs them. The emulator's own files are never instrumented: they tell a sanitizer, if one is
# linked, which fiber runs. g++'s ThreadSanitizer is many times slower here than clang's.
EMUFLAGS := -std=c++20 -O1 -g $(WARN) -fno-strict-aliasing
EMU_LIB  := $(patsubst %,$(BUILD)/emulator/dev/simt/%.o,emulator cudart)

$(EMU_TESTS): $(BUILD)/emulator/%: $(BUILD)/emulator/dev/test/%.o $(EMU_LIB) $(BUILD)/dev/test/main.o
	$(call say,LINK  $@)
	$(Q)$(CXX) $(LDFLAGS) $(if $(filter %.a,$^),-fopenmp) $^ -o $@ $(if $(filter %.a,$^),$(LDLIBS))

# The emulator's own test needs nothing of the model.
$(BUILD)/emulator/test_simt: $(BUILD)/llmc/common.o
$(filter-out %/test_simt,$(EMU_TESTS)): $(BUILD)/libllmc.a

$(BUILD)/emulator/%.o: %.cu Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (emulator))
	$(Q)$(CXX) $(EMUFLAGS) $(filter -fsanitize=%,$(CXXFLAGS)) -MMD -MP -x c++ -include dev/simt/emulator.h -c $< -o $@

$(BUILD)/emulator/dev/simt/%.o: dev/simt/%.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $<)
	$(Q)$(CXX) $(EMUFLAGS) -O2 -MMD -MP -c $< -o $@

# Coverage-guided fuzzing with clang's libFuzzer. A target's first line names the files it is linked with.
FUZZFLAGS := -std=c++20 -O1 -g $(WARN) -pthread -fsanitize=address,undefined
fuzz_sources = $(shell sed -n '1s@^// sources: @@p' $(1:build/fuzz/%=dev/fuzz/%.cpp))
$(foreach f,$(FUZZERS),$(eval $(f): $(f:build/fuzz/%=build/fuzz/dev/fuzz/%.o) $(patsubst %.cpp,build/fuzz/%.o,$(call fuzz_sources,$(f)))))

$(FUZZERS):
	$(call say,LINK  $@)
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer $^ -o $@ -lxxhash

build/fuzz/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(call say,CXX   $< (fuzz))
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c $< -o $@

tests: $(TESTS) $(BUILD)/test_gpt2 $(BUILD)/train_gpt2
emulator: $(EMU_TESTS)
bench: $(BENCHES)
fuzz: $(FUZZERS)

test:
	./scripts/test.sh

clean:
	rm -rf build train_gpt2 test_gpt2

help:
	@echo "make                          train_gpt2 and test_gpt2, into build/<config>/ and linked here"
	@echo "make test                     build and run every test (./scripts/test.sh)"
	@echo "make tests                    build the test programs, build/<config>/test_*"
	@echo "make emulator                 build the tests of the CUDA kernels for a CPU, build/<config>/emulator/test_*"
	@echo "make bench                    build the benchmarks, build/<config>/bench_*"
	@echo "make fuzz                     build the fuzzers with clang's libFuzzer, build/fuzz/*"
	@echo "make clean                    remove build/"
	@echo "options: CXX=clang++  DEBUG=1  SANITIZE=address,undefined  V=1 (show commands)"

-include $(shell find $(BUILD) build/fuzz -name '*.d' 2>/dev/null)
