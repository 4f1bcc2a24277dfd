#!/usr/bin/env python3
"""The examples of PyTorch end with the same weights at 1, 2, 3, 4 and 8 workers, over TCP and shared memory, twice."""
# ctest: TIMEOUT 600
# builds: release

import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from torch_workers import ROOT, need_torch, run_program

EXAMPLES = {
    "gpt.py": ("--steps", 3, "--batch", 1, "--context", 8, "--width", 16, "--layers", 1),
    "conv.py": ("--steps", 3, "--batch", 2, "--channels", 4),
}
PLACES = [(1, "auto"), (1, "auto"), *((workers, transport) for workers in (2, 3, 4, 8) for transport in ("tcp", "shm")), (3, "tcp")]


def main():
    need_torch()
    for name, arguments in EXAMPLES.items():
        seen = {}
        for workers, transport in PLACES:
            output = run_program(workers, ROOT / "examples" / "torch" / name, arguments, transport)
            weights = re.findall(r"^weights (blake3:[0-9a-f]{64})$", output, re.MULTILINE)
            if len(weights) != 1:
                sys.exit(f"{name}, {workers} workers over {transport}: {len(weights)} hashes\n{output}")
            print(f"{name}  {workers} workers  {transport:4}  {weights[0]}", flush=True)
            seen.setdefault(weights[0], []).append((workers, transport))
        if len(seen) != 1:
            sys.exit(f"{name}: the weights depend on the workers: {seen}")
        shorter = run_program(1, ROOT / "examples" / "torch" / name, ("--lanes", 9, *arguments))
        if next(iter(seen)) in shorter:
            sys.exit(f"{name}: another number of lanes gave the same weights")


if __name__ == "__main__":
    main()
