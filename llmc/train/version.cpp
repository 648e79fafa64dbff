// version.cpp: the program's version. It is the only source that depends on the commit and on the checksum of all
// sources (mk/version.mk).
#include "train/options.h"

std::string version() {
#ifdef GIT_COMMIT
    return "train_gpt2 0.1.0 (commit " GIT_COMMIT ")";
#else
    return "train_gpt2 0.1.0";
#endif
}

const char SOURCES_CHECKSUM[] = SOURCES;
