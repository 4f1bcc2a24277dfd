#!/usr/bin/env python3
"""torchrun over two nodes in network namespaces: one hash; a killed worker's restart finds its checkpoint; run ids keep jobs apart."""
# ctest: RUN_SERIAL TRUE TIMEOUT 180
# builds: release

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import Hosts, command, enter_own_network  # noqa: E402
from ranks import Cases, Failure, die_with_parent, gone, skip  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
# Of another PyTorch than the distribution's, where it is given.
TORCHRUN = os.environ.get("TORCHRUN") or "/usr/bin/torchrun"
STEPS = 30
PATIENCE = 90
SHAPE = ("--hidden 32 --layers 1 --heads 2 --intermediate 48 --context 32 --global-batch 16 --micro-batch 2 --threads 1 "
         "--log plain --eval-every 0 --timeout 5").split()
WEIGHTS = re.compile(r"weights (\S+)$", re.M)  # torchrun puts words ahead
SLOW = ";".join(f"rank={rank} step=1 at=step do=slow ms=100" for rank in (0, 1))


class Node:
    """torchrun on a host; what it and its workers say is kept in a file."""

    def __init__(self, host, address, folder, number, options, words):
        self.said = folder / f"node-{number}"
        # The default of the last two is lost on PyTorch 1.13 under Python 3.11.
        whole = [TORCHRUN, "--nnodes", 2, "--nproc_per_node", 1, "--node_rank", number, "--redirects", 1, "--tee", 1, *options, "--no_python", "--",
                 LOCKSTEP, "train", *words]
        # Workers meet at the name of a host: here its address, which needs no lookup.
        named = ["unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "sh"]
        environment = {**os.environ, "LOCKSTEP_FAULT": SLOW, "LOCKSTEP_TOKEN": "correct horse battery staple", "TMPDIR": str(folder),
                       "PYTHONWARNINGS": "ignore"}
        with open(self.said, "wb") as file:
            self.popen = subprocess.Popen([*host.enter, *named, *map(str, whole)], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                          preexec_fn=die_with_parent, env=environment, cwd=folder)

    def text(self):
        return self.said.read_text(errors="replace")


class Job:
    """Two nodes that meet at host 0."""

    def __init__(self, hosts, folder, name, port, *words):
        self.folder = folder / name
        self.folder.mkdir()
        options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{hosts.network.address(0)}:{port}", "--rdzv_id", name,
                   "--max_restarts", 2, "--monitor_interval", 1]
        self.nodes = [Node(hosts[i], hosts.network.address(i), self.folder, i, [*options, "--rdzv_conf", f"is_host={1 - i}"], words)
                      for i in (0, 1)]

    def wait(self, ready, what):
        deadline = time.monotonic() + PATIENCE
        while not ready():
            self.expect(time.monotonic() < deadline, f"no {what} within {PATIENCE} s")
            time.sleep(0.05)

    def expect(self, condition, what):
        if not condition:
            raise Failure("\n".join([what, *(f"--- code {node.popen.poll()}\n{node.text()[-2500:]}" for node in self.nodes)]))

    def wait_step(self, number):
        def stepped():
            self.expect(all(node.popen.poll() is None for node in self.nodes), "a node has ended")
            return any(f"step {number}/" in node.text() for node in self.nodes)
        self.wait(stepped, f"step {number}")

    def workers(self):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if words.startswith(f"{LOCKSTEP}\0train".encode()) and os.readlink(f"/proc/{pid}/cwd") == str(self.folder):
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def expect_weights(self, alone):
        self.wait(lambda: all(node.popen.poll() is not None for node in self.nodes), "end")
        self.expect(all(node.popen.returncode == 0 for node in self.nodes), "a node failed")
        # After the last step: a worker that torchrun ends before it says its weights, too.
        hashes = [found for node in self.nodes for found in WEIGHTS.findall(node.text().partition(f"step {STEPS}/")[2])]
        self.expect(set(hashes) == {alone}, f"weights: {hashes}, not {alone}")
        self.wait(lambda: not self.workers(), "end of all workers")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes:
            node.popen.kill()
            node.popen.wait()
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)


def worker_killed(hosts, folder, text, alone):
    """torchrun ends the workers of both nodes and starts them anew; those go on from the checkpoint."""
    with Job(hosts, folder, "first", 29400, "--data", text, *SHAPE, "--steps", STEPS, "--out", "my-model", "--save-every", 5, "--save-wait",
             "--resume") as job:
        job.wait_step(12)
        job.wait(lambda: (job.folder / "my-model/checkpoint-10").exists(), "checkpoint")
        before = job.workers()
        os.kill(max(before), signal.SIGKILL)
        job.expect_weights(alone)
        resumed = [line for node in job.nodes for line in node.text().splitlines() if "goes on" in line or "resum" in line.lower()]
        job.expect(resumed, "nobody went on from a checkpoint")
        job.expect(all(gone(pid) for pid in before), "the first attempt is still there")


def two_jobs(hosts, folder, text, alone):
    """At once on the same hosts, with run ids of their own."""
    words = ["--data", text, *SHAPE, "--steps", STEPS]
    with Job(hosts, folder, "one", 29401, *words) as one, Job(hosts, folder, "two", 29402, *words) as two:
        one.expect_weights(alone)
        two.expect_weights(alone)


def main():
    if not shutil.which(TORCHRUN):
        skip("torchrun not found")
    enter_own_network()
    command("ip", "link", "set", "lo", "up")
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary) / "text.txt"
        text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(120)))
        alone = subprocess.run([LOCKSTEP, "train", "--data", text, *SHAPE, "--steps", str(STEPS)], capture_output=True, text=True, check=True)
        alone = WEIGHTS.search(alone.stdout)[1]
        with Hosts(2) as hosts:
            cases = Cases(at_once=2)
            cases.run("a worker is killed", worker_killed, hosts, Path(temporary), text, alone)
            cases.run("two jobs on the same hosts", two_jobs, hosts, Path(temporary), text, alone)
            cases.finish()


if __name__ == "__main__":
    main()
