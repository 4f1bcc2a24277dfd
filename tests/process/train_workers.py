#!/usr/bin/env python3
"""`lockstep train --workers N`: one result to the bit however many workers there are and however they talk, and one clear
cause for everybody when something goes wrong."""
# ctest: TIMEOUT 600 COST 65

import itertools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import SANITIZED, SLACK, Stopwatch, children_of, gone, reserved_port  # noqa: E402
from training import LOCKSTEP, TextCase, forget_hash, steps_of  # noqa: E402

SHAPE = ["--hidden", "32", "--layers", "2", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "22",
         "--micro-batch", "2"]  # eleven lanes: no world size but 1 and 11 divides them
WEIGHTS = re.compile(r"^weights (blake3:[0-9a-f]{64})$", re.M)
SHIM = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "libkill_at.so")
HAS_MPI = subprocess.run(["which", "mpirun"], capture_output=True).returncode == 0


def command(*arguments):
    return [str(word) for word in (LOCKSTEP, "train", *SHAPE, *arguments)]


def lockstep(*arguments, timeout=120, environment=None, cwd=None):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env={**os.environ, **(environment or {})})


def read_until(terminal, pattern):
    """What comes from the other end of a terminal, until it has the pattern; fails when it ends before."""
    text = b""
    while not re.search(pattern, text):
        try:
            text += os.read(terminal, 65536)
        except OSError as error:  # nobody writes there any more
            raise AssertionError(f"{pattern} is not in {text}") from error


def end_and_reap(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended


class Case(TextCase):
    LINES = 300

    def weights(self, *arguments, **options):
        run = lockstep("--data", self.text, *arguments, **options)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        return WEIGHTS.search(run.stdout)[1]

    def fails(self, code, *arguments, **options):
        """Returns what was said, and how long it took."""
        watch = Stopwatch()
        run = lockstep("--data", self.text, *arguments, **options)
        took = watch.seconds()
        self.assertEqual(run.returncode, code, run.stdout + run.stderr)
        self.assertIsNone(WEIGHTS.search(run.stdout))
        return run.stderr, took


class SameBits(Case):
    def test_covering_set(self):
        steps = 4 if SANITIZED else 50
        alone = self.weights("--steps", steps, "--threads", 1)
        # Every pair of values of two columns is in some row.
        rows = [  # workers, transport, overlap, threads, sharded
            (2, "tcp", True, 1, False), (3, "tcp", False, 2, True), (5, "tcp", True, 1, True), (8, "tcp", False, 1, False),
            (2, "shm", False, 2, True), (3, "shm", True, 1, False), (4, "shm", True, 1, True), (8, "shm", True, 2, False),
            (1, "tcp", True, 2, True), (2, "local", True, 2, False), (4, "local", False, 1, True), (5, "local", False, 1, False),
            (2, "server", False, 1, False), (3, "server", True, 2, False), (5, "server", True, 1, False),
            (2, "mpi", True, 1, True), (4, "mpi", False, 2, False), (1, "local", False, 2, True), (1, "server", True, 1, False),
        ]
        for workers, transport, overlap, threads, sharded in rows:
            if transport == "mpi" and (not HAS_MPI or SANITIZED):
                continue
            with self.subTest(workers=workers, transport=transport, overlap=overlap, threads=threads, sharded=sharded):
                extra = ["--shard-optimizer"] if sharded else []
                self.assertEqual(alone, self.weights(
                    "--steps", steps, "--workers", workers, "--transport", transport, "--threads", threads, "--bucket-mb",
                    "0.02", "--overlap" if overlap else "--no-overlap", "--verify-every", 7, *extra))

    def test_the_loss_curve_of_one_worker(self):
        curves = []
        for workers in (1, 3):
            out = self.folder / str(workers)
            self.weights("--steps", 6, "--workers", workers, "--transport", "tcp", "--out", out, "--eval-every", 2)
            rows = steps_of(out)
            curves.append([(row["loss"], row["grad_norm"], row.get("val_loss")) for row in rows])
            self.assertEqual([len(row["phases"]) for row in rows], [workers] * 6)
            self.assertTrue(all(row["phases"][workers - 1]["backward"] > 0 for row in rows))
        self.assertEqual(curves[0], curves[1])

    def test_lanes_follow_speed(self):
        """Rank 1 takes longer for every lane: it gets fewer, and nothing else changes."""
        alone = self.weights("--steps", 16, "--threads", 1)
        for transport, extra in (("tcp", ["--shard-optimizer"]), ("server", [])):
            with self.subTest(transport=transport):
                out = self.folder / f"slow-{transport}"
                run = lockstep("--data", self.text, "--steps", 16, "--threads", 1, "--workers", 3, "--transport", transport, "--out", out,
                               *extra, environment={"LOCKSTEP_FAULT": "rank=1 step=1 at=lane do=slow ms=50"})
                self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
                self.assertEqual(WEIGHTS.search(run.stdout)[1], alone)
                lanes = [row["lanes"] for row in steps_of(out)]
                self.assertEqual(lanes[0], [3, 4, 4])
                self.assertLess(lanes[-1][1], 4)
                self.assertEqual({sum(row) for row in lanes}, {11})
                self.assertRegex(run.stderr, rf"lanes: .*rank 1 has {lanes[-1][1]}\b.* \(was 4\)")

    def test_a_world_from_the_environment(self):
        alone = self.weights("--steps", 3)
        port = self.enterContext(reserved_port())
        names = [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")]
        ranks = [subprocess.Popen(
            command("--data", self.text, "--steps", 3, "--transport", "tcp"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, rank: str(i), size: "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            for i, (rank, size) in enumerate(names)]
        outputs = [rank.communicate(timeout=120) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0, 0], outputs)
        self.assertEqual(WEIGHTS.search(outputs[0][0])[1], alone)

    def test_workers_of_a_coordinator_started_by_hand(self):
        alone = self.weights("--steps", 3)
        coordinator = subprocess.Popen([LOCKSTEP, "coordinator", "--workers", "2"],
                                       stdout=subprocess.PIPE, text=True)
        self.addCleanup(coordinator.kill)
        address = re.search(r"listening on (\S+);", coordinator.stdout.readline())[1]
        workers = [subprocess.Popen(command("--data", self.text, "--steps", 3, "--transport", "server", "--coordinator", address),
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [worker.communicate(timeout=120) for worker in workers]
        self.assertEqual([worker.returncode for worker in workers], [0, 0], outputs)
        self.assertEqual(WEIGHTS.findall(outputs[0][0] + outputs[1][0]), [alone])
        coordinator.communicate(timeout=30)
        self.assertEqual(coordinator.returncode, 0)


class Faults(Case):
    TIMEOUT = 2

    def test_killed_or_stopped_at_any_place(self):
        rows = list(itertools.product(("step", "backward", "communication", "update"), ("kill", "stop"), ("tcp",)))
        rows += [("backward", "kill", "shm"), ("communication", "stop", "shm"), ("backward", "kill", "server"),
                 ("communication", "stop", "server")]
        for place, action, transport in rows[::3] if SANITIZED else rows:
            with self.subTest(place=place, action=action, transport=transport):
                said, took = self.fails(
                    1, "--steps", 200, "--workers", 3, "--transport", transport, "--threads", 1, "--timeout", self.TIMEOUT, "--fail-fast",
                    environment={"LOCKSTEP_FAULT": f"rank=1 step=3 at={place} do={action}"})
                limit = (0 if action == "kill" else self.TIMEOUT) + SLACK + 3  # to start, for the steps before, and to report
                self.assertLess(took, limit, said)
                last = said.strip().splitlines()[-1]
                self.assertRegex(last, r"rank 1\b", said)
                self.assertNotRegex(last, r"rank [02] \(pid \d+\) failed first", said)

    def test_a_rank_that_fails_by_itself_is_the_cause(self):
        """Everybody hears why; who hears of it may end before it does."""
        for place, transport in itertools.product(("step", "backward", "update"), ("tcp", "shm", "server", "local")):
            with self.subTest(place=place, transport=transport):
                said, _ = self.fails(1, "--steps", 200, "--workers", 3, "--transport", transport, "--threads", 1,
                                     environment={"LOCKSTEP_FAULT": f"rank=1 step=3 at={place} do=fail"})
                culprit = "" if transport == "local" else "rank 1 .*"
                self.assertRegex(said.strip().splitlines()[-1], rf"^error: {culprit}this failure was asked for$", said)
                for rank in (0, 2) if transport != "local" else ():
                    self.assertRegex(said, rf"(?m)^\[rank {rank}\] error: .*rank 1 .*this failure was asked for")

    def test_no_orphan(self):
        run = subprocess.Popen(command("--data", self.text, "--steps", 100000, "--workers", 2, "--transport", "tcp", "--log",
                                       "json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        run.stdout.readline()
        ranks = children_of(run.pid)
        self.assertEqual(len(ranks), 2)
        run.kill()
        run.communicate(timeout=30)
        deadline = time.monotonic() + 5
        while not all(gone(pid) for pid in ranks):
            self.assertLess(time.monotonic(), deadline, "a rank outlived the launcher")

    def test_a_signal_stops_all_after_the_step_and_saves(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            for transport in ("tcp", "local"):
                out = self.folder / f"{number}-{transport}"
                run = subprocess.Popen(command("--data", self.text, "--steps", 100000, "--workers", 2, "--transport", transport,
                                               "--log", "json", "--out", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True)
                run.stdout.readline()
                run.send_signal(number)
                stdout, stderr = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 128 + number, stderr)
                self.assertTrue(WEIGHTS.search(stdout), stderr)
                self.assertTrue((out / "model.safetensors").exists())

    def start(self, *arguments, **options):
        """A run that has made its first step, in a group of its own."""
        run = subprocess.Popen(command("--data", self.text, "--steps", 100000, "--log", "plain", *arguments), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True, **options)
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        run.stdout.readline()
        return run

    def test_a_signal_to_process_and_group_is_one(self):
        """timeout sends two, and the launcher passes one on."""
        for workers in (1, 2):
            out = self.folder / f"group-{workers}"
            run = self.start("--workers", workers, "--out", out)
            os.kill(run.pid, signal.SIGTERM)
            os.killpg(run.pid, signal.SIGTERM)
            stdout, stderr = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 143, stderr)
            self.assertTrue(WEIGHTS.search(stdout), stderr)
            self.assertEqual(len(list(out.glob("checkpoint-*"))), 1, stderr)

    def test_a_second_signal_ends_it_and_what_is_saved_is_told(self):
        for workers in (1, 2):
            out = self.folder / f"second-{workers}"
            run = self.start("--workers", workers, "--out", out, "--save-every", 1)
            for line in run.stderr:
                if "saved checkpoint-" in line:
                    break
            if workers > 1:  # a rank that makes no step keeps the others from stopping in order
                os.kill(children_of(run.pid)[1], signal.SIGSTOP)
            os.kill(run.pid, signal.SIGINT)
            os.kill(run.pid, signal.SIGTERM)
            _, stderr = run.communicate(timeout=60)
            self.assertIn(run.returncode, (130, 143, -signal.SIGINT, -signal.SIGTERM), stderr)  # whichever was handled first
            self.assertRegex(stderr, rf"the newest checkpoint is {out}/checkpoint-\d+")

    def on_a_terminal(self, *arguments):
        """A run that has drawn its bar on a terminal of its own: its process and the terminal's other end."""
        pid, terminal = pty.fork()
        if pid == 0:
            line = command("--data", self.text, "--steps", 100000, *arguments)
            os.execv(line[0], line)
        self.addCleanup(end_and_reap, pid)
        read_until(terminal, rb"\[=* *\] [1-9]\d*/100000  loss .* left")
        return pid, terminal

    def test_a_terminal_that_is_closed_stops_and_saves(self):
        for workers in (1, 2):
            out = self.folder / f"closed-{workers}"
            pid, terminal = self.on_a_terminal("--workers", workers, "--out", out)
            os.close(terminal)
            _, status = os.waitpid(pid, 0)
            self.assertEqual(os.waitstatus_to_exitcode(status), 128 + signal.SIGHUP)
            self.assertEqual(len(list(out.glob("checkpoint-*"))), 1)
            self.assertTrue((out / "model.safetensors").exists())

    def test_what_is_said_of_ctrl_c_has_a_line_of_its_own(self):
        for workers, said in ((1, rb"\nstopping after the step under way"), (2, rb"\nstopping; press Ctrl-C again to end all workers at once")):
            pid, terminal = self.on_a_terminal("--workers", workers)
            os.write(terminal, b"\x03")
            read_until(terminal, said + rb"[\s\S]*weights blake3:")
            _, status = os.waitpid(pid, 0)
            os.close(terminal)
            self.assertEqual(os.waitstatus_to_exitcode(status), 130)

    def test_under_nohup_it_goes_on(self):
        for workers in (1, 2):
            run = self.start("--workers", workers, "--log", "json", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
            os.killpg(run.pid, signal.SIGHUP)
            for _ in range(50):
                self.assertIn('"step":', run.stdout.readline())
            run.send_signal(signal.SIGTERM)
            _, stderr = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 143, stderr)

    def test_sigusr1_saves_and_goes_on(self):
        for workers in (1, 3):
            out = self.folder / f"asked-{workers}"
            run = self.start("--workers", workers, "--out", out, "--save-every", 0)
            asked = [run.pid] if workers == 1 else [run.pid, children_of(run.pid)[2]]
            for count, pid in enumerate(asked, 1):
                os.kill(pid, signal.SIGUSR1)
                self.assertTrue(any("saved checkpoint-" in line for line in run.stderr))
                self.assertEqual(len(list(out.glob("checkpoint-*[0-9]"))), count)
            run.send_signal(signal.SIGTERM)
            _, stderr = run.communicate(timeout=60)
            self.assertEqual(run.returncode, 143, stderr)

    def test_any_number_of_workers_by_default(self):
        """Eight lanes, whatever the number of workers."""
        plain = [LOCKSTEP, "train", self.text, "--context", "32", "--steps", "2", "--threads", "1"]
        hashes = {WEIGHTS.search(subprocess.run([*plain, "--workers", str(workers)], capture_output=True, text=True).stdout)[1]
                  for workers in (1, 3, 5, 8)}
        self.assertEqual(len(hashes), 1)
        for batch in ("12", "13"):
            run = subprocess.run([*plain, "--global-batch", batch, "--workers", "7"], capture_output=True, text=True)
            self.assertEqual(run.returncode, 0, run.stderr)

    def test_a_flipped_bit_is_found(self):
        said, _ = self.fails(3, "--steps", 50, "--workers", 3, "--transport", "tcp", "--verify-every", 4,
                             environment={"LOCKSTEP_FAULT": "rank=2 step=2 at=step do=flip"})
        last = said.strip().splitlines()[-1]
        self.assertRegex(last, r"after step 4: rank 2 .* has other weights than rank 0 .* the first tensor that differs is model\.")

    def test_a_worker_with_another_configuration(self):
        port = str(self.enterContext(reserved_port()))
        other = self.folder / "other.txt"
        other.write_text(self.text.read_text().replace("7 small", "8 small"))
        for flags, field in (([], "clip"), (["--data", other], "training data"), (["--bucket-mb", "1"], "bucket bytes")):
            ranks = []
            for rank in range(2):
                extra = flags if rank == 1 else []
                if field == "clip" and rank == 1:
                    extra = ["--clip", "3"]
                data = [] if "--data" in extra else ["--data", self.text]
                ranks.append(subprocess.Popen(
                    command(*data, "--steps", 3, "--transport", "tcp", *extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                    "MASTER_PORT": port}))
            outputs = [rank.communicate(timeout=60) for rank in ranks]
            self.assertEqual([rank.returncode for rank in ranks], [2, 2], outputs)
            for _, stderr in outputs:
                self.assertRegex(stderr, f"rank 1 has {field} .*, rank 0 has ")

    def test_wrong_usage(self):
        for arguments, said in ((["--workers", 12], "smaller --micro-batch, a larger --global-batch or fewer workers"),
                                (["--workers", 12], "12 workers, but a step has only 11 lanes"),
                                (["--workers", 12, "--micro-batch", 22], "has only 1 lane ("),
                                (["--workers", 23, "--micro-batch", 1], "at least one: take a larger --global-batch"),
                                (["--workers", 2, "--transport", "server", "--shard-optimizer"], "--shard-optimizer"),
                                (["--reduction", "native"], "--transport mpi"),
                                (["--reduction", "nccl"], "--device cuda"), (["--exchange", "nccl"], "--device cuda"),
                                (["--device", "auto", "--reduction", "nccl", "--exchange", "host"], "from GPU to GPU"),
                                (["--device", "auto", "--exchange", "nccl"], "--device cuda")):
            stderr, _ = self.fails(2, "--steps", 2, *arguments)
            self.assertEqual(stderr.count(said), 1, stderr)


class Halt(Case):
    def poisoned_model(self):
        """Weights whose embedding of '~' overflows in the first block; only one sample has that byte."""
        text = self.text.read_text()
        middle = len(text) // 2
        self.text.write_text(text[:middle] + "~" + text[middle + 1:])
        model = self.folder / "model"
        self.weights("--steps", 0, "--out", model)
        path = model / "model.safetensors"
        data = bytearray(path.read_bytes())
        length = struct.unpack_from("<Q", data)[0]
        header = json.loads(data[8:8 + length])

        def floats(name):
            begin, end = header[name]["data_offsets"]
            return range(8 + length + begin, 8 + length + end, 4)

        embedding = floats("model.embed_tokens.weight")
        for i in range(32):
            struct.pack_into("<f", data, embedding[ord("~") * 32 + i], 3.4e38)
        for at in floats("model.layers.0.self_attn.o_proj.weight"):
            struct.pack_into("<f", data, at, struct.unpack_from("<f", data, at)[0] * 1e38)
        path.write_bytes(data)
        forget_hash(path)
        return model

    def setUp(self):
        super().setUp()
        self.options = ["--init", self.poisoned_model(), "--steps", 40, "--lr", 0, "--weight-decay", 0, "--threads", 1]

    def test_a_nan_in_one_lane_stops_all_alike(self):
        causes = set()
        rows = [(1, "local"), (3, "local"), (3, "tcp"), (2, "shm"), (3, "server")]
        if HAS_MPI and not SANITIZED:
            rows.append((2, "mpi"))
        for workers, transport in rows:
            out = self.folder / f"{workers}{transport}"
            said, _ = self.fails(3, *self.options, "--workers", workers, "--transport", transport, "--out", out)
            causes.update(re.findall(r"(step \d+: lane \d+ \(samples [\d, ]+\)) on rank", said))
            report = json.loads((out / "halt.json").read_text())
            self.assertEqual(report["what"], "gradient")
            self.assertEqual(len(report["samples"]), 2)
        self.assertEqual(len(causes), 1, causes)  # whoever has the lane

        replay = lockstep("--data", self.text, "--replay", out / "halt.json", "--init", out)
        self.assertEqual(replay.returncode, 3, replay.stderr)
        self.assertRegex(replay.stdout, r"model\.\S+: \d+ of \d+ elements of the gradient are not finite")
        # Left out, the lane does no harm; the run ends, with the same bits for any workers.
        skipping = [*self.options, "--skip-lanes", out / "halt.json"]
        skipping[skipping.index("--steps") + 1] = report["step"]
        alone = self.weights(*skipping)
        self.assertEqual(self.weights(*skipping, "--workers", 2, "--transport", "tcp"), alone)

    def blocked(self, name):
        """A folder that cannot have a halt.json."""
        out = self.folder / name
        (out / "halt.json" / "in the way").mkdir(parents=True)
        return out

    def test_that_it_cannot_be_saved_changes_no_reason(self):
        for workers in (1, 2):
            said, _ = self.fails(3, *self.options, "--workers", workers, "--transport", "tcp", "--out", self.blocked(str(workers)))
            self.assertIn("is not saved", said)
            self.assertIn("lane", said.strip().splitlines()[-1])

    @unittest.skipIf(SANITIZED, "sanitizers want to be loaded first")
    def test_nobody_goes_before_rank_0_has_saved(self):
        out = self.folder / "slow"
        slow = {"LD_PRELOAD": SHIM, "KILL_AT_MATCH": out.name, "SLOW_SYNC_MS": "300"}
        self.fails(3, *self.options, "--workers", 2, "--transport", "tcp", "--out", out, environment=slow)
        self.assertEqual(json.loads((out / "halt.json").read_text())["what"], "gradient")


if __name__ == "__main__":
    unittest.main()
