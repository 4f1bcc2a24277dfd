#!/usr/bin/env python3
"""Searches with all fuzzers at once for some minutes and says how many inputs they have run.

    cmake --preset fuzz && cmake --build --preset fuzz && scripts/fuzz.py --minutes 5

Every job has a corpus of its own in a temporary folder, which begins with the kept inputs. An input that crashes, hangs or leaks is kept in
--found, and the exit code is 1. On a machine without a compiler: --pack FOLDER here, --bin FOLDER there. Both-ends fuzzers, whose inputs are a hostile process beside honest ones, get their own share of the cores.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def parse():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--minutes", type=float, default=5, help="how long to search [5]")
    flags.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time [one per core]")
    flags.add_argument("--both-ends", type=float, default=0.6, metavar="SHARE", help="of the jobs, for fuzzers named hostile_* [0.6]")
    flags.add_argument("--bin", type=Path, default=ROOT / "build/fuzz/tests", help="where the programs are")
    flags.add_argument("--corpus", type=Path, default=ROOT / "tests/fuzz/corpus", help="the kept inputs, a folder for each fuzzer")
    flags.add_argument("--pack", type=Path, metavar="FOLDER", help="only put programs and libraries there, to run them elsewhere with --bin FOLDER")
    flags.add_argument("--found", type=Path, default=ROOT / "build/fuzz/found", help="for inputs that fail")
    return flags.parse_args()


class Job:
    """One fuzzer on one core."""

    def __init__(self, program, options, folder, seconds, number):
        self.name = program.name.removesuffix("_fuzz")
        work = Path(folder) / f"{self.name}_{number}"
        work.mkdir()
        self.log = Path(folder) / f"{self.name}_{number}.log"
        command = [program, f"-max_total_time={max(1, round(seconds))}", "-timeout=20", "-print_final_stats=1", "-rss_limit_mb=4096",
                   f"-artifact_prefix={options.found}/{self.name}-", work, options.corpus / self.name]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT,
                                            env={**os.environ, "LD_LIBRARY_PATH": str(program.parent / "lib")})

    def result(self):
        """The inputs that it has run, and whether none failed."""
        code = self.process.wait()
        text = self.log.read_text(errors="replace")
        counts = re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)
        if code != 0 or not counts:
            print(f"--- {self.name} (exit code {code})\n" + text[-6000:])
        return int(counts[-1]) if counts else 0, code == 0 and bool(counts)


def plan(programs, jobs, seconds):
    """Rounds of jobs: with fewer jobs than programs, the programs take turns."""
    rounds = -(-len(programs) // jobs)
    if rounds <= 1:
        return [[(programs[i % len(programs)], seconds, i) for i in range(jobs)]] if programs else []
    return [[(program, seconds / rounds, 0) for program in programs[i::rounds]] for i in range(rounds)]


def pack(options):
    """Puts the programs, stripped, and the libraries that they need into a folder, for a machine that has no compiler."""
    libraries = options.pack / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    for program in options.bin.glob("*_fuzz"):
        subprocess.run(["strip", "-o", options.pack / program.name, program], check=True)
        listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        for path in re.findall(r"=> (/\S+)", listed):
            # Those of the C library belong to their machine's loader.
            if not re.match(r"(libc|libm|libpthread|libdl|librt|libresolv|ld-linux.*)\.so", Path(path).name):
                shutil.copy(path, libraries)
    size = sum(file.stat().st_size for file in options.pack.rglob("*") if file.is_file())
    print(f"{options.pack}: {size / 2**20:.0f} MiB")


def main():
    options = parse()
    programs = sorted(options.bin.glob("*_fuzz"))
    if not programs:
        sys.exit(f"error: no fuzzers in {options.bin}")
    if options.pack:
        pack(options)
        return 0
    options.found.mkdir(parents=True, exist_ok=True)
    groups = {"both ends": [p for p in programs if p.name.startswith("hostile_")],
              "machines and codecs": [p for p in programs if not p.name.startswith("hostile_")]}
    share = max(1, round(options.jobs * options.both_ends))
    jobs_of = {"both ends": share, "machines and codecs": max(1, options.jobs - share)}
    totals = {name: {} for name in groups}
    good = True
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as folder:
        plans = {name: plan(found, jobs_of[name], 60 * options.minutes) for name, found in groups.items()}
        running = {}
        while plans or running:
            for name in list(plans):
                if name not in running and plans[name]:
                    running[name] = [Job(program, options, folder, seconds, number) for program, seconds, number in plans[name].pop(0)]
                if not plans[name]:
                    del plans[name]
            for name in list(running):
                if any(job.process.poll() is None for job in running[name]):
                    continue
                for job in running.pop(name):
                    count, passed = job.result()
                    good = good and passed
                    totals[name][job.name] = totals[name].get(job.name, 0) + count
            time.sleep(0.2)
    seconds = time.monotonic() - begin
    for name, counts in totals.items():
        print(f"{name}: {sum(counts.values()):,} inputs in {seconds:.0f} s")
        for fuzzer, count in sorted(counts.items()):
            print(f"  {fuzzer:24} {count:>13,}")
    print("no input failed" if good else f"inputs failed: see {options.found}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
