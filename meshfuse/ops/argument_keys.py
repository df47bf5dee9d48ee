"""Keys of an op's arguments: equal for calls that differ only in which tensors they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .opdef import count_tensors
from .values import TensorRef

# What is equal for arguments that mean the same: (type, text where 1 == 1.0 would mislead, argument).
_Key = tuple[type, str, Any]
Keys = tuple[_Key, ...]
_ANY = TensorRef(-1)
_TENSOR = (TensorRef, repr(_ANY), _ANY)


def keys_of(args: Sequence[Any]) -> Keys:
    """A key for every argument. 1, 1.0 and True differ, and so do 0.0 and -0.0, also in a list."""
    return tuple([_TENSOR if type(arg) is TensorRef else _key_of(arg) for arg in args])


def _key_of(arg: Any) -> _Key:
    if count_tensors(arg):
        arg = (_ANY,) * len(arg)
    return (type(arg), repr(arg) if isinstance(arg, (float, complex, tuple)) else "", arg)
