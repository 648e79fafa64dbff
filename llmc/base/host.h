// host.h: which machine this process runs on.
#pragma once
#include <string>

std::string host_name();
// Equal for processes that share a kernel and a network, whatever their host names are. Containers may share a host
// name, but not this.
std::string boot_id();
