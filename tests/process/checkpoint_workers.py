#!/usr/bin/env python3
"""Checkpoints of several workers: stopped and resumed with other numbers of them, to the weights of a run that nobody
stopped; and a worker that differs is found before anything is written."""
# ctest: TIMEOUT 240
# builds: release

import os
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from training import LOCKSTEP, TrainingCase, lockstep  # noqa: E402


class Workers(TrainingCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.arguments = ["--global-batch", 8, "--steps", 600, "--save-every", 50]

    def test_stopped_and_resumed_at_other_world_sizes(self):
        undisturbed, _ = self.train(*self.arguments, "--out", self.folder / "undisturbed")
        stops = 0
        for workers, transport, more in ((2, "tcp", []), (1, "local", []), (4, "shm", ["--shard-optimizer"]), (3, "tcp", []),
                                         (2, "shm", ["--shard-optimizer"])):
            command = self.command(*self.arguments, "--out", self.out, "--resume", "--workers", workers, "--transport", transport,
                                   "--log", "json", *more)
            process = subprocess.Popen([LOCKSTEP, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
            if stops == 4:  # the last one goes on to the end
                output, errors = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 0, errors)
                self.assertIn(undisturbed, output.splitlines()[-1])
                break
            for line in process.stdout:
                if '"step":' in line:
                    break
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 143, errors)
            self.assertRegex(errors, r"saved checkpoint-\d+")
            self.verify(self.out)
            stops += 1
        self.assertEqual(stops, 4)
        for path in (self.folder / "undisturbed" / "checkpoint-600").iterdir():
            self.assertEqual((self.out / "checkpoint-600" / path.name).read_bytes(), path.read_bytes(), path.name)

    def test_every_way_to_talk_saves_the_same_files(self):
        arguments = ["--global-batch", 8, "--steps", 4, "--save-every", 2]
        self.train(*arguments, "--out", self.out)
        for transport in ("local", "tcp", "shm", "server"):
            out = self.folder / transport
            self.train(*arguments, "--out", out, "--workers", 2, "--transport", transport)
            for name in ("checkpoint-2", "checkpoint-4"):
                for path in (self.out / name).iterdir():
                    self.assertEqual((out / name / path.name).read_bytes(), path.read_bytes(), path.name)

    def test_a_worker_that_differs_is_found_before_anything_is_written(self):
        run = lockstep(*self.command("--global-batch", 8, "--steps", 6, "--save-every", 3, "--verify-every", 0, "--out", self.out,
                                     "--workers", 3, "--transport", "tcp"),
                       env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=2 at=update do=flip"})
        self.assertEqual(run.returncode, 3, run.stderr)
        self.assertRegex(run.stderr, r"after step 3: .*rank 1.* has other weights than .*; the first tensor that differs is model\.")
        self.assertEqual([path.name for path in self.out.glob("checkpoint-*")], [])

    def test_a_worker_killed_loses_nothing(self):
        arguments = ["--global-batch", 8, "--steps", 8, "--save-every", 2, "--out", self.out, "--transport", "tcp", "--timeout", 5]
        undisturbed, _ = self.train("--global-batch", 8, "--steps", 8)
        run = lockstep(*self.command(*arguments, "--workers", 3, "--fail-fast"),
                       env={**os.environ, "LOCKSTEP_FAULT": "rank=2 step=6 at=backward do=kill"})
        self.assertEqual(run.returncode, 1, run.stderr)
        self.verify(self.out)
        self.assertEqual(self.train(*arguments, "--workers", 2, "--resume")[0], undisturbed)

    def test_what_is_wrong_is_told_once(self):
        arguments = ["--global-batch", 8, "--steps", 2, "--save-every", 1, "--out", self.out, "--workers", 2]
        self.train(*arguments)
        run = lockstep(*self.command(*arguments, "--transport", "tcp"))
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertIn("--resume goes on from them", run.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
