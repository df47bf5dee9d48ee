"""What the ops of pooling share: their windows, shapes and rules, and blocks of a sharded dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from .opdef import Call, Emit, Sample
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, check_ndim, known_size
from .sliding_windows import Blocks, Window, check_windows, input_blocks, per_dim, result_blocks, window_factors
from .values import Param, ParamKind, TensorType

K = ParamKind
NOT_NATIVE = "nvFuser has no windows that slide"
WINDOW = (Param("kernel", K.INTS), Param("stride", K.INTS), Param("before", K.INTS, (0,)))
ARG, GRAD, SIZES = Param("arg", K.TENSOR), Param("grad", K.TENSOR), Param("sizes", K.SHAPE)
AFTER = Param("after", K.SHAPE, (0,))


def sample(shape: tuple[int, ...], *options: Any, values: Mapping[int, Sequence[float]] | None = None) -> Sample:
    """Arguments of an op of pooling, the first of them a tensor of this shape."""
    return Sample((TensorType(shape, DataType.Float), *options), values=values or {})


def windows_of(call: Call, dims: int) -> list[Window]:
    """The window along each spatial dim; a width after it that is not known yet counts as 0."""
    names = ("kernel", "stride", "before")
    options = [per_dim(call.op.name, what, call[what], dims) for what in names]
    has = call.op.places
    after = per_dim(call.op.name, "after", call["after"], dims) if "after" in has else (0,) * dims
    dilation = per_dim(call.op.name, "dilation", call["dilation"], dims) if "dilation" in has else (1,) * dims
    rows = zip(*options, [w if isinstance(w, int) else 0 for w in after], dilation, strict=True)
    return [Window(*row) for row in rows]


def checked_operand(call: Call) -> tuple[TensorType, list[Window]]:
    """(the operand, its windows). Raises DefinitionError for options that it cannot have."""
    x = call.types[0]
    check_ndim(call.op.name, "the operand", x, 3, 5)
    if x.dtype.category is not Category.FLOAT:
        raise user_error(f"{call.op.name}: dtype", str(x), "floating point", "Cast the operand.", cls=DtypeError)
    windows = windows_of(call, x.ndim - 2)
    check_windows(call.op.name, windows)
    return x, windows


def pooled_shape(call: Call) -> tuple[int, ...]:
    """The shape of one element for each window."""
    x, windows = checked_operand(call)
    after = per_dim(call.op.name, "after", call["after"], x.ndim - 2)
    made = [
        w.results(n) if isinstance(a, int) else UNKNOWN for n, w, a in zip(x.shape[2:], windows, after, strict=True)
    ]
    if any(m < 1 for m in made if m != UNKNOWN):
        raise user_error(f"{call.op.name}: the window does not fit into the operand", str(x),
                         "a result of 1 element or more along each dim", "Pad the operand, or take a smaller window.",
                         )  # fmt: skip
    return (*x.shape[:2], *made)


def pooled_rule(call: Call) -> Rule:
    """n c *s -> n c *m, for each result."""
    builder, (x,) = RuleBuilder(), call.types
    outer, made = builder.dims(x.shape[:2]), call.results[0].shape
    rows = zip(x.shape[2:], made[2:], windows_of(call, x.ndim - 2), strict=True)
    pairs = [window_factors(builder, *row) for row in rows]
    results = (*outer, *(b for _, b in pairs))
    return builder.build([(*outer, *(a for a, _ in pairs))], [results] * len(call.results))


def spread_rule(call: Call) -> Rule:
    """n c *m -> n c *s, for each operand."""
    builder, grad = RuleBuilder(), call.types[0]
    outer, made = builder.dims(grad.shape[:2]), call.results[0].shape
    pairs = [
        window_factors(builder, *row)
        for row in zip(made[2:], grad.shape[2:], windows_of(call, grad.ndim - 2), strict=True)
    ]
    operand = (*outer, *(b for _, b in pairs))
    return builder.build([operand] * len(call.types), [(*outer, *(a for a, _ in pairs))])


def options_text(e: Emit, *names: str) -> list[str]:
    dims = e.call.types[0].ndim - 2
    return [str(per_dim(e.call.op.name, name, e.call[name], dims)) for name in names]


def _is_plain(window: Window, n: int, m: int) -> bool:
    """Whether the dim passes through."""
    return window.is_patch and n == m * window.stride


def torch_widths(widths: Sequence[tuple[int, int]]) -> list[int]:
    """By dim (before, after), as torch pads: from the last dim on."""
    return [w for pair in reversed(widths) for w in pair]


def _without(options: Sequence[int], dim: int) -> tuple[int, ...]:
    """The options with 0 for a spatial dim, counted among all dims."""
    return tuple(0 if d == dim - 2 else option for d, option in enumerate(options))


def input_form(call: Call, dim: int, blocks: int) -> tuple[Blocks, Window, int] | None:
    """(blocks, window, number of windows) of a spatial dim that does not pass through; None for others."""
    if not blocks or dim < 2:
        return None
    n, m = call.types[0].shape[dim], call.results[0].shape[dim]
    window = windows_of(call, call.types[0].ndim - 2)[dim - 2]
    return None if _is_plain(window, n, m) else (input_blocks(dim, (n, m), window, blocks), window, m)


def options_along(call: Call, dim: int) -> list[tuple[int, ...]]:
    """Kernel, stride, and widths before and after, with none along a dim."""
    dims = call.types[0].ndim - 2
    size, stride, before, after = (
        per_dim(call.op.name, what, call[what], dims) for what in ("kernel", "stride", "before", "after")
    )
    return [size, stride, _without(before, dim), _without(after, dim)]


def result_form(call: Call, dim: int, blocks: int) -> tuple[Blocks, tuple[int, int], int, tuple[int, int]] | None:
    """(blocks, halo, start, (elements, windows)) of a spatial dim that does not pass through; None for others."""
    if not blocks or dim < 2:
        return None
    n, m = call.results[0].shape[dim], call.types[0].shape[dim]
    window = windows_of(call, call.types[0].ndim - 2)[dim - 2]
    return None if _is_plain(window, n, m) else (*result_blocks(dim, (n, m), window, blocks), (n, m))


def spread_infer(call: Call) -> tuple[TensorType, ...]:
    grad, _ = checked_operand(call)
    made = tuple(map(known_size, per_dim(call.op.name, "sizes", call["sizes"], grad.ndim - 2)))
    return (TensorType((*grad.shape[:2], *made), grad.dtype),)
