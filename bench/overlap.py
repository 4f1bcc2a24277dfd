#!/usr/bin/env python3
"""How much communication the backward pass hides: two workers in network namespaces joined by a link of 1 Gbit/s, one
thread each, with and without overlap, in turn. The weights must be equal before anything is counted. Needs root.

What can be hidden is bounded: a bucket cannot start before it is final, and the last one not before backward ends. The
bound is computed from the model: parameters become final at an even pace through backward (they are most of its work),
and the link carries one bucket after another.

usage: bench/overlap.py [--model tiny] [--steps 12] [--rounds 3] [--bucket-mb 1]"""

import argparse
import json
import os
import pathlib
import re
import secrets
import statistics
import subprocess
import sys
import tempfile

from ddp import BATCH, FLAGS, SHAPES, WARMUP, write_data
from step import BUILD

RATE = 1e9  # bits per second
WANTED = 0.8


class Hosts:
    """Two network namespaces joined by a shaped pair of links."""

    def __init__(self):
        tag = f"lso{os.getpid()}"
        self.names = [f"{tag}-0", f"{tag}-1"]
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "link", "add", "eth0", "netns", self.names[0], "type", "veth", "peer", "name", "eth0", "netns",
                        self.names[1]], check=True)
        for i, name in enumerate(self.names):
            inside = ["ip", "netns", "exec", name]
            subprocess.run([*inside, "ip", "address", "add", f"10.78.0.{i + 1}/24", "dev", "eth0"], check=True)
            for device in ("lo", "eth0"):
                subprocess.run([*inside, "ip", "link", "set", device, "up"], check=True)
            subprocess.run([*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{RATE:.0f}bit", "burst",
                            "256kb", "latency", "50ms"], check=True)

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(hosts, model, options, folder, overlap):
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    shape = [word for pair in zip(FLAGS, SHAPES[model]) for word in pair]
    command = [BUILD / "lockstep", "train", "--data", folder / f"{model}.bin", *shape, "--steps", options.steps, "--global-batch",
               2 * BATCH, "--micro-batch", BATCH, "--threads", 1, "--eval-every", 0, "--transport", "tcp", "--token-file", token,
               "--bucket-mb", options.bucket_mb, "--overlap" if overlap else "--no-overlap", "--log", "json"]
    ranks = []
    for rank, name in enumerate(hosts.names):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29501"}
        core = sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, "taskset", "-c", str(core), *map(str, command)],
                                      env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"a worker failed: {outputs}")
    lines = outputs[0][0].splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")][WARMUP:]
    median = {name: statistics.median(row["phases"][0][name] for row in rows) for name in rows[0]["phases"][0]}
    median["step"] = statistics.median(row["seconds"] for row in rows)
    buckets = int(re.search(r"(\d+) buckets?", outputs[0][1])[1])
    return lines[-1], median, buckets


def hidden_at_most(communication, backward, buckets):
    """Buckets become final evenly through backward and then take the link one after another."""
    free = 0.0
    for bucket in range(buckets):
        free = max(free, backward * (bucket + 1) / buckets) + communication / buckets
    return communication - (free - backward)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket-mb", default="1")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("overlap: skipped, needs root")
        return
    hosts = Hosts()
    shares = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_data(options.model, folder)
            print(f"{'step with':>10}{'without':>10}{'backward':>10}{'link time':>11}{'exposed':>10}{'hidden':>9}{'bound':>8}{'share':>7}"
                  "   (ms)")
            for _ in range(options.rounds):
                plain_weights, plain, buckets = run(hosts, options.model, options, folder, False)
                weights, with_overlap, _ = run(hosts, options.model, options, folder, True)
                if weights != plain_weights:
                    sys.exit("overlap changed the weights")
                hidden = plain["communication"] - with_overlap["communication"]
                bound = hidden_at_most(plain["communication"], plain["backward"], buckets)
                shares.append(hidden / bound)
                numbers = (with_overlap["step"], plain["step"], plain["backward"], plain["communication"],
                           with_overlap["communication"], hidden, bound)
                widths = (10, 10, 10, 11, 10, 9, 8)
                print("".join(f"{1e3 * number:>{width}.1f}" for number, width in zip(numbers, widths)) + f"{hidden / bound:>7.0%}",
                      flush=True)
    finally:
        hosts.close()
    print(f"hidden of what can be: {statistics.median(shares):.0%} (wanted {WANTED:.0%})")
    sys.exit(statistics.median(shares) < WANTED)


if __name__ == "__main__":
    main()
