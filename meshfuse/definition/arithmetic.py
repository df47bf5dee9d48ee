"""Python's operators on the values of a definition."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Generic, TypeVar

from ..errors import DefinitionError, caller_line, line_in_script, user_error
from ..ops import COMPOSITES
from ..ops.registry import find
from ..ops.torch_names import INSTEAD
from .recording import Definition


def op_instead(name: str) -> str:
    """What to call instead of a function or method of torch's, as advice for an error."""
    if find(name) is not None or name in COMPOSITES:
        return f"Call fd.ops.{name}(tensor, ...)."
    return f"Write {INSTEAD[name]}." if name in INSTEAD else "What is computed with it is in dir(fd.ops)."


class NotANumberError(DefinitionError, TypeError):
    """A value of a definition has no number yet."""


Itself = TypeVar("Itself", bound="Arithmetic[Any]")
Operand = TypeVar("Operand")


class Arithmetic(Generic[Operand]):
    """Python's operators as ops of the definition.

    A result is typed as the value itself, and what else an operator takes as `Operand`: a number beside a tensor makes
    a tensor, whichever comes first.
    """

    __slots__ = ("fd",)
    fd: Definition
    __hash__ = object.__hash__
    # numpy's arrays leave an operator to us: they would apply it to each of their numbers.
    __array_ufunc__ = None

    def _op(self, name: str, *operands: Any) -> Any:
        return self.fd.call(name, operands)

    def __bool__(self) -> bool:
        raise user_error(
            "a value of a definition has no truth value", repr(self), "an op of the definition",
            "Use fd.ops.where to choose by it, or 'is None' to ask whether there is one.", caller_line(),
        )  # fmt: skip

    def __int__(self) -> int:
        raise user_error(
            "a value of a definition is no number", repr(self), "an op of the definition",
            "Compute with it by fd.ops. Sizes that are known are in tensor.type.shape.", caller_line(), NotANumberError,
        )  # fmt: skip

    def __float__(self) -> float:
        return float(self.__int__())

    def __index__(self) -> int:
        return self.__int__()

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.__int__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises DefinitionError: a function of torch takes numbers. Tensors leave their operators to ours."""
        if "Tensor" in getattr(func, "__qualname__", ""):
            return NotImplemented
        name = getattr(func, "__name__", str(func))
        raise user_error(
            f"torch's {name} takes tensors of numbers", f"a {cls.__name__} of a definition", "an op of the definition",
            op_instead(name), line_in_script(_beyond_torch(sys._getframe(1))),
        )  # fmt: skip

    def __add__(self: Itself, other: Operand) -> Itself:
        return self._op("add", self, other)

    def __radd__(self: Itself, other: Operand) -> Itself:
        return self._op("add", other, self)

    def __sub__(self: Itself, other: Operand) -> Itself:
        return self._op("sub", self, other)

    def __rsub__(self: Itself, other: Operand) -> Itself:
        return self._op("sub", other, self)

    def __mul__(self: Itself, other: Operand) -> Itself:
        return self._op("mul", self, other)

    def __rmul__(self: Itself, other: Operand) -> Itself:
        return self._op("mul", other, self)

    def __truediv__(self: Itself, other: Operand) -> Itself:
        return self._op("truediv", self, other)

    def __rtruediv__(self: Itself, other: Operand) -> Itself:
        return self._op("truediv", other, self)

    def __floordiv__(self: Itself, other: Operand) -> Itself:
        return self._op("div", self, other)

    def __rfloordiv__(self: Itself, other: Operand) -> Itself:
        return self._op("div", other, self)

    def __mod__(self: Itself, other: Operand) -> Itself:
        return self._op("mod", self, other)

    def __rmod__(self: Itself, other: Operand) -> Itself:
        return self._op("mod", other, self)

    def __pow__(self: Itself, other: Operand) -> Itself:
        return self._op("pow", self, other)

    def __rpow__(self: Itself, other: Operand) -> Itself:
        return self._op("pow", other, self)

    def __and__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_and", self, other)

    def __rand__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_and", other, self)

    def __or__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_or", self, other)

    def __ror__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_or", other, self)

    def __xor__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_xor", self, other)

    def __rxor__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_xor", other, self)

    def __lshift__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_left_shift", self, other)

    def __rlshift__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_left_shift", other, self)

    def __rshift__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_right_shift", self, other)

    def __rrshift__(self: Itself, other: Operand) -> Itself:
        return self._op("bitwise_right_shift", other, self)

    def __lt__(self: Itself, other: Operand) -> Itself:
        return self._op("lt", self, other)

    def __le__(self: Itself, other: Operand) -> Itself:
        return self._op("le", self, other)

    def __gt__(self: Itself, other: Operand) -> Itself:
        return self._op("gt", self, other)

    def __ge__(self: Itself, other: Operand) -> Itself:
        return self._op("ge", self, other)

    def __pos__(self: Itself) -> Itself:
        return self

    def __neg__(self: Itself) -> Itself:
        return self._op("neg", self)

    def __invert__(self: Itself) -> Itself:
        return self._op("bitwise_not", self)

    def __abs__(self: Itself) -> Itself:
        return self._op("abs", self)


def _beyond_torch(frame: FrameType) -> FrameType:
    """The innermost frame that is not in torch, whose functions call each other."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame
