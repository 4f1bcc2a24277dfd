"""A state_dict as named tensors and JSON, and back."""

from __future__ import annotations

import json
import types
from typing import Any, Dict, Tuple

import torch

# As safetensors calls them.
NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def flatten(state: Any) -> Tuple[str, Dict[str, torch.Tensor]]:
    """The tensors of a nested state, each under a name of its own, and all the rest as JSON."""
    tensors: Dict[str, torch.Tensor] = {}

    def visit(value, path):
        if isinstance(value, torch.Tensor):
            if value.dtype not in NAMES:
                raise ValueError(f"{path}: a checkpoint cannot hold tensors of type {value.dtype}")
            if path in tensors:
                raise ValueError(f"two tensors of the state are called {path}")
            tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": path}
        if isinstance(value, dict):
            # Some schedulers keep functions there; whoever loads the state has its own.
            return {"dict": [[key, visit(item, f"{path}.{key}" if path else str(key))] for key, item in value.items()
                             if not isinstance(item, FUNCTIONS)]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [visit(item, f"{path}.{i}") for i, item in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise ValueError(f"{path}: a checkpoint cannot hold a {type(value).__name__}")

    return json.dumps(visit(state, "")), tensors


def unflatten(rest: str, tensors: Dict[str, torch.Tensor]) -> Any:
    """The state that flatten() took apart."""

    def build(node):
        (kind, value), = node.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "dict":
            return {key: build(item) for key, item in value}
        if kind == "list":
            return [build(item) for item in value]
        if kind == "tuple":
            return tuple(build(item) for item in value)
        return value

    return build(json.loads(rest))
