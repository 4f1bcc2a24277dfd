#!/usr/bin/env python3
"""The whole table behind "one result to the bit": trains 50 steps for every combination of world size, transport, overlap,
threads and optimizer sharding, and compares the hashes of the weights. `make test` runs a covering subset.

usage: scripts/grid.py [--lockstep build/release/lockstep] [--steps 50]"""

import argparse
import collections
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

SIZES = (1, 2, 3, 4, 5, 8)
TRANSPORTS = ("local", "tcp", "shm", "mpi", "server")
SHAPE = ("--hidden 32 --layers 2 --heads 2 --intermediate 48 --context 32 --global-batch 22 --micro-batch 2 --bucket-mb 0.05 "
         "--eval-every 0 --verify-every 20 --log plain").split()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default=pathlib.Path(__file__).resolve().parent.parent / "build/release/lockstep")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    transports = [name for name in TRANSPORTS if name != "mpi" or shutil.which("mpirun")]
    hashes = collections.Counter()
    count, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text.txt"
        text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees.\n" for i in range(400)))
        for size, transport, overlap, threads, shard in itertools.product(SIZES, transports, (True, False), (1, 2), (False, True)):
            if transport == "server" and shard:
                continue
            words = [str(options.lockstep), "train", "--data", str(text), *SHAPE, "--steps", str(options.steps), "--workers",
                     str(size), "--transport", transport, "--threads", str(threads), "--overlap" if overlap else "--no-overlap"]
            run = subprocess.run(words + ["--shard-optimizer"] * shard, capture_output=True, text=True, timeout=300)
            match = re.search(r"^weights (blake3:[0-9a-f]{64})$", run.stdout, re.M)
            result = match[1] if match else f"exit code {run.returncode}: {run.stderr.strip().splitlines()[-1:]}"
            hashes[result] += 1
            count += 1
            print(f"{size} {transport:>6} overlap {overlap!s:>5} threads {threads} sharded {shard!s:>5}  {result[:23]}", flush=True)
    print(f"{count} runs in {time.monotonic() - begin:.0f} s, {len(hashes)} different results: {dict(hashes)}")
    sys.exit(len(hashes) != 1)


if __name__ == "__main__":
    main()
