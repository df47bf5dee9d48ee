"""Calls of ops on scalars of the definition alone, which make a scalar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.scalars import FUNCTIONS
from ..ops.binding import signature
from ..ops.opdef import OpDef
from ..ops.values import REQUIRED
from .checks import plain_number
from .tensor_view import TensorView, Val

_NUMBERS = (Val, bool, int, float, complex, DataType)


def is_scalar_call(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether all arguments are numbers and scalars, with at least one scalar; the op then makes a scalar."""
    if TensorView in map(type, args):
        return False
    given = [*args, *kwargs.values()]
    scalars_only = bool(given) and all(isinstance(plain_number(a), _NUMBERS) for a in given)
    return scalars_only and (op.name in FUNCTIONS or op.name == "cast") and any(isinstance(a, Val) for a in given)


def scalar_arguments(op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of `op.params`. Raises DefinitionError for missing, unknown or repeated ones."""
    names = [param.name for param in op.params]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    required = [param.name for param in op.params if param.default is REQUIRED]
    repeated = len(given) < len(args) + len(kwargs)
    if len(args) > len(names) or not set(required) <= set(given) <= set(names) or repeated:
        found = f"{len(args)} arguments {sorted(kwargs)}"
        raise user_error(f"{op.name} of scalars", found, signature(op), "Fix the call.")
    return [given.get(param.name, param.default) for param in op.params]
