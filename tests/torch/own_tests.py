#!/usr/bin/env python3
"""PyTorch's own tests of its process groups, with the backend lockstep: the class DistributedTest that the installed
package ships. Prints a table of passed, skipped and failed tests, and writes which they are, and why, to build/test-torch; fails
if one of them fails.

Many of these tests run only for backends that they know by name. So those that are skipped for "lockstep" are tried
under the names "gloo" and "mpi"; the backend that is tested is ours in any case.

usage: own_tests.py [--workers 4] [--only WORD] [--name lockstep|gloo|mpi]"""

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRETENDED = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else "lockstep"
os.environ["BACKEND"] = PRETENDED  # read when the tests are imported
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="lockstep-torch-"))
os.environ.setdefault("INIT_METHOD", "env://")

if importlib.util.find_spec("expecttest") is None:  # Debian has none, and these tests use nothing else of it
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase, sys.modules["expecttest"].ACCEPT = unittest.TestCase, False

import torch  # noqa: E402

import lockstep.torch  # noqa: E402  (registers the backend)
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# What the tests ask about a backend when they are defined.
for feature in ("ddp", "subgroup", "gpu", "cuda"):
    DistTestCases.backend_feature[feature].add("lockstep")

from torch.testing._internal.distributed import distributed_test  # noqa: E402

# What they ask of Gloo that lockstep answers in another way: all tests of these names check words. What ours answers, and that it
# lets pass who has come, is in tests/process/torch_backend.py and torch_collectives.py.
OTHERWISE = {
    "monitored_barrier": "checks the words of Gloo's monitored barrier; ours ends the job and names who is missing",
    "barrier_timeout": "checks the words of Gloo's timeout; ours names who is missing",
}


def ours(make):
    """Makes groups of our backend, whatever name the tests say."""

    def make_ours(*arguments, **options):
        if options.get("backend") == PRETENDED:
            options["backend"] = "lockstep"
        return make(*arguments, **options)

    return make_ours


def checked(init):
    """The group that is tested must be ours."""

    def init_and_check(*arguments, **options):
        init(*arguments, **options)
        assert torch.distributed.get_backend() == "lockstep", torch.distributed.get_backend()

    return init_and_check


torch.distributed.init_process_group = checked(ours(torch.distributed.init_process_group))
torch.distributed.new_group = ours(torch.distributed.new_group)


def without_replicated_tensors():
    """PyTorch 1.13 cannot import its ReplicatedTensor with Python 3.11: tests that would try it as well go on without."""
    try:
        importlib.import_module("torch.distributed._shard.replicated_tensor")
    except ValueError:
        torch.nn.parallel._replicated_tensor_ddp_utils._set_ddp_with_replicated_tensor = lambda wanted: None
    except ImportError:
        pass  # newer PyTorch has none


without_replicated_tensors()


class LockstepTest(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        for word, why in OTHERWISE.items():
            if word in self._testMethodName:
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


def run(names, workers, report):
    os.environ["WORLD_SIZE"] = workers
    result = Result()
    unittest.TestSuite(LockstepTest(name) for name in names).run(result)
    if report:
        with open(report, "w") as file:
            json.dump(result.rows, file)
    else:
        tell(result.rows, workers)
    sys.exit(any(verdict == "FAILED" for _, verdict, _ in result.rows))


def run_under_all_names(names, workers):
    """Each name in a process of its own: which tests there are is decided when they are defined."""
    rows, left = {}, names
    with tempfile.TemporaryDirectory() as folder:
        for pretended in ("lockstep", "gloo", "mpi"):
            report = os.path.join(folder, pretended)
            command = [sys.executable, __file__, "--name", pretended, "--workers", workers, "--report", report]
            code = subprocess.run(command, input="\n".join(left), text=True).returncode
            if not os.path.exists(report):
                sys.exit(f"the tests under the name {pretended} ended with {code}")
            with open(report) as file:
                for name, verdict, why in json.load(file):
                    # Of a test that no name lets through, the reason that Gloo is given says most.
                    if verdict != "skipped" or name not in rows or (pretended == "gloo" and why):
                        rows[name] = (name, verdict, why)
            left = [name for name in names if rows[name][1] == "skipped"]
    tell(list(rows.values()), workers)
    sys.exit(any(verdict == "FAILED" for _, verdict, _ in rows.values()))


def write_names(rows, workers):
    """Every test with its verdict and the reason, to compare versions by."""
    path = ROOT / "build" / "test-torch" / f"own_tests-{torch.__version__}-{workers}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{verdict:8}{name}{why and '  ' + why}\n" for name, verdict, why in sorted(rows)))
    print(f"{path.relative_to(ROOT)} has all names")


def tell(rows, workers):
    verdicts = collections.Counter(verdict for _, verdict, _ in rows)
    print(f"\nPyTorch {torch.__version__}, {workers} workers: " +
          ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    for why, count in collections.Counter(why for _, verdict, why in rows if verdict == "skipped").most_common():
        print(f"{count:5} skipped: {why}")
    for name, verdict, why in rows:
        if verdict == "FAILED":
            print(f"      FAILED: {name}: {why}")
    write_names(rows, workers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4")
    parser.add_argument("--only", default="", help="tests whose name has this word")
    parser.add_argument("--name", choices=("lockstep", "gloo", "mpi"), help="what the tests take the backend for")
    parser.add_argument("--report", help=argparse.SUPPRESS)  # then the tests to run are read from standard input
    options = parser.parse_args()
    names = [name for name in unittest.TestLoader().getTestCaseNames(LockstepTest) if options.only in name]
    if options.name:
        run(sys.stdin.read().split() if options.report else names, options.workers, options.report)
    run_under_all_names(names, options.workers)


if __name__ == "__main__":
    main()
