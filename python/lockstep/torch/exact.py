"""Data-parallel training whose result does not depend on the workers."""

from __future__ import annotations

import bisect
import ctypes
import io
import os
import pathlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

import torch

import lockstep

from ..arrays import Type, View
from ..job import Regroup
from .determinism import first_difference, lane_generator, lane_seed, warn_unless_deterministic
from .state import DTYPES, flatten, unflatten

SAVING = 3600.0  # seconds that the others wait for the disk of rank 0
FLAGS = 52  # truth values that one f64 number of the tail holds: lanes whose gradient is not finite


class Sum(NamedTuple):
    """What a step's lanes add up to, the same on every worker. The gradient is in the parameters' `grad`."""

    loss: float  # the sum of the lanes' losses divided by `count`
    count: float  # type: ignore[assignment]  # what the lanes counted: tokens, samples, or lanes
    numbers: List[float]  # sums of further numbers that the lanes gave


class ExactDataParallel:
    """Trains a module with the same bits at any number of workers.

    A step has `lanes` micro-batches, the lanes. Every worker computes some of them, and their gradients are added up
    in one fixed tree while backward goes on. What a lane computes must depend on the step and the lane alone.

    >>> exact = ExactDataParallel(model, optimizer, lanes=8)
    >>> for step in range(1, 101):
    ...     sum = exact.sum(step, lambda lane: loss_of(model, step, lane))
    ...     optimizer.step()

    `seed` keys the random numbers of lanes. `verify_every` steps the workers compare their weights. `numbers` is how
    many numbers a lane gives besides loss and count. `extra` is what else a step changes, such as a scheduler of the
    learning rate, by name: checkpoints and newcomers get its state_dict, too."""

    def __init__(self, module: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None, *, lanes: int,
                 job=None, seed: int = 0, verify_every: int = 100, numbers: int = 0, bucket_bytes: int = 0,
                 extra: Optional[Mapping[str, Any]] = None):
        from . import join

        warn_unless_deterministic()
        for name, each in {"optimizer": optimizer, **(extra or {})}.items():
            if each is not None and not hasattr(each, "state_dict"):
                raise TypeError(f"{name} is a {type(each).__name__}, which has no state_dict to save; several optimizers go into `extra`, by name")
        self.module = module
        self.optimizer = optimizer
        self.extra = dict(extra or {})
        self.lanes = lanes
        self.seed = seed
        self.verify_every = verify_every
        self.job = job if job is not None else join()
        self._refuse_running_averages()
        self._with_buffers = [(name, child) for name, child in module.named_modules() if child._buffers]
        # Backward finishes the last layers first; what is final first travels first.
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
        if not named:
            raise ValueError(f"the {type(module).__name__} has no parameters that require a gradient")
        for name, parameter in named:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(f"{name} is of type {parameter.dtype}; gradients of lanes are added up as float32")
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        ends = torch.tensor([p.numel() for p in self._parameters]).cumsum(0).tolist()
        self._ends = ends
        self._ranges = list(zip([0, *ends[:-1]], ends))
        self._elements = ends[-1]
        self._flags = -(-lanes // FLAGS)
        self._numbers = numbers
        # Small parameters are passed on together; a small bucket is not to wait for what comes after it.
        self._pass_on_elements = min(1 << 16, bucket_bytes // 8) if bucket_bytes else 1 << 16
        self._sum = lockstep.LaneSum(self.job, lanes, self._elements, 4 + self._flags + numbers, bucket_bytes)
        self._gradient = torch.zeros(self._elements)
        self._grads = [self._gradient[begin:end].view(p.shape) for p, (begin, end) in zip(self._parameters, self._ranges)]
        self._views: Dict[int, List[torch.Tensor]] = {}  # of the accumulators' memory, by address
        self._lane: Optional[_Lane] = None
        # The node that adds to .grad is alive as long as somebody holds it, and so is its hook.
        self._nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in self._parameters]
        self._hooks = [node.register_hook(self._hook(i)) for i, node in enumerate(self._nodes)]
        self._wants_regroup = False

    # The sum of a step.

    def own_lanes(self) -> List[int]:
        """The lanes of this worker, in the order in which sum() asks for them. Other ones in another generation of the job."""
        return self._sum.own_lanes()

    def sum(self, step: int, compute: Callable[[int], object]) -> Sum:
        """Computes this worker's lanes and adds up those of all workers. Collective.

        `compute(lane)` returns the loss of a lane, a scalar; or the loss and what it is a sum over (a number of
        tokens, say), and further numbers. The gradient of loss / count is then in the parameters' `grad`."""
        if self.verify_every and (step - 1) % self.verify_every == 0:
            self.verify()
        self._refuse_new_parameters()
        self._sum.begin(step)
        for index, lane in enumerate(self._sum.own_lanes()):
            self._compute(step, index, lane, compute)
        torch.manual_seed(lane_seed(self.seed, step, self.lanes))  # what follows is random alike everywhere
        summed, tail = self._sum.finish()
        self._stop_if_not_finite(step, tail)
        loss, count, _, wishes = tail[:4]
        self._wants_regroup = wishes > 0
        if count == 0:
            raise ValueError(f"the lanes of step {step} counted 0 in all: their losses cannot be divided by it")
        torch.mul(torch.frombuffer(summed, dtype=torch.float32), 1.0 / count, out=self._gradient)
        for parameter, grad in zip(self._parameters, self._grads):
            # One that has been frozen stays as it is: a gradient of zeros would let the optimizer decay it.
            parameter.grad = grad.to(device=parameter.device, dtype=parameter.dtype) if parameter.requires_grad else None
        return Sum(loss / count, count, tail[4 + self._flags:])

    def _compute(self, step, index, lane, compute):
        torch.manual_seed(lane_seed(self.seed, step, lane))
        memory, numbers = self._sum.gradient(index), self._sum.numbers(index)
        buffers = self._buffers()
        self._lane = _Lane(index, ctypes.addressof(memory), self._views_of(memory), [False] * len(self._parameters))
        try:
            given = compute(lane)
            loss, *more = given if isinstance(given, (tuple, list)) else (given,)
            if any(self._lane.done):
                raise RuntimeError("compute() called backward() itself; it returns the loss, and sum() calls backward()")
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
                raise TypeError(f"lane {lane}: compute() returned {what} as its loss, which must be a tensor of one number")
            count, *more = more or (1,)
            if len(more) != self._numbers:
                raise ValueError(f"lane {lane} gave {len(more)} further numbers instead of {self._numbers}")
            for parameter in self._parameters:
                parameter.grad = None
            loss.backward()
            self._refuse_changes(buffers, lane)
            for i, done in enumerate(self._lane.done):
                if not done:  # the lane does not use this parameter
                    self._lane.views[i].zero_()
                    self._lane.done[i] = True
            self._pass_on(self._lane, all_of_it=True)
            value = loss.item()
            bad = self._lane.bad
            numbers[0], numbers[1], numbers[2] = value, float(count), 0.0 if bad is None else bad + 1.0
            numbers[3] = float(index == 0 and self.job.wishes.regroup)
            for flag in range(self._flags):
                here = lane // FLAGS == flag and (bad is not None or value != value or value in (float("inf"), -float("inf")))
                numbers[4 + flag] = float(2 ** (lane % FLAGS)) if here else 0.0
            for i, number in enumerate(more):
                numbers[4 + self._flags + i] = float(number)
        finally:
            self._lane = None

    def _hook(self, index):
        parameter = self._parameters[index]

        def grad_is_final(*_):
            lane = self._lane
            if lane is None:
                return  # a backward pass outside of sum()
            if lane.done[index]:
                raise RuntimeError(f"{self._names[index]} gets a gradient twice in one lane; call compute() with one loss")
            if parameter.grad.layout != torch.strided:
                raise ValueError(f"the gradient of {self._names[index]} is not dense; lanes add up dense ones only (sparse=False)")
            lane.views[index].copy_(parameter.grad)  # row by row, whatever its layout
            parameter.grad = None
            lane.done[index] = True
            self._pass_on(lane)

        return grad_is_final

    def _pass_on(self, lane, all_of_it=False):
        """Tells the sum which elements are final, in their order; not for every small parameter by itself."""
        while lane.next < len(lane.done) and lane.done[lane.next]:
            lane.next += 1
        end = self._ranges[lane.next - 1][1] if lane.next else 0
        if end - lane.passed >= self._pass_on_elements or (all_of_it and end > lane.passed):
            if lane.bad is None:
                found = lockstep.first_non_finite(View(lane.address + 4 * lane.passed, end - lane.passed, Type.F32, None))
                if found is not None:
                    lane.bad = bisect.bisect_right(self._ends, lane.passed + found)
            self._sum.ready(lane.index, lane.passed, end)
            lane.passed = end

    def _views_of(self, memory):
        """The parameters' parts of an accumulator."""
        address = ctypes.addressof(memory)
        if address not in self._views:
            flat = torch.frombuffer(memory, dtype=torch.float32)
            self._views[address] = [flat[begin:end].view(p.shape) for p, (begin, end) in zip(self._parameters, self._ranges)]
        return self._views[address]

    def _stop_if_not_finite(self, step, tail):
        lanes = [flag * FLAGS + bit for flag in range(self._flags) for bit in range(FLAGS)
                 if int(tail[4 + flag]) >> bit & 1]
        if not lanes:
            return
        which = f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {', '.join(map(str, lanes))}"
        where = f", of {self._names[int(tail[2]) - 1]} first" if len(lanes) == 1 and tail[2] >= 1 else ""
        what = "gradient" if tail[2] >= 1 else "loss"
        raise lockstep.Error(f"the {what} of {which} in step {step} is not finite{where}; no weights were changed",
                             lockstep.Code.NON_FINITE)

    def _refuse_running_averages(self):
        for name, child in self.module.named_modules():
            if isinstance(child, torch.nn.modules.batchnorm._NormBase) and child.track_running_stats:
                raise ValueError(f"{name} ({type(child).__name__}) keeps running averages, which depend on the order of "
                                 "lanes and so on the workers: use GroupNorm, or track_running_stats=False")

    def _refuse_new_parameters(self):
        known = set(map(id, self._parameters))
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(f"{name} was frozen, or was not there, when ExactDataParallel was made: make it anew, with job=exact.job")

    def _buffers(self):
        """Buffers that checkpoints hold, each with the count of its changes. Others may be caches."""
        return {f"{name}.{key}" if name else key: (buffer, buffer._version) for name, child in self._with_buffers
                for key, buffer in child._buffers.items() if buffer is not None and key not in child._non_persistent_buffers_set}

    def _refuse_changes(self, before, lane):
        after = self._buffers()
        for name, (buffer, version) in before.items():
            now, changes = after.get(name, (None, 0))
            if now is not buffer or changes != version:
                raise ValueError(f"lane {lane} changed the buffer {name}, which then depends on the order of lanes and so on the "
                                 "workers: change it after sum(), or register it with persistent=False if it is only a cache")

    # Random numbers, determinism.

    def generator(self, step: int, lane: int) -> torch.Generator:
        """Random numbers for the data of a lane."""
        return lane_generator(self.seed, step, lane)

    def check(self, step: int, lane: int, compute: Callable[[int], object]) -> Optional[str]:
        """Computes a lane twice; None, or the first layer whose input, output or gradient differs. Not collective."""

        def once():
            torch.manual_seed(lane_seed(self.seed, step, lane))
            given = compute(lane)
            return given[0] if isinstance(given, (tuple, list)) else given

        return first_difference(self.module, once)

    # Replicas.

    def hash(self) -> str:
        """BLAKE3 of the module's tensors, to compare runs with."""
        return "blake3:" + lockstep.blake3_many(self._tensors().values()).hex()

    def _tensors(self):
        return {name: t.detach().cpu().contiguous() for name, t in self.module.state_dict().items()}

    def verify(self) -> None:
        """Compares the weights of all workers; raises an error that names who differs, and where. Collective."""
        tensors = self._tensors()
        total = self._gather(lockstep.blake3_many(tensors.values()))
        if len(set(total)) == 1:
            return
        right = max(set(total), key=lambda value: (total.count(value), -total.index(value)))
        wrong = next(rank for rank, value in enumerate(total) if value != right)
        each = self._gather(b"".join(lockstep.blake3(tensor) for tensor in tensors.values()))
        model = each[total.index(right)]
        name = next(name for i, name in enumerate(tensors) if each[wrong][32 * i:32 * i + 32] != model[32 * i:32 * i + 32])
        raise lockstep.Error(f"the weights of rank {wrong} differ from those of the others, in {name} first",
                             lockstep.Code.REPLICA_MISMATCH, wrong, self.job.communicator.name_of(wrong))

    def _gather(self, value: bytes, timeout: Optional[float] = None) -> List[bytes]:
        """What every rank gives, all of the same length."""
        everybody = bytearray(len(value) * self.job.world_size)
        self.job.communicator.all_gather(bytearray(value), everybody, timeout=timeout)
        return [bytes(everybody[i:i + len(value)]) for i in range(0, len(everybody), len(value))]

    # Checkpoints.

    def state(self, step: int) -> dict:
        """What a checkpoint holds: the state_dict of module, optimizer and `extra`, and the step."""
        optimizer = self.optimizer.state_dict() if self.optimizer is not None else None
        return {"step": step, "module": dict(self.module.state_dict()), "optimizer": optimizer,
                "extra": {name: each.state_dict() for name, each in self.extra.items()}}

    def load_state(self, state: dict) -> int:
        """Takes such a state over; returns its step."""
        missing = self.extra.keys() - state.get("extra", {}).keys()
        if missing:
            raise ValueError(f"the state of step {state['step']} has nothing for '{min(missing)}', which `extra` names")
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for name, each in self.extra.items():
            each.load_state_dict(state["extra"][name])
        return state["step"]

    def save(self, folder: str, step: int) -> None:
        """Rank 0 writes FOLDER/checkpoint-STEP, which appears complete or not at all. Collective.

        Within run() give it `out` instead: it saves between two steps, where nothing is lost with a worker. An intact
        checkpoint with the same tensors stays as it is; any other of that name is refused."""
        failed = b"\0"
        if self.job.rank == 0:
            try:
                os.makedirs(folder, exist_ok=True)
                rest, tensors = flatten(self.state(step))
                path = os.path.join(folder, f"checkpoint-{step}")
                if not _holds(path, tensors):
                    lockstep.save(path, tensors, rest.encode(), step)
            except Exception as error:  # whatever it is, the others wait to hear of it
                failed, cause = b"\1", error
        if self._gather(failed, timeout=SAVING)[0] != b"\0":
            raise cause if self.job.rank == 0 else lockstep.Error(f"rank 0 could not write checkpoint-{step}; it says why",
                                                                   lockstep.Code.IO, 0)

    def resume(self, folder: str) -> int:
        """All workers get the state of the newest checkpoint that rank 0 finds intact. Returns its step; 0: none.

        The number of workers may be another one than that of the run that wrote it. Collective; a newcomer does not
        take part, since run() gives it the state of the others."""
        if self.job.newcomer:
            return 0
        return self._level(self._load_newest(folder) if self.job.rank == 0 else 0)

    def _load_newest(self, folder):
        steps = sorted((int(path.name.split("-")[1]) for path in pathlib.Path(folder).glob("checkpoint-*")
                        if path.name.split("-")[1].isdigit()), reverse=True)
        cause = None
        for step in steps:
            try:
                return self.load_state(_read(os.path.join(folder, f"checkpoint-{step}"))[1])
            except lockstep.Error as error:
                cause = error
        if cause is not None:
            raise cause
        return 0

    # Survival.

    def run(self, steps: int, step: Callable[[int], object], done: int = 0, *, out: Optional[str] = None,
            save_every: int = 100) -> None:
        """Calls `step` for the steps from `done` + 1 to `steps`, and goes on when workers are lost or come.

        `step` changes weights only after its last collective. Under torchrun a loss ends everybody; under
        `python -m lockstep run` the workers that are left repeat the step without the lost one; fewer than `min_workers`
        of join() save and wait for others. With `out`, every `save_every` steps and at the end a checkpoint is written to
        that folder; none is ever deleted."""
        if save_every < 1:
            raise ValueError(f"save_every is {save_every}; it counts steps")
        self.job.describe(b"lockstep.torch", self.lanes)
        due = False
        if self.job.newcomer:
            done, due = self._regroup(-1, Regroup.IN_ORDER), True
        while done < steps or due:
            versions = None
            try:
                too_few = self.job.too_few
                if due and out is not None and done > 0 and (done % save_every == 0 or done >= steps or too_few):
                    self.save(out, done)
                due = False
                if done >= steps:
                    return
                if too_few:
                    done = self._regroup(done, Regroup.TOO_FEW)  # waits for others
                elif self._wants_regroup:
                    done = self._regroup(done, Regroup.IN_ORDER)
                else:
                    versions = self._versions()
                    step(done + 1)
                    done += 1
                due = True
            except lockstep.Error as error:
                if not self.job.survives(error):
                    raise
                if versions not in (None, self._versions()):
                    raise type(error)(f"step {done + 1} changed weights before its last collective, so it cannot be repeated "
                                      f"without the lost worker: {error}", error.code, error.rank, error.culprit) from error
                # The checkpoint may have failed on some workers and not on others: all of them save again.
                done, due = self._regroup(done, Regroup.AFTER_LOSS), True

    def _versions(self):
        """Counts of the changes to each parameter."""
        return [parameter._version for parameter in self._parameters]

    def _regroup(self, done, how):
        while True:
            self._views.clear()
            self._wants_regroup = False
            self.job.regroup(max(done, 0), how)
            try:
                return self._level(done)
            except lockstep.Error as error:
                if not self.job.survives(error):
                    raise
                how = Regroup.AFTER_LOSS

    def _level(self, done: int) -> int:
        """All workers get the state of the one that has done most steps. Returns how many."""
        steps = [int.from_bytes(value, "little", signed=True) for value in self._gather(done.to_bytes(8, "little", signed=True))]
        most = max(steps)
        if min(steps) == most:
            return most
        donor = steps.index(most)
        file = io.BytesIO()
        if self.job.rank == donor:
            torch.save(self.state(most), file)
        size = max(int.from_bytes(value, "little") for value in self._gather(len(file.getvalue()).to_bytes(8, "little")))
        data = bytearray(file.getvalue()) if self.job.rank == donor else bytearray(size)
        self.job.communicator.broadcast(data, donor)
        if done < most:
            self.load_state(torch.load(io.BytesIO(data), map_location="cpu"))  # the donor's GPU is not ours
        return most


def _read(path):
    """The tensors of a checkpoint, and the state that they are part of."""
    checkpoint = lockstep.Checkpoint(path)
    tensors = {name: torch.empty(found.shape, dtype=DTYPES[found.type]) for name, found in checkpoint.tensors.items()
               if found.type in DTYPES}
    checkpoint.read(tensors)
    try:
        return tensors, unflatten(checkpoint.metadata.decode(), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise lockstep.Damaged(f"{path} is no checkpoint of exact training: its folder is another program's", lockstep.Code.IO) from error


def _holds(path, tensors):
    """Whether it is an intact checkpoint with these tensors."""
    try:
        there = _read(path)[0]
    except lockstep.Error:
        return False
    return there.keys() == tensors.keys() and lockstep.blake3_many(there[name] for name in tensors) == lockstep.blake3_many(tensors.values())


class _Lane:
    """The lane whose backward pass is under way."""

    __slots__ = ("index", "address", "views", "done", "next", "passed", "bad")

    def __init__(self, index, address, views, done):
        self.index, self.address, self.views, self.done = index, address, views, done
        self.next = 0  # the parameters before it are final
        self.passed = 0  # elements that the sum knows to be final
        self.bad = None  # the first parameter whose gradient is not finite
