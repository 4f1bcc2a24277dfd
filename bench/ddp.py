#!/usr/bin/env python3
"""Data-parallel training on the CPU, ours over TCP beside PyTorch's DistributedDataParallel over Gloo: same model,
weights, data, batch per worker and threads, in turn. The losses of the first steps must agree before anything is
counted. Weak scaling is the tokens/s of N workers over N times those of one, in the same run; its limit is that of N
runs of one worker at once, each on its cores, which share the machine and say nothing to each other. The code is 1 when what is
required is missed.

usage: bench/ddp.py [--models tiny,small] [--workers 1,2] [--transport tcp] [--steps 8] [--rounds 3]
The first run makes build/bench_venv with PyTorch, as bench/step.py does; --python names another interpreter."""

import argparse
import json
import os
import pathlib
import socket
import statistics
import struct
import subprocess
import sys
import tempfile

import verdict
from step import BUILD, ROOT, TOLERANCE, torch_python

SHAPES = {  # vocab, hidden, layers, heads, kv_heads, intermediate, context
    "tiny": (4096, 256, 6, 8, 4, 768, 256),
    "small": (8192, 512, 8, 8, 8, 1408, 512),
}
FLAGS = ("--vocab", "--hidden", "--layers", "--heads", "--kv-heads", "--intermediate", "--context")
BATCH = 4  # sequences per worker, one lane each
REQUIRED = {"tiny": 1.25, "small": 1.1}
WARMUP = 2  # steps that are not counted


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def share_of_cores(rank, workers):
    """The same cores that our launcher gives to a rank."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    return set(cores[rank * each:(rank + 1) * each]) if each else set(cores)


def write_data(model, folder):
    """Samples that are all alike: one period of CONTEXT tokens, again and again."""
    vocab, context = SHAPES[model][0], SHAPES[model][-1]
    period = [((i * 2654435761 & 0xFFFFFFFF) >> 8) % vocab for i in range(context)]
    path = folder / f"{model}.bin"
    path.write_bytes(struct.pack(f"<{context}H", *period) * 400)
    return path


def start_ours(model, workers, options, folder, out, cores):
    shape = [str(word) for pair in zip(FLAGS, SHAPES[model]) for word in pair]
    command = [BUILD / "lockstep", "train", "--data", folder / f"{model}.bin", *shape, "--steps", options.steps,
               "--global-batch", BATCH * workers, "--micro-batch", BATCH, "--threads", options.threads, "--lr", "3e-4",
               "--schedule", "constant", "--warmup", 0, "--eval-every", 0, "--precision", options.precision,
               "--workers", workers, "--transport", options.transport, "--out", out, "--overwrite", "--save-every", 0, "--log", "plain",
               *options.ours]
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            preexec_fn=lambda: os.sched_setaffinity(0, cores))


def rows_of(process, out):
    if process.wait() != 0:
        sys.exit("lockstep train failed")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "event" not in row]


def run_ours(model, workers, options, folder):
    out = folder / "ours"
    cores = share_of_cores(0, 2) if workers == 1 else os.sched_getaffinity(0)
    rows = rows_of(start_ours(model, workers, options, folder, out, cores), out)
    exposed = statistics.median(max(p["communication"] for p in row["phases"]) for row in rows[WARMUP:])
    return {"losses": [row["loss"] for row in rows], "seconds": [row["seconds"] for row in rows], "exposed": exposed}


def run_apart(model, workers, options, folder):
    """Tokens/s of so many runs of one worker, added up."""
    outs = [folder / f"apart{i}" for i in range(workers)]
    runs = [start_ours(model, 1, options, folder, out, share_of_cores(i, workers)) for i, out in enumerate(outs)]
    seconds = [[row["seconds"] for row in rows_of(run, out)] for run, out in zip(runs, outs)]
    return sum(tokens_per_second(model, 1, {"seconds": each}) for each in seconds)


def run_torch(model, workers, options, folder, python):
    command = [str(word) for word in (
        python, ROOT / "bench" / "peers" / "torch_step.py", "--model", model, "--batch", BATCH, "--threads",
        options.threads, "--precision", options.precision, "--weights", folder / f"{model}.f32", "--steps", options.steps)]
    port, ranks = str(free_port()), []
    for rank in range(workers):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": port, "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                      preexec_fn=lambda: os.sched_setaffinity(0, share_of_cores(rank, max(2, workers)))))
    output = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("PyTorch failed")
    return json.loads(output[0])


def tokens_per_second(model, workers, run):
    return workers * BATCH * SHAPES[model][-1] / statistics.median(run["seconds"][WARMUP:])


def compare(model, options, python, folder):
    write_data(model, folder)
    subprocess.run([BUILD / "lockstep", "bench", "step", "--model", model, "--batch", "1", "--seconds", "0.001",
                    "--weights-out", folder / f"{model}.f32"], check=True, stdout=subprocess.DEVNULL)
    rates = {}
    for _ in range(options.rounds):
        for workers in options.workers:
            ours = run_ours(model, workers, options, folder)
            rates.setdefault(("ours", workers), []).append(tokens_per_second(model, workers, ours))
            rates.setdefault(("exposed", workers), []).append(ours["exposed"])
            if workers > 1:
                rates.setdefault(("apart", workers), []).append(run_apart(model, workers, options, folder))
            if not python:
                continue
            theirs = run_torch(model, workers, options, folder, python)
            for mine, other in list(zip(ours["losses"], theirs["losses"]))[:3]:
                if abs(mine - other) > TOLERANCE[options.precision] * abs(other):
                    sys.exit(f"{model}, {workers} workers: loss {mine}, PyTorch says {other}")
            rates.setdefault(("torch", workers), []).append(tokens_per_second(model, workers, theirs))
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--workers", default="1,2", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="an interpreter that has PyTorch; 'none' leaves the peer out")
    parser.add_argument("ours", nargs="*", help="after --: more options of lockstep train")
    options = parser.parse_args()
    python = None if options.python == "none" else options.python or torch_python()
    short = False
    print(f"{'':>6}{'workers':>8}{'ours tok/s':>12}{'torch tok/s':>12}{'ratio':>7}{'scaling':>9}{'limit':>7}{'torch':>7}{'exposed':>9}")
    with tempfile.TemporaryDirectory() as name:
        for model in options.models.split(","):
            rates = compare(model, options, python, pathlib.Path(name))
            alone = {side: statistics.median(rates[side, 1]) for side in ("ours", "torch") if (side, 1) in rates}
            for workers in options.workers:
                ours = statistics.median(rates["ours", workers])
                row = f"{model:>6}{workers:>8}{ours:>12,.0f}"
                if python:
                    ratio = statistics.median(a / b for a, b in zip(rates["ours", workers], rates["torch", workers]))
                    short |= workers > 1 and ratio < REQUIRED[model]
                    row += f"{statistics.median(rates['torch', workers]):>12,.0f}{ratio:>7.2f}"
                else:
                    row += f"{'':>19}"
                for side, base, width in (("ours", "ours", 9), ("apart", "ours", 7), ("torch", "torch", 7)):
                    known = base in alone and (side, workers) in rates
                    scaling = statistics.median(rates[side, workers]) / workers / alone[base] if known else None
                    row += f"{scaling:>{width}.0%}" if known else " " * width
                print(row + f"{1e3 * statistics.median(rates['exposed', workers]):>6.1f} ms", flush=True)
            name = f"weak scaling {model} {options.transport}, 2 workers / 2 x one"
            if name in verdict.REQUIREMENTS and options.threads == 1 and {1, 2} <= set(options.workers):
                ratios = [two / 2 / one for one, two in zip(rates["ours", 1], rates["ours", 2])]
                short |= verdict.tell(name, ratios)
    sys.exit(short)


if __name__ == "__main__":
    main()
