#!/usr/bin/env python3
"""Workers are killed and stopped while they train: the run goes on, and ends with the bits of the run in which nothing happened."""
# ctest: TIMEOUT 600

import json
import os
import re
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import SANITIZED, die_with_parent, gone  # noqa: E402
from training import LOCKSTEP, TextCase  # noqa: E402

SHAPE = ["--hidden", "32", "--layers", "2", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "22",
         "--micro-batch", "2", "--threads", "1"]
WEIGHTS = re.compile(r"^weights (blake3:[0-9a-f]{64})$", re.M)
STEPS = 8
TIMEOUT = 3  # of silence; a stopped worker is noticed after it
PATIENCE = 120


def children_of(pid):
    output = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in output.split()]


class Case(TextCase):
    LINES = 300
    hashes = {}

    def command(self, *arguments):
        return [str(word) for word in (LOCKSTEP, "train", "--data", self.text, *SHAPE, *arguments)]

    def alone(self, steps=STEPS):
        """The hash of one worker to whom nothing happens."""
        if steps not in Case.hashes:
            run = subprocess.run(self.command("--steps", steps), capture_output=True, text=True, timeout=PATIENCE)
            self.assertEqual(run.returncode, 0, run.stderr)
            Case.hashes[steps] = WEIGHTS.search(run.stdout)[1]
        return Case.hashes[steps]

    def survives(self, fault, *arguments, workers=3, steps=STEPS):
        run = subprocess.run(self.command("--steps", steps, "--workers", workers, "--timeout", TIMEOUT, *arguments),
                             capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "LOCKSTEP_FAULT": fault},
                             preexec_fn=die_with_parent)
        said = run.stdout + run.stderr
        self.assertEqual(run.returncode, 0, said)
        self.assertEqual(WEIGHTS.findall(run.stdout), [self.alone(steps)], said)
        return said


class Losses(Case):
    # Every pair of values of two columns is in some row: place, what happens, to whom, over what, sharded.
    ROWS = [
        ("backward", "kill", 0, "tcp", False), ("update", "stop", 2, "tcp", True), ("communication", "kill", 2, "shm", True),
        ("step", "stop", 0, "shm", False), ("communication", "stop", 0, "server", False), ("backward", "kill", 2, "server", False),
        ("update", "kill", 0, "tcp", True), ("step", "kill", 2, "tcp", False), ("backward", "stop", 2, "shm", True),
        ("update", "kill", 0, "server", False),
    ]

    def test_killed_or_stopped(self):
        for place, action, victim, transport, sharded in Losses.ROWS[::3] if SANITIZED else Losses.ROWS:
            with self.subTest(place=place, action=action, victim=victim, transport=transport, sharded=sharded):
                said = self.survives(f"rank={victim} step=3 at={place} do={action}", "--transport", transport,
                                     *(["--shard-optimizer"] if sharded else []))
                self.assertRegex(said, rf"rank {victim} \(pid \d+\) was killed by signal 9")
                self.assertRegex(said, r"step [234]: (lost|.* is expelled)")

    def test_a_worker_that_fails_by_itself(self):
        for transport, action, words in (("tcp", "memory", "bad_alloc"), ("server", "memory", "bad_alloc"),
                                         ("local", "memory", "bad_alloc"), ("shm", "crash", "signal 11")):
            with self.subTest(transport=transport, action=action):
                said = self.survives(f"rank=1 step=3 at=backward do={action}", "--transport", transport)
                self.assertRegex(said, rf"step 3: lost rank 1 .*{words}.*; the step is computed again by 2 workers")

    def test_what_is_left_of_it(self):
        """Every step is in the metrics once, with the events between them, and nothing but the run's own files stays."""
        out = self.folder / "out"
        said = self.survives("rank=0 step=3 at=update do=kill", "--transport", "tcp", "--out", out, "--save-every", 2)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([row["step"] for row in rows if "event" not in row], list(range(1, STEPS + 1)))
        self.assertIn("lost", [row.get("event") for row in rows])
        self.assertIn("events while training" if said.count(" has joined") else "event while training", said)
        self.assertFalse([path.name for path in out.iterdir() if path.name.endswith(".tmp") or path.name.startswith("lease")])
        check = subprocess.run([LOCKSTEP, "verify", str(out / f"checkpoint-{STEPS}")], capture_output=True, text=True)
        self.assertEqual(check.returncode, 0, check.stderr)

    def test_fail_fast(self):
        run = subprocess.run(self.command("--steps", STEPS, "--workers", 3, "--fail-fast"), capture_output=True, text=True,
                             timeout=PATIENCE, env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=3 at=backward do=kill"})
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertRegex(run.stderr.splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")


class ComingAndGoing(Case):
    def start(self, *arguments):
        """A run that has made its first step."""
        run = subprocess.Popen(self.command("--log", "json", "--timeout", TIMEOUT, *arguments), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        run.stdout.readline()
        return run

    def step_with(self, run, workers):
        """Reads on until a step has so many workers."""
        for line in run.stdout:
            row = json.loads(line)
            if "lanes" in row and "event" not in row and len(row["lanes"]) == workers:
                return row["step"]
        self.fail(f"no step with {workers} workers\n" + run.stderr.read())

    def test_a_lost_worker_is_started_anew(self):
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "tcp")
        before = children_of(run.pid)
        self.assertEqual(len(before), 3)
        os.kill(before[2], signal.SIGKILL)
        self.step_with(run, 2)
        self.step_with(run, 3)
        after = children_of(run.pid)
        self.assertEqual(len(after), 3)
        self.assertEqual(len(set(after) - set(before)), 1)
        run.send_signal(signal.SIGTERM)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 143, stderr)
        self.assertTrue(WEIGHTS.search(stdout), stderr)
        self.assertIn("the weights of all 3 workers are the same", stderr)
        self.assertTrue(all(gone(pid) for pid in after))

    def test_a_worker_leaves(self):
        """SIGTERM to one worker is a preemption: it goes after a step, and nobody takes its place."""
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "tcp")
        leaver = children_of(run.pid)[0]
        os.kill(leaver, signal.SIGTERM)
        self.step_with(run, 2)
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 130, stderr)
        self.assertTrue(WEIGHTS.search(stdout), stderr)
        self.assertRegex(stderr, r"step \d+: rank 0 .* has left")
        self.assertNotIn("is started", stderr)

    def test_down_to_one(self):
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "shm")
        for pid in children_of(run.pid)[:2]:
            os.kill(pid, signal.SIGKILL)
        self.step_with(run, 1)
        self.step_with(run, 3)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 143, stderr)

    def test_nobody_is_left(self):
        run = self.start("--steps", 100000, "--workers", 2, "--transport", "tcp")
        for pid in children_of(run.pid):
            os.kill(pid, signal.SIGKILL)
        _, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 1, stderr)
        self.assertRegex(stderr.splitlines()[-1], r"rank [01] \(pid \d+\) was killed by signal 9")


if __name__ == "__main__":
    unittest.main()
