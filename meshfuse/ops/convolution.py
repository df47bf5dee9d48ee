"""Convolutions along one, two or three dims, plain and transposed, and their gradient by the weight.

Batch, output channels and groups pass through, input channels are summed over, as in a matrix product. A spatial dim
passes where windows are patches (a kernel of size 1, a patch embedding); else ranks exchange the edges of their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..errors import DtypeError, user_error
from ..kernels.table import kernel
from .halo import in_blocks
from .opdef import Call, Emit, OpDef, Partial, Sample, Writing, cast_to
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, check_dtypes, check_ndim, check_positive, check_same_size, known_size
from .sliding_windows import (
    Window,
    check_windows,
    input_blocks,
    per_dim,
    resized,
    result_blocks,
    window_factors,
    with_halo,
)
from .values import Param, ParamKind, TensorRef, TensorType
from .vjp import Backward, Tensor, each, sizes

K = ParamKind
NOT_NATIVE = "nvFuser has no convolution"


def convolution_windows(call: Call, kernel: Sequence[int]) -> list[Window]:
    """The window along each spatial dim, from the operand with more elements to the other."""
    name, dims = call.op.name, len(kernel)
    stride, padding, dilation = (per_dim(name, what, call[what], dims) for what in ("stride", "padding", "dilation"))
    return [Window(k, s, p, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)]


def _checked(call: Call) -> tuple[TensorType, TensorType]:
    """(input, weight). Raises DefinitionError where they do not fit together."""
    name, (x, weight) = call.op.name, call.types[:2]
    check_ndim(name, "the input", x, 3, 5)
    check_ndim(name, "the weight", weight, x.ndim, x.ndim)
    if check_dtypes(call).category is not Category.FLOAT:
        raise user_error(f"{name}: dtype", str(x), "floating point", "Cast the operands.", cls=DtypeError)
    check_groups(call, ("the weight's first dim", weight.shape[0]), ("the input's channels", x.shape[1]))
    inside, given = weight.shape[0 if call["transposed"] else 1], x.shape[1]
    inside = inside if call["transposed"] else _times(inside, call["groups"])
    check_same_size(name, "the channels of input and weight", given, inside)
    return x, weight


def check_groups(call: Call, *dims: tuple[str, int]) -> None:
    """Raises DefinitionError unless the groups divide these dims, each with what it is."""
    check_positive(call.op.name, "groups", call["groups"])
    for what, n in dims:
        if n != UNKNOWN and n % call["groups"]:
            raise user_error(f"{call.op.name}: {what}", f"{n} in {call['groups']} groups", "a multiple of the groups",
                             "Take another number of groups.")  # fmt: skip


def _times(n: int, factor: int) -> int:
    return UNKNOWN if n == UNKNOWN else n * factor


def _infer(call: Call) -> tuple[TensorType, ...]:
    x, weight = _checked(call)
    windows = convolution_windows(call, weight.shape[2:])
    check_windows(call.op.name, windows)
    channels = _times(weight.shape[1], call["groups"]) if call["transposed"] else weight.shape[0]
    if (bias := call.type_of("bias")) is not None:
        check_ndim(call.op.name, "the bias", bias, 1, 1)
        check_same_size(call.op.name, "the bias' size and the output's channels", bias.shape[0], channels)
    extra = per_dim(call.op.name, "output_padding", call["output_padding"], len(windows))
    made = [
        _spread_size(n, w, known_size(more)) if call["transposed"] else w.results(n)
        for n, w, more in zip(x.shape[2:], windows, extra, strict=True)
    ]
    _check_results(call, x, made)
    return (TensorType((x.shape[0], channels, *made), x.dtype),)


def _spread_size(n: int, window: Window, more: int) -> int:
    """The size of a transposed convolution's result along a dim of size n."""
    if UNKNOWN in (n, more, window.size):
        return UNKNOWN
    return (n - 1) * window.stride - 2 * window.before + window.reach + 1 + more


def _check_results(call: Call, x: TensorType, made: Sequence[int]) -> None:
    for n, m in zip(x.shape[2:], made, strict=True):
        if m < 1 and UNKNOWN not in (n, m):
            raise user_error(f"{call.op.name}: the kernel does not fit into the input", str(x),
                             "a result of 1 element or more along each dim", "Pad the input, or take a smaller kernel.",
                             )  # fmt: skip


def _rule(call: Call) -> Rule:
    """n (g c) *s, (g o) c *k -> n (g o) *m, summed over c; transposed, the weight is (g c) o *k."""
    (x, weight), groups, builder = call.types[:2], call["groups"], RuleBuilder()
    batch, group = builder.dim(x.shape[0]), builder.factor(groups)
    inside = builder.reduction(x.shape[1] // groups)
    outside = channel_factors(builder, call.results[0].shape[1] // groups, groups)
    spatial = _spatial_factors(builder, call, x.shape[2:], call.results[0].shape[2:], weight.shape[2:])
    taps = tuple(builder.blocked(k) for k in weight.shape[2:])
    channels = ((*group, *inside), outside) if call["transposed"] else ((*group, *outside), inside)
    operands: list[DimFactors] = [(batch, (*group, *inside), *(a for a, _ in spatial)), (*channels, *taps)]
    if call.type_of("bias") is not None:
        operands.append(((*group, *outside),))
    return builder.build(operands, [(batch, (*group, *outside), *(b for _, b in spatial))])


def channel_factors(builder: RuleBuilder, n: int, groups: int) -> tuple[int, ...]:
    """The factor of a group's channels that pass through."""
    return builder.dim(n) if groups == 1 else builder.factor(n)


def _spatial_factors(
    builder: RuleBuilder, call: Call, given: Sequence[int], made: Sequence[int], kernel: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The factors of each spatial dim of the input and of the result."""
    triples = zip(given, made, convolution_windows(call, kernel), strict=True)
    if not call["transposed"]:
        return [window_factors(builder, n, m, w) for n, m, w in triples]
    pairs = [window_factors(builder, m, n, w) for n, m, w in triples]
    return [(read, written) for written, read in pairs]


def _emit(e: Emit) -> str:
    bias = str(e.operand("bias")) if e.leads() else "None"
    weight = e.call.types[1]
    options = [per_dim(e.call.op.name, what, e.call[what], weight.ndim - 2) for what in ("stride", "padding")]
    dilation = per_dim(e.call.op.name, "dilation", e.call["dilation"], weight.ndim - 2)
    texts = [*map(str, (*options, dilation, e.call["transposed"], e.result_shapes[0]))]
    return f"K.convolution({', '.join([*e.operands[:2], bias, *texts])})"


@kernel
def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """torch's convolution of a rank's batch, groups and channels, with a result of this shape."""
    if 0 in (*x.shape, *weight.shape, *shape):
        out = x.new_zeros(shape)
        return out if bias is None else out + bias.reshape(-1, *[1] * (x.ndim - 2))
    if not transposed:
        groups = x.shape[1] // weight.shape[1]
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0], groups)
    groups = shape[1] // weight.shape[1]
    windows = [Window(*each) for each in zip(weight.shape[2:], stride, padding, padding, dilation, strict=True)]
    least = [_spread_size(n, window, 0) for n, window in zip(x.shape[2:], windows, strict=True)]
    more = [n - m for n, m in zip(shape[2:], least, strict=True)]
    return torch.convolution(x, weight, bias, stride, padding, dilation, True, more, groups)


def _flops(call: Call) -> float:
    x, weight = call.types[:2]
    positions = x if call["transposed"] else call.results[0]
    return 2.0 * positions.shape[0] * math.prod(positions.shape[2:]) * weight.numel


# a sharded spatial dim --------------------------------------------------------------------------------------------


def _distributed(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
) -> Sequence[TensorRef] | None:
    """Blocks of the dim with the edges that windows read, as so many more images."""
    if not blocks or r.operand or dim < 2:
        return None
    weight = call.types[1]
    window, n, m = (
        convolution_windows(call, weight.shape[2:])[dim - 2],
        call.types[0].shape[dim],
        call.results[0].shape[dim],
    )
    if window.is_patch and (n == m * window.stride or (call["transposed"] and m == n * window.stride)):
        return None
    form = _transposed_blocks if call["transposed"] else _plain_blocks
    return form(r, call, operands, window, (dim, n, m, blocks))


def _plain_blocks(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], window: Window, place: tuple[int, int, int, int]
) -> Sequence[TensorRef]:
    dim, n, m, count = place
    blocks = input_blocks(dim, (n, m), window, count)
    x = blocks.merged(r, with_halo(r, operands[0], blocks, window.before, 0))
    made = r.call("convolution", x, operands[1], *operands[2:] or (None,), *_options(call, dim))
    return [blocks.split(r, made, m)]


def _transposed_blocks(
    r: Writing, call: Call, operands: tuple[TensorRef, ...], window: Window, place: tuple[int, int, int, int]
) -> Sequence[TensorRef]:
    """Blocks of the result, from the input's elements that reach into them. The bias is added at the end."""
    dim, n, m, count = place
    blocks, halo, start = result_blocks(dim, (m, n), window, count)
    x = blocks.merged(r, in_blocks(r, operands[0], dim, count, blocks.results, halo, 0))
    made = r.call("convolution", x, operands[1], None, *_options(call, dim))
    total = blocks.split(r, resized(r, made, dim, start, blocks.inputs), m)
    return [_with_bias(r, total, operands[2:])]


def _options(call: Call, dim: int) -> list[Any]:
    """The options after the bias, without padding along a dim."""
    spatial = call.types[0].ndim - 2
    stride, padding, dilation, more = (
        per_dim(call.op.name, what, call[what], spatial) for what in ("stride", "padding", "dilation", "output_padding")
    )
    padding, more = (tuple(0 if d == dim - 2 else p for d, p in enumerate(each)) for each in (padding, more))
    return [stride, padding, dilation, call["transposed"], more, call["groups"]]


def _with_bias(r: Writing, x: TensorRef, bias: Sequence[TensorRef]) -> TensorRef:
    if not bias:
        return x
    kind = r.type(x)
    added = r.call("add", x, r.call("broadcast", bias[0], [d != 1 for d in range(kind.ndim)]))
    return cast_to(r, added, kind.dtype)


def _split_bias(r: Writing, call: Call, operands: tuple[TensorRef, ...]) -> Sequence[TensorRef]:
    """The convolution without the bias, and an add."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    made = r.call("convolution", *operands[:2], None, *(call[name] for name in names))
    return [_with_bias(r, made, operands[2:])]


# gradients --------------------------------------------------------------------------------------------------------


def _input_bwd(b: Backward) -> Tensor:
    """The convolution the other way. A transposed one may give a row more than there was."""
    x, weight = b["input"], b["weight"]
    options, backwards = (b["stride"], b["padding"], b["dilation"]), not b["transposed"]
    spatial, more = x.ndim - 2, [0] * (x.ndim - 2)
    if backwards:
        more = [_left_over(b, d) for d in range(spatial)]
    made = b.ops.convolution(b.grad, weight, None, *options, backwards, more, b["groups"])
    if made.type.shape == x.type.shape and -1 not in x.type.shape:
        return made
    return made if backwards else b.ops.slice(made, [0] * x.ndim, sizes(x))


def _left_over(b: Backward, d: int) -> Any:
    """How many elements of a dim are after the last window: 0 or more, less than the stride."""
    spatial = b["input"].ndim - 2
    stride, padding, dilation = (per_dim(b.name, w, b[w], spatial)[d] for w in ("stride", "padding", "dilation"))
    n, k = sizes(b["input"])[d + 2], sizes(b["weight"])[d + 2]
    return (n + (2 * padding - 1) - (k - 1) * dilation) % stride


def _weight_bwd(b: Backward) -> Tensor:
    """Of a transposed convolution input and gradient change places."""
    given = (b["input"], b.grad) if b["transposed"] else (b.grad, b["input"])
    kernel = sizes(b["weight"])[2:]
    return b.ops.convolution_weight_bwd(*given, kernel, b["stride"], b["padding"], b["dilation"], b["groups"])


def _bias_bwd(b: Backward) -> Tensor:
    return b.ops.sum(b.grad, [d for d in range(b.grad.ndim) if d != 1])


def convolution_sample(x: tuple[int, ...], weight: tuple[int, ...], bias: int = 0, **options: Any) -> Sample:
    given = [TensorType(shape, DataType.Float) for shape in (x, weight, *([(bias,)] if bias else []))]
    return Sample((*given,), options)


def _samples() -> list[Sample]:
    return [
        convolution_sample((2, 4, 8), (6, 4, 3), 6, stride=[2], padding=[1]),
        convolution_sample((1, 4, 5, 2), (6, 2, 2, 1), padding=[1, 0], dilation=[2, 1], groups=2),
        convolution_sample((1, 2, 6), (3, 2, 2), stride=[2]),
        convolution_sample(
            (2, 4, 5), (4, 2, 3), 4, stride=[2], padding=[1], transposed=True, output_padding=[1], groups=2
        ),
    ]


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
               transposed: bool, more: Any, groups: int) -> torch.Tensor:  # fmt: skip
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, more, groups)


STRIDES = (Param("stride", K.INTS, (1,)), Param("padding", K.INTS, (0,)), Param("dilation", K.INTS, (1,)))
OPS = (
    OpDef(
        "convolution",
        (
            Param("input", K.TENSOR),
            Param("weight", K.TENSOR),
            Param("bias", K.OPTIONAL_TENSOR, None),
            *STRIDES,
            Param("transposed", K.BOOL, False),
            Param("output_padding", K.SHAPE, (0,)),
            Param("groups", K.INT, 1),
        ),
        _infer,
        _rule,
        _emit,
        Partial.EACH,
        _flops,
        _samples,
        nvfuser=NOT_NATIVE,
        distributed=_distributed,
        vjp=each(input=_input_bwd, weight=_weight_bwd, bias=_bias_bwd),
        split_last_operand=_split_bias,
        reference=_reference,
        about="convolution of [n, channels, ..] along 1 to 3 dims, as torch.convolution; `transposed` as its gradient",
    ),
)  # fmt: skip
