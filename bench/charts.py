#!/usr/bin/env python3
"""Draws the bar charts of docs/benchmarks.md from the rows of measured runs (docs/measurements/*.jsonl, as `run.py --json`,
`gloo_torch.py --json` and `step.py --json` print them).

usage: bench/charts.py [--check]   --check: draws nothing, fails if a picture is not what its rows say"""

import html
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "measurements"
PICTURES = ROOT / "docs" / "images"

WIDTH, LABEL, VALUE = 760, 250, 70
BAR, GAP, TOP, BOTTOM = 16, 7, 44, 34
STYLE = """text { font: 13px sans-serif; fill: #24292f } .title { font-weight: bold } .note { font-size: 12px }
.bar { fill: #2f6f9f } .less { fill: #b5651d } .even { stroke: #24292f; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #d7dde3 } .bar { fill: #6fb1e0 } .less { fill: #e0a060 } .even { stroke: #d7dde3 } }"""


def rows_of(name):
    return [json.loads(line) for line in (ROWS / name).read_text(encoding="utf-8").splitlines()]


def size_name(count):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count // unit} {name}"
    return f"{count} B"


def chart(title, note, bars):
    """`bars`: (label, ratio). Lengths are logarithms: a peer that is twice as fast is as far from the middle as one twice as slow."""
    low = min(0.8, *(ratio for _, ratio in bars))
    high = max(2, *(ratio for _, ratio in bars))
    span = WIDTH - LABEL - VALUE

    def x(ratio):
        return LABEL + span * math.log(ratio / low) / math.log(high / low)

    height = TOP + len(bars) * (BAR + GAP) + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
             f"<title>{html.escape(title)}</title>", f"<style>{STYLE}</style>",
             f'<text class="title" x="8" y="20">{html.escape(title)}</text>']
    for i, (label, ratio) in enumerate(bars):
        y = TOP + i * (BAR + GAP)
        left, right = sorted((x(1), x(ratio)))
        kind = "bar" if ratio >= 1 else "less"
        parts += [f'<text x="{LABEL - 10}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>',
                  f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" height="{BAR}"/>',
                  f'<text x="{right + 6:.1f}" y="{y + 13}">{ratio:.2f}</text>']
    bottom = height - BOTTOM
    parts += [f'<line class="even" x1="{x(1):.1f}" y1="{TOP - 8}" x2="{x(1):.1f}" y2="{bottom + 4}"/>',
              f'<text class="note" x="{x(1):.1f}" y="{bottom + 20}" text-anchor="middle">{html.escape(note)}</text>', "</svg>", ""]
    return "\n".join(parts)


def all_charts():
    names = {"shm": "shared memory", "tcp": "TCP"}
    for kind, name in names.items():
        rows = [row for row in rows_of("allreduce_2_cores.jsonl") if row["kind"] == kind]
        yield f"allreduce_{kind}.svg", chart(f"All-reduce, {name}, 2 cores: our speed over the best peer's",
                                             "1 = the best of Open MPI, MPICH and Gloo",
                                             [(f"{row['ranks']} ranks, {size_name(row['bytes'])}", row["ratio"]) for row in rows])
    rows = rows_of("allreduce_gloo_16_cores.jsonl")
    yield "allreduce_gloo.svg", chart("All-reduce, 8 ranks over TCP, 16 cores: our speed over PyTorch's Gloo", "1 = Gloo",
                                      [(size_name(row["bytes"]), row["ratio"]) for row in rows])
    models = {"tiny": "hidden 256", "small": "hidden 512", "124m": "162M", "350m": "432M"}
    bars = [(f"{row['precision']}, {models[row['model']]}, " + ("H200" if row.get("gib") else f"{row['threads']} threads" if row["threads"] > 1
                                                        else "1 thread"), row["ratio"]) for row in rows_of("step.jsonl")]
    yield "step.svg", chart("A training step: our tokens per second over PyTorch's", "1 = PyTorch", bars)


def main():
    check = sys.argv[1:] == ["--check"]
    wrong = []
    for name, text in all_charts():
        path = PICTURES / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            wrong.append(name)
    if wrong:
        sys.exit(f"not what the measured rows say: {', '.join(wrong)}; bench/charts.py draws them")


if __name__ == "__main__":
    main()
