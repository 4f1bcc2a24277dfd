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
from .work import Work

__all__ = ["ExactDataParallel", "LaneSampler", "ProcessGroup", "Sum", "deterministic", "first_difference", "join", "lane_generator", "lane_seed"]


def _register():
    import torch.distributed as dist

    dist.Backend.register_backend("lockstep", create, extended_api=True, **_devices(dist.Backend))
    # The library records by itself, and newer PyTorch's recorder cannot be attached to a group of Python.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("lockstep")


def _devices(backend):
    # PyTorch 1.13 knows no list of devices; newer ones would take a backend of one's own for GPUs only.
    import inspect

    known = "devices" in inspect.signature(backend.register_backend).parameters
    return {"devices": ["cpu", "cuda"]} if known else {}


def _keep_from_dynamo(*classes):
    """Under torch.compile Dynamo also sees what C++ calls of ours, such as the broadcasts of DistributedDataParallel, and
    fails on it."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return  # an older PyTorch
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for each in classes:
        for value in vars(each).values():
            if hasattr(value, "__code__"):
                set_code_exec_strategy(value.__code__, skip)


_register()
_keep_from_dynamo(ProcessGroup, Work)
