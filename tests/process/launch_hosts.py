#!/usr/bin/env python3
"""`lockstep launch` over hosts with real sshd, each in a network namespace: one hash, and whatever goes wrong is named and leaves nothing."""
# ctest: RUN_SERIAL TRUE TIMEOUT 240
# builds: release

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import command, enter_own_network  # noqa: E402
from ranks import Cases, Failure, die_with_parent  # noqa: E402
from ssh_hosts import NAMES, SshHosts, command_line, make_keys, need_sshd, wait  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
TIMEOUT = 6  # of the launch: ssh takes seconds to come in on a busy machine
SILENCE = 3  # of the job
STEPS = 12
PATIENCE = 60
SHAPE = ("--hidden 32 --layers 1 --heads 2 --intermediate 48 --context 32 --global-batch 16 --micro-batch 2 --threads 1 "
         "--log plain --eval-every 0").split()
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
# Steps that take a while: what is to happen in the run does.
SLOW = "LOCKSTEP_FAULT=" + ";".join(f"rank={rank} step=1 at=step do=slow ms=150" for rank in (0, "newcomer"))


class Cluster(SshHosts):
    """Hosts a, b and c with an sshd each, and one to launch from, on one network."""

    def __init__(self, folder, text):
        super().__init__(folder, folder.parent, 3)
        self.text = text
        self.ssh = f"ssh -F {self.config}"
        self.launched = []

    def launch(self, *words, options=(), hosts="a,b:2,c"):
        return Launch(self, ["--hosts", hosts, "--ssh", self.ssh, "--timeout", TIMEOUT, "--env", SLOW, *options], words)

    def train(self, *words, **options):
        return self.launch("--data", self.text, *SHAPE, "--steps", STEPS, "--timeout", SILENCE, *words, **options)

    def __exit__(self, *_):
        for each in self.launched:
            each.popen.kill()
            each.popen.wait()
        super().__exit__()


class Launch:
    """The launcher. What it says is kept in files."""

    def __init__(self, cluster, options, words):
        self.cluster = cluster
        self.out, self.err = (cluster.folder / f"{name}-{len(cluster.launched)}" for name in ("out", "err"))
        whole = [LOCKSTEP, "launch", *options, "--", "train", *words]
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            self.popen = subprocess.Popen([*cluster.start.enter, *map(str, whole)], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                          preexec_fn=die_with_parent, cwd=cluster.folder)
        cluster.launched.append(self)

    def story(self):
        return f"--- code {self.popen.poll()}\n{self.out.read_text()}\n{self.err.read_text(errors='replace')}\n{self.cluster.served()}"

    def expect(self, condition, what):
        if not condition:
            raise Failure(f"{what}\n{self.story()}")

    def wait_step(self, number):
        text = f"step {number}/"
        wait(lambda: text in self.out.read_text() or self.popen.poll() is not None, text, PATIENCE, self.story)
        self.expect(text in self.out.read_text(), f"it did not come to '{text}'")

    def wait_ended(self, code):
        wait(lambda: self.popen.poll() is not None, "end", PATIENCE, self.story)
        self.expect(self.popen.returncode == code, f"it ended with {self.popen.returncode}, not {code}")
        self.cluster.expect_nothing_left(4 * TIMEOUT, self.story)

    def expect_weights(self, alone):
        self.expect(WEIGHTS.findall(self.out.read_text()) == [alone], f"not the weights of one worker, {alone}")

    def expect_said(self, pattern):
        self.expect(re.search(pattern, self.err.read_text(errors="replace"), re.M), f"nothing matches '{pattern}'")


def one_hash(cluster, alone):
    """Four workers on three hosts; every line has a host; the token is in no command line and no environment."""
    hosts = cluster.folder / "hosts"
    hosts.write_text("# the hosts of this test\na\nb slots=2  # two workers\nc slots=1 max_slots=8\n")
    run = Launch(cluster, ["--hostfile", hosts, "--ssh", cluster.ssh, "--env", SLOW],
                 ["--data", cluster.text.name, *SHAPE, "--steps", STEPS, "--out", "my-model"])
    run.wait_step(1)
    workers = [pid for pid in cluster.left() if b"train" in command_line(pid).split(b"\0")]
    run.expect(len(workers) >= 5, f"{len(workers)} processes of train")
    tokens = set()
    for pid in workers:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if "lockstep-token" in os.readlink(link):
                tokens.add(link.read_bytes())
    run.expect(len(tokens) == 1 and len(min(tokens)) >= 32, f"{len(tokens)} tokens")
    token = tokens.pop()
    for pid in [*cluster.left(), run.popen.pid]:
        for name in ("cmdline", "environ"):
            run.expect(token not in Path(f"/proc/{pid}/{name}").read_bytes(), f"the token is in the {name} of process {pid}")
    run.wait_ended(0)
    run.expect_weights(alone)
    run.expect((cluster.folder / "my-model/model.safetensors").exists(), "no model")
    strange = [line for line in run.err.read_text().splitlines() if not re.match(r"\[(a|b|c)\] ", line)]
    run.expect(not strange, f"lines without a host: {strange}")
    run.expect_said(r"^\[a\] \[rank 0\] the weights of all 4 workers are the same")


def host_refuses(cluster, _):
    """Nothing is started anywhere, and the host is named."""
    cluster.servers[1].terminate()
    cluster.servers[1].wait()
    run = cluster.train()
    run.wait_ended(1)
    run.expect_said(r"^error: host b cannot be used: ssh failed, with exit code 255: .*[Rr]efused")
    run.expect("lockstep train" not in run.err.read_text(), "something was started")


def program_missing(cluster, _):
    run = cluster.train(options=["--program", "/nowhere/lockstep"], hosts="c")
    run.wait_ended(1)
    run.expect_said(r"^error: host c has no program /nowhere/lockstep that can be run \(--program names another\)")


def host_does_not_answer(cluster, _):
    cluster.hosts.network.set_port(2, "down")
    run = cluster.train(hosts="c", options=["--timeout", 2])
    run.wait_ended(1)
    run.expect_said(r"^error: host c (did not answer ssh within 2s|cannot be used: ssh .*No route)")


def wrong_on_a_host(cluster, _):
    """The host that says so first is named, with its words, and all end."""
    run = cluster.launch("--data", "no-such-file", *SHAPE)
    run.wait_ended(1)
    run.expect_said(r"^error: host [abc] failed, with exit code 1: .*no-such-file")
    run = cluster.train("--workers", 2)
    run.wait_ended(2)
    run.expect_said(r"^error: host [abc] --workers does not go with lockstep launch")


def host_vanishes(cluster, alone, victim):
    """The others go on to the same weights; its own processes end, too."""
    run = cluster.train("--out", "my-model", hosts="a,b,c")
    run.wait_step(2)
    cluster.hosts.network.set_port(victim, "down")
    run.wait_ended(0)
    run.expect_weights(alone)
    run.expect_said(rf"^warning: host {NAMES[victim]} .*; the others go on")


def connection_is_cut(cluster, alone):
    """Only the remote shell of a host dies: its agent ends the workers there in order."""
    run = cluster.train(hosts="a,b,c")
    run.wait_step(2)
    shells = [pid for pid in cluster.left() if command_line(pid).startswith(b"ssh\0") and b"\0b\0" in command_line(pid)]
    run.expect(len(shells) == 1, f"{len(shells)} remote shells of b")
    os.kill(shells[0], signal.SIGKILL)
    run.wait_ended(0)
    run.expect_weights(alone)
    run.expect_said(r"^warning: host b is lost: ssh was killed by signal 9 \(Killed\)")


def stopped(cluster, alone, number):
    """A signal stops and saves; the run can go on from there."""
    run = cluster.train("--out", "my-model", "--save-wait")
    run.wait_step(3)
    run.popen.send_signal(number)
    run.wait_ended(128 + number)
    run.expect(list((cluster.folder / "my-model").glob("checkpoint-*")), "nothing is saved")
    again = Launch(cluster, ["--hosts", "b,c", "--ssh", cluster.ssh], ["--resume", "my-model", "--log", "plain"])
    again.wait_ended(0)
    again.expect_weights(alone)


def launcher_killed(cluster, alone):
    run = cluster.train("--out", "my-model")
    run.wait_step(2)
    run.popen.kill()
    run.wait_ended(-signal.SIGKILL)
    run.expect(list((cluster.folder / "my-model").glob("checkpoint-*")), "nothing is saved")


def launcher_vanishes(cluster, _):
    """Its host is cut off: no connection is closed, and yet the hosts end what they run."""
    run = cluster.train("--out", "my-model", "--steps", 500)
    run.wait_step(1)
    cluster.hosts.network.set_port(3, "down")
    run.wait_ended(1)
    run.expect_said(r"^error: all hosts are lost; the first of them, a, was silent for 6s")


def main():
    need_sshd()
    enter_own_network()
    command("ip", "link", "set", "lo", "up")
    only = os.environ.get("LOCKSTEP_CASE", "")
    with tempfile.TemporaryDirectory() as temporary:
        make_keys(Path(temporary))
        lines = "".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(120))
        text = Path(temporary) / "text.txt"
        text.write_text(lines)
        alone = subprocess.run([LOCKSTEP, "train", "--data", text, *SHAPE, "--steps", str(STEPS)], capture_output=True, text=True, check=True)
        alone = WEIGHTS.search(alone.stdout)[1]
        folders, lock = iter(range(100)), threading.Lock()

        def with_cluster(body, *arguments):
            with lock:
                folder = Path(temporary) / str(next(folders))
                folder.mkdir()
                (folder / "text.txt").write_text(lines)
                cluster = Cluster(folder, folder / "text.txt")
            with cluster:
                body(cluster, alone, *arguments)

        cases = Cases(at_once=3)
        for name, body, *arguments in (("one hash over three hosts", one_hash), ("a host refuses", host_refuses),
                                       ("a host without the program", program_missing), ("a host does not answer", host_does_not_answer),
                                       ("something is wrong on a host", wrong_on_a_host), ("a host vanishes", host_vanishes, 2),
                                       ("the first host vanishes", host_vanishes, 0), ("a connection is cut", connection_is_cut),
                                       ("Ctrl-C", stopped, signal.SIGINT), ("SIGTERM", stopped, signal.SIGTERM),
                                       ("the launcher is killed", launcher_killed), ("the launcher's host vanishes", launcher_vanishes)):
            if only in name:
                cases.run(name, with_cluster, body, *arguments)
        cases.finish()


if __name__ == "__main__":
    main()
