#!/usr/bin/env python3
"""PyTorch over the backend lockstep: DistributedDataParallel gives the parameters that it gives over Gloo; who is missing, dead or
different is named; checkpoints are resumed by other numbers of workers; a killed worker is survived, or waited for, under our
launcher."""
# ctest: TIMEOUT 400
# builds: release

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from ranks import children_of, reserved_port, wait_for
from torch_workers import ROOT, expect_raises, need_torch, run, run_all, run_program

GPT = ROOT / "examples" / "torch" / "gpt.py"
GPT_WITH_LOSSES = ROOT / "tests" / "process" / "support" / "gpt_with_losses.py"
SMALL = ("--batch", 1, "--context", 8, "--width", 16, "--layers", 1)
TIMEOUT = 20


def ddp_is_that_of_gloo():
    import copy

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("lockstep")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    models = [copy.deepcopy(model), copy.deepcopy(model)]
    for each, group in zip(models, (None, gloo)):
        parallel = DistributedDataParallel(each, process_group=group)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            parallel(torch.randn(4, 20, generator=generator)).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7), (ours - theirs).abs().max()
    assert not torch.equal(models[0][0].weight, model[0].weight)
    dist.destroy_process_group()


def all_who_are_missing_are_named():
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep", timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    if dist.get_rank() in (1, 3):
        # Until the others have given up on it.
        expect_raises(RuntimeError, lambda: dist.recv(torch.zeros(1), 0))
        return
    group = dist.distributed_c10d._get_default_group()
    expect_raises(RuntimeError, lambda: group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True), "rank 1", "rank 3")


def the_timeout_of_the_group_holds_for_all():
    """Also for what takes no timeout of its own. A process that is silent is found out sooner."""
    from datetime import timedelta
    from unittest import mock

    import torch.distributed as dist

    import lockstep.torch

    with mock.patch("lockstep.join", wraps=lockstep.join) as joined:
        dist.init_process_group("lockstep", timeout=timedelta(seconds=90))
    assert joined.call_args.kwargs["call_timeout"] == 90 and joined.call_args.kwargs["timeout"] == 30
    dist.destroy_process_group()


def a_job_of_our_launcher_asks_the_environment():
    from unittest import mock

    import lockstep.torch

    del os.environ["MASTER_PORT"]
    os.environ.update(LOCKSTEP_TRANSPORT="tcp", LOCKSTEP_INTERFACE="lo")
    with mock.patch("lockstep.join") as joined:
        lockstep.torch.join(min_workers=2, interface="eth0")
    joined.assert_called_once_with(survive=True, call_timeout=1800, transport="tcp", interface="eth0", min_workers=2)


def an_error_is_told_when_the_group_is_destroyed():
    import torch
    import torch.distributed as dist

    import lockstep

    dist.init_process_group("lockstep")

    def fails():
        try:
            if dist.get_rank() == 1:
                raise ValueError("because")
            dist.recv(torch.zeros(1), 1)
        finally:
            dist.destroy_process_group()

    expect_raises(*((ValueError, fails) if dist.get_rank() == 1 else (lockstep.Aborted, fails, "rank 1", "ValueError: because")))


def a_fork_ends_by_itself():
    """As processes of a DataLoader do, and others that run what is registered with atexit."""
    import atexit

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    dist.init_process_group("lockstep")
    group, total = dist.new_group(), torch.ones(1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        expect_raises(ValueError, lambda: dist.all_reduce(total), "closed")
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for data in DataLoader(torch.arange(4.0), num_workers=1):
        dist.all_reduce(data, group=group)
    dist.all_reduce(total)
    assert total == data / 3 == dist.get_world_size()
    dist.destroy_process_group()


def a_group_that_failed_can_be_made_again():
    """What a collective has told is not told again by destroy_process_group(), with which PyTorch would keep the group."""
    import torch
    import torch.distributed as dist

    import lockstep

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.path.join(os.environ["FOLDER"], "store"), size)  # torchrun also keeps one

    def init(number):
        # PyTorch 1.13 counts processes there, and waits for ever for those of a second group.
        own = store if int(torch.__version__.split(".")[0]) >= 2 else dist.PrefixStore(str(number), store)
        dist.init_process_group("lockstep", store=own, rank=rank, world_size=size)

    data = torch.ones(2 + rank)
    for number in range(4):
        init(number)
        if number % 2:
            dist.all_reduce(data[:2])
        else:
            expect_raises(lockstep.Mismatch, lambda: dist.all_reduce(data), "rank 1")
        dist.destroy_process_group()
    init(4)
    if dist.get_rank() == 0:  # nothing has told it yet
        expect_raises(lockstep.Mismatch, dist.distributed_c10d._get_default_group().shutdown, "rank 0", "barrier")
    else:
        expect_raises(lockstep.Mismatch, lambda: dist.all_reduce(data), "rank 0", "barrier")


def an_error_that_nobody_has_had_is_told_at_the_end():
    import torch
    import torch.distributed as dist

    import lockstep

    dist.init_process_group("lockstep")
    work = dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)
    while not work.is_completed():
        pass
    group = dist.distributed_c10d._get_default_group()
    expect_raises(lockstep.Mismatch, group.shutdown, "rank 1")


def transports_that_differ_are_told():
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        os.environ["LOCKSTEP_TRANSPORT"] = "shm"
    expect_raises((ValueError, RuntimeError), lambda: dist.init_process_group("lockstep"), "LOCKSTEP_TRANSPORT", "tcp", "shm on rank 1")


def messages_from_any_source():
    import torch
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank == 0:
        # Of each sender in its order, also when nothing of it is expected by name.
        seen = {1: 0, 2: 0}
        for _ in range(6):
            data = torch.zeros(2)
            source = dist.recv(data)
            seen[source] += 1
            assert data.tolist() == [source, seen[source]], (source, data)
        # The receive that was called first gets a message; another tag is held up by none.
        first, second, other = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        works = [dist.irecv(first), dist.irecv(second, src=1), dist.irecv(other, tag=5)]
        future = works[2].get_future()
        dist.barrier()
        future.wait()
        assert other.item() == 25 and works[2]._source_rank() == 2 and not works[0].is_completed()
        dist.barrier()
        for work in works:
            work.wait()
        assert (first.item(), second.item(), works[0]._source_rank()) == (1, 2, 1), (first, second)
    else:
        for number in (1, 2, 3):
            dist.send(torch.tensor([rank, float(number)]), 0)
        dist.barrier()
        if rank == 2:
            dist.send(torch.tensor([25.0]), 0, tag=5)
        dist.barrier()
        if rank == 1:
            dist.send(torch.tensor([1.0]), 0)
            dist.send(torch.tensor([2.0]), 0)
        # In a group that numbers its ranks from 0.
        large = torch.full((300_000,), float(rank))
        if rank == 1:
            dist.send(large, 2, group)
        else:
            assert dist.recv(large, group=group) == 1 and large[-1] == 1
    dist.destroy_process_group()


def no_message_from_any_source():
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import lockstep

    dist.init_process_group("lockstep", timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=0.3))
        expect_raises(lockstep.TimeoutReached, lambda: dist.recv(torch.zeros(1), tag=3), "tag 3", "rank 0", "rank 2")
    else:
        expect_raises(lockstep.TimeoutReached, dist.barrier, "tag 3", "rank 0", "rank 2")


def a_dead_source_is_named():
    import torch
    import torch.distributed as dist

    import lockstep

    dist.init_process_group("lockstep")
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect_raises(lockstep.PeerLost, lambda: dist.recv(torch.zeros(1)), "rank 2")
    assert error.rank == 2
    print("told of rank 2")


def ranks_that_differ_are_named():
    import torch

    import lockstep
    import lockstep.torch

    torch.manual_seed(1)
    model = torch.nn.Linear(3, 3)
    exact = lockstep.torch.ExactDataParallel(model, lanes=3)
    exact.verify()
    if exact.job.rank == 1:
        with torch.no_grad():
            model.bias[1] += 1
    error = expect_raises(lockstep.Error, exact.verify, "rank 1", "bias")
    assert error.code == lockstep.Code.REPLICA_MISMATCH and error.rank == 1 and "pid" in error.culprit, error.culprit
    other = lockstep.torch.ExactDataParallel(torch.nn.Linear(3, 3), lanes=3 + exact.job.rank, job=exact.job, verify_every=0)
    error = expect_raises(lockstep.Mismatch, lambda: other.sum(1, lambda lane: other.module(torch.ones(1, 3)).sum()))
    assert "pid" in error.culprit, error.culprit


def a_lane_that_is_not_finite_is_named():
    import torch

    import lockstep
    import lockstep.torch

    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    exact = lockstep.torch.ExactDataParallel(model, lanes=5)
    before = exact.hash()

    def loss(lane):
        out = model(torch.ones(1, 3)).sum()
        return (0 * out).sqrt() if lane == 4 else out  # finite, with a gradient that is not

    bad = expect_raises(lockstep.Error, lambda: exact.sum(7, loss), "gradient", "lane 4", "step 7", "bias")
    assert bad.code == lockstep.Code.NON_FINITE and exact.hash() == before


def the_check_names_a_layer():
    import torch

    import lockstep.torch

    class Unsteady(torch.nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * (1 + 1e-6 * self.calls)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), Unsteady(), torch.nn.Linear(4, 1))
    exact = lockstep.torch.ExactDataParallel(model, lanes=2)
    found = exact.check(1, 0, lambda lane: model(torch.ones(2, 4)).sum())
    assert found is not None and "output of 2 (Unsteady)" in found, found
    class Between(torch.nn.Module):
        """Does something unsteady between its children, which are steady themselves."""

        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.unsteady = [Unsteady()]  # no child

        def forward(self, x):
            return self.unsteady[0](self.second(self.unsteady[0](self.first(x))))

    model = torch.nn.Sequential(Between(), torch.nn.Linear(4, 1))
    exact = lockstep.torch.ExactDataParallel(model, lanes=2, job=exact.job)
    found = exact.check(1, 0, lambda lane: model(torch.ones(2, 4)).sum())
    assert found == "what goes into 0.second (Linear)", found
    steady = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    exact = lockstep.torch.ExactDataParallel(steady, lanes=2, job=exact.job)
    assert exact.check(1, 0, lambda lane: steady(torch.ones(2, 4)).sum()) is None


def weights_changed_too_early_are_told():
    """A step that has changed weights cannot be repeated on them without a lost worker."""
    import torch

    import lockstep
    import lockstep.torch

    model = torch.nn.Linear(3, 1)
    exact = lockstep.torch.ExactDataParallel(model, lanes=1)
    exact.job.survives = lambda error: True

    def step(_):
        with torch.no_grad():
            model.weight += 1
        raise lockstep.PeerLost("rank 1 died", lockstep.Code.PEER_LOST, 1)

    error = expect_raises(lockstep.PeerLost, lambda: exact.run(1, step), "step 1 changed weights", "rank 1 died")
    assert error.rank == 1


def buffers_of_all_types():
    import torch

    import lockstep
    import lockstep.torch
    from lockstep.torch.state import NAMES

    torch.manual_seed(1)

    def make(value):
        module = torch.nn.Linear(3, 2)
        for dtype, name in NAMES.items():
            module.register_buffer(name, torch.full((2, 3), value).to(dtype))
        module.register_buffer("one", torch.tensor(bool(value)))
        module.register_buffer("none", torch.zeros(0, 3))
        return module

    first = make(1)
    exact = lockstep.torch.ExactDataParallel(first, lanes=2)
    exact.verify()
    folder = os.environ["FOLDER"]
    exact.save(folder, 7)
    exact.save(folder, 7)  # it is there: nothing to do
    second = make(0)
    other = lockstep.torch.ExactDataParallel(second, lanes=2, job=exact.job)
    assert other.hash() != exact.hash()
    assert other.resume(folder) == 7 and other.hash() == exact.hash()
    for name, tensor in first.state_dict().items():
        assert second.state_dict()[name].dtype == tensor.dtype and torch.equal(second.state_dict()[name], tensor), name
    if exact.job.rank == 1:
        first.BOOL[1, 2] = False
    expect_raises(lockstep.Error, exact.verify, "rank 1", "BOOL")
    first.BOOL[1, 2] = True
    # Another model's checkpoint stays; and what cannot be saved is told to all.
    first.I8 += 1
    expect_raises(lockstep.Error, lambda: exact.save(folder, 7))
    first.register_buffer("wide", torch.zeros(1, dtype=torch.complex128))
    expect_raises(ValueError if exact.job.rank == 0 else lockstep.Error, lambda: exact.save(folder, 8))


def gradients_of_any_layout():
    import torch

    import lockstep.torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 3, 8, 8)
    model(images).square().sum().backward()
    expected = [parameter.grad.clone() / 2 for parameter in model.parameters()]
    model = model.to(memory_format=torch.channels_last)
    images = images.to(memory_format=torch.channels_last)
    exact = lockstep.torch.ExactDataParallel(model, lanes=2)
    exact.sum(1, lambda lane: model(images[lane:lane + 1]).square().sum())
    for parameter, grad in zip(model.parameters(), expected):
        assert torch.allclose(parameter.grad, grad, rtol=1e-4), (parameter.grad, grad)


def what_cannot_be_summed_is_named():
    import torch

    import lockstep.torch

    Exact = lockstep.torch.ExactDataParallel
    model = torch.nn.Embedding(5, 3, sparse=True)
    exact = Exact(model, lanes=1)
    expect_raises(ValueError, lambda: exact.sum(1, lambda lane: model(torch.tensor([1])).sum()), "weight", "dense")
    job = exact.job
    expect_raises(ValueError, lambda: Exact(torch.nn.Linear(2, 2).double(), lanes=1, job=job), "bias", "float64")
    expect_raises(ValueError, lambda: Exact(torch.nn.Sequential(torch.nn.ReLU()), lanes=1, job=job), "Sequential", "parameters")
    model = torch.nn.Linear(2, 1)
    exact = Exact(model, lanes=1, job=job)
    expect_raises(ValueError, lambda: exact.sum(1, lambda lane: (model(torch.ones(1, 2)).sum(), 0)), "step 1", "counted 0")
    assert exact.sum(2, lambda lane: [model(torch.ones(1, 2)).sum(), 4]).count == 4
    expect_raises(RuntimeError, lambda: exact.sum(3, lambda lane: model(torch.ones(1, 2)).sum().backward()), "backward() itself")
    for given, words in ((None, ["NoneType"]), (1.5, ["float"]), (torch.ones(2, requires_grad=True), ["(2,)"])):
        expect_raises(TypeError, lambda: exact.sum(4, lambda lane: given), "lane 0", "tensor of one number", *words)
    expect_raises(ValueError, lambda: lockstep.torch.join(survive=True, timeout=3), "survive, timeout")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expect_raises(TypeError, lambda: Exact(model, [optimizer], lanes=1, job=job), "optimizer", "list", "extra")


def parameters_are_frozen_and_unfrozen():
    """One that is frozen later gets no gradient; one that is unfrozen would be summed by nobody."""
    import torch

    import lockstep.torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)

    def sum(exact, step):
        return exact.sum(step, lambda lane: model(torch.ones(1, 2)).sum())

    exact = lockstep.torch.ExactDataParallel(model, lanes=2)
    sum(exact, 1)
    assert model[0].weight.grad is None and model[1].weight.grad is not None
    model[1].weight.requires_grad_(False)
    sum(exact, 2)
    assert model[1].weight.grad is None and model[1].bias.grad is not None
    model[0].requires_grad_(True)
    expect_raises(ValueError, lambda: sum(exact, 3), "0.weight", "frozen")
    sum(lockstep.torch.ExactDataParallel(model, lanes=2, job=exact.job), 3)
    assert model[0].weight.grad is not None


def state_that_depends_on_the_order_of_lanes_is_named():
    import torch
    from torch import nn

    import lockstep.torch

    job = lockstep.torch.join()

    def exact(module):
        return lockstep.torch.ExactDataParallel(module, lanes=1, job=job)

    for norm in (nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)):
        expect_raises(ValueError, lambda: exact(nn.Sequential(nn.Linear(2, 2), norm)), "1 (", type(norm).__name__, "running averages")
    exact(nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2)))

    class Counts(nn.Module):
        def __init__(self, persistent, replaces):
            super().__init__()
            self.layer, self.replaces = nn.Linear(2, 1), replaces
            self.register_buffer("calls", torch.zeros(1), persistent=persistent)

        def forward(self, x):
            if self.replaces:
                self.calls = self.calls + 1
            else:
                self.calls += 1
            return self.layer(x).sum()

    def lane_of(module):
        return lambda: exact(module).sum(1, lambda lane: module(torch.ones(1, 2)).sum())

    for replaces in (False, True):
        expect_raises(ValueError, lane_of(Counts(True, replaces)), "lane 0", "calls", "persistent=False")
        lane_of(Counts(False, replaces))()  # a cache
    expect_raises(ValueError, lane_of(nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 1)))), "lane 0", "0.weight_u")


def determinism_fills_no_memory():
    """PyTorch 2 fills new memory with NaN where deterministic algorithms are on."""
    from types import SimpleNamespace
    from unittest import mock

    import torch

    import lockstep.torch

    with mock.patch.object(torch.utils, "deterministic", SimpleNamespace(fill_uninitialized_memory=True), create=True):
        lockstep.torch.deterministic()
        assert torch.are_deterministic_algorithms_enabled() and not torch.utils.deterministic.fill_uninitialized_memory


def what_else_changes_is_saved():
    import warnings
    from types import SimpleNamespace

    import torch

    import lockstep
    import lockstep.torch

    def make(**options):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return lockstep.torch.ExactDataParallel(model, optimizer, lanes=2, extra={"rate": scheduler}, **options)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        first = make()
        assert "deterministic()" in str(warned[0].message), warned
        lockstep.torch.deterministic()
        second = make(job=first.job)
        assert len(warned) == 1, [str(each.message) for each in warned]
    for _ in range(3):
        first.optimizer.step()
        first.extra["rate"].step()
    folder = os.environ["FOLDER"]
    first.save(folder, 3)
    assert second.resume(folder) == 3 and second.extra["rate"].state_dict() == first.extra["rate"].state_dict()
    assert second.extra["rate"].last_epoch == 3 and second.optimizer.param_groups[0]["lr"] == 0.5
    second.extra["average"] = second.module
    expect_raises(ValueError, lambda: second.load_state(first.state(3)), "average")
    del second.extra["average"]
    # A scheduler that keeps a function, as OneCycleLR does in PyTorch 1.13; names that mean two tensors; another program's checkpoint.
    first.extra["cycle"] = torch.optim.lr_scheduler.OneCycleLR(first.optimizer, 1.0, 10)
    first.save(folder, 4)
    assert second.resume(folder) == 4
    first.extra["twice"] = SimpleNamespace(state_dict=lambda: {0: torch.ones(1), "0": torch.ones(1)})
    rank = first.job.rank
    expect_raises(ValueError if rank == 0 else lockstep.Error, lambda: first.save(folder, 5), *(["extra.twice.0"] if rank == 0 else []))
    if rank == 0:
        other = os.path.join(folder, "other")
        os.mkdir(other)
        lockstep.save(os.path.join(other, "checkpoint-9"), {"w": torch.ones(2)}, b"of another program", 9)
        expect_raises(lockstep.Damaged, lambda: first._load_newest(other), "checkpoint-9", "another program")


def a_state_comes_from_another_gpu():
    """What the donor has on its GPU may be on one that the others do not have."""
    from unittest import mock

    import torch

    import lockstep.torch

    torch.manual_seed(1)
    exact = lockstep.torch.ExactDataParallel(torch.nn.Linear(2, 2), lanes=2)
    with torch.no_grad():
        exact.module.bias.fill_(exact.job.rank)
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:77"):
        assert exact._level(7 if exact.job.rank == 1 else 0) == 7
    assert exact.module.bias[0] == 1
    exact.verify()


def weights_of(output):
    return re.search(r"^weights (blake3:[0-9a-f]{64})$", output, re.MULTILINE)[1]


def resumed_by_others():
    whole = weights_of(run_program(1, GPT, ("--steps", 30, *SMALL)))
    folder = tempfile.mkdtemp()  # a TemporaryDirectory would go with the first forked worker
    try:
        run_program(2, GPT, ("--steps", 21, "--out", folder, *SMALL))
        assert sorted(os.listdir(folder)) == ["checkpoint-20", "checkpoint-21"], os.listdir(folder)  # every 20 steps and at the end
        shutil.rmtree(os.path.join(folder, "checkpoint-21"))
        output = run_program(3, GPT, ("--steps", 30, "--out", folder, *SMALL))
    finally:
        shutil.rmtree(folder)
    assert weights_of(output) == whole, output
    assert "step 10 " not in output, output  # it did not begin anew
    print("resumed_by_others", flush=True)


PROGRAM = """
import os, sys, torch, torch.distributed as dist, lockstep.torch
from datetime import timedelta
dist.init_process_group("lockstep", timeout=timedelta(seconds=20))
data = torch.ones(1000)
while True:
    print("step", file=sys.stderr, flush=True)
    dist.all_reduce(data)
    data.fill_(1)
"""


def killed_under_torchrun(rank):
    """Every survivor raises and names it; torchrun then ends them all."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "program.py")
        with open(program, "w") as file:
            file.write(PROGRAM)
        log = open(os.path.join(folder, "log"), "w+")
        with reserved_port() as port:
            # torchrun ends the others when it finds a process dead; they are to have said who it was before.
            torchrun = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3", "--monitor_interval", "3",
                                         "--master_addr", "127.0.0.1",
                                         "--master_port", str(port), "--redirects", "2", "--tee", "2", "--log_dir", folder,
                                         program], stdout=log, stderr=log)  # 1.13 with Python 3.11 fails without both

        def said():
            with open(log.name) as file:
                return file.read()

        try:
            wait_for(lambda: said().count("step\n") > 30, "steps under torchrun")
            victim = children_of(torchrun.pid)[rank]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: len(re.findall(rf"PeerLost: .*rank {rank} \(.*pid {victim}\)", said())) >= 2, f"survivors that name {victim}:\n{said()}",
                     TIMEOUT)
            print(f"killed_under_torchrun: rank {rank} named by both after {time.monotonic() - began:.1f} s", flush=True)
            assert torchrun.wait(60) != 0
        finally:
            if torchrun.poll() is None:
                torchrun.kill()


def survived_under_our_launcher(whole, place, victim):
    """The others go on, somebody comes in its place, and the weights and the checkpoints are those of a run without a loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "run", "--workers", "3", str(GPT_WITH_LOSSES), place, str(victim), "--steps", "40",
                   "--out", folder, *map(str, SMALL)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
        checkpoints = sorted(os.listdir(folder))
    output = done.stdout
    assert done.returncode == 0 and "killed by signal 9" in output, output
    assert re.search("^step 30 .* 3 workers$", output, re.MULTILINE), output
    assert weights_of(output) == whole, output
    assert checkpoints == ["checkpoint-20", "checkpoint-40"], checkpoints
    print(f"survived_under_our_launcher: {place}, rank {victim}", flush=True)


WAITING = """
import os, pathlib, sys, time, torch, lockstep.torch
folder = pathlib.Path(sys.argv[1])
deadline = time.monotonic() + 60
while (folder / "lost").exists() and not (folder / "out" / "checkpoint-2").exists():  # in the place of the one that was lost
    assert time.monotonic() < deadline, "the others have not saved"
    time.sleep(0.01)
lockstep.torch.deterministic()
job = lockstep.torch.join(min_workers=3, timeout=20)
victim = not job.newcomer and job.rank == 1
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
exact = lockstep.torch.ExactDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), lanes=3, job=job)

def step(number):
    assert job.world_size == 3, f"step {number} with {job.world_size} workers"
    if victim and number == 3:
        (folder / "lost").touch()
        os.kill(os.getpid(), 9)
    exact.sum(number, lambda lane: model(torch.ones(1, 2)).sum())
    exact.optimizer.step()

exact.run(5, step, out=folder / "out")
"""


def too_few_workers_save_and_wait():
    """With fewer than min_workers no step is made until somebody has come in the place of the lost one."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "waiting.py")
        with open(program, "w") as file:
            file.write(WAITING)
        done = subprocess.run([sys.executable, "-m", "lockstep", "run", "--workers", "3", program, folder], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=100)
        assert done.returncode == 0 and "killed by signal 9" in done.stdout, done.stdout
        checkpoints = sorted(os.listdir(os.path.join(folder, "out")))
    assert checkpoints == ["checkpoint-2", "checkpoint-5"], checkpoints
    print("too_few_workers_save_and_wait", flush=True)


def main():
    need_torch()
    run_all(2, ddp_is_that_of_gloo)
    run_all(4, all_who_are_missing_are_named)
    run_all(2, the_timeout_of_the_group_holds_for_all)
    run_all(1, a_job_of_our_launcher_asks_the_environment)
    run_all(2, an_error_is_told_when_the_group_is_destroyed)
    run_all(2, a_fork_ends_by_itself)
    run_all(2, a_group_that_failed_can_be_made_again)
    run_all(2, an_error_that_nobody_has_had_is_told_at_the_end)
    run_all(2, transports_that_differ_are_told, "tcp")
    run_all(3, messages_from_any_source)
    run_all(3, messages_from_any_source, "tcp")
    run_all(3, no_message_from_any_source)
    ended = run(3, a_dead_source_is_named)
    assert [each.code for each in ended] == [0, 0, -9], "\n".join(each.output for each in ended)
    run_all(3, ranks_that_differ_are_named)
    run_all(2, a_lane_that_is_not_finite_is_named)
    run_all(1, the_check_names_a_layer)
    run_all(1, weights_changed_too_early_are_told)
    run_all(2, buffers_of_all_types)
    run_all(2, gradients_of_any_layout)
    run_all(1, what_cannot_be_summed_is_named)
    run_all(2, parameters_are_frozen_and_unfrozen)
    run_all(1, determinism_fills_no_memory)
    run_all(1, state_that_depends_on_the_order_of_lanes_is_named)
    run_all(2, what_else_changes_is_saved)
    run_all(2, a_state_comes_from_another_gpu)
    resumed_by_others()
    whole = weights_of(run_program(1, GPT, ("--steps", 40, *SMALL)))
    for place, victim in (("step", 0), ("save", 1), ("saved", 0)):
        survived_under_our_launcher(whole, place, victim)
    too_few_workers_save_and_wait()
    for rank in (0, 2):  # rank 0 is where the others meet
        killed_under_torchrun(rank)


if __name__ == "__main__":
    main()
