"""aten ops that torch itself computes on each rank: on whole tensors, or on whole items of a batch that is cut.

Such an op has no counterpart among a definition's. What its dims are made of is said by `Items`; `explain` and bills
show it as `whole_` or `items_` and its name.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...definition.tensor_view import TensorView
from ...dtypes import from_torch
from ...ops.notation import Dim, Notation
from ...ops.opdef import Emit, OpDef
from ...ops.rules import Rule
from ...ops.values import Param, ParamKind, TensorType
from .table import Translation

# Of every dim of a tensor its name: dims of one name are cut alike, and a capital letter says that a dim is needed
# whole. "" is a dim of size 1 that is repeated.
Names = tuple[str, ...]


class Items(NamedTuple):
    """The names of the dims of all operands and all results."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]


# From the shapes of operands and results; None for a result that nobody asked for.
Shapes = Sequence[Any]
Form = Callable[[Shapes, Shapes], Items]


def whole(operands: Shapes, results: Shapes) -> Items:
    """Every dim is needed whole."""
    return Items(*(tuple(("D",) * len(s or ()) for s in side) for side in (operands, results)))


def trailing(*counts: int) -> Form:
    """Items of as many last dims as said, for each operand and then each result; a batch of them in front.

    Dims of the batch are broadcast.
    """

    def form(operands: Shapes, results: Shapes) -> Items:
        given = counts if len(counts) == len(operands) + len(results) else counts * (len(operands) + len(results))
        shapes = (*operands, *results)
        given = [min(n, len(s or ())) for s, n in zip(shapes, given, strict=True)]  # what is not wanted may be empty
        batches = [None if s is None else s[: len(s) - n] for s, n in zip(shapes, given, strict=True)]
        found = [batch for batch in batches if batch is not None]
        size = {p: max(s[-p] for s in found if len(s) >= p) for p in range(1, 1 + max(map(len, found)))}
        made = found[len(operands) :]
        cut = {p for p, n in size.items() if all(len(s) >= p and s[-p] == n for s in made)}
        named = [(*_of_batch(s or (), size, cut), *("D",) * n) for s, n in zip(batches, given, strict=True)]
        return Items(tuple(named[: len(operands)]), tuple(named[len(operands) :]))

    return form


def _of_batch(shape: Sequence[int], size: dict[int, int], cut: set[int]) -> Names:
    places = range(len(shape), 0, -1)
    return tuple("" if shape[-p] != size[p] else f"b{p}" if p in cut else f"B{p}" for p in places)


def along(dims: Any, dropped: bool = False) -> Form:
    """One operand, of which some dims are needed whole; results have all of its dims, or with `dropped` not these."""

    def form(operands: Shapes, results: Shapes) -> Items:
        (shape,) = operands
        chosen = {d % max(len(shape), 1) for d in ([dims] if isinstance(dims, int) else dims)}
        names = tuple("D" if d in chosen else f"b{d}" for d in range(len(shape)))
        made = tuple(name for name in names if name != "D") if dropped else names
        return Items((names,), tuple(made if s is None or len(made) == len(s) else ("D",) * len(s) for s in results))

    return form


def torch_call(t: Translation, form: Form, target: Any, *args: Any, **kwargs: Any) -> Any:
    """The results of a function of torch's, computed by torch on each rank's part.

    target: an op of torch's, or a function of the same name on every rank.
    args, kwargs: those of the target, in which tensors are TensorViews.
    """
    tensors: list[TensorView] = []
    places = _places((args, kwargs), tensors)
    told = t.results if isinstance(t.results, (tuple, list)) else (t.results,)
    types = tuple(TensorType(tuple(t.sizes.shape(x)), from_torch(x.dtype)) for x in told if x is not None)
    items = form([x.type.shape for x in tensors], [None if x is None else t.sizes.shape(x) for x in told])
    asked = tuple(names for names, x in zip(items.results, told, strict=True) if x is not None)
    items = items._replace(results=asked)
    made = t.fd.call(_op(target, places, types, items), tensors)
    if not isinstance(t.results, (tuple, list)):
        return made
    found = iter(made if isinstance(made, tuple) else (made,))
    return tuple(None if x is None else next(found) for x in told)  # results that nobody asked for


def torch_rule(target: Any, form: Form) -> Callable[..., Any]:
    """A rule by which torch computes an op on each rank's part, with the op's own arguments."""

    def write(t: Translation, *args: Any, **kwargs: Any) -> Any:
        return torch_call(t, form, target, *args, **kwargs)

    return write


class _Operand(int):
    """The place of a tensor among the operands."""


def _places(value: Any, tensors: list[TensorView]) -> Any:
    """Arguments with places in the order of operands in the place of tensors."""
    if isinstance(value, TensorView):
        tensors.append(value)
        return _Operand(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return tuple(_places(entry, tensors) for entry in value)
    if isinstance(value, dict):
        return tuple((key, _places(entry, tensors)) for key, entry in value.items())
    return value


def _filled(form: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(form, _Operand):
        return tensors[form]
    return [_filled(entry, tensors) for entry in form] if isinstance(form, tuple) else form


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return target.__name__ if schema is None else str(target).partition(".")[2].removesuffix(".default")


@functools.lru_cache(maxsize=1024)
def _op(target: Any, places: Any, types: tuple[TensorType, ...], items: Items) -> OpDef:
    """The op of one form of call: the tensors are its parameters, all else is fixed."""
    digest = hashlib.blake2b(repr((_name(target), places, types, items)).encode(), digest_size=4).hexdigest()
    is_whole = all(_is_whole(name) for names in (*items.operands, *items.results) for name in names)
    name = f"{'whole' if is_whole else 'items'}_{_name(target).strip('_').replace('.', '_')}_{digest}"
    args, kwargs = places

    def compute(*tensors: torch.Tensor) -> Any:
        given = {key: _filled(value, tensors) for key, value in kwargs}
        made = target(*[_filled(arg, tensors) for arg in args], **given)
        found = [x for x in made if x is not None] if isinstance(made, (tuple, list)) else [made]
        return found[0].contiguous() if len(types) == 1 else tuple([x.contiguous() for x in found])

    params = tuple(Param(f"x{i}", ParamKind.TENSOR) for i in range(len(items.operands)))
    return OpDef(
        name, params, lambda call: types, lambda call: _rule(items, call.types, types), _emit, compute=compute,
        nvfuser="an op of torch",
    )  # fmt: skip


def _is_whole(name: str) -> bool:
    return not name or name[0].isupper()


def _rule(items: Items, operands: Sequence[TensorType], results: Sequence[TensorType]) -> Rule:
    """The factor rule; a dim that some results lack is needed whole."""
    sides = [
        tuple(tuple(_dim(i, d, name) for d, name in enumerate(names)) for i, names in enumerate(side, start))
        for side, start in ((items.operands, 0), (items.results, len(items.operands)))
    ]
    kept = [{f for dim in dims for f in dim.factors} for dims in sides[1]]
    every = Notation("", (*sides[0], *sides[1]), ())
    blocked = [f for f in every.letters() if _is_whole(f) or not all(f in made for made in kept)]
    return Notation("", *sides).rule(every.sizes((*operands, *results), {}), blocked, "sum")


def _dim(tensor: int, place: int, name: str) -> Dim:
    """A dim; those that are needed whole are each a factor of its own."""
    return Dim((f"{name}_{tensor}_{place}" if _is_whole(name) else name,) if name else ())


def _emit(e: Emit) -> str | tuple[str, ...]:
    """Text of the call; nothing is called on a rank that has nothing of a result."""
    shapes, types = e.result_shapes, e.call.results
    if any(math.prod(shape) == 0 < t.numel for shape, t in zip(shapes, types, strict=True)):
        return tuple(
            f"K.neutral({s}, 'sum', torch.{t.dtype.value}, device)" for s, t in zip(shapes, types, strict=True)
        )
    kinds = "".join(f", ({s}, torch.{t.dtype.value})" for s, t in zip(shapes, types, strict=True))
    name = e.call.op.name
    return f"K.checked_results({name!r}, OP.{name}({', '.join(e.operands)}){kinds})"
