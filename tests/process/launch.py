"""The launcher: output, signals, first causes, no orphans, and a gradient server beside the ranks."""
# ctest: TIMEOUT 120 COST 40
# builds: release

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from ranks import PATIENCE, SLACK, Stopwatch, die_with_parent, gone

PUPPET = os.path.join(os.environ["LOCKSTEP_TEST_DIR"], "launch_puppet")
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI", "SLURM_"))}
LONG = ["--stop-grace", "60000"]


class Case(unittest.TestCase):
    def start(self, *arguments, **environment):
        process = subprocess.Popen([PUPPET, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**ENVIRONMENT, **environment}, preexec_fn=die_with_parent)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def ready(self, process, count):
        """The ranks that have said that they are there: rank to pid."""
        pids = {}
        while len(pids) < count:
            found = re.match(r"rank (\d+) pid (\d+)", process.stdout.readline())
            self.assertTrue(found)
            pids[int(found[1])] = int(found[2])
        return pids

    def end(self, process, code, pids=()):
        output, errors = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, code, errors)
        self.assertEqual([pid for pid in pids if not gone(pid)], [])
        return output, errors


class Launch(Case):
    def test_lines_have_the_rank_in_front(self):
        _, errors = self.end(self.start("--prefix", "ok", "ok"), 0)
        lines = errors.splitlines()
        for rank in (0, 1):
            for text in ("hello", "hello again"):
                self.assertIn(f"[rank {rank}] {text}", lines)
        self.assertEqual(len(lines), 4)

    def test_lines_are_as_they_are_unless_asked(self):
        _, errors = self.end(self.start("ok"), 0)
        self.assertEqual(errors, "hello\nhello again\n")

    def test_a_bar_has_no_rank(self):
        process = subprocess.run([PUPPET, "--prefix", "bar"], capture_output=True, env=ENVIRONMENT, timeout=PATIENCE)
        self.assertTrue(process.stderr.endswith(b"[== ] 2/3\x1b[K\n"), process.stderr)
        self.assertNotIn(b"[rank", process.stderr.split(b"\r")[-1])

    def test_the_first_cause_comes_last(self):
        process = self.start("--prefix", "--grace", "2000", *LONG, "wait", "exit:7", "stubborn")
        pids = self.ready(process, 2)
        _, errors = self.end(process, 7, pids.values())
        self.assertRegex(errors.splitlines()[-1], r"rank 1 \(pid \d+\) failed first, with exit code 7: the culprit$")

    def test_a_killed_rank_is_named(self):
        process = self.start("--grace", "2000", "stubborn", "wait", "die")
        pids = self.ready(process, 2)
        _, errors = self.end(process, 1, pids.values())
        self.assertRegex(errors.splitlines()[-1], r"rank 2 \(pid \d+\) was killed by signal 9")

    def test_a_killed_rank_is_named_before_those_that_saw_it(self):
        """The connections of a process close before it is gone: who sees that may be gone first."""
        for seen in ("exit:1", "exit:4"):
            _, errors = self.end(self.start("--grace", "2000", seen, "last:die"), 1)
            self.assertRegex(errors.splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    def test_who_tells_of_another_is_not_the_first(self):
        _, errors = self.end(self.start("--grace", "2000", "exit:4", "exit:4", "last:exit:3"), 3)
        self.assertRegex(errors.splitlines()[-1], r"rank 2 \(pid \d+\) failed first, with exit code 3: the culprit$")
        _, errors = self.end(self.start("--grace", "2000", "exit:6", "last:exit:3"), 6)
        self.assertRegex(errors.splitlines()[-1], r"rank 0 \(pid \d+\) failed first, with exit code 6")
        _, errors = self.end(self.start("exit:4", "ok"), 1)  # nobody else knows more
        self.assertEqual(errors.splitlines()[-1], "error: the culprit (reported by rank 0)")

    def test_ranks_may_take_long_to_stop(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start("--prefix", *LONG, "save", "save")
            pids = self.ready(process, 2)
            process.send_signal(number)
            _, errors = self.end(process, 128 + number, pids.values())
            for rank in (0, 1):
                self.assertIn(f"[rank {rank}] saved", errors)
            self.assertNotIn("failed first", errors)

    def test_one_that_could_not_stop_ends_the_patience(self):
        """Rank 1 dies of the signal: rank 0 waits in vain for it."""
        process = self.start(*LONG, "stubborn", "wait")
        pids = self.ready(process, 2)
        watch = Stopwatch()
        process.send_signal(signal.SIGTERM)
        self.end(process, 143, pids.values())
        self.assertLess(watch.seconds(), 2 + SLACK)

    def test_a_failure_while_stopping_is_a_failure(self):
        process = self.start(*LONG, "stubborn", "stubborn")
        pids = self.ready(process, 2)
        process.send_signal(signal.SIGTERM)
        os.kill(pids[1], signal.SIGKILL)
        _, errors = self.end(process, 1, pids.values())
        self.assertIn("rank 1", errors.splitlines()[-1])

    def test_a_second_signal_ends_at_once(self):
        process = self.start(*LONG, "stubborn", "stubborn")
        pids = self.ready(process, 2)
        watch = Stopwatch()
        process.send_signal(signal.SIGINT)
        self.assertIn("press Ctrl-C again", process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        self.end(process, 130, pids.values())
        self.assertLess(watch.seconds(), SLACK)

    def test_the_same_signal_at_once_is_one(self):
        """As timeout does it: to the process, then to its group."""
        process = self.start("--prefix", *LONG, "save", "save")
        pids = self.ready(process, 2)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        _, errors = self.end(process, 143, pids.values())
        for rank in (0, 1):
            self.assertIn(f"[rank {rank}] saved", errors)

    def test_patience_ends(self):
        process = self.start("--stop-grace", "700", "stubborn", "stubborn")
        pids = self.ready(process, 2)
        process.send_signal(signal.SIGTERM)
        _, errors = self.end(process, 143, pids.values())
        self.assertIn("2 of 2 ranks did not stop in time", errors)

    def test_no_orphans_when_the_launcher_is_killed(self):
        process = self.start("stubborn", "stubborn")
        pids = self.ready(process, 2)
        process.kill()
        process.wait()
        until = time.monotonic() + PATIENCE
        while not all(gone(pid) for pid in pids.values()):
            self.assertLess(time.monotonic(), until)
            os.sched_yield()

    def test_a_server_beside_the_ranks(self):
        output, errors = self.end(self.start("--server", "star", "star", "star"), 0)
        self.assertEqual(output.count("sum 6\n"), 3)
        self.assertEqual(errors, "")

    def test_a_death_in_the_star(self):
        process = self.start("--server", *LONG, "star", "star:die")
        pids = self.ready(process, 2)
        _, errors = self.end(process, 1, pids.values())
        self.assertIn("rank 1 (", errors)
        self.assertRegex(errors.splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    def test_ranks_that_never_come_to_the_star(self):
        watch = Stopwatch()
        self.end(self.start("--server", "ok", "exit:2"), 2)
        self.assertLess(watch.seconds(), 5 + SLACK)


class Survival(Case):
    """Ranks of a job that goes on without those that are lost."""

    def step_with(self, process, workers):
        until = time.monotonic() + PATIENCE
        for line in process.stdout:
            if line.endswith(f" workers {workers}\n"):
                return int(line.split()[1])
            if time.monotonic() > until:
                process.kill()
                break
        self.fail(f"no step with {workers} workers\n" + process.stderr.read())

    def children(self, process):
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            return [int(pid) for pid in file.read().split()]

    def test_a_killed_rank_comes_back(self):
        for server in ([], ["--server"]):
            with self.subTest(server=server):
                process = self.start("--survive", "--prefix", *LONG, *server, "work", "work", "work")
                self.step_with(process, 3)
                before = self.children(process)
                os.kill(before[0], signal.SIGKILL)
                self.step_with(process, 2)
                self.step_with(process, 3)
                after = self.children(process)
                self.assertEqual(len(set(after) - set(before)), 1)
                process.send_signal(signal.SIGTERM)
                _, errors = self.end(process, 143, after)
                self.assertRegex(errors, r"rank 0 \(pid \d+\) was killed by signal 9 \(Killed\); a worker is started in its place in 0.5 s")
                self.assertNotIn("error", errors)

    def test_a_stopped_rank_is_killed_before_another_is_started(self):
        process = self.start("--survive", *LONG, "work", "work", "work")
        self.step_with(process, 3)
        stopped = self.children(process)[1]
        os.kill(stopped, signal.SIGSTOP)
        self.step_with(process, 2)
        self.step_with(process, 3)
        self.assertTrue(gone(stopped))
        process.send_signal(signal.SIGINT)
        self.end(process, 130)

    def test_a_rank_that_fails_comes_back(self):
        process = self.start("--survive", "--prefix", *LONG, "work", "work:exit:1", "work:die")
        self.step_with(process, 3)
        self.step_with(process, 1)
        self.step_with(process, 3)
        process.send_signal(signal.SIGTERM)
        _, errors = self.end(process, 143)
        self.assertIn("[rank 1] the culprit", errors)
        self.assertRegex(errors, r"rank 1 \(pid \d+\) failed, with exit code 1; a worker is started")

    def test_what_all_come_to_alike_ends_all(self):
        process = self.start("--survive", *LONG, "work", "work:exit:3")
        self.step_with(process, 2)
        process.stdout.read()
        _, errors = self.end(process, 3)
        self.assertRegex(errors.splitlines()[-1], r"rank 1 \(pid \d+\) failed first, with exit code 3: the culprit$")

    def test_newcomers_that_fail_are_given_up(self):
        for action in ("come:die", "come:join:die"):
            with self.subTest(action=action):
                process = self.start("--survive", *LONG, action, "work", "work:die")
                self.step_with(process, 2)
                # The steps go on, so somebody has to read them.
                reader = threading.Thread(target=process.stdout.read, daemon=True)
                reader.start()
                ends = 0
                for line in process.stderr:
                    ends += "was killed by signal 9" in line
                    if "is not started again" in line or ends > 4:
                        break
                process.send_signal(signal.SIGTERM)
                reader.join(PATIENCE)
                self.assertEqual(process.wait(PATIENCE), 143)
                self.assertEqual(ends, 4)  # the first worker's, and those of three started in its place

    def test_who_stops_after_the_end_changes_nothing(self):
        process = self.start("--survive", *LONG, "work:end", "work:end:stop", "work:end")
        process.stdout.read()
        _, errors = self.end(process, 0)
        self.assertRegex(errors.splitlines()[-1], r"warning: rank 1 \(pid \d+\) was killed by signal 9")

    def test_all_leave_in_order_and_fail(self):
        process = self.start("--survive", *LONG, "work:end:fail", "work:end:fail")
        process.stdout.read()
        _, errors = self.end(process, 1)
        self.assertRegex(errors.splitlines()[-1], r"rank [01] \(pid \d+\) failed first, with exit code 1: the culprit$")

    def test_nobody_is_left(self):
        process = self.start("--survive", *LONG, "work", "work")
        self.step_with(process, 2)
        for pid in self.children(process):
            os.kill(pid, signal.SIGKILL)
        process.stdout.read()
        _, errors = self.end(process, 1)
        self.assertRegex(errors.splitlines()[-1], r"rank [01] \(pid \d+\) was killed by signal 9")

    def test_nobody_is_left_after_a_pause_of_the_launcher(self):
        process = self.start("--survive", *LONG, "work", "work")
        self.step_with(process, 2)
        children = self.children(process)
        process.send_signal(signal.SIGSTOP)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        time.sleep(5)  # the timeout is 2 s: how long it stands still is what is tried here
        process.send_signal(signal.SIGCONT)
        process.stdout.read()
        _, errors = self.end(process, 1)
        self.assertRegex(errors.splitlines()[-1], r"rank [01] \(pid \d+\) was killed by signal 9")

    def launcher_without_its_role(self):
        """It stood still for the timeout, together with rank 2, which stands still on; its ranks have gone on without them."""
        process = self.start("--survive", *LONG, "--end-grace", "300", "work", "work", "work")
        self.step_with(process, 3)
        children = self.children(process)
        for pid in (children[2], process.pid):
            os.kill(pid, signal.SIGSTOP)
        self.step_with(process, 2)
        process.send_signal(signal.SIGCONT)
        for line in process.stderr:
            if "the launcher stood still" in line:
                return process, children
        self.fail("the launcher has its role")

    def test_who_stands_still_when_all_others_have_ended_is_ended(self):
        process, children = self.launcher_without_its_role()
        for pid in children[:2]:
            os.kill(pid, signal.SIGKILL)
        _, errors = self.end(process, 1, children)
        self.assertRegex(errors.splitlines()[-1], r"rank [01] \(pid \d+\) was killed by signal 9")

    def test_a_launcher_without_its_role_stops_its_ranks(self):
        process, children = self.launcher_without_its_role()
        process.send_signal(signal.SIGINT)
        self.end(process, 130, children)

    def test_a_rank_in_a_job_of_others_comes_back_until_it_is_given_up(self):
        process = self.start("--survive", "--join", *LONG, "in:die", "in:save")
        starts = 0
        for line in process.stderr:
            starts += "; a worker is started in its place" in line
            if "is not started again" in line:
                break
        self.assertEqual(starts, 4)  # the last is given up when its time has come
        process.send_signal(signal.SIGTERM)
        self.end(process, 143)

    def test_all_ranks_in_a_job_of_others_come_back(self):
        """The job goes on without them."""
        process = self.start("--survive", "--join", *LONG, "in:die")
        errors = process.stderr.read()
        self.assertEqual(errors.count("; a worker is started in its place"), 4)
        self.assertIn("is not started again", errors)
        self.end(process, 1)

    def test_a_rank_whose_job_of_others_has_ended_is_started_once(self):
        with tempfile.TemporaryDirectory() as folder:
            process = self.start("--survive", "--join", *LONG, "gone", LAUNCH_PUPPET_GONE=f"{folder}/gone")
            _, errors = self.end(process, 1)
        self.assertEqual(errors.count("a worker is started in its place"), 1, errors)

    def test_a_rank_that_fails_before_it_is_back_in_a_job_of_others_is_tried_again(self):
        """It may lack memory that the one before has not given back yet."""
        with tempfile.TemporaryDirectory() as folder:
            process = self.start("--survive", "--join", *LONG, "lacks", LAUNCH_PUPPET_GONE=f"{folder}/lacks")
            _, errors = self.end(process, 1)
        self.assertEqual(errors.count("the culprit"), 3, errors)
        self.assertIn("is not started again", errors)

    def test_who_stands_still_at_the_end_of_a_job_of_others_is_ended(self):
        process = self.start("--survive", "--join", *LONG, "--end-grace", "300", "in:ok", "in:wait", "wait")
        pids = self.children(process)
        self.end(process, 0, pids)

    def test_a_job_of_others_that_is_not_there_is_tried_once(self):
        process = self.start("--survive", "--join", *LONG, "exit:1", "exit:1")
        _, errors = self.end(process, 1)
        self.assertNotIn("is started", errors)

    def test_a_job_of_others_that_cannot_begin_is_tried_once(self):
        """All had a rank, and found the same wrong before the first step."""
        process = self.start("--survive", "--join", *LONG, "in:exit:1", "in:exit:1")
        _, errors = self.end(process, 1)
        self.assertNotIn("is started", errors)

    def test_before_the_job_has_formed_a_loss_ends_it(self):
        process = self.start("--survive", *LONG, "work", "exit:1")
        _, errors = self.end(process, 1)
        self.assertRegex(errors.splitlines()[-1], r"rank 1 \(pid \d+\) failed first, with exit code 1: the culprit$")


if __name__ == "__main__":
    unittest.main()
