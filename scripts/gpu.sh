#!/usr/bin/env bash
# Tests on a GPU and the table of benchmarks beside PyTorch, in under eight minutes.
# usage: scripts/gpu.sh [BUILD]    BUILD: a folder with lockstep, cuda_tests and liblockstep.so; the preset cuda is built without it.
# PYTHON: an interpreter that has PyTorch; its CUDA libraries are used where the system has none.
# ROUNDS: of the benchmark, 5 unless told.
# TOKENS: a file of bench/curve_tokens.py; with it losses are compared with PyTorch's, too, which takes two minutes more.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
packages=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
if [ -n "$packages" ]; then
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$packages/cudnn/lib:$packages/cu13/lib:$packages/nccl/lib"
fi

build=${1:-}
if [ -z "$build" ]; then
  build=build/cuda
  cmake --preset cuda
  cmake --build --preset cuda -j "$(nproc)" --target lockstep cuda_tests
  tests=$build/tests/cuda_tests
  library=build/release  # liblockstep.so has no CUDA of its own: the tensors' is PyTorch's
  cmake --preset release
  cmake --build --preset release -j "$(nproc)" --target lockstep_shared
else
  build=$(realpath "$build")
  export LD_LIBRARY_PATH="$build:${LD_LIBRARY_PATH:-}"
  tests=$build/cuda_tests
  library=$build
fi

say() { echo "=== $* ($SECONDS s)"; }

failed=()  # parts; the others run all the same
say tests
"$tests" --gtest_brief=1 || failed+=(tests)

# These wait for each other's processes and for timeouts most of their time, so they run side by side.
sanitizers() {
  local tool
  command -v compute-sanitizer >/dev/null || return 0
  for tool in memcheck racecheck; do
    echo "--- $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --kernel-name kernel_substring=lockstep \
      "$tests" --gtest_brief=1 --gtest_filter='CudaKernels*:CudaCombine*' || return 1
  done
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
sanitizers >"$scratch/sanitizers" 2>&1 &
sanitizing=$!
"$python" tests/cuda/torch_ranks.py "$library" >"$scratch/torch_ranks" 2>&1 &
torch_ranks=$!
say "ranks as processes"
"$python" tests/cuda/gpu_ranks.py "$build/lockstep" || failed+=("ranks as processes")
say "memcheck and racecheck"
wait $sanitizing || failed+=("memcheck and racecheck")
cat "$scratch/sanitizers"
say "PyTorch's tensors over the backend lockstep"
wait $torch_ranks || failed+=("PyTorch's tensors")
cat "$scratch/torch_ranks"

say "the same lanes in one process and in two: one hash"
train=("$build/lockstep" train --device cuda --precision bf16 --vocab 50304 --hidden 768 --layers 12 --heads 12 --intermediate 2048
  --context 1024 --global-batch 256 --micro-batch 32 --steps 6 --eval-every 0 --verify-every 3 --log plain)
hashes=()
for how in "--workers 1" "--exchange nccl" "--reduction nccl" "--workers 2 --exchange host --transport shm" \
  "--workers 2 --exchange host --transport tcp" "--workers 2 --exchange host --transport shm --shard-optimizer"; do
  # shellcheck disable=SC2086
  hash=$("${train[@]}" $how --save-every 0 --out "$scratch/out" 2>"$scratch/log" | tail -1) || { cat "$scratch/log"; exit 1; }
  hashes+=("$hash")
  "$python" - "$how" "$hash" "$scratch/out/metrics.jsonl" <<'END'
import json, sys
step = json.loads(open(sys.argv[3]).read().splitlines()[-2])  # the last but one: no validation in it
busy = max(phases["forward"] + phases["backward"] for phases in step["phases"])
print(f"{sys.argv[2]}  {1e3 * step['seconds']:.0f} ms a step, {1e3 * (step['seconds'] - busy):.0f} ms "
      f"({1 - busy / step['seconds']:.0%}) of it not forward or backward  {sys.argv[1]}")
END
  rm -rf "$scratch/out"
done
[ "$(printf '%s\n' "${hashes[@]}" | sort -u | wc -l)" = 1 ] || { echo "NOT THE SAME"; failed+=("one hash"); }

if [ -n "${TOKENS:-}" ]; then
  say "losses beside PyTorch's"
  "$python" bench/curve.py "$TOKENS" --lockstep "$build/lockstep" --python "$python"
fi
say step
"$python" bench/step.py --device cuda --precision bf16 --models 124m,350m --threads 8 --seconds 4 --rounds "${ROUNDS:-5}" \
  --lockstep "$build/lockstep" --python "$python"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
say "all done"
