#!/usr/bin/env bash
# Tests on a GPU and the table of benchmarks beside PyTorch, in under eight minutes.
# usage: scripts/gpu.sh [BUILD]    BUILD: a folder with lockstep and cuda_tests; the preset cuda is built without it.
# PYTHON: an interpreter that has PyTorch; its CUDA libraries are used where the system has none.
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
else
  build=$(realpath "$build")
  export LD_LIBRARY_PATH="$build:${LD_LIBRARY_PATH:-}"
  tests=$build/cuda_tests
fi

echo "=== tests"
"$tests" --gtest_brief=1
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    echo "=== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --kernel-name kernel_substring=lockstep \
      "$tests" --gtest_brief=1 --gtest_filter='CudaKernels*'
  done
fi
echo "=== step"
"$python" bench/step.py --device cuda --precision bf16 --models 124m,350m --threads 8 --seconds 4 --rounds 5 \
  --lockstep "$build/lockstep" --python "$python"
