"""A Slurm of our own on this machine: munged, slurmctld and one slurmd per node, in namespaces that nobody else sees.

The script that uses it runs in them, with processes, ports, mounts and names of its own: enter_own_machine() first.
"""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

from namespaces import command, enter_own_network
from ranks import die_with_parent, skip, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
PATIENCE = 60.0


def enter_own_machine():
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        skip(f"{', '.join(missing)} not found")
    enter_own_network("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    command("mount", "--make-rprivate", "/")
    command("ip", "link", "set", "lo", "up")
    command("hostname", "controller")


class SlurmCluster:
    """Nodes node1, node2, ... with an address each. Use in a with statement: it ends the daemons."""

    def __init__(self, folder, nodes):
        self.folder = Path(folder)
        self.nodes = [f"node{i + 1}" for i in range(nodes)]
        self.daemons = {}
        addresses = {node: f"10.77.0.{i + 1}" for i, node in enumerate(self.nodes)}
        hosts = self.folder / "hosts"
        hosts.write_text("".join(f"{address} {node}\n" for node, address in addresses.items()) + "127.0.0.1 localhost controller\n")
        command("mount", "--bind", hosts, "/etc/hosts")
        for node, address in addresses.items():
            (self.folder / node).mkdir()
            command("ip", "address", "add", f"{address}/32", "dev", "lo")
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.configuration = self.folder / "slurm.conf"
        cores = len(os.sched_getaffinity(0))
        self.configuration.write_text(f"""\
ClusterName=test
SlurmctldHost=controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
StateSaveLocation={self.folder}/state
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/%n.pid
SlurmdSpoolDir={self.folder}/%n
""" + "".join(f"NodeName={node} NodeAddr={addresses[node]} Port={7000 + i} CPUs={cores} State=UNKNOWN\n"
              for i, node in enumerate(self.nodes)) + """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=2 State=UP
""")
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        try:
            own = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
            self._start("munged", "--foreground", "--force", "--origin=localhost", f"--key-file={key}", f"--socket={socket}", *own)
            wait_for(socket.exists, "socket of munged", 10)
            self._start("slurmctld", "-D", "-f", self.configuration)
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node, "-f", self.configuration, name=node)
            wait_for(lambda: self._alive() and self.states() == {node: "idle" for node in self.nodes}, "idle nodes", 30)
        except RuntimeError as error:
            self.close()
            skip(f"Slurm does not start here: {error}\n{self.logs()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self, program, *words, name=None):
        name = name or program
        with open(self.folder / f"{name}.out", "wb") as log:
            self.daemons[name] = subprocess.Popen([program, *map(str, words)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                                  env=self.environment, preexec_fn=die_with_parent)

    def _alive(self):
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name} ended with {daemon.returncode}")
        return True

    def logs(self):
        return "\n".join(f"--- {path.name}\n" + path.read_text(errors="replace")[-1500:]
                         for path in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")]))

    def run(self, *words, check=True):
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=self.environment, timeout=PATIENCE,
                              cwd=self.folder)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
        return done

    def states(self):
        lines = self.run("sinfo", "--noheader", "--Node", "--partition", "low", "--format", "%N %T", check=False).stdout.splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def submit(self, *words):
        """The number of a batch job."""
        return self.run("sbatch", "--parsable", *words).stdout.strip()

    def field(self, job, name):
        """Of `scontrol show job`."""
        for word in self.run("scontrol", "show", "job", job).stdout.split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        raise RuntimeError(f"job {job} has no {name}")

    def close(self):
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
