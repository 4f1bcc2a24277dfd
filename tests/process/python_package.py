#!/usr/bin/env python3
"""The package `lockstep` of Python: memory of others without copies, waits that neither hold the GIL nor keep Ctrl-C out,
errors that name the culprit, and the wheel, which needs nothing but the C library."""
# ctest: TIMEOUT 200
# builds: release

import array
import ast
import ctypes
import functools
import gc
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zipfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from ranks import skip
from torch_workers import ROOT, expect_raises, need_torch, run

TIMEOUT = 20.0  # of the jobs


# In this process.


def arrays_are_seen_where_they_lie():
    import numpy
    import torch

    from lockstep.arrays import Type, view

    for name, kind in {"float32": Type.F32, "float64": Type.F64, "float16": Type.F16, "int32": Type.I32, "int64": Type.I64,
                       "uint8": Type.U8}.items():
        own = numpy.zeros((3, 4), name)
        seen = view(own, writable=True)
        assert (seen.address, seen.count, seen.type) == (own.ctypes.data, 12, kind), seen
        tensor = torch.zeros(3, 4, dtype=getattr(torch, name))
        assert view(tensor)[:3] == (tensor.data_ptr(), 12, kind)
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    assert view(tensor)[:3] == (tensor.data_ptr(), 5, Type.BF16)
    trained = torch.zeros(5, requires_grad=True)
    assert view(trained)[:2] == (trained.data_ptr(), 5)
    part = torch.zeros(4, 5)[2]
    assert view(part)[:2] == (part.data_ptr(), 5)

    data = bytearray(7)
    assert view(data)[:3] == (ctypes.addressof((ctypes.c_char * 7).from_buffer(data)), 7, Type.U8)
    doubles = array.array("d", [1, 2, 3])
    assert view(doubles)[:3] == (doubles.buffer_info()[0], 3, Type.F64)
    floats = (ctypes.c_float * 6)()
    assert view(floats)[:3] == (ctypes.addressof(floats), 6, Type.F32)
    assert view(memoryview(floats)[2:4])[:2] == (ctypes.addressof(floats) + 8, 2)
    assert view(b"abc").count == 3

    expect_raises(ValueError, lambda: view(b"abc", writable=True), "only be read")
    read_only = numpy.zeros(3)
    read_only.flags.writeable = False
    expect_raises(ValueError, lambda: view(read_only, writable=True), "only be read")
    expect_raises(ValueError, lambda: view(numpy.zeros((4, 4))[:, 1]), "not contiguous")
    expect_raises(ValueError, lambda: view(torch.zeros(4, 4)[:, 1]), "not contiguous")
    expect_raises(TypeError, lambda: view(numpy.zeros(3, "complex128")), "complex128")
    expect_raises(TypeError, lambda: view([1.0, 2.0]), "list")
    constants_are_not_overwritten(torch.zeros(5))
    released = weakref.ref(tensor)
    kept = view(tensor)
    del tensor
    assert released() is not None and kept.count == 5  # a view keeps its owner


class Exporter:
    """An array of another library: `flags` of its capsule, or None for one that knows none."""

    def __init__(self, tensor, flags):
        self.tensor, self.flags = tensor, flags

    def __dlpack__(self, **asked):
        from lockstep import arrays

        if self.flags is None:
            if asked:
                raise TypeError("an argument that this version does not know")
            return self.tensor.__dlpack__()
        assert asked == {"max_version": (1, 0)}
        self.capsule = self.tensor.__dlpack__()
        pointer = arrays._capsule_pointer(self.capsule, b"dltensor")
        self.memory = arrays._DlpackVersioned(1, 0, None, None, self.flags, ctypes.cast(pointer, ctypes.POINTER(arrays._DlpackTensor)).contents)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.memory), b"dltensor_versioned", None)


def constants_are_not_overwritten(tensor):
    from lockstep.arrays import view

    for flags, writable in ((0, True), (1, False), (None, False)):
        own = Exporter(tensor, flags)
        assert view(own)[:2] == (tensor.data_ptr(), 5)
        if writable:
            assert view(own, writable=True).writable
        else:
            expect_raises(ValueError, lambda: view(own, writable=True), "only be read")


def checkpoints_hold_arrays():
    import numpy
    import torch

    import lockstep

    tensors = {"weights": numpy.arange(6, dtype="float32").reshape(2, 3), "flags": numpy.array([True, False]), "wide": numpy.array(3 + 4j, "complex64"),
               "none": numpy.zeros((0, 2), "int16"), "half": torch.ones(3, dtype=torch.bfloat16), "mask": torch.tensor([[True], [False]]),
               "bytes": torch.tensor([-1, 2], dtype=torch.int8)}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint-40")
        lockstep.save(path, tensors, b"more", 40)
        expect_raises(lockstep.Damaged, lambda: lockstep.save(path, tensors), "checkpoint-40")
        found = lockstep.Checkpoint(path)
        assert (found.step, found.metadata, found.tensors.keys()) == (40, b"more", tensors.keys())
        assert found.tensors["weights"] == ("F32", (2, 3), 24) and found.tensors["wide"] == ("C64", (), 8)
        assert found.tensors["mask"] == ("BOOL", (2, 1), 2) and found.tensors["bytes"][0] == "I8"
        back = {name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else numpy.zeros_like(each) for name, each in tensors.items()}
        found.read(back)
        for name, each in tensors.items():
            assert torch.equal(back[name], each) if isinstance(each, torch.Tensor) else (back[name] == each).all(), name
        found.read({})  # only looks whether it is intact
        expect_raises(KeyError, lambda: found.read({"other": back["flags"]}), "other")
        expect_raises(ValueError, lambda: found.read({"weights": numpy.zeros(5, "float32")}), "weights", "24 bytes", "20")
        expect_raises(ValueError, lambda: found.read({"half": torch.zeros(3, 2, dtype=torch.bfloat16)[:, 0]}), "not contiguous")
        read_only = numpy.zeros(6, "float32")
        read_only.flags.writeable = False
        expect_raises(ValueError, lambda: found.read({"weights": read_only}), "cannot be written")

        other = os.path.join(folder, "checkpoint-41")
        expect_raises(TypeError, lambda: lockstep.save(other, {"w": numpy.zeros(1, "complex128")}), "'w'", "complex128")
        expect_raises(ValueError, lambda: lockstep.save(other, {"w": numpy.zeros((4, 4), "float32")[:, 1]}), "not contiguous")
        expect_raises(ValueError, lambda: lockstep.save(other, {"w": torch.zeros(4, 4)[:, 1]}), "not contiguous")
        assert os.listdir(folder) == ["checkpoint-40"]
        expect_raises(lockstep.Damaged, lambda: lockstep.Checkpoint(other), "checkpoint-41")
        with open(os.path.join(path, "model.safetensors"), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x77")
        expect_raises(lockstep.Damaged, lambda: lockstep.Checkpoint(path).read(back), "damaged")


def interruptible_join():
    """Ctrl-C while others are missing."""
    import lockstep
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        expect_raises(KeyboardInterrupt, lambda: lockstep.join(
            rank=1, world_size=2, master_host="127.0.0.1", master_port=listener.getsockname()[1], timeout=TIMEOUT))
        assert time.monotonic() - began < TIMEOUT / 2
    os._exit(0)  # what it waited for still waits


# In workers.


def collectives_on_arrays():
    import numpy
    import torch

    import lockstep

    with lockstep.join(timeout=TIMEOUT) as job:
        rank, group = job.rank, job.communicator
        own = numpy.full(1000, rank + 1, "float32")
        address = own.ctypes.data
        group.all_reduce(own)
        assert own.ctypes.data == address and (own == 3).all()
        tensor = torch.full((10,), float(rank), dtype=torch.bfloat16)
        work = group.all_reduce(tensor, lockstep.Op.MAX, wait=False)
        assert work.wait() and work.done() and (tensor == 1).all()
        out = bytearray(4)
        group.all_gather(bytearray([rank, 7]), out)
        assert bytes(out) == bytes([0, 7, 1, 7])
        part = group.split(color=rank)
        assert part.world_size == 1
        part.close()
        buffer = group.allocate(16)
        buffer.numpy()[:] = rank
        group.all_reduce(buffer.view())
        assert (buffer.numpy() == 1).all()
        buffer.release()
        # Whoever forgets a work: its array stays until the collective has ended.
        if rank == 0:
            forgotten = numpy.zeros(1 << 16)
            alive = weakref.ref(forgotten)
            group.recv(forgotten, 1, wait=False)
            del forgotten
            gc.collect()
            assert alive() is not None
            group.send(bytearray(1), 1)
        else:
            group.recv(bytearray(1), 0)
            group.send(numpy.ones(1 << 16), 0)
        expect_raises(lockstep.Misuse, lambda: group.broadcast(own, root=9))


def works_end_while_others_are_looked_at():
    """Some thread waits for works while another one starts so many that it is looked which have ended."""
    import lockstep
    from lockstep.communicator import FORGOTTEN

    with lockstep.join(timeout=TIMEOUT) as job:
        works = [job.communicator.barrier(wait=False) for _ in range(FORGOTTEN)]
        done = lockstep.Work.done

        def done_while_others_end(work):
            if works:
                other = threading.Thread(target=works.pop().wait)
                other.start()
                other.join()
            return done(work)

        lockstep.Work.done = done_while_others_end
        job.communicator.barrier()
        lockstep.Work.done = done


def lane_sum():
    import numpy

    import lockstep

    def compute(lane, gradient, numbers):
        gradient += numpy.float32(0.1) * (lane + 1)
        numbers[0] = lane

    with lockstep.join(timeout=TIMEOUT) as job:
        sums = lockstep.LaneSum(job, lanes=5, elements=100, numbers=1)
        total = sums.sum(1, compute)
        print(lockstep.blake3(total.gradient).hex(), total.numbers)
        sums.close()


def lanes_by_hand():
    """What LaneSum does, of its parts; and what a job tells beside it."""
    import numpy

    import lockstep

    lanes = 5

    def gradient(lane):
        return numpy.linspace(0.1, 1.7 ** lane, 100, dtype="float32")

    def add_gradient(lane, place, _):
        place += gradient(lane)

    with lockstep.join(timeout=TIMEOUT) as job:
        own = (lanes, job.world_size, job.rank)
        plan = lockstep.schedule(*own)
        assert [step.lane for step in plan.steps] == list(lockstep.lanes_of(*own))
        sums = [numpy.zeros(100, "float32") for _ in range(plan.accumulators)]
        for step in plan.steps:
            sums[step.accumulator][:] = gradient(step.lane)
            for into, source in step.merges:
                lockstep.accumulate(sums[into], sums[source])
        total = numpy.zeros(100, "float32")
        job.communicator.reduce_nodes(sums[:len(lockstep.partials_of(*own))], lanes, total)
        assert (total == lockstep.LaneSum(job, lanes, 100).sum(1, add_gradient).gradient).all()
        print(lockstep.blake3(total).hex())
        assert job.wishes == lockstep.Wishes(0, False, False) and job.departed == []
        with tempfile.TemporaryDirectory() as folder:
            job.write_flight(folder, "because")
            (flight,) = pathlib.Path(folder).rglob("rank-*.json")
            assert "because" in flight.read_text()


def the_gil_is_free(pipe):
    """A thread waits for a message that the main thread of the same process sets off."""
    import lockstep

    with lockstep.join(timeout=TIMEOUT) as job:
        if job.rank == 1:
            os.read(pipe[0], 1)
            job.communicator.send(b"x", 0)
            return
        came = bytearray(1)
        waiting = threading.Thread(target=lambda: job.communicator.recv(came, 1))
        waiting.start()
        os.write(pipe[1], b"x")  # with the GIL held by the thread nobody would get here
        waiting.join(TIMEOUT)
        assert bytes(came) == b"x"


def ctrl_c(pipe):
    import lockstep

    def interrupted():
        with lockstep.join(timeout=TIMEOUT) as job:
            if job.rank == 0:
                threading.Thread(target=lambda: (os.read(pipe[0], 1), os.kill(os.getpid(), signal.SIGINT))).start()
                os.write(pipe[1], b"x")
                job.communicator.barrier()  # the other one never comes
            job.communicator.recv(bytearray(1), 0)

    if os.environ["RANK"] == "0":
        expect_raises(KeyboardInterrupt, interrupted)
    else:
        error = expect_raises(lockstep.Aborted, interrupted, "KeyboardInterrupt")
        assert error.rank == 0 and "rank 0" in error.culprit


def a_block_may_leave_before_its_end():
    import lockstep

    with lockstep.join(timeout=TIMEOUT) as job:
        job.leave()


def a_fork_has_no_job():
    """It ends as any process, and disturbs nobody."""
    import lockstep

    with lockstep.join(timeout=TIMEOUT) as job:
        part = job.communicator.split(0)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            expect_raises(ValueError, lambda: job.rank, "closed")
            for group in (job.communicator, part):
                expect_raises(ValueError, group.barrier, "closed")
            del part, group
            return
        assert os.waitpid(pid, 0)[1] == 0
        part.barrier()
        job.communicator.barrier()


def what_fails_in_one_worker_is_told():
    import lockstep

    def fails():
        with lockstep.join(timeout=TIMEOUT) as job:
            if job.rank == 1:
                lockstep.Checkpoint("/nowhere/checkpoint-1")
            job.communicator.recv(bytearray(1), 1)

    if os.environ["RANK"] == "1":
        expect_raises(lockstep.Damaged, fails)
    else:
        expect_raises(lockstep.Aborted, fails, "rank 1", "Damaged", "checkpoint-1")


def a_worker_dies():
    import lockstep

    job = lockstep.join(timeout=TIMEOUT)
    if job.rank == 2:
        os._exit(0)
    assert lockstep.Error("lost", rank=2).culprit == "rank 2" and lockstep.Error("lost").culprit is None
    error = expect_raises(lockstep.PeerLost, lambda: job.communicator.barrier(), "rank 2")
    assert (error.code, error.rank) == (lockstep.Code.PEER_LOST, 2) and "rank 2" in error.culprit
    expect_raises(lockstep.PeerLost, lambda: job.communicator.all_reduce(bytearray(3)), "rank 2")


def calls_differ():
    import lockstep

    job = lockstep.join(timeout=TIMEOUT)
    data = bytearray(3)
    call = job.communicator.all_reduce if job.rank == 0 else job.communicator.broadcast
    error = expect_raises(lockstep.Mismatch, lambda: call(data), "all_reduce", "broadcast")
    assert error.rank is not None and error.culprit


def a_worker_is_late(pipe):
    import lockstep

    job = lockstep.join(timeout=TIMEOUT)
    if job.rank == 1:
        os.read(pipe[0], 1)
        return os._exit(0)
    error = expect_raises(TimeoutError, lambda: job.communicator.barrier(timeout=0.3), "rank 1")
    assert error.code == lockstep.Code.TIMEOUT and error.rank == 1
    os.write(pipe[1], b"x")


def a_job_has_a_timeout_for_calls(pipe):
    """Of calls that have none of their own, in groups, too, and of sums over lanes. The heartbeat's is another one."""
    import lockstep

    job = lockstep.join(timeout=TIMEOUT, call_timeout=0.3)
    part = job.communicator.split(color=0)
    sums = lockstep.LaneSum(job, lanes=2, elements=1)
    if job.rank == 1:
        os.read(pipe[0], 1)
        return os._exit(0)
    error = expect_raises(TimeoutError, {"barrier": job.communicator.barrier, "part": part.barrier, "sum": lambda: sums.sum(1, lambda *_: None),
                                         "leave": job.leave}[os.environ["CALL"]], "rank 1")
    assert error.code == lockstep.Code.TIMEOUT and error.rank == 1
    os.write(pipe[1], b"x")


def run_all(workers, function, with_pipe=False):
    pipe = os.pipe() if with_pipe else None
    ended = run(workers, functools.partial(function, pipe) if pipe else function)
    for rank, each in enumerate(ended):
        if each.code != 0:
            sys.exit(f"{function.__name__}: rank {rank} ended with {each.code}\n{each.output}")
    print(f"{function.__name__}: {max(each.seconds for each in ended):.1f} s", flush=True)
    return [each.output for each in ended]


LOOP = """
import os, numpy, lockstep
job = lockstep.join(timeout=20, survive=True, min_workers=3)
victim = not job.newcomer and job.rank == 1
weights = numpy.zeros(5, "float32")

def step(number):
    if job.generation > 1:
        print("here", job.world_size, [(gone.rank, gone.kind) for gone in job.departed], job.newcomers, flush=True)
    assert job.world_size == 3, f"step {number} with {job.world_size} workers"
    if victim and number == 3:
        os.kill(os.getpid(), 9)
    change = numpy.full(5, number, "float32")
    job.communicator.all_reduce(change, lockstep.Op.MAX)
    weights[:] += change

lockstep.run_steps(job, 6, [weights], step)
assert (weights == 21).all(), weights
job.leave()
"""


def a_loop_waits_for_its_workers():
    """One is lost; with fewer than min_workers no step is made until somebody has come in its place."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "loop.py")
        pathlib.Path(program).write_text(LOOP)
        done = subprocess.run([sys.executable, "-m", "lockstep", "run", "--workers", "3", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=60)
    assert done.returncode == 0 and "killed by signal 9" in done.stdout and "here 3" in done.stdout, done.stdout
    print("a_loop_waits_for_its_workers", flush=True)


def a_command_that_is_missing_is_named():
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_BIN"}
    told = subprocess.run([sys.executable, "-m", "lockstep", "--version"], env=environment, capture_output=True, text=True, timeout=60)
    assert told.returncode == 1 and "LOCKSTEP_BIN" in told.stderr and "Traceback" not in told.stderr, told


# The wheel.


def the_wheel_is_complete():
    sys.path.insert(0, str(ROOT / "python"))
    import build_wheel

    build = pathlib.Path(os.environ["LOCKSTEP_BUILD_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        name = build_wheel.build_wheel(folder, {"build-dir": str(build)})
        assert re.fullmatch(r"lockstep-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", name), name
        with zipfile.ZipFile(os.path.join(folder, name)) as wheel:
            wheel.extractall(os.path.join(folder, "installed"))
        installed = os.path.join(folder, "installed")
        os.chmod(os.path.join(installed, "lockstep", "bin", "lockstep"), 0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        environment["PYTHONPATH"] = installed
        told = subprocess.run([sys.executable, "-m", "lockstep", "--version"], env=environment, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0 and "lockstep" in told.stdout, told
        program = "import lockstep; job = lockstep.join(); data = bytearray(b'abc'); job.communicator.all_reduce(data); print(lockstep.__file__, data)"
        alone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
        assert alone.returncode == 0 and installed in alone.stdout and "abc" in alone.stdout, alone


def the_files_are_written_for_python_3_9_and_documented():
    for path in sorted((ROOT / "python" / "lockstep").rglob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            if public and path.name not in ("process_group.py", "work.py"):  # whose methods are PyTorch's
                members = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
                for each in members:
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
                        assert each.returns is not None, f"{path}: {each.name} has no type hints"
                        assert ast.get_docstring(each), f"{path}: {each.name} has no docstring"


def main():
    need_torch()
    if not os.path.exists(os.environ["LOCKSTEP_LIBRARY"]):
        skip("this build makes no liblockstep.so (libsodium.a and libcrypto.a are needed)")
    the_files_are_written_for_python_3_9_and_documented()
    arrays_are_seen_where_they_lie()
    checkpoints_hold_arrays()
    run_all(1, interruptible_join)
    run_all(2, collectives_on_arrays)
    run_all(1, works_end_while_others_are_looked_at)
    sums = run_all(1, lane_sum) + run_all(3, lane_sum)
    assert len(set(sums)) == 1, sums
    sums = run_all(1, lanes_by_hand) + run_all(2, lanes_by_hand) + run_all(3, lanes_by_hand)
    assert len(set(sums)) == 1, sums
    run_all(2, the_gil_is_free, with_pipe=True)
    run_all(2, ctrl_c, with_pipe=True)
    run_all(2, a_block_may_leave_before_its_end)
    run_all(2, a_fork_has_no_job)
    run_all(2, what_fails_in_one_worker_is_told)
    run_all(3, a_worker_dies)
    run_all(2, calls_differ)
    run_all(2, a_worker_is_late, with_pipe=True)
    for call in ("barrier", "part", "sum", "leave"):
        os.environ["CALL"] = call
        run_all(2, a_job_has_a_timeout_for_calls, with_pipe=True)
    a_loop_waits_for_its_workers()
    a_command_that_is_missing_is_named()
    the_wheel_is_complete()


if __name__ == "__main__":
    main()
