"""Lockstep for PyTorch: a torch.distributed backend, and data-parallel training with the same bits at any number of
workers.

    import torch.distributed as dist
    import lockstep.torch

    dist.init_process_group("lockstep")                               # instead of "gloo"
    exact = lockstep.torch.ExactDataParallel(model, optimizer, lanes=8)  # instead of DistributedDataParallel
"""

from .determinism import deterministic, first_difference, lane_generator, lane_seed
from .exact import ExactDataParallel, Sum
from .join import create, join
from .process_group import ProcessGroup
from .sampler import LaneSampler

__all__ = ["ExactDataParallel", "LaneSampler", "ProcessGroup", "Sum", "deterministic", "first_difference", "join", "lane_generator", "lane_seed"]


def _register():
    import torch.distributed as dist

    dist.Backend.register_backend("lockstep", create, extended_api=True, **_devices(dist.Backend))


def _devices(backend):
    # PyTorch 1.13 knows no list of devices; newer ones would take a backend of one's own for GPUs only.
    import inspect

    known = "devices" in inspect.signature(backend.register_backend).parameters
    return {"devices": ["cpu", "cuda"]} if known else {}


_register()
