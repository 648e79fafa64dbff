// xxhash.cpp: xxHash's functions, compiled from its header, so that a build for another architecture needs no library.
#define XXH_STATIC_LINKING_ONLY
#define XXH_IMPLEMENTATION
#include <xxhash.h>
