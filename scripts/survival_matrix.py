#!/usr/bin/env python3
"""The whole table behind "the run goes on": workers are killed or stopped at every named place of a step, of what lies between
steps, of a regroup and of a transfer of state, whoever it is, over every transport, with and without shards and a launcher. Each
run must end with exit code 0 and the weights of one worker to whom nothing happens, and its checkpoints must verify.

A case is named by how the workers start, transport, what happens, place and to whom. `make test` runs `--pairwise`: so few that any
two of these which meet in a case of the table meet in one of them. Not in the table: a loss between the *end* of a generation
and the next request to join, which workers hear on a thread that knows no places.

usage: scripts/survival_matrix.py [--lockstep build/release/lockstep] [--filter REGEX] [--pairwise] [--sample K] [-j N] [--list]"""

import argparse
import collections
import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/process/support"))
from standstills import Standstills  # noqa: E402

WORKERS = 4
STEPS = 12
STEP = 4  # at which it happens: one that is validated, verified and saved
SHAPE = ("--hidden 32 --layers 2 --heads 2 --intermediate 48 --context 32 --global-batch 22 --micro-batch 2 --threads 1 --bucket-mb 0.02 "
         "--log plain --eval-every 4 --verify-every 2 --save-every 4").split()
PLACES = ("step", "data", "forward", "backward", "bucket", "communication", "tail", "update", "validation", "verify", "report", "save", "end")
SHARDED_PLACES = ("norm", "gather")
REGROUP = ("standing", "roster", "ready", "go", "transfer")
VICTIMS = {"rank 0": (0,), "middle": (1,), "last": (3,), "two of two pairs": (0, 2), "a pair": (2, 3)}
LIMIT = 90  # seconds for a run
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
# Of whoever runs this.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "RANK", "WORLD_SIZE", "MASTER_"))}
TRIES = 5  # of a case in which nothing may come of what was to happen


class Wrong(Exception):
    pass


class Missed(Wrong):
    """All is well, but something did not happen: the first loss ended the step before the other victim came to its place, or a
    newcomer came too late."""


class Failed(Wrong):
    """A process ended with an error. That is no fault of the product while the machine itself stands still for the timeout: all are
    lost to all then, those that never were stopped, too."""


def die_with_parent():
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stopped(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


class Process:
    """What it says is kept in a file, so that nobody has to read it while it runs."""

    def __init__(self, name, words, said, environment):
        self.name = name
        self.said = said
        with open(said, "wb") as file:
            self.popen = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=file,
                                          stderr=subprocess.STDOUT, env={**ENVIRONMENT, **environment}, preexec_fn=die_with_parent)

    def text(self):
        return self.said.read_text(errors="replace")

    def stopped(self):
        return stopped(self.popen.pid)


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Wrong(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return found


class Run:
    """A job in a folder of its own. Use in a with statement: all of its processes end with it."""

    def __init__(self, table, folder):
        self.table = table
        self.folder = pathlib.Path(folder)
        self.out = self.folder / "out"
        self.processes = []
        self.sockets = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()
        self.sockets.close()

    def start(self, name, words, environment=None):
        process = Process(name, words, self.folder / f"said-{len(self.processes)}", environment or {})
        self.processes.append(process)
        return process

    def train(self, *arguments):
        return [self.table.lockstep, "train", "--data", self.table.text, *SHAPE, "--timeout", self.table.timeout, *arguments]

    def port(self):
        """Bound and not listening: nobody else is given it."""
        holder = self.sockets.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]

    def story(self):
        lines = []
        for process in self.processes:
            lines.append(f"--- {process.name} (pid {process.popen.pid}): code {process.popen.poll()}")
            lines += [line for line in process.text().splitlines() if not re.match(r"(data|model|run|workers|step \d+/)", line)][-25:]
        return "\n".join(lines)

    def outputs(self):
        """When each file was changed last; temporaries are their maker's to remove."""
        return {path: path.stat().st_mtime_ns for path in self.out.rglob("*") if path.is_file() and ".tmp" not in str(path.relative_to(self.out))}

    def metrics(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def lost(self):
        """Whom the run has lost, as its metrics tell."""
        return [who for row in self.metrics() if row.get("event") in ("lost", "expelled") for who in row["who"]]

    def expect_end(self, processes, codes=(0,)):
        wait_for(lambda: all(each.popen.poll() is not None for each in processes), LIMIT,
                 f"the end of {', '.join(each.name for each in processes)}")
        for each in processes:
            if codes is not None and each.popen.returncode not in codes:
                raise Failed(f"{each.name} ended with {each.popen.returncode}")

    def wake(self, processes):
        """Until they have ended: some stop again where they were stopped."""

        def ended():
            for each in processes:
                if each.popen.poll() is None and each.stopped():
                    each.popen.send_signal(signal.SIGCONT)
            return all(each.popen.poll() is not None for each in processes)

        wait_for(ended, LIMIT, f"the end of {', '.join(each.name for each in processes)}")

    def expect_metrics(self, steps):
        """Every step once, also those that were computed again from a checkpoint."""
        told = [row["step"] for row in self.metrics() if "event" not in row]
        if told != list(range(1, steps + 1)):
            raise Wrong(f"the metrics have the steps {told}")

    def expect_resume(self, step, steps):
        """From a checkpoint that was saved on the way."""
        again = self.folder / "again"
        shutil.copytree(self.out / f"checkpoint-{step}", again / f"checkpoint-{step}")
        resumed = subprocess.run([str(word) for word in self.train("--steps", steps, "--out", again, "--resume")], capture_output=True,
                                 text=True, env=ENVIRONMENT)
        if WEIGHTS.findall(resumed.stdout) != [self.table.alone(steps)]:
            raise Wrong(f"the run that is resumed from checkpoint-{step} ends otherwise: {resumed.stdout}{resumed.stderr}")

    def expect_result(self, steps):
        hashes = [found for each in self.processes for found in WEIGHTS.findall(each.text())]
        if not hashes:
            raise Wrong("no weights")
        if set(hashes) != {self.table.alone(steps)}:
            raise Wrong(f"other weights: {hashes}, not {self.table.alone(steps)}")
        checkpoints = sorted(path for path in self.out.glob("checkpoint-*") if re.search(r"-\d+$", path.name))
        if self.out / f"checkpoint-{steps}" not in checkpoints:
            raise Wrong(f"the last checkpoint is not among {[path.name for path in checkpoints]}")
        for path in checkpoints:
            check = subprocess.run([self.table.lockstep, "verify", path], capture_output=True, text=True)
            if check.returncode != 0:
                raise Wrong(f"{path.name} does not verify: {check.stdout}{check.stderr}")
        self.expect_metrics(steps)


def by_hand(run, transport, sharded, fault, victims):
    """Ranks from the environment; over the gradient server, workers of a coordinator."""
    words = run.train("--steps", STEPS, "--transport", transport, "--out", run.out, *(["--shard-optimizer"] if sharded else []))
    environment = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.port())}
    coordinator = []
    if transport == "server":
        coordinator = [run.start("coordinator", [run.table.lockstep, "coordinator", "--bind", "127.0.0.1:0", "--workers", WORKERS,
                                                 "--timeout", run.table.timeout])]
        found = wait_for(lambda: re.search(r"listening on (\S+);", coordinator[0].text()), 10, "the coordinator's address")
        words += ["--coordinator", found[1]]
    ranks = [run.start(f"rank {rank}", words, {**environment, "RANK": str(rank), "LOCKSTEP_FAULT": fault}) for rank in range(WORKERS)]
    run.expect_end([rank for i, rank in enumerate(ranks) if i not in victims])
    for victim in victims:
        if ranks[victim].popen.poll() != -signal.SIGKILL and not ranks[victim].stopped():
            raise (Missed if len(victims) > 1 else Wrong)(f"nothing happened to rank {victim}")
    run.expect_result(STEPS)
    if "at=save" in fault:
        run.expect_resume(STEP, STEPS)
    # Who wakes up when all is over changes nothing.
    before = run.outputs()
    asleep = [ranks[victim] for victim in victims if ranks[victim].stopped()]
    run.wake(asleep)
    after = run.outputs()
    if after != before:
        changed = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        raise Wrong(f"a worker that woke up after the end has changed the outputs: {changed}")
    run.expect_result(STEPS)
    run.expect_end(coordinator)


def launched(run, transport, sharded, fault, victims):
    process = run.start("launcher", run.train("--steps", STEPS, "--workers", WORKERS, "--transport", transport, "--out", run.out,
                                              *(["--shard-optimizer"] if sharded else [])), {"LOCKSTEP_FAULT": fault})
    run.expect_end([process])
    run.expect_result(STEPS)
    if "at=save" in fault:
        run.expect_resume(STEP, STEPS)
    gone = run.lost()
    if not gone:
        raise Wrong("nobody was lost")
    if len(gone) < len(victims):
        raise Missed(f"lost: {gone}; not {len(victims)} workers")


NEWCOMER_STEPS = 30
SLOW = "rank=0 step=1 at=step do=slow ms=100"  # so that who joins comes in time


def joined(run, transport, sharded, fault, of_newcomer):
    """Something happens to a worker that joins, or to those who bring it up to date."""
    port = run.port()
    words = run.train("--steps", NEWCOMER_STEPS, "--workers", 3, "--transport", transport, "--out", run.out, "--listen", f"127.0.0.1:{port}",
                      *(["--shard-optimizer"] if sharded else []))
    process = run.start("launcher", words, {"LOCKSTEP_FAULT": SLOW if of_newcomer else f"{SLOW};{fault}"})
    wait_for(lambda: "step 2/" in process.text() or process.popen.poll() is not None, 30, "step 2")
    newcomer = run.start("newcomer", [run.table.lockstep, "train", "--join", f"127.0.0.1:{port}", "--data", run.table.text],
                         {"LOCKSTEP_FAULT": fault} if of_newcomer else {})
    run.expect_end([process])
    run.expect_result(NEWCOMER_STEPS)
    if not of_newcomer:
        if not re.search(r"rank \d+ \(pid \d+\) was killed by signal 9", process.text()):
            raise Missed("nobody was lost")
        return run.expect_end([newcomer])
    if newcomer.popen.poll() != -signal.SIGKILL and not newcomer.stopped():
        raise Missed("nothing happened to the newcomer")
    run.wake([newcomer])
    run.expect_result(NEWCOMER_STEPS)


def started_anew(run, transport, sharded, fault, _):
    """Rank 1 is lost; then something happens to the worker that is started for it, or to those who bring it up to date."""
    words = run.train("--steps", NEWCOMER_STEPS, "--workers", 3, "--transport", transport, "--out", run.out,
                      *(["--shard-optimizer"] if sharded else []))
    process = run.start("launcher", words, {"LOCKSTEP_FAULT": f"{SLOW};{fault}"})
    struck = set()

    def ended():
        struck.update(str(child) for child in children_of(process.popen.pid) if stopped(child))
        return process.popen.poll() is not None

    wait_for(ended, LIMIT, "the end of the launcher")
    run.expect_end([process])
    run.expect_result(NEWCOMER_STEPS)
    struck.update(re.findall(r"\(pid (\d+)\) was killed by signal 9", process.text()))
    if len(struck) < 2:
        raise Missed("nothing happened after rank 1 was lost")


def fault_of(victims, place, action):
    step = STEPS if place == "end" else STEP
    return ";".join(f"rank={rank} step={step} at={place} do={action}" for rank in victims)


class Case(typing.NamedTuple):
    start: str
    transport: str
    sharded: bool
    action: str
    place: str
    victim: str
    body: typing.Callable
    fault: str
    victims: object  # as the body wants them

    @property
    def name(self):
        return f"{self.start}, {self.transport}{', sharded' if self.sharded else ''}, {self.action}, {self.place}, {self.victim}"

    def pairs(self):
        return set(itertools.combinations(enumerate(self[:6]), 2))

    def seconds(self):
        """About how long it takes: who is stopped is waited for, and longer where it may look for its coordinator when it wakes up."""
        waits = self.action == "stop"
        return 0.5 + 4 * waits + 25 * (waits and self.start == "by hand" and self.transport == "server") + 3 * (self.body in (joined, started_anew))


def cases():
    kinds = [(transport, sharded) for transport in ("tcp", "shm", "server") for sharded in (False, True)
             if not (transport == "server" and sharded)]
    starts = (("by hand", by_hand), ("launched", launched))
    for (start, body), kind, action in itertools.product(starts, kinds, ("kill", "stop")):
        _, sharded = kind
        for place, (who, victims) in itertools.product(PLACES + (SHARDED_PLACES if sharded else ()), VICTIMS.items()):
            yield Case(start, *kind, action, place, who, body, fault_of(victims, place, action), victims)
        # Rank 1 is lost, and another one while the rest regroup. State moves where a survivor is behind.
        for place, victim in itertools.product(REGROUP, (0, 2, 3)):
            number = {"standing": 1, "transfer": "any"}.get(place, 2)
            first = fault_of((1,), "gather" if place == "transfer" and sharded else "update", "kill")
            if place == "transfer" and not sharded:
                continue  # all have the same step: see the newcomer
            yield Case(start, *kind, action, f"{place} of a regroup", f"rank {victim}", body,
                       f"{first};rank={victim} step={number} at={place} do={action}", (1, victim))
    for place, rank, sharded in itertools.product(("data", "backward", "tail", "update"), range(WORKERS), (False, True)):
        yield Case("launched", "local", sharded, "memory", place, f"rank {rank}", launched, f"rank={rank} step={STEP} at={place} do=memory", (rank,))
    for kind, action in itertools.product(kinds, ("kill", "stop")):
        transport, sharded = kind
        # Nobody joins a server's job by hand: there the newcomer is the worker that is started for one that was lost.
        start, body, first, generation = "joined", joined, "", 1
        if transport == "server":
            start, body, first, generation = "started anew", started_anew, fault_of((1,), "update", "kill") + ";", 2
        for place in REGROUP + PLACES + (SHARDED_PLACES if sharded else ()):
            if place in ("end",):
                continue
            yield Case(start, *kind, action, place, "newcomer", body, f"{first}rank=newcomer step=any at={place} do={action}", True)
        for place, rank in itertools.product(REGROUP, (0, 1, 2)):
            if first and rank == 1:
                continue
            number = {"standing": generation, "transfer": "any"}.get(place, generation + 1)
            yield Case(start, *kind, action, f"{place} of a join", f"rank {rank}", body,
                       f"{first}rank={rank} step={number} at={place} do={action}", False)


def pairwise(table):
    """Few of these, and quick ones: each next one has most pairs for its time that no one before it has; the same ones every time."""
    random.Random(0).shuffle(table)  # of equals not always the first of its kind
    pairs = {case: case.pairs() for case in table}
    left = set().union(*pairs.values())
    while left:
        best = max(table, key=lambda case: len(pairs[case] & left) / case.seconds())
        left -= pairs[best]
        yield best


class Table:
    def __init__(self, options, folder):
        self.lockstep = pathlib.Path(options.lockstep).resolve()
        self.timeout = options.timeout
        self.folder = pathlib.Path(folder)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(300)))
        self.hashes = {}
        self.lock = threading.Lock()
        self.standstills = Standstills(0.6 * float(options.timeout))
        self.show = options.verbose

    def alone(self, steps):
        with self.lock:
            if steps not in self.hashes:
                run = subprocess.run([self.lockstep, "train", "--data", self.text, *SHAPE[:-2], "--steps", str(steps)], capture_output=True,
                                     text=True, env=ENVIRONMENT, check=True)
                self.hashes[steps] = WEIGHTS.search(run.stdout)[1]
            return self.hashes[steps]

    def run(self, case):
        begin = time.monotonic()
        for _ in range(TRIES):
            wrong, again, story = self.try_once(case)
            if not again:
                break
        if wrong:
            story += f"\n--- again: scripts/survival_matrix.py --filter {shlex.quote(f'^{case.name}$')}"
        print(f"{'BAD' if wrong else 'ok':3}  {time.monotonic() - begin:5.1f} s  {case.name}{': ' + wrong if wrong else ''}{story}", flush=True)
        return not wrong

    def try_once(self, case):
        wrong, again = "", False
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, Run(self, folder) as run:
            try:
                case.body(run, case.transport, case.sharded, case.fault, case.victims)
            except Wrong as error:
                wrong, again = str(error), isinstance(error, Missed)
                if isinstance(error, Failed) and self.standstills.since(begin):
                    wrong, again = f"{error}; the machine had stood still", True
            return wrong, again, f"\n  {case.fault}\n{run.story()}" if wrong or self.show else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default=pathlib.Path(__file__).resolve().parent.parent / "build/release/lockstep")
    parser.add_argument("--filter", default="", help="only cases whose name this expression matches")
    parser.add_argument("--pairwise", action="store_true", help="so few of them that any two parts of a name meet if they can")
    parser.add_argument("--sample", type=int, default=1, metavar="K", help="only every K-th of them")
    parser.add_argument("--timeout", default="3", help="of silence, after which a stopped worker is lost")
    parser.add_argument("-j", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at once")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="tell what all processes said")
    options = parser.parse_args()
    chosen = [case for case in cases() if re.search(options.filter, case.name)]
    chosen = (list(pairwise(chosen)) if options.pairwise else chosen)[::options.sample]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.j) as pool:
        results = list(pool.map(Table(options, folder).run, chosen))
    count = collections.Counter(results)
    print(f"{len(results)} cases: {count[True]} ok, {count[False]} bad, in {time.monotonic() - begin:.0f} s")
    return 1 if count[False] else 0


if __name__ == "__main__":
    sys.exit(main())
