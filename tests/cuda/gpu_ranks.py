#!/usr/bin/env python3
"""Training with ranks as processes on a GPU: one hash however the gradients meet, also when a rank dies or stops on the
way or another one joins, and with --fail-fast an end that names the culprit. Ranks that share a GPU talk over NCCL here because
each says that it is on a host of its own. Cases run side by side: most of their time is the start of CUDA and NCCL.

usage: tests/cuda/gpu_ranks.py LOCKSTEP [--device cpu]    With cpu it tries itself out, as far as it goes without a GPU."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import time

os.environ.setdefault("LOCKSTEP_TEST_DIR", "")  # of no use here
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "process", "support"))
import original_peers

LOCKSTEP = sys.argv[1]
ON_CPU = sys.argv[2:] == ["--device", "cpu"]
SHAPE = (["--vocab", "256", "--hidden", "32", "--layers", "2", "--heads", "2", "--intermediate", "48", "--context", "32", "--threads", "1"]
         if ON_CPU else
         ["--device", "cuda", "--precision", "bf16", "--vocab", "8192", "--hidden", "512", "--layers", "4", "--heads", "8",
          "--intermediate", "1024", "--context", "256"])
MODEL = [*SHAPE, "--global-batch", "48", "--micro-batch", "8", "--log", "plain", "--eval-every", "0", "--verify-every", "2"]
TIMEOUT = 5  # of the job, in seconds
SIDE_BY_SIDE = 3  # cases
LIMIT = 90  # seconds for a process


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def start(words, environment):
    return subprocess.Popen([LOCKSTEP, "train", *words], env={**os.environ, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **environment},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def exchanges(arguments):
    """Without a GPU there is no choice of how the gradients travel."""
    if not ON_CPU:
        return list(arguments)
    return [word for word in arguments if word not in ("--exchange", "nccl", "host")]


def run(world, *arguments, steps=6, fault=None, stopped=None):
    """(seconds until it ended, exit code, standard output, standard error) of every rank; None of the stopped one, which
    is not waited for."""
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if fault:
        common["LOCKSTEP_FAULT"] = fault
    begin = time.monotonic()
    ranks = [start([*MODEL, "--steps", str(steps), "--timeout", str(TIMEOUT), *exchanges(arguments)],
                   {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}) for rank in range(world)]

    def outcome(process):
        told = process.communicate(timeout=LIMIT)
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
        assert ON_CPU or ("GPU to GPU" in told) == ("host" not in arguments), told
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


SURVIVED_STEPS = 10
JOINED_STEPS = 50


def alone(steps):
    (_, _, out, _), = run(1, "--exchange", "host", steps=steps)
    return out.splitlines()[-1]


def check_survival(expected, what, rank, place, *arguments):
    """The others go on, and end with the weights of a run in which nothing happened."""
    world = 4 if "--shard-optimizer" in arguments else 3
    # In a regroup it is lost after another one.
    first = {"roster": "do=kill rank=1 at=update step=4;", "transfer": "do=kill rank=1 at=gather step=4;"}.get(place, "")
    step = {"roster": 2, "transfer": "any"}.get(place, 4)
    lost = {rank} | ({1} if first else set())
    results = run(world, *arguments, steps=SURVIVED_STEPS, fault=f"{first}do={what} rank={rank} at={place} step={step}",
                  stopped=rank if what == "stop" else None)
    others = [result for i, result in enumerate(results) if i not in lost]
    told = [line for line in others[0][3].splitlines() if re.search(r"step [3-6]: .*(lost|expelled)", line)]
    assert all(result and result[1] == 0 for result in others), (what, rank, place, arguments, results)
    assert others[0][2].splitlines()[-1] == expected and told, (what, rank, place, arguments, others[0])
    print(f"{world} ranks {' '.join(arguments)}, rank {rank} {what} in {place}: {told[0]}", flush=True)


def check_newcomer(expected, world, *arguments, fault=None):
    """A worker joins a run under way and gets its state from a donor. With `fault` it is lost then, and nothing else."""
    port = free_port()
    pace = "rank=0 step=1 at=step do=slow ms=300"  # so that who joins comes in time
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCKSTEP_FAULT": pace}
    ranks = [start([*MODEL, "--steps", str(JOINED_STEPS), "--timeout", str(TIMEOUT), *exchanges(arguments)],
                   {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}) for rank in range(world)]
    words = ["--join", f"127.0.0.1:{port}", *([] if ON_CPU else ["--device", "cuda"])]
    try:
        told = ""
        while "workers: " not in told:  # the job has formed
            line = ranks[0].stderr.readline()
            assert line, (arguments, told)
            told += line
        newcomer = start(words, {"NCCL_HOSTID": f"host{world}", **({"LOCKSTEP_FAULT": fault} if fault else {})})
        ranks.append(newcomer)
        with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
            said = list(pool.map(lambda process: process.communicate(timeout=LIMIT), ranks))
    finally:
        for process in ranks:
            process.kill()
    told += said[0][1]
    codes = [process.returncode for process in ranks]
    events = [line for line in told.splitlines() if "joined" in line]
    assert codes == [0] * world + [-signal.SIGKILL if fault else 0], (arguments, codes, told, said)
    assert said[0][0].splitlines()[-1] == expected, (arguments, told)
    assert fault or events, (arguments, told)
    how = f", and is killed ({fault})" if fault else ""
    print(f"{world} ranks {' '.join(arguments)}, one joins{how}: {events[0] if events else 'never let in'}", flush=True)


def check_newcomer_lost(expected, world, *arguments):
    check_newcomer(expected, world, *arguments, fault="rank=newcomer step=any at=transfer do=kill")


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


def side_by_side(cases):
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for case in [pool.submit(*each) for each in cases]:
            case.result()


def main():
    if not ON_CPU:
        check_same_weights()
        check_balance()
        check_original()
    nccl, host, shards = ("--exchange", "nccl"), ("--exchange", "host"), ("--shard-optimizer",)
    survived, joined = alone(SURVIVED_STEPS), alone(JOINED_STEPS)
    side_by_side([
        *((check_survival, survived, *case) for case in (
            ("kill", 2, "backward", *nccl), ("kill", 0, "communication", *nccl), ("kill", 1, "update", *nccl),
            ("kill", 2, "tail", *nccl), ("kill", 2, "roster", *nccl), ("kill", 1, "gather", *nccl, *shards),
            ("kill", 3, "norm", *nccl, *shards), ("kill", 2, "transfer", *nccl, *shards), ("stop", 1, "backward", *nccl),
            ("kill", 1, "update", *host), ("kill", 2, "bucket", *host), ("kill", 0, "norm", *host, *shards),
            ("kill", 3, "transfer", *host, *shards), ("stop", 2, "communication", *host))),
        *((check_newcomer, joined, *case) for case in ((2, *nccl), (2, *nccl, *shards), (2, *host), (2, *host, *shards)))])
    side_by_side([
        *((check_newcomer_lost, joined, *case) for case in ((2, *nccl), (2, *host, *shards))),
        *((check_fault, 3, "kill", 2, place) for place in ("backward", "communication", "update")),
        (check_fault, 2, "stop", 1, "communication"), (check_fault, 2, "stop", 0, "update")])
    if not ON_CPU:
        refused = subprocess.run([LOCKSTEP, "train", *MODEL, "--steps", "1", "--workers", "2", "--exchange", "nccl"],
                                 capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and "ranks 0 and 1 share a GPU" in refused.stderr, refused
    print("gpu_ranks: all as it should be")


if __name__ == "__main__":
    main()
