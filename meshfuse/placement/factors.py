"""From shardings of tensors to layouts of an op's factors, and back."""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..dtypes import Category, DataType, is_negative_zero
from ..fast_dataclass import quickly_made
from ..mesh import DeviceMesh
from ..ops.opdef import Call, Partial
from ..ops.rules import DimFactors, FactorKind, Rule
from ..ops.values import ParamKind, ScalarRef, TensorRef, TensorType
from ..reshard.steps import Step, group_size
from ..sharding import layout as lay
from ..sharding.layout import WHOLE, Layout, Split
from ..sharding.value import Sharding, canonical_partial, conflicting

Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Carry:
    """Unreduced axes that pass through an op: on these operands, to all its results."""

    axes: tuple[Split, ...]
    reduce: str
    operands: tuple[int, ...]


NO_CARRY = Carry((), "", ())


@functools.lru_cache(maxsize=1 << 16)
def layouts_of(rule: Rule, dims: DimFactors, shape: tuple[int, ...], layouts: Layouts) -> Layouts:
    """The factor layouts that a tensor in these layouts asks for; WHOLE for factors it lacks or that are blocked."""
    out = [WHOLE] * len(rule.factors)
    for factors, n, layout in zip(dims, shape, layouts, strict=True):
        if not layout or not factors:
            continue
        sizes = tuple(rule.factors[f].size for f in factors)
        open_ = tuple(rule.factors[f].kind is not FactorKind.BLOCK for f in factors)
        parts = lay.project(layout, n, sizes)
        if parts is None or any(lay.axes(part) and not free for part, free in zip(parts, open_, strict=True)):
            parts = _spread(lay.axes(layout), sizes, open_)
        for factor, part, free in zip(factors, parts, open_, strict=True):
            out[factor] = part if free else WHOLE
    return tuple(out)


def _spread(axes: Sequence[Split], sizes: tuple[int, ...], open_: tuple[bool, ...]) -> Layouts:
    """Axes of a dim whose splits do not fall between its factors, or fall on a blocked one, given to the other factors.

    Axes are taken apart for that: 8 ranks on 12 heads of 128 become 4 on the heads and 2 inside. What divides no factor
    is left out.
    """
    out: list[list[Split]] = [[] for _ in sizes]
    room = [size if free else 1 for size, free in zip(sizes, open_, strict=True)]
    for split in axes:
        left, pre = split.size or 1, split.pre
        for place, size in enumerate(room):
            part = math.gcd(left, size)
            if part > 1:
                out[place].append(Split(part, split.axis, pre))
                room[place], left, pre = size // part, left // part, pre * part
    return tuple(lay.canonical(tuple(splits), size) for splits, size in zip(out, sizes, strict=True))


@functools.lru_cache(maxsize=1 << 16)
def displaced(rule: Rule, dims: DimFactors, shape: tuple[int, ...], layouts: Layouts) -> tuple[Layouts, ...]:
    """As `layouts_of`, with the axes that it leaves out (of blocked dims, say) on the tensor's roomiest others.

    The tensor gets there by an all-to-all, which moves an n-th of what gathering the dim would (attention from rows to
    heads: Jacobs et al. 2023, DeepSpeed Ulysses). If that dim has fewer steps than the axis has ranks, a part of the
    axis goes there that divides the steps; or all of it, if that leaves fewer than half of the ranks idle: seven of
    eight ranks then have one of seven heads each. Empty where no axis can move.
    """
    if not any(layouts):
        return ()
    before = layouts_of(rule, dims, shape, layouts)
    kept = [axis for layout in before for axis in lay.axes(layout)]
    lost = [a for layout in layouts for a in lay.axes(layout) if not any(conflicting(a, k) for k in kept)]
    free = [f for factors in dims for f in factors if rule.factors[f].kind is FactorKind.PASS]
    ways = [_with_lost(rule, before, lost, free, idle) for idle in (False, True)] if lost and free else []
    return tuple(dict.fromkeys(way for way in ways if way != before))


def _with_lost(rule: Rule, layouts: Layouts, lost: Sequence[Split], free: Sequence[int], idle: bool) -> Layouts:
    out = list(layouts)
    for axis in lost:
        size, best, room = axis.size or 1, *_roomiest(rule, free, out, axis.size or 1)
        part = size if room >= size or (idle and 2 * room > size) else math.gcd(size, room)
        if part > 1:
            # The minor part, so that what other operands have of the axis may still go before it.
            minor = axis._replace(size=part, pre=axis.pre * (size // part))
            out[best] = lay.canonical((*out[best], minor), rule.factors[best].size)
    return tuple(out)


@functools.lru_cache(maxsize=1 << 12)
def reduces(rule: Rule) -> bool:
    """Whether the op reduces some factor."""
    return any(factor.kind is FactorKind.REDUCE for factor in rule.factors)


@functools.lru_cache(maxsize=1 << 14)
def moved(rule: Rule, layouts: Layouts, axis: Split, side: tuple[int, ...]) -> Layouts | None:
    """The layouts with an axis moved to the roomiest factor in `side`; None where it divides none of them."""
    left = [tuple(split for split in layout if not (split.bound and conflicting(split, axis))) for layout in layouts]
    out = [lay.canonical(layout, factor.size) for layout, factor in zip(left, rule.factors, strict=True)]
    best, room = _roomiest(rule, side, out, axis.size or 1)
    if room % (axis.size or 1) or not room:
        return None
    out[best] = lay.canonical((*out[best], axis), rule.factors[best].size)
    return tuple(out)


def _roomiest(rule: Rule, free: Sequence[int], layouts: Sequence[Layout], ways: int) -> tuple[int, int]:
    """The factor with the most steps left to split, and how many; factors that `ways` divides come first."""
    room = {f: rule.factors[f].size // lay.extent(layouts[f]) for f in free}
    best = max(free, key=lambda f: (room[f] > 0 and room[f] % ways == 0, room[f]))
    return best, room[best]


def merged(votes: Sequence[Layouts], taken: Sequence[Split] = (), beyond: bool = False) -> Layouts:
    """One layout per factor from votes: later votes only refine, and no part of an axis is used twice.

    Where a vote's layout has an axis that is used already, it is cut off there; with `beyond` it goes on without that
    axis, as if that axis alone were gathered. `taken` are axes that may not be used at all.
    """
    return _merged(tuple(votes), tuple(taken), beyond)


@functools.lru_cache(maxsize=1 << 15)
def _merged(votes: tuple[Layouts, ...], taken: tuple[Split, ...], beyond: bool) -> Layouts:
    out = [WHOLE] * len(votes[0]) if votes else []
    used, unused = list(taken), _unused_beyond if beyond else _unused
    for vote in votes:
        for factor, layout in enumerate(vote):
            old = out[factor]
            if layout and layout != old and lay.is_prefix(old, layout):
                added = unused(layout[len(old) :], used)
                out[factor] = (*old, *added)
                used.extend(lay.axes(added))
    return tuple(out)


def _unused(layout: Layout, used: Sequence[Split]) -> Layout:
    """The most major splits of a layout, up to the first that is used already, and what is still free of that one."""
    out: list[Split] = []
    for split in layout:
        clashes = [u for u in used if split.bound and conflicting(split, u)]
        if clashes:
            out.append(_free_part(split, clashes))
            break
        out.append(split)
    return _up_to_axes(out)


def _unused_beyond(layout: Layout, used: Sequence[Split]) -> Layout:
    """The whole layout, with splits that are used already left unbound."""
    out: list[Split] = []
    for split in layout:
        free = not split.bound or any(conflicting(split, u) for u in used)
        if free and out and not out[-1].bound:
            out[-1] = Split((out[-1].size or 1) * (split.size or 1))
        else:
            out.append(Split(split.size) if free else split)
    return _up_to_axes(out)


def _up_to_axes(splits: list[Split]) -> Layout:
    """The splits without the unbound ones at the minor end."""
    while splits and not (splits[-1].bound and splits[-1].size != 1):
        splits.pop()
    return tuple(splits)


def _free_part(split: Split, clashes: Sequence[Split]) -> Split:
    """The most major part of an axis that none of the clashing splits uses."""
    assert split.size is not None
    start = min(clash.pre for clash in clashes)
    fits = start > split.pre and start % split.pre == 0 and split.size % (start // split.pre) == 0
    return split._replace(size=start // split.pre if fits else 1)


def tensor_layouts(rule: Rule, dims: DimFactors, shape: tuple[int, ...], layouts: Layouts) -> Layouts | None:
    """The layouts of a tensor's dims; None where a merged dim cannot be laid out so, or only in too many runs."""
    out = []
    for factors, n in zip(dims, shape, strict=True):
        if not factors:
            out.append(WHOLE)
            continue
        if len(factors) == 1 and rule.factors[factors[0]].size == n:
            out.append(layouts[factors[0]])
            continue
        joined = lay.concat(tuple([layouts[f] for f in factors]), tuple([rule.factors[f].size for f in factors]), n)
        if joined is None or lay.pieces(joined) > lay.MOST_RUNS:
            return None
        out.append(joined)
    return tuple(out)


def representable(rule: Rule, layouts: Layouts) -> Layouts:
    """The layouts with those factors left whole that no merged dim could show.

    Below the most major factor of a merged dim these are uneven ones, and those that would have a rank hold the dim in
    too many runs.
    """
    minor = [f for f in _minor_factors(rule) if layouts[f]]
    if not minor:
        return layouts
    left = {f for f in minor if lay.extent(lay.padded(layouts[f], rule.factors[f].size)) != rule.factors[f].size}
    left |= {f for f, above in _far_apart(rule) if layouts[f] and _steps(rule, layouts, above) > lay.MOST_RUNS}
    return tuple([WHOLE if f in left else layout for f, layout in enumerate(layouts)]) if left else layouts


@functools.lru_cache(maxsize=1 << 12)
def _far_apart(rule: Rule) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(factor, the factors above it in some dim), where those above have more steps than a dim may have runs."""
    dims = [dim for tensor in (*rule.operands, *rule.results) for dim in tensor]
    pairs = {(factor, dim[:place]): None for dim in dims for place, factor in enumerate(dim) if place}
    return tuple(p for p in pairs if math.prod([rule.factors[f].size for f in p[1]]) > lay.MOST_RUNS)


def _steps(rule: Rule, layouts: Layouts, factors: tuple[int, ...]) -> int:
    """How many steps of these factors together a rank has."""
    ways = [group_size(lay.axes(layouts[f])) for f in factors]
    return math.prod([-(-rule.factors[f].size // way) for f, way in zip(factors, ways, strict=True)])


@functools.lru_cache(maxsize=1 << 12)
def _minor_factors(rule: Rule) -> tuple[int, ...]:
    """The factors below the most major one of some dim."""
    return tuple({factor: None for dims in (*rule.operands, *rule.results) for dim in dims for factor in dim[1:]})


@functools.lru_cache(maxsize=1 << 14)
def without_reductions(rule: Rule, layouts: Layouts) -> Layouts:
    """The layouts with reduced factors left whole."""
    pairs = zip(rule.factors, layouts, strict=True)
    return tuple(WHOLE if factor.kind is FactorKind.REDUCE else layout for factor, layout in pairs)


def following(call: Call, rule: Rule, operands: Sequence[Sharding]) -> tuple[Layouts | None, ...]:
    """By result the dims that follow from the operands, the first operands first, if nothing may be left to reduce."""
    rows = zip(rule.operands, call.types, operands, strict=True)
    votes = [without_reductions(rule, layouts_of(rule, dims, t.shape, s.dims)) for dims, t, s in rows]
    agreed = representable(rule, merged(votes) if votes else (WHOLE,) * len(rule.factors))
    pairs = zip(rule.results, call.results, strict=True)
    return tuple(tensor_layouts(rule, dims, t.shape, agreed) for dims, t in pairs)


@quickly_made
@dataclass(frozen=True, slots=True)
class Placement:
    """Where an op is computed: its factors' layouts and, following from these, the shardings of operands and results.

    `ways` is the op's work divided by that of the rank with most of it. With a `step` the op is not computed: the step
    makes its result from its first operand. `exchange` are the axes over which both tokens and experts lie.
    """

    layouts: Layouts
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    carry: Carry = NO_CARRY
    step: Step | None = None
    ways: float = 1.0
    exchange: tuple[Split, ...] = ()


def placed(call: Call, rule: Rule, mesh: DeviceMesh, layouts: Layouts, carry: Carry = NO_CARRY) -> Placement | None:
    """The placement of an op on a mesh; None where a dim cannot be laid out so, or reductions would mix."""
    return placer(call.types, call.results, rule, mesh).placed(layouts, carry)


class _Placer:
    """Makes the placements on a mesh of every op with this rule on tensors of these types."""

    def __init__(self, types: tuple[TensorType, ...], made: tuple[TensorType, ...], rule: Rule, mesh: DeviceMesh):
        self.rule, self.mesh = rule, mesh
        self._operands = [(dims, t.shape) for dims, t in zip(rule.operands, types, strict=True)]
        self._results = [(dims, t.shape) for dims, t in zip(rule.results, made, strict=True)]
        self._known: dict[tuple[Layouts, Carry], Placement | None] = {}

    def placed(self, layouts: Layouts, carry: Carry) -> Placement | None:
        """A placement; None where a dim cannot be laid out so, or reductions would mix."""
        key = layouts, carry
        if key not in self._known:
            self._known[key] = self._made(layouts, carry)
        return self._known[key]

    def _made(self, layouts: Layouts, carry: Carry) -> Placement | None:
        rule, mesh = self.rule, self.mesh
        operand_dims = [tensor_layouts(rule, dims, shape, layouts) for dims, shape in self._operands]
        result_dims = [tensor_layouts(rule, dims, shape, layouts) for dims, shape in self._results]
        if None in operand_dims or None in result_dims:
            return None
        operands = [
            Sharding(mesh, dims, carry.axes, carry.reduce) if i in carry.operands else Sharding(mesh, dims)
            for i, dims in enumerate(operand_dims)
            if dims is not None
        ]
        left = [left_to_reduce(rule, layouts, result, carry) for result in range(len(rule.results))]
        if None in left:
            return None
        pairs = zip(result_dims, left, strict=True)
        results = [
            Sharding(mesh, dims, *partial) for dims, partial in pairs if dims is not None and partial is not None
        ]
        shares = [factor.size / lay.largest(layout, factor.size)
                  for factor, layout in zip(rule.factors, layouts, strict=True) if layout and factor.size]  # fmt: skip
        return Placement(layouts, tuple(operands), tuple(results), carry, ways=math.prod(shares))


placer = functools.lru_cache(maxsize=1 << 10)(_Placer)


@functools.lru_cache(maxsize=1 << 12)
def _sums(rule: Rule) -> tuple[tuple[int, ...], ...]:
    """For every result the factors that are reduced for it: reductions that are not among its dims."""
    reduced = [f for f, factor in enumerate(rule.factors) if factor.kind is FactorKind.REDUCE]
    return tuple(tuple(f for f in reduced if not any(f in dim for dim in dims)) for dims in rule.results)


def left_to_reduce(
    rule: Rule, layouts: Layouts, result: int, carry: Carry = NO_CARRY
) -> tuple[tuple[Split, ...], str] | None:
    """The axes that a result is unreduced over, and the reduction; None where two kinds of reductions would mix."""
    found = list(carry.axes)
    kinds = {carry.reduce} if carry.axes else set()
    for f in _sums(rule)[result]:
        axes = lay.axes(layouts[f])
        if axes:
            found.extend(axes)
            kinds.add(rule.factors[f].reduce)
    if len(kinds) > 1:
        return None
    return (canonical_partial(found), kinds.pop()) if found else ((), "")


def carries(call: Call, rule: Rule, available: Sequence[Sequence[Sharding]]) -> Carry | None:
    """What the op carries of its operands' unreduced axes to its results; None where it needs its operands reduced."""
    found = [next((s for s in shardings if s.partial), None) for shardings in available]
    partial = [(i, s) for i, s in enumerate(found) if s is not None]
    if not partial:
        return None
    first = partial[0][1]
    places = [i for i, _ in partial]
    same = all((s.partial, s.reduce, s.mesh) == (first.partial, first.reduce, first.mesh) for _, s in partial)
    if not same or not passes(call, rule, places, first.reduce):
        return None
    return Carry(first.partial, first.reduce, tuple(places))


def passes(call: Call, rule: Rule, partial: Sequence[int], reduce: str) -> bool:
    """Whether the op carries what is left to reduce of the operands at these places, the others being reduced."""
    kind, types = call.op.partial, call.types
    if kind is Partial.MOVE:
        return len(types) == 1
    if reduce != kind.reduce or kind is Partial.NONE:
        return False
    if kind in (Partial.MAX, Partial.MIN):
        return _converts(call, partial, _in_order)
    return _converts(call, partial, _by_terms) and _is_linear(call, rule, partial)


def _is_linear(call: Call, rule: Rule, partial: Sequence[int]) -> bool:
    """Whether the op is linear in these operands together, apart from what casts do."""
    kind = call.op.partial
    if kind is Partial.CAST:
        return True
    if kind is Partial.JOINT:
        return len(partial) == len(call.types) and _is_pure(call)
    if kind in (Partial.FIRST, Partial.OVER):
        first = isinstance(call.args[0], TensorRef)  # 1 / t is not linear in t
        floats = call.results[0].dtype.category >= Category.FLOAT or reduces(rule)
        return tuple(partial) == (0,) and first and floats and (kind is Partial.FIRST or _divides_safely(call.args[1]))
    if kind is Partial.PICKED:
        return tuple(partial) == _picked_from(call)
    return len(partial) == 1 and partial[0] < 2


def _divides_safely(divisor: object) -> bool:
    """Whether every term may be divided by this: by 0, a term that is 0 would be NaN where the sum is infinite."""
    return isinstance(divisor, int | float | complex) and divisor != 0 and cmath.isfinite(divisor)


def _picked_from(call: Call) -> tuple[int, ...] | None:
    """The places of the operands that an op picks elements from; None where it may also pick a number that is not 0.

    -0.0 is one: the terms of a sum of it would have to be -0.0 on every rank.
    """
    args = {param.name: arg for param, arg in zip(call.op.params, call.args, strict=True)}
    condition = isinstance(args.pop("condition", None), TensorRef)
    return None if any(map(_is_no_zero, args.values())) else tuple(range(condition, len(call.types)))


def _is_no_zero(arg: object) -> bool:
    """Whether an argument is a scalar, or a number other than 0."""
    return isinstance(arg, ScalarRef) or (
        isinstance(arg, int | float | complex) and (arg != 0 or is_negative_zero(arg))
    )


def _is_pure(call: Call) -> bool:
    """True where no operand is a number: t + 1 is not linear in t."""
    pairs = zip(call.op.params, call.args, strict=True)
    return all(isinstance(arg, TensorRef) for param, arg in pairs if param.kind is ParamKind.TENSOR_OR_SCALAR)


def _converts(call: Call, partial: Sequence[int], may: Callable[[DataType, DataType], bool]) -> bool:
    """Whether these operands may be cast to the results' types before they are reduced."""
    return all(may(call.types[i].dtype, made.dtype) for i in partial for made in call.results)


def _by_terms(old: DataType, new: DataType) -> bool:
    """Whether the terms of a sum may be cast one by one: sums of integers wrap, fractions are cut or rounded."""
    if old is new:
        return True
    return min(old.category, new.category) >= Category.FLOAT and (
        old.real is new.real or old.real.itemsize < new.real.itemsize
    )


def _in_order(old: DataType, new: DataType) -> bool:
    """Whether a cast keeps the order of numbers: one to integers of another sign and the same size does not."""
    return old is new or old.category < new.category or old.itemsize < new.itemsize
