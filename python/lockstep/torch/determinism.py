"""What a module needs so that a lane gives the same bits wherever it is computed."""

from __future__ import annotations

import hashlib
import os
import struct
import warnings
from typing import Callable, List, Optional, Tuple

import torch

from ..hashes import blake3

_threads = 1  # that all workers are to have


def deterministic(threads: int = 1) -> None:
    """Sets what PyTorch needs to compute the same bits again: deterministic kernels, and one number of threads.

    Sums that PyTorch takes with several threads depend on how many there are. So all workers must have the same
    number, whatever the machine has; one thread is the number that every machine has. An operation that has no
    deterministic kernel raises an error that names it."""
    global _threads
    _threads = threads
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if hasattr(torch.utils, "deterministic"):  # newer PyTorch would fill all new memory, which no valid program reads
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(threads)


def warn_unless_deterministic() -> None:
    """Says what this process has not set of what deterministic() sets."""
    missing = []
    if torch.get_num_threads() != _threads:
        missing.append(f"PyTorch computes with {torch.get_num_threads()} threads instead of {_threads}")
    if not torch.are_deterministic_algorithms_enabled():
        missing.append("deterministic algorithms are off")
    if missing:
        warnings.warn(f"the weights may depend on the machine: {' and '.join(missing)}; call lockstep.torch.deterministic() first",
                      stacklevel=3)


def lane_seed(seed: int, step: int, lane: int) -> int:
    """The seed of a lane's random numbers: a function of the run's seed, the step and the lane alone."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, lane), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def lane_generator(seed: int, step: int, lane: int) -> torch.Generator:
    """A generator of its own for the data of a lane. Dropout takes the default one, which a lane seeds, too."""
    return torch.Generator().manual_seed(lane_seed(seed, step, lane))


def first_difference(module: torch.nn.Module, compute: Callable[[], torch.Tensor]) -> Optional[str]:
    """Runs `compute`, forward and backward, twice, and names the first layer whose input, output or gradient differs.

    None: both runs had the same bits. `compute` returns a loss and must seed what is random."""
    first, second = _trace(module, compute), _trace(module, compute)
    for (what, bits), (other, other_bits) in zip(first, second):
        if what != other:
            return f"{what} the first time, {other} the second"
        if bits != other_bits:
            return what
    if len(first) != len(second):
        longer = max(first, second, key=len)
        return f"{longer[min(len(first), len(second))][0]}, in one of the runs only"
    return None


def _trace(module, compute) -> List[Tuple[str, bytes]]:
    trace: List[Tuple[str, bytes]] = []
    handles = []

    def watch(name):
        def before(_, inputs):
            for tensor in _floating(inputs):
                trace.append((f"what goes into {name}", _digest(tensor)))

        def after(_, __, output):
            for tensor in _floating(output):
                trace.append((f"the output of {name}", _digest(tensor)))
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: trace.append((f"the gradient of the output of {name}", _digest(grad))))

        return before, after

    # A module with children may compute something between them.
    for name, child in module.named_modules():
        before, after = watch(f"{name or 'the module'} ({type(child).__name__})")
        handles += [child.register_forward_pre_hook(before), child.register_forward_hook(after)]
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        loss = compute()
        trace.append(("the loss", _digest(loss)))
        loss.backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                trace.append((f"the gradient of {name}", _digest(parameter.grad)))
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in kept:
            parameter.grad = grad
    return trace


def _floating(output):
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _floating(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from _floating(item)


def _digest(tensor) -> bytes:
    return blake3(tensor.detach().cpu().contiguous())
