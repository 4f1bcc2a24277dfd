# What --tensorboard writes, read back by TensorBoard itself.
# builds: release
import os
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
import pypi  # noqa: E402
from training import TINY, TextCase, events_of, lockstep, steps_of  # noqa: E402


class EventFiles(TextCase):
    def read(self, out):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator(str(out / "tensorboard"))
        events.Reload()
        return events

    def arguments(self, out, *more):
        usual = [str(word) for pair in TINY.items() for word in pair]
        return ["train", "--data", self.text, *usual, "--out", out, "--tensorboard", "--eval-every", 3, *more]

    def texts(self, events, tag):
        return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]

    def expect_steps(self, events, out, steps):
        rows = steps_of(out)
        losses = events.Scalars("loss/train")
        self.assertEqual([event.step for event in losses], list(range(1, steps + 1)))
        for event, row in zip(losses, rows):
            self.assertAlmostEqual(event.value, row["loss"], places=5)
        validation = events.Scalars("loss/validation")
        self.assertEqual([event.step for event in validation], list(range(3, steps + 1, 3)))
        return rows

    def test_a_run_with_a_loss(self):
        """The process that takes over from a lost rank 0 goes on in a file of its own."""
        out = self.folder / "run"
        run = lockstep(*self.arguments(out, "--steps", 9, "--workers", 2, "--save-every", 4),
                       env={**os.environ, "LOCKSTEP_FAULT": "rank=0 step=6 at=backward do=kill"})
        weights = self.weights_of(run)
        self.assertGreaterEqual(len(list((out / "tensorboard").iterdir())), 2)
        events = self.read(out)
        rows = self.expect_steps(events, out, 9)
        self.assertAlmostEqual(events.Scalars("speed/tokens_per_second")[0].value, rows[0]["tokens_per_s"], delta=rows[0]["tokens_per_s"] * 1e-5)
        self.assertEqual(events.Scalars("optimizer/learning_rate")[3].step, 4)
        for phase in ("forward", "communication", "hidden"):
            self.assertTrue(events.Scalars(f"phases/rank_1/{phase}"), phase)
        self.assertIn('"parameters"', self.texts(events, "settings")[0])
        told = "\n".join(self.texts(events, "events"))
        self.assertIn("lost rank 0", told)
        self.assertIn("saved checkpoint-", told)
        self.assertIn(weights, told)

    def test_a_run_that_is_resumed(self):
        out = self.folder / "run"
        self.weights_of(lockstep(*self.arguments(out, "--steps", 6, "--save-every", 3, "--save-wait", "--keep-last", 0)))
        # As if it had been killed after step 5: what is done again counts once.
        for path in (out / "checkpoint-6").iterdir():
            path.unlink()
        (out / "checkpoint-6").rmdir()
        self.weights_of(lockstep("train", "--resume", out, "--steps", 9))
        events = self.read(out)
        self.expect_steps(events, out, 9)

    def test_a_run_that_went_back(self):
        """Steps that are computed again are there once, and those after them, too."""
        out = self.folder / "run"
        run = lockstep(*self.arguments(out, "--steps", 9, "--workers", 2, "--save-every", 3, "--save-wait", "--shard-optimizer", "--no-buddy"),
                       env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=6 at=backward do=kill"})
        self.weights_of(run)
        self.assertIn("went back", [row["event"] for row in events_of(out)])
        self.expect_steps(self.read(out), out, 9)

    def test_without_a_folder(self):
        self.assertIn("--tensorboard needs --out", self.fails(2, "train", "--data", self.text, "--tensorboard"))


if __name__ == "__main__":
    pypi.need("tensorboard")
    unittest.main()
