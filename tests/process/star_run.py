#!/usr/bin/env python3
"""`lockstep coordinator` and `lockstep worker` end to end: every average checked bit for bit, by the workers themselves
and by a client that shares no code with them; both protocols in one job."""
# ctest: TIMEOUT 120 COST 30

import os
import socket
import subprocess
import sys
import tempfile
import threading
from array import array

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import gradient_client as client
import synthetic
from ranks import SANITIZED, Cases, Failure
from star import ENVIRONMENT, LOCKSTEP, Process, Star

SEED = 1
# A 350M-class model has 24 blocks of width 1024; this one is scaled down.
SHAPE = ["--blocks", 24, "--hidden", 32, "--intermediate", 88, "--vocab", 256]
TINY = dict(blocks=2, hidden=4, intermediate=6, vocab=10)
TINY_SHAPE = [word for name, value in TINY.items() for word in (f"--{name}", value)]


def check(condition, what):
    if not condition:
        raise Failure(what)


def long_run(mode, average, steps, *shape):
    chosen = ["--average", average, "--total-samples", 1023] if mode == "vector" else []
    with Star(4, "--mode", mode, "--steps", steps, *chosen) as star:
        workers = [star.worker(*shape, "--check", name=f"node-{i}") for i in range(4)]
        star.expect_end([star.coordinator, *workers], 0, [f"done: {steps} steps"])
        for worker in workers:
            found = worker.find(r"(\d+) elements checked")
            star.expect(found and int(found[1]) > 0, f"{worker.name} has checked nothing")


def wrong_bits_are_seen():
    """The check that the run stands on: a worker whose gradients are others does not go unnoticed."""
    with Star(2, "--steps", 3) as star:
        workers = [star.worker("--elements", 100, "--check", "--seed", 1 + i) for i in range(2)]
        star.expect_end([star.coordinator, *workers], 1, [r"element 0 should be"])


def parts_of(mode):
    """What a worker sends in a step, in order: message, fields, part of the generator, elements."""
    if mode == "vector":
        return [("GradientPayload", "AveragedGradient", {}, synthetic.VECTOR, 50)]
    sizes = synthetic.block_sizes(TINY["hidden"], TINY["intermediate"])
    parts = [("BlockGradientPayload", "AveragedBlockGradient",
              dict(block_idx=block, num_blocks=TINY["blocks"], component_sizes=sizes), block + 1, sum(sizes))
             for block in reversed(range(TINY["blocks"]))]
    return parts + [("NonBlockGradientPayload", "AveragedNonBlockGradient", dict(component=c), synthetic.COMPONENTS + c,
                     synthetic.component_size(c, TINY["hidden"], TINY["vocab"])) for c in range(3)]


def mixed(mode, average, own):
    """Two workers of ours, one with the original protocol, and the page's client, which computes everything again."""
    steps, total, n = 3, 10, 4
    shape = [*TINY_SHAPE, "--elements", 50]
    chosen = ["--average", average, "--total-samples", total] if mode == "vector" else []
    with Star(n, "--mode", mode, "--steps", steps, *chosen) as star:
        workers = [star.worker(*shape, "--check", name=f"node-{i}") for i in range(2)]
        workers.append(star.worker(*shape, "--seed-protocol", "--mode", mode, name="original"))
        with client.join(star.address, "page", own) as page:
            for step in range(steps):
                if mode == "vector":
                    shard = page.connection.receive("ShardAssignment")
                    check((shard.shard_start, shard.shard_end) == client.shard(total, n, page.worker_id), f"{shard}")
                weights = [b - a for a, b in (client.shard(total, n, i) for i in range(n))]
                for sent, received, fields, part, count in parts_of(mode):
                    all_sent = [synthetic.gradient(SEED, step, i, part, count) for i in range(n)]
                    extra = {}
                    if mode == "vector":
                        samples = weights[page.worker_id]
                        extra = dict(loss=synthetic.loss(SEED, step, page.worker_id), correct=samples // 2, total=samples)
                        if own:
                            page.connection.send("Totals", step=step, **extra)
                    page.connection.send(sent, step=step, worker_id=page.worker_id, gradients=all_sent[page.worker_id],
                                         **fields, **extra)
                    got = page.connection.receive(received)
                    expected = client.average(all_sent, weights if average == "weighted" else None)
                    check(got.gradients.tobytes() == expected.tobytes(), f"{received} of step {step} is another")
            page.connection.receive("Shutdown")
        star.expect_end([star.coordinator, *workers], 0, [f"done: {steps} steps"])


def large(elements):
    """A gradient beyond what the original could carry, in one frame."""
    with Star(2, "--steps", 1, timeout=60) as star:
        workers = [star.worker("--elements", elements, "--check") for _ in range(2)]
        star.expect_end([star.coordinator, *workers], 0, ["done: 1 steps"])


def peak_memory(process):
    with open(f"/proc/{process.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def memory():
    """The coordinator holds two payloads and a window for every worker, not a payload for every worker."""
    workers, elements, mebibyte = 4, 1 << 23, 1 << 20
    with Star(workers, "--steps", 2) as star, client.join(star.address, "page", own=True) as page:
        before = peak_memory(star.coordinator)
        for _ in range(workers - 1):
            star.worker("--elements", elements)
        for step in range(2):
            shard = page.connection.receive("ShardAssignment")
            numbers = dict(step=step, loss=1.0, correct=0, total=shard.shard_end - shard.shard_start)
            page.connection.send("Totals", **numbers)
            page.connection.send("GradientPayload", worker_id=0, gradients=array("f", bytes(4 * elements)), **numbers)
            page.connection.receive("AveragedGradient")
        grown = peak_memory(star.coordinator) - before
        page.connection.receive("Shutdown")
        allowed = 2 * 4 * elements + workers * 8 * mebibyte + 8 * mebibyte
        star.expect(grown <= allowed, f"{grown // mebibyte} MiB, {allowed // mebibyte} are allowed")


def frame_limit():
    with Star(1, "--steps", 1, "--max-frame", "1MiB") as star:
        with client.join(star.address, "page") as page:
            page.connection.receive("ShardAssignment")
            page.connection.send("GradientPayload", step=0, worker_id=0, gradients=[0.0] * (1 << 18), loss=0.0, correct=0,
                                 total=1)
            star.expect_end([star.coordinator], 3, [r"worker 0 \(page, ", "message too large"])


def frames_of_the_original():
    """100MB is what peers of the original protocol take, to the byte."""
    with Star(1, "--steps", 0, "--max-frame", "100MB") as star, client.join(star.address, "page", own=True) as page:
        check(page.welcome.largest_frame == 100_000_000, f"{page.welcome}")


def worker_first():
    """A worker may be started before its coordinator."""
    # Keeps the port for us while nobody listens on it.
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    port = keeper.getsockname()[1]
    changed = threading.Condition()
    worker = Process("worker", [LOCKSTEP, "worker", "--coordinator", f"127.0.0.1:{port}", "--elements", 10, "--timeout", 30],
                     changed)
    with changed:
        changed.wait_for(lambda: worker.ended_at, 0.3)  # it tries, in vain
    coordinator = Process("coordinator", [LOCKSTEP, "coordinator", "--bind", f"127.0.0.1:{port}", "--workers", 1, "--steps",
                                          2], changed)
    try:
        with changed:
            changed.wait_for(lambda: worker.ended_at and coordinator.ended_at, 40)
        check(worker.process.poll() == 0, worker.text + coordinator.text)
    finally:
        worker.end()
        coordinator.end()
        keeper.close()


def tokens():
    with tempfile.TemporaryDirectory() as folder:
        right, wrong = os.path.join(folder, "right"), os.path.join(folder, "wrong")
        for path, text in ((right, "the right one\n"), (wrong, "the wrong one\n")):
            with open(path, "w") as file:
                file.write(text)
        with Star(2, "--steps", 3, "--token-file", right) as star:
            for arguments, said in ((["--token-file", wrong], "wrong token"), ([], "token missing")):
                intruder = star.worker("--elements", 10, *arguments, name="intruder")
                star.expect_end([intruder], 1, [said])
                star.wait_line(star.coordinator, said)
            original = star.worker("--elements", 10, "--seed-protocol", name="original")
            star.expect_end([original], 1)
            workers = [star.worker("--elements", 10, "--check", "--token-file", right),
                       star.worker("--elements", 10, "--check", environment={"LOCKSTEP_TOKEN": "the right one"})]
            star.expect_end([star.coordinator, *workers], 0, ["done: 3 steps"])
            check("the right one" not in star.coordinator.text, "the token is in the log")
        # A worker does not talk to a coordinator that cannot prove the token either.
        with Star(1, "--steps", 1) as star:
            worker = star.worker("--elements", 10, "--token-file", right)
            star.expect_end([worker], 1, ["token"])
        with Star(2, "--steps", 3, "--token-file", right, "--insecure") as star:
            workers = [star.worker("--elements", 10, "--original"), star.worker("--elements", 10)]
            star.expect_end([star.coordinator, *workers], 0, ["done: 3 steps"])


def usage():
    def run(*arguments):
        return subprocess.run([LOCKSTEP, *map(str, arguments)], capture_output=True, text=True, timeout=30, env=ENVIRONMENT,
                              check=False)

    for command in ("coordinator", "worker"):
        text = run(command, "--help").stdout
        check("--timeout" in text and "coordinator" in text, f"{command} --help: {text}")
    for arguments, word in (
        (["coordinator", "--bind", "0.0.0.0:0"], "token"),
        (["coordinator", "--bind", "nonsense"], "--bind"),
        (["coordinator", "--mode", "pigeon"], "pigeon"),
        (["coordinator", "--average", "guess"], "guess"),
        (["coordinator", "--mode", "blocks", "--average", "weighted"], "no counts"),
        (["worker", "--coordinator", "127.0.0.1:1", "--seed-protocol", "--check"], "--check does not go with --original"),
        (["coordinator", "--workers", 0], "--workers"),
        (["coordinator", "--token-file", "/nonexistent"], "/nonexistent"),
        (["worker"], "--coordinator"),
        (["worker", "--coordinator", "nonsense"], "--coordinator"),
    ):
        result = run(*arguments)
        check(result.returncode == 2 and word in result.stderr, f"{arguments}: {result.returncode} {result.stderr}")
    nobody = run("worker", "--coordinator", "127.0.0.1:1", "--timeout", 0.3)
    check(nobody.returncode == 1 and "127.0.0.1:1" in nobody.stderr, f"{nobody.returncode} {nobody.stderr}")


def local():
    for mode in ("vector", "blocks"):
        result = subprocess.run([LOCKSTEP, "coordinator", "--local", "--workers", "3", "--steps", "3", "--mode", mode,
                                 "--total-samples", "7", "--check", *map(str, TINY_SHAPE)], capture_output=True, text=True,
                                timeout=60, env=ENVIRONMENT, check=False)
        check(result.returncode == 0 and "done: 3 steps" in result.stdout, f"{mode}: {result.stdout} {result.stderr}")


def nobody_reads():
    """A script that took the address from the first line, and closed the pipe."""
    with subprocess.Popen([LOCKSTEP, "coordinator", "--bind", "127.0.0.1:0", "--workers", "1", "--steps", "3"], stdout=subprocess.PIPE,
                          text=True, env=ENVIRONMENT) as coordinator:
        address = coordinator.stdout.readline().split()[2].rstrip(";")
        coordinator.stdout.close()
        worker = subprocess.run([LOCKSTEP, "worker", "--coordinator", address, "--elements", "100", "--check"], capture_output=True,
                                text=True, timeout=60, env=ENVIRONMENT, check=False)
        code = coordinator.wait(60)
    check(code == 0 and worker.returncode == 0, f"coordinator {code}, worker {worker.returncode}: {worker.stderr}")


def main():
    cases = Cases()
    steps = 20 if SANITIZED else 100
    cases.run(f"4 workers, {steps} steps, 24 blocks", long_run, "blocks", "mean", steps, *SHAPE)
    cases.run("4 workers, vector, mean", long_run, "vector", "mean", 10, "--elements", 100003)
    cases.run("wrong bits are seen", wrong_bits_are_seen)
    for mode in ("vector", "blocks"):
        for own in (False, True):
            average = "mean" if own or mode == "blocks" else "weighted"
            cases.run(f"both protocols in one job, {mode}, {average}", mixed, mode, average, own)
    cases.run("134 MB in one frame", large, 32768 * 1024)
    if not SANITIZED:  # a sanitizer's own memory is counted, too
        cases.run("memory", memory)
    cases.run("--max-frame", frame_limit)
    cases.run("--max-frame 100MB", frames_of_the_original)
    cases.run("the worker comes first", worker_first)
    cases.run("nobody reads the coordinator's lines", nobody_reads)
    cases.run("tokens", tokens)
    cases.run("usage", usage)
    cases.run("--local", local)
    cases.finish()


if __name__ == "__main__":
    main()
