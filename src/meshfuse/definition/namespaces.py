"""`fd.ops` and `fd.fusion`: a definition's ops as functions, and its inputs and outputs as nvFuser names them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, caller_line
from ..ops import COMPOSITES, OPS
from ..ops.base import TensorRef
from .tensor_view import TensorView, Val

if TYPE_CHECKING:
    from .fusion import FusionDefinition


class UnknownOpError(DefinitionError, AttributeError):
    """`fd.ops` has no such op."""


class OpNamespace:
    """`fd.ops`: every op of the table and every composite, as a function."""

    __slots__ = ("_fd",)

    def __init__(self, fd: FusionDefinition):
        self._fd = fd

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in COMPOSITES:
            return functools.partial(self._fd.call_composite, name)
        if name not in OPS:
            near = difflib.get_close_matches(name, [*OPS, *COMPOSITES])
            raise UnknownOpError(
                f"meshfuse has no op {name!r}. {f'Near: {near}. ' if near else ''}dir(fd.ops) lists all.",
                caller_line(),
            )
        return functools.partial(self._fd.call_with_keywords, name)

    def __dir__(self) -> list[str]:
        return sorted([*OPS, *COMPOSITES])


class Fusion:
    """nvFuser's view of a definition as a graph: `fd.fusion.inputs()` and `outputs()`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: FusionDefinition):
        self._fd = fd

    def inputs(self) -> list[TensorView | Val]:
        """The inputs in the order of their definition."""
        return [
            TensorView(self._fd, r) if isinstance(r, TensorRef) else Val(self._fd, r) for r in self._fd.inputs
        ]

    def outputs(self) -> list[TensorView]:
        return [TensorView(self._fd, TensorRef(i)) for i in self._fd.outputs]
