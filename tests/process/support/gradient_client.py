"""A client of the gradient server, written from docs/wire_protocol.md alone."""

import hashlib
import hmac
import os
import socket
import struct
from array import array
from dataclasses import dataclass, field

# Messages: name, tag, fields. The types are those of the page.
_MESSAGES = [
    ("JoinRequest", 0x01, "node_id:text gpu_count:I backend:text"),
    ("JoinAccepted", 0x02, "worker_id:I total_workers:I"),
    ("ShardAssignment", 0x03, "step:Q shard_start:Q shard_end:Q"),
    ("GradientPayload", 0x04, "step:Q worker_id:I gradients:vector loss:f correct:Q total:Q"),
    ("AveragedGradient", 0x05, "step:Q gradients:vector global_loss:f"),
    ("Heartbeat", 0x06, "node_id:text timestamp_ms:Q"),
    ("Shutdown", 0x07, ""),
    ("BlockGradientPayload", 0x08,
     "step:Q worker_id:I block_idx:I num_blocks:I component_sizes:sizes gradients:vector"),
    ("AveragedBlockGradient", 0x09, "step:Q block_idx:I component_sizes:sizes gradients:vector"),
    ("NonBlockGradientPayload", 0x0A, "step:Q worker_id:I component:B gradients:vector"),
    ("AveragedNonBlockGradient", 0x0B, "step:Q component:B gradients:vector"),
    ("PartialSum", 0x40, "step:Q offset:Q lanes:I lane_begin:I lane_end:I call:Q tail_count:I sum:vector tail:tail"),
    ("RawSum", 0x41, "step:Q offset:Q lanes:I call:Q tail_count:I sum:vector tail:tail"),
    ("Alive", 0x42, ""),
    ("Halt", 0x43, "code:B worker:i reason:text"),
    ("Refusal", 0x44, "code:B worker:i reason:text"),
    ("Totals", 0x45, "step:Q loss:f correct:Q total:Q"),
    ("Welcome", 0x46, "timeout_ms:Q mode:B average:B total_samples:Q largest_frame:I"),
    ("Bytes", 0x47, "to:I from_:I stamp:64s bytes:rest"),
]
_BY_NAME = {name: (tag, [each.split(":") for each in fields.split()]) for name, tag, fields in _MESSAGES}
_BY_TAG = {tag: name for name, tag, _ in _MESSAGES}

MAGIC, VERSION = b"LSKP", 6
HELLO, PROOF, REFUSAL = 1, 2, 3
JOIN, ROSTER, GOODBYE = 16, 17, 36
PURPOSE_RENDEZVOUS, PURPOSE_SERVER = 1, 4


class Refused(Exception):
    """The server said why; `code` is the error's."""

    def __init__(self, code, reason):
        super().__init__(reason)
        self.code = code


class Closed(Exception):
    """The server closed the connection."""


@dataclass
class Message:
    name: str
    fields: dict = field(default_factory=dict)

    def __getattr__(self, name):
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


def encode(name, **values):
    """A whole frame."""
    tag, fields = _BY_NAME[name]
    body = [struct.pack("<B", tag)]
    for field_name, kind in fields:
        value = values.pop(field_name)
        if kind == "text":
            text = value.encode()
            body.append(struct.pack("<I", len(text)) + text)
        elif kind == "vector":
            body.append(struct.pack("<Q", len(value)) + array("f", value).tobytes())
        elif kind == "sizes":
            body.append(struct.pack("<I", len(value)) + array("I", value).tobytes())
        elif kind == "tail":
            body.append(array("d", value).tobytes())
        elif kind == "rest":
            body.append(value)
        else:
            body.append(struct.pack("<" + kind, value))
    assert not values, f"{name} has no {list(values)}"
    body = b"".join(body)
    return struct.pack(">I", len(body)) + body


def decode(body):
    """A message from all the bytes behind the length."""
    name = _BY_TAG[body[0]]
    values, at = {}, 1

    def take(size):
        nonlocal at
        assert size <= len(body) - at, f"{name} is cut short"
        at += size
        return body[at - size:at]

    def number(kind):
        return struct.unpack("<" + kind, take(struct.calcsize("<" + kind)))[0]

    def numbers(code, size, count):
        assert count <= (len(body) - at) // size, f"{name} is cut short"
        values = array(code)
        values.frombytes(bytes(take(size * count)))
        return values

    for field_name, kind in _BY_NAME[name][1]:
        if kind == "text":
            values[field_name] = bytes(take(number("I"))).decode()
        elif kind == "vector":
            values[field_name] = numbers("f", 4, number("Q"))
        elif kind == "sizes":
            values[field_name] = list(numbers("I", 4, number("I")))
        elif kind == "tail":
            values[field_name] = numbers("d", 8, values["tail_count"])
        elif kind == "rest":
            values[field_name] = bytes(take(len(body) - at))
        else:
            values[field_name] = number(kind)
    assert at == len(body), f"{name} has bytes left over"
    return Message(name, values)


class Connection:
    """Frames over a socket, either side's."""

    def __init__(self, sock):
        self.socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, name, **values):
        self.socket.sendall(encode(name, **values))

    def send_bytes(self, data):
        self.socket.sendall(data)

    def read_exactly(self, size):
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self.socket.recv_into(view[got:])
            if count == 0:
                raise Closed("the connection was closed")
            got += count
        return data

    def receive_any(self):
        (length,) = struct.unpack(">I", self.read_exactly(4))
        return decode(self.read_exactly(length))

    def receive(self, name=None):
        """The next message, signs of life aside; Refused if it says that it is over."""
        while True:
            message = self.receive_any()
            if message.name == "Alive":
                continue
            if message.name in ("Halt", "Refusal") and name != message.name:
                raise Refused(message.code, message.reason)
            if name is not None and message.name != name:
                raise AssertionError(f"a {name} was expected, not {message}")
            return message

    def alive(self):
        self.send("Alive")

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def connect(address, patience=30.0):
    sock = socket.create_connection(address, timeout=patience)
    return Connection(sock)


def envelope(kind, body):
    return MAGIC + struct.pack("<HBBI", VERSION, kind, 0, len(body)) + body


def read_envelope(connection):
    header = connection.read_exactly(12)
    assert header[:4] == MAGIC
    version, kind, zero, length = struct.unpack("<HBBI", header[4:])
    assert (version, zero) == (VERSION, 0) and length <= 8192
    body = bytes(connection.read_exactly(length))
    if kind == REFUSAL:
        code, _, size = struct.unpack_from("<BiI", body)
        raise Refused(code, body[9:9 + size].decode())
    return kind, body


def make_hello(token=b"", job=b"lockstep", purpose=PURPOSE_SERVER, rank=-1, member=None, generation=0):
    """Asks for no protection, as on one host; then nobody uses the X25519 key."""
    return (struct.pack("<BBBBIIi", purpose, 1 if token else 0, 0, 0, generation, 0, rank) + (member or os.urandom(16)) + os.urandom(32)
            + os.urandom(32) + struct.pack("<I", len(job)) + job)


def make_proof(role, token, client_hello, server_hello):
    key = hashlib.sha256(b"lockstep token 1\n" + token).digest()
    transcript = struct.pack("<BH", role, VERSION) + client_hello + server_hello
    return hmac.new(key, transcript, hashlib.sha256).digest()


def shake_hands(connection, token=b"", **hello):
    """Proves the token to the server and has it proven."""
    own = make_hello(token, **hello)
    connection.send_bytes(envelope(HELLO, own))
    kind, theirs = read_envelope(connection)
    assert kind == HELLO
    connection.send_bytes(envelope(PROOF, make_proof(1, token, own, theirs)))
    kind, proof = read_envelope(connection)
    assert kind == PROOF
    assert hmac.compare_digest(proof, make_proof(2, token, own, theirs)), "the server does not know the token"


@dataclass
class Worker:
    """A member of the job."""
    connection: Connection
    node_id: str
    worker_id: int
    total_workers: int
    welcome: Message = None  # ours

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()


def ask_to_join(connection, node_id):
    connection.send("JoinRequest", node_id=node_id, gpu_count=0, backend="python")


def join(address, node_id, own=False, token=b""):
    """As an original worker, or with the handshake as one of Lockstep's own."""
    connection = connect(address)
    try:
        if own:
            shake_hands(connection, token)
        ask_to_join(connection, node_id)
        accepted = connection.receive("JoinAccepted")
        welcome = connection.receive("Welcome") if own else None
        return Worker(connection, node_id, accepted.worker_id, accepted.total_workers, welcome)
    except BaseException:
        connection.close()
        raise


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def make_stamp(sequence, payload, part=0):
    """Of a broadcast of bytes, say; the server looks at its payload alone."""
    head = struct.pack("<HBBBBBBIIQQQII", 0x534C, 1, 2, 0, 0, 0, 0, 0, 0, sequence, payload, 0, 0, 0) + struct.pack("<I", part)
    rest = struct.pack("<Q", payload)
    return head + struct.pack("<I", crc32c(head + bytes(4) + rest)) + rest


def blake3_of_a_block(message):
    """The first four bytes of BLAKE3, as a number, of a message of at most 64 bytes."""
    start = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
    words = list(struct.unpack("<16I", message.ljust(64, b"\0")))
    v = start + start[:4] + [0, 0, len(message), 1 | 2 | 8]  # the first, the last and the root

    def mix(a, b, c, d, x, y):
        for shift_d, shift_b, word in ((16, 12, x), (8, 7, y)):
            v[a] = (v[a] + v[b] + word) & 0xFFFFFFFF
            v[d] = rotate(v[d] ^ v[a], shift_d)
            v[c] = (v[c] + v[d]) & 0xFFFFFFFF
            v[b] = rotate(v[b] ^ v[c], shift_b)

    def rotate(value, by):
        return (value >> by | value << 32 - by) & 0xFFFFFFFF

    for _ in range(7):
        for i, places in enumerate(((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
                                    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))):
            mix(*places, words[2 * i], words[2 * i + 1])
        words = [words[i] for i in (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)]
    return v[0] ^ v[8]


class Rank:
    """A rank of a job: its control link, and its connection for data once all are there."""

    def __init__(self, address, rank, world_size, version, token=b""):
        self.address, self.rank, self.token, self.member = address, rank, token, os.urandom(16)
        self.link, self.data = connect(address), None
        shake_hands(self.link, token, purpose=PURPOSE_RENDEZVOUS, rank=rank, member=self.member)
        texts = [version, "python", "boot", "", "", "python", ""]
        card = (struct.pack("<ii", rank, world_size) + self.member + struct.pack("<iQ", os.getpid(), 0)
                + b"".join(struct.pack("<I", len(text)) + text.encode() for text in texts))
        self.tag = 0  # of the generation
        # It is new, does not survive losses, comes from no generation and has made no steps.
        self.link.send_bytes(envelope(JOIN, struct.pack("<IBBI", 30000, 0, 0, 1) + bytes(4 + 16 + 8) + card))

    def connect(self):
        kind, body = read_envelope(self.link)
        assert kind == ROSTER, kind
        place = 8
        for _ in range(2):  # what the centre is, and its host
            place += 4 + struct.unpack_from("<I", body, place)[0]
        self.tag = blake3_of_a_block(body[place + 4:place + 24])
        self.data = connect(self.address)
        shake_hands(self.data, self.token, purpose=PURPOSE_SERVER, rank=self.rank, member=self.member, generation=self.tag)

    def leave(self):
        self.link.send_bytes(envelope(GOODBYE, struct.pack("<II", self.tag, 0)))
        self.close()

    def close(self):
        self.link.close()
        if self.data:
            self.data.close()


# What the page says about averages; f32 arithmetic is that of double, rounded.

def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def tree_sum(values, add):
    if len(values) == 1:
        return values[0]
    split = 1
    while split * 2 < len(values):
        split *= 2
    return add(tree_sum(values[:split], add), tree_sum(values[split:], add))


def add_f32(a, b):
    return array("f", (f32(x + y) for x, y in zip(a, b)))


def average(vectors, weights=None):
    """mean without weights, weighted with them."""
    if weights is None:
        factor = f32(1 / len(vectors))
        leaves = vectors
    else:
        if sum(weights) == 0:
            return array("f", [0.0] * len(vectors[0]))
        factor = f32(1 / sum(weights))
        leaves = [array("f", (f32(f32(w) * x) for x in vector)) for w, vector in zip(weights, vectors)]
    return array("f", (f32(factor * x) for x in tree_sum(leaves, add_f32)))


def global_loss(losses, totals):
    if sum(totals) == 0:
        return 0.0
    weighted = [f32(loss) * total for loss, total in zip(losses, totals)]
    return f32(tree_sum(weighted, lambda a, b: a + b) / sum(totals))


def shard(total, workers, worker):
    size = total // workers
    return worker * size, total if worker == workers - 1 else (worker + 1) * size
