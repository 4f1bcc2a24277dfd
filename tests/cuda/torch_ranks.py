#!/usr/bin/env python3
"""PyTorch's tensors on a GPU over the backend lockstep, with two workers on one card: all collectives and messages,
DistributedDataParallel, and exact training, which ends with one hash on 1 and 2 workers.

usage: tests/cuda/torch_ranks.py BUILD [--device cuda]

BUILD has liblockstep.so. Says why it is skipped where something is missing. With --device cpu it tries itself out."""

import argparse
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "bool")


def collectives(device):
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    for name in TYPES:
        dtype = getattr(torch, name)

        def make(*values):
            return torch.tensor(values).to(device=device, dtype=dtype)

        def same(got, *values):
            assert got.device.type == device and torch.equal(got, make(*values)), (name, got, values)

        own, other = rank + 1, 2 - rank
        data = make(own, own)
        dist.all_reduce(data)
        same(data, 3, 3)
        data = make(own, 0)
        dist.broadcast(data, 1)
        same(data, 2, 0)
        data = make(own)
        dist.reduce(data, 1, dist.ReduceOp.MAX)
        if rank == 1:
            same(data, 2)
        parts = [make(0), make(0)]
        dist.all_gather(parts, make(own))
        same(torch.cat(parts), 1, 2)
        gathered = [make(0), make(0)] if rank == 0 else None
        dist.gather(make(own), gathered)
        if rank == 0:
            same(torch.cat(gathered), 1, 2)
        data = make(0)
        dist.scatter(data, [make(7), make(8)] if rank == 0 else None)
        same(data, 7 + rank)
        dist.reduce_scatter(data, [make(own), make(own + 1)])
        same(data, 3 + 2 * rank)
        parts = [make(0), make(0)]
        dist.all_to_all(parts, [make(own), make(own + 4)])
        same(torch.cat(parts), 1 + 4 * rank, 2 + 4 * rank)
        sent = dist.isend(make(own), 1 - rank)
        data = make(0)
        assert dist.recv(data, src=None if rank == 0 else 0) == 1 - rank
        sent.wait()
        same(data, other)
    data = torch.tensor([1 << rank], device=device)
    dist.all_reduce(data, dist.ReduceOp.BOR)
    assert data.tolist() == [3], data
    entries = torch.sparse_coo_tensor([[rank, 2]], [1.0, 5.0], (3,), device=device)
    dist.all_reduce(entries)
    assert entries.to_dense().tolist() == [1, 1, 10], entries
    # Not contiguous, and large.
    square = torch.arange(1 << 20, device=device, dtype=torch.float32).view(1024, 1024)
    data = square.clone().t()
    dist.all_reduce(data, async_op=True).wait()
    assert torch.equal(data, n * square.t())
    dist.barrier()


def model_of(device):
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)).to(device)


def batch_of(device, number):
    import torch

    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number)).to(device)


def ddp(device):
    """The gradient is the mean of those that each worker's batch gives alone."""
    import torch
    import torch.distributed as dist

    model = model_of(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(batch_of(device, dist.get_rank())).square().mean().backward()
    alone = model_of(device)
    for number in range(dist.get_world_size()):
        (alone(batch_of(device, number)).square().mean() / dist.get_world_size()).backward()
    for got, expected in zip(model.parameters(), alone.parameters()):
        assert torch.allclose(got.grad, expected.grad, rtol=1e-4, atol=1e-6), (got.grad - expected.grad).abs().max()


def exact(device):
    import torch

    import lockstep.torch

    lockstep.torch.deterministic()
    model = model_of(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = lockstep.torch.ExactDataParallel(model, optimizer, lanes=4, verify_every=2)
    for step in range(1, 6):
        parallel.sum(step, lambda lane: model(batch_of(device, 10 * step + lane)).square().mean())
        optimizer.step()
    if parallel.job.rank == 0:
        print(f"weights {parallel.hash()}", flush=True)


def serve(device, what):
    sys.path.insert(0, str(ROOT / "python"))
    import torch.distributed as dist

    import lockstep.torch  # noqa: F401

    if what != "exact" or os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("lockstep")
    {"collectives": collectives, "ddp": ddp, "exact": exact}[what](device)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(workers, device, what, library):
    """What the workers have printed."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "LOCKSTEP_LIBRARY": str(library), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if workers == 1:
        del environment["MASTER_PORT"]
    command = [sys.executable, __file__, "--device", device, "--serve", what]
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": "0"}, stdout=subprocess.PIPE,
                              text=True) for rank in range(workers)]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{what}: the workers ended with {[rank.returncode for rank in ranks]}")
    print(f"PyTorch, {workers} workers, {device}: {what} {''.join(printed).strip()}", flush=True)
    return "".join(printed)


def missing(device, library):
    if not library.exists():
        return f"{library} has not been built"
    try:
        import torch
    except ImportError:
        return "no PyTorch"
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--serve", choices=("collectives", "ddp", "exact"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.device, options.serve)
    if options.build is None:
        parser.error("BUILD is missing")
    library = options.build.resolve() / "liblockstep.so"
    why = missing(options.device, library)
    if why:
        print(f"skipped: {why}")
        return
    run(2, options.device, "collectives", library)
    run(2, options.device, "ddp", library)
    if run(1, options.device, "exact", library) != run(2, options.device, "exact", library):
        sys.exit("NOT THE SAME")


if __name__ == "__main__":
    main()
