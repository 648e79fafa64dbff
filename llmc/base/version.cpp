// version.cpp: the program's version. It is the only source that depends on the commit and on the checksum of all
// sources (mk/version.mk).
#include "base/common.h"

std::string version() { return "train_gpt2 " VERSION; }

const char SOURCES_CHECKSUM[] = SOURCES;
