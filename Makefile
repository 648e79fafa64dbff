# make            train_gpt2 and test_gpt2 for the CPU, and train_gpt2cu and test_gpt2cu where there is a GPU
# make help       the other targets and the options
#
# mk/find.mk looks for libraries, mk/sanitize.mk has the flags of the sanitizers, mk/version.mk finds the commit,
# mk/cuda.mk builds for a GPU, mk/emulator.mk builds the same sources for the emulator, mk/fuzz.mk builds the
# fuzzers, and mk/install.mk installs.

.DEFAULT_GOAL := all
CXX      ?= g++
SANITIZE ?=
DEBUG    ?= 0
WERROR   ?= 0
V        ?= 0
comma    := ,

RULES := Makefile $(wildcard mk/*.mk)

include mk/find.mk

# ---- flags

# -Wno-pass-failed: clang warns of every loop that it does not vectorize, and a sanitizer's build vectorizes none.
# Warnings are errors only with WERROR=1, as in CI: a newer compiler may have warnings that are not fixed here yet.
WARN := -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror) -Wno-pass-failed
# Most of a trainer's time is in kernels, most of a compiler's in the rest. So -O3 is for the sources of FAST below.
# No -ffast-math: it reassociates the range reduction of exp and removes checks for NaN.
OPTIMIZE = $(if $(filter 1,$(DEBUG)),-O0,$(if $(SANITIZE),$(2),$(1)) -fno-math-errno -fno-trapping-math)
OPT     := $(call OPTIMIZE,-Og,-O0)
INFO    := $(if $(filter 1,$(DEBUG)),-g,-g1)
# No compiler fuses a multiply and an add by itself: each would choose others, and weights would have other bits. The
# CPU's operations ask for it (multiply_add in llmc/cpu/vec.h).
CONTRACT := -ffp-contract=off
INCLUDES := -Illmc -Idev/test
CXXFLAGS  = -std=c++20 $(OPT) $(CONTRACT) $(INFO) $(WARN) $(OPENMP) $(INCLUDES) $(CPPFLAGS) -pthread

# build/<config>: one folder for each set of options that changes the objects.
CONFIG := $(or $(subst $(comma),+,$(SANITIZE)),release)$(if $(filter 1,$(DEBUG)),-debug)
CONFIG := $(CONFIG)$(if $(filter 0,$(CUDNN)),-nocudnn)$(if $(filter 0,$(MPI)),-nompi)$(if $(filter 0,$(NCCL)),-nonccl)
CONFIG := $(CONFIG)$(if $(filter 0,$(CRYPTO)),-nocrypto)
CONFIG := $(CONFIG)$(if $(filter g++ c++,$(CXX)),,-$(notdir $(CXX)))
GIVEN  := $(foreach flags,OPT CPPFLAGS LDFLAGS,$(if $(filter command environment,$(origin $(flags))),$($(flags))))
CONFIG := $(CONFIG)$(if $(strip $(GIVEN)),-$(firstword $(shell echo '$(subst ','\'',$(GIVEN))' | cksum)))
BUILD  := build/$(CONFIG)

include mk/sanitize.mk

# ---- what is built from what

MPI_SOURCES := $(addprefix llmc/parallel/,comm_mpi.cpp)
# Only tests call reference.cpp, so only they compile it.
NOT_IN_LIB  := llmc/cuda/% llmc/cpu/reference.cpp $(if $(MPI_FOUND),,$(MPI_SOURCES))
LIB_SOURCES := $(filter-out $(NOT_IN_LIB),$(wildcard llmc/*/*.cpp))
LIB_OBJECTS := $(LIB_SOURCES:%.cpp=$(BUILD)/%.o)
TESTS       := $(patsubst dev/test/unit/%.cpp,$(BUILD)/%,$(wildcard dev/test/unit/test_*.cpp))
BENCHES     := $(patsubst dev/bench/%.cpp,$(BUILD)/%,$(wildcard dev/bench/bench_*.cpp))
TEST_MAIN   := $(BUILD)/dev/test/support/main.o
TEST_BASE   := $(TEST_MAIN) $(BUILD)/llmc/cpu/reference.o
# These programs run AMX and AVX512-BF16 in plain C++ (dev/test/support/emulated_units.h).
UNITS       := train_gpt2_amx units/test_gpt2 units/test_matmul units/test_attention units/test_head
UNITS       := $(if $(filter x86_64,$(ARCH)),$(UNITS:%=$(BUILD)/%))
UNITS_NAMES := $(addprefix llmc/cpu/,amx avx512bf16 isa)

# Sources with loops over all elements of a tensor, all tokens or all bytes of a file.
FAST := base/files base/json text/unicode text/text_reader text/bpe_train text/tokenizer commands/tokenize \
        data/dataloader data/shard model/params checkpoint/hf checkpoint/gguf train/optimizer infer/generate \
        parallel/comm_mpi
FAST := $(FAST:%=llmc/%) $(basename $(wildcard llmc/cpu/*.cpp dev/bench/*.cpp))
$(foreach folder,$(BUILD) $(BUILD)/cuda $(BUILD)/units,$(FAST:%=$(folder)/%.o)): OPT := $(call OPTIMIZE,-O3,-O1)

%/llmc/parallel/rendezvous.o: CXXFLAGS += $(if $(CRYPTO_FOUND),-DUSE_LIBCRYPTO $(CRYPTO_FLAGS))
%/llmc/parallel/comm.o $(addprefix %/,$(MPI_SOURCES:.cpp=.o)): CXXFLAGS += $(MPI_FLAGS)

# One source for each instruction set: its lines "// x86_64: FLAGS" have the compiler's flags for that architecture. The
# program chooses one when it starts (llmc/cpu/isa.h). Without -O1 such an object has copies of other sources' inline
# functions, and the linker could choose these for all of the program. test_cpu_isa.py looks for them.
VARIANTS      := $(basename $(shell grep -l '^$(HASH)define VARIANT ' llmc/cpu/*.cpp))
variant_flags  = $(shell sed -n 's,^// $(ARCH): ,,p' $(1:=.cpp))
$(VARIANTS:%=$(BUILD)/%.o): OPT := $(subst -O0,-O1,$(call OPTIMIZE,-O3,-O1))
$(foreach v,$(VARIANTS),$(eval $(BUILD)/$v.o: CXXFLAGS += $(call variant_flags,$v)))

# The emulated matrix units (dev/test/support/emulated_units.h) run on every machine with AVX-512.
EMULATED := $(call variant_flags,llmc/cpu/avx512) -DEMULATED_UNITS -include dev/test/support/emulated_units.h
$(BUILD)/units/llmc/cpu/amx.o $(BUILD)/units/llmc/cpu/avx512bf16.o: CXXFLAGS += $(EMULATED)
$(BUILD)/units/llmc/cpu/isa.o:  CXXFLAGS += -DEMULATED_UNITS

# ---- how

# make V=1 shows the commands.
Q   := $(if $(filter 1,$(V)),,@)
say  = @echo "  $(1)"

# $(count): "3 of 98 ", the number of this object among those that this make compiles. A dry run counts them.
ifeq ($(findstring n,$(filter-out -%,$(firstword $(MAKEFLAGS)))),)
OBJECTS := $(if $(filter clean help dist,$(MAKECMDGOALS)),,$(shell \
               $(MAKE) --dry-run --no-print-directory $(MAKEOVERRIDES) $(MAKECMDGOALS) 2>&1 | grep -c ' -c '))
count    = $(eval compiled += x)$(words $(compiled)) of $(OBJECTS)  
endif

# $(call link,LIBRARIES): links the objects and archives among the prerequisites.
define link
	$(call say,LINK  $@)
	$(Q)$(CXX) $(CXXFLAGS) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) -o $@ $(1) $(LDLIBS)
endef
# $(call compile,NAME,COMMAND): makes an object and the list of its headers.
define compile
	@mkdir -p $(@D)
	$(call say,$(count)$(1))
	$(Q)$(2) -MMD -MP -c $< -o $@
endef

.PHONY: all found tests bench test lint clean help always
all: found train_gpt2 test_gpt2 $(if $(CUDA_WANTED),train_gpt2cu test_gpt2cu)
	@$(if $(CUDA_WANTED),,echo "for the CPU only: $(NO_CUDA)")

found:
	@echo "$(FOUND)$(if $(SANITIZE), | sanitize $(SANITIZE))        leave one out: CUDA=0 CUDNN=0 NCCL=0 MPI=0 CRYPTO=0"

# Made always: the link may be to the program of another folder, which is newer.
train_gpt2 test_gpt2: %: $(BUILD)/% always
	@ln -sf $< $@

$(BUILD)/libllmc.a: $(LIB_OBJECTS)
%.a:
	@rm -f $@
	$(call say,AR    $@)
	$(Q)ar rcs $@ $^

$(BUILD)/train_gpt2 $(BUILD)/test_gpt2: $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libllmc.a
	$(call link)

$(TESTS): $(BUILD)/%: $(BUILD)/dev/test/unit/%.o $(TEST_BASE) $(BUILD)/libllmc.a
	$(call link)

$(BENCHES): $(BUILD)/%: $(BUILD)/dev/bench/%.o $(BUILD)/libllmc.a
	$(call link)

$(BUILD)/train_gpt2_amx: $(BUILD)/train_gpt2.o
$(BUILD)/units/test_gpt2: $(BUILD)/test_gpt2.o
$(filter-out %_amx %_gpt2,$(UNITS)): $(BUILD)/units/%: $(BUILD)/dev/test/unit/%.o $(TEST_BASE)
$(UNITS): $(UNITS_NAMES:%=$(BUILD)/units/%.o) $(BUILD)/libllmc.a
	$(call link)

# A program that only joins the rendezvous. dev/test/ranks/test_slurm.py and test_torchrun.py start it as ranks.
RENDEZVOUS := base/common base/content base/files base/host base/json base/print parallel/launch parallel/rendezvous
$(BUILD)/rendezvous_rank: $(BUILD)/dev/test/ranks/rendezvous_rank.o $(RENDEZVOUS:%=$(BUILD)/llmc/%.o)
	$(call link)

# The same without libcrypto. dev/test/ranks/test_secret.py tests that it refuses a secret.
$(BUILD)/alone/rendezvous_rank: $(BUILD)/dev/test/ranks/rendezvous_rank.o $(BUILD)/alone/llmc/parallel/rendezvous.o \
                                $(filter-out %/rendezvous.o,$(RENDEZVOUS:%=$(BUILD)/llmc/%.o))
	$(call link)

# A program that test_groups.py starts as ranks with groups, on the CPU and in the emulator.
$(BUILD)/group_ranks: $(BUILD)/dev/test/ranks/group_ranks.o $(BUILD)/libllmc.a
	$(call link)

# Compares layouts of several ranks with one rank. dev/test/ranks/test_layouts.py starts it.
$(BUILD)/layouts: $(BUILD)/dev/test/ranks/layouts.o $(BUILD)/libllmc.a
	$(call link)

# A program without MPI: the objects before the archive replace the ones in it. dev/test/ranks/test_no_libraries.py
# tests that it refuses several ranks.
$(BUILD)/alone/train_gpt2: $(BUILD)/train_gpt2.o $(BUILD)/alone/llmc/parallel/comm.o $(BUILD)/libllmc.a
	$(call link)

$(BUILD)/alone/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (without a library),$(CXX) $(CXXFLAGS) -UUSE_MPI -UUSE_LIBCRYPTO)

$(BUILD)/units/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (emulated units),$(CXX) $(CXXFLAGS))

$(BUILD)/%.o: %.cpp $(RULES)
	$(call compile,CXX   $<,$(CXX) $(CXXFLAGS))

$(BUILD)/%.o: %.cu $(RULES)
	$(call compile,CXX   $<,$(CXX) $(CXXFLAGS) -x c++)

# A third of the compiler's time is in headers of the standard library, so g++ compiles these once for each level of
# optimization: g++ 12 takes the header of another level, and crashes. Instruction sets, other compilers and other
# builds do without. A g++ that refuses the result, as a newer version does, reads the copy beside it. The variable lets
# ccache take such objects.
ifeq ($(CONFIG)$(filter Free,$(shell $(CXX) --version)),releaseFree)
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
WITH_STD  := $(filter-out $(VARIANTS:%=$(BUILD)/%.o),$(LIB_OBJECTS)) $(BUILD)/train_gpt2.o $(BUILD)/test_gpt2.o
STD_FLAGS := $(CXXFLAGS)
define with_std
$(2): private CXXFLAGS += -include $(BUILD)/std-$(1)/std.h
$(2): $(BUILD)/std-$(1)/std.h.gch
endef
$(eval $(call with_std,Og,$(filter-out $(FAST:%=$(BUILD)/%.o),$(WITH_STD))))
$(eval $(call with_std,O3,$(filter $(FAST:%=$(BUILD)/%.o),$(WITH_STD))))
$(BUILD)/std-Og/std.h $(BUILD)/std-O3/std.h: $(BUILD)/std-%/std.h: mk/std.h $(RULES)
	@mkdir -p $(@D) && grep -v 'not -$*' $< >$@
$(BUILD)/std-%/std.h.gch: $(BUILD)/std-%/std.h
	$(call compile,CXX   mk/std.h -$*,$(CXX) $(subst -Og,-$*,$(STD_FLAGS)) -x c++-header)
endif

include mk/version.mk
include mk/cuda.mk
include mk/emulator.mk
include mk/fuzz.mk
include mk/install.mk

tests: $(TESTS) $(REPLAYS) $(UNITS) $(BUILD)/test_gpt2 $(BUILD)/train_gpt2 $(BUILD)/alone/train_gpt2 \
       $(BUILD)/rendezvous_rank $(BUILD)/alone/rendezvous_rank $(BUILD)/group_ranks $(BUILD)/layouts
bench: $(BENCHES)

test:
	./scripts/test.sh
lint:
	./dev/lint.sh

clean:
	rm -rf build train_gpt2 test_gpt2 train_gpt2cu test_gpt2cu

help:
	@cat mk/help.txt

-include $(sort $(shell find $(BUILD) $(EMU) $(SIMT) build/fuzz -name '*.d' 2>/dev/null))
