#!/usr/bin/env python3
"""Two builds of Lockstep in turn: is an undisturbed run as fast as before, and is every all-reduce? Prints, for each way to
train and for each size, the rate of the new build over that of the old one: the median of neighbouring samples, and
its 95 % interval. Neither build is always the first. The code is 1 when their weights differ. Options that the old build does
not know (--no-buddy) are given to the new one only. Where two processes lie in memory and on the cores makes a difference of
some percent, so all-reduces are started anew several times.

usage: bench/builds.py OLD NEW [--workers 2] [--model tiny] [--rounds 7] [--steps 8] [--ways tcp,shm,tcp-sharded,...]
       bench/builds.py OLD NEW --allreduce shm,local,tcp [--workers 2] [--sizes 8,1024,...] [--starts 5] [--rounds 5]
OLD and NEW are two commands `lockstep`."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import competitors
import verdict
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


def ratio_of(pairs):
    """old / new, with its interval, as text."""
    ratios = [old / new for old, new in pairs]
    low, high = verdict.interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def compare_training(options):
    """Whether both builds ended with the same weights, always."""
    same = True
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(options.model, folder)
        for way in options.ways:
            both, new_only = WAYS[way]
            runs = [(options.old.resolve(), both), (options.new.resolve(), both + new_only)]
            pairs, weights = [], set()
            for number in range(options.rounds):
                pair = {}
                for run in runs[::-1] if number % 2 else runs:
                    pair[run[0]], hashed = seconds_per_step(run[0], options, folder, run[1])
                    weights.add(hashed)
                pairs.append(tuple(pair[build] for build, _ in runs))
            same = same and len(weights) == 1
            print(f"{way:>21}: {ratio_of(pairs)}, {1e3 * statistics.median(old for old, _ in pairs):.0f} and "
                  f"{1e3 * statistics.median(new for _, new in pairs):.0f} ms a step, "
                  f"{'the same weights' if len(weights) == 1 else 'OTHER WEIGHTS'}", flush=True)
    return same


def compare_allreduce(options):
    def start(build, transport):
        command = [build.resolve(), "bench", "allreduce", "--serve", "--json", "--transport", transport, "--ranks", options.workers,
                   "--timeout", 600]
        return competitors.Competitor(str(build), command, options.workers, pipes=False)

    for transport in options.allreduce:
        pairs = {size: [] for size in options.sizes}
        for number in range(options.starts):
            builds = (options.old, options.new) if number % 2 == 0 else (options.new, options.old)
            running = {build: start(build, transport) for build in builds}
            try:
                for size in options.sizes:
                    for _ in range(options.rounds):
                        pairs[size].append(tuple(running[build].measure(size, 0.05) for build in (options.old, options.new)))
            finally:
                for competitor in running.values():
                    competitor.close()
        for size in options.sizes:
            old, new = (statistics.median(pair[i] for pair in pairs[size]) for i in (0, 1))
            print(f"{transport:>6} {verdict.size_name(size):>8}: {ratio_of(pairs[size])}, {old:.2f} and {new:.2f} us", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ways", default=",".join(WAYS), type=lambda text: text.split(","))
    parser.add_argument("--allreduce", type=lambda text: text.split(","), help="transports: all-reduces instead of training")
    parser.add_argument("--sizes", default="8,1024,65536,1048576,26214400", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--starts", type=int, default=5, help="of the processes that all-reduce")
    options = parser.parse_args()
    if options.allreduce:
        compare_allreduce(options)
    elif not compare_training(options):
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()
