"""Ops of a definition as nvFuser's scripts see them: `tv.definition()` and `tv.uses()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from ..definition.recording import Definition, OpNode
from ..definition.tensor_view import TensorView
from ..errors import caller_line, user_error
from ..ops.values import TensorRef
from .idm import refuse


class Statement:
    """Base of what a definition is made of: values and ops."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Expr(Statement):
    """One op of a definition."""

    fd: Definition
    node: OpNode

    @property
    def name(self) -> str:
        """The op's name in fd.ops."""
        return self.node.op.name

    def input(self, index: int) -> TensorView:
        """The op's tensor operand at this place. Raises DefinitionError where there is none."""
        return self._at(self.node.inputs, index, "input")

    def output(self, index: int) -> TensorView:
        return self._at(self.node.outputs, index, "output")

    def _at(self, tensors: tuple[int, ...], index: int, what: str) -> TensorView:
        if not -len(tensors) <= index < len(tensors):
            raise user_error(
                f"{self.name}: no such {what}", str(index), f"0 to {len(tensors) - 1}", "Count its tensors.",
                caller_line(),
            )  # fmt: skip
        return TensorView(self.fd, TensorRef(tensors[index]))

    def __str__(self) -> str:
        made, taken = (
            ", ".join(str(TensorView(self.fd, TensorRef(i))) for i in tensors)
            for tensors in (self.node.outputs, self.node.inputs)
        )
        return f"{made}\n   = {self.name}( {taken} )"


class ReshapeOp(Expr):
    """A reshape."""

    __slots__ = ()


class BroadcastOp(Expr):
    """A broadcast, or broadcast_in_dim."""

    __slots__ = ()


class SqueezeOp(Expr):
    """A squeeze."""

    __slots__ = ()


class _AxisExpr(Expr):
    """nvFuser's ops on loop axes. In meshfuse no op makes an axis, so there are no instances of these classes."""

    __slots__ = ()

    def inner(self) -> NoReturn:
        refuse(f"{type(self).__name__}.inner")

    def outer(self) -> NoReturn:
        refuse(f"{type(self).__name__}.outer")


class Split(_AxisExpr):
    """A split of a loop axis."""

    __slots__ = ()


class Merge(_AxisExpr):
    """A merge of two loop axes."""

    __slots__ = ()


_KINDS = {
    "reshape": ReshapeOp, "broadcast": BroadcastOp, "broadcast_in_dim": BroadcastOp, "squeeze": SqueezeOp,
}  # fmt: skip


def expression(fd: Definition, node: Any) -> Expr:
    """An op as an instance of the class that nvFuser has for its kind."""
    return _KINDS.get(node.op.name, Expr)(fd, node)
