#!/usr/bin/env python3
"""What the project requires of its benchmarks, and whether a run reached it.

A row is a ratio, ours / theirs as rates, so more is better. It is the median over alternating pairs, with the interval that
holds the true median in 95 of 100 runs: order statistics of the pairs, whatever their distribution. A row is missed when the
whole interval lies below what is required.

Scripts call record(); with $LOCKSTEP_BENCH_ROWS it also goes to that file.
usage: bench/verdict.py FILE    prints every row that is required, then those that were missed; the code is then 1"""

import json
import math
import os
import statistics
import sys
from typing import NamedTuple, Optional

KIB, MIB = 1024, 1024 * 1024
ALLREDUCE_SIZES = [8, KIB, 64 * KIB, MIB, 4 * MIB, 25 * MIB, 64 * MIB, 256 * MIB]
RANKS = [2, 4]
PAIRS = 15  # of a row that is to be judged
BUILD_SECONDS = 180
START_SECONDS = 1
SURVIVAL_ROUNDS = 5
SURVIVAL_ROWS = {"kill": "a worker is killed: a step and 0.5 s / until the next step",
                 "stop": "a worker is stopped: a step, the timeout and 0.5 s / until the next step",
                 "join": "a worker joins, 500 MB of state: 1 s / pause of the others"}
BALANCE_ROUNDS = 3
BALANCE_ROW = "balance, one of 4 workers at a third / sum of separate rates"
ALIKE_ROW = "balance, 4 workers alike: steps that move no lane / steps"
ALIKE_COST_ROW = "balance, 4 workers alike: --balance / --no-balance"


class Requirement(NamedTuple):
    row: str
    required: Optional[float]
    wanted: Optional[float] = None
    needs: str = ""  # what this machine may not have
    pairs: int = PAIRS  # fewer are not judged


def size_name(size):
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def allreduce_row(kind, transport, ranks, size, beside):
    kind = kind if kind == transport else f"{kind} {transport}"
    return f"{kind} {ranks} ranks {size_name(size)} / {beside}"


def allreduce_limits(kind, ranks, size):
    """Required and wanted ratio to the best peer, then required and wanted share of the bound (None: no claim)."""
    if kind == "order":
        return 0.9, 1.0, None, None
    if kind == "tcp" and size <= KIB:
        return 1.2, 1.5, None, None
    if kind == "tcp":
        return (1.2, 1.25, 0.85, 0.90) if ranks == 2 and size <= 4 * MIB else (1.0, 1.25, 0.75, 0.90)
    if size <= 64 * KIB:
        return 1.0, 1.2, None, None
    if size <= 4 * MIB:
        return 1.1, 1.5, None, None
    return (1.4, 1.8, None, None) if size <= 25 * MIB else (2.0, 3.5, None, 0.60)


def _requirements():
    for kind, bound in (("shm", "memory alone"), ("tcp", "raw TCP")):
        for ranks in RANKS:
            for size in ALLREDUCE_SIZES:
                ratio, wanted, share, share_wanted = allreduce_limits(kind, ranks, size)
                yield Requirement(allreduce_row(kind, kind, ranks, size, "best peer"), ratio, wanted)
                if share_wanted:
                    yield Requirement(allreduce_row(kind, kind, ranks, size, bound), share, share_wanted)
    for transport in ("tcp", "shm"):
        yield Requirement(allreduce_row("order", transport, 4, 25 * MIB, "our ring"), 0.9, 1.0)
    for rate in (1, 10):
        for shape in ("2x2", "3x2", "2x4"):
            yield Requirement(f"hosts {shape} {rate} Gbit/s two_level / link or raw TCP", 0.90)
            yield Requirement(f"hosts {shape} {rate} Gbit/s two_level / Open MPI", 1.2)
            yield Requirement(f"hosts {shape} {rate} Gbit/s by default / Open MPI", 1.2)
        for shape in ("2x1", "2x2", "3x2", "2x4"):
            # A code of single numbers gains a fifth of gradients in f32 (docs/decisions/wire_compression.md).
            yield Requirement(f"hosts {shape} {rate} Gbit/s by default / without compression", 1.1 if rate == 1 else 0.95,
                              1.25 if rate == 1 else 1.0)
    yield Requirement("hosts 4x1 1 Gbit/s / link", 0.90)
    yield Requirement("hosts 2x1 1 Gbit/s plain / encrypted", 0.99)
    yield Requirement("hosts 2x1 10 Gbit/s plain / encrypted", 0.85)
    for model in ("tiny", "small"):
        for transport in ("tcp", "shm"):
            yield Requirement(f"weak scaling {model} {transport}, 2 workers / 2 x one", 0.95)
    for model, share, ratio in (("tiny", 0.80, 1.4), ("small", 0.85, 1.25)):
        for threads in (1, 2):
            yield Requirement(f"step {model} {threads} threads / best product", share)
        for threads in (1, 2):
            yield Requirement(f"step {model} {threads} threads / PyTorch", ratio)
        yield Requirement(f"step {model} 2 threads / 1 thread", 1.9)
    yield Requirement("checkpoint save / write and sync", 0.95)
    for what in ("load", "verify"):
        yield Requirement(f"checkpoint {what} / plain read into new memory", 0.80)
        yield Requirement(f"checkpoint {what} / plain read into memory that is there", None)
    yield Requirement("1 GB of tokens with a kept hash: 1 s / until the first step is done", 1.0)
    for event in SURVIVAL_ROWS.values():
        yield Requirement(event, 1.0, pairs=SURVIVAL_ROUNDS)
    yield Requirement(BALANCE_ROW, 0.85, 0.92, pairs=BALANCE_ROUNDS)
    yield Requirement(ALIKE_ROW, 1.0, pairs=1)
    yield Requirement(ALIKE_COST_ROW, 1.0, pairs=BALANCE_ROUNDS)
    yield Requirement(f"make build from nothing: {BUILD_SECONDS} s / time", 1.0, needs="bench/files.py --build", pairs=1)
    for model in ("124m", "350m"):
        yield Requirement(f"step {model} bf16 / PyTorch", 1.0, needs="a GPU: scripts/gpu.sh", pairs=5)
    yield Requirement("tcp 8 ranks 1 KiB / Gloo", 1.0, needs="16 cores: bench/gloo_torch.py")


REQUIREMENTS = {requirement.row: requirement for requirement in _requirements()}


def interval(values):
    """The order statistics between which the median lies with 95 %; all of the values where they are too few for that."""
    ordered, count = sorted(values), len(values)
    cut, below = 0, 0.0  # so many values at either end are outside
    while True:
        below += math.comb(count, cut) / 2**count
        if below > 0.025:
            break
        cut += 1
    cut = max(cut, 1)
    return ordered[cut - 1], ordered[count - cut]


def judge(values, requirement):
    """One or two words. Only "missed" is a failure."""
    low, high = interval(values)
    if len(values) < requirement.pairs:
        return f"{len(values)} pairs are too few"
    if requirement.required is not None and high < requirement.required:
        return "missed"
    if requirement.wanted is not None and statistics.median(values) >= requirement.wanted:
        return "wanted"
    if requirement.required is None:
        return "told only" if requirement.wanted is None else "below wanted"
    return "required" if low >= requirement.required else "not decided"


def cells(row, values):
    requirement = REQUIREMENTS[row]
    limits = [f"{limit:.2f}" if limit is not None else "" for limit in (requirement.required, requirement.wanted)]
    if not values:
        return [row, "", "", *limits, "not measured here" + (f": needs {requirement.needs}" if requirement.needs else "")]
    low, high = interval(values)
    return [row, f"{statistics.median(values):.3f}", f"{low:.3f} to {high:.3f}", *limits, judge(values, requirement)]


HEADINGS = ["row", "ratio", "95 %", "required", "wanted", "verdict"]
WIDTHS = [70, 8, 16, 8, 6, 0]


def print_row(row):
    print("  ".join(cell.ljust(width) if i in (0, 5) else cell.rjust(width)
                    for i, (cell, width) in enumerate(zip(row, WIDTHS))).rstrip(), flush=True)


def record(row, values):
    """Keeps the ratios of a row for the table at the end. Returns whether it was missed."""
    requirement = REQUIREMENTS[row]
    values = list(values)
    if not values:
        return False
    if path := os.environ.get("LOCKSTEP_BENCH_ROWS"):
        with open(path, "a") as file:
            file.write(json.dumps({"row": row, "ratios": values}) + "\n")
    return judge(values, requirement) == "missed"


def tell(row, values):
    """record(), and a line of the table."""
    missed = record(row, values)
    print_row(cells(row, values))
    return missed


def read_rows(path):
    """The last measurement of every row."""
    with open(path) as file:
        return {each["row"]: each["ratios"] for each in map(json.loads, file)}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    measured = read_rows(sys.argv[1])
    print_row(HEADINGS)
    for row in REQUIREMENTS:
        print_row(cells(row, measured.get(row, [])))
    missed = [row for row, values in measured.items() if judge(values, REQUIREMENTS[row]) == "missed"]
    print(f"\n{len(REQUIREMENTS)} rows, {len(measured)} measured, {len(missed)} missed")
    for row in missed:
        print_row(cells(row, measured[row]))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
