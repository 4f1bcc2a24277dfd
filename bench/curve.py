#!/usr/bin/env python3
"""Whether our losses follow PyTorch's: the same first weights, the same tokens, step by step.

usage: bench/curve.py TOKENS [--model 124m] [--batch 16] [--steps 200] [--warmup 100] [--precision bf16] [--device cuda]
                      [--lockstep FILE] [--python python3] [--limit 0.005]
TOKENS: 16 bits each, little-endian. Exit code 1 when a loss is further from PyTorch's than the limit."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def losses(command):
    output = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line)["loss"] for line in output.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens")
    parser.add_argument("--model", default="124m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lockstep", default=ROOT / "build" / "cuda" / "lockstep")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--limit", type=float, default=0.005)
    options = parser.parse_args()
    common = ["--model", options.model, "--batch", options.batch, "--steps", options.steps, "--tokens", options.tokens,
              "--warmup", options.warmup, "--precision", options.precision, "--device", options.device]
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.f32"
        first = losses([options.lockstep, "bench", "step", *common, "--weights-out", weights])
        again = losses([options.lockstep, "bench", "step", *common])
        peer = losses([options.python, ROOT / "bench" / "peers" / "torch_step.py", *common, "--weights", weights])
    furthest, step = max((abs(ours - theirs) / theirs, i + 1) for i, (ours, theirs) in enumerate(zip(first, peer)))
    for i in sorted({0, 2, 9, 19, 49, 99, 149, len(first) - 1}):
        if i < len(first):
            print(f"step {i + 1}: ours {first[i]:.5f}, PyTorch {peer[i]:.5f} ({first[i] / peer[i] - 1:+.3%})")
    print(f"furthest in step {step}: {furthest:.3%}; the same run twice: {'the same losses' if first == again else 'NOT THE SAME'}")
    sys.exit(furthest > options.limit or first != again)


if __name__ == "__main__":
    main()
