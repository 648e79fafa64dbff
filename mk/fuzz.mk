# fuzz.mk: coverage-guided fuzzing with clang's libFuzzer. The first line of a target names the sources it is linked with.

FUZZERS   := $(patsubst dev/fuzz/%.cpp,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.cpp))
FUZZFLAGS := -std=c++20 -O1 -g $(WARN) $(INCLUDES) -pthread -fsanitize=address,undefined
fuzz_sources  = $(wildcard $(shell sed -n '1s@^// sources: @@p' $(1:build/fuzz/%=dev/fuzz/%.cpp)))
$(foreach f,$(FUZZERS),$(eval $(f): $(f:build/fuzz/%=build/fuzz/dev/fuzz/%.o) $(patsubst %.cpp,build/fuzz/%.o,$(call fuzz_sources,$(f)))))

.PHONY: fuzz
fuzz: $(FUZZERS)

$(FUZZERS):
	$(call say,LINK  $@)
	$(Q)clang++ $(FUZZFLAGS) -fsanitize=fuzzer $^ -o $@ -lxxhash

build/fuzz/%.o: %.cpp $(RULES)
	$(call compile,CXX   $< (fuzz),clang++ $(FUZZFLAGS) -fsanitize=fuzzer-no-link)
