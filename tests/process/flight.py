#!/usr/bin/env python3
"""Workers are killed, stopped and made to fail: the flight recorder keeps what each did last, and `lockstep explain` names the one to look at."""
# ctest: TIMEOUT 300

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import SANITIZED, children_of, die_with_parent, reserved_port  # noqa: E402
from training import LOCKSTEP, TextCase, lockstep  # noqa: E402

SHAPE = ["--hidden", "32", "--layers", "1", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "6",
         "--micro-batch", "2", "--threads", "1", "--eval-every", "0"]
PATIENCE = 120


class Case(TextCase):
    LINES = 300

    def command(self, *arguments):
        return [str(word) for word in (LOCKSTEP, "train", "--data", self.text, *SHAPE, *arguments)]

    def run_with(self, fault, *arguments, **environment):
        return subprocess.run(self.command("--timeout", 3, *arguments), capture_output=True, text=True, timeout=PATIENCE,
                              env={**os.environ, "LOCKSTEP_FAULT": fault, **environment}, preexec_fn=die_with_parent)

    def explain(self, *arguments):
        told = lockstep("explain", *arguments)
        self.assertEqual(told.returncode, 0, told.stderr)
        return told.stdout

    def wait_for(self, what):
        deadline = time.monotonic() + PATIENCE
        while not (found := what()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        return found

    def files(self, folder):
        return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("generation-*/*.json"))}


class Failures(Case):
    def test_a_worker_that_is_killed(self):
        out = self.folder / "out"
        run = self.run_with("rank=1 step=3 at=backward do=kill", "--steps", 5, "--workers", 3, "--transport", "tcp", "--fail-fast",
                            "--out", out)
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertRegex(run.stderr.splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")
        self.assertIn(f"lockstep explain {out}/flight says what every rank did last", run.stderr)
        files = self.files(out / "flight")
        self.assertEqual(list(files), ["rank-0.json", "rank-1.json", "rank-2.json"])
        self.assertEqual([file["written_by"] for file in files.values()], ["rank 0", "the launcher", "rank 2"])
        last = files["rank-1.json"]["phases"][-1]
        self.assertEqual((last["phase"], last["step"], last["end_ns"]), ("forward and backward", 3, None))
        told = self.explain(out)
        self.assertRegex(told, r"rank 1 \(.*\) was in forward and backward of lane \d+, step 3")
        self.assertIn("rank 1 was killed by signal 9", told)
        self.assertIn("Look at rank 1 first.", told)
        self.check_pictures(out, 3)

    def check_pictures(self, folder, ranks):
        ElementTree.parse(folder / "timeline.svg")
        page = (folder / "timeline.html").read_text()
        self.assertIn("<svg", page)
        self.assertNotIn("<script", page)
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        self.assertEqual({event["pid"] for event in events}, set(range(ranks)))
        names = {(event["pid"], event["args"]["name"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
        self.assertEqual(names, {(rank, name) for rank in range(ranks) for name in ("phases", "collectives")})
        for event in (event for event in events if event["ph"] == "X"):
            self.assertGreaterEqual(event["ts"], 0)
            self.assertGreaterEqual(event["dur"], 0)
            self.assertIn(event["cat"], ("phase", "collective"))
        # Phases of a rank are one within the other, or one after the other, as the format demands of a thread.
        for rank in range(ranks):
            open_until = []
            own = [e for e in events if e["ph"] == "X" and e["cat"] == "phase" and e["pid"] == rank]
            for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
                while open_until and open_until[-1] <= event["ts"] + 0.5:
                    open_until.pop()
                end = event["ts"] + event["dur"]
                self.assertTrue(not open_until or end <= open_until[-1] + 0.5, event)
                open_until.append(end)

    def test_a_worker_that_stands_still_while_the_run_survives(self):
        out = self.folder / "out"
        run = self.run_with("rank=2 step=3 at=update do=stop", "--steps", 4, "--workers", 3, "--transport", "shm", "--out", out)
        self.assertEqual(run.returncode, 0, run.stderr)
        told = self.explain(out, "--generation", 1)
        self.assertRegex(told, r"rank 2 \(.*\) was in optimizer, step 3, for [34]\.\d s")
        self.assertIn("rank 2 stood still, and was ended by the launcher.", told)
        self.assertRegex(told, r"rank 0 \(.*\) failed in collective \d+ \(.*step 4.*\) for .* s, waiting for rank 2")
        self.assertIn("Ranks 0 and 1 waited for rank 2", told)
        self.assertIn("Look at rank 2 first.", told)

    def test_last_words(self):
        """Without a folder a failure makes one, and says where; each worker fails in its own way."""
        rows = [("tcp", "memory", "std::bad_alloc"), ("local", "fail", "this failure was asked for")]
        if not SANITIZED:
            rows.append(("shm", "crash", "the process crashed with signal 11"))
        for transport, action, words in rows:
            with self.subTest(transport=transport, action=action), tempfile.TemporaryDirectory() as temporary:
                run = self.run_with(f"rank=1 step=2 at=forward do={action}", "--steps", 3, "--workers", 2, "--transport", transport,
                                    "--fail-fast", TMPDIR=temporary)
                self.assertEqual(run.returncode, 1, run.stderr)
                folder = re.search(r"lockstep explain (\S+) says", run.stderr)[1]
                self.assertEqual(Path(folder).parent, Path(temporary))
                told = self.explain(folder)
                self.assertRegex(told, rf"The last words of rank 1: .*{words}")
                self.assertIn("Look at rank 1 first.", told)

    def test_a_halt(self):
        """Steps so large that the weights overflow."""
        out = self.folder / "out"
        run = self.run_with("", "--steps", 50, "--workers", 2, "--lr", "1e38", "--warmup", 0, "--out", out, LOCKSTEP_FAULT="rank=9 step=1 at=step do=fail")
        self.assertEqual(run.returncode, 3, run.stderr)
        files = self.files(out / "flight")
        self.assertEqual(list(files), ["rank-0.json", "rank-1.json"])
        for rank, file in enumerate(files.values()):
            self.assertEqual(file["written_by"], f"rank {rank}")
            self.assertIn("finite", file["why"])
        self.assertIn("rank 1", self.explain(out))

    def test_nothing_is_left_by_a_run_that_ends_well_or_is_called_wrongly(self):
        out = self.folder / "out"
        with tempfile.TemporaryDirectory() as temporary:
            run = self.run_with("", "--steps", 2, "--workers", 2, "--out", out, LOCKSTEP_FAULT="rank=9 step=1 at=step do=fail",
                                TMPDIR=temporary)
            self.assertEqual(run.returncode, 0, run.stderr)
            run = self.run_with("rank=9 step=1 at=step do=fail", "--steps", 2, "--workers", 2, "--out", "/proc/none", TMPDIR=temporary)
            self.assertNotEqual(run.returncode, 0)
            self.assertEqual(os.listdir(temporary), [])
        self.assertFalse((out / "flight").exists())
        told = lockstep("explain", out)
        self.assertEqual(told.returncode, 1)
        self.assertIn("there is nothing of a flight recorder", told.stderr)


class Hangs(Case):
    def test_sigusr2_tells_who_holds_up_a_run_that_hangs(self):
        """The launcher writes for a worker that is stopped, and for others that are blocked in a collective; the run goes on."""
        out = self.folder / "out"
        run = subprocess.Popen(self.command("--steps", 3, "--workers", 3, "--transport", "tcp", "--timeout", 60, "--out", out, "--log",
                                            "json", "--page", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=2 at=forward do=stop"}, preexec_fn=die_with_parent)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        page = next(line for line in run.stderr if line.startswith("page: ")).split()[1]
        victim = self.stopped_child(run.pid)
        deadline = time.monotonic() + PATIENCE
        told = ""
        while told.count(", waiting for rank 1") < 2:
            self.assertLess(time.monotonic(), deadline, told)
            run.send_signal(signal.SIGUSR2)
            line = run.stderr.readline()
            while "lockstep explain" not in line:
                line = run.stderr.readline()
            told = self.explain(out)
        self.assertRegex(told, r"rank 0 \(.*\) was in collective \d+ \(reduce_nodes .*step 2.*\) for .*, waiting for rank 1")
        self.assertRegex(told, r"Ranks 0 and 2 waited for rank 1, which was in forward and backward of lane \d+, step 2")
        self.assertIn("Look at rank 1 first.", told)
        with urllib.request.urlopen(page + "api/flight", timeout=PATIENCE) as answer:
            ranks = json.load(answer)["ranks"]
        self.assertEqual([each["rank"] for each in ranks], [0, 1, 2])
        self.assertEqual(ranks[0]["collectives"][-1]["waited_for"], 1)
        self.assertIsNone(ranks[1]["phases"][-1]["end_ns"])
        os.kill(victim, signal.SIGCONT)
        run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 0)

    def stopped_child(self, pid):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for child in children_of(pid):
                if Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                    return child
            time.sleep(0.02)
        self.fail("no worker stopped")

    def test_a_process_without_a_launcher_writes_for_all_its_threads(self):
        out = self.folder / "out"
        run = subprocess.Popen(self.command("--steps", 100000, "--workers", 2, "--transport", "local", "--out", out, "--log", "json"),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        run.stdout.readline()
        run.send_signal(signal.SIGUSR2)
        for line in run.stderr:
            if "lockstep explain" in line:
                break
        files = self.files(out / "flight")
        self.assertEqual(list(files), ["rank-0.json", "rank-1.json"])
        for file in files.values():
            self.assertTrue(file["collectives"])
            self.assertEqual(file["why"], "SIGUSR2 asked for it")
        self.assertIsNone(run.poll())


class SeenByNobodyElse(Case):
    """Ranks that are started as torchrun would."""

    def start(self, out, *arguments, fault, world=2, **environment):
        place = self.enterContext(reserved_port())
        ranks = []
        for rank in range(world):
            place_in_world = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place), "LOCKSTEP_FAULT": fault}
            ranks.append(subprocess.Popen(self.command("--out", out, "--transport", "tcp", *arguments), stdout=subprocess.DEVNULL, text=True,
                                          stderr=subprocess.PIPE, env={**os.environ, **place_in_world, **environment}, preexec_fn=die_with_parent))
            self.addCleanup(ranks[-1].communicate)
            self.addCleanup(ranks[-1].kill)
        return ranks

    def test_rank_0_has_all_others_write_theirs(self):
        out, port = self.folder / "out", self.enterContext(reserved_port())
        slow = "rank=any step=1 at=lane do=slow ms=20"
        ranks = self.start(out, "--steps", 100000, "--page", port, fault=slow)

        def seen():
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/flight", timeout=PATIENCE) as answer:
                return json.load(answer)

        told = self.wait_for(seen)
        self.assertEqual(([each["rank"] for each in told["ranks"]], told["asked"]), ([0], [1]))
        written = self.wait_for(lambda: self.files(out / "flight").get("rank-1.json"))
        self.assertEqual((written["written_by"], written["why"]), ("rank 1", "the job's centre asked for it"))
        for path in (out / "flight").glob("generation-*/*.json"):
            path.unlink()
        ranks[0].send_signal(signal.SIGUSR2)
        self.wait_for(lambda: len(self.files(out / "flight")) == 2)
        self.assertIn("rank 1", self.explain(out))
        self.assertEqual([rank.poll() for rank in ranks], [None, None])

    def test_a_rank_that_stood_still_tells_when_it_is_back(self):
        out = self.folder / "out"
        ranks = self.start(out, "--steps", 100000, "--timeout", 2, world=3, fault="rank=1 step=3 at=update do=stop; rank=any step=1 at=lane do=slow ms=20")
        self.wait_for(lambda: "rank-0.json" in self.files(out / "flight"))
        self.assertNotIn("rank-1.json", self.files(out / "flight"))
        ranks[1].send_signal(signal.SIGCONT)
        self.wait_for(lambda: "rank-1.json" in self.files(out / "flight"))
        self.assertIn("Look at rank 1 first.", self.explain(out, "--generation", 1))
        ended = [phase for phase in self.files(out / "flight")["rank-1.json"]["phases"] if phase["end_ns"]]
        longest = max(ended, key=lambda phase: phase["end_ns"] - phase["begin_ns"])
        self.assertEqual((longest["phase"], longest["step"]), ("optimizer", 3))

    def test_a_rank_that_comes_too_late_leaves_the_outputs_alone(self):
        out, apart = self.folder / "out", self.folder / "apart"
        ranks = self.start(out, "--steps", 4, "--timeout", 2, fault="rank=1 step=3 at=update do=stop", LOCKSTEP_FLIGHT_DIR=str(apart))
        self.assertEqual(ranks[0].wait(PATIENCE), 0)
        ranks[1].send_signal(signal.SIGCONT)
        self.assertNotEqual(ranks[1].wait(PATIENCE), 0)
        self.assertEqual((list(self.files(out / "flight")), list(self.files(apart))), (["rank-0.json"], ["rank-1.json"]))


if __name__ == "__main__":
    unittest.main()
