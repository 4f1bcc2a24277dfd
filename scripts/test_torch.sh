#!/usr/bin/env bash
# All of `make test-torch`: the package as `pip install .` builds and installs it, with the newest PyTorch of PyPI, in build/torch_venv.
# Runs PyTorch's own tests of process groups, also with Debian's PyTorch where there is one, our process tests of PyTorch, and the
# examples at several numbers of workers. Takes 6 GB: PyPI has PyTorch with CUDA only.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$PWD/build/torch_venv
release=$PWD/build/release
results=build/test-torch.log
status=0

failed() {
  echo "FAILED: $*"
  status=1
}

# The last lines of PyTorch's own tests are their table.
own_tests() {
  "$@" tests/torch/own_tests.py >"$results.own" 2>&1 || failed "PyTorch's own tests with $*"
  cat "$results.own" >>"$results"
  sed -n '/^PyTorch /,$p' "$results.own"
}

process_tests() {
  local name
  for name in torch_backend torch_collectives torch_exact torch_libraries python_package; do
    echo "tests/process/$name.py"
    LOCKSTEP_BIN=$release/portable/lockstep LOCKSTEP_BUILD_DIR=$release LOCKSTEP_TEST_DIR=$release/tests LOCKSTEP_SANITIZERS='' \
      "$@" "tests/process/$name.py" >>"$results" 2>&1 || failed "tests/process/$name.py with $*"
  done
}

# examples PYTHON TORCHRUN...
examples() {
  local python=$1 example one workers transport several
  shift
  for example in gpt conv; do
    one=$("$python" "examples/torch/$example.py" --steps 10 2>>"$results" | tail -n 1) || one=
    [[ $one == weights* ]] || { failed "$example.py alone"; continue; }
    for workers in 2 3 4 8; do
      for transport in auto tcp; do
        several=$(LOCKSTEP_TRANSPORT=$transport "$@" --nproc-per-node "$workers" "examples/torch/$example.py" --steps 10 \
          2>>"$results" | tail -n 1) || true
        echo "$example.py, $workers workers, $transport: $several"
        [ "$one" = "$several" ] || failed "one worker ends with $one"
      done
    done
  done
}

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q --upgrade torch numpy expecttest
"$venv/bin/pip" install -q --force-reinstall --no-deps .
export OMP_NUM_THREADS=1
unset LOCKSTEP_LIBRARY LOCKSTEP_BIN
: >"$results"
own_tests "$venv/bin/python"
if /usr/bin/python3 -c "import torch" 2>>"$results"; then
  own_tests env PYTHONPATH="$PWD/python" LOCKSTEP_LIBRARY="$release/liblockstep.so" /usr/bin/python3
fi
process_tests "$venv/bin/python"
examples "$venv/bin/python" "$venv/bin/torchrun"
exit $status
