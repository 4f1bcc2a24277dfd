#!/usr/bin/env python3
"""A run on several hosts whose links are cut: it goes on where it can, and whoever tells of weights tells those of one worker."""
# ctest: PROCESSORS 2 TIMEOUT 300 COST 40
# builds: release

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import Hosts, command, enter_own_network  # noqa: E402
from ranks import Cases, Failure, children_of, die_with_parent  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
TIMEOUT = 2
STEPS = 40
PATIENCE = 60
PORT = 4711  # in namespaces of our own
SHAPE = ("--hidden 32 --layers 2 --heads 2 --intermediate 48 --context 32 --global-batch 22 --micro-batch 2 --threads 1 "
         "--log plain --eval-every 10 --verify-every 5").split()
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)


class Process:
    """On a host; what it says is kept in a file."""

    def __init__(self, host, folder, name, *words, inside=(), fault=""):
        self.name = name
        self.said = folder / name
        with open(self.said, "wb") as file:
            self.popen = subprocess.Popen([*host.enter, *inside, LOCKSTEP, "train", *map(str, words)], stdin=subprocess.DEVNULL, stdout=file,
                                          stderr=subprocess.STDOUT, preexec_fn=die_with_parent, env=self.environment(fault))

    @staticmethod
    def environment(fault):
        """Steps that take a while: what is to happen in the run does."""
        slow = [f"rank={rank} step=1 at=step do=slow ms=100" for rank in (0, "newcomer")]
        return {**os.environ, "LOCKSTEP_FAULT": ";".join([*slow, *([fault] if fault else [])])}

    def text(self):
        return self.said.read_text(errors="replace")

    def ended(self):
        return self.popen.poll() is not None


class Run:
    """A job on host 0, which every other host joins with one worker."""

    def __init__(self, hosts, folder, text, alone, inside=(), workers=1, on=None, count=None, fails=None, fault=""):
        """`on`: what the launcher listens on, if not the address of its host; `count`: so many hosts take part; `fault`: on host
        `fails`."""
        self.hosts = hosts
        self.fault = {fails: fault}
        self.folder = Path(folder)
        self.alone = alone
        self.text = text
        self.out = self.folder / "out"
        self.token = self.folder / "token"
        self.token.write_text("correct horse battery staple\n")
        self.token.chmod(0o600)
        self.address = f"{hosts.network.address(0)}:{PORT}"
        count = count or (len(hosts.hosts) if workers == 1 else workers)
        self.processes = [Process(hosts[0], self.folder, "host-0", "--data", text, *SHAPE, "--steps", STEPS, "--workers", workers, "--timeout",
                                  TIMEOUT, "--listen", f"{on}:{PORT}" if on else self.address, "--expect", count, "--token-file", self.token,
                                  "--out", self.out, "--save-every", 10, inside=inside, fault=self.fault.get(0, ""))]
        self.wait(lambda: "others can join" in self.processes[0].text(), "listener")
        if workers == 1:
            for i in range(1, count):
                self.join(i)
        self.wait(lambda: "step 1/" in self.processes[0].text(), "step 1")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.processes:
            each.popen.kill()
            each.popen.wait()

    def join(self, host, *also, inside=()):
        self.processes.append(Process(self.hosts[host], self.folder, f"host-{host}", "--join", self.address, "--data", self.text,
                                      "--token-file", self.token, *also, inside=inside, fault=self.fault.get(host, "")))
        return self.processes[-1]

    def wait(self, ready, what):
        deadline = time.monotonic() + PATIENCE
        while not ready():
            self.expect(time.monotonic() < deadline, f"no {what} within {PATIENCE} s")
            time.sleep(0.02)

    def expect(self, condition, what):
        if condition:
            return
        story = [what]
        for each in self.processes:
            story.append(f"--- {each.name}: code {each.popen.poll()}")
            story += [line for line in each.text().splitlines() if not re.match(r"(\[\w+ \d+\] )?(data|model|run|workers)|step \d+/", line)][-25:]
        raise Failure("\n".join(story))

    def worker(self, host):
        """The process there that trains: the first has a launcher."""
        pid = self.processes[host].popen.pid
        return pid if host else children_of(pid)[0]

    def lost(self):
        """Whom the run has lost, as its metrics tell."""
        rows = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [who for row in rows if row.get("event") in ("lost", "expelled") for who in row["who"]]

    def expect_result(self, finishers):
        """These end in order, the others somehow; nobody tells of other weights, and what was written verifies."""
        self.wait(lambda: all(each.ended() for each in self.processes), "end of all")
        for i in finishers:
            self.expect(self.processes[i].popen.returncode == 0, f"host {i} ended with {self.processes[i].popen.returncode}")
        hashes = [found for each in self.processes for found in WEIGHTS.findall(each.text())]
        self.expect(hashes and set(hashes) == {self.alone}, f"weights: {hashes}, not {self.alone}")
        checkpoints = [path for path in self.out.glob("checkpoint-*") if re.search(r"-\d+$", path.name)]
        self.expect(self.out / f"checkpoint-{STEPS}" in checkpoints, f"the last checkpoint is not among {checkpoints}")
        for path in checkpoints:
            check = subprocess.run([LOCKSTEP, "verify", path], capture_output=True, text=True)
            self.expect(check.returncode == 0, f"{path.name}: {check.stdout}{check.stderr}")
        return hashes


def host_vanishes(start, victim):
    with Hosts(3) as hosts, start(hosts) as run:
        pid = run.worker(victim)
        hosts[victim].run("ip", "link", "set", "eth0", "down")
        run.expect_result([i for i in range(3) if i != victim])
        run.expect(any(f"pid {pid})" in who for who in run.lost()), f"lost: {run.lost()}, not pid {pid}")


def disk_fails(start, host):
    """The others have files of their own, unless it is that of rank 0, which writes for all."""
    words = "this failure was asked for"
    with Hosts(3) as hosts, start(hosts, fails=host, fault="rank=any step=5 at=data do=fail") as run:
        if host == 0:
            run.wait(lambda: all(each.ended() for each in run.processes), "end of all")
            for each in run.processes:
                run.expect(each.popen.returncode == 1 and words in each.text(), f"{each.name} does not say why the job ends")
            return
        run.expect_result([i for i in range(3) if i != host])
        run.expect(run.processes[host].popen.returncode == 1 and words in run.processes[host].text(), "it does not say why it fails")
        lost = rf"step 5: lost rank [12] \(\S+, pid {run.worker(host)}\)[^;]*{words}"
        run.expect(re.search(lost, run.processes[0].text()), "the run does not say why it was lost")


def link_is_cut(start):
    """Hosts 1 and 2 no longer reach each other; host 0 reaches both. One of them is expelled, and cannot come back."""
    with Hosts(3) as hosts, start(hosts) as run:
        hosts.network.isolate(1)
        hosts.network.isolate(2)
        run.expect_result([0])


def listens_on_all_addresses(start):
    """Host 1 reaches the launcher's worker, though that has come to the launcher by no address of its own. A worker on host 2 that nobody
    reaches is turned away, and told what to do; the others go on."""
    with Hosts(3) as hosts, start(hosts, on="0.0.0.0", count=2) as run:
        astray = run.join(2, "--interface", "lo")
        run.wait(astray.ended, "end of the one that nobody reaches")
        run.expect(astray.popen.returncode == 1, f"it ended with {astray.popen.returncode}")
        run.expect(re.search(r"listens on 127\.0\.0\.1:\d+, which rank 0 .* on another host cannot reach; choose its network with "
                             r"--interface", astray.text()), "it is not told why")
        run.processes.remove(astray)
        run.expect_result([0, 1])
        run.expect("loses" not in run.processes[0].text() and "lost" not in run.processes[0].text(), "somebody was lost")


def split_into_halves(start):
    """Both go on. One of them has the outputs."""
    with Hosts(4) as hosts, start(hosts) as run:
        command("ip", "link", "add", "apart", "type", "bridge")
        try:
            command("ip", "link", "set", "apart", "up")
            for host in (2, 3):
                command("ip", "link", "set", hosts.network.port(host), "master", "apart")
            run.expect_result(range(4))
            for half in ((0, 1), (2, 3)):  # expect_result() has compared what they tell
                run.expect(any(WEIGHTS.search(run.processes[i].text()) for i in half), f"hosts {half} tell of no weights")
        finally:
            command("ip", "link", "del", "apart")


def short_cut(start):
    """The link comes back before anybody is missed."""
    with Hosts(3) as hosts, start(hosts) as run:
        hosts.network.set_port(2, "down")
        time.sleep(0.4 * TIMEOUT)  # the length of the cut is what is tried here
        hosts.network.set_port(2, "up")
        run.expect_result([0, 1])


def number_inside(pid):
    """As the process sees itself."""
    return int(re.search(r"^NSpid:.*\t(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def two_containers(start):
    """Of one machine, where processes have the same numbers: who dies in one of them is nobody in the other."""
    own = ["unshare", "--pid", "--fork", "--kill-child"]
    with Hosts(2) as hosts, start(hosts, inside=own, workers=2) as run:
        launcher, = children_of(run.processes[0].popen.pid)
        number = number_inside(children_of(launcher)[1])
        run.join(1, inside=[*own, "sh", "-c", f'echo {number - 1} > /proc/sys/kernel/ns_last_pid && "$@"; true', "sh"])
        joiner = run.processes[1]
        run.wait(lambda: "joined the job as rank" in joiner.text() or joiner.ended(), "worker that joins")
        process, = children_of(children_of(joiner.popen.pid)[0])
        run.expect(number_inside(process) == number, "the numbers differ")
        os.kill(process, signal.SIGKILL)
        run.expect_result([0])
        said = run.processes[0].text()
        run.expect("lost rank 2 " in said and "signal" not in said, "a worker of the launcher was ended with the other one")


def main():
    enter_own_network()
    command("ip", "link", "set", "lo", "up")
    only = os.environ.get("LOCKSTEP_CASE", "")
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary) / "text.txt"
        text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(300)))
        alone = subprocess.run([LOCKSTEP, "train", "--data", text, *SHAPE, "--steps", str(STEPS)], capture_output=True, text=True, check=True)
        alone = WEIGHTS.search(alone.stdout)[1]
        folders, lock = iter(range(100)), threading.Lock()

        def start(hosts, **how):
            with lock:
                folder = Path(temporary) / str(next(folders))
            folder.mkdir()
            return Run(hosts, folder, text, alone, **how)

        cases = Cases(at_once=3)
        for name, body, *arguments in (("a host that joined vanishes", host_vanishes, 2), ("the launcher's host vanishes", host_vanishes, 0),
                                       ("a link is cut", link_is_cut), ("a disk fails", disk_fails, 2), ("the disk of rank 0 fails", disk_fails, 0),
                                       ("a launcher that listens on all addresses", listens_on_all_addresses),
                                       ("a split into halves", split_into_halves), ("a cut that nobody notices", short_cut),
                                       ("two containers of a machine", two_containers)):
            if only in name:
                cases.run(name, body, start, *arguments)
        cases.finish()


if __name__ == "__main__":
    main()
