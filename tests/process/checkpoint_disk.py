#!/usr/bin/env python3
"""Disks that are full or read-only, and text that cannot be read any more: clear messages, nothing lost, nothing overwritten, and training goes on."""
# ctest: TIMEOUT 120

import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from training import TrainingCase, lockstep  # noqa: E402

CHECKPOINT_KIB = 240  # what a checkpoint of the tiny model takes, roughly


def enter_own_mounts():
    """Runs this script once more where it may mount what it likes, or skips the test."""
    if "--inside" in sys.argv:
        sys.argv.remove("--inside")
        return
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    probe = subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    if probe.returncode != 0:
        print(f"skipped: no mount without root, or not here: {probe.stderr.strip()}")
        sys.exit(77)
    os.execvp(unshare[0], [*unshare, sys.executable, sys.argv[0], "--inside"])


def mount(*arguments):
    subprocess.run(["mount", *map(str, arguments)], check=True)


class Disk(TrainingCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "disk"
        self.out.mkdir()
        self.addCleanup(subprocess.run, ["umount", self.out], check=True)
        self.arguments = ["--steps", 6, "--save-every", 2, "--keep-last", 0, "--out", self.out]

    def files(self):
        return {path.name for path in self.out.iterdir()}

    def test_full(self):
        weights, _ = self.train("--steps", 6)
        # Room for two checkpoints and a half.
        mount("-t", "tmpfs", "-o", f"size={int(2.5 * CHECKPOINT_KIB)}k", "tmpfs", self.out)
        run = lockstep(*self.command(*self.arguments, "--tensorboard"))
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("No space left on device", run.stderr.splitlines()[-1])
        self.assertTrue(self.files() <= {"checkpoint-2", "checkpoint-4", "metrics.jsonl", "config.json", "run.json", "flight", "tensorboard"}, self.files())
        self.assertIn("checkpoint-4: OK", self.verify(self.out))
        # Once there is room, the run goes on as if nothing had been.
        mount("-o", f"remount,size={20 * CHECKPOINT_KIB}k", self.out)
        self.assertEqual(self.train(*self.arguments, "--resume")[0], weights)
        self.assertEqual(self.verify(self.out).count("OK"), 4)  # and the model

    def test_text_that_is_gone_while_it_is_mapped(self):
        """A hole in a file of a full tmpfs can be read, but not mapped: that is SIGBUS, as after a cut."""
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", self.out)
        text = self.out / "text.txt"
        text.write_bytes(b"a" * 4096)
        os.truncate(text, 1 << 20)
        with (self.out / "rest").open("wb", buffering=0) as rest:
            with self.assertRaises(OSError):
                while True:
                    rest.write(bytes(4096))
        for command in (["train", "--data", text, "--steps", 1], ["data", text, "--out", self.folder / "shards"]):
            said = self.fails(1, *command)
            self.assertIn(f"{text}: byte 4096: cannot be read any more", said)

    def test_read_only(self):
        mount("-t", "tmpfs", "-o", f"size={20 * CHECKPOINT_KIB}k", "tmpfs", self.out)
        self.train(*self.arguments)
        before = self.verify(self.out)
        shutil.rmtree(self.out / "checkpoint-6")
        mount("-o", "remount,ro", self.out)
        self.assertIn("Read-only file system", self.fails(1, *self.command(*self.arguments, "--resume")))
        mount("-o", "remount,rw", self.out)
        self.train(*self.arguments, "--resume")
        self.assertEqual(self.verify(self.out), before)


if __name__ == "__main__":
    enter_own_mounts()
    unittest.main()
