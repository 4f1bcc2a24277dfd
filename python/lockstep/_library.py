"""The functions of liblockstep.so (lockstep/c.h), by ctypes, which gives up the GIL while one runs."""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
import weakref
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, Dict, List, Optional, Tuple, Type, TypeVar

from . import errors

ABI_VERSION = 3
NOT_YET = 100

AnyStructure = TypeVar("AnyStructure", bound=Structure)


class JoinOptions(Structure):
    _fields_ = [
        ("size", c_size_t), ("transport", c_int), ("no_environment", c_int), ("rank", c_int), ("world_size", c_int),
        ("master_host", c_char_p), ("master_port", c_uint16), ("has_listener", c_int), ("listener", c_int),
        ("coordinator", c_char_p), ("name", c_char_p), ("attempt", c_char_p), ("token", c_char_p), ("plain_wire", c_int),
        ("interface_name", c_char_p), ("timeout_ms", c_int64), ("survive", c_int), ("min_workers", c_int), ("patience_ms", c_int64),
        ("call_timeout_ms", c_int64),
    ]


class ErrorStructure(Structure):
    _fields_ = [("size", c_size_t), ("code", c_int), ("rank", c_int), ("text", c_char_p)]


class Departure(Structure):
    _fields_ = [("size", c_size_t), ("rank", c_int), ("kind", c_int), ("name", c_char_p), ("why", c_char_p)]


class Wishes(Structure):
    _fields_ = [("size", c_size_t), ("stop", c_int), ("save", c_int), ("regroup", c_int)]


class CallOptions(Structure):
    _fields_ = [("size", c_size_t), ("timeout_ms", c_int64), ("check_finite", c_int), ("step", c_uint32), ("bucket", c_uint32)]


class Outcome(Structure):
    _fields_ = [("size", c_size_t), ("first_non_finite", c_int64), ("took_ns", c_int64), ("source", c_int)]


class Range(Structure):
    _fields_ = [("begin", c_uint64), ("end", c_uint64)]


class LaneStep(Structure):
    _fields_ = [("lane", c_uint32), ("accumulator", c_uint32), ("first_merge", c_uint32), ("merges", c_uint32)]


class Merge(Structure):
    _fields_ = [("into", c_uint32), ("source", c_uint32)]


class TensorStructure(Structure):
    _fields_ = [
        ("size", c_size_t), ("name", c_char_p), ("type", c_char_p), ("shape", POINTER(c_int64)), ("dimensions", c_size_t),
        ("data", c_void_p), ("bytes", c_size_t),
    ]


def sized(kind: Type[AnyStructure], **fields: Any) -> AnyStructure:
    """A structure whose first field says how large it is."""
    return kind(size=ctypes.sizeof(kind), **fields)


# Every function of lockstep/c.h: what it returns, then what it takes. "code" is checked by call().
_CALL = [POINTER(CallOptions), POINTER(c_void_p)]  # how every collective ends
_COUNTS = POINTER(c_size_t)
_FUNCTIONS: Dict[str, Tuple[Any, List[Any]]] = {
    "abi_version": (c_uint32, []),
    "version": (c_char_p, []),
    "code_name": (c_char_p, [c_int]),
    "last_error": (None, [POINTER(ErrorStructure)]),
    "join": ("code", [POINTER(JoinOptions), POINTER(c_void_p)]),
    "job_destroy": (None, [c_void_p]),
    "job_rank": (c_int, [c_void_p]),
    "job_world_size": (c_int, [c_void_p]),
    "job_communicator": (c_void_p, [c_void_p]),
    "job_leave": ("code", [c_void_p]),
    "job_abort": ("code", [c_void_p, c_char_p]),
    "job_give_up": ("code", [c_void_p, c_char_p]),
    "job_write_flight": ("code", [c_void_p, c_char_p, c_char_p]),
    "job_survives": (c_int, [c_void_p, POINTER(ErrorStructure)]),
    "job_regroup": ("code", [c_void_p, c_int64, c_int]),
    "job_generation": (c_uint32, [c_void_p]),
    "job_newcomers": (c_int, [c_void_p]),
    "job_newcomer": (c_int, [c_void_p]),
    "job_too_few": (c_int, [c_void_p]),
    "job_stood_still": (c_int, [c_void_p]),
    "job_departed_count": (c_size_t, [c_void_p]),
    "job_departed": ("code", [c_void_p, c_size_t, POINTER(Departure)]),
    "job_describe": ("code", [c_void_p, c_void_p, c_size_t, c_int]),
    "job_description": ("code", [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "job_wishes": ("code", [c_void_p, POINTER(Wishes)]),
    "communicator_rank": (c_int, [c_void_p]),
    "communicator_world_size": (c_int, [c_void_p]),
    "communicator_name_of": ("code", [c_void_p, c_int, c_char_p, c_size_t]),
    "communicator_split": ("code", [c_void_p, c_int, c_int, POINTER(c_void_p)]),
    "communicator_subgroup": ("code", [c_void_p, POINTER(c_int), c_size_t, c_char_p, POINTER(c_void_p)]),
    "communicator_destroy": (None, [c_void_p]),
    "communicator_abort": ("code", [c_void_p, c_char_p]),
    "communicator_check": ("code", [c_void_p]),
    "buffer_create": ("code", [c_void_p, c_size_t, POINTER(c_void_p)]),
    "buffer_data": (c_void_p, [c_void_p]),
    "buffer_destroy": (None, [c_void_p]),
    "type_size": (c_size_t, [c_int]),
    "all_reduce": ("code", [c_void_p, c_void_p, c_size_t, c_int, c_int] + _CALL),
    "reduce_scatter": ("code", [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_int, _COUNTS] + _CALL),
    "all_gather": ("code", [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, _COUNTS] + _CALL),
    "broadcast": ("code", [c_void_p, c_void_p, c_size_t, c_int, c_int] + _CALL),
    "reduce": ("code", [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int, c_int] + _CALL),
    "gather": ("code", [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_int, _COUNTS] + _CALL),
    "scatter": ("code", [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_int, _COUNTS] + _CALL),
    "all_to_all": ("code", [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, _COUNTS, _COUNTS] + _CALL),
    "barrier": ("code", [c_void_p] + _CALL),
    "send": ("code", [c_void_p, c_void_p, c_size_t, c_int, c_int, c_uint32] + _CALL),
    "recv": ("code", [c_void_p, c_void_p, c_size_t, c_int, c_int, c_uint32] + _CALL),
    "recv_any": ("code", [c_void_p, c_void_p, c_size_t, c_int, c_uint32] + _CALL),
    "work_wait": ("code", [c_void_p, c_int64, POINTER(Outcome)]),
    "work_done": (c_int, [c_void_p]),
    "work_destroy": (None, [c_void_p]),
    "lanes_of": ("code", [c_uint32, c_int, c_int, POINTER(c_uint32), POINTER(c_uint32)]),
    "partials_of": ("code", [c_uint32, c_int, c_int, POINTER(Range), c_size_t, POINTER(c_size_t)]),
    "lane_schedule": ("code", [c_uint32, c_int, c_int, POINTER(LaneStep), POINTER(c_size_t), POINTER(Merge),
                               POINTER(c_size_t), POINTER(c_uint32)]),
    "accumulate": ("code", [c_void_p, c_void_p, c_size_t, c_int]),
    "find_non_finite": (c_size_t, [c_void_p, c_size_t, c_int]),
    "reduce_nodes": ("code", [c_void_p, POINTER(c_void_p), c_size_t, c_uint32, c_void_p, c_size_t, c_int] + _CALL),
    "lane_sum_create": ("code", [c_void_p, c_uint32, c_size_t, c_size_t, c_size_t, POINTER(c_void_p)]),
    "lane_sum_destroy": (None, [c_void_p]),
    "lane_sum_count": ("code", [c_void_p, POINTER(c_size_t)]),
    "lane_sum_lane": ("code", [c_void_p, c_size_t, POINTER(c_uint32)]),
    "lane_sum_begin": ("code", [c_void_p, c_int64]),
    "lane_sum_gradient": ("code", [c_void_p, c_size_t, POINTER(POINTER(c_float)), POINTER(POINTER(c_double))]),
    "lane_sum_ready": ("code", [c_void_p, c_size_t, c_size_t, c_size_t]),
    "lane_sum_finish": ("code", [c_void_p, c_int64, POINTER(POINTER(c_float)), POINTER(c_double)]),
    "blake3": ("code", [c_void_p, c_size_t, POINTER(c_uint8)]),
    "blake3_many": ("code", [POINTER(c_void_p), POINTER(c_size_t), c_size_t, POINTER(c_uint8)]),
    "checkpoint_save": ("code", [c_char_p, c_int64, POINTER(TensorStructure), c_size_t, c_char_p, c_size_t]),
    "checkpoint_open": ("code", [c_char_p, POINTER(c_void_p)]),
    "checkpoint_destroy": (None, [c_void_p]),
    "checkpoint_step": (c_int64, [c_void_p]),
    "checkpoint_metadata": ("code", [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "checkpoint_count": (c_size_t, [c_void_p]),
    "checkpoint_tensor": ("code", [c_void_p, c_size_t, POINTER(TensorStructure)]),
    "checkpoint_read": ("code", [c_void_p, POINTER(c_void_p)]),
}


def _find() -> pathlib.Path:
    """The library of this package; of a build that is tested, LOCKSTEP_LIBRARY."""
    given = os.environ.get("LOCKSTEP_LIBRARY")
    return pathlib.Path(given) if given else pathlib.Path(__file__).with_name("liblockstep.so")


def _load() -> ctypes.CDLL:
    path = _find()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, "lockstep_" + name)
        function.argtypes = arguments
        function.restype = c_int if result == "code" else result
    if library.lockstep_abi_version() < ABI_VERSION:
        raise ImportError(f"{path} has version {library.lockstep_abi_version()} of the interface, {ABI_VERSION} is needed")
    return library


library = _load()


def failure() -> "errors.Error":
    """The error of the last call of this thread that failed."""
    last = sized(ErrorStructure)
    library.lockstep_last_error(byref(last))
    text = (last.text or b"").decode("utf-8", "replace")
    return errors.make(last.code, last.rank, text)


def check(code: int) -> None:
    """Raises the error behind the code of a function, unless it is 0."""
    if code != 0:
        raise failure()


# Jobs and communicators. A forked process must not use or free them: the threads that serve them are those of its parent.
not_for_forks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _let_go() -> None:
    for each in not_for_forks:
        each._handle = None


os.register_at_fork(after_in_child=_let_go)

# How long the main thread waits at a time before Python may handle a signal such as Ctrl-C. A wait ends with what it
# waits for: this delays nothing.
SLICE_MS = 50


def on_main_thread() -> bool:
    """Python handles signals there, and only between two of its instructions."""
    return threading.current_thread() is threading.main_thread()


def interruptible(function: Any, *arguments: Any) -> None:
    """Calls a function that may wait for other workers, so that Ctrl-C ends the wait; raises its error. What it waits
    for then goes on, on a thread of its own, until its deadline."""
    if not on_main_thread():
        check(function(*arguments))
        return
    errors_of_it: List[Optional[errors.Error]] = []
    ended = threading.Event()

    def call() -> None:
        errors_of_it.append(failure() if function(*arguments) != 0 else None)
        ended.set()

    threading.Thread(target=call, name="lockstep call", daemon=True).start()
    while not ended.wait(SLICE_MS / 1000):
        pass
    error = errors_of_it[0]
    if error is not None:
        raise error
