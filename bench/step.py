#!/usr/bin/env python3
"""A training step, ours beside PyTorch's: same model, weights, batch and threads, in turn. The losses of the first
and third step must agree before anything is timed. The share divides model FLOP/s by the fastest 2048^3 product of
any BLAS here, measured in the same round; on a GPU by an 8192^3 product of cuBLASLt, and PyTorch is compiled. The code is 1 when
a row is missed that verdict.py requires.

usage: bench/step.py [--models tiny,small] [--threads 1,2] [--precision fp32] [--seconds 1] [--rounds 15]
       bench/step.py --device cuda --precision bf16 [--models 124m,350m] [--lockstep FILE] [--python python3]
The first run makes build/bench_venv and installs the newest PyTorch of PyPI; --python names another interpreter,
'none' leaves PyTorch out."""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import verdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
BATCH = {"cpu": {"tiny": 8, "small": 4}, "cuda": {"tiny": 64, "small": 64, "124m": 64, "350m": 32}}
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


def matmul_rates(threads):
    """GFLOP/s by library."""
    output = subprocess.run([BUILD / "bench" / "matmul", "--rate", "--threads", str(threads)], check=True,
                            capture_output=True, text=True).stdout
    return {row["library"]: row["gflops"] for row in map(json.loads, output.splitlines())}


class Subject:
    """A model with a number of threads: ours, PyTorch's where there is one, and what products reach, in turn."""

    def __init__(self, model, threads, options, python, weights):
        self.model, self.threads, self.options = model, threads, options
        common = ["--model", model, "--batch", BATCH[options.device][model], "--threads", threads,
                  "--precision", options.precision, "--device", options.device]
        self.program = Program(options.lockstep, "bench", "step", "--serve", *common)
        self.peer = Program(python, ROOT / "bench" / "peers" / "torch_step.py", "--weights", weights, *common) if python else None
        self.ours, self.theirs, self.rates = [], [], []

    def measure(self):
        self.ours.append(self.program.measure(self.options.seconds))
        if self.peer:
            self.theirs.append(self.peer.measure(self.options.seconds))
        own_rate = self.options.precision == "bf16" or self.options.device == "cuda"
        self.rates.append({"own": self.ours[0]["gemm_gflops"]} if own_rate else matmul_rates(self.threads))

    def check(self):
        if not self.peer:
            return
        first, peer = self.ours[0], self.theirs[0]
        for name in ("loss", "loss_third"):
            if abs(first[name] - peer[name]) > TOLERANCE[self.options.precision] * abs(peer[name]):
                sys.exit(f"{self.model}: {name} is {first[name]}, PyTorch says {peer[name]}")

    def speed(self):
        return [each["tokens_per_s"] for each in self.ours]

    def shares(self):
        """Of the library whose median product is the fastest."""
        best = max(self.rates[0], key=lambda name: statistics.median(rates[name] for rates in self.rates))
        return [mine["model_gflops"] / rates[best] for mine, rates in zip(self.ours, self.rates)]

    def ratios(self):
        return [mine / other["tokens_per_s"] for mine, other in zip(self.speed(), self.theirs)]

    def row(self):
        first, peer = self.ours[0], self.theirs[0] if self.theirs else {}
        theirs = [other["tokens_per_s"] for other in self.theirs]
        rates = {name: statistics.median(rates[name] for rates in self.rates) for name in self.rates[0]}
        return {"model": self.model, "threads": self.threads, "precision": self.options.precision, "torch": peer.get("version"),
                "ours_tokens_per_s": statistics.median(self.speed()), "torch_tokens_per_s": statistics.median(theirs) if theirs else None,
                "ratio": statistics.median(self.ratios()) if theirs else None,
                "model_gflops": statistics.median(mine["model_gflops"] for mine in self.ours), "gemm_gflops": max(rates.values()),
                "share_of_gemm": statistics.median(self.shares()), "gemm_by_library": rates, "loss": first["loss"],
                "torch_loss": peer.get("loss"), "gib": first.get("gpu_gib", 0), "torch_gib": peer.get("gpu_gib"),
                "ours_runs": [round(speed) for speed in self.speed()], "torch_runs": [round(speed) for speed in theirs]}

    def close(self):
        self.program.close()
        if self.peer:
            self.peer.close()


def compare(model, options, python, folder):
    """All numbers of threads in the same rounds."""
    weights = folder / f"{model}.f32"
    subprocess.run([options.lockstep, "bench", "step", "--model", model, "--batch", "1", "--seconds", "0.001",
                    "--device", options.device, "--weights-out", weights], check=True, stdout=subprocess.DEVNULL)
    with contextlib.ExitStack() as stack:
        subjects = [stack.enter_context(contextlib.closing(Subject(model, threads, options, python, weights)))
                    for threads in map(int, options.threads.split(","))]
        for _ in range(options.rounds):
            for subject in subjects:
                subject.measure()
                subject.check()
    return subjects


def required_rows(subjects, options):
    """The ratios of the rows that are required, by name."""
    rows = {}
    for subject in subjects:
        name = f"step {subject.model}"
        if options.device == "cuda":
            rows[f"{name} {options.precision} / PyTorch"] = subject.ratios()
        elif options.precision == "fp32":
            rows[f"{name} {subject.threads} threads / best product"] = subject.shares()
            rows[f"{name} {subject.threads} threads / PyTorch"] = subject.ratios()
    speed = {subject.threads: subject.speed() for subject in subjects}
    if options.precision == "fp32" and options.device == "cpu" and {1, 2} <= speed.keys():
        rows[f"step {subjects[0].model} 2 threads / 1 thread"] = [two / one for one, two in zip(speed[1], speed[2])]
    return {name: values for name, values in rows.items() if values and name in verdict.REQUIREMENTS}


def print_row(row, options, heading):
    if heading:
        print(f"{options.precision}, PyTorch {row['torch'] or 'left out'}\n{'':>6}{'threads':>8}{'ours tok/s':>12}{'torch tok/s':>12}"
              f"{'ratio':>7}{'GFLOP/s':>11}{'8192^3' if options.device == 'cuda' else '2048^3':>11}{'share':>7}")
    peer = f"{row['torch_tokens_per_s']:>12,.0f}{row['ratio']:>7.2f}" if row["ratio"] else " " * 19
    print(f"{row['model']:>6}{row['threads']:>8}{row['ours_tokens_per_s']:>12,.0f}{peer}{row['model_gflops']:>11,.0f}"
          f"{row['gemm_gflops']:>11,.0f}{row['share_of_gemm']:>7.0%}"
          + (f"   {row['gib']:.1f} GiB, torch {row['torch_gib']:.1f}" if row["gib"] and row["torch_gib"] else ""), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=verdict.PAIRS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lockstep", default=BUILD / "lockstep", help="the command")
    parser.add_argument("--python", help="an interpreter that has PyTorch; 'none' leaves it out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    python = None if options.python == "none" else options.python or torch_python()
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for count, model in enumerate(options.models.split(",")):
            subjects = compare(model, options, python, pathlib.Path(folder))
            for row in (subject.row() for subject in subjects):
                if options.json:
                    print(json.dumps(row), flush=True)
                else:
                    print_row(row, options, heading=count == 0 and row["threads"] == subjects[0].threads)
            for name, values in required_rows(subjects, options).items():
                missed |= verdict.record(name, values)
                if not options.json:
                    verdict.print_row(verdict.cells(name, values))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
