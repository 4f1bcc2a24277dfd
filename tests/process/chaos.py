#!/usr/bin/env python3
"""Workers of a run are killed, stopped and woken, join and leave at random: it ends with the weights of one worker to whom
nothing happens, leaves no process and no segment behind, and who lives long gathers no descriptors, no threads and no shared memory.

LOCKSTEP_CHAOS_SECONDS says for how long runs follow each other. LOCKSTEP_CHAOS_SEED replays a schedule: what happens, to whom, and
how long after the event before; which step that meets is up to the machine."""
# ctest: TIMEOUT 4000 COST 70
# builds: release

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import Failure, children_of, die_with_parent, gone, reserved_port, state_of  # noqa: E402
from standstills import Standstills  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
SECONDS = float(os.environ.get("LOCKSTEP_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("LOCKSTEP_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
TIMEOUT = 2.0  # of silence; who is stopped for longer is lost
JOIN_TIMEOUT = 30.0  # who comes after the end looks for the job for so long
LIMIT = 90.0  # for a run, and more than it takes
CALM = 40.0  # after which nothing more happens to a run: a slow machine is no hang
STANDSTILL = 0.8 * TIMEOUT  # of the machine itself: all may be lost to all
STEPS = 120
# A lane takes a while, so that a run takes some seconds and its workers are mostly asleep.
PACE = "rank={} step=1 at=lane do=slow ms=6"
SHAPE = ("--hidden 32 --layers 2 --heads 2 --intermediate 48 --context 32 --global-batch 22 --micro-batch 2 --threads 1 --bucket-mb 0.02 "
         "--log plain --eval-every 20 --verify-every 10 --save-every 15").split()
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "RANK", "WORLD_SIZE", "MASTER_"))}


def count(pid, what):
    try:
        return len(os.listdir(f"/proc/{pid}/{what}"))
    except OSError:
        return None


def writes(pid):
    """Whether it has the run's outputs, for which it needs more than others."""
    try:
        return any(os.readlink(path).endswith("/metrics.jsonl") for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None


def count_mappings(pid):
    """Of memory that processes share, which has no name outside of them."""
    try:
        return len(re.findall("/memfd:lockstep", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return None


def segments():
    """Names that outlive processes."""
    return {path.name for path in Path("/dev/shm").iterdir() if "lockstep" in path.name}


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Process:
    def __init__(self, name, said, *words, pace=True):
        self.name = name
        self.said = said
        fault = ";".join(PACE.format(rank) for rank in [*range(8), "newcomer"])
        with open(said, "wb") as file:
            self.popen = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                          env={**ENVIRONMENT, **({"LOCKSTEP_FAULT": fault} if pace else {})}, preexec_fn=die_with_parent)

    @property
    def pid(self):
        return self.popen.pid

    def running(self):
        return self.popen.poll() is None

    def text(self):
        return self.said.read_text(errors="replace")


class Run:
    """One run and those who come to it."""

    def __init__(self, number, rng, folder, text, transport, sharded, standstills):
        self.rng = rng
        self.standstills = standstills
        self.folder = folder
        self.text = text
        self.story = [f"run {number}: {transport}{', sharded' if sharded else ''}"]
        self.asleep = {}  # pid: when to wake it
        self.joined = []
        self.quiet_until = 0.0  # until those who leave have left, mostly
        self.leaving = set()  # who was asked to leave: when all members have been, the run stops
        self.seen = set()  # every process of the run
        self.first = None  # the workers that began the run
        self.joins_due = {}  # pid: how often it has joined when it is a member again after a pause
        self.counts = {}  # pid and whether it writes: (when, members of the job, descriptors, threads, mappings)
        self.judged = 0  # processes whose counts could be compared
        self.port_holder = reserved_port()
        self.port = self.port_holder.__enter__()
        self.began = time.monotonic()
        self.launcher = Process("launcher", folder / "launcher", LOCKSTEP, "train", "--data", text, *SHAPE, "--steps", STEPS, "--workers",
                                3, "--transport", transport, "--timeout", TIMEOUT, "--out", folder / "out", "--listen",
                                f"127.0.0.1:{self.port}", *(["--shard-optimizer"] if sharded else []))

    def note(self, what):
        self.story.append(f"  {time.monotonic() - self.began:5.2f} s  {what}")

    def workers(self):
        """Of the launchers; and those who joined alone."""
        found = children_of(self.launcher.pid)
        for each in self.joined:
            if each.running():
                found += children_of(each.pid) if each.name == "joined launcher" else [each.pid]
        self.seen.update(found)
        return found

    def look(self):
        """Wakes who slept long enough, counts what long-lived processes have."""
        now = time.monotonic()
        for pid in [pid for pid, when in self.asleep.items() if when <= now]:
            del self.asleep[pid]
            send(pid, signal.SIGCONT)
            self.joins_due[pid] = self.joins_of(pid) + 1
            self.note(f"pid {pid} wakes up")
        members = int((re.findall(r"(?:;|by) (\d+) workers?\b", self.launcher.text()) or [3])[-1])
        for pid in [self.launcher.pid, *self.workers()]:
            counts = count(pid, "fd"), count(pid, "task"), count_mappings(pid)
            is_in = pid == self.launcher.pid or pid in (self.first or ()) or self.joins_of(pid) > 0
            if is_in and None not in counts and (role := writes(pid)) is not None and state_of(pid) not in "TZX":
                self.counts.setdefault((pid, role), []).append((now, members, *counts))

    def happen(self):
        awake = [pid for pid in self.workers() if pid not in self.asleep]
        what = self.rng.choices(("kill", "nap", "sleep", "join", "join two", "leave", "leave together", "two"),
                                (4, 3, 2, 3, 1, 2, 1, 1))[0]
        place = self.rng.random()
        nap, sleep = self.rng.uniform(0.05, 0.6 * TIMEOUT), self.rng.uniform(1.3 * TIMEOUT, 2.5 * TIMEOUT)
        victim = awake[int(place * len(awake))] if awake else None
        together = [each for each in self.joined if each.name == "joined launcher" and each.running()]
        if what.startswith("join"):
            if sum(each.running() for each in self.joined) >= 2:
                return
            number = 2 if what == "join two" else 1
            each = Process("joined launcher" if number == 2 else "joined worker", self.folder / f"joined-{len(self.joined)}", LOCKSTEP, "train",
                           "--join", f"127.0.0.1:{self.port}", "--data", self.text, *(["--workers", number] if number == 2 else []))
            self.joined.append(each)
            self.note(f"{each.name} (pid {each.pid}) comes")
        elif what == "leave together" and together and self.stay(children_of(together[0].pid)):
            self.quiet_until = time.monotonic() + 3
            send(together[0].pid, signal.SIGTERM)
            self.note(f"the joined launcher (pid {together[0].pid}) is to leave")
        elif victim is None or not self.stay([victim]):
            return  # who is left brings the run to its end
        elif what == "leave":
            self.quiet_until = time.monotonic() + 3
            self.leaving.add(victim)
            send(victim, signal.SIGTERM)
            self.note(f"pid {victim} is to leave")
        elif what == "kill" or (what == "two" and len(awake) < 3):
            send(victim, signal.SIGKILL)
            self.note(f"pid {victim} is killed")
        elif what == "two":
            other = awake[(awake.index(victim) + 1) % len(awake)]
            if not self.stay([victim, other]):
                return
            send(victim, signal.SIGKILL)
            send(other, signal.SIGKILL)
            self.note(f"pids {victim} and {other} are killed")
        elif what in ("nap", "sleep"):
            seconds = nap if what == "nap" else sleep
            send(victim, signal.SIGSTOP)
            self.asleep[victim] = time.monotonic() + seconds
            self.note(f"pid {victim} stops for {seconds:.2f} s")

    def joins_of(self, pid):
        """How often the run has told that it joined."""
        return sum(f"pid {pid})" in line for line in self.launcher.text().splitlines() if " joined; " in line)

    def stay(self, leavers):
        """Whether others are in the job for sure: a run ends when its last member goes. Who slept may have been lost meanwhile."""
        def is_member(pid):
            return self.joins_of(pid) >= self.joins_due.get(pid, 0 if pid in self.first else 1)
        return any(pid not in self.asleep and pid not in self.leaving and pid not in leavers and state_of(pid) not in "TZX" and is_member(pid)
                   for pid in children_of(self.launcher.pid))

    def fail(self, why):
        self.story.append(f"  {why}")
        for each in (self.launcher, *self.joined):
            self.story.append(f"--- {each.name} (pid {each.pid}): code {each.popen.poll()}")
            self.story += [line for line in each.text().splitlines() if not re.match(r"(\[rank \d+\] )?(data|model|run|workers)|step \d+/", line)][-60:]
        raise Failure("\n".join(self.story))

    def run(self):
        next_event = self.began + self.rng.uniform(0.3, 1.5)
        while self.launcher.running():
            now = time.monotonic()
            if now > self.began + LIMIT:
                self.fail(f"no end within {LIMIT:g} s")
            self.look()
            if max(next_event, self.quiet_until) <= now < self.began + CALM:
                next_event += self.rng.uniform(0.05, 1.2)
                if "step 1/" in self.launcher.text():
                    if self.first is None:
                        self.first = children_of(self.launcher.pid)
                    self.happen()
            time.sleep(0.05)
        self.ended = time.monotonic()
        self.note(f"the run has ended with code {self.launcher.popen.returncode}")

    def check(self, alone):
        for pid in list(self.asleep):
            send(pid, signal.SIGCONT)
        deadline = time.monotonic() + JOIN_TIMEOUT + 15
        while any(each.running() for each in self.joined):
            if time.monotonic() > deadline:
                self.fail("somebody who joined does not end")
            time.sleep(0.02)
        hashes = [found for each in (self.launcher, *self.joined) for found in WEIGHTS.findall(each.text())]
        standstill = self.standstills.since(self.began)
        if standstill:
            self.note(f"the machine stood still for {standstill[1]:.2f} s, until {self.ended - standstill[0]:.2f} s before the end")
        if self.launcher.popen.returncode == 1 and standstill and self.ended - standstill[0] < 4 * TIMEOUT:
            hashes.append(self.resumed())
        elif self.launcher.popen.returncode != 0 or not hashes:
            self.fail(f"the launcher ended with {self.launcher.popen.returncode}")
        if set(hashes) != {alone}:
            self.fail(f"other weights: {hashes}, not {alone}")
        for path in sorted(self.folder.glob("out/checkpoint-*")):
            if re.search(r"-\d+$", path.name):
                check = subprocess.run([LOCKSTEP, "verify", path], capture_output=True, text=True)
                if check.returncode != 0:
                    self.fail(f"{path.name} does not verify: {check.stdout}{check.stderr}")
        while left := [pid for pid in self.seen if not gone(pid)]:
            if time.monotonic() > deadline:
                self.fail(f"still there: {left}")
            time.sleep(0.02)
        self.check_counts()

    def resumed(self):
        """Where all members stood still at once, each may have to believe that the others went on without it. Then the run ends."""
        try:
            again = subprocess.run([LOCKSTEP, "train", "--data", self.text, *SHAPE, "--steps", str(STEPS), "--out", self.folder / "out",
                                    "--resume"], capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)
        except subprocess.TimeoutExpired:
            self.fail("the resumed run does not end")
        if again.returncode != 0:
            self.fail(f"the run cannot be resumed: {again.stderr}")
        self.note("the run was resumed")
        found = WEIGHTS.search(again.stdout)
        if not found:
            self.fail(f"the resumed run tells no weights:\n{again.stdout}{again.stderr}")
        return found[1]

    def check_counts(self):
        """What a process has grows with the members of the job, not with what has happened: the most of a while, and the least of a later
        one, with no more members. What grows slowly is seen because there is a time between the two."""
        for (pid, _), all_counts in self.counts.items():
            # A change of members is told a little later than it happens.
            around = 10
            counts = [each for before, each, after in zip(all_counts, all_counts[around:], all_counts[2 * around:])
                      if before[1] == each[1] == after[1]]
            if not counts or counts[-1][0] - counts[0][0] < 3:
                continue
            first, last = counts[0][0], counts[-1][0]
            early = [each for each in counts if each[0] < first + (last - first) / 2]
            most = max(each[1] for each in early)
            late = [each for each in counts if each[0] >= last - (last - first) / 3 and each[1] <= most]
            if not late:
                continue
            self.judged += 1
            for column, what, more in ((2, "descriptors", 8), (3, "threads", 4), (4, "mappings of shared memory", 6)):
                had, has = max(each[column] for each in early), min(each[column] for each in late)
                if has > had + more:
                    self.fail(f"pid {pid} had {had} {what} at most in its first half, and never fewer than {has} in its last third")

    def close(self):
        for each in (self.launcher, *self.joined):
            each.popen.kill()
            each.popen.wait()
        for pid in self.seen:
            if not gone(pid):
                send(pid, signal.SIGKILL)
        self.port_holder.__exit__(None, None, None)


def main():
    print(f"LOCKSTEP_CHAOS_SEED={SEED}", flush=True)
    before = segments()
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        text = temporary / "text.txt"
        text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(300)))
        alone = subprocess.run([LOCKSTEP, "train", "--data", text, *SHAPE[:-2], "--steps", str(STEPS)], capture_output=True, text=True,
                               env=ENVIRONMENT, check=True, timeout=LIMIT)
        alone = WEIGHTS.search(alone.stdout)[1]
        began, number, events, judged = time.monotonic(), 0, 0, 0
        standstills = Standstills(STANDSTILL)
        while number == 0 or time.monotonic() - began < SECONDS:
            rng = random.Random(f"{SEED} {number}")
            folder = temporary / str(number)
            folder.mkdir()
            run = Run(number, rng, folder, text, rng.choice(("tcp", "shm", "auto")), rng.random() < 0.5, standstills)
            try:
                run.run()
                run.check(alone)
            except Failure as failure:
                print(f"{failure}\nFAILED  LOCKSTEP_CHAOS_SEED={SEED}", flush=True)
                return 1
            finally:
                run.close()
            happened = len(run.story) - 2
            print(f"ok      {run.story[0]}, {happened} events, {time.monotonic() - run.began:.1f} s", flush=True)
            number, events, judged = number + 1, events + happened, judged + run.judged
        if left := segments() - before:
            print(f"FAILED  segments are left: {left}")
            return 1
    print(f"{number} runs, {events} events, all with the weights of one worker; what {judged} processes had was compared with what they had before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
