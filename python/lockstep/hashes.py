"""BLAKE3."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint8, c_void_p
from typing import Any, Iterable

from . import _library
from ._library import library
from .arrays import byte_view

_BYTES = 32


def blake3(data: Any) -> bytes:
    """The hash of an array or of bytes; large ones by several threads."""
    own = byte_view(data)
    out = (c_uint8 * _BYTES)()
    _library.check(library.lockstep_blake3(own.address, own.count, out))
    return bytes(out)


def blake3_many(arrays: Iterable[Any]) -> bytes:
    """The hash of the hashes of arrays, in their order: replicas that hold the same weights have the same one."""
    views = [byte_view(each) for each in arrays]
    addresses = (c_void_p * len(views))(*[each.address for each in views])
    sizes = (c_size_t * len(views))(*[each.count for each in views])
    out = (c_uint8 * _BYTES)()
    _library.check(library.lockstep_blake3_many(ctypes.cast(addresses, ctypes.POINTER(c_void_p)), sizes, len(views), out))
    return bytes(out)
