"""One op on one rank, as calls of nvFuser's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dtypes import DataType
from ...ops.casts import COPIES
from ...ops.local import LocalCall
from ...ops.opdef import Call, ToTorch, count_tensors
from ...ops.pointwise import pointwise_rule
from ...ops.values import REQUIRED, Param, ParamKind, ScalarRef, TensorRef, TensorType
from ...sharding.layout import Runs

K = ParamKind
_VALS = (K.SCALAR, K.OPTIONAL_SCALAR, K.SIZE)


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A call in an open nvFuser definition. Implements `ops.nvfuser_lowering.NvfuserEmit`.

    `operands` are TensorViews; `dtype` gives nvFuser's DataType, `scalar` the Val of a scalar of our definition.
    """

    local: LocalCall
    operands: Sequence[Any]
    fd: Any
    dtype: Callable[..., Any]
    scalar: Callable[[ScalarRef], Any]

    @property
    def call(self) -> Call:
        return self.local.call

    @property
    def ops(self) -> Any:
        return self.fd.ops

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.local.operand_shapes

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.local.result_shapes

    def operand_runs(self, operand: int) -> tuple[Runs, ...]:
        return self.local.operand_runs(operand)

    def result_runs(self, result: int) -> tuple[Runs, ...]:
        return self.local.result_runs(result)

    def leads(self) -> bool:
        return self.local.leads()

    def operand(self, name: str) -> Any:
        return self._tensors(name) if isinstance(self.call[name], TensorRef) else None

    def number(self, name: str) -> Any:
        value = self.call[name]
        return self.scalar(value) if isinstance(value, ScalarRef) else value

    def val(self, value: Any) -> Any:
        return self.fd.define_scalar(value)

    def results(self) -> tuple[Any, ...]:
        """The results as TensorViews. Raises ToTorch with the reason where the call is left to torch."""
        form = self.call.op.nvfuser
        if isinstance(form, str):
            raise ToTorch(form)
        call = self._in_float()
        made = call.plain() if form is None else form(call)
        made = tuple(t for t in made if t is not None) if isinstance(made, (tuple, list)) else (made,)
        return made if call is self else tuple(map(self._as_declared, made, self.call.results))

    def _in_float(self) -> NativeCall:
        """A pointwise call with its operands of half precision, and less, in Float.

        nvFuser does so for arithmetic; what keeps its operand's type (neg, relu, round) has no code in BFloat16. Calls
        that meshfuse has not typed stay as they are.
        """
        op, types = self.call.op, [t.dtype for t in self.call.types]
        computes = op.rule is pointwise_rule and op not in COPIES and self.call.results
        if not computes or not any(t.is_reduced_float for t in types):
            return self
        pairs = zip(self.operands, types, strict=True)
        wide = [self.ops.cast(t, self.dtype(DataType.Float)) if dtype.is_reduced_float else t for t, dtype in pairs]
        return replace(self, operands=wide)

    def _as_declared(self, tensor: Any, ttype: TensorType) -> Any:
        return self.ops.cast(tensor, self.dtype(ttype.dtype)) if ttype.dtype.is_reduced_float else tensor

    def plain(self, **changed: Any) -> Any:
        """nvFuser's function of the op's name.

        Required parameters go by place, the others by name where they were given.
        """
        placed, named = [], {}
        for param in self.call.op.params:
            value = changed[param.name] if param.name in changed else self._argument(param)
            if param.default is REQUIRED:
                placed.append(value)
            elif value is not None:
                named[param.name] = value
        return getattr(self.ops, self.call.op.name)(*placed, **named)

    def _argument(self, param: Param) -> Any:
        value = self.call[param.name]
        if count_tensors(value):
            return self._tensors(param.name)
        if isinstance(value, ScalarRef):
            return self.scalar(value)
        if isinstance(value, DataType):
            return self.dtype(value)
        if param.kind in _VALS and value is not None:
            return self.val(value)
        return list(value) if isinstance(value, tuple) else value

    def _tensors(self, name: str) -> Any:
        """The operand, or the list of operands, that is passed as a parameter."""
        arg, first = self.call[name], self.call.first_operand(name)
        if isinstance(arg, TensorRef):
            return self.operands[first]
        return list(self.operands[first : first + len(arg)])
