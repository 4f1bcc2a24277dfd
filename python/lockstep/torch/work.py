"""Collectives under way, as torch.distributed sees them."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work as TorchWork

import lockstep

from ..communicator import told


class Work(TorchWork):
    """A collective that was started. Its memory is in use until it has ended."""

    def __init__(self, native, inputs=(), outputs=(), result=None, completer=None, source=-1):
        super().__init__()
        self._native = native  # None: it has ended already
        self._inputs = inputs
        self._outputs = outputs
        self._result = result
        self._completer = completer  # None: its future has a thread of its own
        self._source = source  # of a message that is received
        self._kept_in = {}
        self._lock = threading.Lock()
        self._future = None
        self._error = None

    def stay_in(self, works):
        """Stays alive in these works of its group until somebody has waited for it. Its result is the caller's memory."""
        works[self] = None
        self._kept_in = works

    def wait(self, timeout=timedelta(0)):
        seconds = timeout.total_seconds()
        if not self.ends_within(seconds if seconds > 0 else None):
            raise TimeoutError(f"the collective has not ended after {seconds:g} s; it goes on")
        return True

    def ends_within(self, seconds):
        """Whether it has ended by then (None: by its own deadline); raises its error."""
        if self._error is None:
            native = self._native
            try:
                if native is not None and not native.wait(seconds):
                    return False
            except lockstep.Error as error:
                self._error = error
        self._kept_in.pop(self, None)
        if self._error is not None:
            told.add(str(self._error))
            raise self._error
        self._finish()
        return True

    def _finish(self):
        with self._lock:
            outputs, self._outputs, self._inputs = self._outputs, (), ()
            for memory in outputs:
                memory.give_back()
            if self._native is not None and self._native.outcome.source is not None:
                self._source = self._native.outcome.source
            self._native = None

    @classmethod
    def of_all(cls, works, result, then=()):
        """Works as one, which ends when all of them have."""
        # Collectives end in their order, messages do not: those are to hold up no other future.
        completer = None if any(work._completer is None for work in works) else works[0]._completer
        return cls(_All(works), outputs=then, result=result, completer=completer)

    def synchronize(self):
        self.wait()

    def is_completed(self):
        native = self._native
        if native is None or self._error is not None:
            return True
        if not native.done():
            return False
        try:
            self.wait()
        except Exception as error:
            told.discard(str(error))  # but by wait(), exception() and the future
        return True

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        self.is_completed()
        return self._error

    def result(self):
        return self._result

    def source_rank(self):
        """Who sent the message that was received; -1: not yet known, or no message."""
        return self._source

    _source_rank = source_rank  # as torch.distributed asks

    def get_future(self):
        with self._lock:
            if self._future is None:
                devices = [tensor.device for tensor in _tensors(self._result) if tensor.is_cuda]
                ended = torch.futures.Future(devices=devices[:1]) if devices else torch.futures.Future()
                # An exception of a callback reaches waiters in C++, such as DistributedDataParallel, with its text.
                self._future = ended.then(lambda _: self.wait() and self._result)
                started = False
            else:
                started = True
        if not started:
            if self._native is None:
                ended.set_result(None)
            else:
                (self._completer or Completer(once=True)).add(self, ended)
        return self._future


class _All:
    """What of_all() waits for."""

    outcome = lockstep.Outcome(None, 0.0)

    def __init__(self, works):
        self._works = works

    def done(self):
        return all([work.is_completed() for work in self._works])

    def wait(self, seconds=None):
        deadline = None if seconds is None else time.monotonic() + seconds
        return all(work.ends_within(None if deadline is None else max(0.0, deadline - time.monotonic())) for work in self._works)


class Then:
    """What is done when a collective has ended, among the memories that are given back then."""

    def __init__(self, function):
        self.give_back = function


def _tensors(result):
    for item in result:
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _tensors(item)


class _Thread(threading.Thread):
    """One that ends futures, and so runs their callbacks."""


class Completer:
    """A thread that ends futures. Collectives of a group end in the order in which they were started."""

    def __init__(self, once=False):
        self._once = once
        self._queue: "queue.SimpleQueue" = queue.SimpleQueue()
        self._thread = None
        self._lock = threading.Lock()

    def add(self, work, ended):
        if not self._once and isinstance(threading.current_thread(), _Thread):
            # The callback of another future asks, and may wait for this one: not on the thread that it holds up.
            Completer(once=True).add(work, ended)
            return
        with self._lock:
            if self._thread is None:
                self._thread = _Thread(target=self._run, name="lockstep futures", daemon=True)
                self._thread.start()
        self._queue.put((work, ended))

    def close(self):
        with self._lock:
            if self._thread is not None:
                self._queue.put(None)

    def _run(self):
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            work, ended = entry
            try:
                work.wait()
            except Exception as error:
                told.discard(str(error))  # but by the future's callback
            ended.set_result(None)
            del entry, work, ended
            if self._once:
                return
