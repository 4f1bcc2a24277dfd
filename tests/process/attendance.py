#!/usr/bin/env python3
"""Ranks that are missing, there twice, late or away from a collective: named if they are at fault, waited for if not."""
# ctest: PROCESSORS 2 TIMEOUT 300

import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import ranks
from ranks import Cases, Job

TIMEOUT = 2.0
SLACK = ranks.SLACK


def arguments(transport="tcp", *more):
    return ["--transport", transport, "--collective", "all_reduce", "--timeout", TIMEOUT, *more]


def absent(transport, victim, count):
    """Alive, but not in the collective: named on all ranks when the call's own time is over."""
    call_time = 1.0
    everybody = arguments(transport, "--call-time", call_time, "--count", count)
    others = [r for r in range(3) if r != victim]
    with Job(3, everybody, {victim: ["--hold-at", 3]}) as job:
        job.wait_event(victim, "held")
        # The others may have entered before it stayed away.
        began = max(job.wait_event(r, "iteration", k=2)["at"] for r in others)
        late = job.expect_failed(others, [victim], began, call_time + SLACK, ["timeout"])
        job.ranks[victim].tell()
        job.expect_failed([victim], [victim], time.monotonic(), SLACK, ["timeout"])
        return late


def slow(transport):
    """Away for longer than the timeout while the others have much to send to it: that is no fault."""
    everybody = ["--transport", transport, "--collective", "gather", "--root", 1, "--timeout", 1,
                 "--count", 12_000_000, "--iterations", 3]
    with Job(3, everybody, {1: ["--hold-at", 3]}) as job:
        job.wait_event(1, "held")
        began = job.ranks[1].find("held")["at"]
        job.wait(lambda: any(job.ranks[r].ended_at for r in range(3)) or time.monotonic() > began + 4,
                 "four seconds", 4.5 + began - time.monotonic())
        job.ranks[1].tell()
        job.expect_success()


def missing(absentee):
    with Job(3, arguments(), start=False) as job:
        for rank in range(3):
            if rank != absentee:
                job.start(rank)
        began = time.monotonic()
        present = [r for r in range(3) if r != absentee]
        job.wait_ended(present)
        if absentee == 0:  # nobody is there to tell; the address must do
            for r in present:
                job.expect(f"{job.master[0]}:{job.master[1]}" in job.ranks[r].error["message"], f"rank {r}")
            return max(job.ranks[r].ended_at for r in present) - began
        return job.expect_failed(present, [absentee], began, TIMEOUT + SLACK, ["timeout"])


def started_twice():
    with Job(3, arguments(), start=False) as job:
        job.start(0)
        job.start(1)
        job.start(1, key="1 again")
        began = time.monotonic()
        return job.expect_failed(list(job.ranks), [1], began, TIMEOUT + SLACK, ["invalid rank"])


def intruder():
    """A second rank 1 comes when the job runs already: it is turned away, the job goes on."""
    with Job(3, arguments("tcp", "--iterations", 6), {2: ["--hold-at", 4]}) as job:
        job.wait_event(2, "held")
        job.start(1, key="again")
        job.expect_failed(["again"], [1], time.monotonic(), TIMEOUT + SLACK, ["invalid rank"])
        job.ranks[2].tell()
        job.expect_success(range(3))


def order(sequence, transport):
    with Job(len(sequence), arguments(transport, "--iterations", 3), start=False) as job:
        for rank in sequence:
            job.start(rank)
        job.expect_success()


def odd_one_out(transport, split):
    """Another size on one rank ends all of them with that; in a group it is still named by its rank in the job."""
    everybody = arguments(transport, *(["--split"] if split else []))
    with Job(4, everybody, {3: ["--odd-at", 3], 0: ["--hold-at", 1] if split else []}) as job:
        began = job.wait_event(3, "iteration", k=2)["at"]
        return job.expect_failed([1, 2, 3], [3], began, TIMEOUT + SLACK, ["collective mismatch", "size mismatch"])


def main():
    cases = Cases(at_once=4)
    few = ranks.SANITIZED
    for transport in ("tcp", "shm"):
        for victim in (1,) if few else (0, 1, 2):
            for count in (10, 500_003):
                cases.run(f"{transport} rank {victim} is absent, {count} elements", absent, transport, victim, count)
        if not few:
            cases.run(f"{transport} slow", slow, transport)
        for split in (False, True):
            cases.run(f"{transport} mismatch{' in a group' if split else ''}", odd_one_out, transport, split)
        for sequence in ([2, 1, 0],) if few else ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            cases.run(f"{transport} started in the order {sequence}", order, sequence, transport)
    for absentee in (0, 1, 2):
        cases.run(f"rank {absentee} never starts", missing, absentee)
    cases.run("rank 1 is started twice", started_twice)
    cases.run("a second rank 1 comes late", intruder)
    cases.finish()


if __name__ == "__main__":
    main()
