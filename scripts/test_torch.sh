#!/usr/bin/env bash
# All of `make test-torch`: the package as pip installs it, with the newest PyTorch of PyPI, in build/torch_venv. Runs PyTorch's own
# tests of process groups, and the examples at several numbers of workers. Takes 6 GB: PyPI has PyTorch with CUDA only.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/torch_venv
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q --upgrade torch numpy expecttest
"$venv/bin/pip" install -q --force-reinstall --no-deps . --config-settings build-dir="$PWD/build/release"
export OMP_NUM_THREADS=1
unset LOCKSTEP_LIBRARY LOCKSTEP_BIN
python=$PWD/$venv/bin/python
results=build/test-torch.log
status=0
"$python" tests/torch/own_tests.py >"$results" 2>&1 || status=1
sed -n '/^PyTorch /,$p' "$results"
for example in gpt conv; do
  one=$("$python" "examples/torch/$example.py" --steps 10 | tail -n 1)
  for workers in 2 3 4; do
    several=$("$venv/bin/torchrun" --nproc-per-node "$workers" "examples/torch/$example.py" --steps 10 2>>"$results" | tail -n 1)
    echo "$example.py, $workers workers: $several"
    [ "$one" = "$several" ] || { echo "FAILED: one worker ends with $one"; status=1; }
  done
done
exit $status
