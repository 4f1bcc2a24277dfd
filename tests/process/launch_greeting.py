#!/usr/bin/env python3
"""What comes over the pipes of a remote shell and is not what launcher and agent tell each other: the terminal does nothing that it says before the
agent is there, and no word is taken for a number."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

LOCKSTEP = os.environ["LOCKSTEP_BIN"]


class Greeting(unittest.TestCase):
    def test_control_characters_are_shown(self):
        with tempfile.TemporaryDirectory() as folder:
            ssh = Path(folder) / "ssh"
            ssh.write_text(r"printf 'welcome\033[2J\rerror: forged\n'; printf 'banner\033[2J\rerror: forged\r\nbroken\033[2J' >&2; exit 255" + "\n")
            run = subprocess.run([LOCKSTEP, "launch", "--hosts", "a", "--ssh", f"sh {ssh}", "--timeout", "5", "--", "train"], capture_output=True,
                                 timeout=60)
        self.assertNotEqual(run.returncode, 0)
        self.assertIn(rb"[a] welcome\x1b[2J\x0derror: forged" + b"\n", run.stderr)
        self.assertIn(rb"[a] banner\x1b[2J\x0derror: forged" + b"\n", run.stderr)
        self.assertIn(rb"[a] broken\x1b[2J" + b"\n", run.stderr)
        self.assertIn(rb"host a cannot be used: sh failed, with exit code 255: broken\x1b[2J" + b"\n", run.stderr)
        self.assertNotIn(b"\x1b[2J", run.stderr)

    def test_an_agent_refuses_a_word_where_a_number_belongs(self):
        for order, said in ((b"listen\x02two\x022\x02", b"the launcher said listen 'two', which is no number"),
                            (b"timeout\x02", b"the launcher said timeout '', which is no number")):
            run = subprocess.run([LOCKSTEP, "agent"], input=b"\x01" + order + b"\n", capture_output=True, timeout=60)
            self.assertEqual(run.returncode, 2, run.stderr)
            self.assertIn(b"\x01refused\x02" + said + b"\n", run.stdout)

    def test_who_ended_with_no_number_has_not_ended_well(self):
        version = subprocess.run([LOCKSTEP, "--version"], capture_output=True, text=True).stdout.split()[1]
        for code in ("0", "well"):
            with tempfile.TemporaryDirectory() as folder:
                ssh = Path(folder) / "ssh"
                ssh.write_text(rf"printf '\001ready\002{version}\n\001formed\n\001ended\002{code}\n'" + "\n")
                run = subprocess.run([LOCKSTEP, "launch", "--hosts", "a", "--ssh", f"sh {ssh}", "--timeout", "5", "--", "train"], capture_output=True,
                                     timeout=60)
            self.assertEqual(run.returncode, 0 if code == "0" else 1, run.stderr)


if __name__ == "__main__":
    unittest.main()
