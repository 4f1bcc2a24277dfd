#!/usr/bin/env python3
"""`lockstep data`, `train` and `generate` as people use them: what they leave behind, the same bits whatever the
threads, clean stops, and one clear line for what is wrong."""
# ctest: TIMEOUT 240 COST 30

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from gradient_client import crc32c  # noqa: E402
from training import LOCKSTEP, WEIGHTS, TextCase, events_of, forget_hash, lockstep, steps_of  # noqa: E402

TINY = ["--hidden", "32", "--layers", "1", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "6",
        "--micro-batch", "2"]


class Case(TextCase):
    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def train(self, *arguments):
        """Runs to the end and returns the hash of the weights."""
        return self.weights_of(lockstep("train", *TINY, *arguments))


class Training(Case):
    def test_same_bits_for_any_threads_and_every_time(self):
        arguments = ["--data", self.text, "--steps", 8]
        first = self.train(*arguments, "--threads", 1)
        self.assertEqual(self.train(*arguments, "--threads", 1), first)
        self.assertEqual(self.train(*arguments, "--threads", 2), first)
        self.assertEqual(self.train(*arguments, "--eval-every", 1, "--log", "json"), first)
        self.assertNotEqual(self.train(*arguments, "--seed", 1), first)

    def test_a_mix_is_the_same_for_any_workers_and_when_it_goes_on(self):
        code = self.write("code.txt", "".join(f"int f{i}() {{ return {i}; }}\n" for i in range(80)))
        arguments = ["--data", self.text, code, "--mix", "3,1", "--steps", 8, "--threads", 1]
        run = lockstep("train", *TINY, *arguments)
        alone = self.weights_of(run)
        self.assertRegex(run.stderr, r"mix: 75 % \S*text.txt, \d+ samples, [\d.]+ passes")
        self.assertRegex(run.stderr, r"mix: 25 % \S*code.txt, \d+ samples, [\d.]+ passes")
        self.assertEqual(self.train(*arguments, "--workers", 2), alone)
        self.assertNotEqual(self.train(*arguments, "--mix", "1,1"), alone)
        out = self.folder / "mixed"
        stopped = lockstep("train", *TINY, *arguments, "--out", out, "--save-every", 3, "--workers", 2,
                           env={**os.environ, "LOCKSTEP_FAULT": "rank=0 step=5 at=step do=kill;rank=1 step=5 at=step do=kill"})
        self.assertNotEqual(stopped.returncode, 0)
        self.assertIn("the mix is 50 % of", self.fails(2, "train", "--resume", out, "--mix", "1,1"))
        self.assertEqual(self.weights_of(lockstep("train", "--resume", out, "--workers", 1)), alone)
        self.assertIn("--mix has 2 weights for one path", self.fails(2, "train", "--data", self.text, "--mix", "3,1"))
        self.assertIn("'x' is no positive number", self.fails(2, "train", "--data", self.text, code, "--mix", "3,x"))
        self.assertIn("--mix weighs the paths of --data", self.fails(2, "train", "--mix", "3,1"))

    def test_sizes_by_name(self):
        run = lockstep("train", "--data", self.text, "--model", "tiny", "--layers", 1, "--context", 16, "--steps", 1, "--global-batch", 2)
        self.weights_of(run)
        self.assertIn("(hidden 256, 1 layer, 8 heads, 4 kv heads, intermediate 768)", run.stderr)
        self.assertIn("--model: 125m is none of tiny, small, 124m, 350m, 774m, 1.5b; did you mean 124m?",
                      self.fails(2, "train", "--model", "125m"))
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 1, "--out", out)
        self.assertIn("--model tiny: --hidden 256, but the model it starts from has 32",
                      self.fails(2, "train", "--data", self.text, "--init", out, "--model", "tiny"))

    def test_what_it_leaves(self):
        out = self.folder / "deep" / "model"
        weights = self.train("--data", self.text, "--steps", 6, "--eval-every", 3, "--out", out, "--save-every", 0)
        self.assertEqual(sorted(path.name for path in out.iterdir()), ["config.json", "metrics.jsonl", "model.safetensors", "run.json"])
        rows = steps_of(out)
        self.assertEqual([row["step"] for row in rows], [1, 2, 3, 4, 5, 6])
        start, end = events_of(out)
        self.assertEqual((start["event"], start["step"], start["steps"], start["workers"], len(start["members"])), ("started", 1, 6, 1, 1))
        self.assertEqual(start["settings"]["options"]["steps"], ["6"])
        self.assertEqual((end["event"], end["step"], end["how"], end["hash"]), ("ended", 6, "done", weights))
        self.assertEqual([row["step"] for row in rows if "val_loss" in row], [3, 6])
        for row in rows:
            self.assertEqual(row["tokens"], 6 * 32)
            self.assertGreater(row["tokens_per_s"], 0)
            self.assertTrue(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
        self.assertAlmostEqual(rows[-1]["val_bits_per_byte"], rows[-1]["val_loss"] / math.log(2))
        config = json.loads((out / "config.json").read_text())
        self.assertEqual((config["hidden_size"], config["vocab_size"], config["model_type"]), (32, 256, "llama"))
        with open(out / "model.safetensors", "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        self.assertEqual(header["__metadata__"]["lockstep_weights"], weights)
        self.assertEqual(header["model.embed_tokens.weight"]["shape"], [256, 32])

    def test_what_it_says_at_the_end(self):
        out = self.folder / "model"
        run = lockstep("train", *TINY, self.text, "--steps", 6, "--eval-every", 2, "--out", out)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stderr, r"(?m)^done: 6 steps, in \d+s$")
        self.assertIn(f'the model is in {out}; next: lockstep generate {out} --prompt "Once"\n', run.stderr)
        self.assertRegex(run.stderr, r"checkpoints: every 10m, after every best validation and at the end, [\d.]+[kM]B each, written behind training; the last 3 and the best stay")
        run = lockstep("train", *TINY, self.text, "--steps", 1, "--threads", 1)
        self.assertEqual(re.findall("warning: (.*)", run.stderr), ["there is no --out DIR: the model will not be kept",
                                                                 "the model is not kept: there was no --out DIR"])
        self.assertRegex(run.stderr, "1 thread\n")

    def test_a_folder_in_use_is_refused_or_overwritten(self):
        out = self.folder / "model"
        first = self.train("--data", self.text, "--steps", 1, "--save-every", 0, "--out", out)
        again = ["train", *TINY, "--data", self.text, "--steps", 2, "--out", out]
        self.assertIn(f"{out} has a model already", self.fails(2, *again))
        self.assertIn("are the same folder", self.fails(2, *again, "--init", out, "--overwrite"))
        self.assertNotEqual(self.train(*again[len(TINY) + 1:], "--overwrite"), first)
        self.assertIn(f"{out} has checkpoints, up to checkpoint-2", self.fails(2, *again))
        self.assertIn("a run needs a folder of its own", self.fails(2, *again[:-1], self.folder))

    def test_a_dry_run_writes_nothing(self):
        out = self.folder / "model"
        for workers in (1, 2):
            run = lockstep("train", *TINY, self.text, "--steps", 1000, "--out", out, "--dry-run", "--workers", workers)
            self.assertEqual((run.returncode, run.stdout), (0, ""), run.stderr)
            self.assertFalse(out.exists())
            for line in (r"model: [\d.]+k parameters", r"run: 1000 steps", r"memory: about [\d.]+MB",
                         r"time: about \d+(s|m\d+s) for 1000 steps; a step took \d\.\d+ s", "nothing was written"):
                self.assertRegex(run.stderr, line)

    def test_a_dry_run_leaves_all_folders_as_they_are(self):
        self.write("tokens.bin", struct.pack("<4000H", *(i % 200 for i in range(4000))))
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 1, "--save-every", 0, "--out", out)
        before = {path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}
        arguments = ["train", *TINY, self.folder / "tokens.bin", "--vocab", 200, "--steps", 9, "--dry-run"]
        run = lockstep(*arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(f"{out} has a model already", self.fails(2, *arguments, "--out", out))  # as the run itself would say
        self.assertEqual(lockstep(*arguments, "--out", out, "--overwrite").returncode, 0)
        self.assertEqual(lockstep("data", "--check", "--vocab", 200, self.folder / "tokens.bin").returncode, 0)
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.folder.rglob("*")}, before)

    @unittest.skipIf(os.environ.get("LOCKSTEP_SANITIZERS"), "sanitizers take memory of their own")
    def test_the_memory_that_a_dry_run_tells_is_what_a_run_takes(self):
        arguments = ["train", self.text, "--hidden", 256, "--layers", 6, "--heads", 8, "--context", 128, "--global-batch", 8, "--micro-batch", 4,
                     "--threads", 1, "--steps", 2, "--out", self.folder / "out"]
        told = re.search(r"memory: about ([\d.]+)MB", lockstep(*arguments, "--dry-run").stderr)
        process = subprocess.Popen([LOCKSTEP, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        self.assertEqual(status, 0)
        taken = usage.ru_maxrss * 1024 / 1e6
        self.assertLess(taken, 1.1 * float(told[1]))
        self.assertGreater(taken, 0.6 * float(told[1]))

    def test_samples_change_nothing(self):
        plain = self.train("--data", self.text, "--steps", 5)
        run = lockstep("train", *TINY, self.text, "--steps", 5, "--sample-every", 2)
        self.assertEqual(re.findall(r"(?m)^sample after step (\d+): .", run.stderr), ["2", "4"])
        self.assertEqual(self.weights_of(run), plain)

    def test_early_stop_keeps_the_best(self):
        out = self.folder / "model"
        run = lockstep("train", *TINY, self.text, "--steps", 90, "--eval-every", 1, "--early-stop", 2, "--lr", 3, "--warmup", 0, "--clip", 0,
                       "--out", out)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stderr, r"ended early after step \d+ of 90: 2 validations without a better one, in ")
        step = re.search(r"the best validation loss was [\d.]+, after step (\d+): (\S+)", run.stderr)
        self.assertEqual(step[2], str(out / f"checkpoint-{step[1]}"))
        self.assertIn(f"the model is in {out}; next: lockstep generate {step[2]} --prompt", run.stderr)  # the last one is worse
        self.assertEqual(lockstep("generate", step[2], "--tokens", 3).returncode, 0)
        # It has ended: there is nothing to go on with.
        again = lockstep("train", "--resume", out)
        self.assertEqual(again.stdout.splitlines()[-1], run.stdout.splitlines()[-1], again.stderr)
        self.assertRegex(again.stderr, r"this run is complete \(ended early after .*\); to train further, resume it with --early-stop 0")
        self.assertIn("does not go with --save-every 0",
                      self.fails(2, "train", self.text, "--early-stop", 2, "--save-every", 0, "--out", self.folder / "o"))

    def test_sensible_without_any_option(self):
        run = lockstep("train", "--data", self.text, "--steps", 2)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("model: ", run.stderr)
        self.assertRegex(run.stdout.splitlines()[-1], WEIGHTS)

    def test_logs(self):
        run = lockstep("train", *TINY, "--data", self.text, "--steps", 3, "--log", "json")
        *rows, last = run.stdout.splitlines()
        self.assertEqual([json.loads(row)["step"] for row in rows], [1, 2, 3])
        self.assertRegex(last, WEIGHTS)
        run = lockstep("train", *TINY, "--data", self.text, "--steps", 3, "--log", "bar")
        self.assertRegex(run.stderr, r"\[=+ *\] 3/3  loss [0-9.]+  val [0-9.]+ \([0-9.]+ %\)  .* tok/s  0s left")
        run = lockstep("train", *TINY, "--data", self.text, "--steps", 3)
        self.assertRegex(run.stdout, r"(?m)^step 3/3  loss [0-9.]+  val [0-9.]+")

    def test_options_from_a_file(self):
        config = self.write("run.toml", f"""
            # the same names as on the command line
            data = ["{self.text}"]
            steps = 4
            schedule = "linear"
            tie-embeddings = true
            weight_decay = 0.2
        """)
        flags = ["--data", self.text, "--schedule", "linear", "--tie-embeddings", "--weight-decay", "0.2"]
        self.assertEqual(self.train("--config", config), self.train(*flags, "--steps", 4))
        self.assertEqual(self.train("--config", config, "--steps", 2), self.train(*flags, "--steps", 2))
        self.assertIn("'stepz' is not an option", self.fails(2, "train", "--config", self.write("bad.toml", "stepz = 4\n")))
        self.assertIn("steps", self.fails(2, "train", "--config", self.write("bad.toml", "steps = \"many\"\n")))
        self.assertIn("opening none.toml: No such file", self.fails(2, "train", "--config", "none.toml"))
        self.assertIn("--dry-run: maybe is neither true nor false",
                      self.fails(2, "train", "--config", self.write("bad.toml", "dry-run = \"maybe\"\n")))

    def test_goes_on_from_saved_weights(self):
        out = self.folder / "model"
        weights = self.train("--data", self.text, "--steps", 3, "--out", out)
        self.assertEqual(self.train("--data", self.text, "--steps", 0, "--init", out), weights)
        for option, said in ((["--hidden", 64], "--hidden 64"), (["--vocab", 300], "--vocab 300, but the model it starts from has 256"),
                             (["--tie-embeddings"], "--tie-embeddings, but the embeddings of the model it starts from are not tied")):
            self.assertIn(said, self.fails(2, "train", "--data", self.text, "--init", out, *option))
        # Smaller steps by default than for fresh weights.
        run = lockstep("train", *TINY, "--data", self.text, "--steps", 1, "--init", out, "--log", "json")
        self.assertIn(f"start: the weights and the tokenizer of {out}; --lr 0.0008, a tenth", run.stderr)
        self.assertAlmostEqual(json.loads(run.stdout.splitlines()[0])["lr"], 0.0008)

    def test_halts_on_what_is_not_finite(self):
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 1, "--out", out)
        weights = out / "model.safetensors"
        content = bytearray(weights.read_bytes())
        length, = struct.unpack_from("<Q", content)
        begin = json.loads(content[8:8 + length])["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
        struct.pack_into("<f", content, 8 + length + begin + 4 * 11, math.nan)
        weights.write_bytes(content)
        forget_hash(weights)
        line = self.fails(3, "train", *TINY, "--data", self.text, "--steps", 5, "--init", out)
        self.assertIn("step 1: weight model.layers.0.mlp.up_proj.weight, element 11, is nan on rank 0 (", line)
        self.assertIn("no weights were changed", line)
        # Steps so large that the weights overflow: the run halts by itself.
        halted = self.folder / "halted"
        line = self.fails(3, "train", *TINY, "--data", self.text, "--steps", 50, "--lr", "1e38", "--warmup", 0, "--out", halted)
        self.assertRegex(line, r"step \d+: (weight|lane \d+ \(samples \d+, \d+\) on rank 0 .*: the gradient of) .*, element \d+, is -?(nan|inf)")
        event = events_of(halted)[-1]
        self.assertEqual((event["event"], event["step"]), ("halted", len(steps_of(halted)) + 1))
        self.assertIn(event["how"], line)

    def test_signals_stop_it_cleanly(self):
        for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "the end of its terminal")):
            with self.subTest(signal=number):
                out = self.folder / f"model{number}"
                process = subprocess.Popen(
                    [LOCKSTEP, "train", *TINY, "--data", self.text, "--steps", "1000000", "--log", "json", "--out", out],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                self.addCleanup(process.communicate)
                self.addCleanup(process.kill)
                self.assertIn('"step":1', process.stdout.readline())
                process.send_signal(number)
                output, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 128 + number, errors)
                self.assertIn("stopping after the step under way; press Ctrl-C again to end at once\n", errors)
                self.assertIn(f"the model is in {out}; next: lockstep train --resume {out}", errors)
                self.assertRegex(output.splitlines()[-1], WEIGHTS)
                self.assertRegex(errors, rf"stopped by {name} after step \d+ of 1000000")
                self.assertEqual(lockstep("generate", out, "--tokens", 5).returncode, 0)


class Broken(Case):
    def test_input_is_told_with_file_and_position(self):
        shard = struct.pack("<6H", 1, 2, 3, 4, 999, 6) * 200
        for name, content, words in (
            ("empty.txt", b"", "empty.txt: the file is empty"),
            ("latin.txt", b"caf\xe9", "latin.txt: byte 3: 0xe9 is not UTF-8"),
            ("empty.bin", b"", "empty.bin: byte 0: the file is empty"),
            ("odd.bin", b"abc", "odd.bin: byte 3: an odd number of bytes"),
            ("short.bin", b"LOCKTOKS" + b"\1\0", "short.bin: byte 10: the file ends inside its header"),
            ("llm.bin", struct.pack("<256i", 20240520, 1, 50, *[0] * 253) + b"ab",
             "llm.bin: byte 1026: the file ends after 1 of the 50 tokens"),
            ("tiny.txt", b"too short", "tiny.txt: 10 tokens are too few for a context of 32"),
        ):
            with self.subTest(name=name):
                self.assertIn(words, self.fails(1, "train", *TINY, "--data", self.write(name, content), "--steps", 1))
        bare = self.folder / "bare"
        bare.mkdir()
        self.assertIn("none.txt: No such file", self.fails(1, "train", "--data", self.folder / "none.txt"))
        self.assertIn("no token shards (.bin files) and no text", self.fails(1, "train", "--data", bare))
        self.assertIn("token 4 has id 999, but the vocabulary has 500",
                      self.fails(1, "data", "--check", "--vocab", 500, self.write("ids.bin", shard)))
        for command in (["data", "--out", self.folder / "o"], ["train", "--data"]):
            self.assertIn("latin.txt: byte 3", self.fails(1, *command, self.write("latin.txt", b"caf\xe9")))

    def test_shard_whose_tokens_are_beyond_its_vocabulary(self):
        out = self.folder / "shards"
        self.assertEqual(lockstep("data", self.text, "--out", out).returncode, 0)
        path = out / "shard_00000.bin"
        content = bytearray(path.read_bytes())
        struct.pack_into("<I", content, 8, 1)  # the version that has no hash, which would tell of damage
        content[80:112] = bytes(32)
        struct.pack_into("<I", content, 124, crc32c(content[:124]))
        struct.pack_into("<H", content, 128 + 2 * 1000, 256)
        path.write_bytes(content)
        run = lockstep("train", *TINY, "--data", out, "--steps", 200)
        self.assertEqual(run.returncode, 1)
        self.assertNotIn("lockstep explain", run.stderr)  # the data says it all
        self.assertRegex(run.stderr, r"shard_00000.bin: byte 2128: token 1000 has id 256, but the vocabulary has 256")

    def test_wrong_usage(self):
        for arguments, word in (
            (["train", "--global-batch", 7, "--micro-batch", 2, "--data", self.text], "--micro-batch 2"),
            (["train", "--hidden", 40, "--data", self.text], "hidden is 40"),
            (["train", "--schedule", "stairs"], "stairs"),
            (["train", "--log", "loud"], "loud"),
            (["train", "--lr", "-1"], "--lr"),
            (["train", "--elastic"], "--elastic"),
            (["train", "--join", "localhost:7", "--steps", 3], "--steps cannot be given with it"),
            (["train", "--join", "localhost:7", "--resume", "x"], "--resume cannot be given with it"),
            (["train", "--join", "localhost:7", "--out", "x"], "--out cannot be given with it"),
            (["train", "--join", "localhost:7", "--fail-fast"], "--fail-fast cannot be given with it"),
            (["data"], "either text files or --stories"),
            (["data", self.text], "--out"),
            (["data", self.text, "--stories", 3, "--out", "x"], "either"),
            (["generate"], "lockstep generate needs MODEL: the model's folder"),
            (["train", self.text, "--overwrite"], "--overwrite needs --out"),
            (["train", self.text, "--out", self.text], "text.txt: this is a file, and a run needs a folder"),
            (["train", self.text, "--token-file", "nowhere"], "opening nowhere: No such file"),
            (["train", self.text, "--heads", 4, "--kv-heads", 3], "(--kv-heads)"),
            (["train", self.text, "--keep-last", 2], "--keep-last needs --out"),
            (["train", self.text, "--save-wait"], "--save-wait needs --out"),
            (["train", self.text, "--force-tokenizer"], "it needs --init"),
            (["train", self.text, "--init", "nowhere"], "--init nowhere: there is no such folder"),
            (["train", self.text, "--tokenizer", "sentencpiece"], "no such file or folder; did you mean sentencepiece?"),
            (["data", self.text, "--out", self.folder / "x", "--vocab", 300], "--vocab is for a tokenizer that is trained"),
            (["generate", "x", "--top-p", 2], "--top-p"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.fails(2, *arguments))

    def test_models_that_are_none(self):
        self.assertIn("none: there is no such folder", self.fails(1, "generate", self.folder / "none"))
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 1, "--out", out)
        weights = out / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-4])
        self.assertRegex(self.fails(1, "generate", out), r"model.safetensors: byte 8: tensor '.*' (lies outside|is larger than) the file")
        weights.unlink()
        self.assertIn("model.safetensors: No such file", self.fails(1, "generate", out))

    def test_memory_is_computed_before_it_is_taken(self):
        line = self.fails(2, "train", self.text, "--hidden", 16384, "--layers", 100, "--micro-batch", 1)
        self.assertRegex(line, r"out of memory: 1 worker needs \d+\.\d GiB, where \d+\.\d GiB are available; it takes a smaller model")

    def test_what_all_workers_find_wrong_is_told_once(self):
        out = self.folder / "taken"
        out.mkdir()
        (out / "mine").touch()
        for code, words, arguments in (
            (2, "out of memory: 2 workers need", [self.text, "--hidden", 16384, "--layers", 100, "--micro-batch", 1]),
            (2, "taken", [self.text, "--out", out]),
            (1, "none.txt: No such file", [self.folder / "none.txt"]),
        ):
            with self.subTest(words=words):
                run = lockstep("train", *arguments, "--workers", 2)
                self.assertEqual(run.returncode, code, run.stderr)
                self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
                self.assertIn(words, run.stderr)

    def test_a_folder_that_cannot_be(self):
        self.assertIn("text.txt", self.fails(1, "train", *TINY, "--data", self.text, "--steps", 1, "--out", self.text / "x"))


class Generation(Case):
    def test_from_standard_input_and_several_at_once(self):
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 1, "--out", out)
        common = ["--tokens", 12, "--temperature", 0.5]
        alone = [lockstep("generate", out, "--prompt", "a\nfox", *common, "--seed", seed).stdout for seed in (7, 8, 9)]
        self.assertEqual(len(set(alone)), 3)
        several = lockstep("generate", out, "--prompt", "-", *common, "--seed", 7, "--samples", 3, input="a\nfox\n")
        self.assertEqual(several.stdout, "\n".join(f"--- seed {seed} ---\n{text}" for seed, text in zip((7, 8, 9), alone)))
        self.assertEqual(lockstep("generate", out, "--prompt", "-", *common, "--seed", 8, input="a\nfox").stdout, alone[1])
        self.assertIn("the prompt is not UTF-8 at byte 1", self.fails_with_input(b"a\xff", 2, "generate", out, "--prompt", "-"))

    def fails_with_input(self, given, code, *arguments):
        run = subprocess.run([LOCKSTEP, *map(str, arguments)], input=given, capture_output=True, timeout=60)
        self.assertEqual(run.returncode, code, run.stderr)
        return run.stderr.decode()

    def test_a_seed_is_a_text(self):
        out = self.folder / "model"
        self.train("--data", self.text, "--steps", 20, "--out", out)

        def text(*arguments):
            run = lockstep("generate", out, "--tokens", 60, *arguments)
            self.assertEqual(run.returncode, 0, run.stderr)
            return run.stdout

        first = text("--prompt", "12 small", "--seed", 4)
        self.assertTrue(first.startswith("12 small"), first)
        self.assertEqual(text("--prompt", "12 small", "--seed", 4), first)
        self.assertEqual(text("--prompt", "12 small", "--seed", 4, "--threads", 1), first)
        self.assertNotEqual(text("--prompt", "12 small", "--seed", 5), first)
        cold = text("--temperature", 0, "--seed", 1)
        self.assertEqual(text("--temperature", 0, "--seed", 2), cold)
        self.assertEqual(text("--top-k", 1, "--seed", 2), cold)
        self.assertEqual(text("--top-p", 0, "--seed", 2), cold)


class Data(Case):
    def test_folders_patterns_standard_input_and_names_for_validation(self):
        texts = self.folder / "texts"
        texts.mkdir()
        shutil.copy(self.text, texts / "all.txt")
        (texts / "val.txt").write_text("Nobody may learn this. " * 40)

        def trained(*data):
            run = lockstep("train", *TINY, "--data", *data, "--steps", 2)
            return self.weights_of(run), run.stderr

        weights, said = trained(texts)
        self.assertRegex(said, r"; \d+ more, of \S*val\.txt, are for validation")
        for data in ([texts / "*.txt"], [texts / "val.txt", texts / "all.txt"]):
            self.assertEqual(trained(*data)[0], weights)
        for name, given in (("a", [texts]), ("b", [texts / "*.txt"]), ("c", ["-", texts / "val.txt"])):
            run = lockstep("data", *given, "--out", self.folder / name, input=self.text.read_text())
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertIn("2 documents (1 for validation)", run.stdout)
            self.assertEqual(sorted(path.name for path in (self.folder / name).iterdir()), ["shard_00000.bin", "val_00000.bin"])
            resumed, said = trained(self.folder / name)
            self.assertEqual(resumed, weights)
            self.assertRegex(said, r"; \d+ more, of \S*val_00000\.bin, are for validation")
        self.assertRegex(trained(self.text)[1], r"; \d+ more, the last of the data, are for validation")
        self.assertIn("val.txt is trained on, though its name is one for validation", trained(texts / "val.txt")[1])
        self.assertIn("no text (.txt files) in this folder", self.fails(1, "data", self.folder / "a", "--out", self.folder / "d"))
        # No tokenizer learns from it either.
        for name, given in (("e", [texts]), ("f", [self.text])):
            self.assertEqual(lockstep("data", *given, "--out", self.folder / name, "--tokenizer", "bpe", "--vocab", 300).returncode, 0)
        self.assertEqual((self.folder / "e" / "tokenizer.json").read_bytes(), (self.folder / "f" / "tokenizer.json").read_bytes())
        self.assertIn("has no header that we know", self.fails(2, "data", "--check", self.text))

    def test_a_tokenizer_of_somebody_else_stays(self):
        out = self.folder / "shards"
        out.mkdir()
        theirs = out / "tokenizer.json"
        theirs.write_text("theirs")
        self.assertIn("is there already, and is another tokenizer",
                      self.fails(2, "data", self.text, "--out", out, "--tokenizer", "bpe", "--vocab", 300))
        self.assertEqual([path.read_text() for path in out.iterdir()], ["theirs"])

    def test_tokens_of_unknown_origin_go_on_with_the_tokenizer_of_the_model(self):
        pieces, model, tuned = self.folder / "pieces", self.folder / "model", self.folder / "tuned"
        self.assertEqual(lockstep("data", self.text, "--out", pieces, "--tokenizer", "bpe", "--vocab", 300).returncode, 0)
        self.train("--data", pieces, "--steps", 1, "--out", model)
        bare = self.write("bare.bin", (pieces / "shard_00000.bin").read_bytes()[128:])
        run = lockstep("train", "--data", bare, "--vocab", 300, "--init", model, "--steps", 1, "--out", tuned)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(f"they are taken for those of {model}", run.stderr)
        self.assertEqual((tuned / "tokenizer.json").read_bytes(), (model / "tokenizer.json").read_bytes())
        self.assertEqual(lockstep("generate", tuned, "--prompt", "small", "--tokens", 3).returncode, 0)

    def test_shards_train_to_the_same_bits_as_their_text(self):
        out = self.folder / "shards"
        tokens = self.text.stat().st_size + 1
        run = lockstep("data", self.text, "--out", out)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(f"{tokens} tokens of 256", run.stdout)
        arguments = ["--steps", 5]
        weights = self.train("--data", self.text, *arguments)
        self.assertEqual(self.train("--data", out, *arguments), weights)
        # The same tokens as nanoGPT has them.
        bare = self.write("train.bin", struct.pack(f"<{tokens}H", *self.text.read_bytes(), 0))
        self.assertEqual(self.train("--data", bare, "--vocab", 256, *arguments), weights)
        self.assertIn("there already", self.fails(2, "data", self.text, "--out", out))
        check = lockstep("data", "--check", out)
        self.assertIn(f"lockstep, {tokens} tokens of 2 bytes", check.stdout)

    def test_stories(self):
        run = lockstep("data", "--stories", 2, "--print")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stdout, r"entropy of the grammar: [0-9.]+ bits per story of [0-9.]+ bytes, 0\.\d+ bits per byte")
        self.assertNotEqual(lockstep("data", "--stories", 2, "--print", "--seed", 1).stdout, run.stdout)
        out = self.folder / "stories"
        self.assertEqual(lockstep("data", "--stories", 50, "--out", out).returncode, 0)
        trained = lockstep("train", *TINY, "--data", out, "--steps", 2)
        self.assertIn("the source itself has 0.0", trained.stderr)

    def test_sentencepiece(self):
        out = self.folder / "pieces"
        run = lockstep("data", self.text, "--out", out, "--tokenizer", "sentencepiece", "--vocab", 300)
        if "built without SentencePiece" in run.stderr:
            self.assertEqual(run.returncode, 2)
            return
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("tokenizer.model", [path.name for path in out.iterdir()])
        model = self.folder / "model"
        self.train("--data", out, "--steps", 3, "--out", model)
        self.assertEqual((model / "tokenizer.model").read_bytes(), (out / "tokenizer.model").read_bytes())
        text = lockstep("generate", model, "--prompt", "small foxes", "--tokens", 10)
        self.assertTrue(text.stdout.startswith("small foxes"), text.stdout + text.stderr)
        # A given model, on text directly: the same tokens, the same bits.
        direct = self.train("--data", self.text, "--tokenizer", out / "tokenizer.model", "--steps", 3)
        self.assertEqual(self.train("--data", out, "--steps", 3), direct)
        # More pieces than the text has: the model has as many as there are, and its tokens have a text.
        many = self.folder / "many"
        run = lockstep("train", *TINY, "--data", self.text, "--tokenizer", "sentencepiece", "--vocab", 100000, "--steps", 1, "--out", many)
        self.assertRegex(run.stderr, r"--vocab 100000: the text has only \d+ pieces")
        self.assertLess(json.loads((many / "config.json").read_text())["vocab_size"], 2000)
        self.assertEqual(lockstep("generate", many, "--tokens", 20, "--temperature", 5).returncode, 0)
        # A model's tokenizer goes with it.
        again = lockstep("train", *TINY, "--data", self.text, "--init", model, "--steps", 1, "--out", self.folder / "again")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual((self.folder / "again" / "tokenizer.model").read_bytes(), (model / "tokenizer.model").read_bytes())
        self.assertIn("was trained with another tokenizer",
                      self.fails(2, "train", *TINY, "--data", self.text, "--init", model, "--tokenizer", "bytes"))
        self.assertRegex(self.fails(2, "data", self.text, "--out", self.folder / "few", "--tokenizer", "sentencepiece", "--vocab", 10),
                         r"--vocab 10: SentencePiece needs at least \d+ pieces for this text")
        self.assertIn("text.txt: not a SentencePiece model", self.fails(1, "train", "--data", self.text, "--tokenizer", self.text))

    def test_bpe(self):
        out = self.folder / "shards"
        run = lockstep("data", self.text, "--out", out, "--tokenizer", "bpe", "--vocab", 300)
        self.assertEqual(run.returncode, 0, run.stderr)
        # Learned again from the text, or given: the same tokens, the same bits. The files go with the model.
        model = self.folder / "model"
        weights = self.train("--data", out, "--steps", 4)
        self.assertEqual(self.train("--data", self.text, "--tokenizer", out, "--steps", 4), weights)
        self.assertEqual(self.train("--data", self.text, "--tokenizer", "bpe", "--vocab", 300, "--steps", 4, "--save-every", 2, "--out", model),
                         weights)
        for folder in (model, model / "checkpoint-4"):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                self.assertEqual((folder / name).read_bytes(), (out / name).read_bytes())
        text = lockstep("generate", model, "--prompt", "small foxes 🙂", "--tokens", 10)
        self.assertTrue(text.stdout.startswith("small foxes 🙂"), text.stdout + text.stderr)
        # A second worker gets the tokenizer of the checkpoint, which it does not read.
        shutil.rmtree(model / "checkpoint-4")
        resumed = lockstep("train", "--resume", model, "--workers", 2, "--transport", "tcp")
        self.assertEqual(self.weights_of(resumed), weights)
        self.assertIn("was trained with another tokenizer",
                      self.fails(2, "train", *TINY, "--data", self.text, "--init", model, "--tokenizer", "bytes"))
        # Models of others: their tokenizer.json, or why it is none for us.
        config = json.loads((model / "config.json").read_text())
        del config["lockstep_tokenizer"]
        (model / "config.json").write_text(json.dumps(config))
        self.assertEqual(lockstep("generate", model, "--prompt", "small foxes 🙂", "--tokens", 10).stdout, text.stdout)
        (model / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Unigram"}}')
        self.assertIn("tokenizer.json: byte 37: model.type: only BPE is known", self.fails(1, "generate", model))
        other = lockstep("train", *TINY, "--data", out, "--init", model, "--steps", 1, "--out", self.folder / "other")
        self.assertEqual(other.returncode, 0, other.stderr)
        broken = self.write("tokenizer.json", '{"version": "1.0", "model": [')
        self.assertIn("tokenizer.json", self.fails(1, "data", self.text, "--out", self.folder / "none", "--tokenizer", broken))


if __name__ == "__main__":
    unittest.main()
