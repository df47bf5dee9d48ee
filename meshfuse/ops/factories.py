"""Ops that make tensors from numbers: full, iota, uniform, normal and their like; and triu, which reads positions.

Their values depend on global positions alone, so every rank makes its own part of the one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import Category, DataType, scalar_dtype
from ..errors import DtypeError, user_error
from ..kernels.indices import Runs, global_index
from ..kernels.table import kernel
from .nvfuser_lowering import along, full, nvfuser_index, zero_where_not
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample
from .promotion import dtype_text
from .rules import Rule, RuleBuilder
from .shape import same_rule
from .shape_arithmetic import check_ndim, check_number, known_size
from .values import Param, ParamKind, ScalarRef, TensorType
from .vjp import each, nothing

K = ParamKind
# What generated programs have in scope: the run's random state, which is another one at every execution, and the device
# of tensors made from nothing.
SEED, OFFSET, DEVICE = "seed", "offset", "device"
RANDOM_STATE = (SEED, OFFSET)
# Ours are a function of the seed and the global index, the same on every mesh (see `kernels.random`).
RANDOM = "nvFuser's random numbers depend on how the tensor is cut and scheduled"
_STATE = ("rng_seed", "rng_offset")


def made_rule(call: Call) -> Rule:
    """No operands; every dim of the result passes through."""
    builder = RuleBuilder()
    return builder.build([], [builder.dims(call.results[0].shape)])


def _shape_infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(tuple(map(known_size, call["shape"])), call["dtype"]),)


def _full_infer(call: Call) -> tuple[TensorType, ...]:
    check_number("full", call["fill_value"], call["dtype"])
    return _shape_infer(call)


def _full_emit(e: Emit) -> str:
    dtype = dtype_text(e.call["dtype"])
    return f"torch.full({list(e.result_shapes[0])}, {e.scalar('fill_value')}, dtype={dtype}, device={DEVICE})"


def _full_nvfuser(n: NvfuserEmit) -> Any:
    """`full` on this rank's part of the shape."""
    return full(n, list(n.result_shapes[0]), n.val(n.number("fill_value")), n.call.results[0].dtype)


def _iota_infer(call: Call) -> tuple[TensorType, ...]:
    if call["dtype"].category not in (Category.INTEGER, Category.FLOAT):
        raise user_error("iota: dtype", call["dtype"].name, "an integer or floating point type", "Cast its result.")
    return (TensorType((known_size(call["length"]),), call["dtype"]),)


def _iota_emit(e: Emit) -> str:
    start = "0" if e.call["start"] is None else e.scalar("start")
    step = "1" if e.call["step"] is None else e.scalar("step")
    return f"K.iota({e.result_runs(0)[0]}, {start}, {step}, {dtype_text(e.call['dtype'])}, {DEVICE})"


@kernel
def iota(length: Runs, start: Any, step: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """The rank's part of start, start + step, ...; floating point types are computed in float64."""
    index = global_index(length, device)
    return ((index.double() if dtype.is_floating_point else index) * step + start).to(dtype)


def _iota_nvfuser(n: NvfuserEmit) -> Any:
    """start + step * global index, computed in Double for floating point types."""
    call, index, ops = n.call, nvfuser_index(n, n.result_runs(0)[0]), n.ops
    if call["dtype"].category is Category.FLOAT:
        index = ops.cast(index, n.dtype(DataType.Double))
    if call["step"] is not None:
        index = ops.mul(index, n.number("step"))
    if call["start"] is not None:
        index = ops.add(index, n.number("start"))
    return ops.cast(index, n.dtype(call["dtype"]))


def _check_real(call: Call, dtype: DataType) -> DataType:
    if dtype.category is not Category.FLOAT:
        raise user_error(f"{call.op.name}: dtype", dtype.name, "a floating point type", "Cast the result.",
                         cls=DtypeError)  # fmt: skip
    return dtype


def _random_infer(call: Call) -> tuple[TensorType, ...]:
    _check_real(call, call["dtype"])
    _check_state(call)
    return _shape_infer(call)


def _check_state(call: Call) -> None:
    """Raises DefinitionError unless a user's own seed and offset are both given, and integers."""
    given = {name: call[name] for name in _STATE if call[name] is not None}
    if len(given) == 1:
        raise user_error(f"{call.op.name}: rng_seed and rng_offset", f"{next(iter(given))} alone", "both or neither",
                         "Without them the definition's seed counts.")  # fmt: skip
    for name, value in given.items():
        dtype = value.dtype if isinstance(value, ScalarRef) else scalar_dtype(value)
        if dtype is not None and dtype.category >= Category.FLOAT:
            found = dtype.name if isinstance(value, ScalarRef) else repr(value)
            raise user_error(f"{call.op.name}: {name}", found, "an integer", "Its bits are what numbers are drawn by.")


def draws_always(call: Call) -> bool:
    """`draws` of an op without a seed parameter: it always draws by the definition's seed."""
    return True


def draws_unseeded(call: Call) -> bool:
    """`draws` of an op with seed and offset parameters: it draws by the definition's seed where these are not given."""
    return any(call[name] is None for name in _STATE)


def stream_text(e: Emit) -> str:
    """Text of (seed, offset, salt) for an op that draws random numbers. A user's own seed and offset need no salt.

    Attention without dropout draws none: it has no use for the state of a step, and may be part of a CUDA graph.
    """
    if e.call.op.draws is not None and "rng_seed" not in e.call.op.places and not e.call.op.draws(e.call):
        return "(0, 0, 0)"
    if "rng_seed" not in e.call.op.places or draws_unseeded(e.call):
        return f"({SEED}, {OFFSET}, {e.salt()})"
    return f"({e.scalar('rng_seed')}, {e.scalar('rng_offset')}, 0)"


def _draw(e: Emit, name: str, a: str, b: str, device: str) -> str:
    made = e.call.results[0]
    return (
        f"K.{name}({a}, {b}, {e.result_runs(0)}, {list(made.shape)}, {stream_text(e)}, "
        f"{dtype_text(made.dtype)}, {device})"
    )


def _random_emit(e: Emit) -> str:
    first, second = e.call.op.params[:2]
    return _draw(e, e.call.op.name, e.scalar(first.name), e.scalar(second.name), DEVICE)


def _like_infer(call: Call) -> tuple[TensorType, ...]:
    _check_real(call, call.types[0].dtype)
    return call.types


def _like_emit(name: str) -> Callable[[Emit], str]:
    return lambda e: _draw(e, name, "0.0", "1.0", f"{e.operands[0]}.device")


def _triu_infer(call: Call) -> tuple[TensorType, ...]:
    check_ndim("triu", "the operand", call.types[0], 2)
    return call.types


def _triu_emit(e: Emit) -> str:
    rows, columns = e.result_runs(0)[-2:]
    if e.result_shapes[0][-2:] == e.call.results[0].shape[-2:]:
        return f"torch.triu({e.operands[0]}, {e.call['diagonal']})"
    return f"K.triu({e.operands[0]}, {e.call['diagonal']}, {rows}, {columns})"


@kernel
def triu(x: torch.Tensor, diagonal: int, rows: Runs, columns: Runs) -> torch.Tensor:
    """The upper triangle of a matrix, of which the rank holds these rows and columns."""
    row, column = global_index(rows, x.device), global_index(columns, x.device)
    return x.masked_fill(column - row[:, None] < diagonal, 0)


def _triu_nvfuser(n: NvfuserEmit) -> Any:
    """The diagonal is counted from the rank's own first row and column; for shards in pieces, indices are compared."""
    rows, columns = n.result_runs(0)[-2:]
    diagonal, ndim = n.call["diagonal"], n.call.types[0].ndim
    if len(rows) == len(columns) == 1:
        return n.plain(diagonal=diagonal + rows[0][0] - columns[0][0])
    row, column = (
        along(n, nvfuser_index(n, rows), ndim - 2, ndim),
        along(n, nvfuser_index(n, columns), ndim - 1, ndim),
    )
    kept = n.ops.ge(n.ops.sub(column, row), diagonal)
    return zero_where_not(n, kept, n.operands[0], n.call.types[0].dtype)


_SHAPE = Param("shape", K.SHAPE)
_ARG = Param("arg", K.TENSOR)
_RANDOM = (
    _SHAPE,
    Param("rng_seed", K.OPTIONAL_SCALAR, None),
    Param("rng_offset", K.OPTIONAL_SCALAR, None),
    Param("dtype", K.DTYPE, DataType.Float),
)


def _random_samples() -> list[Sample]:
    return [
        Sample((0.0, 1.0, [6, 8])),
        Sample((-1.0, 2.0, [6, 8]), {"rng_seed": 7, "rng_offset": 3}),
        Sample((0.0, 1.0, [3, 4]), {"dtype": DataType.Double}),
    ]


def _matrix_samples() -> list[Sample]:
    shapes = [((6, 8), 0), ((2, 6, 5), 1), ((6, 8), -2)]
    return [Sample((TensorType(shape, DataType.Float), diagonal)) for shape, diagonal in shapes]


OPS = (
    OpDef(
        "full",
        (_SHAPE, Param("fill_value", K.SCALAR), Param("dtype", K.DTYPE)),
        _full_infer,
        made_rule,
        _full_emit,
        samples=lambda: [Sample(([4, 6], 1.5, DataType.Float)), Sample(([6], 3, DataType.Int))],
        nvfuser=_full_nvfuser,
        concat_distributive=True,
        is_cheap=True,
        about="a tensor of one number",
    ),
    OpDef(
        "iota",
        (
            Param("length", K.SIZE),
            Param("start", K.OPTIONAL_SCALAR, None),
            Param("step", K.OPTIONAL_SCALAR, None),
            Param("dtype", K.DTYPE, DataType.Int),
        ),
        _iota_infer,
        made_rule,
        _iota_emit,
        samples=lambda: [Sample((8,)), Sample((6, 2, 3)), Sample((6, 0.0, 0.5, DataType.Float))],
        nvfuser=_iota_nvfuser,
        is_cheap=True,
        about="`start`, `start` + `step`, ...: `length` numbers",
    ),
    OpDef(
        "uniform",
        (Param("minval", K.SCALAR), Param("maxval", K.SCALAR), *_RANDOM),
        _random_infer,
        made_rule,
        _random_emit,
        samples=_random_samples,
        nvfuser=RANDOM,
        about="random numbers from `minval` to `maxval`, the same on every mesh",
        draws=draws_unseeded,
    ),
    OpDef(
        "normal",
        (Param("mean", K.SCALAR), Param("std", K.SCALAR), *_RANDOM),
        _random_infer,
        made_rule,
        _random_emit,
        samples=_random_samples,
        nvfuser=RANDOM,
        about="normally distributed random numbers, the same on every mesh",
        draws=draws_unseeded,
    ),
    OpDef(
        "rand_like",
        (_ARG,),
        _like_infer,
        same_rule,
        _like_emit("uniform"),
        samples=lambda: [Sample((TensorType((6, 8), DataType.Float),))],
        nvfuser=RANDOM,
        vjp=nothing,
        about="random numbers from 0 to 1 in the operand's shape",
        draws=draws_always,
    ),
    OpDef(
        "randn_like",
        (_ARG,),
        _like_infer,
        same_rule,
        _like_emit("normal"),
        samples=lambda: [Sample((TensorType((6, 8), DataType.Float),))],
        nvfuser=RANDOM,
        vjp=nothing,
        about="standard normal random numbers in the operand's shape",
        draws=draws_always,
    ),
    OpDef(
        "triu",
        (_ARG, Param("diagonal", K.INT, 0)),
        _triu_infer,
        same_rule,
        _triu_emit,
        Partial.MOVE,
        samples=_matrix_samples,
        nvfuser=_triu_nvfuser,
        is_cheap=True,
        vjp=each(arg=lambda b: b.ops.triu(b.grad, b["diagonal"])),
        about="zeros below a diagonal of the last two dims",
    ),
)
