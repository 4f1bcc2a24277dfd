"""Joining a job, leaving it, and going on when workers are lost."""

from __future__ import annotations

import enum
import ctypes
from ctypes import byref, c_size_t, c_void_p
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from . import _library
from ._library import library
from .arrays import view
from .communicator import Communicator
from .errors import Error

_TRANSPORTS = {"auto": 0, "tcp": 1, "shm": 2, "server": 3}


class Regroup(enum.IntEnum):
    """How a worker comes to ask for the next generation of its job."""

    AFTER_LOSS = 0  # the one before has failed
    IN_ORDER = 1  # between two steps, as all workers know: somebody comes or leaves
    TOO_FEW = 2  # as IN_ORDER; this worker has saved its work, and waits for others to come


class Departure(NamedTuple):
    """A worker that has gone, and why."""

    rank: Optional[int]  # that it had; None: it was lost while a generation formed
    kind: str  # died, failed, expelled or left
    name: str
    why: str


class Wishes(NamedTuple):
    """What the job wants of its workers; rank 0 hears it first."""

    stop: int  # a signal's number: end in order
    save: int  # a checkpoint, once for each number that comes here; 0: none
    regroup: bool  # newcomers wait: Regroup.IN_ORDER after the step


class Job:
    """One worker's place in a job: processes that train together. join() makes it.

    As a context manager it leaves in good order at the end of the block; an exception in the block makes this worker
    give up instead, and the others are told why."""

    def __init__(self, handle: c_void_p):
        self._handle = handle
        self._world: Optional[Communicator] = None
        _library.not_for_forks.add(self)

    @property
    def rank(self) -> int:
        """The number of this worker; -1 for a newcomer."""
        return int(library.lockstep_job_rank(self._open()))

    @property
    def world_size(self) -> int:
        """How many workers there are; -1 for a newcomer."""
        return int(library.lockstep_job_world_size(self._open()))

    @property
    def generation(self) -> int:
        """The first is 1; 0: a job of this process alone."""
        return int(library.lockstep_job_generation(self._open()))

    @property
    def communicator(self) -> Communicator:
        """Collectives among all workers. After regroup() it is that of the new generation."""
        if self._world is None:
            handle = library.lockstep_job_communicator(self._open())
            if not handle:
                raise ValueError("a newcomer has no communicator until it has regrouped")
            self._world = Communicator(handle, False)
        return self._world

    @property
    def newcomer(self) -> bool:
        """Whether this worker has come to a job that runs already: regroup() lets it in."""
        return bool(library.lockstep_job_newcomer(self._open()))

    @property
    def newcomers(self) -> int:
        """How many of the last ranks were in no generation before."""
        return int(library.lockstep_job_newcomers(self._open()))

    @property
    def too_few(self) -> bool:
        """The generation is smaller than min_workers: save, then regroup with Regroup.TOO_FEW."""
        return bool(library.lockstep_job_too_few(self._open()))

    @property
    def stood_still(self) -> bool:
        """This process stood still for longer than the timeout: the others have gone on, and what it has is old."""
        return bool(library.lockstep_job_stood_still(self._open()))

    @property
    def departed(self) -> List[Departure]:
        """Who has gone since the generation that this worker was in before."""
        kinds = ("died", "failed", "expelled", "left")
        gone = []
        for index in range(library.lockstep_job_departed_count(self._open())):
            each = _library.sized(_library.Departure)
            _library.check(library.lockstep_job_departed(self._handle, index, byref(each)))
            gone.append(Departure(each.rank if each.rank >= 0 else None, kinds[each.kind], (each.name or b"").decode(),
                                  (each.why or b"").decode("utf-8", "replace")))
        return gone

    @property
    def wishes(self) -> Wishes:
        """What the job wants of its workers."""
        found = _library.sized(_library.Wishes)
        _library.check(library.lockstep_job_wishes(self._open(), byref(found)))
        return Wishes(found.stop, found.save, bool(found.regroup))

    def describe(self, description: bytes = b"", most_workers: int = 0) -> None:
        """What newcomers are told; all workers say the same. A job takes newcomers only once it is described."""
        _library.check(library.lockstep_job_describe(self._open(), description, len(description), most_workers))

    @property
    def description(self) -> bytes:
        """What the job is, as it was described."""
        place, count = c_void_p(), c_size_t()
        _library.check(library.lockstep_job_description(self._open(), byref(place), byref(count)))
        return ctypes.string_at(place, count.value) if count.value else b""

    def survives(self, error: Error) -> bool:
        """Whether the generation has ended because a worker was lost, which is what this error tells, and the job goes
        on: regroup() is possible."""
        text = str(error).encode()
        told = _library.sized(_library.ErrorStructure, code=int(error.code),
                              rank=-1 if error.rank is None else error.rank, text=text)
        return bool(library.lockstep_job_survives(self._open(), byref(told)))

    def regroup(self, step: int, how: Regroup = Regroup.AFTER_LOSS) -> None:
        """Leaves the generation and returns in the next one, with other ranks and another communicator. `step`: how
        many steps this worker has done. Groups that were split off and buffers are closed before."""
        _library.interruptible(library.lockstep_job_regroup, self._open(), step, how)

    def leave(self) -> None:
        """The end in good order: waits for all workers. Nothing may follow."""
        if not self.newcomer:
            self.communicator.barrier()
        self.close()

    def abort(self, reason: str) -> None:
        """Ends the job for all workers at once. Callable from any thread."""
        _library.check(library.lockstep_job_abort(self._open(), reason.encode()))

    def give_up(self, reason: str) -> None:
        """This worker fails by itself: those that survive losses go on without it. Callable from any thread."""
        _library.check(library.lockstep_job_give_up(self._open(), reason.encode()))

    def write_flight(self, folder: str, why: str) -> None:
        """Writes what this worker did last, for `lockstep explain`. Callable from any thread."""
        _library.check(library.lockstep_job_write_flight(self._open(), str(folder).encode(), why.encode()))

    def close(self) -> None:
        """Without leave() this worker is lost to those that still work. Never waits."""
        world, self._world = self._world, None
        if world is not None:
            world.close()
        pending = world._pending if world is not None else set()
        handle, self._handle = self._handle, c_void_p()
        if handle:
            library.lockstep_job_destroy(handle)
        pending.clear()  # nothing uses their arrays any more

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._end(error)

    def _end(self, error: Optional[BaseException]) -> None:
        """leave(), or with an error by which this worker ends: the others are told, unless they know."""
        if not self._handle:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.leave()
            return
        if not self._has_failed():
            self.give_up(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.close()

    def _has_failed(self) -> bool:
        """The generation has, for all workers."""
        try:
            if not self.newcomer:
                self.communicator.check()
            return False
        except Error:
            return True

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _open(self) -> c_void_p:
        if not self._handle:
            raise ValueError("the job is closed")
        return self._handle


def join(*, transport: str = "auto", rank: Optional[int] = None, world_size: Optional[int] = None,
         master_host: Optional[str] = None, master_port: int = 0, listener: Optional[int] = None,
         coordinator: Optional[str] = None, name: Optional[str] = None, attempt: Optional[str] = None,
         token: Optional[str] = None, plain_wire: bool = False, interface: Optional[str] = None, timeout: float = 30.0,
         call_timeout: Optional[float] = None, survive: bool = False, min_workers: int = 1,
         patience: Optional[float] = None) -> Job:
    """Makes this process a worker of a job. Returns when all workers are there, or raises an Error that names who is
    missing or wrong.

    Without a rank, rank and place are found in the environment (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
    torchrun, mpirun, srun and `python -m lockstep run` set them); without those it is a job of this process alone.

    transport    "auto" (shared memory within a host, sockets otherwise), "tcp", "shm" or "server"
    rank, world_size, master_host, master_port
                 this worker's place: rank 0 listens at master_host:master_port
    listener     descriptor of a listening socket for rank 0, which is taken over
    coordinator  HOST:PORT of the gradient server, with "server"
    name         of the job; attempt names this start of it; the same on all workers
    token        the job's secret, 16 bytes at least; without one: this host only
    plain_wire   bytes between hosts are checked, but not encrypted
    interface    the network interface to use
    timeout      a worker that is silent for so many seconds is dead
    call_timeout seconds for a collective that is given none of its own, so also for a step's sum and for the end; without
                 it ten times `timeout`
    survive      the job goes on without workers that are lost, if all workers say so; with fewer than min_workers it
                 waits for others, for `patience` seconds
    """
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport '{transport}' is none of {', '.join(_TRANSPORTS)}")

    def text(value: Optional[str]) -> Optional[bytes]:
        return None if value is None else value.encode()

    def milliseconds(value: Optional[float]) -> int:
        return 0 if value is None else max(1, int(value * 1000))

    options = _library.sized(
        _library.JoinOptions, transport=_TRANSPORTS[transport], no_environment=rank is not None,
        rank=rank or 0, world_size=(world_size or 1) if rank is not None else 0, master_host=text(master_host),
        master_port=master_port, has_listener=listener is not None, listener=listener or 0, coordinator=text(coordinator),
        name=text(name), attempt=text(attempt), token=text(token), plain_wire=plain_wire, interface_name=text(interface),
        timeout_ms=milliseconds(timeout), call_timeout_ms=milliseconds(call_timeout), survive=survive,
        min_workers=min_workers, patience_ms=milliseconds(patience))
    handle = c_void_p()
    _library.interruptible(library.lockstep_join, byref(options), byref(handle))
    return Job(handle)


def run_steps(job: Job, steps: int, state: Sequence[Any], step: Callable[[int], Any]) -> None:
    """A training loop that survives. Calls step(n) for n from 1 to `steps`, on all workers, and goes on with those that
    are left when one is lost.

    `state` are all arrays that a step changes, and a step changes them only when it can no longer fail: after its last
    collective. A worker that is behind, or has come later, is given the state of one that is ahead."""
    done = -1 if job.newcomer else 0  # a newcomer has not even the state of the start
    regroup: Optional[Regroup] = Regroup.IN_ORDER if job.newcomer else None
    if regroup is None and job.generation > 0 and not job.description:
        job.describe()
    while done < steps:
        try:
            if regroup is not None:
                job.regroup(max(done, 0), regroup)
                regroup = Regroup.AFTER_LOSS  # until all stand at the same step
                done = _level(job.communicator, done, state)
                regroup = Regroup.TOO_FEW if job.too_few else None  # waits for others
                continue
            step(done + 1)
            done += 1
            if job.generation > 0 and _newcomers_wait(job):
                regroup = Regroup.IN_ORDER
        except Error as error:
            if not job.survives(error):
                raise
            regroup = Regroup.AFTER_LOSS


def _level(group: Communicator, done: int, state: Sequence[Any]) -> int:
    """All workers get the state of the first of those that have done the most steps; returns how many."""
    steps = (ctypes.c_int64 * group.world_size)()
    group.all_gather((ctypes.c_int64 * 1)(done), steps)
    furthest = int(max(steps))
    if min(steps) == furthest:
        return furthest
    donor = list(steps).index(furthest)
    # What comes is complete before it replaces anything.
    places = [view(array, writable=True) for array in state]
    staged = [(ctypes.c_uint8 * place.bytes).from_buffer_copy(ctypes.string_at(place.address, place.bytes)) for place in places]
    for copy in staged:
        if len(copy):
            group.broadcast(copy, donor)
    group.barrier()
    for place, copy in zip(places, staged):
        ctypes.memmove(place.address, copy, place.bytes)
    return furthest


def _newcomers_wait(job: Job) -> bool:
    """Whether all workers are to form another generation now: rank 0 knows whether newcomers wait."""
    wait = (ctypes.c_uint8 * 1)(1 if job.wishes.regroup else 0)
    job.communicator.broadcast(wait)
    return bool(wait[0])
