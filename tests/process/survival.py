#!/usr/bin/env python3
"""Workers are killed and stopped while they train: the run goes on, and ends with the bits of the run in which nothing happened."""
# ctest: TIMEOUT 600 COST 45

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import SANITIZED, children_of, die_with_parent, gone, ports_of, reserved_port, state_of, wait_for  # noqa: E402
from training import LOCKSTEP, TextCase, events_of, steps_of  # noqa: E402

SHAPE = ["--hidden", "32", "--layers", "2", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "22",
         "--micro-batch", "2", "--threads", "1"]
WEIGHTS = re.compile(r"^weights (blake3:[0-9a-f]{64})$", re.M)
STEPS = 8
TIMEOUT = 3  # of silence; a stopped worker is noticed after it
PATIENCE = 120


class Case(TextCase):
    LINES = 300
    hashes = {}

    def command(self, *arguments):
        return [str(word) for word in (LOCKSTEP, "train", "--data", self.text, *SHAPE, *arguments)]

    def alone(self, steps=STEPS, *arguments):
        """The hash of one worker to whom nothing happens."""
        if (steps, *arguments) not in Case.hashes:
            run = subprocess.run(self.command("--steps", steps, *arguments), capture_output=True, text=True, timeout=PATIENCE)
            self.assertEqual(run.returncode, 0, run.stderr)
            Case.hashes[steps, *arguments] = WEIGHTS.search(run.stdout)[1]
        return Case.hashes[steps, *arguments]

    def survives(self, fault, *arguments, workers=3, steps=STEPS):
        run = subprocess.run(self.command("--steps", steps, "--workers", workers, "--timeout", TIMEOUT, *arguments),
                             capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "LOCKSTEP_FAULT": fault},
                             preexec_fn=die_with_parent)
        said = run.stdout + run.stderr
        self.assertEqual(run.returncode, 0, said)
        self.assertEqual(WEIGHTS.findall(run.stdout), [self.alone(steps)], said)
        return said


class Losses(Case):
    # What is said of it, and sanitizers; survival_pairs.sh has every pair of place, victim, transport, shards and what happens.
    ROWS = [
        ("backward", "kill", 0, "tcp", False), ("step", "stop", 0, "shm", False), ("update", "kill", 0, "tcp", True),
        ("update", "kill", 0, "server", False),
    ]

    def test_killed_or_stopped(self):
        for place, action, victim, transport, sharded in Losses.ROWS:
            with self.subTest(place=place, action=action, victim=victim, transport=transport, sharded=sharded):
                said = self.survives(f"rank={victim} step=3 at={place} do={action}", "--transport", transport,
                                     *(["--shard-optimizer"] if sharded else []))
                self.assertRegex(said, rf"rank {victim} \(pid \d+\) was killed by signal 9")
                self.assertRegex(said, r"step [234]: (lost|.* is expelled)")
                self.assertEqual("with 3 of them --shard-optimizer saves no memory" in said, sharded, said)

    def test_a_worker_that_fails_by_itself(self):
        rows = [("tcp", "memory", "bad_alloc"), ("server", "memory", "bad_alloc"), ("local", "memory", "bad_alloc"),
                ("tcp", "device", "device error: this failure was asked for"), ("shm", "crash", "signal 11")]
        for transport, action, words in rows[:4] if SANITIZED else rows:  # sanitizers turn a crash into an exit code
            with self.subTest(transport=transport, action=action):
                said = self.survives(f"rank=1 step=3 at=backward do={action}", "--transport", transport)
                self.assertRegex(said, rf"step 3: lost rank 1 .*{words}.*; the step is computed again by 2 workers")

    def test_a_worker_that_lives_and_does_not_come(self):
        """It is silent to nobody: the deadline of a collective passes, 10 times the timeout. Its launcher ends it."""
        said = self.survives("rank=1 step=3 at=backward do=slow ms=600000", "--timeout", 1, "--transport", "tcp")
        self.assertRegex(said, r"step 3: .*rank 1 .* is expelled")

    def test_what_is_left_of_it(self):
        """Every step is in the metrics once, with the events between them, and nothing but the run's own files stays."""
        out = self.folder / "out"
        said = self.survives("rank=0 step=3 at=update do=kill", "--transport", "tcp", "--out", out, "--save-every", 2)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([row["step"] for row in rows if "event" not in row], list(range(1, STEPS + 1)))
        self.assertIn("lost", [row.get("event") for row in rows])
        self.assertIn("events while training" if said.count(" has joined") else "event while training", said)
        self.assertFalse([path.name for path in out.iterdir() if path.name.endswith(".tmp") or path.name.startswith("lease")])
        check = subprocess.run([LOCKSTEP, "verify", str(out / f"checkpoint-{STEPS}")], capture_output=True, text=True)
        self.assertEqual(check.returncode, 0, check.stderr)

    def test_every_loss_is_told(self):
        """Of the second one in a row, too, which ends the generation before anybody has told of the first; and after the last step."""
        said = self.survives("rank=1 step=3 at=update do=kill;rank=0 step=2 at=go do=kill", "--transport", "tcp")
        told = said[said.index("while training:"):]
        self.assertRegex(told, r"lost [^;]*rank 1 ")
        self.assertRegex(told, r"lost [^;]*rank 0 ")
        said = self.survives(f"rank=2 step={STEPS} at=end do=kill", "--transport", "tcp")
        self.assertRegex(said, rf"step {STEPS}: lost rank 2 [^;]*; 2 workers")

    def test_min_workers_that_come_back(self):
        out = self.folder / "enough"
        said = self.survives("rank=1 step=3 at=backward do=kill", "--transport", "tcp", "--out", out, "--min-workers", 3, "--save-every", 0)
        self.assertIn("2 of the 3 workers that --min-workers asks for are left: saving, then waiting for others", said)
        self.assertRegex(said, r"rank 2 [^;]* has joined; .*3 workers")
        self.assertEqual([row["step"] for row in steps_of(out)], list(range(1, STEPS + 1)))

    def test_fail_fast(self):
        run = subprocess.run(self.command("--steps", STEPS, "--workers", 3, "--fail-fast"), capture_output=True, text=True,
                             timeout=PATIENCE, env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=3 at=backward do=kill"})
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertRegex(run.stderr.splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")


class ComingAndGoing(Case):
    def start(self, *arguments):
        """A run that has made its first step."""
        run = subprocess.Popen(self.command("--log", "json", "--timeout", TIMEOUT, *arguments), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        run.stdout.readline()
        return run

    def step_with(self, run, workers):
        """Reads on until a step has so many workers."""
        for line in run.stdout:
            row = json.loads(line)
            if "lanes" in row and "event" not in row and len(row["lanes"]) == workers:
                return row["step"]
        self.fail(f"no step with {workers} workers\n" + run.stderr.read())

    def test_a_lost_worker_is_started_anew(self):
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "tcp")
        before = children_of(run.pid)
        self.assertEqual(len(before), 3)
        os.kill(before[2], signal.SIGKILL)
        self.step_with(run, 2)
        self.step_with(run, 3)
        after = children_of(run.pid)
        self.assertEqual(len(after), 3)
        self.assertEqual(len(set(after) - set(before)), 1)
        run.send_signal(signal.SIGTERM)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 143, stderr)
        self.assertTrue(WEIGHTS.search(stdout), stderr)
        self.assertIn("the weights of all 3 workers are the same", stderr)
        self.assertTrue(all(gone(pid) for pid in after))

    def test_a_worker_leaves(self):
        """SIGTERM to one worker is a preemption: it goes after a step, and nobody takes its place."""
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "tcp")
        leaver = children_of(run.pid)[0]
        os.kill(leaver, signal.SIGTERM)
        self.step_with(run, 2)
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 130, stderr)
        self.assertTrue(WEIGHTS.search(stdout), stderr)
        self.assertRegex(stderr, r"step \d+: rank 0 .* has left")
        self.assertNotIn("is started", stderr)

    def test_down_to_one(self):
        run = self.start("--steps", 100000, "--workers", 3, "--transport", "shm")
        for pid in children_of(run.pid)[:2]:
            os.kill(pid, signal.SIGKILL)
        self.step_with(run, 1)
        self.step_with(run, 3)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 143, stderr)

    def test_nobody_is_left(self):
        run = self.start("--steps", 100000, "--workers", 2, "--transport", "tcp")
        for pid in children_of(run.pid):
            os.kill(pid, signal.SIGKILL)
        _, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 1, stderr)
        self.assertRegex(stderr.splitlines()[-1], r"rank [01] \(pid \d+\) was killed by signal 9")

    def test_min_workers(self):
        """Fewer than that save their work, wait for others, and end so that the run can be resumed."""
        out = self.folder / "too-few"
        with mock.patch.dict(os.environ, LOCKSTEP_FAULT="rank=0 step=1 at=update do=slow ms=100"):
            run = self.start("--steps", 100, "--workers", 2, "--transport", "tcp", "--out", out, "--min-workers", 2,
                             "--wait-for-workers", 2)
        # Both places are lost for longer than the two seconds: nobody is started for those that left.
        os.kill(children_of(run.pid)[1], signal.SIGTERM)
        _, stderr = run.communicate(timeout=PATIENCE)
        self.assertEqual(run.returncode, 1, stderr)
        self.assertIn("saving, then waiting for others", stderr)
        self.assertIn("1 of the 2 workers that the job needs", stderr)
        self.assertEqual(max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")), len(steps_of(out)), stderr)
        again = subprocess.run([LOCKSTEP, "train", "--resume", out], capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(WEIGHTS.findall(again.stdout), [self.alone(100)], again.stderr)


class JoiningCase(Case):
    def start(self, port, *arguments, fault=""):
        run = subprocess.Popen(self.command("--log", "json", "--timeout", TIMEOUT, "--listen", f"127.0.0.1:{port}", *arguments),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
                               env={**os.environ, "LOCKSTEP_FAULT": fault} if fault else None)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        return run

    def follow(self, run):
        """Reads what the run prints, so that it is never held up; `workers` is how many its last step had, `weights` the hash."""
        run.workers = 0
        run.weights = None

        def read():
            for line in run.stdout:
                if found := WEIGHTS.match(line):
                    run.weights = found[1]
                if line.startswith("{") and "lanes" in (row := json.loads(line)) and "event" not in row:
                    run.workers = len(row["lanes"])

        run.reader = threading.Thread(target=read, daemon=True)
        run.reader.start()

    def wait_for_workers(self, run, workers):
        deadline = time.monotonic() + PATIENCE
        while run.workers != workers:
            self.assertLess(time.monotonic(), deadline, f"{run.workers} workers, not {workers}")
            self.assertIsNone(run.poll())
            time.sleep(0.01)

    def join(self, port, *arguments, fault=""):
        run = subprocess.Popen([LOCKSTEP, "train", "--join", f"127.0.0.1:{port}", "--data", str(self.text), *arguments],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent,
                               env={**os.environ, "LOCKSTEP_FAULT": fault} if fault else None)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        return run


class Joining(JoiningCase):
    def test_a_job_that_runs(self):
        """Two workers of another command come, over tcp as the job has it, one is killed, the others leave."""
        with reserved_port() as port:
            run = self.start(port, "--steps", 10 ** 8, "--workers", 2, "--transport", "tcp")
            self.follow(run)
            self.wait_for_workers(run, 2)
            joiner = self.join(port, "--workers", "2")
            self.wait_for_workers(run, 4)
            os.kill(children_of(joiner.pid)[0], signal.SIGKILL)
            self.wait_for_workers(run, 3)
            joiner.send_signal(signal.SIGTERM)
            said = joiner.communicate(timeout=PATIENCE)[0]
            self.assertEqual(joiner.returncode, 0, said)
            self.assertIn("joined the job as rank", said)
            self.wait_for_workers(run, 2)
            run.send_signal(signal.SIGINT)
            self.assertEqual(run.wait(PATIENCE), 130)

    def test_a_lost_worker_of_a_joined_launcher_is_started_anew(self):
        """It has joined at the address of a worker, which says where the centre is."""
        steps = 150 if SANITIZED else 400
        with reserved_port() as port:
            run = self.start(port, "--steps", steps, "--workers", 2, "--transport", "tcp", fault="rank=0 step=1 at=update do=slow ms=25")
            self.follow(run)
            self.wait_for_workers(run, 2)
            joiner = self.join(ports_of(children_of(run.pid))[0], "--workers", "2")
            self.wait_for_workers(run, 4)
            before = children_of(joiner.pid)
            os.kill(before[0], signal.SIGKILL)
            self.wait_for_workers(run, 3)
            self.wait_for_workers(run, 4)
            after = children_of(joiner.pid)
            self.assertEqual((len(after), len(set(after) - set(before))), (2, 1))
            said = joiner.communicate(timeout=PATIENCE)[0]
            self.assertEqual((run.wait(PATIENCE), joiner.returncode), (0, 0), said)
            run.reader.join(PATIENCE)
        self.assertRegex(said, r"was killed by signal 9 \(Killed\); a worker is started in its place in 0.5 s")
        self.assertEqual(run.weights, self.alone(steps), said)

    @unittest.skipIf(SANITIZED, "the sanitizer itself needs descriptors where it looks at types")
    def test_who_has_too_few_descriptors_goes_alone(self):
        """A newcomer that can open no connection to the others, and one that can share no memory with them."""
        for transport in ("tcp", "shm"):
            with self.subTest(transport=transport), reserved_port() as port:
                run = self.start(port, "--steps", 10 ** 8, "--workers", 2, "--transport", transport)
                self.follow(run)
                self.wait_for_workers(run, 2)
                workers = children_of(run.pid)
                joiner = self.join(port, fault="rank=newcomer step=2 at=roster do=stop")
                wait_for(lambda: state_of(joiner.pid) == "T" or joiner.poll() is not None, "newcomer that stops")
                used = {int(path.name) for path in Path(f"/proc/{joiner.pid}/fd").iterdir()}
                least_free = next(number for number in range(len(used) + 1) if number not in used)
                most = resource.prlimit(joiner.pid, resource.RLIMIT_NOFILE)[1]
                resource.prlimit(joiner.pid, resource.RLIMIT_NOFILE, (least_free, most))
                joiner.send_signal(signal.SIGCONT)
                said = joiner.communicate(timeout=PATIENCE)[0]
                self.assertEqual(joiner.returncode, 1, said)
                self.assertIn("Too many open files", said)
                last = self.join(port)  # the others are all there
                self.wait_for_workers(run, 3)
                self.assertEqual(children_of(run.pid), workers)
                run.send_signal(signal.SIGINT)
                self.assertEqual((run.wait(PATIENCE), last.wait(PATIENCE)), (130, 130))
                self.assertNotRegex(run.stderr.read(), r"lost rank [01] |rank [01] [^;:]* is expelled")

    def job_with_a_spare(self, port):
        """Two lanes are for two workers. And what the spare has said."""
        run = self.start(port, "--steps", 10 ** 8, "--workers", 2, "--transport", "tcp", "--global-batch", 4)
        self.follow(run)
        self.wait_for_workers(run, 2)
        spare = self.join(port)
        return run, spare, self.read_until("this one is a spare", spare)

    def test_a_spare_waits_and_leaves(self):
        with reserved_port() as port:
            run, joiner, said = self.job_with_a_spare(port)
            self.assertIn("all lanes of the job have a worker", said)
            joiner.send_signal(signal.SIGTERM)
            said += joiner.communicate(timeout=PATIENCE)[0]
            self.assertEqual(joiner.returncode, 0, said)
            self.assertEqual(run.workers, 2)

    def test_a_spare_enters_when_a_member_goes(self):
        """The member was asked to leave, so that its launcher starts nobody for it."""
        with reserved_port() as port:
            run, joiner, said = self.job_with_a_spare(port)
            os.kill(children_of(run.pid)[1], signal.SIGTERM)
            said += self.read_until("joined the job as rank 1 of 2", joiner)
            joiner.send_signal(signal.SIGTERM)
            said += joiner.communicate(timeout=PATIENCE)[0]
            self.assertEqual(joiner.returncode, 0, said)
            self.wait_for_workers(run, 1)

    def read_until(self, words, process):
        """What it says up to a line with these words."""
        said = ""
        for line in process.stdout:
            said += line
            if words in line:
                return said
        self.fail(f"it does not say '{words}':\n{said}")

    def test_a_newcomer_gets_the_tokenizer(self):
        words = ("--tokenizer", "bpe", "--vocab", 300)
        steps = 60
        with reserved_port() as port:
            run = self.start(port, "--steps", steps, "--workers", 2, "--transport", "tcp", *words, fault="rank=0 step=1 at=update do=slow ms=100")
            self.follow(run)
            self.wait_for_workers(run, 2)
            joiner = self.join(port)
            self.wait_for_workers(run, 3)
            said = joiner.communicate(timeout=PATIENCE)[0]
            self.assertEqual((run.wait(PATIENCE), joiner.returncode), (0, 0), said)
            run.reader.join(PATIENCE)
        self.assertEqual(run.weights, self.alone(steps, *words), said)
        self.assertNotEqual(run.weights, self.alone(steps))

    def test_a_signal_ends_process_1(self):
        """The kernel spares it what a signal does by itself."""
        own = ["unshare", "--pid", "--fork", "--kill-child"]
        tried = subprocess.run([*own, "true"], capture_output=True, text=True)
        if tried.returncode != 0:
            self.skipTest(f"no process namespaces here: {tried.stderr.strip()}")
        with reserved_port() as port:
            outer = subprocess.Popen([*own, LOCKSTEP, "train", "--join", f"127.0.0.1:{port}", "--data", str(self.text)],
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent)
            self.addCleanup(outer.communicate)
            self.addCleanup(outer.kill)
            deadline = time.monotonic() + PATIENCE
            while not (inner := children_of(outer.pid)):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            self.wait_until_it_listens_to_signals(inner[0])
            os.kill(inner[0], signal.SIGTERM)
            said = outer.communicate(timeout=PATIENCE)[0]
        self.assertEqual(outer.returncode, 128 + signal.SIGTERM, said)
        self.assertIn("stopped before the run began", said)

    def wait_until_it_listens_to_signals(self, pid):
        deadline = time.monotonic() + PATIENCE
        while not int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def test_a_signal_ends_who_waits_for_others(self):
        """There is no step to wait for before the job has formed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            with reserved_port() as port:
                run = self.start(port, "--steps", 3, "--workers", 2, "--expect", 3)
                wait_for(lambda: len(children_of(run.pid)) == 2 or run.poll() is not None, "two workers")
                self.assertIsNone(run.poll())
                for child in children_of(run.pid):
                    self.wait_until_it_listens_to_signals(child)
                run.send_signal(number)
                self.assertEqual(run.wait(PATIENCE), 128 + number)
                joiner = self.join(port)  # of a job that is not there
                self.wait_until_it_listens_to_signals(joiner.pid)
                joiner.send_signal(number)
                said = joiner.communicate(timeout=PATIENCE)[0]
                self.assertEqual(joiner.returncode, -number, said)
                self.assertIn("stopped before the run began", said)

    def test_a_job_that_forms(self):
        with reserved_port() as port:
            run = self.start(port, "--steps", STEPS, "--workers", 1, "--expect", 2)
            joiner = self.join(port)
            stdout, stderr = run.communicate(timeout=PATIENCE)
            said = joiner.communicate(timeout=PATIENCE)[0]
        self.assertEqual((run.returncode, joiner.returncode), (0, 0), stderr + said)
        self.assertEqual(WEIGHTS.findall(stdout), [self.alone()])
        self.assertIn("the weights of all 2 workers are the same", stderr)

    def test_other_data_is_refused(self):
        other = self.folder / "other.txt"
        other.write_text(Path(self.text).read_text() + "and more of it\n" * 40)
        with reserved_port() as port:
            run = self.start(port, "--steps", 10 ** 8, "--workers", 1)
            self.follow(run)
            self.wait_for_workers(run, 1)
            joiner = subprocess.run([LOCKSTEP, "train", "--join", f"127.0.0.1:{port}", "--data", str(other)],
                                    capture_output=True, text=True, timeout=PATIENCE)
            self.assertEqual(joiner.returncode, 2, joiner.stderr)
            self.assertIn("other data than the job trains on", joiner.stderr)
            self.assertIsNone(run.poll())


class TheLauncher(JoiningCase):
    """It has the centre. Workers that joined by hand go on without it."""

    STEPS = 150

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.one = self.alone(TheLauncher.STEPS)
        # So slow that they still train when its silence is noticed.
        self.enterContext(mock.patch.dict(os.environ, LOCKSTEP_FAULT="rank=any step=1 at=step do=slow ms=30"))
        self.port = self.enterContext(reserved_port())

    def job(self):
        """A launcher with two workers, and two that have joined them."""
        launcher = self.start(self.port, "--steps", TheLauncher.STEPS, "--workers", 2, "--transport", "tcp", "--out", self.out)
        self.follow(launcher)
        self.wait_for_workers(launcher, 2)
        joined = [self.join(self.port) for _ in range(2)]
        self.wait_for_workers(launcher, 4)
        return launcher, joined

    def expect_result(self, joined):
        said = [each.communicate(timeout=PATIENCE)[0] for each in joined]
        self.assertEqual([each.returncode for each in joined], [0, 0], said)
        self.assertEqual([row["step"] for row in steps_of(self.out)], list(range(1, TheLauncher.STEPS + 1)))
        self.assertEqual([row["hash"] for row in events_of(self.out) if row["event"] == "ended"], [self.one], said)
        return said

    def outputs(self):
        return {path: path.stat().st_mtime_ns for path in self.out.rglob("*")}

    def test_it_is_killed(self):
        launcher, joined = self.job()
        workers = children_of(launcher.pid)
        launcher.kill()
        said = self.expect_result(joined)
        self.assertEqual(WEIGHTS.findall("".join(said)), [self.one], said)
        self.assertRegex("".join(said), r"lost rank 0 [^;]*, rank 1 [^;]*: the launcher \(.*\) died")
        wait_for(lambda: all(gone(pid) for pid in workers), "end of its workers")

    def test_it_is_stopped_and_wakes_while_they_train(self):
        launcher, joined = self.job()
        launcher.send_signal(signal.SIGSTOP)
        # A worker writes what it did last when the generation ends, which is when the silence has been noticed.
        wait_for(lambda: list(self.out.glob("flight/generation-*/rank-*.json")), "end of the launcher's generation")
        launcher.send_signal(signal.SIGCONT)
        self.expect_result(joined)
        self.assertEqual(launcher.wait(PATIENCE), 0)
        self.assertIn("the launcher stood still for longer than the timeout: the workers go on without it", launcher.stderr.read())

    def test_it_is_stopped_and_wakes_when_all_is_over(self):
        launcher, joined = self.job()
        workers = children_of(launcher.pid)
        launcher.send_signal(signal.SIGSTOP)
        self.expect_result(joined)
        wait_for(lambda: all(gone(pid) for pid in workers), "end of its workers")
        before = self.outputs()
        launcher.send_signal(signal.SIGCONT)
        self.assertEqual(launcher.wait(PATIENCE), 0)
        self.assertEqual(self.outputs(), before)


class ByHand(Case):
    """Ranks that torchrun or srun would start."""

    def ranks(self, port, fault, *arguments, world=3, timeout=TIMEOUT):
        environment = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "LOCKSTEP_FAULT": fault}
        return [subprocess.Popen(self.command("--timeout", timeout, *arguments), env={**environment, "RANK": str(rank)},
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent)
                for rank in range(world)]


class Standstill(ByHand):
    """All processes of a run stand still at once for longer than the timeout: the machine slept, or was moved to another."""

    TIMEOUT = 1
    STEPS = 20
    ROWS = [("launched", "tcp", "training"), ("by hand", "shm", "training"), ("launched", "shm", "saving"), ("by hand", "tcp", "saving")]

    def start(self, how, transport, where, timeout=TIMEOUT):
        out = self.folder / f"{how}-{transport}-{where}"
        place = f"rank=0 step={Standstill.STEPS} at=save do=slow ms=500" if where == "saving" else "rank=any step=1 at=update do=slow ms=40"
        arguments = ["--steps", Standstill.STEPS, "--transport", transport, "--out", out, "--save-every", 3]
        if how == "by hand":
            processes = self.ranks(self.enterContext(reserved_port()), place, *arguments, timeout=timeout)
        else:
            processes = [subprocess.Popen(self.command("--timeout", timeout, "--workers", 3, *arguments),
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent,
                                          env={**os.environ, "LOCKSTEP_FAULT": place})]
        for process in processes:
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
        return out, processes, Standstill.STEPS if where == "saving" else 4

    def stand_still(self, runs, awake=None):
        """All processes of each run, but for this one of them, once it has come to its step; returns them by their folder."""
        asleep = {}

        def all_stand_still():
            for out, processes, step in runs:
                if out not in asleep and (out / "metrics.jsonl").exists() and f'"step":{step},' in (out / "metrics.jsonl").read_text():
                    pids = [pid for process in processes for pid in [process.pid, *children_of(process.pid)]]
                    asleep[out] = [pid for i, pid in enumerate(pids) if i != awake]
                    for pid in asleep[out]:
                        os.kill(pid, signal.SIGSTOP)
            return len(asleep) == len(runs) and all(state_of(pid) == "T" for pids in asleep.values() for pid in pids)

        wait_for(all_stand_still, "standstill of all")
        return asleep

    def test_all_go_on(self):
        runs = [self.start(*row) for row in Standstill.ROWS]
        asleep = self.stand_still(runs)
        time.sleep(1.5 * Standstill.TIMEOUT)  # how long they stand still is what is tried here
        for pids in asleep.values():
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for row, (out, processes, _) in zip(Standstill.ROWS, runs):
            with self.subTest(row=row):
                self.expect_result(out, processes)

    def expect_result(self, out, processes):
        said = "".join(process.communicate(timeout=PATIENCE)[0] for process in processes)
        self.assertEqual([process.returncode for process in processes], [0] * len(processes), said)
        self.assertEqual(WEIGHTS.findall(said), [self.alone(Standstill.STEPS)], said)
        self.assertEqual([row["step"] for row in steps_of(out)], list(range(1, Standstill.STEPS + 1)), said)
        self.assertEqual([row["hash"] for row in events_of(out) if row["event"] == "ended"], [self.alone(Standstill.STEPS)])
        check = subprocess.run([LOCKSTEP, "verify", out / f"checkpoint-{Standstill.STEPS}"], capture_output=True, text=True)
        self.assertEqual(check.returncode, 0, check.stderr)
        self.assertFalse(list(out.glob("lease*")) + list(out.glob("*.tmp")), said)
        return said

    def test_one_is_awake_and_becomes_the_centre(self):
        """The rank 0 before it comes back as another rank, and lets it write."""
        out, processes, _ = run = self.start("launched", "tcp", "training", timeout=2)
        asleep = self.stand_still([run], awake=2)[out]
        # It writes what it did last when the generation ends.
        wait_for(lambda: list(out.glob("flight/generation-*/rank-1.json")), "end of the generation")
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        said = self.expect_result(out, processes)
        self.assertIn("is the centre of the job now", said)
        self.assertRegex(said, r"\[rank 1\] saved checkpoint-\d+ ")


class WithoutALauncher(ByHand):
    """Rank 0 is the centre, and whoever is next takes its place."""

    def test_the_centre_is_killed(self):
        with reserved_port() as port:
            ranks = self.ranks(port, "rank=0 step=3 at=communication do=kill", "--steps", STEPS, "--transport", "tcp")
            said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [-signal.SIGKILL, 0, 0], said)
        self.assertEqual(WEIGHTS.findall(said[1]), [self.alone()], said[1])
        self.assertRegex(said[1], r"is the centre of the job now; others join it at 127\.0\.0\.1:\d+\n")

    def test_the_next_rank_0_tells_of_the_step_that_the_one_before_did_not(self):
        """All have done it, and the others think that it is told."""
        out = self.folder / "told"
        with reserved_port() as port:
            ranks = self.ranks(port, "rank=0 step=5 at=report do=kill", "--steps", STEPS, "--transport", "tcp", "--out", out)
            said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [-signal.SIGKILL, 0, 0], said)
        self.assertEqual(WEIGHTS.findall(said[1]), [self.alone()], said[1])
        self.assertEqual([row["step"] for row in self.metrics(out) if "event" not in row], list(range(1, STEPS + 1)), said[1])

    def test_rank_0_says_what_is_saved_when_the_run_fails(self):
        """There is no launcher of ours that would."""
        out = self.folder / "failed"
        with reserved_port() as port:
            ranks = self.ranks(port, "rank=1 step=5 at=communication do=kill", "--steps", STEPS, "--transport", "tcp", "--fail-fast",
                               "--out", out, "--save-every", 2, "--save-wait", world=2)
            said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [1, -signal.SIGKILL], said)
        self.assertIn(f"the newest checkpoint is {out}/checkpoint-4; lockstep train --resume {out} goes on from it", said[0])
        self.assertNotIn("newest checkpoint", said[1])

    def wake_when_expelled(self, out, rank):
        deadline = time.monotonic() + PATIENCE
        while len([row for row in self.metrics(out) if row.get("event") in ("lost", "expelled")]) < 1:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        rank.send_signal(signal.SIGCONT)

    def test_the_centre_is_stopped_and_wakes(self):
        """It finds itself expelled, changes nothing, and joins anew."""
        steps = 40 if SANITIZED else 150
        for transport in ("tcp", "shm"):
            out = self.folder / transport
            with self.subTest(transport=transport), reserved_port() as port:
                ranks = self.ranks(port, "rank=0 step=3 at=communication do=stop", "--steps", steps, "--transport", transport,
                                   "--out", out)
                self.wake_when_expelled(out, ranks[0])
                said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
                self.assertEqual([rank.returncode for rank in ranks][1:], [0, 0], said)
                self.assertEqual(WEIGHTS.findall("".join(said)), [self.alone(steps)], said)
                rows = self.metrics(out)
                self.assertEqual([row["step"] for row in rows if "event" not in row], list(range(1, steps + 1)))

    def test_one_of_two_is_stopped_and_wakes(self):
        """There is nobody but the centre whom it could ask for the centre."""
        steps = 40
        fault = "rank=1 step=3 at=communication do=stop; rank=0 step=4 at=update do=slow ms=100"
        for transport in ("tcp", "shm"):
            out = self.folder / transport
            with self.subTest(transport=transport), reserved_port() as port:
                ranks = self.ranks(port, fault, "--steps", steps, "--transport", transport, "--out", out, world=2)
                self.wake_when_expelled(out, ranks[1])
                said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
                self.assertEqual([rank.returncode for rank in ranks], [0, 0], said)
                self.assertEqual(WEIGHTS.findall("".join(said)), [self.alone(steps)], said)
                self.assertIn("joined", [row.get("event") for row in self.metrics(out)])

    def test_a_rank_0_that_was_stopped_comes_back_and_is_rank_0_again(self):
        """It tells of the steps once more then, and not of those between."""
        out = self.folder / "again"
        steps = 26
        fault = "rank=0 step=3 at=communication do=stop; rank=any step=4 at=update do=slow ms=100; rank=1 step=20 at=backward do=kill"
        with reserved_port() as port:
            ranks = self.ranks(port, fault, "--steps", steps, "--transport", "tcp", "--out", out, world=2)
            # The other one writes what it did last when the generation ends.
            wait_for(lambda: list(out.glob("flight/generation-*/rank-1.json")), "end of the generation")
            ranks[0].send_signal(signal.SIGCONT)
            said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, -signal.SIGKILL], said)
        self.assertEqual(WEIGHTS.findall(said[0]), [self.alone(steps)], said)
        rows = self.metrics(out)
        self.assertEqual([row["step"] for row in rows if "event" not in row], list(range(1, steps + 1)), said)
        self.assertEqual([row["event"] for row in rows if row.get("event") in ("joined", "lost")], ["lost", "joined", "lost"], said)

    @staticmethod
    def metrics(out):
        try:
            return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        except FileNotFoundError:
            return []


class KillingLanes(Case):
    @unittest.skipIf(SANITIZED, "sanitizers turn a crash into an exit code")
    def test_a_lane_that_kills(self):
        """It is named and the run halts; without it the run goes on."""
        out = self.folder / "killed"
        run = subprocess.run(self.command("--steps", STEPS, "--workers", 4, "--timeout", TIMEOUT, "--out", out),
                             capture_output=True, text=True, timeout=PATIENCE,
                             env={**os.environ, "LOCKSTEP_FAULT": "rank=any step=3 at=lane5 do=crash"})
        self.assertEqual(run.returncode, 3, run.stderr)
        halt = json.loads((out / "halt.json").read_text())
        self.assertEqual((halt["step"], halt["what"]), (3, "crash"))
        lanes = [halt["lane"], *(lane["lane"] for lane in halt["more"])]
        self.assertIn(5, lanes)
        self.assertLess(len(lanes), 11)
        # Those who came to that end tell what they did, as after any other failure.
        self.assertIn(f"lockstep explain {out}/flight says what every rank did last", run.stderr)
        told = [json.loads(path.read_text())["why"] for path in (out / "flight").glob("generation-*/rank-*.json")]
        self.assertTrue(any("lane 5" in why or "lanes" in why for why in told), told)
        again = subprocess.run(self.command("--steps", STEPS, "--workers", 2, "--skip-lanes", out / "halt.json"),
                               capture_output=True, text=True, timeout=PATIENCE,
                               env={**os.environ, "LOCKSTEP_FAULT": "rank=any step=3 at=lane5 do=crash"})
        self.assertEqual(again.returncode, 0, again.stderr)


if __name__ == "__main__":
    unittest.main()
