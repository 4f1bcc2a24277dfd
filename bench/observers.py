#!/usr/bin/env python3
"""What it costs a run to be looked at: time per step with nothing, with a live page and 0, 1 or 20 readers, with event files for
TensorBoard, and what the flight recorder takes of a step. Steps are short on purpose, so that observers have many lines to take;
the cost per step does not grow with the step.

The runs of a round come one after the other, and rounds repeat: a host whose speed drifts does not favour one of them. What is told is
the median over rounds of the difference to the run of the same round without observers. All runs must end with the same weights, or
nothing counts. The recorder cannot be turned off: its records in a step are counted and one record is timed.

usage: bench/observers.py [--rounds 7] [--steps 4000] [--workers 1] [--build build/release]"""

import argparse
import json
import pathlib
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHAPE = ["--hidden", "32", "--layers", "1", "--heads", "2", "--intermediate", "48", "--context", "32", "--global-batch", "6",
         "--micro-batch", "2", "--threads", "1", "--eval-every", "0", "--save-every", "0"]
VARIANTS = {"nothing": None, "page, nobody looks": 0, "page, 1 reader": 1, "page, 20 readers": 20, "event files": None}


class Reader(threading.Thread):
    """Asks as the page does: what the run does and which steps are new, once a second."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.done = url, threading.Event()
        self.start()

    def run(self):
        after = 0
        while not self.done.wait(1):
            try:
                urllib.request.urlopen(self.url + "api/run", timeout=10).read()
                steps = json.load(urllib.request.urlopen(f"{self.url}api/steps?after={after}", timeout=10))["step"]
                after = steps[-1] if steps else after
            except OSError:
                return


def train(options, text, out, *arguments, readers=0):
    """Seconds of steps and of processor per step, and the weights."""
    command = [options.build / "lockstep", "train", "--data", text, *SHAPE, "--steps", options.steps, "--workers", options.workers, "--out", out,
               *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    asking = []
    said = []
    for line in run.stderr:
        said.append(line)
        if match := re.search(r"page: (http://\S+)", line):
            asking = [Reader(match[1]) for _ in range(readers)]
    weights = run.stdout.read().strip().splitlines()[-1]
    if run.wait() != 0:
        sys.exit("".join(said))
    for reader in asking:
        reader.done.set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = [row["seconds"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "event" not in row]
    times = [row["time"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if row.get("event") in ("started", "ended")]
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": (times[-1] - times[0]) / len(steps), "processor": processor / len(steps), "weights": weights}


def records_of_a_step(options, text, out):
    """Phases and collectives of rank 0 in a step, from its own recorder."""
    run = subprocess.Popen([str(word) for word in (options.build / "lockstep", "train", "--data", text, *SHAPE, "--steps", 10**6, "--workers",
                                                   max(2, options.workers), "--out", out, "--page", 0)],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = next(re.search(r"page: (http://\S+)", line)[1] for line in run.stderr if "page: " in line)
        rank = {"phases": []}
        while len(rank["phases"]) < 500:
            time.sleep(0.1)
            ranks = json.load(urllib.request.urlopen(url + "api/flight", timeout=10))["ranks"]
            rank = next((each for each in ranks if each["rank"] == 0), rank)
    finally:
        run.send_signal(signal.SIGINT)
        run.communicate()

    def per_step(entries):
        steps = [entry["step"] for entry in entries]
        return statistics.median(steps.count(step) for step in set(steps) if min(steps) < step < max(steps))

    return {"phases": per_step(rank["phases"]), "collectives": per_step(rank["collectives"])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--build", type=pathlib.Path, default=REPOSITORY / "build" / "release")
    options = parser.parse_args()
    subprocess.run(["cmake", "--build", options.build, "--target", "lockstep", "flight_records"], check=True, stdout=subprocess.DEVNULL)
    found = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = folder / "text.txt"
        text.write_text("".join(f"{i} small foxes sat under {i * 7 % 11} tall trees and sang about number {i * i}.\n" for i in range(300)))
        for number in range(options.rounds):
            for name, readers in VARIANTS.items():
                arguments = ["--tensorboard"] if name == "event files" else [] if readers is None else ["--page", 0]
                found[name].append(train(options, text, folder / f"{number}-{name.replace(' ', '-')}", *arguments, readers=readers or 0))
        hashes = {run["weights"] for runs in found.values() for run in runs}
        if len(hashes) != 1:
            sys.exit(f"the weights differ: {hashes}")
        records = records_of_a_step(options, text, folder / "records")
    print(f"{hashes.pop()}\n\n{options.rounds} rounds of {options.steps} steps, workers: {options.workers}; microseconds per step\n")
    print(f"| {'':<18} | wall clock | more | processor | more |\n|---|---|---|---|---|")
    for name, runs in found.items():
        cells = []
        for kind in ("wall", "processor"):
            cells.append(f"{statistics.median(run[kind] for run in runs) * 1e6:.0f}")
            cells.append(f"{statistics.median(run[kind] - plain[kind] for run, plain in zip(runs, found['nothing'])) * 1e6:+.1f}")
        print(f"| {name:<18} | {' | '.join(cells)} |")
    one = json.loads(subprocess.run([options.build / "bench" / "flight_records"], check=True, capture_output=True, text=True).stdout)
    cost = (records["phases"] * one["phase_ns"] + records["collectives"] * one["collective_ns"]) / 1e3
    print(f"\nflight recorder: {records['phases']:.0f} phases of {one['phase_ns']:.0f} ns and {records['collectives']:.0f} collectives of "
          f"{one['collective_ns']:.0f} ns in a step of {max(2, options.workers)} workers: {cost:.2f} microseconds")


if __name__ == "__main__":
    main()
