#!/usr/bin/env python3
"""Sums up the JUnit files of several ctest runs: failed tests with the end of what they printed, skipped tests with
reasons, totals.

The last line is "N passed, N failed, N skipped"; the exit code is 1 when anything failed.
"""

import argparse
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


LAST_LINES = 30


def skip_reason(case):
    """Why a test was skipped, from what it printed."""
    output = (case.findtext("system-out") or "").strip()
    # GTEST_SKIP() << "reason" prints "file:line: Skipped", then the reason.
    gtest = re.search(r": Skipped\n(.*?)(?:\n\n|\n\[|$)", output, re.DOTALL)
    if gtest and gtest.group(1).strip():
        return " ".join(gtest.group(1).split())
    if case.get("status") == "disabled":
        return "disabled in the source"
    # A script ends with "skipped: reason" and exit code 77.
    if output and not gtest:
        return output.splitlines()[-1].removeprefix("skipped: ")
    return "no reason given"


def last_words(case):
    """The end of what a failed test printed, indented."""
    lines = (case.findtext("system-out") or "").strip().splitlines()
    return "".join(f"\n    {line}" for line in lines[-LAST_LINES:])


def read_run(path):
    """(name, outcome, reason or last words) of every test in one JUnit file."""
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{path.stem}: {case.get('name')}"
        note = case.find("skipped")
        if case.get("status") == "run":
            yield name, "passed", ""
        elif case.get("status") == "disabled" or (note is not None and note.get("message").startswith("SKIP_")):
            yield name, "skipped", skip_reason(case)
        else:  # failed, or could not be started
            yield name, "failed", last_words(case)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, help="folder with one JUnit file per run")
    parser.add_argument("--failed-step", action="append", default=[], help="a build or run that failed as a whole")
    arguments = parser.parse_args()

    tests = [test for path in sorted(arguments.results.glob("*.xml")) for test in read_run(path)]
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
