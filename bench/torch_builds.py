#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel over builds of Lockstep in turn, over Gloo, and with a hook that exchanges nothing, which
is what no backend can beat. All processes live side by side; those that are not measured sleep. Prints milliseconds
per step, and ratios of neighbouring turns: the median and the quarters around it.

usage: bench/torch_builds.py BUILD... [--workers 8] [--models wide,mlp] [--transport auto] [--rounds 11] [--seconds 0.5] [--python PYTHON]
A BUILD is a folder with a liblockstep.so, the first the one that others are compared with; PYTHON has PyTorch. The Python
package is that of the source tree for all."""

import argparse
import functools
import os
import pathlib
import statistics
import subprocess
import sys

from torch_ddp import WARMUP, ddp_step, join, ratio, start, turn

WAYS = ("gloo", "lockstep", "none")


def serve(name):
    """One worker of one build. Carries out the turns "WAY STEPS" of its standard input; rank 0 prints what they took."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    gloo, batch, models, optimizers = join(name, WAYS)
    ddp = {way: DistributedDataParallel(models[way], process_group=gloo if way == "gloo" else None) for way in WAYS}

    def exchange_nothing(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp["none"].register_comm_hook(None, exchange_nothing)
    for line in sys.stdin:
        way, steps = line.split()
        seconds = turn(functools.partial(ddp_step, ddp[way], optimizers[way], batch), int(steps))
        if dist.get_rank() == 0:
            print(seconds, flush=True)
    dist.destroy_process_group()


class Workers:
    """The workers of one build."""

    def __init__(self, build, model, options):
        self.ranks = start([options.python, __file__, "--serve", model], options.workers, options.transport,
                           (build / "liblockstep.so").resolve(), stdin=subprocess.PIPE)

    def turn(self, way, steps):
        """Milliseconds per step."""
        for rank in self.ranks:
            rank.stdin.write(f"{way} {steps}\n")
            rank.stdin.flush()
        answer = self.ranks[0].stdout.readline()
        if not answer:
            sys.exit("a worker has ended")
        return 1e3 * float(answer) / steps

    def close(self):
        for rank in self.ranks:
            rank.stdin.close()
        if any(rank.wait() for rank in self.ranks):
            sys.exit("a worker has failed")


def ratio_text(over, under):
    median, low, high = ratio(over, under)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*" if "--serve" in sys.argv else "+", type=pathlib.Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--models", default="wide,mlp", type=lambda text: text.split(","))
    parser.add_argument("--transport", default="auto", choices=("auto", "tcp", "shm"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if len(set(options.builds)) < len(options.builds):
        parser.error("the same build twice")
    print(f"{options.workers} workers, {len(os.sched_getaffinity(0))} cores, transport {options.transport}")
    for model in options.models:
        builds = {str(build): Workers(build, model, options) for build in options.builds}
        first, last = list(builds)[0], list(builds)[-1]
        turns = [(last, "gloo"), *((build, "lockstep") for build in builds), (last, "none")]
        for build, way in turns:
            builds[build].turn(way, WARMUP)
        steps = max(2, round(1e3 * options.seconds / builds[last].turn("gloo", 2)))
        times = {turn: [] for turn in turns}
        for number in range(options.rounds):
            for turn in turns if number % 2 == 0 else turns[::-1]:
                times[turn].append(builds[turn[0]].turn(turn[1], steps))
        for workers in builds.values():
            workers.close()
        gloo, none = times[last, "gloo"], times[last, "none"]
        print(f"{model}: gloo {statistics.median(gloo):.1f} ms per step; no exchange {statistics.median(none):.1f}, "
              f"gloo / that {ratio_text(gloo, none)}")
        for build in builds:
            ours = times[build, "lockstep"]
            print(f"  {build}: {statistics.median(ours):.1f} ms per step, gloo / ours {ratio_text(gloo, ours)}, "
                  f"{first} / this {ratio_text(times[first, 'lockstep'], ours)}", flush=True)


if __name__ == "__main__":
    main()
