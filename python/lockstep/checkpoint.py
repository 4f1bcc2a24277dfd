"""Checkpoints: folders that appear complete or not at all, with the BLAKE3 of everything in them."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_size_t, c_void_p
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from . import _library
from ._library import library
from .arrays import byte_view

# Types by their name in NumPy or PyTorch, as the file calls them.
_NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
          "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
          "complex64": "C64"}


def save(path: str, tensors: Mapping[str, Any], metadata: bytes = b"", step: int = 0) -> None:
    """Writes the folder `path`, as one worker does it for all. Tensors are arrays with a dtype and a shape; their names
    are in the file, which any reader of safetensors can open. An existing folder is refused."""
    structures = (_library.TensorStructure * len(tensors))()
    keep: List[Any] = []
    for place, (name, tensor) in zip(structures, tensors.items()):
        dtype = str(tensor.dtype).rsplit(".", 1)[-1]
        if dtype not in _NAMES:
            raise TypeError(f"tensor '{name}': elements of type {tensor.dtype} cannot be saved")
        own = byte_view(tensor)
        shape = (c_int64 * max(1, len(tensor.shape)))(*tensor.shape)
        keep += [own, shape]
        place.size = ctypes.sizeof(_library.TensorStructure)
        place.name, place.type = name.encode(), _NAMES[dtype].encode()
        place.shape, place.dimensions = shape, len(tensor.shape)
        place.data, place.bytes = own.address, own.count
    _library.check(library.lockstep_checkpoint_save(str(path).encode(), step, structures, len(tensors), metadata, len(metadata)))


class Tensor(NamedTuple):
    """A tensor of a checkpoint, before it is read."""

    type: str  # as safetensors calls it, such as "F32"
    shape: Tuple[int, ...]
    bytes: int


class Checkpoint:
    """A checkpoint that is read. Raises Damaged where a hash is not that of the manifest."""

    def __init__(self, path: str):
        self._handle = c_void_p()
        _library.check(library.lockstep_checkpoint_open(str(path).encode(), byref(self._handle)))
        self.tensors: Dict[str, Tensor] = {}
        for index in range(library.lockstep_checkpoint_count(self._handle)):
            found = _library.sized(_library.TensorStructure)
            _library.check(library.lockstep_checkpoint_tensor(self._handle, index, byref(found)))
            self.tensors[found.name.decode()] = Tensor(found.type.decode(), tuple(found.shape[:found.dimensions]), found.bytes)

    @property
    def step(self) -> int:
        """The step that it was saved with."""
        return int(library.lockstep_checkpoint_step(self._handle))

    @property
    def metadata(self) -> bytes:
        """The bytes that it was saved with."""
        place, count = c_void_p(), c_size_t()
        _library.check(library.lockstep_checkpoint_metadata(self._handle, byref(place), byref(count)))
        return ctypes.string_at(place, count.value) if count.value else b""

    def read(self, into: Mapping[str, Any]) -> None:
        """Fills these arrays with the tensors of their names, and checks all of the checkpoint."""
        addresses = (c_void_p * max(1, len(self.tensors)))()
        keep = []
        unknown = set(into) - set(self.tensors)
        if unknown:
            raise KeyError(f"the checkpoint has no tensor '{sorted(unknown)[0]}'")
        for index, (name, tensor) in enumerate(self.tensors.items()):
            if name not in into:
                continue
            own = byte_view(into[name])
            if own.count != tensor.bytes or not own.writable:
                raise ValueError(f"tensor '{name}' has {tensor.bytes} bytes, the array for it has {own.count}"
                                 + ("" if own.writable else ", which cannot be written"))
            keep.append(own)
            addresses[index] = own.address
        _library.check(library.lockstep_checkpoint_read(self._handle, addresses))

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), c_void_p()
        if handle:
            library.lockstep_checkpoint_destroy(handle)
