"""Collectives and messages among the workers of a group."""

from __future__ import annotations

import ctypes
import enum
import threading
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Sequence, Set, TypedDict

from . import _library
from ._library import SLICE_MS, library, on_main_thread
from .arrays import SIZES, Type, View, view
from .errors import Error


if TYPE_CHECKING:
    from typing_extensions import Unpack

told: Set[str] = set()  # errors that callers of this process have had
FORGOTTEN = 64  # works that nobody has waited for: with so many it is looked which of them have ended


class CallOptions(TypedDict, total=False):
    """What every collective takes by name."""

    timeout: Optional[float]  # seconds; without one it is the job's call_timeout
    check_finite: bool  # look for NaN and infinity in the result: Outcome.first_non_finite
    step: int  # both are named in errors, and compared between workers
    bucket: int


class Op(enum.IntEnum):
    """What a reduction does with two elements."""

    SUM = 0
    MEAN = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4


class Outcome(NamedTuple):
    """What a collective tells besides its result."""

    first_non_finite: Optional[int]  # with check_finite: the first element that is NaN or infinite
    seconds: float  # how long it took, once all work before it had ended
    source: Optional[int] = None  # of recv_any: who sent the message


class Work:
    """A collective that was started. It keeps its arrays alive until it has ended."""

    def __init__(self, handle: c_void_p, group: "Communicator", views: Sequence[View]):
        self._handle: Optional[c_void_p] = handle
        self._group = group
        self._views: Optional[Sequence[View]] = views
        self._outcome: Optional[Outcome] = None
        self._error: Optional[Error] = None
        self._lock = threading.Lock()
        group._pending.add(self)

    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        with self._lock:
            return self._views is None or bool(library.lockstep_work_done(self._handle))

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Returns True when it has ended, False if it has not after `timeout` seconds, or raises its error.

        Without a timeout it waits for the collective's own deadline. Ctrl-C ends the wait, not the collective."""
        if self._views is None:
            return self._told()
        left = None if timeout is None else max(0, int(timeout * 1000))
        while True:
            step = SLICE_MS if left is None else min(left, SLICE_MS)
            if left is None and not on_main_thread():
                step = -1  # signals are handled by the main thread
            outcome = _library.sized(_library.Outcome)
            code = library.lockstep_work_wait(self._handle, step, byref(outcome))
            if code != _library.NOT_YET:
                return self._end(code, outcome)
            if left is not None:
                left -= step
                if left <= 0:
                    return False

    @property
    def outcome(self) -> Outcome:
        """Waits for the end."""
        self.wait()
        assert self._outcome is not None
        return self._outcome

    def _end(self, code: int, outcome: _library.Outcome) -> bool:
        error = None if code == 0 else self._group._name(_library.failure())
        with self._lock:
            if self._views is not None:
                first = outcome.first_non_finite
                self._error = error
                source = outcome.source
                self._outcome = Outcome(None if first < 0 else first, outcome.took_ns * 1e-9, None if source < 0 else source)
                self._views = None  # the arrays are free
                self._group._pending.discard(self)
        return self._told()

    def _told(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            library.lockstep_work_destroy(handle)


class Buffer:
    """Memory where collectives are fastest: other workers of this host read and write it in place.

    numpy() is an array on it, view() what collectives take. It must be released, and no array on it used any more, before
    its communicator is closed or the job regroups."""

    def __init__(self, group: "Communicator", count: int, type: Type = Type.F32):
        self._handle = c_void_p()
        self.type = type
        self.count = count
        group._check(library.lockstep_buffer_create(group._handle, count * SIZES[type], byref(self._handle)))
        self.address: int = library.lockstep_buffer_data(self._handle) or 0

    def numpy(self) -> Any:
        """An array on this memory. Needs NumPy."""
        import numpy

        names = {Type.F32: "f4", Type.F64: "f8", Type.F16: "f2", Type.I32: "i4", Type.I64: "i8", Type.U8: "u1", Type.BF16: "u2"}
        memory = (ctypes.c_char * (self.count * SIZES[self.type])).from_address(self.address)
        memory._owner = self  # type: ignore[attr-defined]
        return numpy.frombuffer(memoryview(memory), dtype=names[self.type])

    def view(self) -> View:
        """For collectives."""
        return View(self.address, self.count, self.type, self)

    def release(self) -> None:
        """Gives the memory back."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            library.lockstep_buffer_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.release()


class Communicator:
    """Collectives among the workers of a group.

    All of them call the same collectives in the same order; one that does not is found out and named. Each method takes
    arrays (NumPy, DLPack, the buffer protocol; contiguous, in the memory of this machine) and copies nothing. With
    wait=False it returns a Work at once; otherwise it returns when the collective has ended, and Ctrl-C ends the job's
    wait. All take timeout, check_finite, step and bucket, as CallOptions says. After an error the communicator is dead, and
    every later call raises the same first cause."""

    def __init__(self, handle: Any, owned: bool):
        self._handle = handle
        self._owned = owned
        _library.not_for_forks.add(self)
        self._pending: Set[Work] = set()  # whoever forgets a work: its arrays stay until it has ended

    @property
    def rank(self) -> int:
        """The number of this worker in the group."""
        return int(library.lockstep_communicator_rank(self._open()))

    @property
    def world_size(self) -> int:
        """How many workers the group has."""
        return int(library.lockstep_communicator_world_size(self._open()))

    def name_of(self, rank: int) -> str:
        """A worker as messages name it, such as "rank 2 (10.0.0.3:4711)"."""
        name = ctypes.create_string_buffer(256)
        _library.check(library.lockstep_communicator_name_of(self._open(), rank, name, len(name)))
        return name.value.decode("utf-8", "replace")

    def all_reduce(self, data: Any, op: Op = Op.SUM, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """data = the reduction of everybody's data. The sum has the same bits over any transport."""
        own = view(data, writable=True)
        return self._call("all_reduce", [own], (own.address, own.count, own.type, op), wait, options)

    def reduce_scatter(self, data: Any, out: Any, op: Op = Op.SUM, counts: Optional[Sequence[int]] = None, *,
                       wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """out = this worker's part of the reduction of everybody's data; parts by `counts`, or even."""
        source, target = view(data), view(out, writable=True)
        return self._call("reduce_scatter", [source, target],
                          (source.address, source.count, target.address, target.count, _type(source, target), op,
                           self._counts(counts)), wait, options)

    def all_gather(self, data: Any, out: Any, counts: Optional[Sequence[int]] = None, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """out = everybody's data in rank order. `data` may be its own place in `out`."""
        source, target = view(data), view(out, writable=True)
        return self._call("all_gather", [source, target],
                          (source.address, source.count, target.address, target.count, _type(source, target),
                           self._counts(counts)), wait, options)

    def broadcast(self, data: Any, root: int = 0, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """data = the root's data."""
        own = view(data, writable=self.rank != root)
        return self._call("broadcast", [own], (own.address, own.count, own.type, root), wait, options)

    def reduce(self, data: Any, out: Any = None, op: Op = Op.SUM, root: int = 0, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """As all_reduce, to the root alone: `out` is used there only, and may be `data`."""
        source = view(data)
        target = view(out, writable=True) if self.rank == root else View(0, source.count, source.type, None)
        if target.count != source.count:
            raise ValueError(f"reduce: the result has {target.count} elements, {source.count} are needed")
        return self._call("reduce", [source, target],
                          (source.address, target.address, source.count, _type(source, target), op, root), wait, options)

    def gather(self, data: Any, out: Any = None, root: int = 0, counts: Optional[Sequence[int]] = None, *,
               wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """As all_gather, to the root alone: `out` is used there only."""
        source = view(data)
        target = view(out, writable=True) if self.rank == root else View(0, 0, source.type, None)
        return self._call("gather", [source, target],
                          (source.address, source.count, target.address, target.count, _type(source, target), root,
                           self._counts(counts)), wait, options)

    def scatter(self, data: Any, out: Any, root: int = 0, counts: Optional[Sequence[int]] = None, *,
                wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """The reverse of gather: `data` is used on the root alone."""
        target = view(out, writable=True)
        source = view(data) if self.rank == root else View(0, 0, target.type, None)
        return self._call("scatter", [source, target],
                          (source.address, source.count, target.address, target.count, _type(source, target), root,
                           self._counts(counts)), wait, options)

    def all_to_all(self, data: Any, out: Any, send_counts: Optional[Sequence[int]] = None,
                   recv_counts: Optional[Sequence[int]] = None, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """`data` holds a part for every worker, `out` receives one from every worker, both in rank order."""
        source, target = view(data), view(out, writable=True)
        return self._call("all_to_all", [source, target],
                          (source.address, source.count, target.address, target.count, _type(source, target),
                           self._counts(send_counts), self._counts(recv_counts)), wait, options)

    def barrier(self, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """Ends when every worker has called it."""
        return self._call("barrier", [], (), wait, options)

    def send(self, data: Any, to: int, tag: int = 0, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """A message to another worker. Type, count and tag must be what its receiver expects; messages from one worker
        to another arrive in order. A large message waits for its receiver."""
        own = view(data)
        return self._call("send", [own], (own.address, own.count, own.type, to, tag), wait, options)

    def recv(self, data: Any, source: int, tag: int = 0, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """Receives such a message into `data`."""
        own = view(data, writable=True)
        return self._call("recv", [own], (own.address, own.count, own.type, source, tag), wait, options)

    def recv_any(self, data: Any, tag: int = 0, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """Receives the next message of any worker that has this tag; `outcome.source` is who sent it. Of several receives
        that a message fits, the one that was called first gets it; one from a named worker fits all messages of that
        worker."""
        own = view(data, writable=True)
        return self._call("recv_any", [own], (own.address, own.count, own.type, tag), wait, options)

    def reduce_nodes(self, partials: Sequence[Any], lanes: int, out: Any, *, wait: bool = True, **options: Unpack[CallOptions]) -> Work:
        """out = the sum over all lanes of a step. `partials` are this worker's sums over lanes.partials_of(), in that
        order, each as long as `out`, which may be the first of them. The same bits for any number of workers."""
        target = view(out, writable=True)
        sources = [view(each) for each in partials]
        for each in sources:
            if each.count != target.count or each.type != target.type:
                raise ValueError(f"reduce_nodes: a partial has {each.count} elements of {each.type.name}, the result "
                                 f"{target.count} of {target.type.name}")
        addresses = (c_void_p * len(sources))(*[each.address for each in sources])
        return self._call("reduce_nodes", [*sources, target],
                          (addresses, len(sources), lanes, target.address, target.count, target.type), wait, options)

    def split(self, color: int, key: int = 0) -> "Optional[Communicator]":
        """Workers that give the same color form a group, ordered by key, then by rank. A negative color joins none and
        gets None. Collective."""
        part = c_void_p()
        try:
            _library.interruptible(library.lockstep_communicator_split, self._open(), color, key, byref(part))
        except Error as error:
            raise self._name(error) from None
        return Communicator(part, True) if part else None

    def subgroup(self, members: Sequence[int], label: str) -> "Communicator":
        """A group of `members`, ranks of this one in the order of their new ranks. Only they call it, with the same
        arguments; no group of theirs has had this label before. Waits for nobody."""
        part = c_void_p()
        ranks = (c_int * len(members))(*members)
        self._check(library.lockstep_communicator_subgroup(self._open(), ranks, len(members), label.encode(), byref(part)))
        return Communicator(part, True)

    def allocate(self, count: int, type: Type = Type.F32) -> Buffer:
        """Memory where collectives are fastest, zero-filled."""
        return Buffer(self, count, type)

    def abort(self, reason: str) -> None:
        """Ends everything at once, on every worker of the job. Callable from any thread."""
        _library.check(library.lockstep_communicator_abort(self._open(), reason.encode()))

    def check(self) -> None:
        """Raises the job's first cause if it has failed. Never waits."""
        self._check(library.lockstep_communicator_check(self._open()))

    def close(self) -> None:
        """Of a group that was split off. Never waits: collectives that have not ended abort the job."""
        handle, self._handle = self._handle, None
        if handle and self._owned:
            library.lockstep_communicator_destroy(handle)
            self._pending.clear()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> Any:
        if not self._handle:
            raise ValueError("the communicator is closed")
        return self._handle

    def _counts(self, counts: Optional[Sequence[int]]) -> Any:
        if counts is None:
            return None
        if len(counts) != self.world_size:
            raise ValueError(f"{len(counts)} counts for {self.world_size} ranks")
        return (c_size_t * len(counts))(*counts)

    def _call(self, name: str, views: List[View], arguments: Sequence[Any], wait: bool, options: CallOptions) -> Work:
        work = c_void_p()
        code = getattr(library, "lockstep_" + name)(self._open(), *arguments, _options(**options), byref(work))
        self._check(code)
        if len(self._pending) >= FORGOTTEN:
            # Other threads add works and take them out meanwhile.
            for each in list(self._pending):
                if each.done():
                    self._pending.discard(each)
        started = Work(work, self, views)
        if wait:
            started.wait()
        return started

    def _check(self, code: int) -> None:
        if code != 0:
            raise self._name(_library.failure())

    def _name(self, error: Error) -> Error:
        """The error, with the culprit's name where it is known."""
        # The rank of an error is the job's; groups that were split off have others.
        if error.rank is not None and not self._owned and self._handle:
            try:
                error.culprit = self.name_of(error.rank)
            except Error:
                pass  # its rank is all that is known of it
        told.add(str(error))
        return error


def _type(source: View, target: View) -> Type:
    if source.type != target.type:
        raise TypeError(f"the input is {source.type.name}, the output is {target.type.name}")
    return source.type


def _options(timeout: Optional[float] = None, check_finite: bool = False, step: int = 0, bucket: int = 0) -> Any:
    """Those of CallOptions."""
    if timeout is None and not check_finite and step == 0 and bucket == 0:
        return None
    milliseconds = 0 if timeout is None else max(1, int(timeout * 1000))
    return byref(_library.sized(_library.CallOptions, timeout_ms=milliseconds, check_finite=check_finite,
                                step=step & 0xFFFFFFFF, bucket=bucket))
