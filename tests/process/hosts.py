#!/usr/bin/env python3
"""Ranks on several hosts: right results, who is let in, which network is used, links that are cut."""
# ctest: PROCESSORS 2 TIMEOUT 300 COST 40
# builds: release

import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import ranks
from namespaces import Hosts, command, enter_own_network
from ranks import Cases, Job

TIMEOUT = 2.0
LIMIT = TIMEOUT + ranks.SLACK
PORT = 4711  # in namespaces of our own


class Token:
    def __init__(self, secret):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".token")
        self.file.write(secret + "\n")
        self.file.flush()

    def arguments(self):
        return ["--token-file", self.file.name]


token = Token("correct horse battery staple")
wrong_token = Token("correct horse battery stable")


def job_on(hosts, per_host, arguments, special=None, with_token=True, timeout=TIMEOUT):
    world = per_host * len(hosts.hosts)
    inside = {rank: hosts[rank // per_host].enter for rank in range(world)}
    everybody = ["--timeout", timeout, *arguments, *(token.arguments() if with_token else [])]
    return Job(world, everybody, special, inside, (hosts.network.address(0), PORT))


def right_results(count, collective):
    """Two ranks a host: shared memory inside, TCP between; the same bits as on one host."""
    arguments = ["--transport", "auto", "--collective", collective, "--iterations", 3]
    with Job(2 * count, ["--timeout", 20, *arguments]) as alone:
        alone.expect_success()
        expected = alone.ranks[0].find("done")["hash"]
    with Hosts(count) as hosts, job_on(hosts, 2, [*arguments, "--wire-compress", "on"], timeout=20) as job:
        job.expect_success()
        for r, rank in job.ranks.items():
            done = rank.find("done")
            job.expect(done["hash"] == expected, f"rank {r}: other bits than on one host")
            # In the group of all ranks, and in that of the host. In two levels not everybody talks to everybody.
            job.expect(done["ring_peers"] == 2, f"rank {r} has {done['ring_peers']} rings")
            most = 2 * count - 2
            job.expect(done["tcp_peers"] == most if collective == "all_to_all" else done["tcp_peers"] <= most,
                       f"rank {r} uses TCP with {done['tcp_peers']}")


def bytes_cross_once():
    """Two hosts with two ranks each send what two ranks would: the buffer once, each way."""
    count, iterations = 2_000_003, 4
    arguments = ["--transport", "auto", "--collective", "all_reduce", "--count", count, "--iterations", iterations, "--wire-compress", "off"]
    with Hosts(2) as hosts, job_on(hosts, 2, arguments, timeout=20) as job:
        job.expect_success()
        vectors = 4 * (iterations * count + 300_001)  # the last one is for the hash
        for host in range(2):
            sent = hosts[host].sent_bytes("eth0")
            job.expect(vectors < sent < 1.1 * vectors, f"host {host} sent {sent / vectors:.2f} times the vectors")


def killed_elsewhere(victim, collective):
    """A rank dies in the middle of a collective in two levels: those of its host and of the other name it."""
    arguments = ["--transport", "auto", "--collective", collective, "--count", 2_000_003]
    with Hosts(2) as hosts:
        special = {victim: ["--fault", "kill", "--point", "halfway", "--at", 3]}
        with job_on(hosts, 2, arguments, special) as job:
            began = job.wait_event(victim, "fault")["at"]
            survivors = [r for r in range(4) if r != victim]
            return job.expect_failed(survivors, [victim], began, LIMIT, ["peer lost", "channel closed"])


def shm_between_hosts():
    with Hosts(2) as hosts, job_on(hosts, 1, ["--transport", "shm", "--collective", "all_reduce"]) as job:
        job.wait_ended()
        for r, rank in job.ranks.items():
            job.expect(rank.process.returncode == 1 and "different hosts" in rank.error["message"], f"rank {r}")


def cut(victim, where, collective):
    arguments = ["--transport", "tcp", "--collective", collective, "--count", 2_000_003, "--wire-compress", "on"]
    with Hosts(3) as hosts, job_on(hosts, 1, arguments) as job:
        for r in range(3):
            job.wait_event(r, "iteration", k=3)
        began = time.monotonic()
        if where == "at the switch":
            hosts.network.set_port(victim, "down")
        else:
            hosts[victim].run("ip", "link", "set", "eth0", "down")
        others = [r for r in range(3) if r != victim]
        late = job.expect_failed(others, [victim], began, LIMIT, ["peer lost"])
        return max(late, job.expect_failed([victim], others, began, LIMIT, ["peer lost"]))


def cut_between():
    """Ranks 1 and 2 no longer reach each other; rank 0 reaches both."""
    with Hosts(3) as hosts:
        with job_on(hosts, 1, ["--transport", "tcp", "--collective", "all_reduce", "--count", 2_000_003]) as job:
            for r in range(3):
                job.wait_event(r, "iteration", k=3)
            began = time.monotonic()
            hosts.network.isolate(1)
            hosts.network.isolate(2)
            late = job.expect_failed(range(3), [1, 2], began, LIMIT, ["peer lost"])
            job.expect(len({rank.error["blamed_rank"] for rank in job.ranks.values()}) == 1, "they do not agree")
            return late


def no_token():
    with Hosts(2) as hosts, job_on(hosts, 1, ["--collective", "all_reduce"], with_token=False) as job:
        job.wait_ended([0])
        error = job.ranks[0].error
        job.expect(error["error_code"] == "authentication failed" and "--token-file" in error["message"], "rank 0")


def one_without_token():
    with Hosts(2) as hosts:
        special = {0: token.arguments()}
        with job_on(hosts, 1, ["--collective", "all_reduce"], special, with_token=False) as job:
            job.wait_ended()
            error = job.ranks[1].error
            job.expect(error["error_code"] == "authentication failed" and "--token-file" in error["message"], "rank 1")
            job.expect(job.ranks[0].error["blamed_rank"] == 1, "rank 0 does not miss rank 1")


def one_with_wrong_token():
    with Hosts(2) as hosts:
        special = {0: token.arguments(), 1: wrong_token.arguments()}
        with job_on(hosts, 1, ["--collective", "all_reduce"], special, with_token=False) as job:
            job.wait_ended()
            error = job.ranks[1].error
            job.expect(error["error_code"] == "authentication failed" and "token" in error["message"], "rank 1")
            noise = "".join(job.ranks[0].noise)
            job.expect(hosts.network.address(1) in noise and "token" in noise, f"rank 0 does not say whom: {noise}")
            job.expect(job.ranks[0].error["blamed_rank"] == 1, "rank 0 does not miss rank 1")


def chosen_network():
    """They meet on one network, where the default route leads, and move their data over another."""
    arguments = ["--collective", "all_reduce", "--iterations", 5]
    with Hosts(2) as hosts:
        hosts.add_network("fast", "10.88.0", "fast0")
        for host in hosts.hosts:
            host.run("ip", "route", "add", "default", "via", "10.77.0.254")
        for interface, prefix, other in (("", "10.77.0.", "fast0"), ("fast0", "10.88.0.", "eth0")):
            before = {name: hosts[1].sent_bytes(name) for name in ("eth0", "fast0")}
            choice = ["--interface", interface] if interface else []
            with job_on(hosts, 1, [*arguments, *choice], timeout=20) as job:
                job.expect_success()
                mesh = job.ranks[1].find("joined")["mesh"]
                job.expect(all(address.startswith(prefix) for address in mesh), f"the mesh is at {mesh}")
                used = {name: hosts[1].sent_bytes(name) - before[name] for name in before}
                used_here = used.pop("eth0" if other == "fast0" else "fast0")
                job.expect(used_here > 5_000_000 and used[other] < 100_000, f"bytes: {used_here} and {used}")
        with job_on(hosts, 1, arguments, {1: ["--interface", "fast9"]}, timeout=20) as job:
            job.wait_ended([1])
            message = job.ranks[1].error["message"]
            job.expect("fast9" in message and "fast0 (10.88.0.2)" in message, "the interfaces there are, are not named")


def unreachable_mesh():
    """Rank 1 listens where rank 2 has no way to: it is named, in time."""
    with Hosts(3) as hosts:
        hosts.add_network("lonely", "10.99.0", "lonely0")
        hosts[2].run("ip", "link", "set", "lonely0", "down")
        hosts[2].run("ip", "route", "add", "default", "via", "10.77.0.254")
        with job_on(hosts, 1, ["--collective", "all_reduce"], {1: ["--interface", "lonely0"]}) as job:
            began = max(job.wait_event(r, "joined")["at"] for r in range(3))
            return job.expect_failed(range(3), [1], began, LIMIT)


def main():
    enter_own_network()
    command("ip", "link", "set", "lo", "up")
    cases = Cases(at_once=3)
    for count in (2, 4):
        for collective in ("all_reduce", "reduce_nodes", "all_to_all"):
            cases.run(f"{count} hosts, {collective}", right_results, count, collective)
    cases.run("every byte crosses once", bytes_cross_once)
    for victim, collective in ((3, "all_reduce"), (0, "all_reduce"), (1, "reduce_scatter_nodes"), (2, "broadcast")):
        cases.run(f"rank {victim} killed in two levels, {collective}", killed_elsewhere, victim, collective)
    cases.run("shared memory between hosts is refused", shm_between_hosts)
    for victim in (1, 0):
        for where in ("at the switch", "at the host"):
            cases.run(f"link of rank {victim} cut {where}", cut, victim, where, "all_reduce")
    for collective in ("barrier", "broadcast", "gather"):
        cases.run(f"link of rank 1 cut, {collective}", cut, 1, "at the switch", collective)
    cases.run("ranks 1 and 2 cut off from each other", cut_between)
    cases.run("no token", no_token)
    cases.run("one rank without a token", one_without_token)
    cases.run("one rank with a wrong token", one_with_wrong_token)
    cases.run("a network is chosen", chosen_network)
    cases.run("a mesh address out of reach", unreachable_mesh)
    cases.finish()


if __name__ == "__main__":
    main()
