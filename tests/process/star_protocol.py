#!/usr/bin/env python3
"""The gradient server as its page describes it: clients written from docs/wire_protocol.md join, exchange one gradient
of each kind, and are refused when they misbehave."""
# ctest: TIMEOUT 120

import math
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from array import array

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import gradient_client as client
import ranks
from ranks import Cases, Failure
from star import LOCKSTEP, Star

SIZE_MISMATCH, NON_FINITE, AUTHENTICATION, UNEXPECTED, TOO_LARGE = 5, 12, 13, 15, 16
STEP_MISMATCH, BLOCK_MISMATCH, COMPONENT_MISMATCH = 17, 18, 19
INVALID_RANK, PEER_LOST = 1, 9


def check(condition, what):
    if not condition:
        raise Failure(what)


def same_bits(received, expected, what):
    check(received.tobytes() == array("f", expected).tobytes(), f"{what}: {received} instead of {expected}")


def numbers(worker, step, part, count):
    """Whose sums depend on their order."""
    return array("f", (math.sin(1.0 + worker + 7 * step + 31 * part + 0.1 * i) * 10.0**(i % 7 - 3) for i in range(count)))


def ask_all(workers, body):
    for worker in workers:
        body(worker)


class Joined:
    """Workers of this process, in their order; `kinds` says which are our own."""

    def __init__(self, star, kinds, token=b""):
        self.star, self.kinds, self.token, self.workers = star, kinds, token, []

    def __enter__(self):
        for index, own in enumerate(self.kinds):
            worker = client.join(self.star.address, f"node-{index}", own, self.token)
            self.workers.append(worker)
            check((worker.worker_id, worker.total_workers) == (index, len(self.kinds)), "joined as somebody else")
        return self.workers

    def __exit__(self, *_):
        for worker in self.workers:
            worker.connection.close()


def take_shards(workers, step, total):
    weights = []
    for worker in workers:
        got = worker.connection.receive("ShardAssignment")
        begin, end = client.shard(total, len(workers), worker.worker_id)
        check((got.step, got.shard_start, got.shard_end) == (step, begin, end), f"the shard {got}")
        weights.append(end - begin)
    return weights


def send_vector(worker, step, gradients, loss, correct, total):
    if worker.welcome:
        worker.connection.send("Totals", step=step, loss=loss, correct=correct, total=total)
    # The worker_id in payloads is logged, not enforced.
    worker.connection.send("GradientPayload", step=step, worker_id=4711, gradients=gradients, loss=loss, correct=correct,
                           total=total)


def finish(star, workers):
    for worker in workers:
        worker.connection.receive("Shutdown")
        worker.connection.close()
    star.expect_end([star.coordinator], 0, ["done"])


def vector(kinds, average, totals, elements=1000):
    arguments = ["--steps", 2, "--total-samples", 10, "--average", average]
    with Star(len(kinds), *arguments) as star, Joined(star, kinds) as workers:
        for step in range(2):
            take_shards(workers, step, 10)
            sent = [numbers(worker.worker_id, step, 0, elements) for worker in workers]
            losses = [client.f32(0.1 + worker.worker_id) for worker in workers]
            for worker in reversed(workers):  # who comes first does not matter
                i = worker.worker_id
                send_vector(worker, step, sent[i], losses[i], i, totals[i])
            expected = client.average(sent, totals if average == "weighted" else None)
            for worker in workers:
                got = worker.connection.receive("AveragedGradient")
                check(got.step == step, f"step {got.step}")
                same_bits(got.gradients, expected, f"the average for worker {worker.worker_id}")
                check(got.global_loss == client.global_loss(losses, totals), f"the loss {got.global_loss}")
        finish(star, workers)


def blocks(kinds, told, steps, num_blocks, sizes):
    """The coordinator is told when to end, or the workers leave when they like."""
    with Star(len(kinds), "--mode", "blocks", *(["--steps", steps] if told else [])) as star, Joined(star, kinds) as workers:
        for step in range(steps):
            for block in reversed(range(num_blocks)):
                sent = [numbers(worker.worker_id, step, block, sum(sizes)) for worker in workers]
                ask_all(workers, lambda w: w.connection.send(
                    "BlockGradientPayload", step=step, worker_id=w.worker_id, block_idx=block, num_blocks=num_blocks,
                    component_sizes=sizes, gradients=sent[w.worker_id]))
                expected = client.average(sent)
                for worker in workers:
                    got = worker.connection.receive("AveragedBlockGradient")
                    check((got.step, got.block_idx, got.component_sizes) == (step, block, sizes), f"{got}")
                    same_bits(got.gradients, expected, f"block {block} of step {step}")
            for component in range(3):
                count = 5 if component == 1 else 20
                sent = [numbers(worker.worker_id, step, 100 + component, count) for worker in workers]
                ask_all(workers, lambda w: w.connection.send(
                    "NonBlockGradientPayload", step=step, worker_id=w.worker_id, component=component,
                    gradients=sent[w.worker_id]))
                expected = client.average(sent)
                for worker in workers:
                    got = worker.connection.receive("AveragedNonBlockGradient")
                    check((got.step, got.component) == (step, component), f"{got}")
                    same_bits(got.gradients, expected, f"component {component} of step {step}")
        if told:
            return finish(star, workers)
        for worker in workers:
            worker.connection.close()
        star.expect_end([star.coordinator], 0, [f"done: {steps} steps"])


def lanes():
    """Two ranks: one sum over three lanes, of which rank 0 owns the first and rank 1 the rest, which is not a node of the tree;
    then bytes for the other."""
    nodes = {0: [(0, 1)], 1: [(1, 2), (2, 3)]}
    values = [numbers(lane, 0, 0, 6) for lane in range(3)]
    whole = client.tree_sum(values, client.add_f32)
    version = subprocess.run([LOCKSTEP, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    for arguments in ((), ("--mode", "lanes")):
        with Star(2, *arguments) as star:
            ranks = [client.Rank(star.address, rank, 2, version) for rank in range(2)]
            for rank in ranks:
                rank.connect()
            for offset, count, tail in ((0, 4, []), (4, 2, [0.0, 0.5, 2.0**60])):
                for rank in reversed(ranks):
                    for begin, end in nodes[rank.rank]:
                        rank.data.send("PartialSum", step=0, offset=offset, lanes=3, lane_begin=begin, lane_end=end,
                                       call=7, tail_count=len(tail), sum=values[begin][offset:offset + count], tail=tail)
                for rank in ranks:
                    got = rank.data.receive("RawSum")
                    check((got.step, got.offset, got.lanes, got.call) == (0, offset, 3, 7), f"{got}")
                    same_bits(got.sum, whole[offset:offset + count], "the sum")
                    check(list(got.tail) == [3 * each for each in tail], f"the tail {got.tail}")
            for to, data in ((1, b"for rank 1 alone"), (0xFFFFFFFF, b"")):
                sent = dict(to=to, from_=0, stamp=client.make_stamp(2, len(data)), bytes=data)
                ranks[0].data.send("Bytes", **sent)
                check(ranks[1].data.receive("Bytes").fields == sent, "other bytes came")
            for rank in ranks:
                rank.leave()
            star.expect_end([star.coordinator], 0, ["all 2 workers have left"])


def ranks_are_served():
    """Mode lanes is for ranks of lockstep train, which meet at the rendezvous first."""
    with Star(1, "--mode", "lanes") as star:
        refused(lambda: client.join(star.address, "synthetic", True), INVALID_RANK, "serves ranks")


# A member that misbehaves ends the job; everybody learns who and why.

PAYLOAD = dict(step=0, worker_id=1, gradients=[1.0, 2.0, 3.0], loss=1.0, correct=1, total=5)
BLOCK = dict(step=0, worker_id=1, block_idx=1, num_blocks=2, component_sizes=[1, 2], gradients=[1.0, 2.0, 3.0])


def payload(**changes):
    return client.encode("GradientPayload", **{**PAYLOAD, **changes})


def block(**changes):
    return client.encode("BlockGradientPayload", **{**BLOCK, **changes})


def with_count(frame, at, form, count):
    return frame[:at] + struct.pack(form, count) + frame[at + struct.calcsize(form):]


NAN, INF = math.nan, math.inf
DEFECTS = [  # mode, what it sends, how the job ends, what is said about it
    ("garbage", "vector", b"\xde\xad\xbe\xef" * 64, UNEXPECTED, []),
    ("another protocol", "vector", b"GET / HTTP/1.1\r\n\r\n", UNEXPECTED, []),
    ("an empty frame", "vector", b"\0\0\0\0", UNEXPECTED, ["a frame of length 0"]),
    ("an unknown tag", "vector", b"\0\0\0\x01\x0c", UNEXPECTED, []),
    ("a huge length", "vector", b"\xff\xff\xff\xff\x04" + b"\0" * 64, TOO_LARGE, ["4294967295"]),
    ("a huge length for a small message", "vector", b"\0\1\0\0\x06" + b"\0" * 64, TOO_LARGE, []),
    ("a count that overflows", "vector", with_count(payload(), 17, "<Q", (1 << 62) + 3), UNEXPECTED, []),
    ("a count without its bytes", "vector", with_count(payload(), 17, "<Q", 4), UNEXPECTED, []),
    ("too many component sizes", "blocks", with_count(block(), 25, "<I", 1 << 30), UNEXPECTED, []),
    ("the wrong step", "vector", payload(step=7), STEP_MISMATCH, ["step 8", "step 1"]),
    ("the wrong block", "blocks", block(block_idx=0), BLOCK_MISMATCH, ["block 0", "1"]),
    ("another number of blocks", "blocks", block(block_idx=2, num_blocks=3), BLOCK_MISMATCH, ["3", "2"]),
    ("sizes that do not add up", "blocks", block(component_sizes=[1, 1]), SIZE_MISMATCH, ["3", "2"]),
    ("other component sizes", "blocks", block(component_sizes=[2, 1]), COMPONENT_MISMATCH, ["1 2", "2 1"]),
    ("another number of elements", "vector", payload(gradients=[1.0] * 4), SIZE_MISMATCH, ["4 elements", "3"]),
    ("a message of the wrong kind", "vector", block(), UNEXPECTED,
     ["BlockGradientPayload", "GradientPayload|vector", "--mode blocks"]),
    ("a vector for blocks", "blocks", payload(), UNEXPECTED, ["GradientPayload", "--mode vector"]),
    ("a second join", "vector", client.encode("JoinRequest", node_id="x", gpu_count=1, backend="y"), UNEXPECTED,
     ["JoinRequest"]),
    ("a server's message", "vector", client.encode("Shutdown"), UNEXPECTED, ["Shutdown"]),
    ("NaN in a vector", "vector", payload(gradients=[1.0, NAN, 3.0]), NON_FINITE, ["step 1", "element 1", "nan"]),
    ("infinity in a block", "blocks", block(gradients=[1.0, 2.0, -INF]), NON_FINITE,
     ["step 1", "block 1", "component 1", "element 2", "-inf"]),
    ("a loss that is NaN", "vector", payload(loss=NAN), NON_FINITE, ["step 1", "loss", "nan"]),
]


def hears_nothing(connection):
    """An original worker is told no reason; its connection ends in order."""
    try:
        got = connection.receive()
    except client.Closed:
        return
    raise Failure(f"an original worker was sent {got}")


def misbehave(mode, words, code, said, own):
    """Worker 0 does right, worker 1 does not; the first hears why."""
    with Star(2, "--mode", mode, "--steps", 3) as star, Joined(star, [True, own]) as (good, bad):
        if mode == "blocks":
            good.connection.send_bytes(block(worker_id=0))
        else:
            for worker in (good, bad):
                worker.connection.receive("ShardAssignment")
            send_vector(good, 0, [1.0, 2.0, 3.0], 1.0, 1, 5)
        bad.connection.send_bytes(words)
        halt = good.connection.receive("Halt")
        check((halt.code, halt.worker) == (code, 1), f"{halt}, not {code}")
        if own:
            check(bad.connection.receive("Halt") == halt, "another reason for the one at fault")
        else:
            hears_nothing(bad.connection)
        good.connection.close()
        bad.connection.close()
        star.expect_end([star.coordinator], 3, [r"worker 1 \(node-1, 127\.0\.0\.1:\d+\)", *said])
        check(halt.reason in star.coordinator.text, f"'{halt.reason}' is not what the coordinator says")


def cut_short(own):
    with Star(2, "--steps", 3) as star, Joined(star, [True, own]) as (good, bad):
        for worker in (good, bad):
            worker.connection.receive("ShardAssignment")
        bad.connection.send_bytes(payload()[:-7])
        bad.connection.close()
        halt = good.connection.receive("Halt")
        check((halt.code, halt.worker) == (PEER_LOST, 1), f"{halt}")
        good.connection.close()
        star.expect_end([star.coordinator], 1, [r"worker 1 \(node-1, ", "middle of a message"])


def extension_from_original():
    """An original worker has no extensions to send."""
    misbehave("vector", client.encode("Totals", step=0, loss=1.0, correct=1, total=5), UNEXPECTED, ["Totals"], False)


# What a connection that has not joined does changes nothing.

STRANGE = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 64, b"\xff\xff\xff\xff\x01", payload(),
           b"\0\1\0\0\x01", client.encode("JoinRequest", node_id="x", gpu_count=0, backend="")[:-1],
           b"\0\0\0\x0e\x01\x02\0\0\0\xff\xfe\x01\0\0\0\0\0\0\0", b"LSKP", b"LSKP\x63\0\1\0\0\0\0\0",
           client.envelope(client.HELLO, b"\0" * 64), client.envelope(client.PROOF, b"\0" * 32),
           b"LSKP\6\0\1\0\xff\xff\xff\xff", client.envelope(client.HELLO, client.make_hello(purpose=2))]


def strangers(count):
    with Star(2, "--steps", 1, "--total-samples", 10, timeout=30) as star:
        visitors = []
        try:
            for i in range(count):
                visitor = socket.create_connection(star.address, timeout=10)
                visitors.append(visitor)
                if count == len(STRANGE):
                    visitor.sendall(STRANGE[i])
            with Joined(star, [False, True]) as workers:
                take_shards(workers, 0, 10)
                ask_all(workers, lambda w: send_vector(w, 0, [1.0, 3.0], 1.0, 1, 5))
                for worker in workers:
                    same_bits(worker.connection.receive("AveragedGradient").gradients, [1.0, 3.0], "the average")
                finish(star, workers)
        finally:
            for visitor in visitors:
                visitor.close()


def closes(connection):
    """The other side ends the connection without a word."""
    try:
        while connection.socket.recv(4096):
            pass
    except ConnectionResetError:
        pass


def slow_loris():
    """One byte now and then does not keep a stranger in."""
    with Star(1, "--steps", 1, timeout=1) as star:
        lorises = [client.connect(star.address) for _ in range(2)]
        words = [client.encode("JoinRequest", node_id="loris" * 400, gpu_count=0, backend=""),
                 client.envelope(client.HELLO, client.make_hello())]
        stop = threading.Event()

        def drip():
            for at in range(1000):
                for loris, text in zip(lorises, words):
                    try:
                        loris.send_bytes(text[at:at + 1])
                    except OSError:
                        pass
                if stop.wait(0.05):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            for loris in lorises:
                closes(loris)  # a timeout would be thrown
        finally:
            stop.set()
            dripping.join()
            for loris in lorises:
                loris.close()
        with Joined(star, [False]) as workers:
            take_shards(workers, 0, 1024)
            send_vector(workers[0], 0, [1.0], 1.0, 1, 5)
            workers[0].connection.receive("AveragedGradient")
            finish(star, workers)


def refused(join, code, *words):
    try:
        join()
    except client.Refused as refusal:
        check(refusal.code == code, f"code {refusal.code}: {refusal}")
        for word in words:
            check(word in str(refusal), f"'{refusal}' does not say '{word}'")
        return
    except (client.Closed, ConnectionResetError):
        check(code is None, "closed without a word")
        return
    raise Failure("nobody was refused")


def late():
    """A place is free again while the job has not begun; later nobody comes in."""
    with Star(2, "--steps", 1, "--total-samples", 10) as star:
        first = client.join(star.address, "early", True)
        check(first.worker_id == 0, "not the first")
        first.connection.close()
        star.wait_line(star.coordinator, "^worker 0 .* closed its connection; its place is free again")
        with Joined(star, [True, False]) as workers:
            take_shards(workers, 0, 10)
            refused(lambda: client.join(star.address, "late", True), INVALID_RANK, "2 workers")
            refused(lambda: client.join(star.address, "late", False), None)
            refused(lambda: client.join(star.address, "node-0", True), INVALID_RANK)
            ask_all(workers, lambda w: send_vector(w, 0, [1.0], 1.0, 1, 5))
            ask_all(workers, lambda w: w.connection.receive("AveragedGradient"))
            finish(star, workers)


class Recorder(client.Connection):
    """Keeps what it sends."""

    def __init__(self, sock):
        super().__init__(sock)
        self.sent = b""

    def send_bytes(self, data):
        self.sent += data
        super().send_bytes(data)


def other_users(insecure):
    """Without a token only processes of the coordinator's user are let in, whatever they speak."""
    with Star(2, "--steps", 1, "--total-samples", 10, *["--insecure"] * insecure) as star:
        for own in (False, True):
            child = os.fork()
            if child == 0:
                os.setuid(65534)
                code = 2
                try:
                    client.join(star.address, "stranger", own)
                    code = 0
                except (client.Refused, client.Closed, OSError):
                    code = 1
                finally:
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            check(status == (0 if insecure else 1), f"another user got {status}")
            if not insecure:
                star.wait_line(star.coordinator, "runs as user 65534")


def tokens(insecure):
    token = b"correct horse battery staple"
    with tempfile.NamedTemporaryFile() as file:
        file.write(token)
        file.flush()
        arguments = ["--steps", 1, "--total-samples", 10, "--token-file", file.name] + ["--insecure"] * insecure
        with Star(2, *arguments) as star:
            refused(lambda: client.join(star.address, "liar", True, b"wrong"), AUTHENTICATION, "wrong token")
            star.wait_line(star.coordinator, "wrong token")
            if not insecure:
                refused(lambda: client.join(star.address, "poor", True), AUTHENTICATION, "token missing")
                refused(lambda: client.join(star.address, "original", False), None)
                star.wait_line(star.coordinator, "--insecure")
            with client.connect(star.address) as other:
                refused(lambda: client.shake_hands(other, token, job=b"another"), AUTHENTICATION, "another job")
            # A handshake that went well, played again, proves nothing.
            with Recorder(socket.create_connection(star.address, timeout=30)) as good:
                client.shake_hands(good, token)
                with client.connect(star.address) as replay:
                    replay.send_bytes(good.sent)
                    kind, _ = client.read_envelope(replay)
                    check(kind == client.HELLO, "no hello")
                    refused(lambda: client.read_envelope(replay), AUTHENTICATION, "wrong token")
            # The server's own words, played back to it, neither.
            with client.connect(star.address) as mirror:
                own = client.make_hello(token)
                mirror.send_bytes(client.envelope(client.HELLO, own))
                _, theirs = client.read_envelope(mirror)
                mirror.send_bytes(client.envelope(client.PROOF, client.make_proof(2, token, own, theirs)))
                refused(lambda: client.read_envelope(mirror), AUTHENTICATION)
            if insecure:
                workers = [client.join(star.address, "original", False), client.join(star.address, "poor", True)]
            else:
                workers = [client.join(star.address, f"node-{i}", True, token) for i in range(2)]
            take_shards(workers, 0, 10)
            ask_all(workers, lambda w: send_vector(w, 0, [1.0], 1.0, 1, 5))
            ask_all(workers, lambda w: w.connection.receive("AveragedGradient"))
            finish(star, workers)
            check(token.decode() not in star.coordinator.text, "the token is in the log")


def main():
    cases = Cases()
    mixed = [False, True, False]
    for average in ("mean", "weighted"):
        cases.run(f"vector, {average}", vector, mixed, average, [7, 0, 2**24 + 1])
    cases.run("blocks, until the coordinator ends", blocks, mixed, True, 2, 3, [3, 0, 5])
    cases.run("blocks, until the workers leave", blocks, mixed, False, 2, 3, [3, 0, 5])
    cases.run("no samples", vector, mixed, "weighted", [0, 0, 0], 10)
    cases.run("empty gradients", vector, mixed, "weighted", [1, 2, 3], 0)
    cases.run("one worker", vector, [False], "weighted", [3])
    cases.run("five workers", vector, [True, False, True, True, False], "weighted", [1, 2, 3, 4, 5])
    cases.run("4 workers, 100 steps, 24 blocks", blocks, [True, False, True, False], True, 100, 24, [2, 1])
    cases.run("lanes", lanes)
    cases.run("a coordinator of ranks", ranks_are_served)
    for name, mode, words, code, said in DEFECTS:
        for own in (True, False):
            cases.run(f"{name} from {'one of ours' if own else 'an original worker'}", misbehave, mode, words, code, said,
                      own)
    cases.run("an extension from an original worker", extension_from_original)
    for own in (True, False):
        cases.run("half a payload, then the end", cut_short, own)
    cases.run("strangers of every kind", strangers, len(STRANGE))
    cases.run("200 strangers that never speak", strangers, 200)
    cases.run("slow-loris", slow_loris)
    cases.run("who comes late", late)
    for insecure in (False, True) if os.geteuid() == 0 else ():
        cases.run(f"other users{', --insecure' * insecure}", other_users, insecure)
    for insecure in (False, True):
        cases.run(f"tokens{', --insecure' * insecure}", tokens, insecure)
    cases.finish()


if __name__ == "__main__":
    main()
