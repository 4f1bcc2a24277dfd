#!/usr/bin/env python3
"""Sums up the JUnit files of several ctest runs: failed tests with the end of what they printed, skipped tests with
reasons, totals. A GoogleTest program counts as the cases that it ran. RUN.again.xml has the tests of RUN.xml that were run
once more, which count as they ended then.

The last line is "N passed, N failed, N skipped"; the exit code is 1 when anything failed.
"""

import argparse
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


LAST_LINES = 30
FUZZ_SECONDS = 60


def skip_reason(output):
    """Why a test was skipped, from what it printed."""
    output = output.strip()
    # GTEST_SKIP() << "reason" prints "file:line: Skipped", then the reason.
    gtest = re.search(r": Skipped\n(.*?)(?:\n\n|\n\[|$)", output, re.DOTALL)
    if gtest and gtest.group(1).strip():
        return " ".join(gtest.group(1).split())
    # A script ends with "skipped: reason" and exit code 77.
    if output and not gtest:
        return output.splitlines()[-1].removeprefix("skipped: ")
    return "no reason given"


def last_words(output):
    """The end of what a failed test printed, indented."""
    return "".join(f"\n    {line}" for line in output.strip().splitlines()[-LAST_LINES:])


CASE_START = re.compile(r"\[ RUN      \] (\S+)\n")
CASE_END = re.compile(r"\[(       OK |  FAILED  |  SKIPPED )\] (\S+?)(?:, where .*)? \(.*\)$", re.MULTILINE)
OUTCOMES = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}


def gtest_cases(output):
    """(name, outcome, what it printed) of every case that a GoogleTest program started."""
    starts = list(CASE_START.finditer(output))
    for start, following in zip(starts, starts[1:] + [None]):
        printed = output[start.end() : following.start() if following else len(output)]
        ends = [end for end in CASE_END.finditer(printed) if end[2] == start[1]]
        yield start[1], OUTCOMES[ends[0][1].strip()] if ends else "failed", printed[: ends[0].end()] if ends else printed


def tests_of(path):
    """Elements of a JUnit file, by name."""
    return {test.get("name"): test for test in ElementTree.parse(path).iter("testcase")}


def read_run(path, again):
    """(name, outcome, reason or last words) of every test in one JUnit file; those `again` ran once more."""
    for test in {**tests_of(path), **again}.values():
        output = test.findtext("system-out") or ""
        note = test.find("skipped")
        if test.get("status") == "run":
            outcome = "passed"
        elif note is not None and note.get("message").startswith("SKIP_"):
            outcome = "skipped"
        else:  # failed, or could not be started
            outcome = "failed"
        found = [(test.get("name"), outcome, output)]
        if "[==========]" in output:
            cases = list(gtest_cases(output))
            # A program may fail as a whole: after its last case, or before its first one.
            if cases and (outcome == "passed" or any(case[1] == "failed" for case in cases)):
                found = cases
            else:
                found = cases + [(test.get("name"), "failed", output)]
        for name, outcome, printed in found:
            words = {"passed": lambda _: "", "failed": last_words, "skipped": skip_reason}[outcome](printed)
            yield f"{path.stem}: {name}", outcome, words


def fuzz_seconds(path):
    """How long the replays of the fuzzers' corpora took, on the clock and beside other tests; 0 where there are none."""
    return sum(float(test.get("time")) for name, test in tests_of(path).items() if name.startswith("fuzz."))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, help="folder with one JUnit file per run")
    parser.add_argument("--failed-step", action="append", default=[], help="a build or run that failed as a whole")
    arguments = parser.parse_args()

    tests = []
    for path in sorted(arguments.results.glob("*.xml")):
        if path.stem.endswith(".again"):
            continue
        second = path.with_suffix(".again.xml")
        again = tests_of(second) if second.exists() else {}
        for name in again:
            print(f"again    {path.stem}: {name}, because the machine had stood still")
        tests += read_run(path, again)
        # Not a failure: a busy machine takes longer.
        if (seconds := fuzz_seconds(path)) > 0:
            print(f"fuzz     {path.stem}: {seconds:.0f} s for the replays, which are to take less than {FUZZ_SECONDS} s on a free machine")
    tests += [(step, "failed", "") for step in arguments.failed_step]
    count = {outcome: sum(test[1] == outcome for test in tests) for outcome in ("passed", "failed", "skipped")}

    for name, outcome, words in tests:
        if outcome == "failed":
            print(f"failed   {name}{words}")
    for name, outcome, reason in tests:
        if outcome == "skipped":
            print(f"skipped  {name}: {reason}")
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] or not count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
