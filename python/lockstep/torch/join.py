"""How the processes of torch.distributed meet as workers of a lockstep job."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import lockstep

from .process_group import ProcessGroup

# Seconds; a process that is silent for so long is dead, if the group's own timeout is not shorter. That one is for waits.
HEARTBEAT = 30.0

_groups: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()


def create(options: Any, _: Any) -> ProcessGroup:
    """Makes a process group, as torch.distributed asks for it."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    parent = _default_group()
    members = list(options.global_ranks_in_group)
    if members and parent is not None:
        communicator = parent.communicator.subgroup(members, label=str(options.group_id))
        return ProcessGroup(None, communicator, rank, size, timeout)
    job = _Job(_meet(options.store, rank, size, timeout))
    group = ProcessGroup(job, job.job.communicator, rank, size, timeout)
    _groups.add(group)
    return group


def join(**options) -> "lockstep.Job":
    """This process's place in the job: that of the default process group; under torchrun one is made if there is
    none. Under `python -m lockstep run`, or alone, it is lockstep.join(**options)."""
    if dist.is_initialized():
        group = _default_group()
        if group is None:
            raise ValueError(f"the default process group has the backend {dist.get_backend()!r}; "
                             'call init_process_group("lockstep")')
        return group.job.job
    if "TORCHELASTIC_RUN_ID" in os.environ or ("MASTER_PORT" in os.environ and "LOCKSTEP_LAUNCHED_RANK" not in os.environ):
        dist.init_process_group("lockstep")
        return _default_group().job.job
    options.setdefault("survive", True)
    job = lockstep.join(**options)
    return job


def _default_group():
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return group if isinstance(group, ProcessGroup) else None


class _Job:
    """A job that is left in good order once, at the latest when the process ends."""

    def __init__(self, job):
        self.job = job

    def close(self):
        job, self.job = self.job, None
        if job is None:
            return
        # A process that ends because of an error does not wait for the others: they are to hear of it at once.
        if hasattr(sys, "last_value"):
            job.close()
        else:
            job.leave()


def _close_all():
    for group in list(_groups):
        try:
            group.shutdown()
        except Exception as error:
            print(f"lockstep: {error}", file=sys.stderr)


atexit.register(_close_all)


def _meet(store, rank: int, size: int, timeout: timedelta):
    """Joins a job whose place and secret rank 0 puts into the store of torch.distributed."""
    transport = os.environ.get("LOCKSTEP_TRANSPORT", "auto")
    seconds = min(HEARTBEAT, timeout.total_seconds())
    if size == 1:
        return lockstep.join(rank=0, world_size=1, timeout=seconds)
    listener = None
    if rank == 0:
        listener = socket.socket()
        listener.bind((_own_address(), 0))
        listener.listen(size)
        host, port = listener.getsockname()
        store.set("place", json.dumps({"host": host, "port": port, "secret": secrets.token_hex(16),
                                       "attempt": secrets.token_hex(8)}))
    store.set(f"rank {rank}", "here")
    _wait_for_all(store, size, timeout)
    place = json.loads(store.get("place"))
    return lockstep.join(rank=rank, world_size=size, master_host=place["host"], master_port=place["port"],
                         listener=listener.detach() if listener else None, name="torch", attempt=place["attempt"],
                         token=place["secret"], timeout=seconds, call_timeout=timeout.total_seconds(), transport=transport)


def _wait_for_all(store, size, timeout):
    keys = [f"rank {rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [key for key in keys if not store.check([key])]
        raise RuntimeError(f"{', '.join(missing) or 'some ranks'} of {size} did not come within "
                           f"{timeout.total_seconds():g} s") from error


def _own_address() -> str:
    """The address of this host as the host of MASTER_ADDR sees it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
