#!/usr/bin/env python3
"""Processes of torch.distributed on several hosts meet over the backend lockstep: at an address that the others reach, however
they were told where the store is."""
# ctest: PROCESSORS 2 TIMEOUT 120
# builds: release

import ctypes
import os
import sys
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import Hosts, enter_own_network
from torch_workers import expect_raises, need_torch, run

PORT = 4711  # in namespaces of our own
CLONE_NEWNET = 0x40000000


def enter(host):
    with open(f"/proc/{host.holder.pid}/ns/net") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def sum_of_all(hosts, init_method, environment, address):
    """On a worker: one per host."""
    import torch
    import torch.distributed as dist

    import lockstep

    rank = int(os.environ["RANK"])
    enter(hosts[rank])
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.environ.update({name: value[rank] if isinstance(value, tuple) else value for name, value in environment.items()})

    def join():
        dist.init_process_group("lockstep", init_method=init_method, rank=rank, world_size=2)

    if address is None:
        return expect_raises(RuntimeError, join, "LOCKSTEP_INTERFACE", *(["rank 0"] if rank else []))
    with mock.patch("lockstep.join", wraps=lockstep.join) as joined:
        join()
    assert joined.call_args.kwargs["master_host"] == address, joined.call_args
    data = torch.full((3,), float(rank + 1))
    dist.all_reduce(data)
    assert data.tolist() == [3, 3, 3]
    dist.destroy_process_group()


def meet(what, hosts, address, init_method="env://", **environment):
    ended = run(2, lambda: sum_of_all(hosts, init_method, environment, address))
    for rank, each in enumerate(ended):
        if each.code != 0:
            sys.exit(f"{what}: rank {rank} ended with {each.code}\n{each.output}")
    print(f"{what}: {max(each.seconds for each in ended):.1f} s", flush=True)


def main():
    need_torch()
    enter_own_network()
    with Hosts(2) as hosts:
        first = hosts.network.address(0)
        for i in (0, 1):
            hosts[i].run("ip", "addr", "add", f"fd00::{i + 1}/64", "dev", "eth0", "nodad")
        tcp = f"tcp://{first}:{PORT}"
        meet("without a default route", hosts, None, tcp)
        meet("at an interface", hosts, first, tcp, LOCKSTEP_INTERFACE="eth0")
        meet("at an address", hosts, first, MASTER_ADDR=first, MASTER_PORT=str(PORT))
        meet("at an address of IPv6", hosts, "fd00::1", MASTER_ADDR="fd00::1", MASTER_PORT=str(PORT))
        hosts[0].run("ip", "route", "add", "default", "dev", "eth0")
        meet("with a default route", hosts, first, tcp)
        # As Debian's /etc/hosts has a host's own name.
        meet("at a name of loopback", hosts, first, MASTER_ADDR=("127.0.1.1", first), MASTER_PORT=str(PORT))


if __name__ == "__main__":
    main()
