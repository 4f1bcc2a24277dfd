#!/usr/bin/env python3
"""mpirun of Open MPI and of MPICH over hosts with real sshd, each in a network namespace: one hash; a rank that dies is named and ends the job."""
# ctest: RUN_SERIAL TRUE TIMEOUT 240
# builds: release

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import command, enter_own_network  # noqa: E402
from ranks import Cases, Failure, die_with_parent, skip  # noqa: E402
from ssh_hosts import NAMES, SshHosts, make_keys, need_sshd, wait  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
OVER_MPICH = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "command_over_mpich")
STEPS = 12
SILENCE = 3  # of the job
PATIENCE = 60
SHAPE = ("--hidden 32 --layers 1 --heads 2 --intermediate 48 --context 32 --global-batch 16 --micro-batch 2 --threads 1 "
         "--log plain --eval-every 0").split()
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
# The recipes of docs/clusters.md. Four ranks; the hosts have two networks, and eth0 is to be used.
LAUNCHERS = {
    "Open MPI": (LOCKSTEP, "mpirun.openmpi --host a,b:2,c --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 -x LOCKSTEP_FAULT"),
    "Open MPI with a host file": (LOCKSTEP, "mpirun.openmpi --hostfile hosts --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 "
                                            "-x LOCKSTEP_FAULT"),
    "MPICH": (OVER_MPICH, "mpirun.mpich -launcher ssh -hosts a,b:2,c -np 4 -iface eth0 -genv UCX_NET_DEVICES eth0"),
}
CULPRIT = {"Open MPI": r"error: peer lost: rank 2 \(b, pid \d+\) died", "MPICH": r"PID \d+ RUNNING AT b\n=   EXIT CODE: 9\n"}


class Run:
    """mpirun on the host to start from. What it says is kept in a file."""

    def __init__(self, cluster, launcher, *words, fault=""):
        self.cluster = cluster
        self.said = Path(tempfile.mkstemp(dir=cluster.folder)[1])
        program, mpirun = LAUNCHERS[launcher]
        whole = [*mpirun.split(), program, "train", "--transport", "mpi", "--interface", "eth0", "--data", "text.txt", *SHAPE, "--steps", STEPS,
                 "--timeout", SILENCE, *words]
        environment = {**os.environ, "LOCKSTEP_FAULT": fault, "LOCKSTEP_FLIGHT_DIR": str(cluster.folder), "TMPDIR": str(cluster.folder)}
        environment["UCX_TLS"] = "tcp,self"  # which would find out that all hosts have one memory
        environment |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        with open(self.said, "wb") as file:
            self.popen = subprocess.Popen([*cluster.start.enter, *map(str, whole)], stdin=subprocess.DEVNULL, stdout=file,
                                          stderr=subprocess.STDOUT, preexec_fn=die_with_parent, cwd=cluster.folder, env=environment)

    def text(self):
        return self.said.read_text(errors="replace")

    def story(self):
        return f"--- code {self.popen.poll()}\n{self.text()}\n{self.cluster.served()[-1500:]}"

    def expect(self, condition, what):
        if not condition:
            raise Failure(f"{what}\n{self.story()}")

    def wait_step(self, number):
        text = f"step {number}/"
        wait(lambda: text in self.text() or self.popen.poll() is not None, text, PATIENCE, self.story)
        self.expect(self.popen.poll() is None, f"it ended before step {number}")

    def wait_ended(self):
        """Its exit code. Nothing is left on any host."""
        wait(lambda: self.popen.poll() is not None, "end", PATIENCE, self.story)
        self.cluster.expect_nothing_left(PATIENCE, self.story)
        return self.popen.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.popen.kill()
        self.popen.wait()


def one_hash(cluster, alone, launcher):
    def sent():
        return [[cluster.hosts[i].sent_bytes(interface) for i in range(3)] for interface in ("eth0", "eth1")]

    before = sent()
    with Run(cluster, launcher) as run:
        run.expect(run.wait_ended() == 0, "it failed")
        run.expect(WEIGHTS.findall(run.text()) == [alone], f"not the weights of one worker, {alone}")
        run.expect("workers: 4, " in run.text(), "not four workers")
        # Every host has sent its sums to others, over the network that was named. (ssh and the start take some 20 kB.)
        used, other = ([after - once for after, once in zip(*pair)] for pair in zip(sent(), before))
        run.expect(min(used) > 1_000_000 and max(other) < 10_000, f"bytes sent over eth0: {used}, over eth1: {other}")


def rank_killed(cluster, _, launcher):
    """The job ends, with the culprit in what the user sees, and a code that tells of it."""
    with Run(cluster, launcher, fault="rank=2 step=4 at=backward do=kill") as run:
        code = run.wait_ended()
        run.expect(code != 0, "it ended as if nothing had happened")
        run.expect(re.search(CULPRIT[launcher], run.text()), "nobody names the culprit")


def stopped(cluster, alone, launcher):
    """SIGTERM saves; a run with another number of ranks goes on from there."""
    out = f"model-{launcher.split()[-1]}"
    with Run(cluster, launcher, "--out", out, "--save-wait", fault="rank=0 step=1 at=step do=slow ms=150") as run:
        run.wait_step(3)
        run.popen.send_signal(signal.SIGTERM)
        run.expect(run.wait_ended() != 0, "it ended as if nothing had happened")
        run.expect(list((cluster.folder / out).glob("checkpoint-*")), "nothing is saved")
    again = subprocess.run([LOCKSTEP, "train", "--resume", out, "--log", "plain"], cwd=cluster.folder, capture_output=True, text=True, timeout=PATIENCE)
    run.expect(WEIGHTS.findall(again.stdout) == [alone], f"other weights: {again.stdout}{again.stderr}")


def main():
    need_sshd()
    launchers = [name for name, (program, mpirun) in LAUNCHERS.items() if os.path.exists(program) and shutil.which(mpirun.split()[0])]
    if not launchers:
        skip("neither Open MPI nor MPICH found")
    enter_own_network("--mount", "--uts")
    command("mount", "--make-rprivate", "/")
    command("ip", "link", "set", "lo", "up")
    command("hostname", "start")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_keys(folder)
        lines = "".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(120))
        (folder / "text.txt").write_text(lines)
        alone = subprocess.run([LOCKSTEP, "train", "--data", "text.txt", *SHAPE, "--steps", str(STEPS)], cwd=folder, capture_output=True, text=True,
                               check=True)
        alone = WEIGHTS.search(alone.stdout)[1]
        (folder / "hosts").write_text("a slots=1\nb slots=2\nc slots=1\n")
        with SshHosts(folder, folder, 3) as cluster:
            cluster.hosts.add_network("other", "10.88.0", "eth1")
            names = folder / "names"
            names.write_text("127.0.0.1 localhost start\n" + "".join(f"{cluster.address(i)} {NAMES[i]}\n" for i in range(3)))
            command("mount", "--bind", names, "/etc/hosts")
            command("mount", "--bind", cluster.config, "/etc/ssh/ssh_config")
            cases = Cases()
            for launcher in launchers:
                cases.run(f"one hash, {launcher}", one_hash, cluster, alone, launcher)
            for launcher in [name for name in launchers if "file" not in name]:
                cases.run(f"a rank is killed, {launcher}", rank_killed, cluster, alone, launcher)
                cases.run(f"SIGTERM, {launcher}", stopped, cluster, alone, launcher)
            cases.finish()


if __name__ == "__main__":
    main()
