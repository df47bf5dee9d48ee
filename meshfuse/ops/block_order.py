"""The equal blocks of a dim in another order: shifts by whole blocks, zig-zag orders."""

from __future__ import annotations

from ..dtypes import DataType
from ..errors import shown, user_error
from .opdef import BlockOrder, Call, Emit, OpDef, Partial, Sample
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, dim_of
from .values import Param, ParamKind, TensorType
from .vjp import Backward, Tensor, each

K = ParamKind


def zigzag_order(ring: int) -> tuple[int, ...]:
    """Of 2 `ring` chunks in zig-zag order, by place the number of the chunk: block r is r and 2 ring - 1 - r."""
    return tuple([chunk for block in range(ring) for chunk in (block, 2 * ring - 1 - block)])


def _infer(call: Call) -> tuple[TensorType, ...]:
    (arg,), order = call.types, call["order"]
    n = arg.shape[dim_of(call)]
    if not order or sorted(order) != list(range(len(order))):
        raise user_error("reorder_blocks: order", shown(list(order)), "the numbers of all blocks, 0 on, each once",
                         "Say which block of the operand each block of the result is.")  # fmt: skip
    if n != UNKNOWN and n % len(order):
        raise user_error(f"reorder_blocks: dim {dim_of(call)} of {arg}", f"{n} elements in {len(order)} blocks",
                         "equal blocks", "Pad the dim, or cut it in a number of blocks that divides it.")  # fmt: skip
    return call.types


def _rule(call: Call) -> Rule:
    """The dim is made of (block, inside a block), and the first of these is needed whole."""
    builder, dim, blocks = RuleBuilder(), dim_of(call), len(call["order"])
    shape = call.types[0].shape
    dims = [(*builder.blocked(blocks), *builder.factor(n // blocks)) if d == dim else builder.factor(n)
            for d, n in enumerate(shape)]  # fmt: skip
    return builder.build([tuple(dims)], [tuple(dims)])


def _emit(e: Emit) -> str:
    dim, order = dim_of(e.call), e.call["order"]
    size = e.operand_shapes[0][dim] // len(order)
    if size == 1 and list(order) == list(range(len(order)))[::-1]:
        return f"{e.operands[0]}.flip({dim})"
    runs: list[list[int]] = []
    for block in order:
        if runs and runs[-1][1] == block:
            runs[-1][1] += 1
        else:
            runs.append([block, block + 1])
    parts = [f"{e.operands[0]}.narrow({dim}, {a * size}, {(b - a) * size})" for a, b in runs]
    return f"torch.cat([{', '.join(parts)}], {dim})"


def _bwd(b: Backward) -> Tensor:
    order = list(b["order"])
    return b.ops.reorder_blocks(b.grad, b["dim"], [order.index(block) for block in range(len(order))])


def _samples() -> list[Sample]:
    x, ints = TensorType((6, 8), DataType.Float), TensorType((4, 6), DataType.Int)
    return [Sample((x, 1, [3, 0, 1, 2])), Sample((x, 0, [0, 2, 1])), Sample((ints, -1, [1, 0])), Sample((x, 0, [0])),
            Sample((x, 1, [*range(8)][::-1]))]  # fmt: skip


OPS = (
    OpDef("reorder_blocks", (Param("arg", K.TENSOR), Param("dim", K.DIM), Param("order", K.INTS)), _infer, _rule, _emit,
          Partial.MOVE, samples=_samples, vjp=each(arg=_bwd),
          window=lambda call: BlockOrder(dim_of(call), tuple(call["order"])),
          nvfuser="nvFuser has no op that puts the blocks of a dim into another order",
          about="the equal blocks of `dim` in another order: block i was block `order[i]`"),
)  # fmt: skip
