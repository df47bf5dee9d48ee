"""A torch function with a factor rule, and the parts of an OpDef that follow from the two."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..dtypes import DataType
from ..kernels.table import kernel
from .blocks import block_size
from .halo import in_blocks, whole_again
from .local import plain_text
from .notation import Dim, Dims, Notation
from .opdef import Call, Emit, OpDef, Writing
from .rules import Rule
from .values import Param, ParamKind, TensorRef, TensorType

K = ParamKind
Function = Callable[..., Any]
# By factor, how many elements before and after its own the function sees; and so for every operand.
Widths = Mapping[str, tuple[int, int]]
Halos = tuple[Widths, ...]
_BLOCK = "blocks~"


@dataclass(frozen=True, slots=True, eq=False)
class TorchOp:
    """The options of `torch_op`, and the parts of an OpDef that follow from them.

    halos: by operand and factor, how many elements (before, after) its own the function sees in a call.
    crop: for a gradient, the operand that it is of, and that op's own halos: what the function gives too much is cut.
    block: for an op on blocks of a factor, that factor; else "".
    """

    name: str
    notation: Notation
    function: Function
    params: tuple[Param, ...]
    blocked: tuple[str, ...]
    reduce: str
    halos: Callable[[Call], Halos]
    fills: tuple[Any, ...]
    sizes: Callable[[Call], Mapping[str, int]]
    dtypes: Callable[[Call], Sequence[DataType]]
    crop: tuple[int, Callable[[Call], Halos]] | None = None
    block: str = ""

    def expanded(self, call: Call) -> Notation:
        """The rule with `b*` written out for this call."""
        return self.notation.expanded(call.types)

    def infer(self, call: Call) -> tuple[TensorType, ...]:
        """The results' types: shapes from the notation, dtypes as the option says."""
        notation = self.expanded(call)
        shapes = notation.shapes(notation.sizes(call.types, self.sizes(call)))
        return tuple(map(TensorType, shapes, self.dtypes(call)))

    def rule(self, call: Call) -> Rule:
        """The factor rule; a dim along which the function sees neighbours in this call is needed whole."""
        notation = self.expanded(call)
        seen = [f for halo in self.halos(call) for f in halo]
        return notation.rule(notation.sizes(call.types, self.sizes(call)), (*self.blocked, *seen), self.reduce)

    def emit(self, e: Emit) -> str | tuple[str, ...]:
        """Text of the function's call; the neutral element on a rank that has nothing to compute it from."""
        pairs = zip(e.operand_shapes, e.call.types, strict=True)
        if all(map(_is_empty, e.result_shapes)) or any(_is_empty(shape) and t.numel for shape, t in pairs):
            shapes = zip(e.result_shapes, e.call.results, strict=True)
            return tuple(f"K.neutral({shape}, {self.reduce!r}, torch.{t.dtype.value}, device)" for shape, t in shapes)
        kinds = [(s, t.dtype.value) for s, t in zip(e.result_shapes, e.call.results, strict=True)]
        wanted = "".join(f", ({shape}, torch.{dtype})" for shape, dtype in kinds)
        return f"K.checked_results({self.name!r}, {self._cropped(e, self._called(e))}{wanted})"

    def _called(self, e: Emit) -> str:
        notation, halos = self.expanded(e.call), self.halos(e.call)
        operands = [
            _padded(name, dims, halo, fill)
            for name, dims, halo, fill in zip(e.operands, notation.operands, halos, self.fills, strict=True)
        ]
        numbers = [self._number(e, p) for p in self.params[len(operands) :]]
        if not self.block:
            return f"OP.{self.name}({', '.join([*operands, *numbers])})"
        places = [_place(dims, _BLOCK) for dims in notation.operands]
        made = [_place(dims, _BLOCK) for dims in notation.results]
        listed = f"[{', '.join(operands)}]"
        return f"K.over_blocks(OP.{self.name}, {', '.join([str(places), str(made), listed, *numbers])})"

    def _number(self, e: Emit, param: Param) -> str:
        is_scalar = param.kind in (K.SCALAR, K.OPTIONAL_SCALAR)
        return e.scalar(param.name) if is_scalar and e.call[param.name] is not None else repr(e.call[param.name])

    def _cropped(self, e: Emit, text: str) -> str:
        """Text of the rank's own part of a gradient."""
        if self.crop is None:
            return text
        for f, (before, after) in self.crop[1](e.call)[self.crop[0]].items():
            place = _place(self.expanded(e.call).results[0], f)
            text += f".narrow({place}, {before + after}, {e.result_shapes[0][place or 0]})"
        return text

    def distributed(
        self, r: Writing, call: Call, operands: tuple[TensorRef, ...], dim: int, blocks: int
    ) -> Sequence[TensorRef] | None:
        """Cut the dim in blocks with their neighbours' edges, call the function on each, and merge the dim again."""
        notation, halos = self.expanded(call), self.halos(call)
        names = notation.operands[r.operand][dim].factors
        if not blocks or len(names) != 1 or not any(names[0] in halo for halo in halos):
            return None
        f, n = names[0], call.types[r.operand].shape[dim]
        size = block_size(n, blocks)
        made = _block_op(self, f, size, tuple(tuple(sorted(h.items())) for h in halos), notation)
        cut = [
            in_blocks(r, x, place, blocks, size, halo.get(f, (0, 0)), fill) if place is not None else x
            for x, dims, halo, fill in zip(operands, notation.operands, halos, self.fills, strict=True)
            for place in [_place(dims, f)]
        ]
        found = r.call(made, *cut, *call.args[len(operands) :])
        results = (found,) if isinstance(found, TensorRef) else found
        places = [_place(dims, f) for dims in notation.results]
        return [x if p is None else whole_again(r, x, p, n) for x, p in zip(results, places, strict=True)]

    def opdef(self, **more: Any) -> OpDef:
        """The op, with the fields in `more`."""
        has_halo = self.block == "" and any(d.halo for dims in self.notation.operands for d in dims)
        return OpDef(
            self.name, self.params, self.infer, self.rule, self.emit, compute=self.function,
            distributed=self.distributed if has_halo else None, nvfuser="a function of torch", **more,
        )  # fmt: skip


def _is_empty(shape: Sequence[int]) -> bool:
    return math.prod(shape) == 0


def _place(dims: Dims, factor: str) -> int | None:
    """The dim that is made of this factor alone; None where there is none."""
    return next((d for d, dim in enumerate(dims) if dim.factors == (factor,)), None)


def _padded(name: str, dims: Dims, halo: Widths, fill: Any) -> str:
    """Python text of an operand, padded with `fill` beyond the tensor's ends."""
    widths = [halo.get(dim.factors[0], (0, 0)) if len(dim.factors) == 1 else (0, 0) for dim in reversed(dims)]
    while widths and widths[-1] == (0, 0):
        widths.pop()
    flat = [w for pair in widths for w in pair]
    return f"F.pad({name}, {flat}, value={plain_text(fill)})" if flat else name


@functools.lru_cache(maxsize=4096)
def _block_op(op: TorchOp, factor: str, size: int, halos: Any, notation: Notation) -> OpDef:
    """The op on blocks of a factor.

    The dim before that factor's says which block; each block holds its neighbours' edges.
    """
    found, lengths = [dict(halo) for halo in halos], {factor: size}
    sides: list[list[Dims]] = [[], []]
    for i, (dims, halo) in enumerate(zip(notation.operands, found, strict=True)):
        inner = f"{factor}~{i}" if factor in halo else factor
        lengths[inner] = size + sum(halo.pop(factor, (0, 0)))
        sides[0].append(_in_blocks(dims, factor, inner))
    sides[1] = [_in_blocks(dims, factor, factor) for dims in notation.results]
    made = replace(
        op, name=f"{op.name}_in_blocks", notation=Notation(op.notation.text, tuple(sides[0]), tuple(sides[1])),
        blocked=(*op.blocked, *lengths), halos=lambda _: tuple(found), block=factor,
        sizes=lambda call: {**op.sizes(call), **lengths},
    )  # fmt: skip
    return made.opdef()


def _in_blocks(dims: Dims, factor: str, inner: str) -> Dims:
    out: list[Dim] = []
    for dim in dims:
        out += [Dim((_BLOCK,)), Dim((inner,))] if dim.factors == (factor,) else [dim]
    return tuple(out)


@kernel
def over_blocks(
    function: Callable[..., Any], places: list[int | None], made: list[int | None], operands: list[Any], *numbers: Any
) -> Any:
    """Call a function on each of the rank's blocks.

    Operand i has the blocks as dim `places[i]`; None: every call gets all of it. Result j is stacked as dim `made[j]`;
    None: it is added up.
    """
    count = next(t.shape[p] for t, p in zip(operands, places, strict=True) if p is not None)
    found = []
    for i in range(count):
        parts = [t if p is None else t.select(p, i) for t, p in zip(operands, places, strict=True)]
        result = function(*parts, *numbers)
        found.append(result if isinstance(result, tuple) else (result,))
    joined = [
        sum(parts[1:], parts[0]) if p is None else torch.stack(parts, p)
        for parts, p in zip(zip(*found, strict=True), made, strict=True)
    ]
    return joined[0] if len(joined) == 1 else tuple(joined)
