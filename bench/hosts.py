#!/usr/bin/env python3
"""All-reduce between hosts with several ranks each: network namespaces whose links are shaped in both directions. Ranks of a
namespace share memory. `direct` and `two_level` beside each other, encrypted and with --plain-wire, and as users have it, encrypted and
compressed where that pays; Open MPI's tuned and HAN collectives, and raw TCP with one connection between every two hosts; all in turn,
the median of the rounds' medians. The numbers are like a gradient's: what is compressed depends on them. Needs root.

The link allows 2(H-1)/H of the buffer per host. Where two cores cannot fill it, raw TCP is what can be had. The code is 1 when a row
is missed that verdict.py requires; 15 rounds or more are judged.

usage: bench/hosts.py [--shapes 2x1,2x2,3x2,2x4] [--rates 1e9,1e10] [--bytes 26214400] [--rounds 3]"""

import argparse
import functools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import verdict

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", Path(__file__).parent.parent / "build/release")).resolve()


def command(*words):
    subprocess.run([str(word) for word in words], check=True)


class Network:
    """A switch in a namespace of its own, and a host at each of its ports."""

    def __init__(self, count, rate):
        self.tag = f"lsh{os.getpid()}"
        self.switch = f"{self.tag}-switch"
        self.names = [f"{self.tag}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        try:
            self.build(rate)
        except BaseException:
            self.close()
            raise

    def build(self, rate):
        command("ip", "netns", "add", self.switch)
        self.inside(self.switch, "ip", "link", "add", "name", "bridge", "type", "bridge")
        self.inside(self.switch, "ip", "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            command("ip", "netns", "add", name)
            command("ip", "link", "add", f"port{i}", "netns", self.switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            self.inside(self.switch, "ip", "link", "set", f"port{i}", "master", "bridge", "up")
            self.inside(name, "ip", "address", "add", f"{self.addresses[i]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.inside(name, "ip", "link", "set", device, "up")
            for place, device in ((name, "eth0"), (self.switch, f"port{i}")):
                self.inside(place, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate:.0f}bit", "burst", "256kb",
                            "latency", "50ms")

    def inside(self, name, *words):
        command("ip", "netns", "exec", name, *words)

    def close(self):
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def lockstep(network, per_host, size, folder, *options):
    world = per_host * len(network.names)
    ranks = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": network.addresses[0],
                       "MASTER_PORT": "29500"}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", network.names[rank // per_host], BUILD / "lockstep", "bench",
                                       "allreduce", "--transport", "auto", "--token-file", folder / "token", "--bytes", str(size),
                                       "--iterations", "5", "--json", *options],
                                      env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"a rank failed: {outputs}")
    row = json.loads(outputs[0][0])
    return row["median_us"] / 1e3 if row["correct"] else sys.exit(f"wrong result: {row}")


def median_of(words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, **options)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(rows) != 1 or not rows[0]["correct"]:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout}")
    return rows[0]["median_us"] / 1e3


def raw_tcp(network, size):
    places = ",".join(f"{name}={address}" for name, address in zip(network.names, network.addresses))
    return median_of([BUILD / "bench/raw_tcp", "--hosts", places, size])


def open_mpi(network, per_host, size, folder, han):
    """The daemons are started by a script in place of ssh; every host has a name of its own."""
    agent = folder / "agent"
    lines = ["#!/bin/sh", "case $1 in"]
    lines += [f"{address}) name={name};;" for name, address in zip(network.names, network.addresses)]
    lines += ["esac", "shift", "exec ip netns exec $name unshare --uts sh -c \"hostname $name; $*\""]
    agent.write_text("\n".join(lines) + "\n")
    agent.chmod(0o755)
    hosts = ",".join(f"{address}:{per_host}" for address in network.addresses)
    words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--host", hosts, "-n",
             per_host * len(network.names), "--mca", "plm_rsh_agent", agent, "--mca", "pml", "ob1", "--mca", "btl",
             "tcp,vader,self", "--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24",
             "--mca", "mpi_yield_when_idle", 1, *(["--mca", "coll_han_priority", 100, "-x", "APART=1"] if han else []), BUILD / "bench/openmpi_allreduce",
             size]
    shell = " ".join(str(word) for word in words)
    return median_of(["ip", "netns", "exec", network.names[0], "unshare", "--uts", "sh", "-c",
                      f"hostname {network.names[0]}; exec {shell}"])


def measure(shape, rate, options, folder):
    count, per_host = (int(word) for word in shape.split("x"))
    size = options.bytes
    network = Network(count, rate)
    ours = functools.partial(lockstep, network, per_host, size, folder)
    whole = ("--wire-compress", "off")
    subjects = {
        "raw TCP": lambda: raw_tcp(network, size),
        "direct": lambda: ours("--algorithm", "direct", "--plain-wire", *whole),
        "two_level": lambda: ours("--algorithm", "two_level", "--plain-wire", *whole),
        "direct, encrypted": lambda: ours("--algorithm", "direct", *whole),
        "two_level, encrypted": lambda: ours("--algorithm", "two_level", *whole),
        "by default": ours,
    }
    if per_host == 1:  # there is one level
        subjects.pop("two_level"), subjects.pop("two_level, encrypted")
    if (BUILD / "bench/openmpi_allreduce").exists() and not options.no_mpi:
        subjects["Open MPI tuned"] = lambda: open_mpi(network, per_host, size, folder, han=False)
        subjects["Open MPI HAN"] = lambda: open_mpi(network, per_host, size, folder, han=True)
    times = {name: [] for name in subjects}
    try:
        for _ in range(options.rounds):
            for name, subject in subjects.items():
                try:
                    times[name].append(subject())
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: {error}", file=sys.stderr)
    finally:
        network.close()
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    link = 2 * (count - 1) / count * size * 8 / rate * 1e3
    raw = medians.get("raw TCP", 0)
    limit = raw if raw > 1.1 * link else link
    print(f"{shape} at {rate / 1e9:g} Gbit/s, {size / 2**20:g} MiB: the link allows {link:.1f} ms"
          f"{'' if limit == link else ', raw TCP is the limit'}")
    for name, median in medians.items():
        spread = f"{min(times[name]):.1f} to {max(times[name]):.1f}"
        print(f"  {name:21} {median:8.1f} ms ({spread}) {100 * limit / median:4.0f} % of the limit", flush=True)
    best = min((name for name in medians if name.startswith("Open MPI")), key=medians.get, default=None)
    limits = times["raw TCP"] if limit != link else [link] * options.rounds
    missed = False
    whole = "two_level" if per_host > 1 else "direct"
    rows = [("two_level / link or raw TCP", whole, limits), ("two_level / Open MPI", whole, times.get(best, [])),
            ("by default / Open MPI", "by default", times.get(best, [])),
            ("by default / without compression", "by default", times[f"{whole}, encrypted"])]
    for what, mine, theirs in rows:
        row = f"hosts {shape} {rate / 1e9:g} Gbit/s {what}"
        ratios = [peer / own for own, peer in zip(times[mine], theirs)]
        if ratios and row in verdict.REQUIREMENTS and size == 25 * 2**20:
            missed |= verdict.tell(row, ratios)
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2x1,2x2,3x2,2x4")
    parser.add_argument("--rates", default="1e9,1e10")
    parser.add_argument("--bytes", type=int, default=25 * 2**20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-mpi", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("hosts with several ranks: skipped, needs root and iproute2")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        missed = [measure(shape, float(rate), options, folder) for rate in options.rates.split(",")
                  for shape in options.shapes.split(",")]
    sys.exit(1 if any(missed) else 0)


if __name__ == "__main__":
    main()
