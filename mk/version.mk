# version.mk: the version of the program, which CITATION.cff says, and the commit that it is built from, for --version
# and log.jsonl. A checksum of the sources tells the ranks of a run whether they are the same program, also without a
# commit.

VERSION := $(shell sed -n 's/^version: //p' CITATION.cff)

# Without .git here, as in the archive of `make dist`, there is no commit: git would name that of a checkout around it.
ifneq ($(wildcard .git),)
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
COMMIT := $(if $(COMMIT),$(COMMIT)$(if $(shell git --no-optional-locks status --porcelain --untracked-files=no),-dirty))
endif

SOURCES := $(sort $(wildcard $(addprefix llmc/*/*.,cpp h inc cu cuh)))
SOURCES := $(shell cat train_gpt2.cu $(SOURCES) | cksum | cut -d ' ' -f 1)

# This file changes only with the commit and the sources, so a new commit compiles version.cpp and nothing else.
BUILT_OF := $(VERSION) $(COMMIT) $(SOURCES)
$(shell mkdir -p $(BUILD) && { echo "$(BUILT_OF)" | cmp -s - $(BUILD)/commit || echo "$(BUILT_OF)" >$(BUILD)/commit; })
BUILT_FROM := -DVERSION='"$(VERSION)$(if $(COMMIT), (commit $(COMMIT)))"' -DSOURCES='"$(SOURCES)"'
$(BUILD)/llmc/base/version.o: CXXFLAGS += $(BUILT_FROM)
build/fuzz/llmc/base/version.o: FUZZFLAGS += $(BUILT_FROM)
$(BUILD)/llmc/base/version.o build/fuzz/llmc/base/version.o: $(BUILD)/commit

# The curves of data/curves and the recipes, each with its name as texts of C++: the program has them in any folder.
$(BUILD)/texts/curves.inc: $(sort $(wildcard data/curves/*.jsonl))
$(BUILD)/texts/recipes.inc: $(sort $(wildcard recipes/*.toml))
$(BUILD)/texts/%.inc: mk/version.mk
	@mkdir -p $(@D)
	$(Q)for file in $(filter-out mk/%,$^); do name=$${file##*/}; \
	    printf '{"%s", R"text(' $${name%.*}; cat $$file; echo ')text"},'; done >$@
$(BUILD)/llmc/train/log.o build/fuzz/llmc/train/log.o: $(BUILD)/texts/curves.inc
$(BUILD)/llmc/train/option_checks.o build/fuzz/llmc/train/option_checks.o: $(BUILD)/texts/recipes.inc
$(BUILD)/llmc/train/log.o $(BUILD)/llmc/train/option_checks.o: CXXFLAGS += -I$(BUILD)/texts
build/fuzz/llmc/train/log.o build/fuzz/llmc/train/option_checks.o: FUZZFLAGS += -I$(BUILD)/texts
