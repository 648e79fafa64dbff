// asan_options.cpp: AddressSanitizer's options for the fuzzers, which allocate often. Long stacks of allocations and a
// quarantine larger than the cache take a fifth of the time. ASAN_OPTIONS=malloc_context_size=30 shows whole stacks.
extern "C" const char* __asan_default_options() { return "malloc_context_size=3:quarantine_size_mb=8"; }
