#!/usr/bin/env python3
"""A job of this host has a secret that its launcher made: who does not hold it is turned away, whatever the transport."""
# ctest: TIMEOUT 120

import json
import os
import re
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import PATIENCE, children_of, die_with_parent, ports_of, reserved_port  # noqa: E402
from training import LOCKSTEP, TrainingCase  # noqa: E402


class LocalSecret(TrainingCase):
    def start(self, *arguments, **environment):
        command = self.command("--steps", 10 ** 8, "--log", "json", "--workers", 2, *arguments)
        run = subprocess.Popen([LOCKSTEP, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, **environment}, preexec_fn=die_with_parent)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        self.assertEqual(json.loads(run.stdout.readline())["step"], 1)
        return run

    def expect_refused(self, ports, *environments):
        """Workers that would join there, all at once: none is let in."""
        strangers = [subprocess.Popen([LOCKSTEP, "train", "--join", f"127.0.0.1:{port}", "--data", str(self.text)],
                                      env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      preexec_fn=die_with_parent) for port in ports for environment in environments]
        for stranger in strangers:
            self.addCleanup(stranger.communicate)
            self.addCleanup(stranger.kill)
        for stranger in strangers:
            said, _ = stranger.communicate(timeout=PATIENCE)
            self.assertEqual(stranger.returncode, 1, said)
            self.assertRegex(said, "wrong token|token missing")

    def expect_untouched(self, run):
        """It computes on with its own two workers, and ends when it is told to."""
        run.send_signal(signal.SIGTERM)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, stderr)
        rows = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
        self.assertEqual({len(row["lanes"]) for row in rows if "lanes" in row and "event" not in row} - {2}, set())

    def test_who_has_none_or_guesses_is_turned_away(self):
        nothing = {"XDG_RUNTIME_DIR": str(self.folder)}
        guess = {"LOCKSTEP_TOKEN": "0123456789abcdef" * 4}
        for transport in ("tcp", "shm", "server"):
            with self.subTest(transport=transport):
                run = self.start("--transport", transport)
                ports = ports_of([run.pid, *children_of(run.pid)])
                self.assertTrue(ports)
                self.expect_refused(ports, nothing, guess)
                self.expect_untouched(run)

    def test_the_environment_does_not_tell_it(self):
        """Others could read it there: with `ps`, or from a crash report."""
        run = self.start("--transport", "shm")
        for pid in children_of(run.pid):
            variables = dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)
            file = int(variables["LOCKSTEP_SECRET_FD"])
            self.assertGreater(file, 2)
            secret = Path(f"/proc/{pid}/fd/{file}").read_text()
            self.assertRegex(secret, "^[0-9a-f]{64}$")
            for place in ("environ", "cmdline"):
                self.assertNotIn(secret, Path(f"/proc/{pid}/{place}").read_text())
        self.expect_untouched(run)

    def test_only_the_same_user_joins_where_the_job_listens(self):
        mine, theirs = self.folder / "mine", self.folder / "theirs"
        for folder in (mine, theirs):
            folder.mkdir(mode=0o700)
        with reserved_port() as port:
            run = self.start("--listen", f"127.0.0.1:{port}", XDG_RUNTIME_DIR=str(mine))
            kept = mine / f"lockstep-127.0.0.1-{port}"
            self.assertEqual(kept.stat().st_mode & 0o777, 0o600)
            self.expect_refused([port], {"XDG_RUNTIME_DIR": str(theirs)})  # another user finds no secret
            self.expect_untouched(run)
            self.assertFalse(kept.exists())

    def expect_joined(self, run, port, **environment):
        """A worker of the same user finds the secret, and works."""
        command = [LOCKSTEP, "train", "--join", f"127.0.0.1:{port}", "--data", str(self.text)]
        worker = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  preexec_fn=die_with_parent)
        self.addCleanup(worker.communicate)
        self.addCleanup(worker.kill)
        for line in run.stdout:
            if line.startswith("{") and len(json.loads(line).get("lanes", [])) == 3:
                break
            self.assertIsNone(worker.poll(), "it did not join")
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=PATIENCE)
        worker.communicate(timeout=PATIENCE)

    def test_a_second_job_that_cannot_have_the_port_leaves_the_secret(self):
        mine = {"XDG_RUNTIME_DIR": str(self.folder)}
        self.folder.chmod(0o700)
        with reserved_port() as port:
            run = self.start("--listen", f"127.0.0.1:{port}", **mine)
            second = subprocess.run([LOCKSTEP, *map(str, self.command("--steps", 1, "--workers", 2, "--listen", f"127.0.0.1:{port}"))],
                                    env={**os.environ, **mine}, capture_output=True, text=True, timeout=PATIENCE)
            self.assertIn("Address already in use", second.stderr)
            self.expect_joined(run, port, **mine)

    def test_who_joins_at_a_worker_finds_the_secret_of_its_job(self):
        """Among those of other jobs, one of which was killed."""
        mine = {"XDG_RUNTIME_DIR": str(self.folder)}
        self.folder.chmod(0o700)
        for port in (1, 2):
            other = self.folder / f"lockstep-127.0.0.1-{port}"
            other.write_text("0123456789abcdef" * 4)
            other.chmod(0o600)
        run = self.start("--listen", "127.0.0.1:0", **mine)
        self.expect_joined(run, ports_of(children_of(run.pid))[0], **mine)

    def test_who_joins_finds_the_secret_by_the_port_that_the_job_was_given(self):
        mine = {"XDG_RUNTIME_DIR": str(self.folder)}
        self.folder.chmod(0o700)
        run = self.start("--listen", "127.0.0.1:0", **mine)
        for line in run.stderr:
            if found := re.search(r"--join 127\.0\.0\.1:(\d+)", line):
                break
        self.expect_joined(run, found[1], **mine)


if __name__ == "__main__":
    unittest.main()
