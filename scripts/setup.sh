#!/usr/bin/env bash
# Installs what is missing, from the distribution's packages only (Debian 12, Ubuntu 24.04).
# usage: scripts/setup.sh [build|test|bench|lint|package]...    Silent when everything is there.
set -euo pipefail
export LC_ALL=C

build="make g++ cmake ninja-build pkg-config libfmt-dev libsodium-dev libssl-dev libcli11-dev nlohmann-json3-dev"
test="$build git ccache clang lld libgtest-dev libgmock-dev python3 python3-venv iproute2 dpkg-dev file"
bench="$build libbenchmark-dev python3 python3-venv iproute2"
lint="$build git clang clang-format clang-tidy libgtest-dev libgmock-dev"
package="$build dpkg-dev file"
# Done without, and said so, where the distribution has none.
mpi="openmpi-bin libopenmpi-dev mpich libmpich-dev"
optional_build="libsentencepiece-dev"
optional_test="$optional_build $mpi b3sum chromium zsh fish groff-base slurm-wlm munge openssh-client openssh-server python3-torch"
optional_bench="$optional_build $mpi libgloo-dev libdnnl-dev libopenblas-dev libblis-dev"

required="" optional=""
for group in "${@:-build}"; do
  case $group in
    build) required+=" $build" optional+=" $optional_build" ;;
    test) required+=" $test" optional+=" $optional_test" ;;
    bench) required+=" $bench" optional+=" $optional_bench" ;;
    lint) required+=" $lint" ;;
    package) required+=" $package" optional+=" $optional_build libopenmpi-dev" ;;
    *) echo "setup.sh: unknown group '$group' (build, test, bench, lint, package)" >&2; exit 2 ;;
  esac
done

if ! command -v dpkg-query apt-get >/dev/null; then
  echo "setup.sh: not a Debian or Ubuntu machine; needed, under whatever name:$required" >&2
  exit 0
fi

# The packages that are not installed.
missing() {
  local installed
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p')
  comm -23 <(printf '%s\n' "$@" | sort -u) <(sort -u <<<"$installed")
}

# The packages that apt could install.
offered() {
  apt-cache policy "$@" 2>/dev/null | awk '/^[^ ]/ {name = $1} /Candidate: [^(]/ {sub(":$", "", name); print name}' | sort -u
}

# The runtime of the sanitizers and of libFuzzer carries the version of the distribution's clang.
clang_runtime() {
  [[ $required == *" clang "* ]] || return 0
  { dpkg-query -W -f '${Depends}\n' clang 2>/dev/null || apt-cache depends clang 2>/dev/null; } |
    sed -n 's/.*\<clang-\([0-9][0-9]*\)\>.*/libclang-rt-\1-dev/p' | head -n 1
}

wanted=$(missing $required $(clang_runtime))
wished=$([ -z "$optional" ] || missing $optional)
if [ -z "$wanted" ] && { [ -z "$wished" ] || [ -z "$(offered $wished)" ]; }; then
  exit 0
fi

sudo=""
if [ "$(id -u)" != 0 ]; then
  sudo=sudo
  if ! command -v sudo >/dev/null; then
    echo "setup.sh: missing, and neither root nor sudo here to install it:" $wanted $wished >&2
    exit 1
  fi
fi
apt_get() {
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 "$@"
}

echo "setup.sh: some packages are missing; asking apt${sudo:+ (with sudo)}"
apt_get update
wanted=$(missing $required $(clang_runtime))
available=$(offered $wanted $wished)
unknown=$(comm -23 <(printf '%s\n' $wanted) <(echo "$available"))
if [ -n "$unknown" ]; then
  echo "setup.sh: this distribution does not offer:" $unknown >&2
  exit 1
fi
left_out=$(comm -23 <(printf '%s\n' $wished) <(echo "$available"))
[ -z "$left_out" ] || echo "setup.sh: not offered here, done without:" $left_out
echo "setup.sh: installing" $available
# Tests start daemons of their own: those that come along need not run, now or after the next start of this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap '$sudo rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' | $sudo install -m 755 /dev/stdin $policy
fi
apt_get install -y --no-install-recommends $available
if [ -d /run/systemd/system ]; then
  for daemon in openssh-server:ssh.service openssh-server:ssh.socket munge:munge slurm-wlm:slurmctld slurm-wlm:slurmd; do
    ! grep -qx "${daemon%:*}" <<<"$wished" || $sudo systemctl -q disable "${daemon#*:}" 2>/dev/null || true
  done
fi
