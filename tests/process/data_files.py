#!/usr/bin/env python3
"""Data of many files, and what a run leaves beside them."""

import array
import resource
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from training import TrainingCase, lockstep  # noqa: E402

VOCAB = 300


def write_tokens(path, seed):
    """As nanoGPT does."""
    tokens = array.array("H", ((i * i + seed) % VOCAB for i in range(200)))
    path.write_bytes(tokens.tobytes())


class DataFiles(TrainingCase):
    def test_a_second_run_finds_the_hashes_that_the_first_has_left(self):
        folder = self.folder / "data"
        folder.mkdir()
        write_tokens(folder / "a.bin", 1)
        first = self.command("--steps", 1, "--data", f"{folder}/*", "--vocab", VOCAB, "--out", self.folder / "out")
        weights = self.weights_of(lockstep(*first))
        self.assertTrue((folder / "a.bin.blake3").exists())
        self.assertEqual(self.weights_of(lockstep(*self.command("--steps", 1, "--data", f"{folder}/*", "--vocab", VOCAB))), weights)
        self.weights_of(lockstep("train", "--resume", "--out", self.folder / "out", "--steps", 2))
        run = lockstep("data", "--check", "--vocab", VOCAB, *sorted(folder.iterdir()))  # as a shell expands *
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_more_shards_than_the_usual_limit_of_open_files(self):
        folder = self.folder / "many"
        folder.mkdir()
        for i in range(100):
            write_tokens(folder / f"{i:03}.bin", i)

        def lower():
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

        for workers in (1, 2):
            with self.subTest(workers=workers):
                self.weights_of(lockstep(*self.command("--steps", 1, "--data", folder, "--vocab", VOCAB, "--workers", workers),
                                         preexec_fn=lower))


if __name__ == "__main__":
    unittest.main()
