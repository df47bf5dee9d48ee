"""How a dim is cut into chunks, and what that means for the dims that an op ties to it."""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh import STREAM
from ..ops.rules import DimFactors, FactorKind, Rule
from ..sharding import layout as lay
from ..sharding.layout import Layout, Split


@dataclass(frozen=True, slots=True)
class ChunkedDim:
    """A dim of a tensor in chunks: the global indices of each.

    `layout` says the same in factors; None where no layout does.
    """

    dim: int
    chunks: tuple[lay.Runs, ...]
    layout: Layout | None

    @classmethod
    def of(cls, dim: int, layout: Layout, n: int) -> ChunkedDim:
        """The chunks into which the stream of a layout cuts a dim of size n."""
        layout = lay.canonical(layout, n)
        chunks = tuple(lay.chunk_runs(layout, n, c) for c in range(lay.stream_count(layout)))
        return cls(dim, chunks, layout)

    def __str__(self) -> str:
        return f"dim {self.dim}{f' {lay.text(self.layout)}' if self.layout is not None else ''}"


class Refused(Exception):
    """Why a stream cannot be used."""


def of_shards(dim: int, n: int, ways: int, inner: int, ring: bool) -> ChunkedDim:
    """Chunks of a dim that lies in `ways` shards, each of which is cut into `inner` parts.

    A chunk is one part of every shard; in a ring it is one part of one shard.
    """
    if n % (ways * inner) == 0:
        outer = Split(ways, STREAM if ring else None)
        return ChunkedDim.of(dim, (outer, Split(inner, STREAM)) if ways > 1 else (Split(inner, STREAM),), n)
    size = -(-n // ways)
    shards = [(min(i * size, n), min((i + 1) * size, n)) for i in range(ways)]
    parts = [[(a + (b - a) * j // inner, a + (b - a) * (j + 1) // inner) for j in range(inner)] for a, b in shards]
    if ring:
        return ChunkedDim(dim, tuple(((a, b),) if a < b else () for shard in parts for a, b in shard), None)
    return ChunkedDim(dim, tuple(lay.as_runs([shard[j] for shard in parts]) for j in range(inner)), None)


def chunked_factor(
    rule: Rule, dims: DimFactors, shape: tuple[int, ...], cut: ChunkedDim, name: str
) -> tuple[int, ChunkedDim]:
    """The op's factor that a dim's chunks cut, and the chunks as those of a dim that is this factor. Raises Refused."""
    factors, n = dims[cut.dim], shape[cut.dim]
    if not factors:
        raise Refused(f"as dim {cut.dim} of {name} has one element")
    if len(factors) == 1:
        factor, part = factors[0], cut
    else:
        parts = lay.project(cut.layout, n, tuple(rule.factors[f].size for f in factors)) if cut.layout else None
        found = [i for i, p in enumerate(parts or ()) if lay.stream_count(p) > 1]
        if parts is None or len(found) != 1:
            raise Refused(f"as the chunks do not fall on one factor of dim {cut.dim} of {name}")
        factor = factors[found[0]]
        part = ChunkedDim.of(cut.dim, parts[found[0]], rule.factors[factor].size)
    if rule.factors[factor].kind is not FactorKind.PASS:
        raise Refused(f"as {name} needs dim {cut.dim} whole ({rule.factors[factor].kind.value})")
    return factor, part


def chunked_dim(
    rule: Rule, dims: DimFactors, shape: tuple[int, ...], factor: int, cut: ChunkedDim
) -> ChunkedDim | None:
    """How the dim that has this factor is cut, given how the factor is; None where no dim has it. Raises Refused."""
    for dim, factors in enumerate(dims):
        if factors == (factor,):
            return ChunkedDim(dim, cut.chunks, cut.layout)
        if factor in factors:
            parts = tuple(cut.layout if f == factor else lay.WHOLE for f in factors)
            sizes = tuple(rule.factors[f].size for f in factors)
            joined = None if cut.layout is None else lay.concat(parts, sizes, shape[dim])
            if joined is None:
                raise Refused("as a merged dim cannot be cut so")
            return ChunkedDim.of(dim, joined, shape[dim])
    return None
