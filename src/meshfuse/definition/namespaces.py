"""`fd.ops` and `fd.fusion`: a definition's ops as functions, its inputs and its outputs."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError, caller_line, user_error
from ..ops import COMPOSITES
from ..ops.base import OpDef, TensorRef
from ..ops.binding import signature
from ..ops.registry import find, names
from .checks import usage
from .tensor_view import TensorView, Val

if TYPE_CHECKING:
    from .fusion import DefinitionBuilder


class UnknownOpError(DefinitionError, AttributeError):
    """`fd.ops` has no such op."""


def find_op(name: str | OpDef) -> OpDef:
    """The op of this name (an OpDef is its own). Raises UnknownOpError with the names near to it."""
    op = find(name)
    if op is None:
        near = difflib.get_close_matches(str(name), [*names(), *COMPOSITES])
        raise user_error(
            f"meshfuse has no op {name!r}", f"near to it {near}" if near else "", "",
            "dir(fd.ops) lists all; mf.register_op adds one.", caller_line(), UnknownOpError,
        )  # fmt: skip
    return op


# An op or composite of a definition as a function. Its `__doc__`, for help(fd.ops.sum), is how this one is called.
class OpFunction(functools.partial[Any]):
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        name = self.args[0]
        if name in COMPOSITES:
            return f"{usage(name, COMPOSITES[name])}\n\n{inspect.getdoc(COMPOSITES[name]) or ''}".rstrip()
        return signature(find_op(name))

    def __repr__(self) -> str:
        return f"<fd.ops.{self.args[0]}>"


class OpNamespace:
    """`fd.ops`: every op of the table, every registered one and every composite, as a function."""

    __slots__ = ("_fd",)

    def __init__(self, fd: DefinitionBuilder):
        self._fd = fd

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in COMPOSITES:
            return OpFunction(self._fd.call_composite, name)
        find_op(name)
        return OpFunction(self._fd.call_with_keywords, name)

    def __dir__(self) -> list[str]:
        return sorted([*names(), *COMPOSITES])


class Fusion:
    """nvFuser's view of a definition as a graph: `fd.fusion.inputs()` and `outputs()`."""

    __slots__ = ("_fd",)

    def __init__(self, fd: DefinitionBuilder):
        self._fd = fd

    def inputs(self) -> list[TensorView | Val]:
        """The inputs in the order of their definition."""
        return [TensorView(self._fd, r) if isinstance(r, TensorRef) else Val(self._fd, r) for r in self._fd.inputs]

    def outputs(self) -> list[TensorView]:
        return [TensorView(self._fd, TensorRef(i)) for i in self._fd.outputs]
