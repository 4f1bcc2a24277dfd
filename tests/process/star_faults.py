#!/usr/bin/env python3
"""A worker or the coordinator dies, is stopped or falls silent: all others end in time and say who it was."""
# ctest: PROCESSORS 2 TIMEOUT 200 COST 30

import math
import os
import signal
import socket
import sys
import threading
import time
from array import array

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import gradient_client as client
import ranks
from ranks import Cases
from star import Star

TIMEOUT = 2.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ELEMENTS = 1 << 20  # 4 MiB: half a payload is more than the sockets hold
FOR_EVER = ["--steps", 1000000]
LARGE = 1 << 24  # more than the coordinator's window and the sockets together


PLACES = {"before": "before", "middle": "in the middle of", "after": "after"}


def puppet_dies(number, pause, own):
    """Two real workers, and one that stands still at a known place."""
    with Star(3, *FOR_EVER, timeout=TIMEOUT) as star:
        survivors = [star.worker("--elements", ELEMENTS, name=f"node-{i}") for i in range(2)]
        puppet = star.puppet(pause, ELEMENTS, own)
        star.wait_line(puppet, "^paused$")
        since = puppet.signal(number)
        return star.expect_end([star.coordinator, *survivors], 1, [r"worker \d \(puppet, 127\.0\.0\.1:\d+\)"], since)


def original_is_stopped():
    """It has no heartbeats: only that it owes its part for ten times as long tells that something is wrong."""
    with Star(2, *FOR_EVER, timeout=0.4) as star:
        survivor = star.worker("--elements", 100)
        puppet = star.puppet("before", 100, own=False)
        star.wait_line(puppet, "^paused$")
        since = puppet.signal(STOP)
        return star.expect_end([star.coordinator, survivor], 1, [r"worker \d \(puppet, "], since, 4.0 + ranks.SLACK)


def worker_dies(number, elements):
    """Real workers in the middle of their rounds, which follow each other closely."""
    with Star(3, *FOR_EVER, timeout=TIMEOUT) as star:
        workers = [star.worker("--elements", elements, name=f"node-{i}") for i in range(3)]
        star.wait_line(star.coordinator, "^step ")
        since = workers[1].signal(number)
        return star.expect_end([star.coordinator, workers[0], workers[2]], 1, [r"worker \d \(node-1, "], since)


class Slow:
    """A worker of this process that is alive and brings its payload late."""

    def __init__(self, star):
        self.worker = client.join(star.address, "slow", True)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.live)
        self.thread.start()

    def live(self):
        while not self.stop.wait(self.worker.welcome.timeout_ms / 5000):
            try:
                self.worker.connection.alive()
            except OSError:
                return

    def __enter__(self):
        return self

    def payload(self, gradients):
        shard = self.worker.connection.receive("ShardAssignment")
        numbers = dict(step=shard.step, loss=1.0, correct=0, total=shard.shard_end - shard.shard_start)
        return (client.encode("Totals", **numbers)
                + client.encode("GradientPayload", worker_id=self.worker.worker_id, gradients=gradients, **numbers))

    def bring(self, frames):
        self.quiet()
        try:
            self.worker.connection.send_bytes(frames)
        except OSError:  # the job has ended meanwhile
            pass

    def quiet(self):
        self.stop.set()
        self.thread.join()

    def __exit__(self, *_):
        self.quiet()
        self.worker.connection.close()


def unsent(process, port):
    """Bytes that the process's connection to the port still has to send."""
    descriptors = f"/proc/{process.process.pid}/fd"
    sockets = {os.readlink(f"{descriptors}/{each}") for each in os.listdir(descriptors)}
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in sockets and int(words[2].split(":")[1], 16) == port:
                return int(words[4].split(":")[0], 16)
    return 0


def wait_held_back(star, worker):
    """Until what it has to send stays the same for a while."""
    end = time.monotonic() + ranks.PATIENCE
    same, before = 0, 0
    while same < 20:
        star.expect(time.monotonic() < end, f"{worker.name} is not held back")
        now = unsent(worker, star.address[1])
        same = same + 1 if now == before and now > 0 else 0
        before = now
        time.sleep(0.01)


def held_back_worker_dies(number):
    """A real worker, for certain in the middle of a payload: the coordinator waits for another one."""
    with Star(2, *FOR_EVER, timeout=TIMEOUT) as star, Slow(star) as slow:
        victim = star.worker("--elements", LARGE, name="victim")
        frames = slow.payload(array("f", bytes(4 * LARGE)))
        wait_held_back(star, victim)
        victim.signal(number)
        since = time.monotonic()
        slow.bring(frames)
        return star.expect_end([star.coordinator], 1, [r"worker 1 \(victim, "], since)


def coordinator_dies(number, elements):
    with Star(2, *FOR_EVER, timeout=TIMEOUT) as star:
        workers = [star.worker("--elements", elements, name=f"node-{i}") for i in range(2)]
        star.wait_line(star.coordinator, "^step ")
        since = star.coordinator.signal(number)
        return star.expect_end(workers, 1, ["coordinator"], since)


def dripping_member():
    """A payload that never ends is overdue after ten timeouts, however alive its sender is."""
    with Star(2, *FOR_EVER, timeout=0.5) as star, Slow(star) as slow:
        survivor = star.worker("--elements", 100)
        frames = slow.payload([0.0] * 100)
        slow.quiet()
        since = time.monotonic()
        try:
            for byte in frames:
                slow.worker.connection.send_bytes(bytes([byte]))
                time.sleep(0.05)  # this is the fault
        except OSError:
            pass
        return star.expect_end([star.coordinator, survivor], 1, [r"worker 0 \(slow, "], since, 5.0 + ranks.SLACK)


def slow_is_not_dead():
    """A worker that computes for longer than the timeout, and says that it is alive, disturbs nobody."""
    with Star(2, "--steps", 1, timeout=1) as star, Slow(star) as slow:
        worker = star.worker("--elements", 100)
        frames = slow.payload([0.0] * 100)
        time.sleep(2.5)  # this is the fault
        slow.bring(frames)
        star.expect_end([star.coordinator, worker], 0, ["done"])


def all_stop_together():
    """As in a virtual machine that is paused: nobody was silent, so nobody is dead."""
    with Star(2, *FOR_EVER, timeout=TIMEOUT) as star:
        workers = [star.worker("--elements", 100) for _ in range(2)]
        star.wait_line(star.coordinator, "^step ")
        everybody = [star.coordinator, *workers]
        for each in everybody:
            each.signal(STOP)
        time.sleep(2.5 * TIMEOUT)  # this is the fault
        before = len(star.coordinator.lines)
        for each in everybody:
            each.signal(signal.SIGCONT)
        star.wait(lambda: len(star.coordinator.lines) > before, "sign of life")
        star.expect(not any(each.ended_at for each in everybody), "somebody gave up")
        star.expect(star.coordinator.lines[-1].startswith("step "), "they do not go on")
        star.coordinator.signal(signal.SIGINT)
        star.expect_end([star.coordinator], 128 + signal.SIGINT)


def non_finite(value, said):
    """Everything is named, everywhere, and the code is 3."""
    with Star(3, *FOR_EVER, timeout=TIMEOUT) as star, Slow(star) as slow:
        workers = [star.worker("--elements", 1000, name=f"node-{i}") for i in range(2)]
        gradients = [1.0] * 1000
        gradients[678] = value
        frames = slow.payload(gradients)
        since = time.monotonic()
        slow.bring(frames)
        return star.expect_end([star.coordinator, *workers], 3,
                               [r"worker 0 \(slow, 127.0.0.1:\d+\)", "step 1", "element 678", said], since)


def strangers(count):
    """Real workers work on, bit for bit, whoever else has connected."""
    with Star(2, "--steps", 20) as star:
        visitors = [socket.create_connection(star.address, timeout=10) for _ in range(count)]
        try:
            workers = [star.worker("--elements", 1000, "--check") for _ in range(2)]
            star.expect_end([star.coordinator, *workers], 0, ["done: 20 steps"])
        finally:
            for visitor in visitors:
                visitor.close()


def interrupted(number):
    """A signal stops the coordinator in order, and the workers learn it."""
    with Star(2, *FOR_EVER, timeout=TIMEOUT) as star:
        workers = [star.worker("--elements", 100) for _ in range(2)]
        star.wait_line(star.coordinator, "^step ")
        since = star.coordinator.signal(number)
        star.expect_end([star.coordinator], 128 + number, [], since)
        return star.expect_end(workers, 1, ["told to stop"], since)


def main():
    cases = Cases(at_once=3)
    for number in (KILL, STOP):
        for pause, place in PLACES.items():
            cases.run(f"{number.name} {place} its payload", puppet_dies, number, pause, True)
        cases.run(f"{number.name} in a round", worker_dies, number, ELEMENTS)
        cases.run(f"{number.name} in a small round", worker_dies, number, 100)
        cases.run(f"{number.name} of a worker that is held back", held_back_worker_dies, number)
        cases.run(f"{number.name} of the coordinator", coordinator_dies, number, ELEMENTS)
    for number, pause in ((KILL, "before"), (KILL, "middle"), (KILL, "after"), (STOP, "middle")):
        cases.run(f"{number.name} {PLACES[pause]} an original worker's payload", puppet_dies, number, pause, False)
    cases.run("an original worker is stopped before its payload", original_is_stopped)
    cases.run("a member whose payload never ends", dripping_member)
    cases.run("slow is not dead", slow_is_not_dead)
    cases.run("all stop together", all_stop_together)
    cases.run("NaN", non_finite, math.nan, "nan")
    cases.run("infinity", non_finite, -math.inf, "-inf")
    cases.run("200 strangers that never speak", strangers, 200)
    for number in (signal.SIGINT, signal.SIGTERM):
        cases.run(f"{number.name} to the coordinator", interrupted, number)
    cases.finish()


if __name__ == "__main__":
    main()
