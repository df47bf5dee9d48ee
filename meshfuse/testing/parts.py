"""One op on the shards of its operands, cut and put together by index arithmetic of this module's own.

Nothing here uses the package's layouts: which indices a rank holds is found by writing every index in the layout's
radices, and looking at its digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import error_text
from ..mesh import DeviceMesh
from ..ops.local import LocalCall
from ..ops.opdef import Call
from ..ops.rules import FactorKind
from ..ops.values import TensorType
from ..placement.factors import left_to_reduce, tensor_layouts
from ..sharding.layout import Layout, Split, axes, canonical
from ..sharding.value import Sharding
from .calls import SALT, names_of, run_lowering, torch_dtype

_COMBINE = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


class Wrong(Exception):
    """What is wrong with an op's rule for one way to shard it, and the rank on which it shows."""

    def __init__(self, what: str, rank: int | None = None):
        super().__init__(what)
        self.rank = rank


class How(NamedTuple):
    """How one factor is sharded: a mesh and a layout over its axes."""

    mesh: DeviceMesh
    layout: Layout


def ways(n: int) -> dict[str, How]:
    """Ways to shard a factor of size n by name, the simplest first."""
    pair, line = DeviceMesh((2,), ("x",)), DeviceMesh((4,), ("x",))
    square = DeviceMesh((2, 2), ("x", "y"))

    def over(parts: int) -> How:
        return How(DeviceMesh((parts,), ("x",)), (Split(parts, "x"),))

    return {
        "evenly": over(next((p for p in (2, 3, 5, 7) if n % p == 0), n)),
        "unevenly": over(n - 1 if n > 2 else n + 1),
        "with empty shards": over(n + 2),
        "over two axes": How(square, (Split(2, "y"), Split(2, "x"))),
        "strided inside": How(pair, (Split(-(-n // 2)), Split(2, "x"))),
        "nested": How(pair, (Split(-(-n // 4)), Split(2, "x"), Split(2))),
        "over a sub-axis": How(line, (Split(2, "x", 2),)),
    }


def _coordinate(mesh: DeviceMesh, rank: int, split: Split) -> int:
    """The rank's digit along a part of an axis."""
    assert split.axis is not None and split.size is not None
    below = math.prod(mesh.shape[list(mesh.names).index(split.axis) + 1 :])
    size = dict(zip(mesh.names, mesh.shape, strict=True))[split.axis]
    return rank // below % size // (size // (split.pre * split.size)) % split.size


def digits(mesh: DeviceMesh, rank: int, layout: Layout) -> tuple[int, ...]:
    return tuple(_coordinate(mesh, rank, s) for s in layout if s.axis is not None)


def held(layout: Layout, n: int, coordinates: Sequence[int]) -> set[int]:
    """The indices below n whose digits at the layout's bound places are these coordinates."""
    sizes = [s.size or 1 for s in layout]
    sizes.append(max(1, -(-n // math.prod(sizes))))
    bound = [place for place, s in enumerate(layout) if s.axis is not None]
    return {
        index for index in range(n)
        if all(radix(index, sizes)[b] == c for b, c in zip(bound, coordinates, strict=True))
    }  # fmt: skip


def radix(index: int, sizes: Sequence[int]) -> list[int]:
    out = []
    for size in reversed(sizes):
        out.append(index % size)
        index //= size
    return out[::-1]


@dataclass(slots=True)
class _Collected:
    """One result that is put together from parts, each with the global indices that it has."""

    ttype: TensorType
    parts: dict[tuple[tuple[int, ...], ...], torch.Tensor] = field(default_factory=dict)
    ranks: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)

    def add(self, index: tuple[tuple[int, ...], ...], part: torch.Tensor, reduce: str, rank: int) -> None:
        if index not in self.parts or not reduce:
            self.parts[index] = part
            self.ranks[index] = rank
        elif part.dtype == torch.bool:
            old = self.parts[index]
            self.parts[index] = old | part if reduce in ("sum", "max") else old & part
        else:
            self.parts[index] = _COMBINE[reduce](self.parts[index], part)

    def assembled(self) -> torch.Tensor:
        dtype = torch_dtype(self.ttype)
        out = torch.zeros(self.ttype.shape, dtype=torch.int64 if dtype == torch.uint64 else dtype, device="cpu")
        written = torch.zeros(self.ttype.shape, dtype=torch.int64, device="cpu")
        for index, part in self.parts.items():
            if part.numel() or not self.ttype.shape:
                grid = torch.meshgrid(*[torch.tensor(i, device="cpu") for i in index], indexing="ij") if index else ()
                out[grid], written[grid] = part.to(out.dtype), written[grid] + 1
        if not bool((written == 1).all()):
            place = tuple((written != 1).nonzero()[0].tolist())
            raise Wrong(f"the element {list(place)} of the result is made by {int(written[place])} shards")
        return out.to(dtype)

    def rank_of(self, place: Sequence[int]) -> int | None:
        """A rank that makes the element; None for none."""
        found = (r for i, r in self.ranks.items() if all(p in part for p, part in zip(place, i, strict=True)))
        return next(found, None)


class Sharded:
    """A call, with some of its factors sharded over a mesh."""

    def __init__(self, call: Call, mesh: DeviceMesh, layouts: Mapping[int, Layout]):
        self.call, self.mesh, self.rule = call, mesh, call.op.rule(call)
        sizes = [f.size for f in self.rule.factors]
        self.layouts = tuple(canonical(layouts.get(i, ()), n) for i, n in enumerate(sizes))
        self.ranks = range(math.prod(mesh.shape))
        pairs = list(zip(self.rule.factors, self.layouts, strict=True))
        self.reduces = {f.reduce for f, layout in pairs if f.kind is FactorKind.REDUCE and axes(layout)}
        self.reduce = min(self.reduces, default="")
        self.collected: list[_Collected] = []

    def shardings(self) -> tuple[list[Sharding], list[Sharding]] | None:
        """The shardings of operands and results.

        None where a merged dim cannot be laid out so, or two kinds of reductions would mix.
        """
        if len(self.reduces) > 1:
            return None
        operands = self._side(self.rule.operands, self.call.types)
        results = self._side(self.rule.results, self.call.results)
        if operands is None or results is None:
            return None
        left = [left_to_reduce(self.rule, self.layouts, place) for place in range(len(results))]
        made = [Sharding(self.mesh, d, *partial) for d, partial in zip(results, left, strict=True) if partial]
        return [Sharding(self.mesh, d) for d in operands], made

    def _side(self, tensors: Sequence[Any], types: Sequence[TensorType]) -> list[tuple[Layout, ...]] | None:
        pairs = zip(tensors, types, strict=True)
        dims = [tensor_layouts(self.rule, t, ttype.shape, self.layouts) for t, ttype in pairs]
        return None if None in dims else [d for d in dims if d is not None]

    def indices(self, dims: Sequence[Sequence[int]], shape: Sequence[int], rank: int) -> list[torch.Tensor]:
        """For every dim of a tensor the global indices that the rank holds."""
        out = []
        for factors, n in zip(dims, shape, strict=True):
            parts = [
                held(self.layouts[f], self.rule.factors[f].size, digits(self.mesh, rank, self.layouts[f]))
                for f in factors
            ]
            sizes = [self.rule.factors[f].size for f in factors]
            kept = [i for i in range(n) if all(d in p for d, p in zip(radix(i, sizes), parts, strict=True))]
            out.append(torch.tensor(kept, dtype=torch.int64, device="cpu"))
        return out

    def run(self, operands: Sequence[torch.Tensor], salt: int = SALT) -> list[torch.Tensor] | None:
        """The global results; None where such a layout is impossible. Raises Wrong."""
        shardings = self.shardings()
        if shardings is None:
            return None
        done: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.collected = [_Collected(ttype) for ttype in self.call.results]
        for rank in self.ranks:
            results = self._local(operands, shardings, rank, salt)
            key = tuple(d for layout in self.layouts for d in digits(self.mesh, rank, layout))
            if key in done:
                self._compare_replicas(done[key], results, rank)
            else:
                done[key] = results
                self._collect(results, rank)
        return [one.assembled() for one in self.collected]

    def _local(
        self, operands: Sequence[torch.Tensor], shardings: tuple[list[Sharding], list[Sharding]], rank: int, salt: int
    ) -> list[torch.Tensor]:
        local = LocalCall(self.call, names_of(self.call), shardings[0], shardings[1], rank, number=salt)
        cut = self._cut(operands, rank)
        for place, tensor in enumerate(cut):
            assert tuple(tensor.shape) == local.operand_shapes[place]
        try:
            return run_lowering(local, cut)
        except Exception as error:
            shapes = ", ".join(str(list(t.shape)) for t in cut)
            raise Wrong(f"the lowering fails on shards of shapes {shapes}: {error_text(error)}", rank) from error

    def _cut(self, operands: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        out = []
        for tensor, dims in zip(operands, self.rule.operands, strict=True):
            for d, index in enumerate(self.indices(dims, tensor.shape, rank)):
                tensor = tensor if len(index) == tensor.shape[d] else tensor.index_select(d, index)
            out.append(tensor)
        return out

    def _compare_replicas(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], rank: int) -> None:
        for a, b in zip(first, second, strict=True):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
                raise Wrong("ranks with the same shards compute different results", rank)

    def _collect(self, results: Sequence[torch.Tensor], rank: int) -> None:
        triples = zip(self.collected, self.rule.results, results, strict=True)
        for place, (one, dims, result) in enumerate(triples):
            index = self.indices(dims, one.ttype.shape, rank)
            wanted = tuple(map(len, index))
            if tuple(result.shape) != wanted:
                raise Wrong(
                    f"result {place} has local shape {list(result.shape)}, its factors give {list(wanted)}", rank
                )
            if result.dtype != torch_dtype(one.ttype):
                raise Wrong(f"result {place} is of {result.dtype}, the type rule says {torch_dtype(one.ttype)}", rank)
            one.add(tuple(tuple(i.tolist()) for i in index), result, self.reduce, rank)
