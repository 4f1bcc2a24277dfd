#!/usr/bin/env bash
# All of `make bench`: builds peers and limits, compares, then measures shaped links, training, losses and files, and ends with a table of
# every row that is required (bench/verdict.py). The code is 1 when a row is missed or something failed. More than an hour on two
# cores, estimated from its parts; each says what it took. Arguments go to run.py. PyTorch is measured where TORCH_PYTHON names an
# interpreter that has it, or build/bench_venv has.
set -u
cd "$(dirname "$0")/.."
scripts/setup.sh bench || exit
cmake --preset release >/dev/null || exit
cmake --build --preset release -j "${JOBS:-$(nproc)}" --target lockstep bench_programs || exit
for program in openmpi_allreduce mpich_allreduce gloo_allreduce; do
  [ -x "build/release/bench/$program" ] || echo "no peer here: ${program%_allreduce}"
done
torch=${TORCH_PYTHON:-build/bench_venv/bin/python}
[ -x "$torch" ] || torch=none

LOCKSTEP_BENCH_ROWS=$(mktemp)
export LOCKSTEP_BENCH_ROWS
trap 'rm -f "$LOCKSTEP_BENCH_ROWS"' EXIT
failed=0
measure() {
  local begin=$SECONDS
  "$@" || failed=1
  echo "($* took $((SECONDS - begin)) s)"
}
measure python3 bench/run.py "$@"
measure build/release/bench/star
measure bench/netns_links.sh
measure env RATE=10000000000 bench/netns_links.sh 2
measure python3 bench/hosts.py --rounds 15
measure python3 bench/overlap.py
measure python3 bench/step.py --python "$torch"
measure python3 bench/ddp.py --models tiny --rounds 15 --python none
measure python3 bench/ddp.py --models tiny --rounds 15 --python none --transport shm
measure python3 bench/survival.py
measure python3 bench/balance.py --short
measure python3 bench/files.py
echo
python3 bench/verdict.py "$LOCKSTEP_BENCH_ROWS" || failed=1
exit "$failed"
