"""`lockstep train` on a text of a few thousand bytes, for tests that look at what it leaves behind."""

import struct
import json
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
TINY = {"--hidden": 32, "--layers": 1, "--heads": 2, "--intermediate": 48, "--context": 32, "--global-batch": 6, "--micro-batch": 2,
        "--threads": 1, "--eval-every": 0}
WEIGHTS = re.compile(r"^weights (blake3:[0-9a-f]{64})$")


def lockstep(*arguments, timeout=120, **options):
    return subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, **options)


def rows_of(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def steps_of(out):
    """The lines of steps in the metrics of a run."""
    return [row for row in rows_of(out) if "event" not in row]


def events_of(out):
    return [row for row in rows_of(out) if "event" in row]


class TextCase(unittest.TestCase):
    """With a folder of its own and a text to train on."""

    LINES = 120

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n"
                                     for i in range(self.LINES)))

    def weights_of(self, run):
        """The hash that a run which came to its end has printed."""
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        match = WEIGHTS.match(run.stdout.splitlines()[-1])
        self.assertTrue(match, run.stdout)
        return match[1]

    def fails(self, code, *arguments):
        """Returns the one line on stderr that says why."""
        run = lockstep(*arguments)
        self.assertEqual(run.returncode, code, run.stdout + run.stderr)
        lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")] or run.stderr.splitlines()[:1]
        self.assertEqual(len(lines), 1, run.stderr)
        return lines[0]


class TrainingCase(TextCase):
    def command(self, *arguments):
        """What is given takes the place of what is usual here."""
        usual = [word for flag, value in {**TINY, "--data": self.text}.items() if flag not in arguments for word in (flag, value)]
        tidy = ["--save-wait"] if "--out" in arguments else []
        return ["train", "--tie-embeddings", *tidy, *usual, *arguments]

    def train(self, *arguments):
        """Runs to the end; returns the hash of the weights and what was said on stderr."""
        run = lockstep(*self.command(*arguments))
        return self.weights_of(run), run.stderr

    def verify(self, folder, code=0):
        run = lockstep("verify", folder)
        self.assertEqual(run.returncode, code, run.stdout + run.stderr)
        return run.stdout


def forget_hash(weights, which="lockstep_weights"):
    """Of a model's file that a test has changed: its hash would tell of the damage before anything else can go wrong."""
    content = weights.read_bytes()
    length, = struct.unpack_from("<Q", content)
    header = json.loads(content[8:8 + length])
    del header["__metadata__"][which]
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])
