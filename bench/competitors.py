"""The programs that are compared, each kept running and asked for one sample at a time."""

import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build/release"))
LOCKSTEP = BUILD / "lockstep"
PROGRAMS = BUILD / "bench"


class Failed(Exception):
    """A competitor ended, hung or computed something wrong."""


class Competitor:
    """A program that answers "BYTES SECONDS" with one line of JSON, and sleeps until asked."""

    def __init__(self, name, command, ranks, pipes=True, environment=None, patience=120.0):
        self.name = name
        self.patience = patience
        self._folder = None
        self._channels = []
        if pipes:
            # One pipe per rank: whoever waits inside an MPI call spins, whoever reads a pipe sleeps.
            self._folder = tempfile.mkdtemp(prefix="lockstep-bench-")
            command = [*command, "--serve", self._folder]
            for rank in range(ranks):
                path = os.path.join(self._folder, str(rank))
                os.mkfifo(path)
                # For reading too, so that opening does not wait for the program.
                self._channels.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL if pipes else subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, env={**os.environ, **(environment or {})})
        if not pipes:
            self._channels.append(os.dup(self._process.stdin.fileno()))
            self._process.stdin.close()
        self._pending = b""

    def measure(self, size, seconds):
        """The median in microseconds."""
        for channel in self._channels:
            os.write(channel, f"{size} {seconds}\n".encode())
        answer = self._answer()
        if not answer["correct"]:
            raise Failed(f"{self.name}: wrong result for {size} bytes")
        return answer["median_us"]

    def _answer(self):
        output = self._process.stdout.fileno()
        while True:
            line, found, rest = self._pending.partition(b"\n")
            if found:
                self._pending = rest
                if line.startswith(b"{"):
                    return json.loads(line)
                continue
            if not select.select([output], [], [], self.patience)[0]:
                raise Failed(f"{self.name}: no answer within {self.patience:.0f} s")
            data = os.read(output, 65536)
            if not data:
                raise Failed(f"{self.name} ended: {self._last_words()}")
            self._pending += data

    def _last_words(self):
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def close(self):
        for channel in self._channels:
            os.close(channel)
        # The pipes were ours to write and to read, so closing them is the end of the input.
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def lockstep(transport, ranks, algorithm="auto", name="lockstep"):
    command = [LOCKSTEP, "bench", "allreduce", "--serve", "--json", "--transport", transport,
               "--ranks", ranks, "--algorithm", algorithm, "--timeout", 600]
    return Competitor(name, command, ranks, pipes=False)


def _openmpi(name, ranks, options):
    command = ["mpirun.openmpi", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo", *options]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return Competitor(name, [*command, "-n", ranks, PROGRAMS / "openmpi_allreduce"], ranks)


def openmpi_shm(ranks):
    return _openmpi("Open MPI", ranks, [])


def openmpi_tcp(ranks):
    return _openmpi("Open MPI", ranks,
                    ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"])


def mpich_shm(ranks):
    return Competitor("MPICH", ["mpirun.mpich", "-n", ranks, PROGRAMS / "mpich_allreduce"], ranks)


def mpich_tcp(ranks):
    # NOLOCAL turns MPICH's own shared memory off, UCX_TLS that of the library below it.
    environment = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    return Competitor("MPICH", ["mpirun.mpich", "-n", ranks, PROGRAMS / "mpich_allreduce"], ranks,
                      environment=environment)


def gloo_ring(ranks):
    return Competitor("Gloo", [PROGRAMS / "gloo_allreduce", ranks, "ring"], ranks)


def raw_tcp(ranks):
    return Competitor("raw TCP", [PROGRAMS / "raw_tcp", ranks], ranks)


def memory_bound(ranks):
    return Competitor("memory", [PROGRAMS / "memory_bound", ranks], 1)


def available(program):
    return (PROGRAMS / program).exists()


def core_distance():
    """Nanoseconds between two cores just now."""
    return int(subprocess.run([PROGRAMS / "placement"], capture_output=True, text=True, check=True).stdout)
