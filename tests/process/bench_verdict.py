#!/usr/bin/env python3
"""What `make bench` says of its rows: the interval of a median, when a row is missed, the table at the end and its code."""
# builds: release

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import verdict  # noqa: E402

ROW = "checkpoint save / write and sync"  # 0.95 is required, nothing wanted
TCP = "tcp 2 ranks 8 B / best peer"  # 1.2 is required, 1.5 wanted


def pairs(*values):
    """Fifteen of them, in some order."""
    values = [values[i % len(values)] for i in range(15)]
    random.Random(1).shuffle(values)
    return values


class Interval(unittest.TestCase):
    def test_fifteen_pairs_leave_three_out_at_either_end(self):
        values = list(range(1, 16))
        random.Random(2).shuffle(values)
        self.assertEqual(verdict.interval(values), (4, 12))

    def test_it_holds_the_median_in_at_least_95_of_100_runs(self):
        generator = random.Random(3)
        for count in (6, 15, 16, 31):
            runs = [verdict.interval([generator.gauss(1, 0.3) ** 3 for _ in range(count)]) for _ in range(4000)]
            self.assertGreater(sum(low <= 1 <= high for low, high in runs) / len(runs), 0.945, count)

    def test_more_pairs_narrow_it(self):
        widths = []
        for count in (15, 61, 241):
            low, high = verdict.interval([i / count for i in range(count)])
            widths.append(high - low)
        self.assertEqual(widths, sorted(widths, reverse=True))
        self.assertLess(widths[-1], 2.2 / math.sqrt(241))

    def test_of_few_values_it_has_all(self):
        self.assertEqual(verdict.interval([3]), (3, 3))
        self.assertEqual(verdict.interval([3, 1, 2, 5, 4]), (1, 5))
        self.assertEqual(verdict.interval([6, 3, 1, 2, 5, 4]), (1, 6))


class Rule(unittest.TestCase):
    def judge(self, row, values):
        return verdict.judge(values, verdict.REQUIREMENTS[row])

    def test_missed_only_when_the_whole_interval_is_below(self):
        self.assertEqual(self.judge(ROW, pairs(0.5, 0.94)), "missed")
        # Twelve of fifteen below: the interval ends with the twelfth. Eleven: it reaches beyond.
        self.assertEqual(self.judge(ROW, [0.9] * 12 + [1.0] * 3), "missed")
        self.assertEqual(self.judge(ROW, [0.9] * 11 + [1.0] * 4), "not decided")
        self.assertEqual(self.judge(ROW, pairs(0.95)), "required")

    def test_wanted_counts_by_the_median(self):
        self.assertEqual(self.judge(TCP, [1.4] * 7 + [1.5] * 8), "wanted")
        self.assertEqual(self.judge(TCP, [1.4] * 8 + [1.5] * 7), "required")

    def test_few_pairs_are_not_judged(self):
        self.assertEqual(self.judge(ROW, [0.1] * 14), "14 pairs are too few")
        self.assertEqual(self.judge("make build from nothing: 180 s / time", [0.9]), "missed")

    def test_a_row_without_a_claim_is_told(self):
        self.assertEqual(self.judge("checkpoint load / plain read into memory that is there", pairs(0.1)), "told only")

    def test_every_requirement_can_be_met(self):
        for row, requirement in verdict.REQUIREMENTS.items():
            best = max(requirement.required or 0, requirement.wanted or 0)
            self.assertIn(verdict.judge([best] * 15, requirement), ("required", "wanted", "told only"), row)
            if requirement.required and requirement.wanted:
                self.assertGreaterEqual(requirement.wanted, requirement.required, row)


class Table(unittest.TestCase):
    def table(self, rows):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows"
            path.touch()
            for row, values in rows:
                subprocess.run([sys.executable, "-c", "import sys, json, verdict; verdict.record(sys.argv[1], json.loads(sys.argv[2]))",
                                row, json.dumps(values)], check=True, cwd=BENCH, env={**os.environ, "LOCKSTEP_BENCH_ROWS": str(path)})
            return subprocess.run([sys.executable, BENCH / "verdict.py", path], capture_output=True, text=True)

    def test_missed_rows_come_again_at_the_end_and_the_code_is_one(self):
        run = self.table([(ROW, pairs(0.5)), (TCP, pairs(1.3))])
        self.assertEqual(run.returncode, 1, run.stderr)
        table, end = run.stdout.split("\n\n")
        self.assertIn("2 measured, 1 missed", end)
        self.assertIn(ROW, end)
        self.assertNotIn(TCP, end)
        for row in verdict.REQUIREMENTS:
            self.assertIn(row, table)
        self.assertIn("not measured here: needs a GPU", table)

    def test_none_missed(self):
        run = self.table([(ROW, pairs(0.5)), (ROW, pairs(1.0))])  # the last measurement counts
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("1 measured, 0 missed", run.stdout)

    def test_a_row_that_nobody_requires_is_refused(self):
        with self.assertRaises(KeyError):
            verdict.record("no such row", [1.0])


if __name__ == "__main__":
    unittest.main()
