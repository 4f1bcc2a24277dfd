"""How the processes of torch.distributed meet as workers of a lockstep job."""

from __future__ import annotations

import atexit
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
import weakref
from datetime import timedelta
from typing import Any, Dict, Optional

import torch.distributed as dist

import lockstep

from ..communicator import told
from .process_group import ProcessGroup

# Seconds; a process that is silent for so long is dead, if the group's own timeout is not shorter. That one is for waits.
HEARTBEAT = 30.0
TELLING = timedelta(seconds=5)
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # no hosts, but addresses for examples: the default route leads there
SIOCGIFADDR = 0x8915

_groups: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()


def create(options: Any, _: Any) -> ProcessGroup:
    """Makes a process group, as torch.distributed asks for it."""
    _refuse_mixture(getattr(options, "process_group", None))
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    parent = _default_group()
    members = list(options.global_ranks_in_group)
    if members and parent is not None:
        communicator = parent.communicator.subgroup(members, label=str(options.group_id))
        return ProcessGroup(None, communicator, rank, size, timeout, options.store)
    job = _Job(_meet(options.store, rank, size, timeout))
    group = ProcessGroup(job, job.job.communicator, rank, size, timeout, options.store)
    _groups.add(group)
    return group


def _refuse_mixture(group: Any) -> None:
    """Newer PyTorch takes what create() makes for the whole group, whatever backends it is to have for other devices."""
    if group is not None and (group._device_types or group.name() in ("nccl", "gloo", "mpi", "ucc", "xccl")):
        raise ValueError('a process group has lockstep for all devices or for none: call init_process_group("lockstep"), and '
                         'new_group(backend=...) for collectives of another backend')


def join(**options) -> "lockstep.Job":
    """This process's place in the job: that of the default process group; under torchrun one is made if there is
    none. Under `python -m lockstep run`, or alone, it is lockstep.join(**options), whose job survives losses and whose
    calls have PyTorch's default timeout."""
    by_torch = "TORCHELASTIC_RUN_ID" in os.environ or ("MASTER_PORT" in os.environ and "LOCKSTEP_LAUNCHED_RANK" not in os.environ)
    if options and (dist.is_initialized() or by_torch):
        raise ValueError(f"{', '.join(options)}: the job is that of the process group, which takes no options of lockstep.join()")
    if dist.is_initialized():
        group = _default_group()
        if group is None:
            raise ValueError(f"the default process group has the backend {dist.get_backend()!r}; "
                             'call init_process_group("lockstep")')
        return group.job.job
    if by_torch:
        dist.init_process_group("lockstep")
        return _default_group().job.job
    return lockstep.join(**{"survive": True, "call_timeout": dist.default_pg_timeout.total_seconds(), **_network(), **options})


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
        before = set(told)
        try:
            # An error that ends this process, in `finally` or after all: the others are to hear of it at once.
            job._end(sys.exc_info()[1] or getattr(sys, "last_value", None))
        except lockstep.Error as error:
            # PyTorch would keep a group that fails to end. What a collective has told the caller need not be told again.
            job.close()
            if str(error) not in before:
                raise


def _close_all():
    for group in list(_groups):
        try:
            group.shutdown()
        except Exception as error:
            print(f"lockstep: {error}", file=sys.stderr)


atexit.register(_close_all)


def _meet(store, rank: int, size: int, timeout: timedelta):
    """Joins a job whose place and secret rank 0 puts into the store of torch.distributed."""
    network = _network()
    seconds = min(HEARTBEAT, timeout.total_seconds())
    if size == 1:
        return lockstep.join(rank=0, world_size=1, timeout=seconds)
    store.set(f"rank {rank}", json.dumps([_host(), network["transport"]]))
    _wait_for_all(store, size, timeout)
    listener = None
    if rank == 0:
        places = [json.loads(store.get(f"rank {each}")) for each in range(size)]
        try:
            for other, (_, transport) in enumerate(places):
                if transport != network["transport"]:
                    raise ValueError(f"LOCKSTEP_TRANSPORT is {network['transport']} here and {transport} on rank {other}")
            several = len({host for host, _ in places}) > 1
            listener = _listen(_own_address(network["interface"]) if several else "127.0.0.1")
        except Exception as error:
            store.set("place", json.dumps({"error": f"rank 0: {error}"}))
            _wait_until_told(store, size)
            raise
        host, port = listener.getsockname()[:2]
        store.set("place", json.dumps({"host": host, "port": port, "secret": secrets.token_hex(16),
                                       "attempt": secrets.token_hex(8)}))
    place = json.loads(store.get("place"))
    if "error" in place:
        store.set(f"told {rank}", "")
        raise RuntimeError(place["error"])
    job = lockstep.join(rank=rank, world_size=size, master_host=place["host"], master_port=place["port"],
                        listener=listener.detach() if listener else None, name="torch", attempt=place["attempt"],
                        token=place["secret"], timeout=seconds, call_timeout=timeout.total_seconds(), **network)
    # All have read them. The next group of these processes may get the same store, as under torchrun.
    if rank == 0:
        store.delete_key("place")
    store.delete_key(f"rank {rank}")
    return job


def _network() -> Dict[str, Any]:
    """What the environment says of how bytes travel."""
    return {"transport": os.environ.get("LOCKSTEP_TRANSPORT", "auto"), "interface": os.environ.get("LOCKSTEP_INTERFACE")}


def _wait_for_all(store, size, timeout):
    keys = [f"rank {rank}" for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except Exception as error:
        missing = [key for key in keys if not store.check([key])]
        raise RuntimeError(f"{', '.join(missing) or 'some ranks'} of {size} did not come within "
                           f"{timeout.total_seconds():g} s") from error


def _wait_until_told(store, size):
    """The store goes with the process of rank 0, so the others read its error first."""
    try:
        store.wait([f"told {rank}" for rank in range(1, size)], TELLING)
    except Exception:  # some are gone already
        pass


def _host() -> str:
    """The same for processes that reach each other over loopback, as `this_host` of the library has it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _listen(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _own_address(interface: Optional[str]) -> str:
    """An address by which other hosts reach this one: that of the interface, or what the routing table says."""
    if interface:
        return _address_of(interface)
    for target in (os.environ.get("MASTER_ADDR"), *ELSEWHERE):
        address = _address_toward(target) if target else None
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    raise RuntimeError("the processes are on several hosts, and this one finds no address by which the others reach it: set "
                       "LOCKSTEP_INTERFACE to the name of the network interface to use, such as eth0")


def _address_toward(host: str) -> Optional[str]:
    """This host's address on the way to another one. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError:
        return None


def _address_of(interface: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        pass  # it has no address of IPv4
    with open("/proc/net/if_inet6") as file:
        for address, _, _, scope, _, name in map(str.split, file):
            if name == interface and scope == "00":  # global
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise ValueError(f"LOCKSTEP_INTERFACE: there is no interface {interface} with an address")
