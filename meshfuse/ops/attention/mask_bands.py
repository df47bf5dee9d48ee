"""Which masks of attention are bands: causal, a sliding window, all seen. Told from the ops that a mask is made by.

Models write masks as comparisons of positions (`arange(s)[:, None] >= arange(s)`). A mask that is known to be causal
needs no tensor: half of the scores are then left out, and flash attention and the ring take it. What is known of a
tensor is either `Places` (numbers that are affine in the indices) or a `Band` (bools). Dims are counted from the last,
as broadcasting aligns them; sizes may be open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...dtypes import Category, DataType
from ..opdef import Call
from ..shape_arithmetic import UNKNOWN
from ..values import TensorRef, TensorType
from ..vjp import listed_dims

_INF = math.inf


@dataclass(frozen=True, slots=True)
class Band:
    """True where low <= row - column <= high, of the last two dims; low may be -inf and high inf."""

    low: float = -_INF
    high: float = _INF

    def within(self, rows: int, columns: int) -> Band:
        """The same on this many rows and columns, with no bound that bounds nothing; sizes of -1 are open."""
        low = -_INF if columns != UNKNOWN and self.low <= 1 - columns else self.low
        high = _INF if rows != UNKNOWN and self.high >= rows - 1 else self.high
        return Band(low, high)

    @property
    def sees_all(self) -> bool:
        return (self.low, self.high) == (-_INF, _INF)

    @property
    def is_causal(self) -> bool:
        """Whether a row sees exactly the columns up to its own."""
        return (self.low, self.high) == (0, _INF)

    @property
    def window(self) -> int | None:
        """How many columns a row of a sliding window sees, itself and those before it; None for any other band."""
        return int(self.high) + 1 if self.low == 0 and 0 <= self.high < _INF else None


@dataclass(frozen=True, slots=True)
class Places:
    """offset + the sum of step * index over dims, by dim as counted from the last (-1)."""

    offset: int
    steps: tuple[tuple[int, int], ...] = ()


class _Recorded(Protocol):
    """What is read of a `definition.Recording`."""

    tensors: Any

    def producer(self, tensor: int) -> Any: ...


_Known = Places | Band | None


def seen_band(recording: _Recorded, mask: int) -> Band | None:
    """The band that a mask of bools is, by its number in a recording; None where that is not known before it runs."""
    kind = recording.tensors[mask].type
    found = _known(recording, mask, {})
    if not isinstance(found, Band) or kind.ndim < 2:
        return None
    return found.within(*kind.shape[-2:])


def _known(recording: _Recorded, tensor: int, seen: dict[int, _Known]) -> _Known:
    if tensor in seen:
        return seen[tensor]
    node, found = recording.producer(tensor), None
    rule = None if node is None else _RULES.get(node.op.name)
    if node is not None and rule is not None:
        given = [_known(recording, i, seen) for i in node.inputs]
        call = Call(node.op, node.args, node.form.types, (recording.tensors[tensor].type,))
        spread = zip(given, node.form.types, strict=True)
        given = [None if _is_repeated(call, x, kind) else x for x, kind in spread]
        found = rule(call, _operands(call, given))
    seen[tensor] = found
    return found


def _is_repeated(call: Call, x: _Known, kind: TensorType) -> bool:
    """Whether a band of one row or column is repeated: the others are as that one, and no band."""
    if not isinstance(x, Band) or x in (Band(), _NOTHING):
        return False
    pairs = zip((1, 1, *kind.shape)[-2:], (1, 1, *call.results[0].shape)[-2:], strict=True)
    return any(n == 1 != m for n, m in pairs)


def _operands(call: Call, given: list[_Known]) -> list[_Known]:
    """What is known of tensors and numbers among the arguments, in order."""
    left, found = iter(given), list[_Known]()
    for arg in call.args:
        if isinstance(arg, TensorRef):
            found.append(next(left))
        elif isinstance(arg, int):
            found.append(Places(int(arg)))
    return found


# numbers ----------------------------------------------------------------------------------------------------------


def _iota(call: Call, _: list[_Known]) -> _Known:
    start, step = 0 if call["start"] is None else call["start"], 1 if call["step"] is None else call["step"]
    exact = isinstance(start, int) and isinstance(step, int) and call["dtype"].category is Category.INTEGER
    return Places(start, ((-1, step),)) if exact else None


def _full(call: Call, _: list[_Known]) -> _Known:
    value = call["fill_value"]
    if call["dtype"] is DataType.Bool and isinstance(value, (bool, int)):
        return Band() if value else _NOTHING
    return Places(value) if isinstance(value, int) and call["dtype"].category is Category.INTEGER else None


_NOTHING = Band(_INF, -_INF)


def _sum_of(sign: int) -> Callable[[Call, list[_Known]], _Known]:
    def rule(_: Call, given: list[_Known]) -> _Known:
        a, b = (*given, None)[:2]
        return _combined(a, b, sign) if isinstance(a, Places) and isinstance(b, Places) else None

    return rule


def _combined(a: Places, b: Places, sign: int) -> Places:
    steps = dict(a.steps)
    for dim, step in b.steps:
        steps[dim] = steps.get(dim, 0) + sign * step
    return Places(a.offset + sign * b.offset, tuple(sorted((d, s) for d, s in steps.items() if s)))


def _neg(_: Call, given: list[_Known]) -> _Known:
    return _combined(Places(0), given[0], -1) if isinstance(given[0], Places) else None


def _cast(call: Call, given: list[_Known]) -> _Known:
    before, after = call.types[0].dtype, call.results[0].dtype
    stays = before is after or (before.category is Category.INTEGER and after in (DataType.Int, DataType.Int32))
    return given[0] if stays else None


# comparisons ------------------------------------------------------------------------------------------------------


def _compared(least: int | None, most: int | None) -> Callable[[Call, list[_Known]], _Known]:
    """The rule of a comparison that holds where the first operand less the second is from `least` to `most`."""

    def rule(call: Call, given: list[_Known]) -> _Known:
        a, b = (*given, None)[:2]
        if not (isinstance(a, Places) and isinstance(b, Places)):
            return None
        low, high = -_INF if least is None else least, _INF if most is None else most
        return _where_between(_combined(a, b, -1), low, high, call.results[0])

    return rule


def _where_between(x: Places, low: float, high: float, kind: TensorType) -> _Known:
    """The band in which low <= x <= high: x must be row - column, or the opposite, and a number."""
    sizes = (1, 1, *kind.shape)
    steps = {dim: step for dim, step in x.steps if sizes[dim] != 1}
    if not steps:
        return Band() if low <= x.offset <= high else _NOTHING
    # The one row of a mask of one row is row 0, and so with columns.
    row = steps.get(-2, -steps.get(-1, 0) if sizes[-2] == 1 else 0)
    column = steps.get(-1, -row if sizes[-1] == 1 else 0)
    if (row, column) == (1, -1) and set(steps) <= {-1, -2}:
        return Band(low - x.offset, high - x.offset)
    if (row, column) == (-1, 1) and set(steps) <= {-1, -2}:
        return Band(x.offset - high, x.offset - low)
    return None


def _and(_: Call, given: list[_Known]) -> _Known:
    a, b = (*given, None)[:2]
    if _NOTHING in (a, b):
        return _NOTHING
    if not (isinstance(a, Band) and isinstance(b, Band)):
        return None
    both = Band(max(a.low, b.low), min(a.high, b.high))
    return both if both.low <= both.high else _NOTHING


def _or(_: Call, given: list[_Known]) -> _Known:
    a, b = (*given, None)[:2]
    if not (isinstance(a, Band) and isinstance(b, Band)):
        return Band() if Band() in (a, b) else None
    if _NOTHING in (a, b):
        return b if a == _NOTHING else a
    apart = max(a.low, b.low) > min(a.high, b.high) + 1
    return None if apart else Band(min(a.low, b.low), max(a.high, b.high))


def _not(_: Call, given: list[_Known]) -> _Known:
    (a,) = given
    if not isinstance(a, Band):
        return None
    if a == _NOTHING or a.sees_all:
        return Band() if a == _NOTHING else _NOTHING
    if a.high == _INF:
        return Band(-_INF, a.low - 1)
    return Band(a.high + 1, _INF) if a.low == -_INF else None


def _triu(call: Call, given: list[_Known]) -> _Known:
    """Columns from the row's own and `diagonal` on."""
    return _and(call, [given[0], Band(-_INF, -call["diagonal"])]) if isinstance(given[0], Band) else None


# shapes -----------------------------------------------------------------------------------------------------------


def _same(_: Call, given: list[_Known]) -> _Known:
    return given[0]


def _moved(x: _Known, dims: Mapping[int, int]) -> _Known:
    """With the dims of x, counted from the last, at other places; a band keeps its own, or is not known."""
    if isinstance(x, Places):
        return Places(x.offset, tuple(sorted((dims[d], step) for d, step in x.steps)))
    stays = isinstance(x, Band) and (x in (Band(), _NOTHING) or all(dims.get(d) == d for d in (-1, -2)))
    return x if stays else None


def _broadcast(call: Call, given: list[_Known]) -> _Known:
    flags = call["is_broadcast_dim"]
    return _moved(given[0], _by_place([d for d, new in enumerate(flags) if not new], len(flags)))


def _broadcast_in_dim(call: Call, given: list[_Known]) -> _Known:
    return _moved(given[0], _by_place(call["broadcast_dims"], call.results[0].ndim))


def _by_place(kept: Any, ndim: int) -> dict[int, int]:
    """By dim of an operand, counted from the last, its dim in a result of `ndim` dims that has it at `kept`."""
    return {i - len(kept): d - ndim for i, d in enumerate(kept)}


def _squeeze(call: Call, given: list[_Known]) -> _Known:
    ndim = call.types[0].ndim
    gone = listed_dims(call["dims"], ndim)
    left = [d for d in range(ndim) if d not in gone]
    places = {d - ndim: i - len(left) for i, d in enumerate(left)}
    x = given[0]
    if isinstance(x, Places):  # The one index of a dim of size 1 is 0.
        x = Places(x.offset, tuple(step for step in x.steps if step[0] in places))
    return _moved(x, places)


def _reshape(call: Call, given: list[_Known]) -> _Known:
    """One that adds and drops dims of size 1."""
    before, after = ([(d - t.ndim, n) for d, n in enumerate(t.shape) if n != 1] for t in (*call.types, *call.results))
    if [n for _, n in before] != [n for _, n in after] or sum(n == UNKNOWN for _, n in before) > 1:
        return None
    places = {old: new for (old, _), (new, _) in zip(before, after, strict=True)}
    x = given[0]
    if isinstance(x, Places):
        return _moved(Places(x.offset, tuple(step for step in x.steps if step[0] in places)), places)
    return _moved(x, places)


def _permute(call: Call, given: list[_Known]) -> _Known:
    order, ndim = call["dims"], call.types[0].ndim
    return _moved(given[0], {d % ndim - ndim: i - ndim for i, d in enumerate(order)})


def _slice(call: Call, given: list[_Known]) -> _Known:
    """Rows and columns of a slice are counted anew."""
    starts, x, ndim = call["start_indices"], given[0], call.types[0].ndim
    if any(step != 1 for step in call["strides"] or ()) or not all(isinstance(a, int) and a >= 0 for a in starts):
        return None
    starts = [min(a, n) if n != UNKNOWN else a for a, n in zip(starts, call.types[0].shape, strict=True)]
    if isinstance(x, Places):
        return Places(x.offset + sum(step * starts[d] for d, step in x.steps), x.steps)
    if isinstance(x, Band) and ndim >= 2:
        shift = starts[-1] - starts[-2]
        return Band(x.low + shift, x.high + shift)
    return None


_RULES: dict[str, Callable[[Call, list[_Known]], _Known]] = {
    "iota": _iota, "full": _full, "add": _sum_of(1), "sub": _sum_of(-1), "neg": _neg, "cast": _cast,
    "ge": _compared(0, None), "gt": _compared(1, None), "le": _compared(None, 0), "lt": _compared(None, -1),
    "eq": _compared(0, 0), "logical_and": _and, "bitwise_and": _and, "mul": _and, "logical_or": _or,
    "bitwise_or": _or, "logical_not": _not, "bitwise_not": _not, "triu": _triu, "broadcast": _broadcast,
    "broadcast_in_dim": _broadcast_in_dim, "squeeze": _squeeze, "reshape": _reshape, "permute": _permute,
    "slice": _slice,
    **dict.fromkeys(("set", "segment_set", "expand", "stride_order"), _same),
}  # fmt: skip
