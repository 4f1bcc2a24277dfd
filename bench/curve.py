#!/usr/bin/env python3
"""Whether our losses follow PyTorch's: the same first weights, the same tokens, step by step.

usage: bench/curve.py TOKENS [--model 124m] [--batch 64] [--steps 200] [--warmup 700] [--precision bf16] [--device cuda]
                      [--lockstep FILE] [--python python3] [--limit 0.005] [--eager]
TOKENS: 16 bits each, little-endian (bench/curve_tokens.py makes them). --eager also compares PyTorch with itself, compiled
and not: how far rounding alone takes two runs. Exit code 1 when a loss is further from PyTorch's than the limit, or two
runs of ours end with other weights."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(command, **more):
    """Losses, and the hash of the weights where it is told."""
    output = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, **more}).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    return [row["loss"] for row in rows if "loss" in row], [row["weights"] for row in rows if "weights" in row]


def compare(name, ours, theirs):
    """Prints the furthest steps; returns how far that is."""
    apart = sorted(((abs(a - b) / b, i + 1) for i, (a, b) in enumerate(zip(ours, theirs))), reverse=True)
    worst = ", ".join(f"{share:.3%} in step {step}" for share, step in apart[:3])
    print(f"{name}: {worst}; median {apart[len(apart) // 2][0]:.3%} of {len(apart)} steps", flush=True)
    return apart[0][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens")
    parser.add_argument("--model", default="124m")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=700)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lockstep", default=ROOT / "build" / "cuda" / "lockstep")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--limit", type=float, default=0.005)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    common = ["--model", options.model, "--batch", options.batch, "--steps", options.steps, "--tokens", options.tokens,
              "--warmup", options.warmup, "--precision", options.precision, "--device", options.device]
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.f32"
        first, first_hash = run([options.lockstep, "bench", "step", *common, "--weights-out", weights])
        again, again_hash = run([options.lockstep, "bench", "step", *common])
        torch = [options.python, ROOT / "bench" / "peers" / "torch_step.py", *common, "--weights", weights]
        peer, _ = run(torch)
        eager, _ = run(torch, TORCH_COMPILE_DISABLE="1") if options.eager else (None, None)
    for i in sorted({0, 2, 9, 19, 49, 99, 149, len(first) - 1}):
        if i < len(first):
            print(f"step {i + 1}: ours {first[i]:.5f}, PyTorch {peer[i]:.5f} ({first[i] / peer[i] - 1:+.3%})")
    furthest = compare("ours from PyTorch", first, peer)
    if eager:
        compare("PyTorch from itself, compiled and not", eager, peer)
    same = first == again and first_hash == again_hash
    print(f"the same run twice: {'the same losses and weights, ' + first_hash[0] if same else 'NOT THE SAME'}")
    sys.exit(furthest > options.limit or not same)


if __name__ == "__main__":
    main()
