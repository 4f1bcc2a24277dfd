#!/usr/bin/env python3
"""Lockstep beside its peers on this machine. Samples are taken alternately (ours, peer, ours, peer, ...);
a row's ratio is the median of the pairs' ratios, peer's time / ours, so higher is better. Rows and limits:

  shm    shared memory, against the best MPI           bound: share of what memory alone needs
  tcp    loopback TCP, against the best MPI and Gloo   bound: share of what raw TCP needs for the same bytes
  order  the canonical order (our default) against our order-free ring
"""

import argparse
import json
import statistics
import subprocess
import sys

import competitors
from competitors import Failed

KIB, MIB = 1024, 1024 * 1024
SIZES = [8, KIB, 64 * KIB, MIB, 4 * MIB, 25 * MIB, 64 * MIB, 256 * MIB]
RANKS = [2, 4]
# A peer that is slower than the best by this factor cannot become the best.
HOPELESS = 3.0


def size_name(size):
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def limits(kind, size):
    """Required and wanted ratio, then required and wanted share of the bound (None: no claim)."""
    if kind == "order":
        return 0.9, 1.0, None, None
    if kind == "tcp":
        return (1.0, 1.5, None, None) if size <= KIB else (1.0, 1.25, 0.75, 0.90)
    if size <= 64 * KIB:
        return 1.0, 1.2, None, None
    if size <= 4 * MIB:
        return 1.1, 1.5, None, None
    return (1.4, 1.8, None, None) if size <= 25 * MIB else (2.0, 3.5, None, 0.60)


def verdict(value, required, wanted):
    if wanted is not None and value >= wanted:
        return "wanted"
    if required is None or value >= required:
        return "required" if required is not None else "below wanted"
    return "SHORT"


class Row:
    def __init__(self, kind, transport, ranks, size):
        self.kind, self.transport, self.ranks, self.size = kind, transport, ranks, size
        self.distance = competitors.core_distance()
        self.ours = []
        self.pairs = {}  # name -> [(ours, theirs)]

    def add(self, name, ours, theirs):
        self.ours.append(ours)
        self.pairs.setdefault(name, []).append((ours, theirs))

    def ratio(self, name):
        return statistics.median(theirs / ours for ours, theirs in self.pairs[name])

    def median(self, name):
        return statistics.median(theirs for _, theirs in self.pairs[name])

    def result(self, bound):
        peers = [name for name in self.pairs if name != bound]
        best = min(peers, key=self.ratio, default=None)
        required, wanted, bound_required, bound_wanted = limits(self.kind, self.size)
        result = {"kind": self.kind, "transport": self.transport, "ranks": self.ranks, "bytes": self.size,
                  "ours_us": statistics.median(self.ours), "peer": best, "core_distance_ns": self.distance,
                  "pairs": len(self.pairs[best]) if best else 0}
        if best:
            result |= {"peer_us": self.median(best), "ratio": self.ratio(best), "required": required,
                       "wanted": wanted, "verdict": verdict(self.ratio(best), required, wanted)}
        if bound in self.pairs:
            share = self.ratio(bound)
            result |= {"bound_us": self.median(bound), "share": share}
            if bound_wanted is not None:
                result |= {"share_required": bound_required, "share_wanted": bound_wanted,
                           "share_verdict": verdict(share, bound_required, bound_wanted)}
        return result


class Group:
    """The competitors of one kind and world size, all running, all but one asleep."""

    def __init__(self, kind, transport, ranks, ours, peers, bound=None):
        self.kind, self.transport, self.ranks = kind, transport, ranks
        self._ours, self._peers, self._bound = ours, peers, bound

    def run(self, sizes, pairs, seconds, report):
        running = {}
        ours = self._ours(self.ranks)
        try:
            for make in [*self._peers, *([self._bound] if self._bound else [])]:
                peer = make(self.ranks)
                running[peer.name] = peer
            bound = list(running)[-1] if self._bound else None
            for size in sizes:
                row = self._row(size, ours, running, bound, pairs, seconds)
                if row.ours:
                    report(row.result(bound))
        finally:
            for competitor in [ours, *running.values()]:
                competitor.close()

    def _row(self, size, ours, running, bound, pairs, seconds):
        row = Row(self.kind, self.transport, self.ranks, size)
        names = [name for name in running if name != bound or self._bound_applies(size)]
        for turn in range(pairs):
            for name in list(names):
                own = ours.measure(size, seconds)
                try:
                    row.add(name, own, running[name].measure(size, seconds))
                except Failed as failure:
                    print(f"left out: {failure}", file=sys.stderr)
                    running.pop(name).close()
                    names.remove(name)
            if turn == 0:
                peers = [name for name in names if name != bound]
                fastest = min((row.ratio(name) for name in peers), default=0)
                for name in peers:
                    if row.ratio(name) > HOPELESS * fastest:
                        names.remove(name)
        return row

    def _bound_applies(self, size):
        # Below these sizes the time is not that of moving bytes.
        return size >= (64 * KIB if self.kind == "tcp" else 64 * MIB)


def groups():
    def ours(transport, algorithm="auto", name="lockstep"):
        return lambda ranks: competitors.lockstep(transport, ranks, algorithm, name)

    def those_there(**makers):
        return [make for name, make in makers.items() if competitors.available(f"{name}_allreduce")]

    shm = those_there(openmpi=competitors.openmpi_shm, mpich=competitors.mpich_shm)
    tcp = those_there(openmpi=competitors.openmpi_tcp, mpich=competitors.mpich_tcp, gloo=competitors.gloo_ring)
    for ranks in RANKS:
        yield Group("shm", "shm", ranks, ours("shm"), shm, competitors.memory_bound), SIZES
    for ranks in RANKS:
        yield Group("tcp", "tcp", ranks, ours("tcp"), tcp, competitors.raw_tcp), SIZES
    for transport in ("tcp", "shm"):
        yield Group("order", transport, 4, ours(transport), [ours(transport, "ring", "ring")]), [25 * MIB]


HEADINGS = ["row", "size", "ours µs", "peer µs", "peer", "ratio", "required", "wanted", "", "share of bound", "",
            "core ns"]


def cells(result):
    def number(key, form="{:.2f}"):
        return form.format(result[key]) if result.get(key) is not None else ""

    return [f"{result['kind']} {result['transport']} {result['ranks']}" if result["kind"] == "order"
            else f"{result['kind']} {result['ranks']}",
            size_name(result["bytes"]), number("ours_us", "{:.1f}" if result["ours_us"] >= 100 else "{:.2f}"),
            number("peer_us", "{:.1f}" if result.get("peer_us", 0) >= 100 else "{:.2f}"), result["peer"] or "none",
            number("ratio"), number("required"), number("wanted"), result.get("verdict", ""),
            number("share", "{:.0%}"), result.get("share_verdict", ""), str(result["core_distance_ns"])]


WIDTHS = [11, 8, 10, 10, 9, 6, 8, 6, 12, 14, 12, 7]


def print_text(row):
    print("  ".join(cell.rjust(width) if i not in (0, 8, 10) else cell.ljust(width)
                    for i, (cell, width) in enumerate(zip(row, WIDTHS))).rstrip(), flush=True)


def print_markdown(rows):
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer, shorter samples: does it run?")
    parser.add_argument("--rows", default="shm,tcp,order", help="kinds of rows, default %(default)s; shm:2 for 2 ranks only")
    parser.add_argument("--sizes", help="only these, in bytes, e.g. 8,1024")
    parser.add_argument("--pairs", type=int, help="samples of each per row, default 5")
    parser.add_argument("--seconds", type=float, help="per sample, default 0.25")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per row")
    form.add_argument("--markdown", action="store_true", help="a table for docs/benchmarks.md, at the end")
    options = parser.parse_args()
    pairs = options.pairs or (2 if options.quick else 5)
    seconds = options.seconds or (0.05 if options.quick else 0.25)
    chosen = options.rows.split(",")
    only = [int(size) for size in options.sizes.split(",")] if options.sizes else None

    if not options.json and not options.markdown:
        print(subprocess.run([competitors.PROGRAMS / "memory_bound", "rates"], capture_output=True, text=True).stdout)
        print_text(HEADINGS)
    rows = []

    def report(result):
        rows.append(result)
        if options.json:
            print(json.dumps(result), flush=True)
        elif options.markdown:
            print("measured:", *cells(result)[:6], file=sys.stderr, flush=True)
        else:
            print_text(cells(result))

    for group, sizes in groups():
        if group.kind not in chosen and f"{group.kind}:{group.ranks}" not in chosen:
            continue
        group.run([size for size in sizes if not only or size in only], pairs, seconds, report)
    if options.markdown:
        print_markdown([cells(result) for result in rows])
    short = [row for row in rows if "SHORT" in (row.get("verdict"), row.get("share_verdict"))]
    if not options.json:
        print(f"{len(rows)} rows, {len(short)} short of what is required", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"run.py: {failure}")
