#!/usr/bin/env python3
"""Lockstep beside its peers on this machine. Samples are taken alternately (ours, peer, ours, peer, ...);
a row's ratio is the median of the pairs' ratios, peer's time / ours, so higher is better, with its 95 % interval. The code is 1
when a row is missed: its whole interval lies below what verdict.py requires. Rows and limits:

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
import verdict
from competitors import Failed
from verdict import ALLREDUCE_SIZES, KIB, MIB, RANKS, size_name

# A peer that is slower than the best by this factor cannot become the best.
HOPELESS = 3.0


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

    def judged(self, competitor, name, key):
        """The ratio to a competitor, which the row calls `name`, and what is required of it; as `key`, `key`_required, ..."""
        row = verdict.allreduce_row(self.kind, self.transport, self.ranks, self.size, name)
        ratios = [theirs / ours for ours, theirs in self.pairs[competitor]]
        result = {key: statistics.median(ratios), f"{key}_interval": verdict.interval(ratios)}
        if requirement := verdict.REQUIREMENTS.get(row):
            verdict.record(row, ratios)
            result |= {f"{key}_required": requirement.required, f"{key}_wanted": requirement.wanted,
                       f"{key}_verdict": verdict.judge(ratios, requirement)}
        return result

    def result(self, bound):
        peers = [name for name in self.pairs if name != bound]
        best = min(peers, key=self.ratio, default=None)
        result = {"kind": self.kind, "transport": self.transport, "ranks": self.ranks, "bytes": self.size,
                  "ours_us": statistics.median(self.ours), "peer": best, "core_distance_ns": self.distance,
                  "pairs": len(self.pairs[best]) if best else 0}
        if best:
            result |= {"peer_us": self.median(best)}
            result |= self.judged(best, "our ring" if self.kind == "order" else "best peer", "ratio")
        if bound in self.pairs:
            result |= {"bound_us": self.median(bound)}
            result |= self.judged(bound, "raw TCP" if self.kind == "tcp" else "memory alone", "share")
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
        yield Group("shm", "shm", ranks, ours("shm"), shm, competitors.memory_bound), ALLREDUCE_SIZES
    for ranks in RANKS:
        yield Group("tcp", "tcp", ranks, ours("tcp"), tcp, competitors.raw_tcp), ALLREDUCE_SIZES
    for transport in ("tcp", "shm"):
        yield Group("order", transport, 4, ours(transport), [ours(transport, "ring", "ring")]), [25 * MIB]


HEADINGS = ["row", "size", "ours µs", "peer µs", "peer", "ratio", "95 %", "required", "wanted", "", "share of bound", "95 %", "",
            "core ns"]


def cells(result):
    def number(key, form="{:.2f}"):
        return form.format(result[key]) if result.get(key) is not None else ""

    def interval(key, form):
        return " to ".join(form.format(end) for end in result.get(key, ()))

    return [f"{result['kind']} {result['transport']} {result['ranks']}" if result["kind"] == "order"
            else f"{result['kind']} {result['ranks']}",
            size_name(result["bytes"]), number("ours_us", "{:.1f}" if result["ours_us"] >= 100 else "{:.2f}"),
            number("peer_us", "{:.1f}" if result.get("peer_us", 0) >= 100 else "{:.2f}"), result["peer"] or "none",
            number("ratio"), interval("ratio_interval", "{:.2f}"), number("ratio_required"), number("ratio_wanted"),
            result.get("ratio_verdict", ""), number("share", "{:.0%}"), interval("share_interval", "{:.0%}"),
            result.get("share_verdict", ""), str(result["core_distance_ns"])]


WIDTHS = [11, 8, 10, 10, 9, 6, 14, 8, 6, 12, 14, 14, 12, 7]


def print_text(row):
    print("  ".join(cell.rjust(width) if i not in (0, 9, 12) else cell.ljust(width)
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
    parser.add_argument("--pairs", type=int, help="samples of each per row, default 15")
    parser.add_argument("--seconds", type=float, help="per sample, default 0.1")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per row")
    form.add_argument("--markdown", action="store_true", help="a table for docs/benchmarks.md, at the end")
    options = parser.parse_args()
    pairs = options.pairs or (2 if options.quick else verdict.PAIRS)
    seconds = options.seconds or (0.05 if options.quick else 0.1)
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
    missed = [row for row in rows if "missed" in (row.get("ratio_verdict"), row.get("share_verdict"))]
    if not options.json:
        print(f"{len(rows)} rows, {len(missed)} missed what is required", file=sys.stderr)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"run.py: {failure}")
