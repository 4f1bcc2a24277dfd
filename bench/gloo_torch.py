#!/usr/bin/env python3
"""Lockstep over TCP beside PyTorch's Gloo, for a machine with PyTorch and many cores. Alternating samples as in
run.py; ratio = PyTorch's time / ours; share = what raw loopback TCP needs for the same bytes / ours.

usage: gloo_torch.py [--ranks 8] [--pairs 5] [--seconds 0.3] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import time

import competitors

KIB, MIB = 1024, 1024 * 1024
SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 25 * MIB, 64 * MIB, 256 * MIB]
MOST_WITHOUT_BARRIER = 64 * KIB
REQUIRED, WANTED, SHARE = 1.5, 2.5, 0.75


def serve(rank, ranks, folder, store):
    """One rank of PyTorch's Gloo, measured as bench/common.h measures."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for line in open(os.path.join(folder, str(rank))):
        size, seconds = int(line.split()[0]), float(line.split()[1])
        index = torch.arange(size // 4)
        fresh = ((index + 5 * rank) % 13).float()
        expected = sum(((index + 5 * r) % 13) for r in range(ranks)).float()
        data = torch.empty_like(fresh)

        def iterate():
            data.copy_(fresh)
            if size > MOST_WITHOUT_BARRIER:
                dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data)
            return time.perf_counter() - start

        iterate()
        wrong = torch.tensor([float(not torch.equal(data, expected))])
        dist.all_reduce(wrong)
        trials = 20 if size <= MOST_WITHOUT_BARRIER else 2
        start = time.perf_counter()
        for _ in range(trials):
            iterate()
        each = (time.perf_counter() - start) / trials
        count = torch.tensor([max(3, min(20000, int(seconds / each)))])
        dist.broadcast(count, 0)
        times = torch.tensor([iterate() for _ in range(int(count))], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({"bytes": size, "median_us": times.median().item() * 1e6,
                              "correct": wrong.item() == 0}), flush=True)
    dist.destroy_process_group()


def torch_gloo(ranks):
    return competitors.Competitor("PyTorch Gloo", [sys.executable, __file__, "--ranks", ranks], ranks)


def start_ranks(ranks, folder):
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    store = os.path.join(folder, "store")
    processes = [context.Process(target=serve, args=(rank, ranks, folder, store)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--sizes", help="only these, in bytes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        sys.exit(start_ranks(options.ranks, options.serve))

    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else SIZES
    ours = competitors.lockstep("tcp", options.ranks)
    others = [torch_gloo(options.ranks), competitors.raw_tcp(options.ranks)]
    if not options.json:
        print(f"{options.ranks} ranks on {os.cpu_count()} cores, TCP\n"
              f"{'bytes':>10} {'ours us':>11} {'gloo us':>11} {'raw us':>11} {'ratio':>6} {'share':>6}")
    try:
        for size in sizes:
            pairs = [[], []]
            for _ in range(options.pairs):
                for i, other in enumerate(others):
                    own = ours.measure(size, options.seconds)
                    pairs[i].append((own, other.measure(size, options.seconds)))
            gloo, raw = (statistics.median(theirs for _, theirs in found) for found in pairs)
            ratio, share = (statistics.median(theirs / own for own, theirs in found) for found in pairs)
            own = statistics.median(own for own, _ in pairs[0] + pairs[1])
            if options.json:
                print(json.dumps({"ranks": options.ranks, "bytes": size, "ours_us": own, "gloo_us": gloo,
                                  "raw_us": raw, "ratio": ratio, "share": share}), flush=True)
            else:
                mark = "wanted" if ratio >= WANTED else "required" if ratio >= REQUIRED else "SHORT"
                mark += "" if share >= SHARE else f", under {SHARE:.0%} of raw TCP"
                print(f"{size:>10} {own:>11.1f} {gloo:>11.1f} {raw:>11.1f} {ratio:>6.2f} {share:>6.0%}  {mark}",
                      flush=True)
    finally:
        for competitor in [ours, *others]:
            competitor.close()


if __name__ == "__main__":
    main()
