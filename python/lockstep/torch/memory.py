"""Tensors as the memory that the library works on."""

from __future__ import annotations

from typing import Iterator, List, Optional, Sequence, Tuple

import torch

from ..arrays import Type, View

# What the library adds up without a copy.
TYPES = {
    torch.float32: Type.F32,
    torch.float64: Type.F64,
    torch.float16: Type.F16,
    torch.bfloat16: Type.BF16,
    torch.int32: Type.I32,
    torch.int64: Type.I64,
    torch.uint8: Type.U8,
}
# Other types that can be added up: as numbers of another type in the same memory, how many each is made of.
SAME_MEMORY = {torch.bool: (Type.U8, 1), torch.complex64: (Type.F32, 2), torch.complex128: (Type.F64, 2)}
# Or as a copy in another type.
CONVERTED = {torch.int8: torch.int32, torch.int16: torch.int32}


class Memory:
    """One or several tensors as one piece of host memory, of a type that the library has.

    The tensors themselves if they lie so; otherwise a copy, pinned for tensors of a GPU. `reduces`: numbers are
    added up, so their type matters; otherwise they are bytes. `fill`: a copy begins with what the tensors hold."""

    __slots__ = ("view", "_tensors", "_copy")

    def __init__(self, tensors: Sequence[torch.Tensor], *, reduces: bool = False, fill: bool = True):
        first = tensors[0]
        dtype = first.dtype
        for tensor in tensors:
            if tensor.dtype != dtype:
                raise ValueError(f"tensors of one collective have the types {dtype} and {tensor.dtype}; they must be the same")
            if tensor.is_sparse:
                raise ValueError("this collective takes dense tensors only")
        elements = sum(tensor.numel() for tensor in tensors)
        staged = CONVERTED.get(dtype, dtype) if reduces else dtype
        self._tensors: List[torch.Tensor] = list(tensors)
        self._copy: Optional[torch.Tensor] = None
        memory = first
        if staged != dtype or not _adjacent(tensors):
            self._copy = memory = torch.empty(elements, dtype=staged, pin_memory=first.is_cuda)
            if fill:
                for part, tensor in self._parts():
                    part.copy_(tensor)
        kind, factor = (TYPES[staged], 1) if staged in TYPES else (Type.U8, first.element_size())
        if reduces and staged not in TYPES:
            if staged not in SAME_MEMORY:
                raise ValueError(f"tensors of type {dtype} cannot be added up")
            kind, factor = SAME_MEMORY[staged]
        self.view = View(memory.data_ptr(), elements * factor, kind, memory)

    def counts(self) -> List[int]:
        """How many of the view's elements belong to each tensor."""
        elements = sum(tensor.numel() for tensor in self._tensors)
        return [tensor.numel() * self.view.count // elements if elements else 0 for tensor in self._tensors]

    def _parts(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        assert self._copy is not None
        begin = 0
        for tensor in self._tensors:
            end = begin + tensor.numel()
            yield self._copy[begin:end].view(tensor.shape), tensor.detach()
            begin = end

    def give_back(self) -> None:
        """Copies the result to the tensors, where they are not the memory itself."""
        if self._copy is not None:
            for part, tensor in self._parts():
                tensor.copy_(part)


def _adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors lie in host memory one after the other, each in one piece."""
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.data_ptr() != address:
            return False
        address += tensor.numel() * tensor.element_size()
    return True
