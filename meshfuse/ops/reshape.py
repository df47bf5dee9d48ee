"""Reshape: dims are merged and split."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..dtypes import DataType
from ..errors import user_error
from .nvfuser_lowering import with_local_shape
from .opdef import Call, Emit, OpDef, Partial, Sample
from .rules import Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, known_size
from .values import Param, ParamKind, ScalarRef, TensorType
from .vjp import each, sizes

K = ParamKind


def inferred_shape(shape: Sequence[int], wanted: Sequence[object]) -> tuple[int, ...]:
    """The new shape, with its one -1 worked out. Sizes that are scalars of the definition stay -1.

    Raises DefinitionError where the numbers of elements differ.
    """
    sizes = [known_size(n) for n in wanted]
    open_places = [i for i, n in enumerate(wanted) if not isinstance(n, ScalarRef) and n == -1]
    if len(open_places) > 1:
        raise user_error("reshape: more than one size is -1", str(list(wanted)), "at most one", "Name the others.")
    if UNKNOWN in shape or any(isinstance(n, ScalarRef) for n in wanted):
        return tuple(sizes)
    known = math.prod(n for n in sizes if n >= 0)
    if open_places:
        sizes[open_places[0]] = math.prod(shape) // known if known else 0
    if math.prod(sizes) != math.prod(shape):
        raise user_error(
            "reshape: the numbers of elements differ", f"{list(shape)} to {list(wanted)}",
            f"{math.prod(shape)} elements", "Check the new shape.",
        )  # fmt: skip
    return tuple(sizes)


def _infer(call: Call) -> tuple[TensorType, ...]:
    return (TensorType(inferred_shape(call.types[0].shape, call["new_shape"]), call.types[0].dtype),)


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive dims, before and after, with equal products; without dims of size 1."""
    left, right = [d for d, n in enumerate(a) if n != 1], [d for d, n in enumerate(b) if n != 1]
    groups, i, j = [], 0, 0
    while i < len(left):
        before, after = [left[i]], [right[j]]
        i, j, p, q = i + 1, j + 1, a[left[i]], b[right[j]]
        while p != q:
            if p < q:
                before.append(left[i])
                i, p = i + 1, p * a[left[i]]
            else:
                after.append(right[j])
                j, q = j + 1, q * b[right[j]]
        groups.append((before, after))
    return groups


def _ones(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (before, after) of dims of size 1 with as many elements in front of them: [1, 6, 4] -> [1, 24]."""
    left, right = ([(math.prod(shape[:d]), d) for d, n in enumerate(shape) if n == 1] for shape in (a, b))
    found = list[tuple[int, int]]()
    for place, d in left:
        same = [new for before, new in right if before == place and new not in [taken for _, taken in found]]
        found += [(d, same[0])] if same else []
    return found


class _Matcher:
    """The factors of one group of dims before and after.

    Common factors are split off from the minor end, then from the major end; the rest is blocked. [4, 6] -> [24] has
    the factors 4 and 6, and the new dim is (4, 6).
    """

    def __init__(self, builder: RuleBuilder, before: list[int], after: list[int]):
        self.builder = builder
        self.rest = (list(before), list(after))
        self.minor: tuple[list[list[int]], list[list[int]]] = ([[] for _ in before], [[] for _ in after])
        self.major: tuple[list[list[int]], list[list[int]]] = ([[] for _ in before], [[] for _ in after])

    def run(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        self._peel(minor=True)
        self._peel(minor=False)
        return self._side(0), self._side(1)

    def _peel(self, minor: bool) -> None:
        a, b = self.rest
        i, j = (len(a) - 1, len(b) - 1) if minor else (0, 0)
        step = -1 if minor else 1
        while 0 <= i < len(a) and 0 <= j < len(b):
            common = math.gcd(a[i], b[j])
            fits = common in (a[i], b[j]) if minor else True
            if not fits or (common == 1 and a[i] > 1 and b[j] > 1):
                return
            self._take(i, j, common, minor)
            if not minor and a[i] > 1 and b[j] > 1:
                return
            i, j = i + (step if a[i] == 1 else 0), j + (step if b[j] == 1 else 0)

    def _take(self, i: int, j: int, size: int, minor: bool) -> None:
        factor = self.builder.factor(size)
        for side, dim in ((0, i), (1, j)):
            self.rest[side][dim] //= size
            target = (self.minor if minor else self.major)[side][dim]
            target[:] = [*factor, *target] if minor else [*target, *factor]

    def _side(self, side: int) -> list[tuple[int, ...]]:
        out = []
        for major, rest, minor in zip(self.major[side], self.rest[side], self.minor[side], strict=True):
            blocked = self.builder.blocked(rest) if rest > 1 else ()
            out.append((*major, *blocked, *minor))
        return out


def reshape_rule(call: Call) -> Rule:
    """Merged and split dims as products of common factors (GSPMD's and Shardy's reshape rule)."""
    before, after, builder = call.types[0].shape, call.results[0].shape, RuleBuilder()
    if 0 in before:
        return builder.build([tuple(map(builder.blocked, before))], [tuple(map(builder.blocked, after))])
    left: list[tuple[int, ...]] = [()] * len(before)
    right: list[tuple[int, ...]] = [()] * len(after)
    for dims, new_dims in _groups(before, after):
        matched = _Matcher(builder, [before[d] for d in dims], [after[d] for d in new_dims]).run()
        for d, factors in zip(dims, matched[0], strict=True):
            left[d] = factors
        for d, factors in zip(new_dims, matched[1], strict=True):
            right[d] = factors
    for d, new in _ones(before, after):
        left[d] = right[new] = builder.dim(1)
    operand, result = tuple(left), tuple(right)
    return builder.build([operand], [result])


def reshape_emit(e: Emit) -> str:
    """Python text of the operand in the result's local shape."""
    return f"{e.operands[0]}.reshape({list(e.result_shapes[0])})"


def _samples() -> list[Sample]:
    def sample(before: tuple[int, ...], after: list[int]) -> Sample:
        return Sample((TensorType(before, DataType.Float), after))

    return [sample((4, 6), [24]), sample((24,), [4, 6]), sample((4, 6), [2, 2, 6]), sample((6, 4), [8, 3]),
            sample((2, 3, 4), [6, 4]), sample((2, 12), [2, 3, 4]), sample((1, 6), [6, 1])]  # fmt: skip


OPS = (
    OpDef("reshape", (Param("arg", K.TENSOR), Param("new_shape", K.SHAPE)), _infer, reshape_rule, reshape_emit,
          Partial.MOVE, samples=_samples, nvfuser=with_local_shape("new_shape"),
          vjp=each(arg=lambda b: b.ops.reshape(b.grad, sizes(b["arg"]))), concat_distributive=True, is_view=True,
          keeps_elements=True, is_cheap=True,
          about="the same elements in row-major order under another shape; a -1 is worked out"),
)  # fmt: skip
