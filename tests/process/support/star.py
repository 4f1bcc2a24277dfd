"""`lockstep coordinator` and `lockstep worker` as real processes, for tests that see what becomes of them."""

import os
import re
import subprocess
import sys
import threading
import time

from ranks import PATIENCE, SANITIZED, SLACK, Failure, Stopwatch, die_with_parent

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
PUPPET = os.path.join(os.path.dirname(__file__), "puppet_worker.py")
# A token or a launcher's variables must not leak in from whoever runs the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "LOCKSTEP_TOKEN"))}


class Process:
    """One process; what it writes is kept in `lines`."""

    def __init__(self, name, command, changed, environment=None):
        self.name = name
        self.lines = []
        self.ended_at = None
        self._changed = changed
        self.process = subprocess.Popen(
            [str(each) for each in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**ENVIRONMENT, **(environment or {})}, preexec_fn=die_with_parent)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self.ended_at = time.monotonic()
            self._changed.notify_all()

    def find(self, pattern):
        for line in self.lines:
            if found := re.search(pattern, line):
                return found
        return None

    @property
    def text(self):
        return "\n".join(self.lines)

    def signal(self, number):
        """Returns when it was sent."""
        self.process.send_signal(number)
        return time.monotonic()

    def end(self):
        self.process.kill()
        self._thread.join()
        self.process.stdin.close()
        self.process.stdout.close()


class Star:
    """A coordinator and its workers; ends them all. Use in a with statement."""

    def __init__(self, workers, *arguments, timeout=10, environment=None, port=0):
        self.changed = threading.Condition()
        self.processes = []
        self.watch = Stopwatch()
        self.timeout = timeout
        self.command = [LOCKSTEP, "coordinator", "--bind", f"127.0.0.1:{port}", "--workers", workers, "--timeout", timeout, *arguments]
        self.coordinator = self.start("coordinator", self.command, environment)
        found = self.wait_line(self.coordinator, r"listening on (\S+):(\d+)")
        self.address = (found[1].strip("[]"), int(found[2]))

    def start(self, name, command, environment=None):
        process = Process(name, command, self.changed, environment)
        self.processes.append(process)
        return process

    @property
    def address_text(self):
        return f"{self.address[0]}:{self.address[1]}"

    def worker(self, *arguments, name="worker", environment=None):
        command = [LOCKSTEP, "worker", "--coordinator", self.address_text, "--node-id", name, "--timeout", self.timeout]
        return self.start(name, [*command, *arguments], environment)

    def puppet(self, pause, elements, own=True):
        """A worker that has come to where it pauses."""
        kind = ["--own"] if own else []
        return self.start("puppet", [sys.executable, PUPPET, self.address_text, "--pause", pause, "--elements", elements,
                                     *kind])

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        story = self.story()
        for process in self.processes:
            process.end()
        # Of the test's own connections and assumptions; tell what the processes did.
        if isinstance(error, Exception) and not isinstance(error, Failure):
            raise Failure(f"{type(error).__name__}: {error}\n{story}") from error

    def story(self):
        lines = []
        for process in self.processes:
            lines.append(f"  {process.name} (pid {process.process.pid}): code {process.process.poll()}")
            lines += [f"    {line}" for line in process.lines[-8:]]
        return "\n".join(lines)

    def expect(self, condition, what):
        if not condition:
            raise Failure(f"{what}\n{self.story()}")

    def wait(self, ready, what, patience=PATIENCE):
        with self.changed:
            if not self.changed.wait_for(ready, patience):
                raise Failure(f"no {what} within {patience:g} s\n{self.story()}")

    def wait_line(self, process, pattern):
        self.wait(lambda: process.find(pattern) or process.ended_at, f"'{pattern}' from {process.name}")
        found = process.find(pattern)
        self.expect(found, f"{process.name} ended without '{pattern}'")
        return found

    def expect_end(self, processes, code, words=(), since=None, limit=None):
        """They end by themselves with this code and say all `words`; returns how long the last one took."""
        self.wait(lambda: all(each.ended_at for each in processes), f"end of {[each.name for each in processes]}")
        for each in processes:
            self.expect(each.process.returncode == code,
                        f"{each.name} ended with {each.process.returncode}, not {code}")
            for word in words:
                self.expect(re.search(word, each.text), f"{each.name} does not say '{word}'")
        if since is None:
            return None
        took = max(each.ended_at for each in processes) - since
        limit = self.timeout + SLACK if limit is None else limit
        # Promises are made for a machine that lets its processes run.
        lost = self.watch.lost()
        self.expect(took <= limit + lost,
                    f"the last one took {took:.2f} s, {limit:.2f} s are allowed ({lost:.2f} s were lost to others)")
        return took
