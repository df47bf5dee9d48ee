"""Running one op on the shards of its operands, cut and put together by index arithmetic of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import meshfuse.kernels as K
from meshfuse import DeviceMesh
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.base import Call, FactorKind, OpDef, Sample, TensorRef, TensorType
from meshfuse.ops.binding import bind
from meshfuse.ops.local import LocalCall
from meshfuse.propagation.factors import tensor_layouts
from meshfuse.sharding.layout import Layout, Split, axes, canonical
from meshfuse.sharding.value import Sharding

SALT = 11
_COMBINE = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


def make_call(op: OpDef, sample: Sample) -> Call:
    """The sample as a call with its tensors' types."""
    types: list[TensorType] = []

    def resolve(value: Any) -> Any:
        if not isinstance(value, TensorType):
            return value
        types.append(value)
        return TensorRef(len(types) - 1)

    args = bind(op, sample.args, sample.kwargs, resolve)
    results = op.infer(Call(op, args, tuple(types)))
    return Call(op, args, tuple(types), results)


def fill(kind: TensorType, values: Sequence[float] | None, domain: tuple[float, float] | None) -> torch.Tensor:
    """A tensor of this type: the values in turn, or random numbers."""
    dtype = getattr(torch, kind.dtype.value)
    if values is not None:
        return torch.tensor(list(itertools.islice(itertools.cycle(values), kind.numel))).to(dtype).reshape(kind.shape)
    if kind.dtype is DataType.Bool:
        return torch.rand(kind.shape) < 0.5
    if kind.dtype.category == 1:
        return torch.randint(1, 7, kind.shape).to(dtype)
    if domain is not None:
        return (torch.rand(kind.shape, dtype=torch.float64) * (domain[1] - domain[0]) + domain[0]).to(dtype)
    return torch.randn(kind.shape, dtype=torch.complex64 if kind.dtype.category == 3 else torch.float32).to(dtype)


def operands_of(call: Call, sample: Sample, domain: tuple[float, float] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [fill(t, sample.values.get(i), domain) for i, t in enumerate(call.types)]


def evaluate(local: LocalCall, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of the op's lowering on one rank's operands."""
    scope: dict[str, Any] = {"torch": torch, "F": F, "K": K, "seed": 5, "offset": 2, "device": "cpu"}
    scope |= dict(zip(local.operands, operands, strict=True))
    targets = [f"out{i}" for i in range(len(local.call.results))]
    exec("\n".join(local.statements(targets)), scope)
    return [scope[target] for target in targets]


def whole(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results on one rank."""
    mesh = DeviceMesh((1,), ("x",))
    shardings = [[Sharding.replicated(mesh, t.ndim) for t in side] for side in (call.types, call.results)]
    return evaluate(LocalCall(call, _names(call), *shardings, 0, number=SALT), operands)


def _names(call: Call) -> list[str]:
    return [f"a{i}" for i in range(len(call.types))]


@dataclass(frozen=True)
class Split2:
    """How one factor is sharded: a mesh and a layout over its axes."""

    mesh: DeviceMesh
    layout: Layout


def _coordinate(mesh: DeviceMesh, rank: int, split: Split) -> int:
    """The rank's digit along a part of an axis."""
    sizes = dict(zip(mesh.names, mesh.shape, strict=True))
    below = math.prod(mesh.shape[list(mesh.names).index(split.axis) + 1 :])
    coordinate = rank // below % sizes[split.axis]
    return coordinate // (sizes[split.axis] // (split.pre * split.size)) % split.size


def digits(mesh: DeviceMesh, rank: int, layout: Layout) -> tuple[int, ...]:
    return tuple(_coordinate(mesh, rank, s) for s in layout if s.axis is not None)


def held(layout: Layout, n: int, coordinates: Sequence[int]) -> set[int]:
    """The indices below n whose digits at the bound places of the layout are the coordinates."""
    sizes = [s.size for s in layout]
    sizes.append(max(1, -(-n // math.prod(sizes))))
    bound = [place for place, s in enumerate(layout) if s.axis is not None]
    found = set()
    for index in range(n):
        rest, places = index, []
        for size in reversed(sizes):
            places.append(rest % size)
            rest //= size
        places.reverse()
        if all(places[b] == c for b, c in zip(bound, coordinates, strict=True)):
            found.add(index)
    return found


class Sharded:
    """A call with some of its factors sharded over a mesh."""

    def __init__(self, call: Call, mesh: DeviceMesh, layouts: Mapping[int, Layout]):
        self.call, self.mesh, self.rule = call, mesh, call.op.rule(call)
        sizes = [f.size for f in self.rule.factors]
        self.layouts = tuple(canonical(layouts.get(i, ()), n) for i, n in enumerate(sizes))
        self.ranks = range(math.prod(mesh.shape))

    def shardings(self) -> tuple[list[Sharding], list[Sharding]] | None:
        """Of operands and results; None where a merged dim cannot be laid out so."""
        partial = [
            s
            for f, layout in zip(self.rule.factors, self.layouts, strict=True)
            if f.kind is FactorKind.REDUCE
            for s in axes(layout)
        ]
        kinds = {
            f.reduce
            for f, layout in zip(self.rule.factors, self.layouts, strict=True)
            if f.kind is FactorKind.REDUCE and layout
        }
        assert len(kinds) < 2
        self.reduce = kinds.pop() if kinds else ""
        sides = []
        for tensors, types, terms in (
            (self.rule.operands, self.call.types, []),
            (self.rule.results, self.call.results, partial),
        ):
            pairs = zip(tensors, types, strict=True)
            dims = [tensor_layouts(self.rule, t, kind.shape, self.layouts) for t, kind in pairs]
            if None in dims:
                return None
            sides.append([Sharding(self.mesh, d, tuple(terms), self.reduce if terms else "") for d in dims])
        return sides[0], sides[1]

    def indices(self, dims: Sequence[Sequence[int]], shape: Sequence[int], rank: int) -> list[torch.Tensor]:
        """For every dim of a tensor the global indices that the rank has."""
        out = []
        for factors, n in zip(dims, shape, strict=True):
            parts = [
                held(self.layouts[f], self.rule.factors[f].size, digits(self.mesh, rank, self.layouts[f]))
                for f in factors
            ]
            sizes = [self.rule.factors[f].size for f in factors]
            kept = [i for i in range(n) if all(d in p for d, p in zip(_radix(i, sizes), parts, strict=True))]
            out.append(torch.tensor(kept, dtype=torch.int64))
        return out

    def run(self, operands: Sequence[torch.Tensor], salt: int = SALT) -> list[torch.Tensor] | None:
        """The global results; None where the layout is impossible."""
        shardings = self.shardings()
        if shardings is None:
            return None
        done: dict[tuple[int, ...], list[torch.Tensor]] = {}
        blocks: list[dict[Any, torch.Tensor]] = [{} for _ in self.call.results]
        for rank in self.ranks:
            local = LocalCall(self.call, _names(self.call), *shardings, rank, number=salt)
            results = evaluate(local, self._cut(operands, local, rank))
            key = tuple(d for layout in self.layouts for d in digits(self.mesh, rank, layout))
            if key in done:
                for replica, result in zip(done[key], results, strict=True):
                    torch.testing.assert_close(result, replica, rtol=0, atol=0, equal_nan=True)
                continue
            done[key] = results
            self._collect(blocks, results, rank)
        return [_assembled(t, parts) for t, parts in zip(self.call.results, blocks, strict=True)]

    def _cut(self, operands: Sequence[torch.Tensor], local: LocalCall, rank: int) -> list[torch.Tensor]:
        out = []
        for place, (tensor, dims) in enumerate(zip(operands, self.rule.operands, strict=True)):
            for d, index in enumerate(self.indices(dims, tensor.shape, rank)):
                tensor = tensor if len(index) == tensor.shape[d] else tensor.index_select(d, index)
            assert tuple(tensor.shape) == local.operand_shapes[place]
            out.append(tensor)
        return out

    def _collect(self, blocks: list[dict[Any, torch.Tensor]], results: Sequence[torch.Tensor], rank: int) -> None:
        for kind, dims, result, parts in zip(self.call.results, self.rule.results, results, blocks, strict=True):
            index = self.indices(dims, kind.shape, rank)
            assert tuple(result.shape) == tuple(map(len, index)), (result.shape, index)
            assert result.dtype == getattr(torch, kind.dtype.value)
            key = tuple(tuple(i.tolist()) for i in index)
            if key not in parts or not self.reduce:
                parts[key] = result
            elif result.dtype == torch.bool:
                parts[key] = parts[key] | result if self.reduce in ("sum", "max") else parts[key] & result
            else:
                parts[key] = _COMBINE[self.reduce](parts[key], result)


def _radix(index: int, sizes: Sequence[int]) -> list[int]:
    out = []
    for size in reversed(sizes):
        out.append(index % size)
        index //= size
    return out[::-1]


def _assembled(kind: TensorType, parts: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, kind.dtype.value)
    out = torch.zeros(kind.shape, dtype=torch.int64 if dtype == torch.uint64 else dtype)
    written = torch.zeros(kind.shape, dtype=torch.int64)
    for index, part in parts.items():
        if part.numel() or not kind.shape:
            grid = torch.meshgrid(*[torch.tensor(i) for i in index], indexing="ij") if index else ()
            out[grid], written[grid] = part.to(out.dtype), written[grid] + 1
    assert bool((written == 1).all()), "elements missing or made twice"
    return out.to(dtype)


def cases(n: int) -> dict[str, Split2]:
    """Ways to shard a factor of size n."""
    line = DeviceMesh((4,), ("x",))
    square = DeviceMesh((2, 2), ("x", "y"))
    pair = DeviceMesh((2,), ("x",))

    def over(parts: int) -> Split2:
        return Split2(DeviceMesh((parts,), ("x",)), (Split(parts, "x"),))

    divisor = next((p for p in (2, 3, 5, 7) if n % p == 0), n)
    return {
        "even": over(divisor),
        "uneven": over(n - 1 if n > 2 else n + 1),
        "empty": over(n + 2),
        "two axes": Split2(square, (Split(2, "y"), Split(2, "x"))),
        "strided": Split2(pair, (Split(-(-n // 2)), Split(2, "x"))),
        "strided blocks": Split2(pair, (Split(-(-n // 4)), Split(2, "x"), Split(2))),
        "sub-axis": Split2(line, (Split(2, "x", 2),)),
    }


def sample_ids() -> list[tuple[str, int]]:
    return [(name, i) for name, op in OPS.items() for i in range(len(op.samples()) or 1)]
