#!/usr/bin/env python3
"""What files cost: checkpoints beside plain reads and writes of the same files, and how soon training begins on a token file of
1 GB whose hash is kept beside it. The code is 1 when a row is missed that verdict.py requires.

usage: bench/files.py [--folder DIR] [--model small] [--rounds 15] [--build]
--build also times `make build` from nothing, without a compiler cache, in a build folder of its own."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import verdict
from step import BUILD, ROOT

TOKENS = 500_000_000  # of 16 bits: 1 GB
SHAPE = ["--vocab", 256, "--hidden", 32, "--layers", 1, "--heads", 1, "--kv-heads", 1, "--intermediate", 64, "--context", 32]


def seconds(command, **options):
    begin = time.monotonic()
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, **options)
    return time.monotonic() - begin


def checkpoints(folder, options):
    done = subprocess.run([BUILD / "bench" / "checkpoint", folder, options.model, str(options.rounds), "--json"], check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {row["row"]: row["ratios"] for row in map(json.loads, done.stdout.splitlines()) if row}


def start(folder, options):
    """The first run hashes all tokens and keeps the hash; it is not counted."""
    data = folder / "tokens.bin"
    block = bytes(byte for i in range(1 << 20) for byte in ((i * 2654435761 >> 8) & 255, 0))
    with open(data, "wb") as file:
        for at in range(0, 2 * TOKENS, len(block)):
            file.write(block[:min(len(block), 2 * TOKENS - at)])
    time.sleep(1.5)  # a hash that is kept within a second of the last change is not believed
    command = [BUILD / "lockstep", "train", "--data", data, *SHAPE, "--steps", 1, "--global-batch", 1, "--micro-batch", 1,
               "--eval-every", 0, "--threads", 1]
    times = [seconds(command, stderr=subprocess.DEVNULL) for _ in range(options.rounds + 1)][1:]
    return [verdict.START_SECONDS / each for each in times]


def build(folder):
    environment = {**os.environ, "CCACHE_DISABLE": "1"}
    configure = ["cmake", "--preset", "release", "-B", folder / "build"]
    make = ["cmake", "--build", folder / "build", "-j", os.cpu_count(), "--target", "lockstep"]
    return [verdict.BUILD_SECONDS / sum(seconds(command, env=environment, cwd=ROOT) for command in (configure, make))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=ROOT / "build", type=pathlib.Path, help="on the disk to be measured")
    parser.add_argument("--model", default="small")
    parser.add_argument("--rounds", type=int, default=verdict.PAIRS)
    parser.add_argument("--build", action="store_true")
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = pathlib.Path(name)
        rows = checkpoints(folder, options)
        rows["1 GB of tokens with a kept hash: 1 s / until the first step is done"] = start(folder, options)
        if options.build:
            rows[f"make build from nothing: {verdict.BUILD_SECONDS} s / time"] = build(folder)
    for row, ratios in rows.items():
        missed |= verdict.tell(row, ratios)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
