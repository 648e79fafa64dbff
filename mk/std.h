// std.h: headers of the standard library that most sources include (Makefile). To write one into the precompiled header
// takes three times as long as to read it: <filesystem> is not worth it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>  // not -O3: few of those sources include it
#include <optional>
#include <set>      // not -O3
#include <sstream>  // not -O3
#include <string>
#include <string_view>
#include <thread>  // not -O3
#include <unordered_map>
#include <vector>
