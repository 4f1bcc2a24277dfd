#!/usr/bin/env python3
"""Programs of the original gradient protocol and ours work together, in both of its flows: its trainer and its worker at
our coordinator, our worker at both of its servers, one to three of them and mixed, every average compared bit by bit. Then
what each side does wrong."""
# ctest: TIMEOUT 120

import json
import math
import os
import signal
import socket
import struct
import sys
import threading
from array import array

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import gradient_client as client
import original_peers as original
import synthetic
from ranks import Cases, Failure
from star import LOCKSTEP, Process, Star

SEED, STEPS, ELEMENTS, SAMPLES = 1, 3, 50, 10
TINY = dict(blocks=2, hidden=4, intermediate=6, vocab=10)
SHAPE = [word for name, value in {**TINY, "elements": ELEMENTS}.items() for word in (f"--{name}", value)]
SIZES = synthetic.block_sizes(TINY["hidden"], TINY["intermediate"])
COUNTS = [synthetic.component_size(i, TINY["hidden"], TINY["vocab"]) for i in range(3)]
# The parts of a step in the order in which they travel, and their lengths.
PARTS = [(block + 1, sum(SIZES)) for block in reversed(range(TINY["blocks"]))]
PARTS += [(synthetic.COMPONENTS + i, count) for i, count in enumerate(COUNTS)]


def check(condition, what):
    if not condition:
        raise Failure(what)


def same_bits(received, expected, what):
    check(received.tobytes() == expected.tobytes(), f"{what}: {list(received)[:4]}... instead of {list(expected)[:4]}...")


def sent_by_all(step, part, count, workers):
    return [synthetic.gradient(SEED, step, i, part, count) for i in range(workers)]


def ordered(value):
    """Neighbouring floats have neighbouring numbers."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


class Means:
    """Compares averages with those of the original. Ours multiplies with f32(1/n) where the original divides by n: the same
    bits but for three workers, where some elements are neighbours."""

    def __init__(self, ours):
        self.ours, self.lock, self.neighbours = ours, threading.Lock(), 0

    def compare(self, got, step, part, count, workers, what):
        sent = sent_by_all(step, part, count, workers)
        expected = original.average_gradients(sent)
        if not self.ours:
            return same_bits(got, expected, what)
        same_bits(got, client.average(sent, None), what)
        apart = [abs(ordered(a) - ordered(b)) for a, b in zip(got, expected)]
        check(max(apart) <= (1 if workers == 3 else 0), f"{what}: {max(apart)} units in the last place from the original's")
        with self.lock:
            self.neighbours += sum(apart)

    def loss(self, step, workers):
        """In f64 ours, in f32 and one after the other theirs."""
        losses = [synthetic.loss(SEED, step, i) for i in range(workers)]
        weights = shares(SAMPLES, workers)
        if self.ours:
            return client.global_loss(losses, weights)
        total = 0.0
        for loss, weight in zip(losses, weights):
            total = original.f32(total + original.f32(loss * weight))
        return original.f32(total / SAMPLES)


def trainer_steps(peer, means):
    """An original trainer whose gradients are those of the synthetic job, so that ours know them, too."""
    trainer = original.Trainer(peer)
    for step in range(STEPS):
        own = {part: synthetic.gradient(SEED, step, peer.worker_id, part, count) for part, count in PARTS}
        averages = trainer.allreduce([own[block + 1] for block in range(TINY["blocks"])], SIZES,
                                     *(own[synthetic.COMPONENTS + i] for i in range(3)))
        for (part, count), got in zip(PARTS, averages):
            means.compare(got, step, part, count, peer.total_workers, f"part {part:#x} of step {step}")
    peer.close()


def worker_steps(peer, means):
    """An original worker of the flow with shards, until it is told to stop."""
    steps, samples = 0, shares(SAMPLES, peer.total_workers)
    while (shard := peer.wait_for_shard()) is not None:
        step, begin, end = shard
        first = sum(samples[:peer.worker_id])
        check(shard == (steps, first, first + samples[peer.worker_id]), f"shard {shard} of worker {peer.worker_id}")
        peer.send_gradient(step, synthetic.gradient(SEED, step, peer.worker_id, synthetic.VECTOR, ELEMENTS),
                           synthetic.loss(SEED, step, peer.worker_id), (end - begin) // 2, end - begin)
        got_step, got, loss = peer.receive_averaged()
        check((got_step, loss) == (step, means.loss(step, peer.total_workers)), f"step {got_step}, loss {loss}")
        means.compare(got, step, synthetic.VECTOR, ELEMENTS, peer.total_workers, f"the average of step {step}")
        steps += 1
    check(steps == STEPS, f"{steps} steps")
    peer.close()


class Peers:
    """Original peers, each on a thread; the end of the with statement waits for them and raises what went wrong."""

    def __init__(self, address, count, work, means):
        self.failures, self.means = [], means
        self.peers = [original.WorkerClient(address, f"original-{i}") for i in range(count)]
        self.threads = [threading.Thread(target=self.run, args=(work, peer), daemon=True) for peer in self.peers]

    def run(self, work, peer):
        try:
            work(peer, self.means)
        except Exception as error:
            self.failures.append(error)
            peer.close()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for thread in self.threads:
            thread.join(original.PATIENCE)
        for peer in self.peers:
            peer.close()
        if self.failures:
            raise self.failures[0]


def at_our_coordinator(mode, originals, with_flag, own):
    """Original peers, workers of ours that speak their protocol, and workers that speak ours."""
    arguments = ["--mode", mode]
    if mode == "vector":
        arguments += ["--steps", STEPS, "--average", "mean", "--total-samples", SAMPLES]
    means = Means(ours=True)
    with Star(originals + with_flag + own, *arguments) as star:
        peers = Peers(star.address, originals, trainer_steps if mode == "blocks" else worker_steps, means)
        ours = [star.worker(*SHAPE, "--steps", STEPS, "--original", "--mode", mode) for _ in range(with_flag)]
        ours += [star.worker(*SHAPE, "--steps", STEPS, "--check") for _ in range(own)]
        with peers:
            pass
        star.expect_end([star.coordinator, *ours], 0, [f"done: {STEPS} steps"])
    check((means.neighbours > 0) == (originals + with_flag + own == 3), f"{means.neighbours} elements are neighbours")


class AtTheirServer:
    """Workers of ours at a server of the original, with original peers or without."""

    def __init__(self, served, *arguments, count):
        self.served, self.changed = served, threading.Condition()
        served.start()
        self.workers = [Process(f"worker {i}", [LOCKSTEP, "worker", "--coordinator", served.address, "--timeout", 20,
                                                *arguments], self.changed) for i in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.end()

    def expect_end(self, code, *words):
        with self.changed:
            self.changed.wait_for(lambda: all(worker.ended_at for worker in self.workers), original.PATIENCE)
        for worker in self.workers:
            check(worker.process.poll() == code, f"{worker.name}: {worker.process.poll()}, not {code}\n{worker.text}")
            for word in words:
                check(word in worker.text, f"{worker.name} does not say '{word}'\n{worker.text}")


def at_their_server(mode, originals, ours):
    total = originals + ours
    if mode == "blocks":
        served = original.DdpCoordinator(total, STEPS)
    else:
        served = original.VectorCoordinator(total, STEPS, total_samples=SAMPLES)
    flags = [*SHAPE, "--original", "--mode", mode, *(["--steps", STEPS] if mode == "blocks" else [])]
    with AtTheirServer(served, *flags, count=ours) as star:
        with Peers(served.server.address, originals, trainer_steps if mode == "blocks" else worker_steps, Means(ours=False)):
            pass
        served.result()
        star.expect_end(0, f"done: {STEPS} steps")
    if mode == "blocks":
        check(served.sizes == [[SIZES] * TINY["blocks"] + COUNTS] * STEPS, f"{served.sizes}")
        for step, parts in enumerate(served.sent):
            for (part, count), sent in zip(PARTS, parts):
                for i, expected in enumerate(sent_by_all(step, part, count, total)):
                    same_bits(sent[i], expected, f"part {part:#x} of worker {i}")
        return
    for step, (sent, totals) in enumerate(served.rounds):
        for i, expected in enumerate(sent_by_all(step, synthetic.VECTOR, ELEMENTS, total)):
            same_bits(sent[i], expected, f"worker {i}")
        check(totals == [(synthetic.loss(SEED, step, i), n // 2, n)
                         for i, n in enumerate(shares(SAMPLES, total))], f"{totals}")


def shares(total, workers):
    each = total // workers
    return [total - each * (workers - 1) if i == workers - 1 else each for i in range(workers)]


class Tape:
    """A connection that plays what it is given and keeps what is sent."""

    def __init__(self, *frames):
        self.incoming, self.sent = b"".join(frames), b""

    def settimeout(self, _):
        pass

    def sendall(self, data):
        self.sent += data

    def recv(self, count):
        data, self.incoming = self.incoming[:count], self.incoming[count:]
        return data


def frames_of_the_peers():
    """The scripted peers write and read the frames that the original has made, bit by bit."""
    with open(os.path.join(os.path.dirname(__file__), "..", "vectors", "gradient_wire_vectors.json")) as file:
        rows = {row["message"]: (row["fields"], bytes.fromhex(row["frame_hex"])) for row in json.load(file)}
    fields = {name: row[0] for name, row in rows.items()}
    frame = {name: row[1] for name, row in rows.items()}

    tape = Tape(*(frame[name] for name in ("JoinAccepted", "ShardAssignment", "AveragedGradient", "AveragedBlockGradient",
                                           "AveragedNonBlockGradient", "Shutdown")))
    peer = original.WorkerClient(None, **fields["JoinRequest"], connect=lambda *_, **__: tape)
    check(dict(worker_id=peer.worker_id, total_workers=peer.total_workers) == fields["JoinAccepted"], "JoinAccepted")
    check(list(peer.wait_for_shard()) == list(fields["ShardAssignment"].values()), "ShardAssignment")
    whole, block, part = fields["GradientPayload"], fields["BlockGradientPayload"], fields["NonBlockGradientPayload"]
    peer.worker_id = whole["worker_id"]
    peer.send_gradient(whole["step"], whole["gradients"], whole["loss"], whole["correct"], whole["total"])
    peer.worker_id = block["worker_id"]
    peer.send_block_gradient(block["step"], block["block_idx"], block["num_blocks"], block["gradients"], block["component_sizes"])
    peer.send_non_block_gradient(part["step"], part["component"], part["gradients"])
    check(tape.sent == frame["JoinRequest"] + frame["GradientPayload"] + frame["BlockGradientPayload"]
          + frame["NonBlockGradientPayload"], f"a worker sends {tape.sent.hex()}")
    plain = lambda values: [list(value) if isinstance(value, array) else value for value in values]
    check(plain(peer.receive_averaged()) == list(fields["AveragedGradient"].values()), "AveragedGradient")
    averaged = fields["AveragedBlockGradient"]
    check(plain(peer.receive_averaged_block()) == [averaged[name] for name in ("step", "block_idx", "component_sizes", "gradients")],
          "AveragedBlockGradient")
    check(plain(peer.receive_averaged_non_block()) == list(fields["AveragedNonBlockGradient"].values()), "AveragedNonBlockGradient")
    check(peer.wait_for_shard() is None and not tape.incoming, "Shutdown")

    def served(name, read):
        """What a server reads from workers that send this frame, each with its own number; the vector's is the last."""
        server = original.GradientServer(0)
        server.listener.close()
        (own,) = struct.unpack_from("<I", frame[name], 13)
        tapes = [Tape(frame[name][:13] + struct.pack("<I", i) + frame[name][17:]) for i in range(own + 1)]
        server.workers = [original.Stream(each) for each in tapes]
        return server, tapes, read(server)

    server, tapes, (_, _, sent, totals) = served("GradientPayload", lambda at: at.collect_and_reduce(whole["step"]))
    check((list(sent[-1]), *totals[-1]) == (whole["gradients"], whole["loss"], whole["correct"], whole["total"]), "GradientPayload")
    mean = fields["AveragedGradient"]
    server.workers = server.workers[-1:]
    server.broadcast_averaged(mean["step"], mean["gradients"], mean["global_loss"])
    server.shutdown_workers()
    check(tapes[-1].sent == frame["AveragedGradient"] + frame["Shutdown"], f"a server sends {tapes[-1].sent.hex()}")
    server, tapes, got = served("BlockGradientPayload", lambda at: at.collect_and_reduce_block(block["step"], block["block_idx"]))
    check((got[2], list(got[3][-1])) == (block["component_sizes"], block["gradients"]), "BlockGradientPayload")
    server.broadcast_averaged_block(averaged["step"], averaged["block_idx"], averaged["gradients"], averaged["component_sizes"])
    check(tapes[-1].sent == frame["AveragedBlockGradient"], f"a server sends {tapes[-1].sent.hex()}")
    server, tapes, got = served("NonBlockGradientPayload", lambda at: at.collect_and_reduce_non_block(part["step"], part["component"]))
    check(list(got[1][-1]) == part["gradients"], "NonBlockGradientPayload")
    server.broadcast_averaged_non_block(part["step"], part["component"], part["gradients"])
    check(tapes[-1].sent == frame["AveragedNonBlockGradient"], f"a server sends {tapes[-1].sent.hex()}")


# What each side does wrong.

class OneRound(original.Served):
    """Answers the first payload with something else."""

    def __init__(self, answer):
        super().__init__(original.GradientServer(1))
        self.answer = answer

    def serve(self):
        self.server.wait_for_workers()
        worker = self.server.workers[0]
        worker.read()
        self.answer(worker)
        worker.closed()


def average_with(value):
    """A NaN that comes back as an average is not trained with."""

    def answer(worker):
        gradients = [0.0] * sum(SIZES)
        gradients[7] = value
        worker.send(original.AVERAGED_BLOCK, struct.pack("<QI", 0, TINY["blocks"] - 1) + original.sizes(SIZES)
                    + original.floats(gradients))

    with AtTheirServer(OneRound(answer), *SHAPE, "--original", "--mode", "blocks", count=1) as star:
        star.expect_end(3, "non-finite", "element 7 of the average of block 1 of step 1")


def shard_for_a_trainer():
    """A server of the other flow: the worker says what it got and what that means."""
    answer = lambda worker: worker.send(original.SHARD, struct.pack("<QQQ", 0, 0, 5))
    with AtTheirServer(OneRound(answer), *SHAPE, "--original", "--mode", "blocks", count=1) as star:
        star.expect_end(3, "ShardAssignment", "mode vector")


def without_the_flag():
    """A worker of ours that does not know that the server is an original is told the flag."""
    server = original.Served(original.GradientServer(1))
    server.serve = server.server.wait_for_workers
    with AtTheirServer(server, *SHAPE, count=1) as star:
        star.expect_end(1, "--original")
    try:
        server.result()
    except original.Unexpected as error:
        check("too large" in str(error), f"{error}")


def too_large_for_them():
    """Said before anything of it is sent."""
    served = original.VectorCoordinator(1, 1, total_samples=10)
    with AtTheirServer(served, "--elements", 25_000_000, "--original", count=1) as star:
        star.expect_end(3, "message too large", "100000000")
    try:
        served.result()
    except original.Gone:
        return
    raise Failure("the server has got it")


def too_large_for_one_of_them():
    """A worker of ours may send more than an original one could be answered with: nobody is, and all hear why."""
    with Star(2, "--steps", 1, timeout=60) as star:
        peer = original.WorkerClient(star.address, "small")
        ours = star.worker("--elements", 25_000_000)
        star.expect_end([star.coordinator, ours], 3, ["message too large", r"worker 0 \(small, ", "original protocol"])
        peer.close()


def interrupted(number):
    """Ctrl-C or SIGTERM ends a worker in order, and all others hear of it."""
    with Star(2, "--steps", 1000000) as star:
        workers = [star.worker("--elements", 100, name=f"node-{i}") for i in range(2)]
        for worker in workers:
            star.wait_line(worker, "^step ")
        workers[1].signal(number)
        star.expect_end([workers[1]], 128 + number, ["told to stop"])
        star.expect_end([star.coordinator, workers[0]], 1, [r"\(node-1, .*gave up: .*told to stop"])


def before_joining():
    """Who connects and goes leaves a line, and so does one whose name is meant for a terminal, in plain letters."""
    with Star(1, "--steps", 1, timeout=1) as star:
        with socket.create_connection(star.address, timeout=10):
            pass
        star.wait_line(star.coordinator, "let 127.0.0.1:.* go|127.0.0.1:.*closed")
        peer = original.WorkerClient(star.address, "\x1b[2J\nworker 7 joined")
        star.wait_line(star.coordinator, r"worker 0 \(\?\[2J\?worker 7 joined, ")
        peer.wait_for_shard()
        peer.worker_id = 4711
        peer.send_gradient(0, [1.0], 1.0, 0, 1)
        star.wait_line(star.coordinator, "calls itself worker 4711")
        peer.receive_averaged()
        peer.close()
        check("\x1b" not in star.coordinator.text, "an escape sequence is in the log")


def visitors_of_ranks():
    """So does who comes to a coordinator of ranks and says nothing, or goes."""
    with Star(1, "--mode", "lanes", timeout=1) as star:
        with socket.create_connection(star.address, timeout=10):
            pass
        star.wait_line(star.coordinator, "let 127.0.0.1:.* go: .*closed")
        with socket.create_connection(star.address, timeout=10):
            star.wait_line(star.coordinator, "let 127.0.0.1:.* go: it did not say who it is in time")


def truth_about_gpus():
    served = original.VectorCoordinator(1, 1, total_samples=10)
    with AtTheirServer(served, *SHAPE, "--original", "--node-id", "honest", count=1) as star:
        served.result()
        star.expect_end(0)
    present = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
    ((name, gpus, backend),) = served.server.joined
    # None where the build has no CUDA.
    check((name, backend) == ("honest", "cpu") and gpus in (0, present), f"{served.server.joined}, {present} GPUs")


def leaves_in_the_middle():
    """A trainer that goes between two blocks ends the job; it is no end of all steps."""
    with Star(1, "--mode", "blocks") as star:
        peer = original.WorkerClient(star.address, "early")
        peer.send_block_gradient(0, 1, 2, [1.0], [1])
        peer.receive_averaged_block()
        peer.close()
        star.expect_end([star.coordinator], 1, [r"worker 0 \(early, .*it owes block 0 of step 1"])


def main():
    cases = Cases()
    cases.run("the frames of the scripted peers", frames_of_the_peers)
    for mode in ("blocks", "vector"):
        for originals, with_flag, own in ((1, 0, 0), (2, 0, 0), (3, 0, 0), (1, 1, 1)):
            cases.run(f"our coordinator, {mode}: {originals} original, {with_flag} with --original, {own} ours",
                      at_our_coordinator, mode, originals, with_flag, own)
        for originals, ours in ((0, 1), (0, 2), (0, 3), (2, 1)):
            cases.run(f"their server, {mode}: {originals} original, {ours} ours", at_their_server, mode, originals, ours)
    cases.run("NaN in an average", average_with, math.nan)
    cases.run("infinity in an average", average_with, -math.inf)
    cases.run("a server of the other flow", shard_for_a_trainer)
    cases.run("an original server without the flag", without_the_flag)
    cases.run("100 MB for an original server", too_large_for_them)
    cases.run("100 MB for an original worker", too_large_for_one_of_them)
    for number in (signal.SIGINT, signal.SIGTERM):
        cases.run(f"{number.name} to a worker", interrupted, number)
    cases.run("before joining", before_joining)
    cases.run("before joining, where ranks are served", visitors_of_ranks)
    cases.run("GPUs and backend", truth_about_gpus)
    cases.run("a trainer leaves in the middle of a step", leaves_in_the_middle)
    cases.finish()


if __name__ == "__main__":
    main()
