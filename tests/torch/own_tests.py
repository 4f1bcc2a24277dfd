#!/usr/bin/env python3
"""PyTorch's own tests of its process groups, with the backend lockstep: the class DistributedTest that the installed
package ships. Prints a table of passed, skipped and failed tests; fails if one of them fails.

Many of these tests run only for backends that they know by name. BACKEND=gloo runs them with ours in Gloo's place.

usage: [BACKEND=gloo] own_tests.py [--workers 4] [--only WORD]"""

import argparse
import collections
import os
import sys
import tempfile
import time
import unittest

os.environ.setdefault("BACKEND", "lockstep")
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="lockstep-torch-"))
os.environ.setdefault("INIT_METHOD", "env://")

import torch  # noqa: E402

import lockstep.torch  # noqa: E402  (registers the backend)
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# What the tests ask about a backend when they are defined. Lockstep cannot receive from any source.
DistTestCases.skip_collective["sendrecv anysource"].add("lockstep")
for feature in ("ddp", "subgroup", "gpu", "cuda"):
    DistTestCases.backend_feature[feature].add("lockstep")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

# What they ask of Gloo that lockstep answers in another way.
OTHERWISE = {
    "monitored_barrier": "checks the words of Gloo's monitored barrier; ours ends the job and names who is missing",
    "anysource": "lockstep receives from a rank that is named",
}


def stand_in_for_gloo():
    c10d = torch.distributed.distributed_c10d
    plugins = c10d.Backend._plugins
    plugins["GLOO"] = plugins["LOCKSTEP"]

    def create(store, rank, size, timeout):  # PyTorch 1.13 makes it without asking a plugin
        options = c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
        return lockstep.torch.create(options, None)

    if torch.__version__.startswith("1."):
        c10d.ProcessGroupGloo = create


if os.environ["BACKEND"] == "gloo":
    stand_in_for_gloo()


class LockstepTest(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        for word, why in OTHERWISE.items():
            if os.environ["BACKEND"] == "gloo" and word in self._testMethodName:
                self.skipTest(why)
        super().setUp()
        # Forked, not spawned: a process that imports PyTorch anew for every rank of every test takes most of the time.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _cause(text):
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if "Error: " in line), lines[-1] if lines else "")[:200]


class Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.rows = []

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def add(self, test, verdict, why=""):
        name = test._testMethodName
        self.rows.append((name, verdict, why))
        print(f"{verdict:8}{time.monotonic() - self.began:6.1f} s  {name}  {why}", flush=True)

    def addSuccess(self, test):
        self.add(test, "passed")

    def addSkip(self, test, reason):
        self.add(test, "skipped", reason)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.add(test, "FAILED", _cause(str(error[1])))

    addError = addFailure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4")
    parser.add_argument("--only", default="", help="tests whose name has this word")
    options = parser.parse_args()
    os.environ["WORLD_SIZE"] = options.workers
    names = [name for name in unittest.TestLoader().getTestCaseNames(LockstepTest) if options.only in name]
    result = Result()
    unittest.TestSuite(LockstepTest(name) for name in names).run(result)
    verdicts = collections.Counter(verdict for _, verdict, _ in result.rows)
    print(f"\nPyTorch {torch.__version__}, BACKEND={os.environ['BACKEND']}, {options.workers} workers: " +
          ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    reasons = collections.Counter(why for _, verdict, why in result.rows if verdict == "skipped")
    for why, count in reasons.most_common():
        print(f"{count:5} skipped: {why}")
    for name, verdict, why in result.rows:
        if verdict == "FAILED":
            print(f"      FAILED: {name}: {why}")
    sys.exit(bool(verdicts["FAILED"]))


if __name__ == "__main__":
    main()
