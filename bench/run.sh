#!/usr/bin/env bash
# All of `make bench`: builds peers and limits, compares, then measures shaped links and what training hides on them. Arguments
# go to run.py. Beside PyTorch: bench/step.py (a step), bench/ddp.py (several workers).
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh bench
cmake --preset release >/dev/null
cmake --build --preset release -j "${JOBS:-$(nproc)}" --target lockstep bench_programs
for program in openmpi_allreduce mpich_allreduce gloo_allreduce; do
  [ -x "build/release/bench/$program" ] || echo "no peer here: ${program%_allreduce}"
done
python3 bench/run.py "$@"
build/release/bench/star
bench/netns_links.sh
python3 bench/hosts.py
python3 bench/overlap.py
