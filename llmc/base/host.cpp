#include "base/host.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "base/common.h"

std::string host_name() {
    char name[256] = {};  // Linux allows 64
    if (gethostname(name, sizeof(name) - 1) != 0 || !name[0]) return "localhost";
    return name;
}

std::string host_id() {
    std::string id;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
    struct stat network = {};
    const bool has_namespace = stat("/proc/self/ns/net", &network) == 0;
    return (id.empty() ? host_name() : id) +
           (has_namespace ? format("/%llu", static_cast<unsigned long long>(network.st_ino)) : "");
}
