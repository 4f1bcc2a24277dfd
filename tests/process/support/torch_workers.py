"""Workers of torch.distributed, forked from one process: importing PyTorch takes longer than all they do."""

import atexit
import importlib.util
import os
import pathlib
import runpy
import shutil
import sys
import tempfile
import time
import traceback

from ranks import die_with_parent, reserved_port, skip

ROOT = pathlib.Path(__file__).resolve().parents[3]
PATIENCE = 120.0  # seconds for a run of all its workers


def need_torch():
    """Makes `lockstep` importable, of this source tree and the build that is tested, and PyTorch, that of Debian."""
    if importlib.util.find_spec("torch") is None:
        if sys.executable == "/usr/bin/python3" or not os.path.exists("/usr/bin/python3"):
            skip("no PyTorch (python3-torch)")
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
    os.environ.setdefault("LOCKSTEP_LIBRARY", os.path.join(os.environ.get("LOCKSTEP_BUILD_DIR", ""), "liblockstep.so"))
    os.environ["PYTHONPATH"] = str(ROOT / "python")  # of processes that the test starts
    sys.path.insert(0, str(ROOT / "python"))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)  # a process with threads cannot be forked
    import lockstep.torch  # noqa: F401


class Ended:
    """How a worker ended: exit code, what it wrote, how long it took."""

    def __init__(self, code, output, seconds):
        self.code, self.output, self.seconds = code, output, seconds


def run(workers, function, transport="auto", environment=None):
    """Runs `function` on so many workers, as torchrun would start them. Returns how each ended, in their order."""
    files = [tempfile.TemporaryFile("w+") for _ in range(workers)]
    began = time.monotonic()
    with reserved_port() as port:
        pids = [_fork(function, files[rank], {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "LOCKSTEP_TRANSPORT": transport, **(environment or {})}) for rank in range(workers)]
        codes, seconds = {}, {}
        while len(codes) < workers:
            pid, status = os.waitpid(-1, os.WNOHANG if time.monotonic() - began < PATIENCE else 0)
            if pid == 0:
                if time.monotonic() - began > PATIENCE - 1:
                    for left in set(pids) - set(codes):
                        os.kill(left, 9)
                time.sleep(0.005)
                continue
            codes[pid] = os.waitstatus_to_exitcode(status)
            seconds[pid] = time.monotonic() - began
    ended = []
    for pid, file in zip(pids, files):
        file.seek(0)
        ended.append(Ended(codes[pid], file.read(), seconds[pid]))
        file.close()
    return ended


def run_all(workers, function, transport="auto"):
    """The same for workers that end well; exits if one of them does not. FOLDER is for what they write."""
    folder = tempfile.mkdtemp()  # a TemporaryDirectory would go with the first forked worker
    ended = run(workers, function, transport, {"FOLDER": folder})
    shutil.rmtree(folder)
    for rank, each in enumerate(ended):
        if each.code != 0:
            sys.exit(f"{function.__name__}, {workers} workers: rank {rank} ended with {each.code}\n{each.output}")
    print(f"{function.__name__}, {workers} workers: {max(each.seconds for each in ended):.1f} s", flush=True)


def run_program(workers, path, arguments, transport="auto"):
    """The output of a program of Python, run by so many workers; exits if one of them fails."""

    def program():
        sys.argv = [str(path), *map(str, arguments)]
        runpy.run_path(str(path), run_name="__main__")

    ended = run(workers, program, transport)
    for rank, each in enumerate(ended):
        if each.code != 0:
            sys.exit(f"{path.name}, {workers} workers over {transport}: rank {rank} ended with {each.code}\n{each.output}")
    return "".join(each.output for each in ended)


def _fork(function, file, environment):
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        die_with_parent()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.environ.update(environment)
        try:
            function()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            sys.last_value = error
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def expect_raises(kind, function, *words):
    try:
        function()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{error!r} lacks {missing}"
        return error
    raise AssertionError(f"no {kind.__name__}")
