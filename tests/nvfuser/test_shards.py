"""Every op on every rank with each factor sharded: a local definition that nvFuser builds, or a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native_calls import differences, make_call, samples

from meshfuse import DeviceMesh
from meshfuse.backends.nvfuser import build_call
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.local import LocalCall
from meshfuse.ops.opdef import Call, ToTorch
from meshfuse.ops.rules import Factor, FactorKind
from meshfuse.placement.factors import left_to_reduce, tensor_layouts
from meshfuse.sharding.layout import Layout, Split, canonical
from meshfuse.sharding.value import Sharding

pytestmark = pytest.mark.nvfuser

# Parts of the reasons for which an op may go to torch on some rank, by op.
REASONS = {
    "embedding_fwd": ("max_norm changes the table",),
    "grouped_mm": ("some of the groups",),
    "sdpfa_fwd": ("heads and widths", "causal mask of some", "is of 4 dims"),
    "sdpfa_bwd": ("heads and widths", "causal mask of some", "is of 4 dims"),
}
NATIVE = [(name, place) for name, place in samples() if not isinstance(OPS[name].nvfuser, str)]


def layouts(n: int) -> Iterator[tuple[DeviceMesh, Layout]]:
    """A dim of size n on 2 ranks, unevenly, with ranks that have nothing, over two axes and strided."""
    pair, square = DeviceMesh((2,), ("x",)), DeviceMesh((2, 2), ("x", "y"))
    for ranks in (2, n - 1 if n > 2 else n + 1, n + 2):
        yield DeviceMesh((ranks,), ("x",)), (Split(ranks, "x"),)
    yield square, (Split(2, "y"), Split(2, "x"))
    yield pair, (Split(-(-n // 2)), Split(2, "x"))
    yield pair, (Split(-(-n // 4)), Split(2, "x"), Split(2))


def sharded(call: Call, factor: int, mesh: DeviceMesh, layout: Layout) -> Iterator[LocalCall]:
    """The call on every rank with one factor laid out so; nothing where a merged dim cannot lie so."""
    rule = call.op.rule(call)
    chosen = tuple(canonical(layout if i == factor else (), f.size) for i, f in enumerate(rule.factors))
    operands, results = (
        [tensor_layouts(rule, dims, t.shape, chosen) for dims, t in zip(tensors, types, strict=True)]
        for tensors, types in ((rule.operands, call.types), (rule.results, call.results))
    )
    if None in operands or None in results:
        return
    taken = [Sharding(mesh, dims) for dims in operands if dims is not None]
    left = [left_to_reduce(rule, chosen, place) for place in range(len(results))]
    made = [
        Sharding(mesh, dims, *p) for dims, p in zip(results, left, strict=True) if dims is not None and p is not None
    ]
    for rank in mesh.ranks:
        yield LocalCall(call, [f"a{i}" for i in range(len(taken))], taken, made, rank)


def shardable(factor: Factor) -> bool:
    return factor.kind is not FactorKind.BLOCK


@pytest.mark.parametrize(("name", "place"), NATIVE)
def test_every_rank_builds(name: str, place: int) -> None:
    dtype = DataType.BFloat16 if name.startswith("sdpfa") else None
    call = make_call(OPS[name], OPS[name].samples()[place], dtype)
    factors = call.op.rule(call).factors
    for i in (i for i, f in enumerate(factors) if shardable(f)):
        for mesh, layout in layouts(factors[i].size):
            for local in sharded(call, i, mesh, layout):
                check(local)


def check(local: LocalCall) -> None:
    """Builds with the local types, or goes to torch for a reason that is known."""
    name = local.call.op.name
    try:
        assert not differences(build_call(local)), local.operand_shardings
    except ToTorch as reason:
        assert any(known in str(reason) for known in REASONS.get(name, ())), f"{name}: {reason}"
