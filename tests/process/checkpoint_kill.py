#!/usr/bin/env python3
"""Kill -9 at every write, sync, rename, creation and removal of a save: what is there afterwards is always complete, and
--resume ends with the weights of a run that nobody disturbed."""
# ctest: TIMEOUT 300 COST 55
# builds: release

import os
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from training import LOCKSTEP, TrainingCase  # noqa: E402

SHIM = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "libkill_at.so")


class Killed(TrainingCase):
    ARGUMENTS = ["--steps", 4, "--save-every", 2, "--keep-last", 1]

    def cut_short(self, out, call):
        """Trains on with the `call`-th change of the folder as the last; returns how many changes there were, or None."""
        count = self.folder / "count"
        count.unlink(missing_ok=True)
        environment = {**os.environ, "LD_PRELOAD": SHIM, "KILL_AT_MATCH": out.name, "KILL_AT_CALL": str(call),
                       "KILL_AT_COUNT": str(count)}
        run = subprocess.run([LOCKSTEP, *map(str, self.command(*self.ARGUMENTS, "--out", out, "--resume"))], capture_output=True, text=True, timeout=60, env=environment)
        if run.returncode == 0:
            return int(count.read_text())
        self.assertEqual(run.returncode, -signal.SIGKILL, run.stderr)
        return None

    def test_at_every_point_of_a_save(self):
        undisturbed, _ = self.train("--steps", 4, "--save-every", 2, "--out", self.folder / "undisturbed")
        half = shutil.copytree(self.folder / "undisturbed", self.folder / "half")
        shutil.rmtree(half / "checkpoint-4")
        points = self.cut_short(shutil.copytree(half, self.folder / "killed_none"), 0)
        self.assertGreater(points, 40)
        self.assertLess(points, 160)
        for call in range(1, points + 1):
            with self.subTest(call=call):
                out = shutil.copytree(half, self.folder / f"killed_{call}")
                self.assertIsNone(self.cut_short(out, call))
                self.assertIn("OK", self.verify(out))  # every checkpoint that is there is complete
                weights, _ = self.train(*self.ARGUMENTS, "--out", out, "--resume")
                self.assertEqual(weights, undisturbed)
                # One whose deletion never began stays until the next save.
                self.assertLessEqual({path.name for path in out.glob("checkpoint-*")}, {"checkpoint-2", "checkpoint-4"})
                for path in (self.folder / "undisturbed" / "checkpoint-4").iterdir():
                    self.assertEqual((out / "checkpoint-4" / path.name).read_bytes(), path.read_bytes(), path.name)
                shutil.rmtree(out)
        print(f"{points} points")


if __name__ == "__main__":
    unittest.main()
