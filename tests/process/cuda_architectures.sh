#!/usr/bin/env bash
# Which GPUs a build is for: those of this machine, all that the compiler knows, or a list.
# builds: release
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
here=$(cd "$(dirname "$0")/../.." && pwd)

cat >"$work/nvcc" <<'END'
#!/bin/sh
printf 'compute_75\ncompute_80\ncompute_90\ncompute_120\ncompute_100\n'
END
cat >"$work/two_gpus" <<'END'
#!/bin/sh
printf '9.0\n8.9\n9.0\n'
END
printf '#!/bin/sh\nexit 9\n' >"$work/no_gpu"
printf '#!/bin/sh\nprintf "9.0\\n7.5\\n"\n' >"$work/old_gpu"
chmod +x "$work"/*
cat >"$work/script.cmake" <<END
cmake_minimum_required(VERSION 3.25)
include($here/cmake/cuda_architectures.cmake)
choose_cuda_architectures("\${WANTED}" $work/nvcc \${SMI} chosen)
message("chosen=\${chosen}")
END

# expect WANTED SMI RESULT
expect() {
  local got
  got=$(cmake -DWANTED="$1" -DSMI="$2" -P "$work/script.cmake" 2>&1 | tr -d '\n') || true
  case $got in
    *"$3"*) ;;
    *) echo "'$1' with ${2##*/}: $got, not $3"; exit 1 ;;
  esac
}
expect "" "$work/two_gpus" "chosen=89;90"
expect "" "$work/no_gpu" "chosen=80-real;90-real;100-real;120"
expect native "$work/two_gpus" "chosen=89;90"
expect native "$work/no_gpu" "no GPU here: give all"
expect native "$work/old_gpu" "compute capability 75, and Lockstep needs 80"
expect "" "$work/old_gpu" "compute capability 75, and Lockstep needs 80"
expect "90" "$work/old_gpu" "chosen=90"
expect all "$work/two_gpus" "chosen=80-real;90-real;100-real;120"
expect "80;90" "$work/two_gpus" "chosen=80;90"
expect "" "$work/there_is_none" "chosen=80-real;90-real;100-real;120"
