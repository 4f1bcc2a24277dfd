"""Memory of others, without copies: NumPy arrays, the buffer protocol, DLPack (PyTorch's CPU tensors among them)."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, NamedTuple, Optional, Tuple


class Type(enum.IntEnum):
    """The types of elements that collectives know."""

    F32 = 0
    F64 = 1
    F16 = 2
    BF16 = 3
    I32 = 4
    I64 = 5
    U8 = 6


SIZES = {Type.F32: 4, Type.F64: 8, Type.F16: 2, Type.BF16: 2, Type.I32: 4, Type.I64: 8, Type.U8: 1}

# Formats of the buffer protocol, in this machine's own byte order and sizes.
_FORMATS = {"f": Type.F32, "d": Type.F64, "e": Type.F16, "i": Type.I32, "B": Type.U8, "c": Type.U8,
            "l": Type.I64, "q": Type.I64}
# DLPack: the code of a type and its bits.
_DLPACK = {(2, 32): Type.F32, (2, 64): Type.F64, (2, 16): Type.F16, (4, 16): Type.BF16, (0, 32): Type.I32,
           (0, 64): Type.I64, (1, 8): Type.U8}
_DLPACK_CPU = (1, 3)  # plain memory, and such as a GPU can reach


class View(NamedTuple):
    """Elements in memory; `owner` keeps it alive."""

    address: int
    count: int  # type: ignore[assignment]  # not the method of tuple
    type: Type
    owner: Any
    writable: bool = True

    @property
    def bytes(self) -> int:
        """How much memory it is."""
        return self.count * SIZES[self.type]


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DlpackType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DlpackTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("dimensions", ctypes.c_int32), ("type", _DlpackType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _DlpackVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _DlpackTensor)]


_DLPACK_VERSION = (1, 0)  # that we ask for
_DLPACK_READ_ONLY = 1


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _PyBuffer(ctypes.Structure):
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p),
                ("shape", ctypes.POINTER(ctypes.c_ssize_t)), ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
                ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)), ("internal", ctypes.c_void_p)]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = ctypes.c_int
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_SIMPLE = 0


def _address_of(memory: memoryview) -> int:
    """Where a contiguous memoryview begins, also of one that may only be read."""
    raw = _PyBuffer()
    _get_buffer(ctypes.py_object(memory), ctypes.byref(raw), _SIMPLE)
    address = raw.buf
    _release_buffer(ctypes.byref(raw))  # `memory` itself keeps the buffer
    return address or 0


def _is_contiguous(shape: Tuple[int, ...], strides: Optional[Tuple[int, ...]]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides or ())):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _from_numpy(array: Any) -> Optional[View]:
    interface = getattr(array, "__array_interface__", None)
    if not isinstance(interface, dict) or interface.get("mask") is not None:
        return None
    kind = {"<f4": Type.F32, "<f8": Type.F64, "<f2": Type.F16, "<i4": Type.I32, "<i8": Type.I64, "|u1": Type.U8}.get(interface["typestr"])
    if kind is None:
        name = str(getattr(array, "dtype", ""))
        kind = Type.BF16 if name == "bfloat16" else None  # of the package ml_dtypes
    if kind is None:
        raise TypeError(f"collectives do not know elements of type {getattr(array, 'dtype', interface['typestr'])}")
    if interface.get("strides") is not None:
        raise ValueError("the array is not contiguous: its rows must follow one another in memory")
    count = 1
    for size in interface["shape"]:
        count *= size
    address, read_only = interface["data"]
    return View(address or 0, count, kind, array, not read_only)


def _exported(tensor: Any) -> Any:
    """Its capsule, of the version that says whether the memory may be written if it has that."""
    source = tensor.detach() if hasattr(tensor, "detach") else tensor  # a tensor that is trained exports nothing
    try:
        return source.__dlpack__(max_version=_DLPACK_VERSION)
    except TypeError:
        return source.__dlpack__()


def _is_of_torch(tensor: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "torch" for kind in type(tensor).__mro__)


def _from_dlpack(tensor: Any) -> Optional[View]:
    if not hasattr(tensor, "__dlpack__"):
        return None
    capsule = _exported(tensor)
    try:
        pointer = _capsule_pointer(capsule, b"dltensor_versioned")
        versioned = ctypes.cast(pointer, ctypes.POINTER(_DlpackVersioned)).contents
        found, writable = versioned.tensor, not versioned.flags & _DLPACK_READ_ONLY
    except ValueError:
        try:
            pointer = _capsule_pointer(capsule, b"dltensor")
        except ValueError:
            return None
        # Others may export what they take for constant.
        found, writable = ctypes.cast(pointer, ctypes.POINTER(_DlpackTensor)).contents, _is_of_torch(tensor)
    if found.device.kind not in _DLPACK_CPU:
        raise TypeError("the tensor is not in this machine's memory: collectives work on CPU memory")
    kind = _DLPACK.get((found.type.code, found.type.bits)) if found.type.lanes == 1 else None
    if kind is None:
        raise TypeError(f"collectives do not know elements of type {getattr(tensor, 'dtype', (found.type.code, found.type.bits))}")
    shape = tuple(found.shape[i] for i in range(found.dimensions))
    strides = tuple(found.strides[i] for i in range(found.dimensions)) if found.strides else None
    if strides is not None and not _is_contiguous(shape, strides):
        raise ValueError("the tensor is not contiguous: its rows must follow one another in memory")
    count = 1
    for size in shape:
        count *= size
    # The capsule is the owner: when it goes, the exporter's count goes down.
    return View((found.data or 0) + found.byte_offset, count, kind, (tensor, capsule), writable)


def _from_buffer(source: Any) -> View:
    try:
        memory = memoryview(source)
    except TypeError:
        raise TypeError(f"{type(source).__name__} is no array: NumPy, DLPack or the buffer protocol is needed") from None
    kind = _FORMATS.get(memory.format.lstrip("@=<"))
    if kind is None or SIZES[kind] != memory.itemsize:
        raise TypeError(f"collectives do not know elements of format '{memory.format}'")
    if not memory.c_contiguous:
        raise ValueError("the memory is not contiguous: its rows must follow one another")
    return View(_address_of(memory), memory.nbytes // memory.itemsize, kind, memory, not memory.readonly)


def _view_of(source: Any) -> View:
    found = _from_numpy(source) if not hasattr(source, "__dlpack__") or hasattr(source, "__array_interface__") else None
    return found or _from_dlpack(source) or _from_buffer(source)


def view(source: Any, writable: bool = False) -> View:
    """The memory of an array. Raises TypeError for what is none or has a type we do not know, ValueError for one
    that is not contiguous, or that may not be written where `writable` asks for it."""
    found = source if isinstance(source, View) else _view_of(source)
    if writable and not found.writable:
        raise ValueError("the result cannot be written: the memory may only be read")
    return found


def _bytes_of_tensor(tensor: Any) -> Any:
    """The same memory as uint8: PyTorch exports bool, and versions of it other types, neither by DLPack nor as a buffer."""
    import torch

    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: its rows must follow one another in memory")
    return tensor.detach().view(-1).view(torch.uint8)


def byte_view(source: Any) -> View:
    """The same as plain bytes, of any type of elements; for hashes and files."""
    if str(getattr(source, "dtype", "")).startswith("torch."):
        source = _bytes_of_tensor(source)
    try:
        found = view(source)
        return View(found.address, found.bytes, Type.U8, found.owner, found.writable)
    except TypeError:
        memory = memoryview(source)
        if not memory.c_contiguous:
            raise ValueError("the memory is not contiguous: its rows must follow one another") from None
        return View(_address_of(memory), memory.nbytes, Type.U8, memory, not memory.readonly)
