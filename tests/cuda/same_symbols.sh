#!/usr/bin/env bash
# usage: same_symbols.sh LIBRARY OTHER...    Every function that LIBRARY defines, one of the others defines, too.
set -eu
defined() { nm --defined-only "$@" | awk '$2 == "T" {print $3}' | c++filt | sort -u; }
missing=$(comm -23 <(defined "$1") <(defined "${@:2}"))
[ -z "$missing" ] || { echo "not defined with CUDA:"; echo "$missing"; exit 1; }
