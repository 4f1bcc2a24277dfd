"""Sums over the lanes of a step, which have the same bits for any number of workers."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_float, c_size_t, c_uint32, c_void_p
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from . import _library
from ._library import SLICE_MS, library, on_main_thread
from .arrays import View, view
from .job import Job


def lanes_of(lanes: int, world_size: int, rank: int) -> range:
    """The lanes that a worker computes."""
    begin, end = c_uint32(), c_uint32()
    _library.check(library.lockstep_lanes_of(lanes, world_size, rank, byref(begin), byref(end)))
    return range(begin.value, end.value)


def partials_of(lanes: int, world_size: int, rank: int) -> List[Tuple[int, int]]:
    """What a worker can add up alone: the largest nodes of the tree within its lanes, as ranges [begin, end)."""
    count = c_size_t()
    _library.check(library.lockstep_partials_of(lanes, world_size, rank, None, 0, byref(count)))
    nodes = (_library.Range * count.value)()
    _library.check(library.lockstep_partials_of(lanes, world_size, rank, nodes, count.value, byref(count)))
    return [(node.begin, node.end) for node in nodes]


class LaneStep(NamedTuple):
    """Compute the gradient of `lane` into an accumulator, then add accumulators: merges are (into, from)."""

    lane: int
    accumulator: int
    merges: List[Tuple[int, int]]


class Schedule(NamedTuple):
    """In which order a worker best computes its lanes. At the end partial i is in accumulator i."""

    steps: List[LaneStep]
    accumulators: int


def schedule(lanes: int, world_size: int, rank: int) -> Schedule:
    """How a worker adds up its lanes along the tree with few accumulators."""
    own = len(lanes_of(lanes, world_size, rank))
    steps, merges = (_library.LaneStep * own)(), (_library.Merge * own)()
    step_count, merge_count, accumulators = c_size_t(), c_size_t(), c_uint32()
    _library.check(library.lockstep_lane_schedule(lanes, world_size, rank, steps, byref(step_count), merges,
                                                  byref(merge_count), byref(accumulators)))
    pairs = [(merge.into, merge.source) for merge in merges[:merge_count.value]]
    return Schedule([LaneStep(each.lane, each.accumulator, pairs[each.first_merge:each.first_merge + each.merges])
                     for each in steps[:step_count.value]], accumulators.value)


def accumulate(into: Any, source: Any) -> None:
    """into += source, with the arithmetic of all our sums."""
    target, other = view(into, writable=True), view(source)
    if target.type != other.type or target.count != other.count:
        raise ValueError(f"{other.count} elements of {other.type.name} cannot be added to {target.count} of {target.type.name}")
    _library.check(library.lockstep_accumulate(target.address, other.address, target.count, target.type))


def first_non_finite(data: Any) -> Optional[int]:
    """The index of the first NaN or infinity; None: all are finite."""
    own = view(data)
    index = library.lockstep_find_non_finite(own.address, own.count, own.type)
    return None if index == own.count else index


class Sum(NamedTuple):
    """The sum over all lanes of all workers."""

    gradient: Any  # f32, as memory of LaneSum's; valid, and may be changed, until the next step begins
    numbers: List[float]


class LaneSum:
    """Adds up the gradients of a step: `elements` of f32 for each of `lanes` lanes, with `numbers` of f64 (losses,
    counts) beside each. The same arguments on all workers, and at least a lane for each of them. Goes on across
    generations of the job, where the lanes are shared anew.

    sum() is all that most programs need. Where gradients are computed by others and come in parts: begin(); for every
    one of own_lanes(), in their order, fill gradient() and call ready() as parts of it are final; finish(). What is
    final in the last lane travels while the rest is computed."""

    def __init__(self, job: Job, lanes: int, elements: int, numbers: int = 0, bucket_bytes: int = 0):
        self._job = job  # outlives this
        self._elements = elements
        self._numbers = numbers
        self._handle = c_void_p()
        _library.check(library.lockstep_lane_sum_create(job._open(), lanes, elements, numbers, bucket_bytes, byref(self._handle)))

    def own_lanes(self) -> List[int]:
        """The lanes of this worker in this generation, in the order in which they are to be computed."""
        count, lane = c_size_t(), c_uint32()
        _library.check(library.lockstep_lane_sum_count(self._open(), byref(count)))
        lanes = []
        for index in range(count.value):
            _library.check(library.lockstep_lane_sum_lane(self._handle, index, byref(lane)))
            lanes.append(lane.value)
        return lanes

    def begin(self, step: int) -> None:
        """A step begins, the same on all workers."""
        self._job.communicator._check(library.lockstep_lane_sum_begin(self._open(), step))

    def gradient(self, index: int) -> Any:
        """Where the gradient of the index-th own lane goes: `elements` of f32, a ctypes array, which NumPy and PyTorch
        take by their frombuffer(). It holds what was there before. Valid until the generation ends."""
        place = POINTER(c_float)()
        _library.check(library.lockstep_lane_sum_gradient(self._open(), index, byref(place), None))
        return self._floats(place)

    def numbers(self, index: int) -> Any:
        """Likewise its numbers, which are zeros: a ctypes array of f64."""
        place = POINTER(c_double)()
        _library.check(library.lockstep_lane_sum_gradient(self._open(), index, None, byref(place)))
        return self._keep((c_double * self._numbers).from_address(ctypes.addressof(place.contents) if self._numbers else 0))

    def ready(self, index: int, begin: int, end: int) -> None:
        """Elements [begin, end) of that gradient are final. Ranges of a lane come in ascending order without gaps."""
        self._job.communicator._check(library.lockstep_lane_sum_ready(self._open(), index, begin, end))

    def finish(self) -> Sum:
        """All is final: waits for the sum. Ctrl-C ends the wait."""
        place = POINTER(c_float)()
        numbers = (c_double * max(1, self._numbers))()
        slice_ms = SLICE_MS if on_main_thread() else -1
        while True:
            code = library.lockstep_lane_sum_finish(self._open(), slice_ms, byref(place), numbers)
            if code != _library.NOT_YET:
                break
        self._job.communicator._check(code)
        return Sum(self._floats(place), list(numbers[:self._numbers]))

    def sum(self, step: int, compute: Callable[[int, Any, Any], Any]) -> Sum:
        """The sum over all lanes. `compute(lane, gradient, numbers)` adds the gradient of a lane to `gradient` and what
        is to be summed beside it to `numbers`; both hold zeros, and are NumPy arrays where there is NumPy. It depends on
        step and lane alone, not on the worker: any worker may be asked for any lane."""
        self.begin(step)
        for index, lane in enumerate(self.own_lanes()):
            gradient, numbers = self.gradient(index), self.numbers(index)
            ctypes.memset(gradient, 0, ctypes.sizeof(gradient))
            compute(lane, _as_numpy(gradient), _as_numpy(numbers))
            self.ready(index, 0, self._elements)
        found = self.finish()
        return Sum(_as_numpy(found.gradient), found.numbers)

    def close(self) -> None:
        """Before the job is closed. A step under way is aborted, and the job with it."""
        handle, self._handle = self._handle, c_void_p()
        if handle and self._job._handle:
            library.lockstep_lane_sum_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise ValueError("the lane sum is closed")
        self._job._open()
        return self._handle

    def _floats(self, place: Any) -> Any:
        return self._keep((c_float * self._elements).from_address(ctypes.addressof(place.contents)))

    def _keep(self, memory: Any) -> Any:
        memory._owner = self  # views keep this alive
        return memory


def _as_numpy(memory: Any) -> Any:
    try:
        import numpy
    except ImportError:
        return memory
    return numpy.ctypeslib.as_array(memory)


__all__ = ["LaneStep", "LaneSum", "Schedule", "Sum", "View", "accumulate", "first_non_finite", "lanes_of", "partials_of", "schedule"]
