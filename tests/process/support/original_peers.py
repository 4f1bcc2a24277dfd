"""Programs of the original gradient protocol: both of its servers, its worker and its trainer. What they do is in its own
documents; the bytes of their messages are those of the frames in tests/vectors, and the mean is what the original was seen to
compute. Nothing here is shared with Lockstep or with the clients that are written from its pages.

The documents have a GradientServer with two flows. Fine-tuning deals out samples and ends with Shutdown:
    send_shard_assignments, collect_and_reduce, broadcast_averaged, ..., shutdown_workers.
Pre-training (DDP) has neither. A trainer sends a block and waits for its average, block after block from the last to the
first, then the components 0 (lm_head), 1 (final_norm) and 2 (embedding); when it has made its steps, it just leaves.
"""

import socket
import struct
import threading
from array import array

from ranks import Failure

PATIENCE = 30.0  # nobody waits longer, whatever goes wrong
LARGEST = 100_000_000  # read_wire_message refuses more

JOIN_REQUEST, JOIN_ACCEPTED, SHARD, GRADIENT, AVERAGED, HEARTBEAT, SHUTDOWN = range(1, 8)
BLOCK, AVERAGED_BLOCK, NON_BLOCK, AVERAGED_NON_BLOCK = range(8, 12)


class Unexpected(Failure):
    """The other side sent what the documents do not have at this place."""


class Gone(Failure):
    """The other side closed the connection."""


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def text(value):
    return struct.pack("<I", len(value.encode())) + value.encode()


def floats(values):
    return struct.pack("<Q", len(values)) + array("f", values).tobytes()


def sizes(values):
    return struct.pack("<I", len(values)) + array("I", values).tobytes()


class Reader:
    def __init__(self, body):
        self.body, self.at = bytes(body), 0

    def number(self, form):
        (value,) = struct.unpack_from("<" + form, self.body, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self):
        return self.take(self.number("I")).decode()

    def take(self, size):
        if size > len(self.body) - self.at:
            raise Unexpected("a message is cut short")
        self.at += size
        return self.body[self.at - size:self.at]

    def floats(self):
        values = array("f")
        values.frombytes(self.take(4 * self.number("Q")))
        return values

    def sizes(self):
        values = array("I")
        values.frombytes(self.take(4 * self.number("I")))
        return list(values)

    def end(self):
        if self.at != len(self.body):
            raise Unexpected("a message has bytes left over")


class Stream:
    """read_wire_message and send_wire_message over one TCP connection."""

    def __init__(self, sock):
        self.socket = sock
        sock.settimeout(PATIENCE)

    def send(self, tag, body=b""):
        self.socket.sendall(struct.pack(">IB", len(body) + 1, tag) + body)

    def read_exact(self, count):
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionResetError as error:
                raise Gone("the connection was reset") from error
            if not more:
                raise Gone("the connection was closed")
            data += more
        return data

    def read(self):
        (length,) = struct.unpack(">I", self.read_exact(4))
        if length > LARGEST:
            raise Unexpected(f"message too large: {length} bytes")
        body = self.read_exact(length)
        return body[0], Reader(body[1:])

    def expect(self, tag, who):
        got, reader = self.read()
        if got != tag:
            raise Unexpected(f"expected {tag} from {who}, got {got}")
        return reader

    def closed(self):
        """Whether the other side goes without another word."""
        try:
            self.read()
        except Gone:
            return True
        return False

    def close(self):
        self.socket.close()


def average_gradients(vectors):
    """The mean: one after the other, then divided by n."""
    total = array("f", vectors[0])
    for vector in vectors[1:]:
        total = array("f", (f32(a + b) for a, b in zip(total, vector)))
    return array("f", (f32(value / len(vectors)) for value in total))


class GradientServer:
    def __init__(self, expect_workers, host="127.0.0.1"):
        self.expected = expect_workers
        self.listener = socket.create_server((host, 0))
        self.listener.settimeout(PATIENCE)
        self.workers = []
        self.joined = []  # node_id, gpu_count and backend of every worker
        self.total_samples = 0

    @property
    def address(self):
        return self.listener.getsockname()

    def wait_for_workers(self):
        while len(self.workers) < self.expected:
            stream = Stream(self.listener.accept()[0])
            try:
                request = stream.expect(JOIN_REQUEST, "a new connection")
                self.joined.append((request.text(), request.number("I"), request.text()))
                request.end()
                stream.send(JOIN_ACCEPTED, struct.pack("<II", len(self.workers), self.expected))
            except BaseException:  # as the original, which gives up
                stream.close()
                raise
            self.workers.append(stream)

    def send_shard_assignments(self, step):
        count = len(self.workers)
        each = self.total_samples // count
        for i, worker in enumerate(self.workers):
            end = self.total_samples if i == count - 1 else (i + 1) * each
            worker.send(SHARD, struct.pack("<QQQ", step, i * each, end))

    def _head(self, reader, step, i):
        got = reader.number("Q")
        if got != step:
            raise Unexpected(f"step mismatch: expected {step}, got {got}")
        if reader.number("I") != i:
            raise Unexpected(f"worker {i} calls itself another")

    def collect_and_reduce(self, step):
        """Averaged gradients, their loss, correct, total; and all that came."""
        sent, totals = [], []
        for i, worker in enumerate(self.workers):
            reader = worker.expect(GRADIENT, f"worker {i}")
            self._head(reader, step, i)
            sent.append(reader.floats())
            totals.append((reader.number("f"), reader.number("Q"), reader.number("Q")))
            reader.end()
        samples = sum(total for _, _, total in totals)
        weighted = 0.0
        for loss, _, total in totals:
            weighted = f32(weighted + f32(loss * total))
        loss = f32(weighted / samples) if samples else 0.0
        return average_gradients(sent), loss, sent, totals

    def broadcast_averaged(self, step, gradients, loss):
        for worker in self.workers:
            worker.send(AVERAGED, struct.pack("<Q", step) + floats(gradients) + struct.pack("<f", loss))

    def collect_and_reduce_block(self, step, block_idx):
        """The block's number, the average, the component sizes, and all that came."""
        sent, of_all = [], []
        for i, worker in enumerate(self.workers):
            reader = worker.expect(BLOCK, f"worker {i}")
            self._head(reader, step, i)
            block, num_blocks = reader.number("I"), reader.number("I")
            if block_idx is None:
                block_idx = num_blocks - 1
            if block != block_idx:
                raise Unexpected(f"block_idx mismatch: expected {block_idx}, got {block}")
            of_all.append(reader.sizes())
            sent.append(reader.floats())
            reader.end()
        return block_idx, average_gradients(sent), of_all[0], sent

    def broadcast_averaged_block(self, step, block_idx, gradients, component_sizes):
        for worker in self.workers:
            worker.send(AVERAGED_BLOCK, struct.pack("<QI", step, block_idx) + sizes(component_sizes) + floats(gradients))

    def collect_and_reduce_non_block(self, step, component):
        """The average, and all that came."""
        sent = []
        for i, worker in enumerate(self.workers):
            reader = worker.expect(NON_BLOCK, f"worker {i}")
            self._head(reader, step, i)
            got = reader.number("B")
            if got != component:
                raise Unexpected(f"component mismatch: expected {component}, got {got}")
            sent.append(reader.floats())
            reader.end()
        return average_gradients(sent), sent

    def broadcast_averaged_non_block(self, step, component, gradients):
        for worker in self.workers:
            worker.send(AVERAGED_NON_BLOCK, struct.pack("<QB", step, component) + floats(gradients))

    def shutdown_workers(self):
        for worker in self.workers:
            worker.send(SHUTDOWN)

    def close(self):
        for worker in self.workers:
            worker.close()
        self.listener.close()


class Served(threading.Thread):
    """A server with its flow on a thread; `result()` waits for it and raises what went wrong."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.failure = server, None

    def run(self):
        try:
            self.serve()
        except Exception as error:  # for result()
            self.failure = error
        finally:
            self.server.close()

    def serve(self):
        raise NotImplementedError

    @property
    def address(self):
        host, port = self.server.address
        return f"{host}:{port}"

    def result(self):
        self.join(PATIENCE)
        if self.failure and not isinstance(self.failure, Failure):
            raise Failure(f"the server: {type(self.failure).__name__}: {self.failure}") from self.failure
        if self.failure:
            raise self.failure
        if self.is_alive():
            raise Unexpected("the server still runs")


class VectorCoordinator(Served):
    """Fine-tuning: a shard, a vector, its average; after the last step Shutdown. `rounds` has what all workers have sent."""

    def __init__(self, workers, steps, total_samples):
        super().__init__(GradientServer(workers))
        self.count, self.server.total_samples, self.rounds = steps, total_samples, []

    def serve(self):
        server = self.server
        server.wait_for_workers()
        for step in range(self.count):
            server.send_shard_assignments(step)
            mean, loss, sent, totals = server.collect_and_reduce(step)
            self.rounds.append((sent, totals))
            server.broadcast_averaged(step, mean, loss)
        server.shutdown_workers()
        if not all(worker.closed() for worker in server.workers):
            raise Unexpected("a worker went on after Shutdown")


class DdpCoordinator(Served):
    """Pre-training: blocks and components; no shards, no Shutdown. The trainers leave when they have made their steps. `sent`
    has, by step and part in the order in which they travel, what every worker has sent; `sizes` the component sizes or lengths."""

    def __init__(self, workers, steps):
        super().__init__(GradientServer(workers))
        self.count, self.sizes, self.sent = steps, [], []

    def serve(self):
        server = self.server
        server.wait_for_workers()
        for step in range(self.count):
            block, parts, all_sent = None, [], []
            while block != 0:
                block, mean, component_sizes, sent = server.collect_and_reduce_block(step, None if block is None else block - 1)
                server.broadcast_averaged_block(step, block, mean, component_sizes)
                parts.append(component_sizes)
                all_sent.append(sent)
            for component in range(3):
                mean, sent = server.collect_and_reduce_non_block(step, component)
                server.broadcast_averaged_non_block(step, component, mean)
                parts.append(len(mean))
                all_sent.append(sent)
            self.sizes.append(parts)
            self.sent.append(all_sent)
        if not all(worker.closed() for worker in server.workers):
            raise Unexpected("a worker sent more than its steps")


class WorkerClient:
    """The original's end of a connection to a server."""

    def __init__(self, address, node_id, gpu_count=1, backend="cuda", connect=socket.create_connection):
        self.stream = Stream(connect(address, timeout=PATIENCE))
        self.stream.send(JOIN_REQUEST, text(node_id) + struct.pack("<I", gpu_count) + text(backend))
        reader = self.stream.expect(JOIN_ACCEPTED, "the coordinator")
        self.worker_id, self.total_workers = reader.number("I"), reader.number("I")
        reader.end()

    def wait_for_shard(self):
        """Its step, begin and end; nothing after Shutdown."""
        tag, reader = self.stream.read()
        if tag == SHUTDOWN:
            return None
        if tag != SHARD:
            raise Unexpected(f"expected ShardAssignment, got {tag}")
        return reader.number("Q"), reader.number("Q"), reader.number("Q")

    def send_gradient(self, step, gradients, loss, correct, total):
        self.stream.send(GRADIENT, struct.pack("<QI", step, self.worker_id) + floats(gradients)
                         + struct.pack("<fQQ", loss, correct, total))

    def receive_averaged(self):
        reader = self.stream.expect(AVERAGED, "the coordinator")
        return reader.number("Q"), reader.floats(), reader.number("f")

    def send_block_gradient(self, step, block_idx, num_blocks, gradients, component_sizes):
        self.stream.send(BLOCK, struct.pack("<QIII", step, self.worker_id, block_idx, num_blocks) + sizes(component_sizes)
                         + floats(gradients))

    def receive_averaged_block(self):
        reader = self.stream.expect(AVERAGED_BLOCK, "the coordinator")
        return reader.number("Q"), reader.number("I"), reader.sizes(), reader.floats()

    def send_non_block_gradient(self, step, component, gradients):
        self.stream.send(NON_BLOCK, struct.pack("<QIB", step, self.worker_id, component) + floats(gradients))

    def receive_averaged_non_block(self):
        reader = self.stream.expect(AVERAGED_NON_BLOCK, "the coordinator")
        return reader.number("Q"), reader.number("B"), reader.floats()

    def close(self):
        self.stream.close()


class Trainer:
    """allreduce_remote: the gradients of one step go, and their averages come back in their place."""

    def __init__(self, client):
        self.client, self.step = client, 0

    def allreduce(self, blocks, component_sizes, lm_head, final_norm, embedding):
        """All averages in the order in which they came."""
        client, averages = self.client, []
        for block in reversed(range(len(blocks))):
            client.send_block_gradient(self.step, block, len(blocks), blocks[block], component_sizes)
            step, got, got_sizes, mean = client.receive_averaged_block()
            if (step, got, got_sizes) != (self.step, block, list(component_sizes)):
                raise Unexpected(f"block {got} of step {step} came")
            averages.append(mean)
        for component, gradients in enumerate((lm_head, final_norm, embedding)):
            client.send_non_block_gradient(self.step, component, gradients)
            step, got, mean = client.receive_averaged_non_block()
            if (step, got) != (self.step, component):
                raise Unexpected(f"component {got} of step {step} came")
            averages.append(mean)
        self.step += 1
        return averages
