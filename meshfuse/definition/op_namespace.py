"""`fd.ops`: a definition's ops as functions.

Type checkers read their signatures in op_namespace.pyi, which tools/op_stubs.py writes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..ops import COMPOSITES, OPS
from ..ops.binding import python_signature
from ..ops.registry import names
from .applying import call_composite, call_with_keywords, find_op
from .namespaces import help_of
from .recording import Definition


@functools.cache
def _composite_signature(name: str) -> inspect.Signature:
    """A composite's signature, without the definition that it is called with."""
    found = inspect.signature(COMPOSITES[name])
    return found.replace(parameters=list(found.parameters.values())[1:])


def signature_of(name: str) -> inspect.Signature:
    """How an op or composite is called. Raises UnknownOpError, which suggests similar names."""
    passes_on = name in COMPOSITES and name in OPS  # its arguments are the op's
    if name in COMPOSITES and not passes_on:
        return _composite_signature(name)
    return python_signature(find_op(name))


# An op or composite of a definition as a function. Its `__doc__`, for help(fd.ops.sum), is that of this one.
class OpFunction(functools.partial[Any]):
    @property
    def __doc__(self) -> str:
        return help_of(self.args[1])

    @property
    def __name__(self) -> str:
        return self.args[1]

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self.args[1])

    def __repr__(self) -> str:
        return f"<fd.ops.{self.args[1]}>"


class OpNamespace:
    """`fd.ops`: every op of the table, every registered one and every composite, as a function."""

    __slots__ = ("_fd",)

    def __init__(self, fd: Definition):
        self._fd = fd

    def __repr__(self) -> str:
        return f"<fd.ops: {len(dir(self))} ops; dir(fd.ops) lists them, help(fd.ops.sum) is about one>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in COMPOSITES:
            return OpFunction(call_composite, self._fd, name)
        find_op(name)
        return OpFunction(call_with_keywords, self._fd, name)

    def __dir__(self) -> list[str]:
        return sorted([*names(), *COMPOSITES])
