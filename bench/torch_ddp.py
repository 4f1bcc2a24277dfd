#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel over the backend lockstep beside DistributedDataParallel over Gloo, and
ExactDataParallel with one lane per worker, deterministic() and verified weights beside both. The three take turns in the same processes, a few steps each.
Prints milliseconds per step, and the median of the ratios of neighbouring turns with the quarters around it.

usage: torch_ddp.py [--workers 2,4] [--models wide,mlp,gpt,small] [--transport auto] [--python PYTHON] [--rounds 15] [--json]

PYTHON has PyTorch; without it an environment is made in build/bench_venv. The package is that of the source tree with
the library of build/release, or what PYTHON has installed with --installed. Gloo and lockstep reduce the same buckets;
before times are taken, their parameters are compared: they must be the same within rounding."""

import argparse
import functools
import itertools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build" / "release"))
MODELS = ("wide", "mlp", "gpt", "small")
REQUIRED, EXACT_COST = 1.3, 1.05
WARMUP = 3
WAYS = ("gloo", "lockstep", "exact")


def make(name):
    """A model, its batch, and how it is told in the table."""
    import torch
    from torch import nn

    if name in ("wide", "mlp"):
        # Many parameters for little arithmetic: communication takes most of a step, with `wide` nearly all of it.
        ends, middle, batch = {"wide": (1024, 4096, 2), "mlp": (512, 2048, 16)}[name]
        model = nn.Sequential(nn.Linear(ends, middle), nn.ReLU(), nn.Linear(middle, middle), nn.ReLU(), nn.Linear(middle, ends))
        return model, torch.randn(batch, ends)
    width, layers, length = {"gpt": (384, 6, 64), "small": (128, 4, 64)}[name]
    layer = dict(d_model=width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(**layer) for _ in range(layers)))
    return model, torch.randn(2, length, width)


def join(name, ways):
    """In a worker: joins the job. Returns its Gloo group, this worker's batch, and a model and its optimizer for each of `ways`."""
    import copy
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import lockstep.torch  # noqa: F401  the backend

    torch.set_num_threads(1)
    dist.init_process_group("lockstep", timeout=timedelta(seconds=60))
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(1)
    model, batch = make(name)
    models = {way: copy.deepcopy(model) for way in ways}
    return gloo, batch + dist.get_rank(), models, {way: torch.optim.SGD(models[way].parameters(), lr=1e-3) for way in ways}


def ddp_step(ddp, optimizer, batch):
    optimizer.zero_grad(set_to_none=True)
    ddp(batch).square().mean().backward()
    optimizer.step()


def turn(step, steps):
    """The seconds in which all workers have called `step` so often."""
    import time

    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return time.perf_counter() - began


def serve(options):
    """One worker. Rank 0 prints one JSON object."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import lockstep.torch

    gloo, batch, models, optimizers = join(options.serve, WAYS)
    workers = dist.get_world_size()
    ddp = {"gloo": DistributedDataParallel(models["gloo"], process_group=gloo),
           "lockstep": DistributedDataParallel(models["lockstep"])}
    lockstep.torch.deterministic()
    exact = lockstep.torch.ExactDataParallel(models["exact"], optimizers["exact"], lanes=workers)
    exact_steps = itertools.count(1)

    def step(way):
        if way != "exact":
            return ddp_step(ddp[way], optimizers[way], batch)
        exact.sum(next(exact_steps), lambda lane: models["exact"](batch).square().mean())
        optimizers["exact"].step()

    def turn_of(way, steps):
        torch.use_deterministic_algorithms(way == "exact")  # as somebody who trains in this way has it
        return turn(functools.partial(step, way), steps)

    for way in WAYS:
        turn_of(way, WARMUP)
    model_of = dict(models["gloo"].named_parameters())
    apart = {way: max(((p - model_of[name]).abs().max() / model_of[name].abs().max()).item()
                      for name, p in models[way].named_parameters()) for way in ("lockstep", "exact")}
    if max(apart.values()) > 1e-5:
        sys.exit(f"the parameters are apart from those over Gloo: {apart}")
    seconds = torch.tensor([min(turn_of(way, 1) for way in WAYS)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    steps = max(2, min(200, int(options.seconds / seconds.item())))
    times = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            times[way].append(turn_of(way, steps) / steps)
    if dist.get_rank() == 0:
        print(json.dumps({"model": options.serve, "parameters": sum(p.numel() for p in models["gloo"].parameters()), "workers": workers,
                          "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "transport": options.transport,
                          "apart": apart, "steps": steps, "times": times}), flush=True)
    exact.job.communicator.barrier()
    dist.destroy_process_group()


def start(command, workers, transport, library=None, **pipes):
    """The workers of one job; with `library` their package is that of the source tree."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "LOCKSTEP_TRANSPORT": transport, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if library:
        environment.update(PYTHONPATH=str(ROOT / "python"), LOCKSTEP_LIBRARY=str(library))
    return [subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, **pipes,
                             env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(workers)]


def measure(python, model, workers, options):
    command = [python, __file__, "--serve", model, "--rounds", options.rounds, "--seconds", options.seconds, "--transport",
               options.transport]
    ranks = start(command, workers, options.transport, None if options.installed else BUILD / "liblockstep.so")
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{model}, {workers} workers: ended with {[rank.returncode for rank in ranks]}")
    return json.loads(outputs[0].splitlines()[-1])


def ratio(over, under):
    """The median of the ratios of neighbouring turns, and the quarters around it."""
    pairs = sorted(a / b for a, b in zip(over, under))
    return [statistics.median(pairs), pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--models", default="wide,mlp,gpt,small", type=lambda text: text.split(","))
    parser.add_argument("--transport", default="auto", choices=("auto", "tcp", "shm"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    parser.add_argument("--python", help="an interpreter that has PyTorch")
    parser.add_argument("--installed", action="store_true", help="the package that PYTHON has, not that of the source tree")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    if not options.python:
        from step import torch_python

        options.python = torch_python()
    short, first = False, True
    for model in options.models:
        for workers in options.workers:
            found = measure(options.python, model, workers, options)
            times = found["times"]
            faster, cost = ratio(times["gloo"], times["lockstep"]), ratio(times["exact"], times["lockstep"])
            short |= faster[0] < REQUIRED or cost[0] > EXACT_COST
            if options.json:
                print(json.dumps({**found, "ratio": faster, "exact_cost": cost}), flush=True)
                continue
            if first:
                print(f"PyTorch {found['torch']}, {found['cores']} cores, one thread per worker, transport {options.transport}\n"
                      f"{'model':>6}{'params':>9}{'workers':>8}{'gloo ms':>9}{'ours ms':>9}{'exact ms':>9}"
                      f"{'ours / gloo':>22}{'exact costs':>24}")
                first = False
            ms = [1e3 * statistics.median(times[way]) for way in WAYS]
            print(f"{model:>6}{found['parameters'] / 1e6:>8.1f}M{workers:>8}{ms[0]:>9.1f}{ms[1]:>9.1f}{ms[2]:>9.1f}"
                  f"{faster[0]:>9.2f} ({faster[1]:.2f} to {faster[2]:.2f})"
                  f"{cost[0] - 1:>9.1%} ({cost[1] - 1:.1%} to {cost[2] - 1:.1%})", flush=True)
    sys.exit(short)


if __name__ == "__main__":
    main()
