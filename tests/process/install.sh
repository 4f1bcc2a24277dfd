#!/usr/bin/env bash
# An installed Lockstep serves a stranger's project: find_package, build, run. Every public header compiles by itself.
# ctest: TIMEOUT 300 RESOURCE_LOCK installed
# builds: release
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
here=$(cd "$(dirname "$0")" && pwd)

cmake --install "$LOCKSTEP_BUILD_DIR" --prefix "$work/prefix" >"$work/install.log"
"$work/prefix/bin/lockstep" --version
grep -q '^_lockstep()' "$work/prefix/share/bash-completion/completions/lockstep"
grep -q 'lockstep\\-train' "$work/prefix/share/man/man1/lockstep-train.1"

cmake -S "$here/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DLOCKSTEP_INCLUDE="$work/prefix/include" >"$work/configure.log"
grep "public headers" "$work/configure.log"
cmake --build "$work/build"
[ "$("$work/build/consumer")" = "peer lost: rank 3 is gone" ]
