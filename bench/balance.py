#!/usr/bin/env python3
"""What it brings that lanes follow speed: workers of which one has a third of the others' computing time, with and
without --balance; and what it costs where all are alike. The weights must be equal before anything is counted.

The measure is tokens/s over the sum of what the same workers reach one by one, each in a run of its own: 1 would be
lost time of nobody. Lanes are whole, so there is a bound below 1, which is printed beside it; and what the same runs of
their own reach when they run at the same time, because workers share the memory's bandwidth, the cache and the clock's
limits. Steps before the lanes have moved are not counted. Below each row is the time of its ranks, by phase.

Workers get their shares of computing time by the quota of a control group (version 1 or 2; needs root). Each has
--quota of a core, by default a core, which is no limit, or less where there are fewer cores than workers. A worker
that has used its quota stands still until the next --period begins, and everybody who waits for it then; short periods
make a share a speed. Where there are no control groups, the slow worker shares its core with two busy loops, and every
worker needs a core of its own.

The code is 1 when one of 4 workers is slow and the median of the rounds is short of what verdict.py requires, or all 4 are alike and
a lane moves or every round is slower with --balance.

usage: bench/balance.py [--workers 4] [--lanes-per-worker 8] [--model tiny] [--transport auto] [--steps 60] [--rounds 3]
  [--quota 0.5] [--period 10] [--case slow|alike] [--short] [--build DIR]"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

import verdict
from ddp import FLAGS, SHAPES, write_data
from step import BUILD

SLOW = 1 / 3


class Groups:
    """A control group for every worker, with a quota; None where there are none."""

    @staticmethod
    def make(shares, period):
        if os.geteuid() != 0:
            return None
        for root, first in (("/sys/fs/cgroup/cpu", True), ("/sys/fs/cgroup", False)):
            if not os.path.exists(f"{root}/{'cpu.cfs_quota_us' if first else 'cgroup.controllers'}"):
                continue
            groups = Groups(pathlib.Path(root))
            try:
                groups.divide(first, shares, period)
                return groups
            except OSError:  # not allowed here
                groups.close()
        return None

    def __init__(self, root):
        self.root = root
        self.paths = []

    def divide(self, first, shares, period):
        if not first:
            (self.root / "cgroup.subtree_control").write_text("+cpu")
        for rank, share in enumerate(shares):
            path = self.root / f"lockstep-bench-{os.getpid()}-{rank}"
            path.mkdir()
            self.paths.append(path)
            if share >= 1:
                continue  # its threads may use more than one core, as in any run
            quota = int(share * period)
            if first:
                (path / "cpu.cfs_period_us").write_text(str(period))
                (path / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (path / "cpu.max").write_text(f"{quota} {period}")

    def enter(self, rank):
        (self.paths[rank] / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        for path in self.paths:
            path.rmdir()


class Workers:
    """Starts workers, each with its share of computing time."""

    def __init__(self, shares, period):
        self.groups = Groups.make(shares, period)
        self.cores = sorted(os.sched_getaffinity(0))
        self.busy = []
        if self.groups:
            return
        if len(self.cores) < len(shares):
            sys.exit("there are no control groups here, and fewer cores than workers")
        for rank, share in enumerate(shares):
            if share == min(shares) != max(shares):
                loop = [sys.executable, "-c", "while True: pass"]
                self.busy += [subprocess.Popen(loop, preexec_fn=lambda core=self.cores[rank]: os.sched_setaffinity(0, {core}))
                              for _ in range(2)]

    def start(self, rank, command, environment):
        def prepare():
            if self.groups:
                self.groups.enter(rank)
            if len(self.cores) > rank and not self.groups:
                os.sched_setaffinity(0, {self.cores[rank]})
        return subprocess.Popen([str(word) for word in command], env={**os.environ, **environment}, preexec_fn=prepare,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def close(self):
        for loop in self.busy:
            loop.kill()
            loop.wait()
        if self.groups:
            self.groups.close()


def command(options, folder, lanes, steps, *more):
    shape = [word for pair in zip(FLAGS, SHAPES[options.model]) for word in pair]
    return [options.build / "lockstep", "train", "--data", folder / f"{options.model}.bin", *shape, "--steps", steps, "--global-batch", lanes,
            "--micro-batch", 1, "--threads", 1, "--eval-every", 0, "--verify-every", 0, "--log", "json", *more]


def finish(processes):
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"a worker failed: {outputs}")
    lines = outputs[0][0].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")], lines[-1]


def rate(rows):
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def show_phases(rows, label="rank"):
    for rank in range(len(rows[0]["phases"])):
        names = rows[0]["phases"][rank]
        means = {name: statistics.mean(row["phases"][rank][name] for row in rows) for name in names}
        print(f"    {label} {rank}: " + ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in means.items()) + " ms", flush=True)


def separate_rates(workers, options, folder, ranks, at_once=False):
    """Of every worker in a run of its own, with its share of time: tokens/s."""
    words = command(options, folder, options.lanes_per_worker, 5)
    if at_once:
        running = [workers.start(rank, words, {}) for rank in range(ranks)]
        return [rate(finish([process])[0][2:]) for process in running]
    rates = []
    for rank in range(ranks):
        rows = finish([workers.start(rank, words, {})])[0][2:]
        show_phases(rows, f"worker {rank} apart, rank")
        rates.append(rate(rows))
    return rates


def joint(workers, options, folder, ranks, balance):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    words = command(options, folder, options.lanes_per_worker * ranks, options.steps, "--transport", options.transport,
                    "--balance" if balance else "--no-balance")
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rows, weights = finish([workers.start(rank, words, {**common, "RANK": str(rank)}) for rank in range(ranks)])
    return rows, weights


def bound(rates, lanes):
    """The best share of the sum that whole lanes allow."""
    ranks = len(rates)
    counts = [1] * ranks
    for _ in range(lanes - ranks):  # one lane after another to whom it costs least
        rank = min(range(ranks), key=lambda r: (counts[r] + 1) / rates[r])
        counts[rank] += 1
    return lanes / max(count / speed for count, speed in zip(counts, rates)) / sum(rates)


def measure(name, shares, options, folder):
    """Of every run with --balance: its share of the sum of separate rates, how many of its steps moved lanes, and, where all
    are alike, its rate over that of the run without --balance after it."""
    ranks = len(shares)
    workers = Workers(shares, int(1e3 * options.period))
    alike = min(shares) == max(shares)
    ways = (True,) if options.short and not alike else (True, False)
    try:
        results = {balance: [] for balance in ways}
        sums, bounds, at_once = [], [], []
        for number in range(options.rounds):
            rates = separate_rates(workers, options, folder, ranks)
            sums.append(sum(rates))
            bounds.append(bound(rates, options.lanes_per_worker * ranks))
            at_once.append(sum(separate_rates(workers, options, folder, ranks, at_once=True)) / sums[-1])
            hashes = set()
            for balance in ways[::-1] if number % 2 else ways:  # neither is always the first
                rows, weights = joint(workers, options, folder, ranks, balance)
                hashes.add(weights)
                results[balance].append((rate(rows[options.steps // 2:]) / sums[-1], rows))
                print(f"{name}, {'--balance' if balance else '--no-balance'}: {results[balance][-1][0]:.2f}", flush=True)
            if len(hashes) != 1:
                sys.exit(f"{name}: the weights differ: {hashes}")
        for balance in ways:
            ratios = [ratio for ratio, _ in results[balance]]
            lanes = [row["lanes"] for _, rows in results[balance] for row in rows[-1:]]
            moves = [sum(a["lanes"] != b["lanes"] for a, b in zip(rows, rows[1:])) for _, rows in results[balance]]
            print(f"{name}, {'--balance' if balance else '--no-balance'}: {statistics.median(ratios):.2f} of the sum of separate rates "
                  f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); lanes at the end {lanes}; moves {moves}", flush=True)
            show_phases(results[balance][-1][1][options.steps // 2:])
            if balance:
                balanced = ratios, moves
        print(f"{name}: separate rates add up to {statistics.median(sums):.0f} tokens/s; whole lanes allow {statistics.median(bounds):.2f}; "
              f"runs of their own at the same time reach {statistics.median(at_once):.2f} of that sum", flush=True)
        beside = [moving / kept for (moving, _), (kept, _) in zip(results[True], results[False])] if alike else []
        return *balanced, beside
    finally:
        workers.close()


def judge(row, ratios):
    """Whether the median is short of what is required, as in survival.py: of few rounds the interval has all."""
    verdict.tell(row, ratios)
    return statistics.median(ratios) < verdict.REQUIREMENTS[row].required


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lanes-per-worker", type=int, default=8)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=verdict.BALANCE_ROUNDS)
    parser.add_argument("--quota", type=float)
    parser.add_argument("--period", type=float, default=10, help="of a quota, in milliseconds")
    parser.add_argument("--case", choices=("slow", "alike"), action="append", help="only this one")
    parser.add_argument("--transport", choices=("auto", "tcp", "shm"), default="auto")
    parser.add_argument("--short", action="store_true", help="with a slow worker no runs without --balance")
    parser.add_argument("--build", type=pathlib.Path, default=BUILD)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    quota = options.quota or min(1.0, 0.8 * cores / options.workers)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_data(options.model, folder)
        print(f"{options.workers} workers of {quota:.2f} cores each in periods of {options.period:g} ms, {options.lanes_per_worker} lanes per worker, "
              f"model {options.model}, transport {options.transport}", flush=True)
        cases = options.case or ["slow", "alike"]
        missed, required = False, options.workers == 4
        if "slow" in cases:
            ratios, _, _ = measure("one at a third", [quota] * (options.workers - 1) + [quota * SLOW], options, folder)
            missed |= required and judge(verdict.BALANCE_ROW, ratios)
        if "alike" in cases:
            _, moves, beside = measure("all alike", [quota] * options.workers, options, folder)
            missed |= required and verdict.tell(verdict.ALIKE_ROW, [1 - max(moves) / options.steps])
            # What costs nothing has its median on either side of 1: only the interval tells.
            missed |= required and verdict.tell(verdict.ALIKE_COST_ROW, beside)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
