#!/usr/bin/env bash
# All of `make test`: builds and tests every preset that counts, goes on after a failure, sums up.
# The next preset is built while one is tested: tests wait a lot, and builds take only what they leave of the processors.
# CUDA is compiled where its toolkit is; it runs on a machine with a GPU (scripts/gpu.sh).
# JOBS: compile jobs. TEST_JOBS: half processors for tests. PRESETS: a shorter list while working.
set -u
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
test_jobs=${TEST_JOBS:-$((2 * $(nproc)))}
presets=${PRESETS:-release asan tsan syntax cuda-compile}
results=build/test-results
rm -rf "$results"
mkdir -p "$results"
failed=()
unbuilt=$(wc -w <<<"$presets")
times=()
started=$SECONDS
TIMEFORMAT='%R %U %S'

# The thread sanitizer cannot live with the widest address space randomisation.
prefix_for() {
  if [ "$1" = tsan ] && setarch -R true 2>/dev/null; then echo "setarch -R"; fi
}

has_cuda() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

build() {
  cmake --preset "$1" && $(prefix_for "$1") cmake --build --preset "$1" -j "$jobs"
}

# Prints a line for each preset when it is built: name, exit code, seconds on the clock, of the user and of the system.
build_all() {
  local preset code
  for preset in $presets; do
    if [ "$preset" = cuda-compile ] && ! has_cuda; then
      echo "no CUDA toolkit here: not compiled" >"$results/$preset.build.log"
      echo "$preset 0 0 0 0"
      continue
    fi
    { time build "$preset" >"$results/$preset.build.log" 2>&1; } 2>"$results/time.build"
    code=$?
    echo "$preset $code $(<"$results/time.build")"
    renice -n 15 $BASHPID >/dev/null  # from now on beside tests
  done
}

note_time() { times+=("$(awk -v what="$1" '{printf "%-20s %5.0f s, processors %5.0f s", what, $1, $2 + $3}' <<<"$2")"); }

run_ctest() {
  $(prefix_for "$1") ctest --preset "$1" -j "$test_jobs" --output-junit "$PWD/$results/$2.xml" \
    --test-output-size-passed 4194304 --test-output-size-failed 4194304 "${@:3}" </dev/null
}

# Tests wait for each other's processes with deadlines of seconds. If the machine itself stood still meanwhile, those that
# failed run once more; the summary names them.
test_preset() {
  local code standstills="$results/$1.standstills"
  python3 tests/process/support/standstills.py 1 >"$standstills" &
  local watching=$!
  run_ctest "$1" "$1"
  code=$?
  kill "$watching"
  if [ "$code" = 8 ] && [ -s "$standstills" ]; then
    cat "$standstills"
    echo "=== $1: what failed, once more"
    run_ctest "$1" "$1.again" --rerun-failed
    code=$?
  fi
  return "$code"
}

echo "=== building, one preset after the other (what is said: $results/PRESET.build.log)"
while read -r -u 3 preset code seconds; do
  echo "=== $preset"
  unbuilt=$((unbuilt - 1))
  note_time "build $preset" "$seconds"
  if [ "$code" != 0 ]; then
    tail -n 100 "$results/$preset.build.log"
    failed+=(--failed-step "build $preset")
    continue
  fi
  tail -n 1 "$results/$preset.build.log"
  case $preset in syntax | cuda-compile) continue ;; esac  # that they compile is the test
  { time test_preset "$preset" 2>&1; } 2>"$results/time.test"
  code=$?
  note_time "test $preset" "$(<"$results/time.test")"
  case $code in
    0 | 8) ;;  # 8: tests failed, and the results say which
    *) failed+=(--failed-step "test run $preset") ;;
  esac
done 3< <(build_all)
[ "$unbuilt" = 0 ] || failed+=(--failed-step "builds that did not end")

echo "=== summary ($((SECONDS - started)) s)"
printf '%s\n' "${times[@]}"
python3 scripts/summarise_tests.py "$results" "${failed[@]}"
