#!/usr/bin/env python3
"""Collectives over MPI, with every MPI there is, and what happens when a rank fails there."""
# ctest: RUN_SERIAL TRUE TIMEOUT 900
# builds: release
import concurrent.futures
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

TESTS = os.environ["LOCKSTEP_TEST_DIR"]
TIMEOUT = 2.0  # of the job, in fault cases
FAULTS_AT_ONCE = 3
GRACE = 5.0  # in which MPI must have ended the job after that

FLAVOURS = {
    "Open MPI": {
        "program": "mpi_conformance",
        "mpirun": ["mpirun.openmpi", "--oversubscribe", "--allow-run-as-root", "--mca", "oob_tcp_if_include", "lo"],
        "world_sizes": [1, 2, 3, 4, 5],
    },
    "MPICH": {
        "program": "mpi_conformance_mpich",
        "mpirun": ["mpirun.mpich"],
        "world_sizes": [2, 3],
    },
}
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


class Job:
    """A job under mpirun. Its output is read as it comes; `inside` has the pids that it told."""

    def __init__(self, flavour, ranks, what, timeout, engine):
        self.name = f"{flavour}, {ranks} ranks, {what} ({engine})"
        self.ranks = ranks
        self.inside = {}
        self.pidfds = {}  # of those; ready when the process has ended
        self.lines = []
        self.changed = threading.Condition()
        setting = FLAVOURS[flavour]
        self.process = subprocess.Popen(
            setting["mpirun"]
            + ["-np", str(ranks), os.path.join(TESTS, setting["program"]), what, str(int(timeout * 1000)), engine],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line.rstrip())
                if told := re.match(r"inside (\d+) (\d+)$", line):
                    self.inside[int(told[1])] = int(told[2])
                    self.pidfds[int(told[1])] = os.pidfd_open(int(told[2]))
                self.changed.notify_all()

    def wait_until_inside(self):
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.inside) == self.ranks, 60):
                self.fail("not all ranks came to the fault point")

    def end(self, limit):
        """The exit status; a job that takes longer than `limit` has failed the test."""
        until = time.monotonic() + limit
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.fail(f"still there after {limit:.1f} s")
        self.reader.join()
        for rank, fd in self.pidfds.items():
            if not select.select([fd], [], [], max(0, until - time.monotonic()))[0]:
                self.fail(f"rank {rank} is left behind")
            os.close(fd)
        return status

    def fail(self, why):
        self.process.kill()
        for pid in self.inside.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        print("\n".join(self.lines))
        sys.exit(f"{self.name}: {why}")

    def expect(self, pattern):
        if not any(re.search(pattern, line) for line in self.lines):
            self.fail(f"no line has '{pattern}'")


def run_cases(flavour, ranks):
    job = Job(flavour, ranks, "cases", 30, "planned")
    if job.end(240) != 0:
        job.fail("failed")
    job.expect("all right")


def run_fault(flavour, ranks, what, engine, harm, message, victim=1):
    """Does `harm` to the victim when it is inside; the job must end in time and say `message`."""
    job = Job(flavour, ranks, what, TIMEOUT, engine)
    if harm is not None:
        job.wait_until_inside()
        os.kill(job.inside[victim], harm)
    start = time.monotonic()
    status = job.end(TIMEOUT + GRACE)
    if status == 0:
        job.fail("ended as if nothing had happened")
    if message:
        job.expect(message)
    print(f"{job.name}: ended with {status} after {time.monotonic() - start:.1f} s", flush=True)


def fault_cases(flavour):
    """Arguments of run_fault."""
    for engine in ("planned", "native"):
        yield flavour, 2, "for_ever", engine, signal.SIGKILL, None  # MPI may be first
        yield flavour, 3, "for_ever", engine, signal.SIGSTOP, r"failed: peer lost: rank 1 .*silent"
        yield flavour, 2, "for_ever", engine, signal.SIGSTOP, r"failed: peer lost: rank 0 .*silent", 0
        yield flavour, 3, "mismatch", engine, None, r"failed: collective mismatch: .*rank 1 .*all_reduce min"
        yield flavour, 2, "wrong_counts", engine, None, r"failed: size mismatch: .*rank 1 "
        yield flavour, 3, "absent", engine, None, r"failed: timeout: .*rank 1 "
    yield flavour, 2, "exit", "native", None, r"failed: aborted: rank 1 .*exits with status 3"
    yield flavour, 2, "late_exit", "native", signal.SIGSTOP, r"peer lost: rank 1 .*silent"


def main():
    faults = []
    for flavour, setting in FLAVOURS.items():
        if not os.path.exists(os.path.join(TESTS, setting["program"])):
            print(f"{flavour}: not here")
            continue
        faults += fault_cases(flavour)
        for ranks in setting["world_sizes"]:
            start = time.monotonic()
            run_cases(flavour, ranks)
            print(f"{flavour}, {ranks} ranks: all cases in {time.monotonic() - start:.1f} s", flush=True)
    if not faults:
        sys.exit(77)
    # What they do most is wait.
    with concurrent.futures.ThreadPoolExecutor(FAULTS_AT_ONCE) as pool:
        for fault in [pool.submit(run_fault, *case) for case in faults]:
            fault.result()


main()
