#!/usr/bin/env python3
"""A Slurm of three nodes runs examples/slurm/train.sbatch: one hash whatever happens to tasks, nodes and the job, and nothing is left."""
# ctest: TIMEOUT 300 COST 40
# builds: release

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from ranks import wait_for  # noqa: E402
from slurm_cluster import SlurmCluster, enter_own_machine  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
SHAPE = "--hidden 32 --layers 1 --heads 2 --intermediate 48 --context 32 --global-batch 12 --micro-batch 2 --eval-every 0 --log plain".split()
STEPS = 20
KILLED = "rank=2 step=10 at=backward do=kill"
SLOW = "rank=0 step=1 at=step do=slow ms=100"  # what is to happen in the run does
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def trained(*launcher, cluster=None, more=()):
    words = [*launcher, LOCKSTEP, "train", "--data", Slurm.text, "--steps", STEPS, *SHAPE, *more]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120, cwd=Slurm.folder,
                          env=cluster.environment if cluster else None)


class Slurm(unittest.TestCase):
    """The nodes are idle before every test."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.text = cls.folder / "text.txt"
        with open(cls.text, "wb") as file:
            subprocess.run([LOCKSTEP, "data", "--stories", "30", "--print"], stdout=file, check=True)
        cls.alone = WEIGHTS.findall(trained().stdout)
        cls.cluster = cls.enterClassContext(SlurmCluster(cls.folder, 3))
        cls.cluster.environment["LOCKSTEP_FLIGHT_DIR"] = str(cls.folder)
        cls.daemons = cls.processes()

    def setUp(self):
        self.job = None
        self.name = self.id().rpartition(".")[2]
        self.out = self.folder / self.name
        self.addCleanup(self.tell_if_failed)

    def tearDown(self):
        wait_for(lambda: set(self.cluster.states().values()) == {"idle"} and self.processes() == self.daemons,
                 f"end of all but {self.daemons}")
        self.assertEqual(list(self.folder.glob("slurm-*.out")), [], "jobs that were not told where to write")

    def tell_if_failed(self):
        failed = [each for each, error in self._outcome.result.failures + self._outcome.result.errors if each is self]
        if failed and self.job:
            print(f"--- {self.name}\n{self.said()}\n{self.cluster.run('scontrol', 'show', 'job', self.job).stdout}\n{self.cluster.logs()}")

    @staticmethod
    def processes():
        """All in this namespace. Some that have ended are ours now, whose process has number 1 here."""
        found = [line.split() for line in subprocess.run(["ps", "-e", "-o", "stat=,comm="], capture_output=True, text=True).stdout.splitlines()]
        return sorted(name for state, name, *_ in found if state[0] != "Z")

    def submit(self, fault=""):
        """The recipe of docs/clusters.md."""
        self.cluster.environment.update(LOCKSTEP=LOCKSTEP, DATA=str(self.text), OUT=str(self.out), LOCKSTEP_FAULT=fault)
        self.job = self.cluster.submit("--output", f"{self.out}.txt", SCRIPT, "--steps", STEPS, *SHAPE)

    def said(self):
        path = Path(f"{self.out}.txt")
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_state(self, *states):
        return wait_for(lambda: (state := self.cluster.field(self.job, "JobState")) in states and state, f"end of {self.job} in {states}")

    def wait_for_step(self, step):
        metrics = self.out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count('"step"') >= step, f"step {step}")

    def expect_result(self, *workers):
        """The run has come to its end; `workers` is how many each start of it had."""
        said = self.said()
        self.assertEqual(WEIGHTS.findall(said)[-1:], self.alone, said)
        self.assertEqual(re.findall(r"^workers: (\d+), ", said, re.M), [str(number) for number in workers], said)

    def test_one_hash(self):
        self.submit()
        self.assertEqual(self.wait_for_state(*ENDED), "COMPLETED")
        self.expect_result(3)

    def test_lost_task_ends_the_step_if_wanted(self):
        token = self.folder / "token"
        token.touch(0o600)
        token.write_text("correct horse battery staple\n")
        self.cluster.environment["LOCKSTEP_FAULT"] = KILLED
        run = trained("srun", "--nodes", "3", cluster=self.cluster, more=["--fail-fast", "--token-file", token])
        self.assertNotEqual(run.returncode, 0, run.stdout)
        self.assertRegex(run.stderr, r"error: peer lost: rank 2 \(.*died: its connection closed")
        self.assertRegex(run.stderr, r"node3: task 2: Killed")

    def test_lost_task(self):
        self.submit(KILLED)
        self.wait_for_state(*ENDED)
        self.expect_result(3)
        self.assertRegex(self.said(), r"node3: task 2: Killed")
        self.assertRegex(self.said(), r"step 10: lost rank 2 \(.*; the step is computed again by 2 workers")

    def test_lost_node(self):
        self.submit(SLOW)
        self.wait_for_step(3)
        self.cluster.run("scontrol", "update", "nodename=node3", "state=down", "reason=test")  # until its daemon is heard again
        self.wait_for_state(*ENDED)
        self.expect_result(3)
        self.assertRegex(self.said(), r"step \d+: (lost )?rank 2 \(.*; .*2 workers, 3 lanes each")

    def test_requeued_with_other_nodes(self):
        self.submit(SLOW)
        self.wait_for_step(3)
        try:
            self.cluster.run("scontrol", "update", "nodename=node3", "state=drain", "reason=test")
            self.cluster.run("scontrol", "requeue", self.job)
            self.assertEqual(self.wait_for_state(*ENDED), "COMPLETED")
        finally:
            self.cluster.run("scontrol", "update", "nodename=node3", "state=resume")
        self.expect_result(3, 2)
        self.assertIn("stopped by SIGTERM after step", self.said())
        self.assertIn("resuming from", self.said())

    def test_preempted(self):
        self.submit(SLOW)
        self.wait_for_step(3)
        self.cluster.run("srun", "--partition", "high", "--nodes", "3", "--exclusive", "true")
        self.assertEqual(self.wait_for_state(*ENDED), "COMPLETED")
        self.expect_result(3, 3)
        self.assertIn("stopped by SIGTERM after step", self.said())
        self.assertIn("resuming from", self.said())

    def test_cancelled(self):
        self.submit(SLOW)
        self.wait_for_step(3)
        self.cluster.run("scancel", self.job)
        self.assertEqual(self.wait_for_state(*ENDED), "CANCELLED")
        wait_for(lambda: "lockstep" not in self.processes(), "end of all workers")
        self.assertTrue(list(self.out.glob("checkpoint-*")), self.said())

    def test_threads_follow_the_binding(self):
        cores = len(os.sched_getaffinity(0))
        self.cluster.environment["LOCKSTEP_FAULT"] = ""
        for number in {1, min(2, cores)}:
            run = trained("srun", "--ntasks", "1", "--cpus-per-task", number, cluster=self.cluster)
            self.assertIn(f"fp32, {number} thread", run.stderr)


if __name__ == "__main__":
    enter_own_machine()
    sys.argv.remove("--inside")
    unittest.main(verbosity=2)
