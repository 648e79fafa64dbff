# version.mk: the version of the program, and the commit that it is built from, for --version and run.json.

VERSION := $(shell sed -n 's/^version: //p' CITATION.cff)

# Without .git here, as in the archive of `make dist`, there is no commit: git would name that of a checkout around it.
ifneq ($(wildcard .git),)
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
COMMIT := $(if $(COMMIT),$(COMMIT)$(if $(shell git --no-optional-locks status --porcelain --untracked-files=no),-dirty))
endif

# This file changes only with the commit, so a new commit compiles version.cpp and nothing else.
$(BUILD)/commit: always
	@mkdir -p $(@D)
	@echo "$(COMMIT)" | cmp -s - $@ || echo "$(COMMIT)" >$@
$(BUILD)/llmc/options/version.o: CXXFLAGS += $(if $(COMMIT),-DGIT_COMMIT='"$(COMMIT)"')
$(BUILD)/llmc/options/version.o: $(BUILD)/commit
