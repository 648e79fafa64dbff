#!/usr/bin/env bash
# install.sh [PACKAGE...]: installs the Debian or Ubuntu packages that the project needs and those in the arguments, as
# root or by sudo, without questions. Does nothing if all are installed.
set -euo pipefail

packages=(g++ make libcli11-dev doctest-dev nlohmann-json3-dev libxxhash-dev libopenmpi-dev openmpi-bin libssl-dev
          iproute2 curl ca-certificates python3 python3-numpy python3-matplotlib "$@")

if ! command -v apt-get >/dev/null; then
    echo "install.sh: no apt-get here; make needs g++ (12 or newer) or clang++ (14), GNU make, CLI11, doctest,"
    echo "  nlohmann-json and xxHash with their headers, scripts/plot.py wants python3 with matplotlib"
    exit 0
fi

installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q '^install ok installed'; }
available() { apt-cache show "$1" >/dev/null 2>&1; }

missing=()
for package in "${packages[@]}"; do
    # These may also come from elsewhere than a package (a newer compiler, another Python).
    case $package in g++ | make | clang | curl | python3) command -v "$package" >/dev/null && continue ;; esac
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then exit 0; fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "install.sh: neither root nor sudo; ask an administrator for: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120 "$@"
}

# Fetches the lists of packages if there are none, and once more if installing fails, because the lists may be too old.
updated=0
update() {
    if [ $updated = 0 ]; then
        echo "install.sh: apt-get update"
        apt update || echo "install.sh: apt-get update failed; trying with the lists that are here" >&2
    fi
    updated=1
}
for package in g++ "${missing[@]}"; do available "$package" || update; done
echo "install.sh: installing ${missing[*]} (this can take some minutes)"
install() { apt install --yes --no-install-recommends "${missing[@]}" >/dev/null; }
if ! install; then
    update
    install || {
        echo "install.sh: apt-get install ${missing[*]} failed (see above)" >&2
        exit 1
    }
fi
