#!/usr/bin/env python3
"""Training with ranks as processes on a GPU: one hash however the gradients meet, also when a rank dies or stops on the
way, and with --fail-fast an end that names the culprit. Ranks that share a GPU talk over NCCL here because each says that it is on a host of its own.

usage: tests/cuda/gpu_ranks.py LOCKSTEP"""

import concurrent.futures
import os
import socket
import subprocess
import sys
import time

os.environ.setdefault("LOCKSTEP_TEST_DIR", "")  # of no use here
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "process", "support"))
import original_peers

LOCKSTEP = sys.argv[1]
MODEL = ["--device", "cuda", "--precision", "bf16", "--vocab", "8192", "--hidden", "512", "--layers", "4", "--heads", "8",
         "--intermediate", "1024", "--context", "256", "--global-batch", "48", "--micro-batch", "8", "--log", "plain",
         "--eval-every", "0", "--verify-every", "2"]
TIMEOUT = 5  # of the job, in seconds


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def run(world, *arguments, steps=6, fault=None, stopped=None):
    """(seconds until it ended, exit code, standard output, standard error) of every rank; None of the stopped one, which
    is not waited for."""
    common = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if fault:
        common["LOCKSTEP_FAULT"] = fault
    begin = time.monotonic()
    ranks = [subprocess.Popen([LOCKSTEP, "train", *MODEL, "--steps", str(steps), "--timeout", str(TIMEOUT), *arguments],
                              env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(world)]

    def outcome(process):
        told = process.communicate(timeout=60)
        return time.monotonic() - begin, process.returncode, *told

    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        try:
            ends = [None if rank == stopped else pool.submit(outcome, process) for rank, process in enumerate(ranks)]
            return [end and end.result() for end in ends]
        finally:
            for process in ranks:
                process.kill()


def weights(world, *arguments):
    results = run(world, *arguments)
    for rank, result in enumerate(results):
        assert result and result[1] == 0, (arguments, rank, result)
    return results[0][2].splitlines()[-1], results[0][3]


def check_same_weights():
    expected, _ = weights(1, "--exchange", "host")
    for world, *arguments in [(1, "--exchange", "nccl"), (2, "--exchange", "nccl"), (3,), (3, "--shard-optimizer"),
                              (2, "--exchange", "host"), (2, "--exchange", "host", "--no-overlap"),
                              (3, "--exchange", "host", "--shard-optimizer")]:
        found, told = weights(world, *arguments)
        assert found == expected, (world, arguments, found, expected)
        assert ("GPU to GPU" in told) == ("host" not in arguments), told
        print(f"{world} ranks {' '.join(arguments)}: {found}", flush=True)
    # In NCCL's own order the ranks still agree with each other, which --verify-every looks at.
    print(f"2 ranks in NCCL's order: {weights(2, '--reduction', 'nccl')[0]}", flush=True)


def check_balance():
    """A rank that is slow gives lanes away, over the host and from GPU to GPU, and no bit changes."""
    steps = 14
    (_, _, out, _), = run(1, "--exchange", "host", steps=steps)
    expected = out.splitlines()[-1]
    for arguments in (["--exchange", "nccl"], ["--exchange", "nccl", "--shard-optimizer"], ["--exchange", "host"]):
        results = run(2, *arguments, steps=steps, fault="rank=1 step=1 at=lane do=slow ms=100")
        assert all(result and result[1] == 0 for result in results), results
        moved = [line for line in results[0][3].splitlines() if "lanes: rank" in line]
        assert results[0][2].splitlines()[-1] == expected and len(moved) == 1 and "(was 3)" in moved[0], (arguments, results)
        print(f"2 ranks {' '.join(arguments)}, one slow: {moved[0]}", flush=True)


def check_survival():
    """The others go on, and end with the weights of a run in which nothing happened."""
    steps = 10
    (_, _, out, _), = run(1, "--exchange", "host", steps=steps)
    expected = out.splitlines()[-1]
    for what, rank, place, *arguments in [
            ("kill", 2, "backward", "--exchange", "nccl"), ("kill", 0, "communication", "--exchange", "nccl"),
            ("kill", 1, "update", "--exchange", "nccl"), ("kill", 1, "gather", "--exchange", "nccl", "--shard-optimizer"),
            ("kill", 3, "norm", "--exchange", "nccl", "--shard-optimizer"), ("stop", 1, "backward", "--exchange", "nccl"),
            ("kill", 1, "update", "--exchange", "host"), ("kill", 0, "norm", "--exchange", "host", "--shard-optimizer"),
            ("stop", 2, "communication", "--exchange", "host")]:
        world = 4 if "--shard-optimizer" in arguments else 3
        results = run(world, *arguments, steps=steps, fault=f"do={what} rank={rank} at={place} step=4",
                      stopped=rank if what == "stop" else None)
        others = [result for i, result in enumerate(results) if i != rank]
        told = [line for line in others[0][3].splitlines() if "step 4: " in line or "step 5: " in line]
        assert all(result and result[1] == 0 for result in others), (what, rank, place, arguments, results)
        assert others[0][2].splitlines()[-1] == expected and told, (what, rank, place, arguments, others[0])
        print(f"{world} ranks {' '.join(arguments)}, rank {rank} {what} in {place}: {told[0]}", flush=True)


def check_original():
    """Over the messages of the original protocol: two runs have one hash, and the server is told of the GPU."""
    small = ["--vocab", "256", "--hidden", "128", "--layers", "2", "--heads", "2", "--intermediate", "256", "--context", "64",
             "--global-batch", "8", "--micro-batch", "4", "--steps", "3"]
    found = []
    for _ in range(2):
        served = original_peers.DdpCoordinator(1, 3)
        served.start()
        done = subprocess.run([LOCKSTEP, "train", *MODEL, *small, "--coordinator", served.address, "--protocol", "original"],
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        served.result()
        assert [card[1:] for card in served.server.joined] == [(1, "cuda")], served.server.joined
        found.append(done.stdout.splitlines()[-1])
    assert found[0] == found[1], found
    print(f"over the original protocol, twice: {found[0]}", flush=True)


def check_fault(world, what, rank, place):
    """The others end soon, and say who it was."""
    results = run(world, "--fail-fast", steps=100000, fault=f"do={what} rank={rank} at={place} step=9",
                  stopped=rank if what == "stop" else None)
    others = [result for i, result in enumerate(results) if i != rank]
    for result in others:
        assert result and result[1] not in (0, None), (what, place, results)
        assert f"rank {rank}" in result[3].splitlines()[-1], (what, place, result)
    if what == "kill":
        # Of the killed one the moment is known.
        late = max(result[0] for result in others) - results[rank][0]
        assert late < TIMEOUT + 1, (place, late)
        print(f"{world} ranks, rank {rank} killed in {place}: told {late:.1f} s later: "
              f"{others[0][3].splitlines()[-1]}", flush=True)
    else:
        print(f"{world} ranks, rank {rank} stopped in {place}: told within {max(r[0] for r in others):.1f} s of the start: "
              f"{others[0][3].splitlines()[-1]}", flush=True)


def main():
    check_same_weights()
    check_balance()
    check_survival()
    check_original()
    for place in ("backward", "communication", "update"):
        check_fault(3, "kill", 2, place)
    check_fault(2, "stop", 1, "communication")
    check_fault(2, "stop", 0, "update")
    refused = subprocess.run([LOCKSTEP, "train", *MODEL, "--steps", "1", "--workers", "2", "--exchange", "nccl"],
                             capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "ranks 0 and 1 share a GPU" in refused.stderr, refused
    print("gpu_ranks: all as it should be")


if __name__ == "__main__":
    main()
