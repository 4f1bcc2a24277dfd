#!/usr/bin/env python3
"""Training with two builds of Lockstep in turn: is an undisturbed run as fast as before? Prints, for each way to train, the
rate of the new build over that of the old one: the median of neighbouring runs, and the quarters around it. Options that
the old build does not know (--no-buddy) are given to the new one only.

usage: bench/builds.py OLD NEW [--workers 2] [--model tiny] [--rounds 7] [--steps 8] [--ways tcp,shm,tcp-sharded,...]
OLD and NEW are two commands `lockstep`."""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

from ddp import FLAGS, SHAPES, write_data

# Options of both builds, and of the new one alone.
WAYS = {
    "tcp": (["--transport", "tcp"], []),
    "shm": (["--transport", "shm"], []),
    "tcp-sharded": (["--transport", "tcp", "--shard-optimizer"], []),
    "shm-sharded": (["--transport", "shm", "--shard-optimizer"], []),
    "tcp-sharded-no-buddy": (["--transport", "tcp", "--shard-optimizer"], ["--no-buddy"]),
    "shm-sharded-no-buddy": (["--transport", "shm", "--shard-optimizer"], ["--no-buddy"]),
}
WARMUP = 2  # steps that are not counted


def seconds_per_step(lockstep, options, folder, words):
    """The median of a run's steps, and the weights it ends with."""
    out = folder / "out"
    shape = [word for pair in zip(FLAGS, SHAPES[options.model]) for word in pair]
    command = [lockstep, "train", "--data", folder / f"{options.model}.bin", *shape, "--steps", options.steps, "--global-batch",
               4 * options.workers, "--micro-batch", 2, "--threads", 1, "--eval-every", 0, "--save-every", 0, "--workers", options.workers,
               "--out", out, "--overwrite", "--log", "plain", *words]
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds" in row and "loss" in row]
    return statistics.median(row["seconds"] for row in rows[WARMUP:]), done.stdout.splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(options.model, folder)
        for way in options.ways:
            both, new_only = WAYS[way]
            pairs = []
            for _ in range(options.rounds):
                old, old_weights = seconds_per_step(options.old.resolve(), options, folder, both)
                new, new_weights = seconds_per_step(options.new.resolve(), options, folder, both + new_only)
                pairs.append((old, new))
            ratios = sorted(old / new for old, new in pairs)
            quarter = len(ratios) // 4
            print(f"{way:>21}: {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}), "
                  f"{1e3 * statistics.median(old for old, _ in pairs):.0f} and {1e3 * statistics.median(new for _, new in pairs):.0f} ms a step, "
                  f"{'the same weights' if old_weights == new_weights else 'OTHER WEIGHTS'}", flush=True)


if __name__ == "__main__":
    main()
