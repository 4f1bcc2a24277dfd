#!/usr/bin/env python3
"""What comes over the network uninvited changes nothing; a member of the job that sends nonsense is named."""
# ctest: PROCESSORS 2 TIMEOUT 200

import os
import socket
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import ranks
from ranks import Cases, Failure, Job

TIMEOUT = 2.0
LIMIT = TIMEOUT + ranks.SLACK
HEADER = b"LSKP\x06\x00\x01\x00"  # of a hello, as far as the length of its body

# What a stranger says after connecting; None: it hangs up.
WORDS = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x00" * 64, HEADER, HEADER + b"\xff\xff\xff\xff",
         HEADER + b"\x40\x00\x00\x00" + b"\x00" * 64, b"LSKP\x63\x00\x01\x00\x00\x00\x00\x00", None]


def visit(addresses, count):
    """`count` strangers at every address; those that stay are returned, to be kept."""
    stay = []
    for host, port in addresses:
        for i in range(count):
            stranger = socket.create_connection((host, port), timeout=10)
            words = WORDS[i % len(WORDS)]
            if words is None:
                stranger.close()
                continue
            try:
                stranger.sendall(words)
            except ConnectionError:  # turned away already
                pass
            stay.append(stranger)
    return stay


def leave(strangers):
    for stranger in strangers:
        stranger.close()


def nonsense(how, codes):
    arguments = ["--transport", "tcp", "--collective", "all_reduce", "--timeout", TIMEOUT]
    with Job(3, arguments, {2: ["--fake", how]}) as job:
        began = job.wait_event(2, "fault")["at"]
        return job.expect_failed([0, 1], [2], began, LIMIT, codes)


def visited_job(transport, hold_at, count, inside=None):
    arguments = ["--transport", transport, "--collective", "all_reduce", "--timeout", 10, "--iterations", 6]
    hold = {r: ["--hold-at", hold_at] for r in range(3)}
    with Job(3, arguments, hold, inside) as job:
        for r in range(3):
            job.wait_event(r, "held")
        mesh = [address.rsplit(":", 1) for address in job.wait_event(0, "joined")["mesh"]]
        strangers = visit([(job.master[0], job.master[1]), *((host, int(port)) for host, port in mesh)], count)
        try:
            for rank in job.ranks.values():
                rank.tell()
            job.expect_success()
        finally:
            leave(strangers)


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trickling_strangers(count, rate, seconds):
    """Strangers of several addresses that send a byte now and then cost the rank hardly anything."""
    arguments = ["--transport", "tcp", "--collective", "all_reduce", "--timeout", 20, "--iterations", 6]
    with Job(2, arguments, {r: ["--hold-at", 3] for r in range(2)}) as job:
        for r in range(2):
            job.wait_event(r, "held")
        strangers = [socket.create_connection(job.master, timeout=10, source_address=(f"127.0.0.{2 + i % 4}", 0))
                     for i in range(count)]
        try:
            pid = job.ranks[0].process.pid
            before, start = cpu_seconds(pid), time.monotonic()
            sent = 0
            while (elapsed := time.monotonic() - start) < seconds:
                while sent < rate * elapsed:
                    try:
                        strangers[sent % count].send(HEADER[sent // count:][:1])
                    except OSError:  # its time was over
                        pass
                    sent += 1
                time.sleep(0.01)
            share = (cpu_seconds(pid) - before) / elapsed
            for rank in job.ranks.values():
                rank.tell()
            job.expect_success()
        finally:
            leave(strangers)
    print(f"        {count} strangers with {rate} bytes a second: {share:.1%} of a core", flush=True)
    # Far from the 25 % of a core that it takes to look at every stranger for every byte.
    if share >= 0.1:
        raise Failure(f"{count} strangers cost {share:.1%} of a core")


def visited_rendezvous():
    arguments = ["--transport", "tcp", "--collective", "all_reduce", "--timeout", 10, "--iterations", 3]
    with Job(3, arguments, start=False) as job:
        job.start(0)
        strangers = visit([job.master], 200)
        try:
            job.start(2)
            job.start(1)
            job.expect_success()
        finally:
            leave(strangers)


def main():
    cases = Cases()
    cases.run("half a header, then the end", nonsense, "half_header", ["peer lost", "channel closed"])
    cases.run("bytes that are no frame", nonsense, "garbage", ["unexpected message"])
    cases.run("a frame of another collective", nonsense, "wrong_frame", ["collective mismatch"])
    cases.run("200 strangers at the rendezvous", visited_rendezvous)
    for transport in ("tcp", "shm"):
        cases.run(f"{transport}: 200 strangers at every port, before the first collective", visited_job, transport, 1, 200)
        cases.run(f"{transport}: 200 strangers at every port, later", visited_job, transport, 3, 200)
    if not ranks.SANITIZED:
        cases.run("1000 strangers that send a byte now and then", trickling_strangers, 1000, 400, 3)
    if not ranks.SANITIZED:  # a sanitizer needs descriptors to look at memory
        few = {r: ["prlimit", "--nofile=80"] for r in range(3)}
        cases.run("strangers use up all descriptors", visited_job, "tcp", 3, 200, few)
    cases.finish()


if __name__ == "__main__":
    main()
