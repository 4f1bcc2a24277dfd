#!/usr/bin/env python3
"""Checkpoints as people use them: what is saved, going on from it to the same bits, and what is said of damage."""
# ctest: TIMEOUT 240 COST 30

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from training import LOCKSTEP, WEIGHTS, TrainingCase, events_of, forget_hash, lockstep, steps_of  # noqa: E402


def flip(path, place=-1, bit=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


class Checkpoints(TrainingCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def saved(self, out=None):
        return sorted(path.name for path in (out or self.out).glob("checkpoint-*"))

    def test_what_a_run_leaves(self):
        weights, said = self.train("--steps", 7, "--save-every", 3, "--out", self.out)
        self.assertEqual(self.saved(), ["checkpoint-3", "checkpoint-6", "checkpoint-7"])
        self.assertIn("saved checkpoint-7", said)
        last = self.out / "checkpoint-7"
        self.assertEqual(sorted(path.name for path in last.iterdir()),
                         ["config.json", "manifest.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"])
        manifest = json.loads((last / "manifest.json").read_text())
        self.assertEqual((manifest["step"], manifest["weights"]), (7, weights))
        state = json.loads((last / "trainer_state.json").read_text())
        self.assertEqual((state["step"], state["data"]["position"], state["global_batch"]), (7, 42, 6))
        self.assertIn(f"OK, step 7, 4 files, 33 tensors, 0.2 MB, weights {weights}", self.verify(last))
        self.assertEqual(self.verify(self.out).count("OK"), 4)  # and the model
        # A checkpoint is a model's folder, too.
        self.assertEqual(lockstep("generate", last, "--tokens", 5).returncode, 0)
        self.assertEqual(self.train("--steps", 0, "--init", last)[0], weights)
        self.train("--steps", 7, "--save-every", 2, "--keep-last", 1, "--out", self.folder / "few")
        self.assertEqual(self.saved(self.folder / "few"), ["checkpoint-7"])

    def test_zero_saves_none(self):
        self.train("--steps", 3, "--save-every", 0, "--out", self.out)
        self.assertEqual(self.saved(), [])
        self.assertIn("--save-every needs --out", self.fails(2, *self.command("--save-every", 1)))

    def test_going_on_gives_the_same_bits(self):
        arguments = ["--steps", 9, "--save-every", 3, "--keep-last", 0]
        weights, _ = self.train(*arguments, "--out", self.folder / "undisturbed")
        self.train(*arguments, "--out", self.out)
        metrics = steps_of(self.out)
        for step in (3, 6):
            for later in range(step + 3, 10, 3):
                shutil.rmtree(self.out / f"checkpoint-{later}")
            resumed, said = self.train(*arguments, "--out", self.out, "--resume", "--threads", "2")
            self.assertEqual(resumed, weights)
            self.assertIn(f"resuming from {self.out}/checkpoint-{step}", said)
            for path in (self.folder / "undisturbed" / "checkpoint-9").iterdir():
                self.assertEqual((self.out / "checkpoint-9" / path.name).read_bytes(), path.read_bytes(), path.name)
            rows = steps_of(self.out)
            self.assertEqual([row["step"] for row in rows], list(range(1, 10)))
            self.assertEqual([row["loss"] for row in rows], [row["loss"] for row in metrics])
            events = [(row["event"], row["step"]) for row in events_of(self.out)]
            self.assertIn(("started", step + 1), events)
            self.assertEqual(events[-1], ("ended", 9))
            saved = [row for row in events_of(self.out) if row["event"] == "saved"]
            self.assertEqual([row["step"] for row in saved], list(range(3, 10, 3)))
            self.assertEqual(saved[-1]["hash"], weights)
        # Nothing is left to do: nothing changes.
        before = (self.out / "checkpoint-9" / "manifest.json").stat().st_mtime_ns
        self.assertEqual(self.train(*arguments, "--out", self.out, "--resume")[0], weights)
        self.assertEqual((self.out / "checkpoint-9" / "manifest.json").stat().st_mtime_ns, before)

    def test_stopped_five_times_by_signals(self):
        arguments = self.command("--steps", 400, "--save-every", 1000, "--log", "json")
        undisturbed = lockstep(*arguments, "--out", self.folder / "undisturbed").stdout.splitlines()[-1]
        for round in range(5):
            number = (signal.SIGTERM, signal.SIGINT)[round % 2]
            process = subprocess.Popen([LOCKSTEP, *map(str, arguments), "--out", self.out, "--resume"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
            self.assertIn('"step":', process.stdout.readline())
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
            if process.returncode == 0:  # it was faster than the signal
                self.assertEqual(output.splitlines()[-1], undisturbed)
                break
            self.assertEqual(process.returncode, 128 + number, errors)
            self.assertRegex(errors, r"saved checkpoint-\d+")
            self.verify(self.out)
        self.assertEqual(lockstep(*arguments, "--out", self.out, "--resume").stdout.splitlines()[-1], undisturbed)

    def test_resume_needs_nothing_but_the_folder(self):
        """A run with options of all kinds, stopped where no checkpoint was due."""
        arguments = self.command("--steps", 300, "--save-every", 0, "--schedule", "linear", "--no-overlap", "--log", "json", "--clip", "0.5")
        undisturbed = lockstep(*arguments).stdout.splitlines()[-1]
        process = subprocess.Popen([LOCKSTEP, *map(str, arguments), "--out", self.out], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, errors)
        self.assertEqual(len(self.saved()), 1)
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        run = lockstep("train", "--resume", self.out, cwd=elsewhere)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(run.stdout.splitlines()[-1], undisturbed)
        self.assertNotIn("resumed with a change", run.stderr)
        self.assertIn("are two folders", self.fails(2, "train", "--resume", self.out, "--out", elsewhere))
        self.assertIn("there is no run in it to go on with", self.fails(2, "train", "--resume", self.folder / "typo"))
        self.assertFalse((self.folder / "typo").exists())
        self.assertIn("give one of them", self.fails(2, "train", "--resume", self.out, "--overwrite"))

    def test_a_fine_tune_that_is_killed_before_it_saves_stays_one(self):
        """Relative to where it was started, the model is found from anywhere; with a checkpoint it is not needed any more."""
        model, elsewhere = self.folder / "model", self.folder / "elsewhere"
        elsewhere.mkdir()
        self.train("--steps", 1, "--tokenizer", "bpe", "--vocab", 300, "--save-every", 0, "--out", model)
        tune = ["train", "text.txt", "--init", "model", "--context", 32, "--steps", 4, "--threads", 1, "--eval-every", 0]
        undisturbed = self.weights_of(lockstep(*tune, cwd=self.folder))
        killed = lockstep(*tune, "--out", self.out, cwd=self.folder, env={**os.environ, "LOCKSTEP_FAULT": "rank=0 step=2 at=step do=kill"})
        self.assertEqual((killed.returncode, self.saved()), (-signal.SIGKILL, []), killed.stderr)
        self.assertIn("does not go with --init", self.fails(2, "train", "--resume", self.out, "--init", model))
        resumed = lockstep("train", "--resume", self.out, cwd=elsewhere)
        self.assertEqual(self.weights_of(resumed), undisturbed)
        self.assertIn(f"start: the weights and the tokenizer of {model}; --lr", resumed.stderr)
        shutil.rmtree(model)
        self.weights_of(lockstep("train", "--resume", self.out, "--steps", 5, cwd=elsewhere))

    def test_resume_overwrites_no_model(self):
        self.train("--steps", 3, "--save-every", 0, "--out", self.out)
        self.assertIn(f"the run in {self.out} is finished, and there is no checkpoint to go on from: --init {self.out} starts",
                      self.unchanged(self.out, "train", "--resume", self.out, "--steps", 2))
        theirs = self.folder / "theirs"
        theirs.mkdir()
        (theirs / "model.safetensors").write_text("theirs")
        (theirs / "config.json").write_text("theirs")
        self.assertIn("has a model, and no checkpoint to go on from", self.unchanged(theirs, *self.command("--out", theirs, "--resume")))
        (theirs / "model.safetensors").unlink()
        (theirs / "letter.txt").write_text("theirs")
        self.assertIn("has other files (letter.txt)", self.unchanged(theirs, *self.command("--out", theirs, "--resume")))

    def unchanged(self, folder, *arguments):
        """Refused; the folder has what it had, a lease aside."""
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        said = self.fails(2, *arguments)
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.name.startswith("lease")}
        self.assertEqual(after, {path: content for path, content in before.items() if not path.name.startswith("lease")})
        return said

    def test_a_resume_that_makes_no_step_is_said_and_forgotten(self):
        weights, _ = self.train("--steps", 3, "--eval-every", 1, "--out", self.out)
        remembered = (self.out / "run.json").read_text()
        again = lockstep("train", "--resume", self.out, "--lr", 0.5)
        self.assertEqual(self.weights_of(again), weights)
        self.assertIn("this run is complete (done: 3 steps); to train further, resume it with --steps N\n", again.stderr)
        self.assertIn("the best validation loss was ", again.stderr)
        self.assertEqual((self.out / "run.json").read_text(), remembered)

    def test_data_that_was_moved(self):
        """What is said leads to a command that works."""
        self.train("--steps", 2, "--out", self.out)
        moved = self.text.rename(self.folder / "moved.txt")
        run = lockstep("train", "--resume", self.out, "--steps", 3)
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertNotIn("goes on from it", run.stderr)  # the same command would fail again
        self.assertIn(f"the run's data, {self.text}, is not there any more: --data PATH says where it is now", run.stderr)
        self.weights_of(lockstep("train", "--resume", self.out, "--steps", 3, "--data", moved))
        self.assertIn(f"--resume takes the run's folder, {self.out}", self.fails(2, "train", "--resume", self.out / "checkpoint-3"))
        (self.out / "run.json").unlink()
        run = lockstep("train", "--resume", self.out, "--steps", 4)
        self.assertEqual(run.returncode, 2)
        self.assertIn("has no run.json: what is not given is as for a new run, and without --data the data is the built-in stories", run.stderr)

    def test_checkpoints_by_time(self):
        """Every step takes a fifth of a second at least, so that a second passes before the last one."""
        slow = {**os.environ, "LOCKSTEP_FAULT": "rank=0 step=1 at=step do=slow ms=200"}
        run = lockstep(*self.command("--steps", 12, "--save-every", "1s", "--keep-last", 0, "--out", self.out), env=slow)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("checkpoints: every 1s, after every best validation and at the end", run.stderr)
        self.assertGreaterEqual(len(self.saved()), 2)

    def test_a_tokenizer_of_the_first_model_goes_on(self):
        pieces = self.folder / "pieces"
        run = lockstep(*self.command("--steps", 1, "--tokenizer", "sentencepiece", "--vocab", 300, "--out", pieces))
        if "built without SentencePiece" in run.stderr:
            return
        arguments = ["train", "--data", self.text, "--init", pieces, "--context", 32, "--save-every", 2, "--steps", 4]
        weights = self.weights_of(lockstep(*arguments, "--out", self.folder / "undisturbed"))
        self.weights_of(lockstep(*arguments, "--out", self.out))
        shutil.rmtree(self.out / "checkpoint-4")
        run = lockstep("train", "--resume", self.out, "--workers", 2, "--transport", "tcp")
        self.assertEqual(self.weights_of(run), weights)
        self.assertNotIn("resumed with a change", run.stderr)

    def test_another_run_is_refused(self):
        arguments = ["--steps", 4, "--save-every", 2, "--out", self.out]
        weights, _ = self.train(*arguments)
        before = self.verify(self.out)
        self.assertIn("--resume goes on from them", self.fails(2, *self.command(*arguments)))
        for change, word in ((["--seed", 1], "seed is 1, and was 0"), (["--micro-batch", 3], "micro-batch is 3, and was 2"),
                             (["--hidden", 64], "--hidden 64")):
            self.assertIn(word, self.fails(2, *self.command(*arguments, "--resume", *change)))
        self.assertIn("--init", self.fails(2, *self.command(*arguments, "--resume", "--init", self.out)))
        self.assertIn("--resume needs a folder", self.fails(2, *self.command("--resume")))
        self.assertIn("steps is 3, but 4 are done", self.fails(2, *self.command(*arguments, "--resume", "--steps", 3)))
        other = self.folder / "other.txt"
        other.write_text(self.text.read_text().replace("7", "8"))
        self.assertIn("the data are not the same", self.fails(2, *self.command(*arguments, "--resume", "--data", other)))
        self.assertEqual(self.verify(self.out), before)
        # More steps are another schedule: allowed, and told.
        _, said = self.train("--steps", 6, *arguments[2:], "--resume")
        self.assertIn("steps is 6, and was 4", said)
        self.assertEqual(self.train("--steps", 2, "--out", self.folder / "new", "--save-every", 1, "--resume")[0],
                         self.train("--steps", 2)[0])

    def test_one_changed_token_is_other_data(self):
        data = self.folder / "tokens.bin"
        data.write_bytes(bytes([1, 0]) * 20000)
        run = self.command("--data", data, "--vocab", 256, "--out", self.out)
        self.weights_of(lockstep(*run, "--steps", 1))
        self.assertTrue((self.folder / "tokens.bin.blake3").exists())
        with open(data, "r+b") as file:
            file.seek(31234)
            file.write(b"\2")
        self.assertIn("the data are not the same", self.fails(2, *run, "--steps", 2, "--resume"))

    def test_one_changed_token_is_other_validation_data(self):
        """The best loss so far, which is restored, would be compared with losses over other data."""
        data = self.folder / "shards"
        data.mkdir()
        (data / "train.bin").write_bytes(bytes([1, 0]) * 20000)
        (data / "val.bin").write_bytes(bytes([1, 0]) * 2000)
        run = self.command("--data", data, "--vocab", 256, "--out", self.out)
        self.weights_of(lockstep(*run, "--steps", 1))
        (data / "val.bin").write_bytes(bytes([1, 0]) * 1000 + bytes([2, 0]) + bytes([1, 0]) * 999)
        self.assertIn(": the validation data are not the same;", self.fails(2, *run, "--steps", 2, "--resume"))
        (data / "val.bin").write_bytes(bytes([1, 0]) * 2000)
        self.weights_of(lockstep(*run, "--steps", 2, "--resume"))

    def test_two_runs_do_not_share_a_folder(self):
        arguments = ["--steps", 4, "--save-every", 2]
        first = subprocess.Popen([LOCKSTEP, *map(str, self.command(*arguments, "--out", self.out))], text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env={**os.environ, "LOCKSTEP_FAULT": "rank=0 step=3 at=step do=stop"})
        self.addCleanup(first.communicate)
        self.addCleanup(first.kill)
        _, status = os.waitpid(first.pid, os.WUNTRACED)
        self.assertTrue(os.WIFSTOPPED(status))
        reason = self.fails(2, *self.command(*arguments, "--out", self.out, "--resume"))
        self.assertIn(f"process {first.pid} on ", reason)
        self.assertIn(f"is writing to {self.out}", reason)
        first.send_signal(signal.SIGCONT)
        output, errors = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, errors)
        self.assertEqual(WEIGHTS.match(output.splitlines()[-1])[1], self.train(*arguments[:2])[0])

    def test_a_run_that_stood_still_goes_on(self):
        arguments = ["--steps", 4, "--save-every", 2]
        run = subprocess.Popen([LOCKSTEP, *map(str, self.command(*arguments, "--timeout", 1, "--out", self.out))], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "LOCKSTEP_FAULT": "rank=0 step=2 at=step do=stop"})
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        os.waitpid(run.pid, os.WUNTRACED)
        time.sleep(1.5)
        run.send_signal(signal.SIGCONT)
        output, errors = run.communicate(timeout=60)
        self.assertEqual(run.returncode, 0, errors)
        self.assertEqual(WEIGHTS.match(output.splitlines()[-1])[1], self.train(*arguments[:2])[0])
        self.assertEqual([row["step"] for row in steps_of(self.out)], [1, 2, 3, 4])

    def test_damage_falls_back_to_the_one_before(self):
        arguments = ["--steps", 6, "--save-every", 2, "--keep-last", 0]
        weights, _ = self.train(*arguments, "--out", self.folder / "good")

        def edit_manifest(checkpoint):
            path = checkpoint / "manifest.json"
            path.write_text(path.read_text().replace('"step": 6', '"step": 8'))

        def lie(checkpoint):
            """A header whose first tensor begins elsewhere."""
            path = checkpoint / "model.safetensors"
            path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))

        for name, damage, words in (
            ("flipped", lambda c: flip(c / "model.safetensors"), "model.safetensors: tensor 'model.norm.weight' is damaged"),
            ("moments", lambda c: flip(c / "optimizer.safetensors"), "'exp_avg_sq.model.norm.weight' is damaged"),
            ("state", lambda c: flip(c / "trainer_state.json", 40), "trainer_state.json: is damaged"),
            ("truncated", lambda c: os.truncate(c / "model.safetensors", 1000), "has 1000 bytes instead of"),
            ("emptied", lambda c: os.truncate(c / "optimizer.safetensors", 0), "has 0 bytes instead of"),
            ("edited", edit_manifest, "manifest.json: it was changed after it was written"),
            ("endless", lambda c: os.truncate(c / "manifest.json", 1 << 40), "manifest.json: has 1099511627776 bytes, and 67108864 at most are read"),
            ("half", lambda c: [(c / n).unlink() for n in ("config.json", "model.safetensors")], "config.json: is missing"),
            ("bare", lambda c: [path.unlink() for path in c.iterdir()], "manifest.json: is missing"),
            ("lying", lie, "tensor 'model.embed_tokens.weight'"),
        ):
            with self.subTest(name=name):
                out = shutil.copytree(self.folder / "good", self.folder / name)
                damage(out / "checkpoint-6")
                self.assertIn(words, self.verify(out / "checkpoint-6", 1))
                self.verify(out, 1)
                resumed, said = self.train(*arguments, "--out", out, "--resume")
                self.assertEqual(resumed, weights)
                self.assertIn("checkpoint-6 cannot be used: ", said)
                self.assertIn(words, said)
                self.assertIn("going back to checkpoint-4, which is intact", said)
                self.assertEqual(self.saved(out), ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-6.damaged"])
                self.verify(out)

    def test_when_none_is_intact_nothing_is_touched(self):
        arguments = ["--steps", 4, "--save-every", 2, "--out", self.out]
        self.train(*arguments)
        for path in self.out.glob("checkpoint-*/model.safetensors"):
            flip(path)
        before = {path: path.read_bytes() for path in self.out.rglob("*") if path.is_file()}
        self.assertIn("none of its 2 checkpoints is intact; nothing was changed",
                      self.fails(1, *self.command(*arguments, "--resume")))
        self.assertEqual({path: path.read_bytes() for path in self.out.rglob("*") if path.is_file()}, before)

    def test_a_halt_leaves_a_checkpoint(self):
        run = lockstep(*self.command("--steps", 50, "--lr", "1e38", "--warmup", 0, "--save-every", 100, "--out", self.out))
        self.assertEqual(run.returncode, 3, run.stderr)
        self.assertEqual(len(self.saved()), 1)
        self.verify(self.out)

    def test_one_that_cannot_be_read_keeps_nobody_from_the_others(self):
        self.train("--steps", 4, "--save-every", 2, "--out", self.out)
        manifest = self.out / "checkpoint-4" / "manifest.json"
        manifest.unlink()
        manifest.mkdir()
        foreign = self.out / "checkpoint-2" / "x\nforged: OK"
        foreign.touch()
        said = self.verify(self.out, 1)
        self.assertIn("not a regular file", said)
        self.assertIn("x\\x0aforged: OK: does not belong", said)
        self.assertNotIn("forged", [line.split(":")[0] for line in said.splitlines()])
        foreign.unlink()
        self.assertIn("checkpoint-2: OK", self.verify(self.out, 1))
        (self.out / "checkpoint-9.tmp" / "folder").mkdir(parents=True)  # somebody's own
        run = lockstep("train", "--resume", "--out", self.out)
        self.weights_of(run)
        self.assertIn("going back to checkpoint-2", run.stderr)
        self.assertIn("checkpoint-9.tmp stays", run.stderr)

    def test_verify_of_what_is_none(self):
        self.assertIn("none: there is no such folder", self.fails(1, "verify", self.folder / "none"))
        self.assertIn("neither a model nor checkpoints are in it", self.fails(1, "verify", self.folder))
        (self.folder / "checkpoint-3").mkdir()
        self.assertIn("manifest.json: is missing", self.verify(self.folder / "checkpoint-3", 1))

    def test_verify_of_a_finished_model(self):
        weights, _ = self.train("--steps", 2, "--save-every", 0, "--out", self.out)
        self.assertIn(f"model.safetensors: OK, weights {weights}", self.verify(self.out))
        flip(self.out / "model.safetensors")
        self.assertIn(f"is damaged: weights blake3:", self.verify(self.out, 1))

    def test_verify_of_a_model_with_the_tokenizer_of_another(self):
        other = self.folder / "other"
        for out, vocab in ((self.out, 300), (other, 290)):
            self.train("--tokenizer", "bpe", "--vocab", vocab, "--steps", 2, "--save-every", 0, "--out", out)
            self.assertIn("model.safetensors: OK, weights", self.verify(out))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            right = (self.out / name).read_bytes()
            (self.out / name).write_bytes(right + b" " if name == "tokenizer_config.json" else (other / name).read_bytes())
            self.assertIn("model.safetensors: the tokenizer beside it is not the one that was written with it", self.verify(self.out, 1))
            (self.out / name).write_bytes(right)
        forget_hash(self.out / "model.safetensors", "lockstep_tokenizer_files")  # as an earlier version wrote it
        (self.out / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
        self.assertIn("model.safetensors: OK, weights", self.verify(self.out))


if __name__ == "__main__":
    unittest.main()
