#!/usr/bin/env bash
# All of `make test`: builds and tests every preset that counts, goes on after a failure, sums up.
# CUDA is compiled where its toolkit is; it runs on a machine with a GPU (scripts/gpu.sh).
# JOBS: compile jobs. TEST_JOBS: tests at once. PRESETS: a shorter list while working.
set -u
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
test_jobs=${TEST_JOBS:-2}
presets=${PRESETS:-release asan tsan syntax cuda-compile}
results=build/test-results
rm -rf "$results"
mkdir -p "$results"
failed=()
started=$SECONDS

# The thread sanitizer cannot live with the widest address space randomisation.
prefix_for() {
  if [ "$1" = tsan ] && setarch -R true 2>/dev/null; then echo "setarch -R"; fi
}

has_cuda() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

for preset in $presets; do
  echo "=== $preset"
  if [ "$preset" = cuda-compile ] && ! has_cuda; then
    echo "no CUDA toolkit here: not compiled"
    continue
  fi
  prefix=$(prefix_for "$preset")
  if ! cmake --preset "$preset" || ! $prefix cmake --build --preset "$preset" -j "$jobs"; then
    failed+=(--failed-step "build $preset")
    continue
  fi
  case $preset in syntax | cuda-compile) continue ;; esac  # that they compile is the test
  $prefix ctest --preset "$preset" -j "$test_jobs" --output-junit "$PWD/$results/$preset.xml" \
    --test-output-size-passed 4194304 --test-output-size-failed 4194304
  case $? in
    0 | 8) ;;  # 8: tests failed, and the results say which
    *) failed+=(--failed-step "test run $preset") ;;
  esac
done

echo "=== summary ($((SECONDS - started)) s)"
python3 scripts/summarise_tests.py "$results" "${failed[@]}"
