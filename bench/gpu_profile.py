#!/usr/bin/env python3
"""Where the time of a training step on a GPU goes, kernel by kernel, as Nsight Compute measures each by itself.

usage: bench/gpu_profile.py [--model 124m] [--lockstep build/cuda/lockstep] [--top 30]"""

import argparse
import collections
import csv
import re
import subprocess

STEPS = 6  # that `bench step` runs when it has no time to measure


def short(name):
    name = re.sub(r"<.*", "", re.sub(r"lockstep::|cuda::|_GLOBAL__N_[^:]*::|<unnamed>::|\(anonymous namespace\)::|void ", "", name))
    return re.sub(r"\(.*", "", name)[:70]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="124m")
    parser.add_argument("--lockstep", default="build/cuda/lockstep")
    parser.add_argument("--top", type=int, default=30)
    options = parser.parse_args()
    run = subprocess.run(
        ["ncu", "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--csv", options.lockstep, "bench",
         "step", "--device", "cuda", "--precision", "bf16", "--model", options.model, "--seconds", "0.001"],
        capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if run.returncode or not lines:
        raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])
    total, count = collections.Counter(), collections.Counter()
    for row in csv.DictReader(lines):
        nanoseconds = float(row["Metric Value"].replace(",", "")) * {"ns": 1, "us": 1e3, "ms": 1e6}[row["Metric Unit"]]
        key = (short(row["Kernel Name"]), row["Grid Size"])
        total[key] += nanoseconds
        count[key] += 1
    in_step = {key: time for key, time in total.items() if count[key] % STEPS == 0}
    print(f"{options.model}: {sum(in_step.values()) / STEPS / 1e6:.2f} ms of kernels in a step")
    for key, time in sorted(in_step.items(), key=lambda item: -item[1])[:options.top]:
        print(f"{time / STEPS / 1e6:8.3f} ms {count[key] // STEPS:4d} x {time / count[key] / 1e3:8.1f} us  {key[1]:>20}  {key[0]}")


if __name__ == "__main__":
    main()
