#!/usr/bin/env python3
"""`lockstep bench step`: what it prints, the same losses for any threads, and what it refuses."""
# ctest: PROCESSORS 4 TIMEOUT 120
# builds: release

import json
import os
import pathlib
import subprocess
import tempfile

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
FIELDS = {"model", "device", "precision", "threads", "batch", "context", "min_ms", "median_ms", "p99_ms", "tokens_per_s",
          "model_gflops", "gemm_gflops", "share_of_gemm", "loss", "loss_third"}


def bench(*arguments, **how):
    return subprocess.run([LOCKSTEP, "bench", "step", "--batch", "1", "--seconds", "0.001", *arguments],
                          capture_output=True, text=True, timeout=100, **how)


def measured(*arguments, **how):
    result = bench(*arguments, **how)
    assert result.returncode == 0, result
    return [json.loads(line) for line in result.stdout.splitlines()]


[one] = measured("--threads", "1", "--json")
assert set(one) == FIELDS, one
assert (one["model"], one["precision"], one["batch"], one["context"]) == ("tiny", "fp32", 1, 256), one
assert 8.2 < one["loss"] < 8.6, one  # about log(4096), as nothing is learnt yet
assert one["loss_third"] < one["loss"], one
assert one["min_ms"] <= one["median_ms"] <= one["p99_ms"], one
assert abs(one["tokens_per_s"] - 256e3 / one["median_ms"]) < 1, one

[two] = measured("--threads", "2", "--json")
assert (two["loss"], two["loss_third"]) == (one["loss"], one["loss_third"]), (one, two)

with tempfile.TemporaryDirectory() as folder:
    weights = pathlib.Path(folder) / "weights"
    served = measured("--serve", "--weights-out", str(weights), input="0.001\n0.001\n")
    assert len(served) == 2 and served[0]["loss"] == one["loss"], served
    parameters = 2 * 4096 * 256 + 6 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256 + 2 * 256) + 256
    assert weights.stat().st_size == 4 * parameters, weights.stat()
    result = bench("--weights-out", folder)
    assert result.returncode == 1 and folder in result.stderr, result

for wrong in (["--model", "huge"], ["--threads", "0"], ["--precision", "fp8"], ["--device", "abacus"]):
    result = bench(*wrong)
    assert result.returncode == 2 and wrong[0] in result.stderr, result

# Without a GPU: auto says why and computes on the CPU, cuda refuses.
result = bench("--device", "cuda", "--json")
if result.returncode == 2:
    assert "--device cuda" in result.stderr and "GPU" in result.stderr, result
    result = bench("--device", "auto", "--threads", "1", "--json")
    assert result.returncode == 0 and "no GPU" in result.stderr and len(result.stderr.splitlines()) == 1, result
    assert json.loads(result.stdout)["device"] == "cpu" and json.loads(result.stdout)["loss"] == one["loss"], result
else:
    assert json.loads(result.stdout)["device"] == "cuda", result

result = bench("--precision", "bf16", "--json")
if result.returncode == 2:  # a processor without the instructions
    assert "--precision fp32" in result.stderr, result
else:
    assert abs(json.loads(result.stdout)["loss"] - one["loss"]) < 0.02, result
print("ok")
