"""Blocks of random programs made from ops' own samples: every op of the table, and any op of a user."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ..definition.tensor_view import TensorView
from ..dtypes import Category, DataType
from ..ops import OPS
from ..ops.binding import make_call
from ..ops.opdef import OpDef, Sample
from ..ops.pointwise import pointwise_rule
from ..ops.registry import find
from ..ops.scaled_products import is_nvidia_only
from ..ops.values import ParamKind, TensorType
from .examples import Example
from .writer import KINDS, Block, DefinitionWriter, Var, joint

RUNNABLE = tuple(name for name, op in OPS.items() if not is_nvidia_only(op))
_POINTWISE = tuple(
    name for name, op in OPS.items()
    if op.rule is pointwise_rule and op.params[0].kind is ParamKind.TENSOR_OR_SCALAR
)  # fmt: skip


def op_block(op: OpDef | str) -> Block:
    """A block that calls this op, given as such or by name, as one of its samples does."""
    found = find(op)
    assert found is not None, op
    return lambda w: _call_sample(w, found, w.choose(list(found.samples())))


def any_op(w: DefinitionWriter) -> None:
    op_block(w.choose(RUNNABLE))(w)


def _call_sample(w: DefinitionWriter, op: OpDef, sample: Sample) -> None:
    call, place = make_call(op, sample), iter(range(99))

    def operand(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            return _operand(w, op, arg, sample, next(place))
        return [operand(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

    args = [operand(arg) for arg in sample.args]
    kwargs = {key: operand(value) for key, value in sample.kwargs.items()}
    made = w.fd.call(op, args, kwargs)
    for tv, kind in zip(made if isinstance(made, tuple) else (made,), call.results, strict=True):
        add_result(w, tv, kind)


def _operand(w: DefinitionWriter, op: OpDef, ttype: TensorType, sample: Sample, place: int) -> TensorView:
    """A tensor of the program whose values are the same on every mesh to the last digit, or a new input."""
    values = sample.values.get(place)
    free = values is None and op.domain is None
    found = w.pick(lambda v: v.exact and v.bound <= 8 and v.tv.dtype is ttype.dtype and v.shape == ttype.shape)
    if free and found is not None and w.flag():
        return found.tv
    example = Example(ttype.shape, values, None if values is not None else op.domain or (0, 4))
    return w.input(ttype.shape, KINDS[ttype.dtype.category], dtype=ttype.dtype, example=example).tv


def add_result(w: DefinitionWriter, tv: TensorView, ttype: TensorType) -> None:
    """Add a result of any size: real ones are made small, and complex ones are only used as outputs."""
    if ttype.dtype is DataType.UInt64 or ttype.dtype.category is Category.COMPLEX:
        return
    name = KINDS[ttype.dtype.category]
    made = w.add(tv, ttype.shape, name, 1.0 if name != "int" else 64.0, name != "float")
    if name == "float":
        w.like(made, "tanh", bound=1.0, exact=False)


# pointwise ops on what the program has ----------------------------------------------------------------------


def any_pointwise(w: DefinitionWriter) -> None:
    """A pointwise op in one of its overloads, on tensors of any shape; its numbers are plain, constants or inputs."""
    op = OPS[w.choose(_POINTWISE)]
    sample = w.choose(list(op.samples()))
    lead = w.pick(lambda v: v.kind == "float") or w.input([w.size(), w.size()])
    shapes: list[tuple[int, ...]] = []
    pairs = zip(op.params, sample.args, strict=False)
    wide = w.flag()
    args = [_pointwise_argument(w, op, param.kind, arg, lead, shapes, wide) for param, arg in pairs]
    shape = joint(*shapes)
    made = w.fd.call(op, args)
    add_result(w, made, TensorType(shape, made.type.dtype))


def _pointwise_argument(
    w: DefinitionWriter, op: OpDef, kind: ParamKind, arg: Any, lead: Var, shapes: list[tuple[int, ...]], wide: bool
) -> Any:
    if not isinstance(arg, TensorType):
        return arg if kind is ParamKind.INT else _number(w, arg)
    thin = arg.shape[0] == 1
    shape = tuple(1 if thin and d == 0 else n for d, n in enumerate(lead.shape))
    shapes.append(shape)
    if arg.dtype.category is not Category.FLOAT or op.jumps or thin:
        domain = None if arg.dtype.category is Category.FLOAT and op.domain is None else op.domain or (1, 7)
        example = Example(shape, None, domain) if domain else None
        return w.input(shape, KINDS[arg.dtype.category], dtype=arg.dtype, example=example).tv
    x = w.tamed(lead, 4.0) if lead.exact else w.like(lead, "tanh", bound=1.0, exact=False)
    if op.domain is not None:
        low, high = op.domain
        x = w.like(w.like(x, "sigmoid", exact=False), "mul", high - low, exact=False)
        x = w.like(x, "add", low, exact=False)
    wanted = DataType.Double if arg.dtype is DataType.Float and wide else arg.dtype
    return x.tv if x.tv.dtype is wanted else w.like(x, "cast", wanted, exact=False).tv


def _number(w: DefinitionWriter, value: Any) -> Any:
    """The number itself, a constant, or an input, which is 2 or 1.5."""
    how = w.draw(st.integers(0, 3))
    if how < 2 or value is None or isinstance(value, bool):
        return value
    if how == 2:
        return w.fd.define_scalar(value)
    return w.fd.define_scalar(dtype=DataType.Int if isinstance(value, int) else DataType.Double)
