"""Ranks as real processes (fault_rank), for tests that see what becomes of them."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FAULT_RANK = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "fault_rank")
SANITIZED = bool(os.environ.get("LOCKSTEP_SANITIZERS"))
# How much later than promised something may happen before a test calls it late.
SLACK = 5.0 if SANITIZED else 1.0
PATIENCE = 30.0  # for what must happen but has no promised time

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1


def die_with_parent():
    """In a child, before exec: nothing outlives the test, however it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def state_of(pid):
    """A letter: T is stopped, Z has ended, X has ended and somebody has asked how."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def gone(pid):
    """It has ended, whether or not somebody has asked how."""
    return state_of(pid) in "ZX"


def children_of(pid):
    """Those that its main thread has started, the oldest first; none if it has gone."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return sorted(int(child) for child in file.read().split())
    except OSError:
        return []


def ports_of(pids):
    """Where these processes listen, over TCP on loopback."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"^socket:\[(\d+)\]$", os.readlink(link)))
            except FileNotFoundError:  # closed meanwhile
                pass
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    return sorted(int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == listening and row[9] in inodes)


@contextlib.contextmanager
def reserved_port():
    """A port of loopback, bound and not listening: a rank 0 may take it, nobody else will be given it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def wait_for(ready, what, patience=2 * PATIENCE):
    """What `ready` returns, once that is something."""
    deadline = time.monotonic() + patience
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {patience:g} s")
        time.sleep(0.05)
    return found


class Failure(Exception):
    pass


class Pulse:
    """How long this machine let us wait for a processor: a thread that wants to run every few milliseconds."""

    BEAT = 0.02

    def __init__(self):
        self.lost = 0.0
        self._beat = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            begin = time.monotonic()
            self._beat.wait(self.BEAT)
            late = time.monotonic() - begin - self.BEAT
            if late > self.BEAT:
                self.lost += late


pulse = Pulse()


class Stopwatch:
    """Seconds since it was made, without those that the machine did not let us run."""

    def __init__(self):
        self._begin = time.monotonic()
        self._lost_before = pulse.lost

    def lost(self):
        return pulse.lost - self._lost_before

    def seconds(self):
        return time.monotonic() - self._begin - self.lost()


class Rank:
    """One process. Its stdout is a stream of events, kept in `events`."""

    def __init__(self, number, command, environment, changed, descriptors=()):
        self.number = number
        self.events = []
        self.ended_at = None
        self.noise = []  # what it said on stderr
        self._changed = changed
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment}, pass_fds=descriptors, preexec_fn=die_with_parent)
        self._drainer = threading.Thread(target=self._drain, daemon=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._drainer.start()
        self._listener.start()

    def _listen(self):
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        self.process.wait()
        ended_at = time.monotonic()
        self._drainer.join()  # so that all it said is there when it has ended
        with self._changed:
            self.ended_at = ended_at
            self._changed.notify_all()

    def _drain(self):
        self.noise += self.process.stderr.readlines()

    def find(self, event, **fields):
        for each in self.events:
            if each["event"] == event and all(each.get(name) == value for name, value in fields.items()):
                return each
        return None

    @property
    def error(self):
        return self.find("error")

    def tell(self, line="go"):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self._listener.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                stream.close()
            except BrokenPipeError:
                pass


class Job:
    """Ranks that meet at a port of loopback, or at `master`. Use in a with statement: it ends them all.

    `arguments` are for all, `special[rank]` for one; `inside[rank]` is a command that starts the rank
    (in another namespace, say).
    """

    def __init__(self, world_size, arguments, special=None, inside=None, master=None, start=True):
        self.world_size = world_size
        self.arguments = [str(a) for a in arguments]
        self.special = special or {}
        self.inside = inside or {}
        self.changed = threading.Condition()
        self.watch = Stopwatch()
        self.listener = None
        if master is None:
            # Ours at once, but nobody is served before rank 0 is started.
            self.listener = socket.socket()
            self.listener.bind(("127.0.0.1", 0))
            self.listener.setblocking(False)  # as the library's own sockets are
            master = self.listener.getsockname()
        self.master = master
        self.ranks = {}
        if start:
            for rank in range(world_size):
                self.start(rank)

    def start(self, rank, key=None, arguments=(), inside=None, environment=None):
        """`key` names the process in `ranks` where one rank is started twice."""
        variables = {"RANK": str(rank), "WORLD_SIZE": str(self.world_size), "MASTER_ADDR": self.master[0],
                     "MASTER_PORT": str(self.master[1]), **(environment or {})}
        descriptors = ()
        if rank == 0 and self.listener and key is None:
            variables["LOCKSTEP_RENDEZVOUS_FD"] = str(self.listener.fileno())
            descriptors = (self.listener.fileno(),)
            self.listener.listen(512)
        prefix = self.inside.get(rank, []) if inside is None else inside
        special = [str(a) for a in [*self.special.get(rank, []), *arguments]]
        command = [*prefix, FAULT_RANK, *self.arguments, *special]
        started = Rank(rank, command, variables, self.changed, descriptors)
        self.ranks[rank if key is None else key] = started
        if descriptors:
            self.listener.close()
            self.listener = None
        return started

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        story = self.story()
        for rank in self.ranks.values():
            rank.end()
        if self.listener:
            self.listener.close()
        if isinstance(error, OSError):  # of the test's own sockets and pipes; tell what the ranks did
            raise Failure(f"{error}\n{story}") from error

    def wait(self, ready, what, patience=PATIENCE):
        with self.changed:
            if not self.changed.wait_for(ready, patience):
                raise Failure(f"no {what} within {patience:g} s\n{self.story()}")

    def wait_event(self, rank, event, **fields):
        self.wait(lambda: self.ranks[rank].find(event, **fields) or self.ranks[rank].ended_at,
                  f"'{event}' from rank {rank}")
        found = self.ranks[rank].find(event, **fields)
        if not found:
            raise Failure(f"rank {rank} ended without '{event}'\n{self.story()}")
        return found

    def wait_ended(self, ranks=None):
        ranks = list(self.ranks) if ranks is None else ranks
        self.wait(lambda: all(self.ranks[r].ended_at for r in ranks), f"end of {ranks}")

    def story(self):
        lines = []
        for key, rank in self.ranks.items():
            lines.append(f"  rank {key}: code {rank.process.poll()}, ended at {rank.ended_at}")
            lines += [f"    {event}" for event in rank.events[-4:]]
            lines += [f"    stderr: {line.rstrip()}" for line in rank.noise[-8:]]
        return "\n".join(lines)

    def expect(self, condition, what):
        if not condition:
            raise Failure(f"{what}\n{self.story()}")

    def expect_failed(self, ranks, blamed, since, limit, code=None):
        """Every one of `ranks` ends by itself within `limit` seconds of `since`, and names one of `blamed`."""
        self.wait_ended(ranks)
        late = 0.0
        for r in ranks:
            rank = self.ranks[r]
            self.expect(rank.process.returncode == 1 and rank.error, f"rank {r} did not fail as it should")
            self.expect(rank.error["blamed_rank"] in blamed,
                        f"rank {r} blames {rank.error['blamed_rank']}, not {blamed}")
            self.expect(f"rank {rank.error['blamed_rank']}" in rank.error["message"], f"rank {r} does not name it")
            if code:
                self.expect(rank.error["error_code"] in code, f"rank {r}: {rank.error['error_code']}, not {code}")
            late = max(late, rank.ended_at - since)
        # Promises are made for a machine that lets its processes run.
        lost = self.watch.lost()
        self.expect(late <= limit + lost,
                    f"the last rank took {late:.2f} s, {limit:.2f} s are allowed ({lost:.2f} s were lost to others)")
        return late

    def expect_success(self, ranks=None):
        ranks = list(self.ranks) if ranks is None else ranks
        self.wait_ended(ranks)
        for r in ranks:
            self.expect(self.ranks[r].process.returncode == 0, f"rank {r} failed")


class Cases:
    """Runs cases, some of them at once because most only wait for an end; goes on after a failure, tells at the end."""

    def __init__(self, at_once=1):
        self.failed = 0
        self._slowest = 0.0
        self._pool = ThreadPoolExecutor(at_once)
        self._running = []

    def run(self, name, body, *arguments):
        self._running.append(self._pool.submit(self._run, name, body, arguments))

    def _run(self, name, body, arguments):
        begin = time.monotonic()
        try:
            took = body(*arguments)
        except Failure as failure:
            print(f"FAILED  {name}: {failure}", flush=True)
            return False
        self._slowest = max(self._slowest, took or 0.0)
        note = "" if took is None else f", ended after {took:.2f} s"
        print(f"ok      {name} ({time.monotonic() - begin:.1f} s{note})", flush=True)
        return True

    def wait(self):
        """Until all that were begun have ended."""
        self.failed += sum(not case.result() for case in self._running)
        self._running = []

    def finish(self):
        self.wait()
        print(f"{self.failed} failed; the slowest end came {self._slowest:.2f} s after its fault")
        sys.exit(1 if self.failed else 0)
