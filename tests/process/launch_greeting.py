#!/usr/bin/env python3
"""What the shell of a remote host says before its agent is there comes from outside: the terminal does nothing that it says."""

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


if __name__ == "__main__":
    unittest.main()
