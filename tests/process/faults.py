#!/usr/bin/env python3
"""A rank is killed, stopped, resets its connections or leaves half a frame, in the middle of every collective.

Every survivor must end within timeout + slack of the fault, fail, and name that rank. The fault happens at a
point inside the collective (fault_rank --point); no timing is involved.
"""
# ctest: PROCESSORS 2 TIMEOUT 400 COST 50

import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import ranks
from ranks import Cases, Job

TIMEOUT = 2.0
LIMIT = TIMEOUT + ranks.SLACK
RANKS = 3

COLLECTIVES = ["barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
               "all_to_all", "reduce_nodes", "reduce_scatter_nodes"]
LOST = ["peer lost", "channel closed"]


def fault_case(transport, collective, fault, victim, extra=(), point=None):
    """`extra`: further arguments for all ranks; `point`: None takes the one that suits the transport."""
    arguments = ["--transport", transport, "--collective", collective, "--timeout", TIMEOUT, *extra]
    if point is None:
        by_messages = transport == "tcp" or collective in ("scatter", "all_to_all")
        point = "halfway" if by_messages else "waiting" if collective == "barrier" else "located"
    if point == "located":
        arguments.append("--allocated")
        if collective == "gather":  # only the root looks up the others' memory
            arguments += ["--root", victim]
    special = {victim: ["--fault", fault, "--point", point, "--at", 3]}
    late = (victim + 1) % RANKS if point == "waiting" else None
    if late is not None:
        special[late] = ["--hold-at", 3]  # so that the victim waits inside
    with Job(RANKS, arguments, special) as job:
        began = job.wait_event(victim, "fault")["at"]
        if late is not None:
            job.wait_event(late, "held")
            job.ranks[late].tell()
        survivors = [r for r in range(RANKS) if r != victim]
        return job.expect_failed(survivors, [victim], began, LIMIT, LOST)


def reset_and_go_on(collective):
    """Nobody is dead; one of the two ends of a broken connection is named, and all agree on it."""
    arguments = ["--transport", "tcp", "--collective", collective, "--timeout", TIMEOUT]
    with Job(RANKS, arguments, {1: ["--fault", "reset_and_go_on", "--point", "halfway", "--at", 3]}) as job:
        began = job.wait_event(1, "fault")["at"]
        late = job.expect_failed(range(RANKS), range(RANKS), began, LIMIT, LOST)
        blamed = {rank.error["blamed_rank"] for rank in job.ranks.values()}
        job.expect(len(blamed) == 1, f"the ranks blame {blamed}")
        return late


def hang_case(transport, collective, victim):
    """Its heartbeats go on, so that only the collective's own deadline ends it."""
    arguments = ["--transport", transport, "--collective", collective, "--timeout", TIMEOUT, "--call-time", TIMEOUT]
    point = "halfway"
    if transport == "shm":
        arguments.append("--allocated")
        point = "located"
    with Job(RANKS, arguments, {victim: ["--fault", "hang", "--point", point, "--at", 3]}) as job:
        began = job.wait_event(victim, "fault")["at"]
        survivors = [r for r in range(RANKS) if r != victim]
        late = job.expect_failed(survivors, [victim], began, LIMIT, ["timeout"])
        job.ranks[victim].process.kill()
        return late


def killed_between(transport, at):
    """Before the collective; in the first, connections to the dead rank are still to be opened."""
    arguments = ["--transport", transport, "--collective", "all_reduce", "--timeout", TIMEOUT]
    with Job(RANKS, arguments, {1: ["--fault", "kill", "--at", at]}) as job:
        began = job.wait_event(1, "fault")["at"]
        return job.expect_failed([0, 2], [1], began, LIMIT)


def segments():
    return {name for name in os.listdir("/dev/shm") if "lockstep" in name}


def main():
    cases = Cases(at_once=4)
    before = segments()
    few = ranks.SANITIZED
    for transport in ("tcp", "shm"):
        for fault in ("kill", "stop"):
            chosen = ["barrier", "all_reduce", "all_to_all"] if few else COLLECTIVES
            for collective in chosen:
                cases.run(f"{transport} {collective} {fault}", fault_case, transport, collective, fault, 1)
            for collective in ("all_reduce",) if few else ("all_reduce", "scatter", "barrier"):
                cases.run(f"{transport} {collective} {fault} rank 0", fault_case, transport, collective, fault, 0)
        for at in (1, 2):
            cases.run(f"{transport} kill before collective {at}", killed_between, transport, at)
    for collective in ["all_reduce"] if few else COLLECTIVES:
        # A barrier's frames have no payload to cut.
        for fault in ("reset",) if collective == "barrier" else ("reset", "half_frame"):
            victim = 0 if collective == "scatter" else 1  # somebody who sends
            cases.run(f"tcp {collective} {fault}", fault_case, "tcp", collective, fault, victim)
    for transport in ("tcp", "shm"):
        for collective, victim in (("all_reduce", 1), ("reduce_scatter", 0), ("all_gather", 2)):
            cases.run(f"{transport} {collective} hang rank {victim}", hang_case, transport, collective, victim)
    cases.run("tcp all_reduce reset_and_go_on", reset_and_go_on, "all_reduce")
    # Shared memory's other ways: small messages, and memory that the others cannot see.
    for name, extra in (("small", ["--count", 100]), ("plain memory", [])):
        for fault in ("kill", "stop"):
            cases.run(f"shm {name} all_reduce {fault}", fault_case, "shm", "all_reduce", fault, 1, extra, "waiting")
    cases.wait()
    if segments() != before:
        print(f"FAILED  left in /dev/shm: {segments() - before}")
        cases.failed += 1
    cases.finish()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
