"""Ops on the blocks of a dim, in terms of which distributed forms are written.

A dim of size n in `blocks` blocks has ceil(n / blocks) elements per block; the last blocks may be short or
empty. The blocks are a factor of the dim that passes through, what is inside them is needed whole: a dim
that lies in such blocks over ranks is local to all of these ops.
"""

from __future__ import annotations

from typing import Any

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.indices import Runs, global_index
from ..kernels.reductions import highest, lowest, neutral_element
from ..kernels.table import kernel
from .opdef import Call, Emit, OpDef, Sample
from .reductions import reduce_max, reduce_min, reduce_prod
from .rules import Rule, RuleBuilder
from .scans import COMBINE, REDUCE, scan
from .shape_arithmetic import (
    UNKNOWN,
    check_dim,
    check_dims,
    check_ndim,
    check_positive,
    check_same_size,
)
from .values import Param, ParamKind, TensorType

K = ParamKind


def block_size(n: int, blocks: int) -> int:
    """How many elements the blocks of n elements have, cut as by `torch.chunk`: the last may be short or empty."""
    return max(1, -(-n // blocks))


def _dim(call: Call) -> int:
    check_positive(call.op.name, "blocks", call["blocks"])
    return check_dim(call.op.name, call["dim"], max(t.ndim for t in (*call.types, *call.results)))


def _block_rule(call: Call, operand_in_blocks: bool, result_in_blocks: bool) -> Rule:
    """A dim in blocks is (blocks, inside a block); one that is not in blocks has one element per block."""
    builder, dim, blocks = RuleBuilder(), _dim(call), call["blocks"]
    outer, long = builder.factor(blocks), call.types[0] if operand_in_blocks else call.results[0]
    inner = builder.blocked(block_size(long.shape[dim], blocks))
    others = {d: builder.factor(n) for d, n in enumerate(long.shape) if d != dim}
    sides = [tuple(others.get(d, (*outer, *inner) if whole else outer) for d in range(long.ndim))
             for whole in (operand_in_blocks, result_in_blocks)]  # fmt: skip
    return builder.build(sides[:1], sides[1:])


def _scan_emit(e: Emit) -> str:
    block = block_size(e.call.types[0].shape[_dim(e.call)], e.call["blocks"])
    return f"K.block_scan({e.operands[0]}, {_dim(e.call)}, {block}, {e.call.op.name.removeprefix('block_')!r})"


@kernel
def block_scan(x: torch.Tensor, dim: int, block: int, name: str) -> torch.Tensor:
    """A scan along a dim that starts again at every block."""
    n = x.shape[dim]
    if not n:
        return x
    parts = _in_blocks(x, dim, block, -(-n // block), 0)
    done = scan(name, parts, dim + 1, None)
    return done.flatten(dim, dim + 1).narrow(dim, 0, n)


def _in_blocks(x: torch.Tensor, dim: int, block: int, count: int, fill: Any) -> torch.Tensor:
    """The dim as [count, block]; what it lacks at its end is `fill`."""
    missing = count * block - x.shape[dim]
    shape = list(x.shape)
    if missing:
        shape[dim] = missing
        x = torch.cat([x, x.new_full(shape, fill)], dim)
    return x.reshape(*shape[:dim], count, block, *shape[dim + 1 :])


def _total_infer(call: Call) -> tuple[TensorType, ...]:
    shape, dim = call.types[0].shape, _dim(call)
    return (TensorType((*shape[:dim], call["blocks"], *shape[dim + 1 :]), call.types[0].dtype),)


def _total_emit(e: Emit) -> str:
    dim, reduce = _dim(e.call), e.call.op.name.removeprefix("block_")
    block = block_size(e.call.types[0].shape[dim], e.call["blocks"])
    return f"K.block_total({e.operands[0]}, {dim}, {block}, {e.result_shapes[0][dim]}, {reduce!r})"


@kernel
def block_total(x: torch.Tensor, dim: int, block: int, count: int, reduce: str) -> torch.Tensor:
    """Every block of a dim reduced to one element; a block without elements gives the neutral element."""
    parts = _in_blocks(x, dim, block, count, neutral_element(reduce, x.dtype))
    functions = {"sum": torch.sum, "prod": reduce_prod, "max": reduce_max, "min": reduce_min}
    return functions[reduce](parts, [dim + 1], False).to(x.dtype)


def _repeat_infer(call: Call) -> tuple[TensorType, ...]:
    shape, dim = call.types[0].shape, _dim(call)
    check_same_size(call.op.name, "the dim's size and the blocks", shape[dim], call["blocks"])
    return (TensorType((*shape[:dim], call["size"], *shape[dim + 1 :]), call.types[0].dtype),)


def _repeat_emit(e: Emit) -> str:
    dim = _dim(e.call)
    block = block_size(e.call["size"], e.call["blocks"])
    return f"K.block_repeat({e.operands[0]}, {dim}, {block}, {e.result_shapes[0][dim]})"


@kernel
def block_repeat(x: torch.Tensor, dim: int, block: int, size: int) -> torch.Tensor:
    """Each block's one element repeated to all places of the block, `size` places in all."""
    return x.repeat_interleave(block, dim).narrow(dim, 0, size)


def _topk_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), dim = call.types, _dim(call)
    check_positive(call.op.name, "k", call["k"])
    if arg.shape[dim] != UNKNOWN and block_size(arg.shape[dim], call["blocks"]) < call["k"]:
        raise user_error("block_topk: k", str(call["k"]), f"no more than a block of {arg.shape[dim]} elements in "
                         f"{call['blocks']} has", "Take fewer blocks, or a smaller k.")  # fmt: skip
    shape = (*arg.shape[:dim], call["blocks"] * call["k"], *arg.shape[dim + 1 :])
    return (TensorType(shape, arg.dtype), TensorType(shape, DataType.Int))


def _topk_rule(call: Call) -> Rule:
    """b* (blocks, inside) -> b* (blocks, k)."""
    (arg,), dim, builder = call.types, _dim(call), RuleBuilder()
    outer = builder.factor(call["blocks"])
    inner = builder.blocked(block_size(arg.shape[dim], call["blocks"]))
    others = {d: builder.factor(n) for d, n in enumerate(arg.shape) if d != dim}
    first = builder.blocked(call["k"])
    operand = tuple(others.get(d, (*outer, *inner)) for d in range(arg.ndim))
    result = tuple(others.get(d, (*outer, *first)) for d in range(arg.ndim))
    return builder.build([operand], [result, result])


def _topk_emit(e: Emit) -> str:
    """Text of the call. Which blocks the rank has follows from its part of the result, with k elements per block."""
    call, dim = e.call, _dim(e.call)
    block, k = block_size(call.types[0].shape[dim], call["blocks"]), call["k"]
    numbers = tuple((a // k, b // k) for a, b in e.result_runs(0)[dim])
    return f"K.block_topk({e.operands[0]}, {k}, {dim}, {call['largest']}, {block}, {numbers})"


@kernel
def block_topk(
    x: torch.Tensor, k: int, dim: int, largest: bool, block: int, blocks: Runs
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, global indices) of the first k elements of each block in sorted order.

    `blocks` are the runs of the rank's block numbers. A block with fewer than k elements is filled up with what sorts
    last. Only empty blocks come after it, so a stable sort over all blocks puts no filling before an element.
    """
    numbers = global_index(blocks, x.device)
    parts = _in_blocks(x, dim, block, len(numbers), _last(x.dtype, largest))
    place = torch.argsort(parts, dim=dim + 1, descending=largest, stable=True).narrow(dim + 1, 0, k)
    start = (numbers * block).reshape([-1, *[1] * (x.ndim - dim)])
    return parts.gather(dim + 1, place).flatten(dim, dim + 1), (place + start).flatten(dim, dim + 1)


def _last(dtype: torch.dtype, largest: bool) -> Any:
    """The value that sorts last: torch sorts NaN above all numbers."""
    if largest:
        return lowest(dtype)
    return float("nan") if dtype.is_floating_point else highest(dtype)


def _moments_dims(call: Call) -> tuple[int, ...]:
    """The reduced dims, which must include the one in blocks. Raises DefinitionError where they do not."""
    dims = check_dims(call.op.name, call["dims"], call.types[0].ndim)
    if _dim(call) not in dims:
        raise user_error("block_moments: the dim in blocks", f"dim {call['dim']} beside the dims {list(dims)}",
                         "one of the dims", "Reduce it, too.")  # fmt: skip
    return dims


def _moments_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), dims = call.types, _moments_dims(call)
    kept = (1 if d in dims else n for d, n in enumerate(arg.shape))
    return (TensorType((call["blocks"], 2, *kept), arg.dtype),)


def _moments_rule(call: Call) -> Rule:
    """... (blocks, inside) ... -> blocks 2 ...: the other reduced dims are needed whole, too."""
    (arg,), dim, dims, builder = call.types, _dim(call), _moments_dims(call), RuleBuilder()
    outer = builder.factor(call["blocks"])
    inner = builder.blocked(block_size(arg.shape[dim], call["blocks"]))
    whole = {d: builder.blocked(n) for d, n in enumerate(arg.shape) if d in dims and d != dim}
    kept = {d: builder.factor(n) for d, n in enumerate(arg.shape) if d not in dims}
    operand = tuple(kept.get(d) or whole.get(d) or ((*outer, *inner) if d == dim else ()) for d in range(arg.ndim))
    return builder.build([operand], [(outer, builder.blocked(2), *(kept.get(d, ()) for d in range(arg.ndim)))])


def _moments_emit(e: Emit) -> str:
    dim, dims = _dim(e.call), list(_moments_dims(e.call))
    block = block_size(e.call.types[0].shape[dim], e.call["blocks"])
    return f"K.block_moments({e.operands[0]}, {dims}, {dim}, {block}, {e.result_shapes[0][0]})"


@kernel
def block_moments(x: torch.Tensor, dims: list[int], dim: int, block: int, count: int) -> torch.Tensor:
    """[count, 2, ...]: for each block of `dim` the mean over `dims`, and the sum of squared differences from it.

    An empty block gives zeros. No op here writes into its operand, as compilers of segments could not trace that.
    """
    if count == 1 and x.shape[dim]:
        return _moments(x, dims).unsqueeze(0)
    parts = [_moments(part, dims) for part in x.split(block, dim)] if x.shape[dim] else []
    nothing = x.new_zeros([2, *(1 if d in dims else n for d, n in enumerate(x.shape))])
    parts += [nothing] * (count - len(parts))
    return torch.stack(parts) if parts else nothing.new_zeros([0, *nothing.shape])


def _moments(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    mean = torch.mean(x, dims, keepdim=True)
    centred = x - mean
    return torch.stack([mean, (centred * centred).sum(dims, keepdim=True)])


def _merge_infer(call: Call) -> tuple[TensorType, ...]:
    (arg,) = call.types
    check_ndim(call.op.name, "the moments", arg, 2)
    check_same_size(call.op.name, "the blocks and their counts", arg.shape[0], len(call["counts"]))
    check_same_size(call.op.name, "a mean and squares, and dim 1,", 2, arg.shape[1])
    made = TensorType(arg.shape[2:], arg.dtype)
    return (made, made)


def _merge_rule(call: Call) -> Rule:
    """blocks 2 ... -> ..., with the blocks needed whole."""
    (arg,), builder = call.types, RuleBuilder()
    rest = builder.dims(arg.shape[2:])
    return builder.build([(builder.blocked(arg.shape[0]), builder.blocked(2), *rest)], [rest, rest])


@kernel
def block_merge(moments: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, 2, ...] moments of blocks with `counts` elements to (mean, sum of squared differences) of all of them.

    The sum of squares is that within the blocks plus that of the blocks' means (Chan, Golub & LeVeque 1983).
    """
    means, squares = moments.unbind(1)
    if len(set(counts)) == 1:
        mean = means.mean(0)
        apart = means - mean
        return mean, (apart * apart).sum(0) * counts[0] + squares.sum(0)
    weights = means.new_tensor(counts).view(-1, *[1] * (means.ndim - 1))
    mean = (means * weights).sum(0) / sum(counts)
    apart = means - mean
    return mean, (apart * apart * weights).sum(0) + squares.sum(0)


def block_counts(n: int, blocks: int, others: int = 1) -> list[int]:
    """Elements of each block of a dim of size n, times those of the other dims."""
    block = block_size(n, blocks)
    return [others * max(0, min(block, n - i * block)) for i in range(blocks)]


def _same_type(call: Call) -> tuple[TensorType, ...]:
    _dim(call)
    return call.types


def _topk_samples() -> list[Sample]:
    example = TensorType((7, 4), DataType.Float)
    ties = {0: (3.0, 1.0, 3.0, 2.0, 3.0)}
    return [
        Sample((example, 2, 0, True, 3)),
        Sample((example, 1, 1, False, 2)),
        Sample((example, 2, 0, False, 4), values=ties),
        Sample((TensorType((4, 7), DataType.Int), 2, -1, True, 3)),
    ]


def _moments_samples() -> list[Sample]:
    example = TensorType((7, 4), DataType.Float)
    return [Sample((example, [0], 0, 3)), Sample((example, [0, 1], 0, 2)), Sample((example, [0], 0, 5))]


def _merge_samples() -> list[Sample]:
    example = TensorType((3, 2, 4, 1), DataType.Float)
    nothing_in_the_last = (*(0.5 * i - 3.0 for i in range(16)), *[0.0] * 8)
    return [Sample((example, [5, 5, 5])), Sample((example, [4, 3, 0]), values={0: nothing_in_the_last})]


def _samples(dtype: DataType, *more: int) -> list[Sample]:
    example = TensorType((7, 4), dtype)
    return [Sample((example, 0, *more, 3)), Sample((example, 1, *more, 2))]


_ARG, _DIM, _BLOCKS = Param("arg", K.TENSOR), Param("dim", K.DIM), Param("blocks", K.INT)
_UNEVEN = "blocks that may be short or empty are left to torch"
OPS = (
    *(
        OpDef(f"block_{name}", (_ARG, _DIM, _BLOCKS), _same_type, lambda c: _block_rule(c, True, True),
              _scan_emit, samples=lambda: _samples(DataType.Float),
              nvfuser="nvFuser has no scan that begins anew at each block",
              about=f"`{name}` within each block, beginning anew")
        for name in (*COMBINE, "cumsum_bwd")
    ),
    *(
        OpDef(f"block_{name}", (_ARG, _DIM, _BLOCKS), _total_infer, lambda c: _block_rule(c, True, False),
              _total_emit, samples=lambda: _samples(DataType.Float), nvfuser=_UNEVEN,
              about=f"the {name} of each block")
        for name in REDUCE.values()
    ),
    OpDef("block_repeat", (_ARG, _DIM, Param("size", K.INT), _BLOCKS), _repeat_infer,
          lambda c: _block_rule(c, False, True), _repeat_emit,
          samples=lambda: [Sample((TensorType((3, 4), DataType.Float), 0, 7, 3))],
          nvfuser=_UNEVEN,
          about="each block's one value for all of the block's elements"),
    OpDef("block_topk", (_ARG, Param("k", K.INT), _DIM, Param("largest", K.BOOL), _BLOCKS), _topk_infer,
          _topk_rule, _topk_emit, samples=_topk_samples, nvfuser=_UNEVEN,
          about="the `k` greatest (or least) of each block, and their indices in the whole dim"),
    OpDef("block_moments", (_ARG, Param("dims", K.DIMS), _DIM, _BLOCKS), _moments_infer, _moments_rule,
          _moments_emit, samples=_moments_samples, nvfuser=_UNEVEN,
          about="mean and sum of squared differences of each block"),
    OpDef("block_merge", (_ARG, Param("counts", K.INTS)), _merge_infer, _merge_rule,
          lambda e: f"K.block_merge({e.operands[0]}, {list(e.call['counts'])})",
          samples=_merge_samples, nvfuser="one small kernel in torch",
          about="mean and sum of squared differences of all blocks, from each block's moments"),
)  # fmt: skip
