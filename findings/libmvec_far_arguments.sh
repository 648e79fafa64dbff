#!/usr/bin/env bash
# libmvec_far_arguments.sh: one lane below -87.3 makes a vector of libmvec's expf several times slower.
#
# Guess: a function of libmvec, which gcc's -ffast-math calls for expf in a loop, computes all lanes together whatever
# they are, so that a softmax costs the same for any scores; far below the maximum e^x is 0, which is no more work.
# Behaviour: a lane below about -87.3, minus infinity and NaN among them, leaves the fast path, and the scalar expf is
# called for it. In a loop of gcc 12 on Zen 5 a vector of 8 lanes of -10000 took 14 times as long as one of -1, with
# AVX-512 18 times, and one such lane of 16 made it 4 to 6 times. Masked attention scores of minus infinity are such
# lanes, and so are scores 88 below the maximum. logf does so for 0, negative numbers and denormal ones, tanhf only
# beyond 1e38. The results are right. A kernel that clamps the argument before the call is not slowed down.
# Versions: libmvec of glibc 2.36 and 2.41 (of the system), ziglang 0.15.1 of PyPI as the compiler; x86-64 with AVX2.
# Output seen: that of `want` below; "slow" is more than 3 times the time of lanes of -1. Exit code 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/times.c" <<'CODE'
#include <dlfcn.h>
#include <immintrin.h>
#include <math.h>
#include <stdio.h>
#include <time.h>
typedef __m256 (*Function)(__m256);

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}
// The least time of 20 measurements of 20,000 vectors, of which the first lane, or all, have this value.
static double time_of(Function function, float value, int all) {
    __m256 x = all ? _mm256_set1_ps(value) : _mm256_blend_ps(_mm256_set1_ps(0.5f), _mm256_set1_ps(value), 1);
    double least = 1e9;
    for (int i = 0; i < 20; i++) {
        const double begin = seconds();
        for (int j = 0; j < 20000; j++) {
            __m256 y = function(x);
            __asm__ volatile("" : "+x"(x), "+x"(y));
        }
        const double time = seconds() - begin;
        if (time < least) least = time;
    }
    return least;
}
static void show(const char* name, float value) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "_ZGVdN8v_%s", name);
    const Function function = (Function)dlsym(dlopen("libmvec.so.1", RTLD_NOW), symbol);
    const double usual = time_of(function, 0.5f, 1);
    const char* all = time_of(function, value, 1) > 3 * usual ? "slow" : "fast";
    printf("%s(%g) in all lanes: %s, in one: %s\n", name, value, all,
           time_of(function, value, 0) > 3 * usual ? "slow" : "fast");
}
int main(void) {
    const float values[] = {-1.0f, -87.0f, -88.0f, -1e4f, -INFINITY};
    for (int i = 0; i < 5; i++) show("expf", values[i]);
    show("logf", 1e-30f);
    show("logf", 0.0f);
    show("tanhf", -1e4f);
    show("tanhf", -INFINITY);
}
CODE
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q ziglang==0.15.1
"$folder/env/bin/python" -m ziglang cc -target x86_64-linux-gnu.2.35 -O2 -mavx2 "$folder/times.c" -o "$folder/times"
"$folder/times" | tee "$folder/got"

want="expf(-1) in all lanes: fast, in one: fast
expf(-87) in all lanes: fast, in one: fast
expf(-88) in all lanes: slow, in one: slow
expf(-10000) in all lanes: slow, in one: slow
expf(-inf) in all lanes: slow, in one: slow
logf(1e-30) in all lanes: fast, in one: fast
logf(0) in all lanes: slow, in one: slow
tanhf(-10000) in all lanes: fast, in one: fast
tanhf(-inf) in all lanes: slow, in one: fast"
diff <(echo "$want") "$folder/got" && echo "as it was"
