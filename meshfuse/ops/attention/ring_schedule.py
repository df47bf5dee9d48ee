"""The schedule of attention in a ring, as graphs of ordinary ops.

With n blocks of rows of q, and of k and v, tensors are [n, b, h, rows of a block, e]: attention is local along the
leading dim. In step j block r of the rows meets block r - j of the columns: k and v travel one block on per step. The
outputs of the steps are merged by their log-sum-exps. A rank has one block of k and v beside its own, and receives the
next. (Liu et al. 2023, Ring Attention.)

Under a causal mask block r sees itself in part, blocks s < r whole and no others: half of the work would be wasted. In
zig-zag order block r is made of the chunks r and 2n - 1 - r of 2n. The later chunk of r sees the first chunk of every
block; the first chunk of r sees the first chunk of each s < r, and the later chunk of r the later chunk of each s > r.
That is two products of chunks per step and rank, none of them wasted. (Zig-zag ring attention, as in the training of
Llama 3, Dubey et al. 2024; Striped Attention, Brandon et al. 2023, balances by single rows.)

Backward, given the log-sum-exps of all columns, the gradients of the steps are independent (Dao 2023,
FlashAttention-2). Those of q are summed where q is. Those of k and v, in float32 or wider, travel with their blocks and
home at the end; the first step's share of a rank's own block stays there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...dtypes import DataType
from ..opdef import Call, Writing, cast_to
from ..values import TensorRef
from .operands import statistic_dtype

Refs = tuple[TensorRef, ...]


def is_zigzag(call: Call) -> bool:
    """Whether the rows are in zig-zag order and that matters, as it does under a causal mask only."""
    return call["zigzag"] and call["is_causal"]


class Added(NamedTuple):
    """What is added to the scores, or masks them."""

    bias: TensorRef | None = None
    mask: TensorRef | None = None

    @classmethod
    def of(cls, call: Call, given: Sequence[TensorRef]) -> Added:
        """Those of a call, from the operands that stand for its bias and mask."""
        left = iter(given)
        return cls(*(None if call[name] is None else next(left) for name in cls._fields))


class _RingOps:
    """The ops that both directions are written with, on tensors [n, b, h, rows, e] and [n, b, h, rows]."""

    def __init__(self, r: Writing, call: Call):
        self.r, self.call, self.n = r, call, call["ring"]
        self.causal, self.scale = call["is_causal"], call["scale"]

    def split(self, x: TensorRef) -> TensorRef:
        """[b, h, s, *e] as [n, b, h, s / n, *e]."""
        b, h, s, *e = self.r.type(x).shape
        parts = self.r.call("reshape", x, (b, h, self.n, s // self.n, *e))
        return self.r.call("permute", parts, (2, 0, 1, *range(3, 4 + len(e))))

    def whole(self, x: TensorRef, dtype: DataType) -> TensorRef:
        """The inverse of `split`, cast to a type."""
        n, b, h, s, *e = self.r.type(x).shape
        parts = self.r.call("permute", self.cast(x, dtype), (1, 2, 0, *range(3, 4 + len(e))))
        return self.r.call("reshape", parts, (b, h, n * s, *e))

    def split_added(self, x: TensorRef) -> TensorRef:
        """A bias or mask that broadcasts to [b, h, s, s_k] as [n, b, h, s / n, s_k]; the last four may be 1.

        A rank has the columns of all blocks, for its own rows.
        """
        shape = self.r.type(x).shape
        shape = (*(1,) * (4 - len(shape)), *shape)
        x = self.r.call("reshape", x, shape) if self.r.type(x).shape != shape else x
        if shape[2] > 1:
            return self.split(x)
        rows = self.r.call("broadcast", x, [True, *(False,) * 4])
        return self.r.call("expand", rows, (self.n, *shape))

    def met(self, added: Added, step: int) -> Added:
        """Bias and mask of the columns that each block of rows meets in a step."""
        return Added(*(self._columns(x, step) for x in added))

    def _columns(self, x: TensorRef | None, step: int) -> TensorRef | None:
        if x is None or self.r.type(x).shape[-1] == 1:
            return x
        return self.r.call("block_columns", x, step)

    def chunk(self, added: Added, row: int, column: int) -> Added:
        """Bias and mask of the lower (0) or upper (1) chunks of rows and columns."""
        return Added(*(self._half(self._half(x, 3, row), 4, column) for x in added))

    def _half(self, x: TensorRef | None, dim: int, which: int) -> TensorRef | None:
        if x is None or self.r.type(x).shape[dim] == 1:
            return x
        return self.halves(x, dim)[which]

    def pick_added(self, step: int, before: Added, after: Added) -> Added:
        """As `pick`, of bias and mask."""
        return Added(*(None if x is None or y is None else self.pick(step, x, y)
                       for x, y in zip(before, after, strict=True)))  # fmt: skip

    def hop(self, x: TensorRef) -> TensorRef:
        """Every block moved one place on in the ring."""
        return self.r.call("reorder_blocks", x, 0, tuple((block - 1) % self.n for block in range(self.n)))

    def cast(self, x: TensorRef, dtype: DataType) -> TensorRef:
        return cast_to(self.r, x, dtype)

    def add(self, x: TensorRef, y: TensorRef) -> TensorRef:
        """The sum, in float32 or wider."""
        return self.r.call("add", *self.wide((x, y)))

    def pick(self, step: int, before: TensorRef | float, after: TensorRef | float) -> TensorRef:
        """`before` for the blocks of rows that in this step meet columns before their own, `after` for the others."""
        return self.r.call("block_pick", after, before, step)

    def keep(self, step: int, x: TensorRef, before: bool) -> TensorRef:
        """x for the blocks that meet columns before their own, zeros for the others; without `before` the opposite."""
        return self.r.call("block_keep", x, step, before)

    def halves(self, x: TensorRef, dim: int = 3) -> tuple[TensorRef, TensorRef]:
        """The lower and the upper chunk of every block."""
        shape = self.r.type(x).shape
        middle, zeros = shape[dim] // 2, (0,) * len(shape)
        low = self.r.call("slice", x, zeros, (*shape[:dim], middle, *shape[dim + 1 :]))
        return low, self.r.call("slice", x, (*zeros[:dim], middle, *zeros[dim + 1 :]), shape)

    def joined(self, low: TensorRef, high: TensorRef) -> TensorRef:
        """The inverse of `halves`, in float32 or wider."""
        return self.r.call("cat", self.wide((low, high)), 3)

    def wide(self, tensors: Sequence[TensorRef]) -> Refs:
        return tuple(self.cast(x, statistic_dtype(self.r.type(x).dtype)) for x in tensors)


# forward ----------------------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """The output over the columns that have come by so far, and their log-sum-exp."""

    out: TensorRef
    lse: TensorRef


def attention_rounds(r: Writing, call: Call, operands: Refs) -> Sequence[TensorRef]:
    """(output, log-sum-exp) of ring attention."""
    ring = _RingForward(r, call)
    added = Added.of(call, [ring.split_added(x) for x in operands[3:]])
    q, k, v = map(ring.split, operands[:3])
    made = ring.zigzag(q, k, v, added) if is_zigzag(call) else ring.in_order(q, k, v, added)
    return [ring.whole(x, ttype.dtype) for x, ttype in zip(made, call.results, strict=True)]


class _RingForward(_RingOps):
    """The forward pass: rows stay, keys and values come round."""

    def in_order(self, q: TensorRef, k: TensorRef, v: TensorRef, added: Added) -> _State:
        """Attention for blocks in the order of the sequence."""
        state = None
        for step in range(self.n):
            travelled = (self.hop(k), self.hop(v)) if step < self.n - 1 else (k, v)
            made = self.attend(q, k, v, self.causal and not step, self.met(added, step))
            if self.causal and step:
                made = made._replace(lse=self.pick(step, made.lse, -math.inf))
            state = self.merge(state, made)
            k, v = travelled
        assert state is not None
        return state

    def zigzag(self, q: TensorRef, k: TensorRef, v: TensorRef, added: Added) -> _State:
        """Attention for blocks in zig-zag order.

        A block's own two chunks are in order, so the first step is plain causal attention. Every later step is two
        products of chunks.
        """
        (q_low, q_high), low, high = self.halves(q), None, None
        for step in range(self.n):
            travelled = (self.hop(k), self.hop(v)) if step < self.n - 1 else (k, v)
            here = self.met(added, step)
            if not step:
                parts = [self.halves(x) for x in self.attend(q, k, v, True, here)]
                low, high = (_State(*pair) for pair in zip(*parts, strict=True))
            else:
                (k_low, k_high), (v_low, v_high) = self.halves(k), self.halves(v)
                high = self.merge(high, self.attend(q_high, k_low, v_low, False, self.chunk(here, 1, 0)))
                pairs = ((q_low, q_high), (k_low, k_high), (v_low, v_high))
                rows, keys, values = (self.pick(step, *pair) for pair in pairs)
                seen = self.pick_added(step, self.chunk(here, 0, 0), self.chunk(here, 1, 1))
                made = self.attend(rows, keys, values, False, seen)
                low = self.merge(low, made._replace(lse=self.pick(step, made.lse, -math.inf)))
                high = self.merge(high, made._replace(lse=self.pick(step, -math.inf, made.lse)))
            k, v = travelled
        assert low is not None and high is not None
        return _State(*(self.joined(*pair) for pair in zip(low, high, strict=True)))

    def attend(self, q: TensorRef, k: TensorRef, v: TensorRef, causal: bool, added: Added) -> _State:
        """Attention of each block's rows to the columns that are with it."""
        return _State(*self.r.call("sdpfa_fwd", q, k, v, *added, None, causal, self.scale)[:2])

    def merge(self, state: _State | None, made: _State) -> _State:
        return made if state is None else _State(*self.r.call("attention_merge", *state, *made))


# backward ---------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What belongs to the rows of q: the output's gradient, q, the output, the log-sum-exp and its gradient, if any."""

    grad: TensorRef
    q: TensorRef
    out: TensorRef
    lse: TensorRef
    grad_lse: TensorRef | None = None


def gradient_rounds(r: Writing, call: Call, operands: Refs) -> Sequence[TensorRef]:
    """The gradients of q, k and v of ring attention."""
    ring = _RingBackward(r, call)
    given = iter(operands[6:])
    more = [next(given)] if call["grad_logsumexp"] is not None else []
    grad, q, k, v, *saved = map(ring.split, (*operands[:6], *more))
    made = ring.run(_Rows(grad, q, *saved), k, v, Added.of(call, [ring.split_added(x) for x in given]))
    return [ring.whole(x, ttype.dtype) for x, ttype in zip(made, call.results, strict=True)]


class _RingBackward(_RingOps):
    """The backward pass: gradients of keys and values travel one hop behind them, and each rank adds its own."""

    def run(self, rows: _Rows, k: TensorRef, v: TensorRef, added: Added) -> Refs:
        """The gradients of q, and of k and v, which have come home after a round."""
        grads_of = self._chunks if is_zigzag(self.call) else self._block
        keys = self._hops((k, v))
        grad_q, *own = self._attend(rows, k, v, self.causal, self.met(added, 0))
        travelling: Refs = ()
        for step in range(1, self.n):
            pair, arriving = keys, self._hops(travelling)
            if step < self.n - 1:
                keys = self._hops(pair)
            more, *grads = grads_of(step, rows, *pair, self.met(added, step))
            grad_q = self.add(grad_q, more)
            travelling = tuple(map(self.add, arriving, grads)) if arriving else self.wide(grads)
        home = self._hops(travelling)
        return (grad_q, *(map(self.add, own, home) if home else own))

    def _hops(self, tensors: Sequence[TensorRef]) -> Refs:
        return tuple(map(self.hop, tensors)) if self.n > 1 else ()

    def _block(self, step: int, rows: _Rows, k: TensorRef, v: TensorRef, added: Added) -> Refs:
        """The gradients of one step. Rows that see nothing get a log-sum-exp of inf, for probabilities of 0."""
        if self.causal:
            rows = rows._replace(lse=self.pick(step, rows.lse, math.inf))
        return self._attend(rows, k, v, False, added)

    def _chunks(self, step: int, rows: _Rows, k: TensorRef, v: TensorRef, added: Added) -> Refs:
        """The gradients of one step in zig-zag order, from its two products of chunks."""
        halves = [None if x is None else self.halves(x) for x in rows]
        high = _Rows(*(None if pair is None else pair[1] for pair in halves))  # type: ignore[arg-type]
        picked = _Rows(*(None if pair is None else self.pick(step, *pair) for pair in halves))  # type: ignore[arg-type]
        keys, values = self.halves(k), self.halves(v)
        always = self._attend(high, keys[0], values[0], False, self.chunk(added, 1, 0))
        seen = self.pick_added(step, self.chunk(added, 0, 0), self.chunk(added, 1, 1))
        other = self._attend(picked, self.pick(step, *keys), self.pick(step, *values), False, seen)
        low_part, high_part = ([self.keep(step, x, before) for x in other] for before in (True, False))
        grad_q = self.joined(low_part[0], self.add(always[0], high_part[0]))
        grads = [self.joined(self.add(a, low), up)
                 for a, low, up in zip(always[1:], low_part[1:], high_part[1:], strict=True)]  # fmt: skip
        return (grad_q, *grads)

    def _attend(self, rows: _Rows, k: TensorRef, v: TensorRef, causal: bool, added: Added) -> Refs:
        """The gradients from each block's rows and the columns that are with it.

        Heads of q that share one of k and v may lie on several ranks. For them the gradients of q, and of k and v, come
        from separate ops.
        """
        none = [self.r.call("full", shape, 0, DataType.UInt64) for shape in ((2,), ())]
        args = (rows.grad, rows.q, k, v, rows.out, rows.lse, 0.0, causal, *none, self.scale, *added)
        if rows.grad_lse is None and self.r.type(k).shape[2] == self.r.type(rows.q).shape[2]:
            return self.r.call("sdpfa_bwd", *args)
        grad_q = self.r.call("sdpfa_bwd_q", *args, rows.grad_lse)
        return (grad_q, *self.r.call("sdpfa_bwd_kv", *args, rows.grad_lse))
