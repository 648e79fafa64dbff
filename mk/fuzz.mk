# fuzz.mk: coverage-guided fuzzing with clang's libFuzzer, and tests of the committed inputs, which need no clang.
# The first paragraph of a fuzzer names the sources that both link, so the test, which is always built, fails
# where one is missing.

FUZZERS   := $(patsubst dev/fuzz/%.cpp,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.cpp))
# -O2, because clang inlines almost nothing at -O1. An error of UndefinedBehaviorSanitizer ends the
# fuzzer, as a finding.
FUZZFLAGS := -std=c++20 -O2 -g1 $(WARN) $(INCLUDES) -pthread -fsanitize=address,undefined \
             -fno-sanitize-recover=undefined
fuzz_sources  = $(wildcard $(shell sed -n '/^..$$/q; s@^// \(sources: \)\{0,1\}@@p' $(1:build/fuzz/%=dev/fuzz/%.cpp)))
fuzz_objects  = $(patsubst %.cpp,build/fuzz/%.o,$(1:build/fuzz/%=dev/fuzz/%.cpp) dev/fuzz/asan_options.cpp \
                                                $(call fuzz_sources,$(1)))
$(foreach f,$(FUZZERS),$(eval $(f): $(call fuzz_objects,$(f))))

.PHONY: fuzz
fuzz: $(FUZZERS)

$(FUZZERS):
	$(call say,LINK  $@)
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer $^ -o $@

build/fuzz/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (fuzz),clang++ $(FUZZFLAGS) -fsanitize=fuzzer-no-link)

# replay_NAME runs fuzz_NAME.cpp on the files of dev/fuzz/corpus/NAME.
REPLAYS := $(patsubst dev/fuzz/fuzz_%.cpp,$(BUILD)/replay_%,$(wildcard dev/fuzz/fuzz_*.cpp))
replayed      = $(patsubst %.cpp,$(BUILD)/%.o,$(call fuzz_sources,$(1)))
$(foreach f,$(FUZZERS),$(eval $(f:build/fuzz/fuzz_%=$(BUILD)/replay_%): $(call replayed,$(f))))
$(REPLAYS): $(BUILD)/replay_%: $(BUILD)/dev/fuzz/fuzz_%.o $(BUILD)/dev/fuzz/replay.o
	$(call link)
