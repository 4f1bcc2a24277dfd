#!/usr/bin/env python3
"""What travels between hosts: nobody on the way can read or change it, unless all sides have asked for a plain wire; which tokens will do."""
# ctest: TIMEOUT 120
# builds: release

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import Hosts, enter_own_network  # noqa: E402
from ranks import Cases, Failure, die_with_parent  # noqa: E402

LOCKSTEP = os.environ["LOCKSTEP_BIN"]
PORT = 4711  # in namespaces of our own
PATIENCE = 30
ETH_P_ALL = 3
MARK = "a-name-to-look-for"
HELLO_AND_PROOF = 12 + 96 + 4 + len("lockstep") + 12 + 32  # what a client says in the handshake


def relay(listen, to, flip, record):
    """One connection from `listen` on to `to`, as somebody on the way sees it; the bit of that byte of the caller's is another one."""
    listener = socket.create_server((listen, PORT))
    print("ready", flush=True)
    near = listener.accept()[0]
    far = socket.create_connection((to, PORT))
    seen = [b"", b""]

    def pass_on(side, source, sink):
        try:
            while data := source.recv(65536):
                begin = len(seen[side])
                seen[side] += data
                if side == 0 and begin <= flip < begin + len(data):
                    at = flip - begin
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    threads = [threading.Thread(target=pass_on, args=each) for each in ((0, near, far), (1, far, near))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Path(record).write_bytes(seen[0] + seen[1])


class Started:
    def __init__(self, host, *words):
        self.popen = subprocess.Popen([*host.enter, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent)

    def first_line(self):
        return self.popen.stdout.readline()

    def lines_until(self, pattern):
        """What it says up to a line with that pattern."""
        lines = ""
        while not re.search(pattern, lines):
            line = self.first_line()
            expect(line, f"it has ended without '{pattern}'", lines)
            lines += line
        return lines

    def end(self, patience=PATIENCE):
        limit = threading.Timer(patience, self.popen.kill)
        limit.start()
        text = self.popen.stdout.read()  # communicate() would not see what first_line() has read ahead
        self.popen.wait()
        limit.cancel()
        return self.popen.returncode, text

    def stop(self):
        self.popen.terminate()
        return self.end()


def expect(condition, *what):
    if not condition:
        raise Failure("\n".join(map(str, what)))


def star(hosts, folder, coordinator=(), worker=(), flip=-1):
    """A coordinator, its worker and somebody between them: what the three have to say."""
    token = Path(folder) / "token"
    token.write_text("correct horse battery staple\n")
    token.chmod(0o600)
    record = Path(folder) / "record"
    server = Started(hosts[0], LOCKSTEP, "coordinator", "--bind", f"{hosts.network.address(0)}:{PORT}", "--mode", "vector", "--steps", 3,
                     "--timeout", 5, "--token-file", token, *coordinator)
    expect("listening" in server.first_line(), "no coordinator")
    between = Started(hosts[1], sys.executable, __file__, "--relay", hosts.network.address(1), hosts.network.address(0), flip, record)
    expect("ready" in between.first_line(), "no relay")
    client = Started(hosts[2], LOCKSTEP, "worker", "--coordinator", f"{hosts.network.address(1)}:{PORT}", "--elements", 100_000, "--check",
                     "--node-id", MARK, "--timeout", 5, "--token-file", token, *worker)
    said = client.end()
    between.end()
    served = server.end() if said[0] == 0 else server.stop()
    return served, said, record.read_bytes()


def readable(plain):
    flags = ["--plain-wire"] if plain else []
    with Hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        served, said, seen = star(hosts, folder, flags, flags)
        expect(served[0] == 0 and said[0] == 0, served, said)
        expect(len(seen) > 2 * 3 * 400_000, "the gradients did not pass here")
        expect((MARK.encode() in seen) == plain, "the relay", "cannot read" if plain else "can read", "what passes")


def train(hosts, folder, *options):
    """One rank on each of two hosts; returns the line with the hash of the weights."""
    token, text = Path(folder) / "token", Path(folder) / "text.txt"
    token.touch(mode=0o600)
    token.write_text("correct horse battery staple\n")
    text.write_text("a line of text to learn by heart\n" * 100)
    ranks = [Started(hosts[rank], "env", f"RANK={rank}", "WORLD_SIZE=2", f"MASTER_ADDR={hosts.network.address(0)}", f"MASTER_PORT={PORT}",
                     LOCKSTEP, "train", "--data", text, "--steps", 2, "--hidden", 32, "--layers", 1, "--heads", 2, "--intermediate", 48,
                     "--context", 32, "--global-batch", 4, "--micro-batch", 2, "--threads", 1, "--transport", "tcp", "--token-file", token,
                     *options) for rank in range(2)]
    said = [rank.end() for rank in ranks]
    expect(all(code == 0 for code, _ in said), said)
    return re.search("^weights blake3:.*", said[0][1], re.MULTILINE).group()


def passed(port):
    """The bytes that have come in at a port of the switch."""
    counters = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)
    return next(int(numbers.split()[0]) for name, numbers in counters.items() if name.strip() == port)


def compressed(plain):
    """The same weights, with fewer bytes between the hosts."""
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        weights, bytes_sent = {}, {}
        for way in ("off", "on", "auto"):
            before = passed(hosts.network.port(0))
            weights[way] = train(hosts, folder, "--wire-compress", way, *(["--plain-wire"] if plain else []))
            bytes_sent[way] = passed(hosts.network.port(0)) - before
        expect(len(set(weights.values())) == 1, weights)
        expect(bytes_sent["on"] < 0.92 * bytes_sent["off"], bytes_sent)


def mesh_readable(plain):
    """Two ranks on two hosts; somebody listens at the switch. The settings that ranks compare travel as text."""
    mark, everybody_sees = b"processor and C library", b"lockstep"  # the job's name is in the first word of a handshake
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        listener.bind((hosts.network.port(0), ETH_P_ALL))
        listener.settimeout(0.1)
        seen, ended = [], threading.Event()

        def listen():
            while not ended.is_set():
                try:
                    seen.append(listener.recv(65536))
                except TimeoutError:
                    pass

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            train(hosts, folder, *(["--plain-wire"] if plain else []))
        finally:
            ended.set()
            thread.join()
            listener.close()
        all_seen = b"".join(seen)
        expect(everybody_sees in all_seen, "nothing was heard")
        expect((mark in all_seen) == plain, "who listens", "cannot read" if plain else "can read", "what ranks tell each other")


def changed(plain):
    flags = ["--plain-wire"] if plain else []
    with Hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        served, said, _ = star(hosts, folder, flags, flags, flip=HELLO_AND_PROOF + 400_000)
        expect(said[0] != 0 and "damaged or changed on the way" in served[1], served, said)


def handshake_changed(byte):
    """The protection that is asked for is the third byte of a hello; nobody can ask for less on the way."""
    with Hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        served, said, _ = star(hosts, folder, flip=byte)
        expect(said[0] != 0 and "wrong token" in said[1] + served[1], served, said)


def one_plain_side():
    with Hosts(3) as hosts, tempfile.TemporaryDirectory() as folder:
        served, said, seen = star(hosts, folder, ["--plain-wire"], [])
        expect(said[0] != 0 and "asks for an encrypted one, the listening side for a plain wire (--plain-wire)" in said[1], served, said)
        expect(MARK.encode() not in seen, "the worker told its name all the same")


def tokens():
    with Hosts(1) as hosts, tempfile.TemporaryDirectory() as folder:
        address = f"{hosts.network.address(0)}:0"
        short = Path(folder) / "short"
        short.write_text("fifteen letters\n")
        short.chmod(0o600)
        code, text = Started(hosts[0], LOCKSTEP, "coordinator", "--bind", address, "--token-file", short).end()
        expect(code != 0 and "the job's token has 15 bytes" in text, code, text)
        shown = Path(folder) / "shown"
        shown.write_text("correct horse battery staple\n")
        shown.chmod(0o644)
        for flags, said in (([], ""), (["--insecure"], "no secret and no encryption")):
            coordinator = Started(hosts[0], LOCKSTEP, "coordinator", "--bind", address, "--token-file", shown, *flags)
            lines = coordinator.lines_until("listening on") + coordinator.stop()[1]
            expect("shown has mode 0644" in lines and said in lines, lines)
            expect(("--insecure" in lines) == bool(flags), lines)


def worker_without_token():
    """It works for whoever answers on another host, and says so; on its own host the kernel knows whose process answers."""
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text("correct horse battery staple\n")
        token.chmod(0o600)
        coordinator = ["--mode", "vector", "--steps", 1, "--timeout", 5]
        elsewhere = f"{hosts.network.address(0)}:{PORT}"
        for where, host, options, warned in ((elsewhere, 1, ["--token-file", token, "--insecure"], True), (f"127.0.0.1:{PORT}", 0, [], False)):
            server = Started(hosts[0], LOCKSTEP, "coordinator", "--bind", where, *coordinator, *options)
            server.lines_until("listening on")
            code, text = Started(hosts[host], LOCKSTEP, "worker", "--coordinator", where, "--elements", 10, "--timeout", 5).end()
            expect(code == 0 and server.end()[0] == 0, text)
            expect((f"warning: without a token nobody proves to be the coordinator: gradients go to whoever answers at {where}" in text) == warned, text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--relay"]:
        relay(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
        sys.exit()
    enter_own_network()
    cases = Cases(at_once=2)
    cases.run("encrypted: who is on the way reads nothing", readable, False)
    cases.run("plain wire: who is on the way reads it all", readable, True)
    cases.run("encrypted: who listens to a mesh reads nothing", mesh_readable, False)
    cases.run("plain wire: who listens to a mesh reads it all", mesh_readable, True)
    cases.run("encrypted and compressed: the same weights, fewer bytes", compressed, False)
    cases.run("plain wire and compressed: the same weights, fewer bytes", compressed, True)
    cases.run("encrypted: what is changed on the way is noticed", changed, False)
    cases.run("plain wire: what is damaged on the way is noticed", changed, True)
    cases.run("a hello that asks for less than was said", handshake_changed, 12 + 2)
    cases.run("a plain wire on one side only", one_plain_side)
    cases.run("a worker without a token", worker_without_token)
    cases.run("tokens that are short, shown or not asked for", tokens)
    cases.finish()
