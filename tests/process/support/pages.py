"""Runs with a live page, for tests that look at it."""

import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

from training import LOCKSTEP, TINY, TextCase


class PageCase(TextCase):
    def start(self, *arguments, slow=20, **environment):
        """A run that takes its time without using the processor; returns the process and the address of its page."""
        usual = [word for flag, value in TINY.items() if flag not in arguments for word in (flag, value)]
        environment = {**os.environ, "LOCKSTEP_FAULT": f"rank=any step=1 at=lane do=slow ms={slow}", **environment}
        run = subprocess.Popen([str(word) for word in (LOCKSTEP, "train", "--data", self.text, "--page", 0, *usual, *arguments)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self.addCleanup(self.end, run)
        said = []
        for line in run.stderr:
            said.append(line)
            if match := re.search(r"page: (http://\S+)", line):
                return run, match[1]
        self.fail("".join(said))

    def end(self, run, how=signal.SIGKILL):
        """Exit code and what it said. With 0 it ends by itself."""
        if run.poll() is None:
            run.send_signal(how)
        output, errors = run.communicate(timeout=60)
        return run.returncode, output, errors

    def get(self, url, path="", **headers):
        """Status and text."""
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_for_step(self, url, step):
        end = time.monotonic() + 60
        run = None
        while time.monotonic() < end:
            try:
                run = json.loads(self.get(url, "api/run")[1])
            except (OSError, http.client.HTTPException):  # nobody serves it now
                run = None
            if run and run["step"] >= step:
                return run
            time.sleep(0.02)
        self.fail(f"step {step} was not reached: {run}")
