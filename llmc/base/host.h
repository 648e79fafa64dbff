// host.h: which machine this process runs on.
#pragma once
#include <string>

#include "base/common.h"

// An id that is equal for processes on the same kernel and network, whatever their host names are. Containers with
// separate networks may have the same host name, but not the same id.
std::string host_id();
