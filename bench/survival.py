#!/usr/bin/env python3
"""What it costs to lose a worker, and to let one join: from the change to the next finished step, beside the time that a
step takes with the workers that are left. The weights of every run are those of one worker alone, or nothing counts.

  kill   kill -9 of a worker on this host; required: a step and 0.5 s
  stop   SIGSTOP of a worker; required: the timeout more
  join   a worker joins a run whose state has --state-mb; the others are to pause for 1 s at most

Every line is the median of --rounds. The code is 1 when one is short of what is required; verdict.py has the rows, too.

usage: bench/survival.py [--workers 3] [--rounds 5] [--timeout 3] [--state-mb 500] [--only kill,stop,join] [--build DIR]"""

import argparse
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import verdict

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SMALL = ["--hidden", "256", "--layers", "4", "--context", "128", "--global-batch", "16", "--micro-batch", "2"]


def shape_for(state_mb):
    """A model whose parameters and moments have so many MB: nearly all of it in its layers."""
    hidden, layers = 512, max(1, round(state_mb * 1e6 / 12 / (4 * 512 * 512 + 3 * 512 * 1536)))
    return ["--hidden", str(hidden), "--layers", str(layers), "--context", "16", "--global-batch", "4", "--micro-batch", "1"]


class Run:
    """`lockstep train` with several workers, and the times at which its steps were done."""

    def __init__(self, arguments, folder, options):
        self.folder = folder / "out"
        self.log = open(folder / "log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [options.lockstep, "train", "--data", str(options.data), "--eval-every", "0", "--save-every", "0", "--log", "plain",
             "--timeout", str(options.timeout), "--out", str(self.folder), *arguments], stdout=self.log, stderr=self.log)
        self.seen = {}  # step: when it was first seen

    def look(self):
        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            fields = json.loads(line) if line.endswith("}") else {}
            if "loss" in fields:
                self.seen.setdefault(fields["step"], (time.monotonic(), fields))

    def wait_for(self, step, limit=120):
        end = time.monotonic() + limit
        while step not in self.seen:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"step {step} was not reached:\n{self.output()}")
            self.look()
            time.sleep(0.002)
        return self.seen[step][0]

    def events(self):
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [fields for fields in map(json.loads, lines) if "event" in fields]

    def workers(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="utf-8")
        return [int(pid) for pid in children.split()]

    def output(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def finish(self, limit=300):
        code = self.process.wait(limit)
        text = self.output()
        hashes = set(re.findall(r"(?m)^weights (\S+)", text))
        if code != 0 or len(hashes) != 1:
            sys.exit(f"exit code {code}, {hashes}\n{text}")
        return hashes.pop()


def hash_alone(arguments, folder, options):
    return Run([*arguments, "--workers", "1"], folder, options).finish()


def lose(number, options, folder, steps=24, at=8):
    """Seconds from the signal to the next finished step, and what a step takes after it."""
    run = Run([*SMALL, "--steps", str(steps), "--workers", str(options.workers)], folder, options)
    run.wait_for(at)
    victim = run.workers()[-1]
    begin = time.monotonic()
    os.kill(victim, number)
    done = at
    while done in run.seen and run.seen[done][0] <= begin:
        done += 1
    after = run.wait_for(done) - begin
    run.wait_for(steps)
    times = [run.seen[step][0] for step in sorted(run.seen)]
    later = [b - a for a, b in zip(times[done:], times[done + 1:])]
    return after, statistics.median(later), run.finish()


def join(options, folder, steps=14, at=4):
    """How much longer than the median the longest step took while a worker joined."""
    shape = [*shape_for(options.state_mb), "--steps", str(steps)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Run([*shape, "--workers", "2", "--listen", f"127.0.0.1:{port}"], folder, options)
    run.wait_for(at)
    joiner = subprocess.Popen([options.lockstep, "train", "--join", f"127.0.0.1:{port}", "--data", str(options.data)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run.wait_for(steps)
    hashed = run.finish()
    joiner.wait(60)
    joined = [event for event in run.events() if event["event"] == "joined"]
    if not joined:
        sys.exit(f"nobody joined in time:\n{run.output()}")
    times = [run.seen[step][0] for step in sorted(run.seen)]
    gaps = [b - a for a, b in zip(times, times[1:])]
    return joined[0]["seconds"], max(gaps), statistics.median(gaps), hashed


def judge(line, row, ratios):
    """Whether the median of what is allowed over what it took is short of 1. No row: nothing is required of this size."""
    short = statistics.median(ratios) < 1
    print(f"{line}: {'SHORT' if short else 'ok'}", flush=True)
    if row:
        verdict.tell(row, ratios)
    return short


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=verdict.SURVIVAL_ROUNDS)
    parser.add_argument("--timeout", type=float, default=3)
    parser.add_argument("--state-mb", type=float, default=500)
    parser.add_argument("--only", default="kill,stop,join")
    parser.add_argument("--build", default=str(REPOSITORY / "build/release"))
    options = parser.parse_args()
    options.lockstep = str(pathlib.Path(options.build) / "lockstep")
    chosen = options.only.split(",")
    short = False
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        options.data = place / "text"
        options.data.write_text("a little text that nobody needs to understand. " * 4000, encoding="utf-8")

        def folder(name):
            path = place / name
            path.mkdir()
            return path

        if "kill" in chosen or "stop" in chosen:
            alone = hash_alone([*SMALL, "--steps", "24"], folder("alone"), options)
        for name, number, allowed in (("kill", signal.SIGKILL, 0.5), ("stop", signal.SIGSTOP, 0.5 + options.timeout)):
            if name not in chosen:
                continue
            rounds = [lose(number, options, folder(f"{name}{i}")) for i in range(options.rounds)]
            if {hashed for _, _, hashed in rounds} != {alone}:
                sys.exit(f"{name}: the weights differ from those of one worker")
            after = statistics.median(after for after, _, _ in rounds)
            step = statistics.median(step for _, step, _ in rounds)
            beyond = statistics.median(after - step for after, step, _ in rounds)
            short |= judge(f"{name}: the next step is done after {after:.2f} s; a step takes {step:.2f} s then; {beyond:.2f} s beyond it "
                           f"(at most {allowed:.1f})", verdict.SURVIVAL_ROWS[name], [(step + allowed) / after for after, step, _ in rounds])
        if "join" in chosen:
            alone = hash_alone([*shape_for(options.state_mb), "--steps", "14"], folder("large"), options)
            rounds = [join(options, folder(f"join{i}")) for i in range(options.rounds)]
            if {hashed for _, _, _, hashed in rounds} != {alone}:
                sys.exit("join: the weights differ from those of one worker")
            pause = statistics.median(pause for pause, _, _, _ in rounds)
            longest = statistics.median(longest for _, longest, _, _ in rounds)
            step = statistics.median(step for _, _, step, _ in rounds)
            short |= judge(f"join of {options.state_mb:.0f} MB of state: longest time between steps {longest:.2f} s, median {step:.2f} s; "
                           f"the others pause for {pause:.2f} s (at most 1)", verdict.SURVIVAL_ROWS["join"] if options.state_mb == 500 else None,
                           [1 / max(pause, 1e-3) for pause, _, _, _ in rounds])
    sys.exit(1 if short else 0)


if __name__ == "__main__":
    main()
