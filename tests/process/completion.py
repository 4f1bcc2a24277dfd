#!/usr/bin/env python3
"""Completions of bash, zsh and fish, and man pages: made from the help, so all that the help names is in them, and taken by their shells."""
# ctest: TIMEOUT 60

import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
BASH = """
source <("$LOCKSTEP_BIN" completion bash)
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_lockstep
printf '%s\\n' "${COMPREPLY[@]}"
"""


def output_of(*words, **options):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True, timeout=30, **options).stdout


class Completion(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def bash(self, *words):
        return output_of("bash", "-c", BASH, "bash", "lockstep", *words, cwd=self.folder).split()

    def test_bash(self):
        self.assertEqual(self.bash("tr"), ["train"])
        self.assertEqual(self.bash("bench", ""), ["allreduce", "step"])
        self.assertEqual(self.bash("train", "--tie"), ["--tie-embeddings"])
        self.assertEqual(self.bash("train", "--device", "c"), ["cpu", "cuda"])
        self.assertEqual(self.bash("bench", "step", "--model", "3"), ["350m"])
        self.assertEqual(self.bash("train", "--steps", ""), [])
        (self.folder / "text.txt").touch()
        (self.folder / "model").mkdir()
        self.assertEqual(self.bash("train", "--data", ""), ["model", "text.txt"])
        self.assertEqual(self.bash("train", "te"), ["text.txt"])
        for words in (["generate", ""], ["generate", "--threads", "2", "m"], ["verify", ""], ["train", "--out", ""], ["train", "--resume", ""]):
            self.assertEqual(self.bash(*words), ["model"])
        self.assertEqual(self.bash("completion", ""), ["bash", "zsh", "fish"])
        self.assertEqual(sorted(self.bash("train", "--tokenizer", "")), ["bpe", "bytes", "model", "sentencepiece", "text.txt"])

    def test_fish(self):
        if not shutil.which("fish"):
            self.skipTest("there is no fish")
        script = self.folder / "lockstep.fish"
        script.write_text(output_of(LOCKSTEP, "completion", "fish"))

        def complete(line):
            found = output_of("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", env={**os.environ, "HOME": str(self.folder)})
            return [each.split("\t")[0] for each in found.splitlines()]

        self.assertEqual(complete("lockstep tr"), ["train"])
        self.assertEqual(complete("lockstep bench "), ["allreduce", "step"])
        self.assertEqual(complete("lockstep train --tie"), ["--tie-embeddings"])
        self.assertEqual(sorted(complete("lockstep train --device ")), ["auto", "cpu", "cuda"])
        self.assertEqual(sorted(complete("lockstep completion ")), ["bash", "fish", "zsh"])
        self.assertIn("bpe", complete("lockstep train --tokenizer "))

    def test_zsh(self):
        if not shutil.which("zsh"):
            self.skipTest("there is no zsh")
        (self.folder / "_lockstep").write_text(output_of(LOCKSTEP, "completion", "zsh"))
        output_of("zsh", "-n", self.folder / "_lockstep")
        # zsh completes in a terminal of its own; what it lists is what it writes there.
        driver = """
            zmodload zsh/zpty
            zpty driven zsh -f -i
            zpty -w driven "PS1=; PROMPT2=; fpath=($1 \\$fpath); autoload -U compinit; compinit -u -D; compdef _lockstep lockstep; echo re''ady"
            zpty -r driven text '*ready*'
            zpty -w -n driven $'lockstep train --tie\\t --device cu\\t'
            zpty -w -n driven $'\\n'
            zpty -r driven text '*--device cuda*' && print -r -- $text
        """
        said = output_of("zsh", "-f", "-c", driver, "zsh", self.folder)
        self.assertIn("--tie-embeddings", said)

    def test_man_pages_have_all_that_the_help_has(self):
        share = self.folder / "share"
        output_of(LOCKSTEP, "share", share)
        self.assertEqual((share / "bash-completion/completions/lockstep").read_text(), output_of(LOCKSTEP, "completion", "bash"))
        self.assertTrue((share / "zsh/site-functions/_lockstep").read_text().startswith("#compdef lockstep"))
        self.assertIn("complete -c lockstep", (share / "fish/vendor_completions.d/lockstep.fish").read_text())
        pages = sorted(page.stem for page in (share / "man/man1").iterdir())
        self.assertEqual([page for page in pages if page.count("-") < 2], sorted(
            ["lockstep"] + [f"lockstep-{name}" for name in re.findall(r"^  (\w+) ", output_of(LOCKSTEP, "--help").split("Subcommands:")[1].split("\n\n")[0], re.M)]))
        self.assertNotIn("lockstep-share", pages)
        self.assertIn("[\\fIOPTIONS\\fR] \\fIMODEL\\fR\n", (share / "man/man1/lockstep-generate.1").read_text())
        self.assertIn("[\\fIOPTIONS\\fR] [\\fIPATH\\fR]\n", (share / "man/man1/lockstep-train.1").read_text())
        for page in pages:
            path = share / f"man/man1/{page}.1"
            text = path.read_text().replace("\\-", "-")
            help_text = output_of(LOCKSTEP, *page.split("-")[1:], "--help")
            for name in re.findall(r"^  (?:-\w,)?(--[a-z-]+)", help_text, re.M):
                self.assertIn(f"\\fB{name}\\fR", text, page)
            if shutil.which("groff"):
                made = subprocess.run(["groff", "-man", "-ww", "-Tascii", "-P-c", path], capture_output=True, text=True, timeout=30)
                self.assertEqual((made.returncode, made.stderr), (0, ""), page)
                self.assertIn("lockstep", made.stdout)


if __name__ == "__main__":
    unittest.main()
