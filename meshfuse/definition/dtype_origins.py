"""Where a tensor of a definition has its dtype from: an error about dtypes tells the whole way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import Category, DataType
from ..errors import DtypeError
from ..ops.values import ScalarRef, TensorRef
from .records import OpNode

if TYPE_CHECKING:
    from .annotated import AnnotatedDefinition

_SHOWN = 6  # Of a longer way so many steps are told.


def add_origins(fd: AnnotatedDefinition, error: DtypeError, operands: Sequence[int]) -> None:
    """Add to an error about the dtypes of these operands, if it does not say so yet, where each has its dtype from."""
    if operands and not error.has_origins:
        error.has_origins = True
        first = {fd.tensors[i].type.dtype: i for i in reversed(operands)}
        ways = [f"{dtype.name} comes from {_told(list(_way(fd, i)))}" for dtype, i in reversed(first.items())]
        error.args = (f"{error.args[0]} {'; '.join(ways)}.", *error.args[1:])


def _told(way: Sequence[str]) -> str:
    origin, *through = way[::-1]
    if len(through) > _SHOWN:
        half = _SHOWN // 2
        through[half:-half] = [f"... {len(through) - 2 * half} more ..."]
    return f"{origin}, through {', '.join(through)}" if through else origin


def _way(fd: AnnotatedDefinition, tensor: int) -> Iterator[str]:
    """From a tensor back to where its dtype begins, the ops that promote others to it on the way, and that origin."""
    dtype, node = fd.tensors[tensor].type.dtype, fd.producer(tensor)
    while node is not None:
        alike = [i for i in node.inputs if fd.tensors[i].type.dtype is dtype]
        if not alike or _promotes(fd, node, dtype):
            yield f"{fd.tensors[tensor].label} = {_call(fd, node)} at {node.line}"
        if not alike:
            return
        tensor = alike[0]
        node = fd.producer(tensor)
    yield f"{fd.tensors[tensor].label}, defined at {fd.tensors[tensor].line}"


def _promotes(fd: AnnotatedDefinition, node: OpNode, dtype: DataType) -> bool:
    """Whether operands of another dtype, which are no index or condition, take part in an op with this result."""
    least = min(dtype.category, Category.FLOAT)
    others = {fd.tensors[i].type.dtype for i in node.inputs} - {dtype}
    return any(other.category >= least for other in others)


def _call(fd: AnnotatedDefinition, node: OpNode) -> str:
    words = [_argument(fd, arg) for arg in node.args]
    return f"{node.op.name}({', '.join(word for word in words if word)})"


def _argument(fd: AnnotatedDefinition, arg: Any) -> str:
    """An argument's dtype, or a number itself; "" for what has no part in promotion."""
    if isinstance(arg, TensorRef):
        return fd.tensors[arg.id].type.dtype.name
    if isinstance(arg, (list, tuple)):
        return ", ".join(filter(None, (_argument(fd, entry) for entry in arg if isinstance(entry, TensorRef))))
    if isinstance(arg, ScalarRef):
        return arg.dtype.name if arg.dtype is not None else f"s{arg.id}"
    if isinstance(arg, DataType):
        return arg.name
    return repr(arg) if isinstance(arg, (float, complex)) else ""
