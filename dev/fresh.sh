#!/usr/bin/env bash
# fresh.sh bookworm|trixie [quickstart|test|COMMAND] [ARGUMENT...]: runs a command of the README in
# a minimal Debian system.
#
# The system is made by debootstrap (minbase, git and ca-certificates) and has its own clone of the last commit.
# Default: quickstart. `test` is ./scripts/test.sh; any other COMMAND runs in the clone as given. The exit
# status is the command's.
#
# FRESH_DIR (default: a folder of /tmp) keeps the minimal system and the packages that were fetched, so that
# the next run is quick. The copy in which the command ran is removed, or kept with KEEP=1. TRAIN_SECONDS,
# FUZZ_SECONDS, ALL, CPU_ISA and WERROR are passed on. Packages come from the host's own apt sources,
# else from debootstrap's default.
#
# Needs root for mount and chroot. All mounts are in a mount namespace of this run, and end with it in every case.
set -euo pipefail

fail() { echo "fresh.sh: $*" >&2; exit 1; }
usage() { sed -n '2,5s/^# \{0,1\}//p' "$0"; }
case ${1:-} in
    bookworm | trixie) ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
esac

# The script starts itself again inside new namespaces, which does the work. If it is killed, all its processes end too.
if [ -z "${FRESH_INSIDE:-}" ]; then
    [ "$(id -u)" = 0 ] || fail "this needs root (mount, chroot)"
    command -v debootstrap >/dev/null || fail "no debootstrap here: apt-get install debootstrap"
    unshare --mount true 2>/dev/null || fail "this root may not mount (a container without CAP_SYS_ADMIN)"
    FRESH_INSIDE=1 exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc "$0" "$@"
fi

suite=$1
what=${2:-quickstart}
arguments=("${@:3}")
source=$(cd "$(dirname "$0")/.." && pwd)
dir=${FRESH_DIR:-/tmp/fresh}
base=$dir/$suite packages=$dir/$suite.packages root=$dir/$suite.run
mkdir -p "$dir" "$packages"
exec 9>"$dir/$suite.lock"
flock --nonblock 9 || fail "$dir/$suite.lock: another run uses this folder"

# Prints the host's own Debian sources, one per line, changed to this suite.
host_sources() {
    local ID="" VERSION_CODENAME=""
    source /etc/os-release
    if [ "$ID" != debian ] || [ -z "$VERSION_CODENAME" ]; then return; fi
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(CREATED_BY)' |
        awk -v host="$VERSION_CODENAME" -v suite="$suite" '
            $4 == "Packages" && $3 == "main" && $2 ~ "^" host "(-|$)" { sub(host, suite, $2); print "deb", $1, $2, $3 }'
}

make_base() {
    local mirror
    host_sources >"$dir/$suite.sources"
    mirror=$(awk -v suite="$suite" '$3 == suite { print $2; exit }' "$dir/$suite.sources")
    eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
    if [ -n "${http_proxy:-}" ]; then export http_proxy; fi
    rm -rf --one-file-system "$base.new"
    debootstrap --variant=minbase --include=git,ca-certificates --cache-dir="$packages" "$suite" "$base.new" $mirror
    if [ -n "$mirror" ]; then mv "$dir/$suite.sources" "$base.new/etc/apt/sources.list"; fi
    apt-config dump | grep -E '^Acquire::(https?|Check-|Retries)' >"$base.new/etc/apt/apt.conf.d/90host" || true
    mv "$base.new" "$base"
}

make_copy() {
    rm -rf --one-file-system "$root"
    cp -a --reflink=auto "$base" "$root"
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    git -c safe.directory='*' clone --quiet "file://$source" "$root/root/gpt2"
    mount --bind "$root" "$root"  # `ip netns exec` needs a root that is a mount
    mount --rbind /dev "$root/dev"  # with /dev/pts
    mount --rbind /sys "$root/sys"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"  # Open MPI's and our own shared memory
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    mount --bind "$packages" "$root/var/cache/apt/archives"
}

# Never removes files through a mount: the packages and the host's /dev are mounted there.
clean_up() {
    if mountpoint --quiet "$root"; then umount --recursive --lazy "$root" || true; fi
    if [ "${KEEP:-0}" = 1 ] || grep -qF " $root" /proc/self/mountinfo; then
        echo "fresh.sh: kept: $root"
    else
        rm -rf --one-file-system "$root"
    fi
}

case $what in
    quickstart) command=(./scripts/quickstart.sh) ;;
    test) command=(./scripts/test.sh) ;;
    *) command=("$what") ;;
esac
trap 'exit 130' INT
trap 'exit 143' TERM HUP
[ -d "$base" ] || make_base
trap clean_up EXIT
make_copy
environment=(HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}"
             PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
for name in TRAIN_SECONDS FUZZ_SECONDS ALL CPU_ISA WERROR http_proxy https_proxy no_proxy; do
    if [ -n "${!name:-}" ]; then environment+=("$name=${!name}"); fi
done
echo "fresh.sh: $suite, commit $(git -C "$root/root/gpt2" rev-parse --short HEAD): ${command[*]} ${arguments[*]}"
status=0
env -i "${environment[@]}" chroot "$root" bash -c 'cd /root/gpt2 && exec "$@"' fresh "${command[@]}" \
    "${arguments[@]}" || status=$?
echo "fresh.sh: $suite, ${command[*]} ${arguments[*]}: exit status $status after $SECONDS s"
exit $status
