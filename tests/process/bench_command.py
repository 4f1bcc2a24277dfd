#!/usr/bin/env python3
"""`lockstep bench allreduce` with real processes: its output on every transport, wrong usage, and the death
of a rank, after which nothing is left running."""
# ctest: PROCESSORS 4 TIMEOUT 240

import json
import os
import signal
import socket
import subprocess
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ranks import SLACK, Stopwatch, children_of, gone  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
KEYS = ["op", "transport", "algorithm", "ranks", "bytes", "median_us", "p99_us", "algbw_gbs", "busbw_gbs", "correct"]
# The variables of a launcher must not leak in from whoever runs the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI"))}


def bench(*arguments, timeout=90, environment=None, **options):
    return subprocess.run([LOCKSTEP, "bench", "allreduce", *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout, env={**ENVIRONMENT, **(environment or {})}, **options)


def rank_of(pid):
    for variable in Path(f"/proc/{pid}/environ").read_text().split("\0"):
        if variable.startswith("RANK="):
            return int(variable[5:])
    return None


def kill_all(pids):
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Output(unittest.TestCase):
    def check(self, transport, ranks, *arguments):
        run = bench("--transport", transport, "--ranks", ranks, "--bytes", "8,1KiB,300KiB", "--iterations", 3, "--json",
                    *arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        rows = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual([row["bytes"] for row in rows], [8, 1024, 300 * 1024])
        for row in rows:
            self.assertEqual([key for key in row if key != "min_us"], KEYS)
            self.assertEqual((row["op"], row["transport"], row["ranks"]), ("all_reduce", transport, ranks))
            self.assertIs(row["correct"], True)
            self.assertGreater(row["median_us"], 0)
            self.assertGreaterEqual(row["p99_us"], row["median_us"])
            self.assertAlmostEqual(row["algbw_gbs"], row["bytes"] / row["median_us"] / 1e3)
            self.assertAlmostEqual(row["busbw_gbs"], row["algbw_gbs"] * 2 * (ranks - 1) / ranks)
        return rows

    def test_every_transport(self):
        for transport in ("local", "tcp", "shm", "auto"):
            for ranks in (1, 2, 3):
                with self.subTest(transport=transport, ranks=ranks):
                    self.check(transport, ranks)

    def test_mpi(self):
        alone = bench("--transport", "mpi", "--ranks", 1, "--bytes", 8, "--iterations", 1)
        if "built without MPI" in alone.stderr:
            self.assertEqual(alone.returncode, 2)
            return
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                self.check("mpi", ranks)
        self.assertEqual({row["algorithm"] for row in self.check("mpi", 2, "--algorithm", "native")}, {"native"})

    def test_every_algorithm(self):
        for algorithm in ("pair", "ring", "halving_doubling", "direct", "tree"):
            with self.subTest(algorithm=algorithm):
                rows = self.check("tcp", 3, "--algorithm", algorithm)
                self.assertEqual({row["algorithm"].replace("-", "_") for row in rows}, {algorithm})
        self.assertEqual({row["algorithm"] for row in self.check("shm", 3, "--algorithm", "shared", "--plain")},
                         {"shared"})

    def test_every_type(self):
        for data_type in ("f32", "f64", "f16", "bf16", "i32", "i64", "u8"):
            with self.subTest(type=data_type):
                self.check("local", 3, "--type", data_type)

    def test_table(self):
        run = bench("--transport", "local", "--bytes", 8, "--iterations", 3)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stdout, r"median us")
        self.assertRegex(run.stdout, r"\n +8 +shared .* yes\n")

    def test_serve(self):
        for transport in ("local", "tcp", "shm"):
            run = bench("--transport", transport, "--ranks", 2, "--serve", "--json", input="8 0.01\n4096 0.01\n")
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertEqual([json.loads(line)["bytes"] for line in run.stdout.splitlines()], [8, 4096])


class Usage(unittest.TestCase):
    def test_wrong_usage_is_told_once(self):
        for arguments, word in (
            (["--transport", "pigeon"], "pigeon"),
            (["--algorithm", "guess"], "guess"),
            (["--ranks", 0], "--ranks"),
            (["--bytes", "7"], "--bytes 7"),
            (["--bytes", "many"], "many"),
            (["--iterations", 3, "--seconds", 1], "--iterations"),
            (["--transport", "tcp", "--algorithm", "shared"], "--algorithm shared"),
            (["--transport", "shm", "--algorithm", "native"], "--algorithm native"),
            (["--token-file", "/nonexistent"], "/nonexistent"),
        ):
            with self.subTest(arguments=arguments):
                run = bench(*arguments)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(word, run.stderr)
                self.assertEqual(run.stdout, "")
                self.assertLessEqual(len(run.stderr.splitlines()), 2, run.stderr)

    def test_environment_that_makes_no_sense(self):
        for environment, word in (
            ({"RANK": "0"}, "WORLD_SIZE"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
            ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
            ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT"),
            ({"RANK": "0", "WORLD_SIZE": "1"}, "--ranks 2"),
        ):
            with self.subTest(environment=environment):
                run = bench("--transport", "tcp", "--ranks", 2, "--bytes", 8, environment=environment)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn(word, run.stderr)


class Processes(unittest.TestCase):
    """A command in the middle of its work: it has printed one row and measures on."""

    TIMEOUT = 2.0

    def start(self, transport, ranks=3):
        process = subprocess.Popen(
            [LOCKSTEP, "bench", "allreduce", "--transport", transport, "--ranks", str(ranks), "--json", "--bytes",
             "8,16MiB", "--iterations", "20000", "--timeout", str(self.TIMEOUT)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertIn('"bytes":8', process.stdout.readline())
        ranks_running = {rank_of(child): child for child in children_of(process.pid)}
        self.addCleanup(kill_all, ranks_running.values())
        self.assertEqual(sorted(ranks_running), list(range(ranks)))
        return process, ranks_running

    def test_killed_rank(self):
        for transport in ("tcp", "shm"):
            for victim in (0, 1):
                with self.subTest(transport=transport, victim=victim):
                    process, ranks = self.start(transport)
                    watch = Stopwatch()
                    os.kill(ranks[victim], signal.SIGKILL)
                    _, errors = process.communicate(timeout=60)
                    self.assertLess(watch.seconds(), self.TIMEOUT + SLACK)
                    self.assertEqual(process.returncode, 1, errors)
                    self.assertRegex(errors.splitlines()[-1], rf"rank {victim} \(pid {ranks[victim]}\).*signal 9")
                    self.assertEqual([pid for pid in ranks.values() if not gone(pid)], [])

    def test_stopped_rank(self):
        process, ranks = self.start("tcp")
        watch = Stopwatch()
        os.kill(ranks[1], signal.SIGSTOP)
        _, errors = process.communicate(timeout=60)
        self.assertLess(watch.seconds(), self.TIMEOUT + 1.0 + SLACK)  # once more for the launcher to kill it
        self.assertEqual(process.returncode, 1, errors)
        self.assertIn("rank 1", errors.splitlines()[-1])
        self.assertEqual([pid for pid in ranks.values() if not gone(pid)], [])

    def test_signals_reach_the_ranks(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                process, ranks = self.start("tcp")
                process.send_signal(number)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 128 + number, errors)
                self.assertEqual([pid for pid in ranks.values() if not gone(pid)], [])

    def test_no_orphans_when_the_command_is_killed(self):
        process, ranks = self.start("shm")
        process.kill()
        process.wait()
        self.assertTrue(wait_until(lambda: all(gone(pid) for pid in ranks.values()), self.TIMEOUT + SLACK))


class Joining(unittest.TestCase):
    def test_ranks_started_by_hand(self):
        """As torchrun would, but with a port that nobody can take in between."""
        listener = socket.create_server(("127.0.0.1", 0))
        environment = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(listener.getsockname()[1]), "LOCKSTEP_RENDEZVOUS_FD": str(listener.fileno())}
        ranks = [subprocess.Popen(
            [LOCKSTEP, "bench", "allreduce", "--transport", "tcp", "--bytes", "8", "--iterations", "3", "--json"],
            stdout=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)},
            pass_fds=[listener.fileno()] if rank == 0 else []) for rank in (1, 0)]
        listener.close()
        for rank in ranks:
            self.addCleanup(rank.communicate)
            self.addCleanup(rank.kill)
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0])
        self.assertEqual(outputs[0], "")
        self.assertEqual(json.loads(outputs[1])["ranks"], 2)


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=1))
