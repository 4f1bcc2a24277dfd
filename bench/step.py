#!/usr/bin/env python3
"""A training step, ours beside PyTorch's: same model, weights, batch and threads, in turn. The losses of the first
and third step must agree before anything is timed. The share divides model FLOP/s by the fastest 2048^3 product of
any BLAS here, measured in the same run; on a GPU by an 8192^3 product of cuBLASLt, and PyTorch is compiled.

usage: bench/step.py [--models tiny,small] [--threads 1,2] [--precision fp32] [--seconds 3] [--rounds 5]
       bench/step.py --device cuda --precision bf16 [--models 124m,350m] [--lockstep FILE] [--python python3]
The first run makes build/bench_venv and installs the newest PyTorch of PyPI; --python names another interpreter."""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
BATCH = {"cpu": {"tiny": 8, "small": 4}, "cuda": {"tiny": 64, "small": 64, "124m": 64, "350m": 32}}
REQUIRED = {("124m", "bf16"): 1.0, ("350m", "bf16"): 1.0, ("tiny", "fp32"): 1.2, ("small", "fp32"): 1.05, ("tiny", "bf16"): 1.2, ("small", "bf16"): 1.2}
# How far the losses may be apart: rounding, and in bf16 what each library keeps in which type.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def torch_python():
    """An interpreter with PyTorch, in an environment of our own."""
    folder = ROOT / "build" / "bench_venv"
    python = folder / "bin" / "python"
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode if python.exists() else True:
        print(f"making {folder} with the newest PyTorch", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "torch", "numpy"], check=True)
    return python


class Program:
    """Answers each number of seconds with one JSON object."""

    def __init__(self, *command):
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def measure(self, seconds):
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args[0]} ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def matmul_rate(threads):
    """The fastest library's GFLOP/s, and all of them."""
    output = subprocess.run([BUILD / "bench" / "matmul", "--rate", "--threads", str(threads)], check=True,
                            capture_output=True, text=True).stdout
    rates = {row["library"]: row["gflops"] for row in map(json.loads, output.splitlines())}
    return max(rates.values()), rates


def compare(model, threads, options, python, folder):
    weights = folder / f"{model}.f32"
    if not weights.exists():
        subprocess.run([options.lockstep, "bench", "step", "--model", model, "--batch", "1", "--seconds", "0.001",
                        "--device", options.device, "--weights-out", weights], check=True, stdout=subprocess.DEVNULL)
    common = ["--model", model, "--batch", BATCH[options.device][model], "--threads", threads,
              "--precision", options.precision, "--device", options.device]
    ours = Program(options.lockstep, "bench", "step", "--serve", *common)
    theirs = Program(python, ROOT / "bench" / "peers" / "torch_step.py", "--weights", weights, *common)
    with contextlib.closing(ours), contextlib.closing(theirs):
        pairs = [(ours.measure(options.seconds), theirs.measure(options.seconds)) for _ in range(options.rounds)]
    first, peer = pairs[0]
    for name in ("loss", "loss_third"):
        if abs(first[name] - peer[name]) > TOLERANCE[options.precision] * abs(peer[name]):
            sys.exit(f"{model}: {name} is {first[name]}, PyTorch says {peer[name]}")
    own_rate = options.precision == "bf16" or options.device == "cuda"
    rate, rates = (first["gemm_gflops"], {}) if own_rate else matmul_rate(threads)
    gflops = statistics.median(mine["model_gflops"] for mine, _ in pairs)
    return {"model": model, "threads": threads, "precision": options.precision, "torch": peer["version"],
            "ours_tokens_per_s": statistics.median(mine["tokens_per_s"] for mine, _ in pairs),
            "torch_tokens_per_s": statistics.median(other["tokens_per_s"] for _, other in pairs),
            "ratio": statistics.median(mine["tokens_per_s"] / other["tokens_per_s"] for mine, other in pairs),
            "required": REQUIRED.get((model, options.precision), 0), "model_gflops": gflops, "gemm_gflops": rate,
            "share_of_gemm": gflops / rate, "gemm_by_library": rates, "loss": first["loss"],
            "torch_loss": peer["loss"], "gib": first.get("gpu_gib", 0), "torch_gib": peer["gpu_gib"],
            "ours_runs": [round(mine["tokens_per_s"]) for mine, _ in pairs],
            "torch_runs": [round(other["tokens_per_s"]) for _, other in pairs]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lockstep", default=BUILD / "lockstep", help="the command")
    parser.add_argument("--python", help="an interpreter that has PyTorch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    python = options.python or torch_python()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models.split(","):
            for threads in map(int, options.threads.split(",")):
                row = compare(model, threads, options, python, pathlib.Path(folder))
                results.append(row)
                if options.json:
                    print(json.dumps(row), flush=True)
                    continue
                if len(results) == 1:
                    print(f"{options.precision}, PyTorch {row['torch']}\n{'':>6}{'threads':>8}{'ours tok/s':>12}"
                          f"{'torch tok/s':>12}{'ratio':>7}{'GFLOP/s':>11}"
                          f"{'8192^3' if options.device == 'cuda' else '2048^3':>11}{'share':>7}")
                print(f"{model:>6}{threads:>8}{row['ours_tokens_per_s']:>12,.0f}{row['torch_tokens_per_s']:>12,.0f}"
                      f"{row['ratio']:>7.2f}{row['model_gflops']:>11,.0f}{row['gemm_gflops']:>11,.0f}"
                      f"{row['share_of_gemm']:>7.0%}"
                      + (f"   {row['gib']:.1f} GiB, torch {row['torch_gib']:.1f}" if row["gib"] else ""), flush=True)
    sys.exit(any(row["ratio"] < row["required"] for row in results))


if __name__ == "__main__":
    main()
