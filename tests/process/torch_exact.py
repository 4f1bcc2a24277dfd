#!/usr/bin/env python3
"""The examples of PyTorch end with the same weights at 1, 2, 3, 4 and 8 workers, over TCP and shared memory, twice; buckets of
any size, which travel while backward goes on, give the same weights, losses, counts and numbers."""
# ctest: TIMEOUT 600
# builds: release

import functools
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from torch_workers import ROOT, expect_raises, need_torch, run, run_program

EXAMPLES = {
    "gpt.py": ("--steps", 3, "--batch", 1, "--context", 8, "--width", 16, "--layers", 1),
    "conv.py": ("--steps", 3, "--batch", 2, "--channels", 4),
}
PLACES = [(1, "auto"), (1, "auto"), *((workers, transport) for workers in (2, 3, 4, 8) for transport in ("tcp", "shm")), (3, "tcp")]


LANES = 5


def train(bucket_bytes):
    """Prints, on every worker, all that is summed and what becomes of the weights."""
    import torch

    import lockstep.torch

    lockstep.torch.deterministic()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exact = lockstep.torch.ExactDataParallel(model, optimizer, lanes=LANES, numbers=2, bucket_bytes=bucket_bytes)
    ready, parts = exact._sum.ready, []
    exact._sum.ready = lambda *part: (parts.append(part), ready(*part))

    def compute(step, lane):
        outputs = model(torch.randn(lane + 1, 64, generator=exact.generator(step, lane)))
        return outputs.square().sum(), lane + 1, outputs.mean(), 0.1 * lane

    for step in range(1, 4):
        found = exact.sum(step, lambda lane: compute(step, lane))
        assert found.count == LANES * (LANES + 1) / 2 and len(found.numbers) == 2
        print(repr(found))
        optimizer.step()
    print(exact.hash())
    own = sum(1 for _ in exact._sum.own_lanes())
    assert len(parts) == 3 * own * (2 if bucket_bytes else 1), parts  # small buckets go while backward goes on


def train_on_a_dataset(loads):
    """Prints the weights, after epochs whose ends fall between two lanes. With `loads` another process reads what a lane trains on."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset, default_collate

    import lockstep.torch

    lockstep.torch.deterministic()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(23, 4, generator=torch.Generator().manual_seed(2)))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = lockstep.torch.ExactDataParallel(model, optimizer, lanes=LANES)
    sampler, steps = lockstep.torch.LaneSampler(len(data), batch=3, lanes=LANES), range(1, 8)
    batches = [[sampler(step, lane) for lane in range(LANES)] for step in steps]
    first = [index for lane in sum(batches, [])[:7] for index in lane]  # an epoch has 7 batches
    assert len(set(first)) == 21 and sampler(2, 2) != sampler(1, 0) and sampler(1, 0) == batches[0][0]
    for step, lane in ((0, 0), (1, LANES), (1, -1)):
        expect_raises(ValueError, lambda: sampler(step, lane), f"lane {lane} of step {step}")
    loader = iter(DataLoader(data, batch_sampler=[sampler(step, lane) for step in steps for lane in exact.own_lanes()], num_workers=1)) if loads else None
    for step in steps:
        exact.sum(step, lambda lane: model((next(loader) if loads else default_collate([data[i] for i in sampler(step, lane)]))[0]).square().sum())
        optimizer.step()
    print(exact.hash())


def datasets():
    seen = set()
    for workers, loads in ((1, False), (1, True), (2, True), (3, False)):
        for rank, each in enumerate(run(workers, functools.partial(train_on_a_dataset, loads))):
            if each.code != 0:
                sys.exit(f"datasets, {workers} workers: rank {rank} ended with {each.code}\n{each.output}")
            seen.add(each.output)
    if len(seen) != 1:
        sys.exit(f"datasets: the weights depend on workers or on who reads: {seen}")
    print("datasets: the same weights", flush=True)


def buckets():
    seen = {}
    for workers in (1, 2, 3):
        for bucket_bytes in (0, 1 << 14, 1 << 15):
            for rank, each in enumerate(run(workers, functools.partial(train, bucket_bytes))):
                if each.code != 0:
                    sys.exit(f"buckets of {bucket_bytes} bytes, {workers} workers: rank {rank} ended with {each.code}\n{each.output}")
                seen.setdefault(each.output, []).append((workers, rank, bucket_bytes))
    if len(seen) != 1:
        sys.exit(f"buckets: the sums depend on workers or buckets: {seen}")
    print("buckets: the same sums", flush=True)


def main():
    need_torch()
    buckets()
    datasets()
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
