"""Python's operators on the values of a definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import caller_line, user_error

if TYPE_CHECKING:
    from .fusion import DefinitionBuilder


class Arithmetic:
    """Python's operators as ops of the definition."""

    __slots__ = ("fd",)
    fd: DefinitionBuilder
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

    def __add__(self, other: Any) -> Any:
        return self._op("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._op("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._op("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._op("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._op("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._op("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._op("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._op("truediv", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._op("div", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._op("div", other, self)

    def __mod__(self, other: Any) -> Any:
        return self._op("mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._op("mod", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._op("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._op("pow", other, self)

    def __and__(self, other: Any) -> Any:
        return self._op("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Any:
        return self._op("bitwise_and", other, self)

    def __or__(self, other: Any) -> Any:
        return self._op("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Any:
        return self._op("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Any:
        return self._op("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Any:
        return self._op("bitwise_xor", other, self)

    def __lshift__(self, other: Any) -> Any:
        return self._op("bitwise_left_shift", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self._op("bitwise_left_shift", other, self)

    def __rshift__(self, other: Any) -> Any:
        return self._op("bitwise_right_shift", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return self._op("bitwise_right_shift", other, self)

    def __lt__(self, other: Any) -> Any:
        return self._op("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return self._op("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._op("gt", self, other)

    def __ge__(self, other: Any) -> Any:
        return self._op("ge", self, other)

    def __pos__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return self._op("neg", self)

    def __invert__(self) -> Any:
        return self._op("bitwise_not", self)

    def __abs__(self) -> Any:
        return self._op("abs", self)
