"""The stages of a segment: what nvFuser fuses between products, what it does again there, and what it keeps."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_segments import PROGRAMS as SEGMENTS
from whole_programs import PROGRAMS

import meshfuse as mf
from meshfuse.backends.nvfuser import build_segment, partitioned
from meshfuse.backends.nvfuser.partition import LIBRARY, Partition
from meshfuse.backends.nvfuser.segment import value_types
from meshfuse.backends.nvfuser.unshared import Step, steps
from meshfuse.dtypes import DataType
from meshfuse.graph import Graph
from meshfuse.lowering.segments import Segment, SegmentedDefinition
from meshfuse.ops.pointwise import pointwise_rule
from meshfuse.ops.values import TensorType

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import gpu_works  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.nvfuser
Parts = tuple[Segment, tuple[Partition, ...]]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels.staged(monkeypatch)


def parts_of(segmented: SegmentedDefinition) -> Iterator[Parts]:
    for segment in (part for part in segmented.parts if isinstance(part, Segment)):
        yield segment, partitioned(segmented, segment, 0)


def definitions() -> dict[str, mf.FusionDefinition]:
    mesh = mf.DeviceMesh((2,), ("r",))
    return {
        **{f"{name} of segments": make() for name, make in ((p.__name__, p) for p in SEGMENTS)},
        **{name: program.definition(mesh, DataType.Float) for name, program in PROGRAMS.items()},
        "block": gpu_works.Block(2, 8, 32, 4).definition(1),
        "composed block": gpu_works.Block(2, 8, 32, 4, fused=False).definition(2),
    }


def names_of(segmented: SegmentedDefinition, part: Partition) -> list[str]:
    return [segmented.resharded.graph.nodes[c.node].name for c in part.segment.computes]


@pytest.mark.parametrize("name", list(definitions()))
def test_stages_take_what_is_there_and_do_nothing_in_vain(name: str) -> None:
    segmented = definitions()[name].latest(()).segmented
    for segment, parts in parts_of(segmented):
        there, read = set(segment.inputs), set(segment.outputs)
        for part in parts:
            assert there.issuperset(part.segment.inputs)
            made = set(part.segment.inputs)
            for compute in part.segment.computes:
                assert made.issuperset(compute.inputs)
                made.update(compute.outputs)
            there.update(part.segment.outputs)
        assert there.issuperset(segment.outputs)
        for part in reversed(parts):
            assert set(part.segment.outputs) <= read
            for compute in reversed(part.segment.computes):
                assert not read.isdisjoint(compute.outputs)
                read.update(compute.inputs)
        turns = [bool(part.reason) for part in parts]
        assert all(a != b for a, b in itertools.pairwise(turns))


@pytest.mark.parametrize("fused", [True, False])
def test_a_block_has_a_definition_between_products_and_keeps_what_these_read(fused: bool) -> None:
    """Of norms, GELU and softmax nothing is kept for their gradients but statistics; views are taken in torch.

    Beside those, one residual is kept for a later definition.
    """
    block = gpu_works.Block(2, 64, 128, 4, fused)
    segmented = block.definition(1).latest(()).segmented
    ((segment, parts),) = parts_of(segmented)
    assert [part.reason for part in parts] == ["", LIBRARY] * (6 if fused else 8) + [""]
    products = {v for part in parts if part.reason for v in part.segment.inputs}
    kept = [v for part in parts if not part.reason for v in part.segment.outputs]
    kept = [v for v in kept if v not in products and v not in segment.outputs]
    sizes = [t.numel for t in value_types(segmented, kept, 0)]
    tokens = block.batch * block.length
    assert [n for n in sizes if n > tokens * block.heads] == [tokens * block.width]
    assert not any({"reshape", "permute"} & {*names_of(segmented, part)} for part in parts if not part.reason)


@pytest.mark.parametrize(("size", "count"), [(256, 1), (2048, 13)])
def test_segments_that_wait_for_the_host_are_one_definition(
    size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    ((_, parts),) = parts_of(gpu_works.Block(4, size, size, 4).definition(1).latest(()).segmented)
    assert len(parts) == count


def test_products_alone_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([4, 4]), fd.define_tensor([4, 4])
        fd.add_output(fd.ops.linear(fd.ops.linear(x, w), w))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
    ((_, parts),) = parts_of(fd.latest(()).segmented)
    assert [part.reason for part in parts] == [LIBRARY]


def test_what_follows_from_two_large_values_is_kept() -> None:
    """To compute a residual again would read both of its terms; of a cast of it, the smaller form is kept."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 64], dtype=DataType.BFloat16), fd.define_tensor([64, 64], dtype=DataType.BFloat16)
        first = fd.ops.cast(fd.ops.add(x, fd.ops.linear(x, w)), DataType.BFloat16)
        second = fd.ops.linear(fd.ops.cast(fd.ops.exp(first), DataType.BFloat16), w)
        fd.add_output(fd.ops.add(first, second))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
    ((_, parts),) = parts_of(fd.latest(()).segmented)
    assert Counter(c.node for part in parts for c in part.segment.computes).most_common(1)[0][1] == 1


def test_what_one_reader_finds_in_memory_another_does_not_make_again() -> None:
    """Beside a large operand a small value is read, beside a small one it would be made: not both in a definition."""
    with mf.FusionDefinition() as fd:
        x, w, small = fd.define_tensor([64, 64]), fd.define_tensor([64, 64]), fd.define_tensor([64])
        bent = fd.ops.exp(small)
        y = fd.ops.linear(fd.ops.mul(x, bent), w)
        fd.add_output(fd.ops.mul(fd.ops.add(y, bent), fd.ops.tanh(fd.ops.mul(bent, fd.ops.sum(y, [0])))))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
    ((_, parts),) = parts_of(fd.latest(()).segmented)
    for part in parts:
        made = {v for c in part.segment.computes for v in c.outputs}
        assert made.isdisjoint(part.segment.inputs)


@pytest.mark.parametrize("many", [3, 1500])
def test_views_and_constants_of_many_ops(many: int) -> None:
    with mf.FusionDefinition() as fd:
        x, one = fd.define_tensor([4, 4]), fd.ops.full([4, 4], 1.0, DataType.Float)
        turned = fd.ops.add(x, one)
        for _ in range(many):
            turned, one = fd.ops.permute(turned, [1, 0]), fd.ops.permute(one, [1, 0])
        fd.add_output(fd.ops.mul(fd.ops.matmul(turned, x), one))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
    ((_, parts),) = parts_of(segmented := fd.latest(()).segmented)
    assert [part.reason for part in parts] == ["", LIBRARY, ""]
    assert names_of(segmented, parts[1]) == ["permute"] * many + ["matmul"]
    assert names_of(segmented, parts[2]) == ["full"] + ["permute"] * many + ["mul"]


# random programs --------------------------------------------------------------------------------------------------

N = 6
# In meshfuse and in torch, of tensors [6, 6].
UNARY: dict[str, tuple[Any, Any]] = {
    "tanh": (lambda fd, x: fd.ops.tanh(x), torch.tanh),
    "turned": (lambda fd, x: fd.ops.permute(x, [1, 0]), lambda x: x.t()),
    "cut": (lambda fd, x: fd.ops.reshape(fd.ops.reshape(x, [3, 12]), [N, N]), lambda x: x.clone()),
    "statistics": (
        lambda fd, x: fd.ops.sub(x, fd.ops.broadcast_in_dim(fd.ops.sum(x, [1]), [N, N], [0])),
        lambda x: x - x.sum(1, keepdim=True),
    ),
    "masked": (
        lambda fd, x: fd.ops.where(fd.ops.triu(fd.ops.full([N, N], True, DataType.Bool), 1), 0.0, x),
        lambda x: x.tril(),
    ),
    "shares": (lambda fd, x: fd.ops.softmax(x, -1), lambda x: torch.softmax(x, -1)),
}
BINARY: dict[str, tuple[Any, Any]] = {
    "add": (lambda fd, x, y: fd.ops.add(x, y), lambda x, y: x + y),
    "matmul": (lambda fd, x, y: fd.ops.matmul(x, y), lambda x, y: x @ y),
    "linear": (lambda fd, x, y: fd.ops.linear(x, y), lambda x, y: x @ y.t()),
    "row": (lambda fd, x, y: fd.ops.mul(x, fd.ops.slice(y, [2, 0], [3, N])), lambda x, y: x * y[2:3]),
}
OPS = st.tuples(st.sampled_from([*UNARY, *BINARY, "matmul", "linear"]), st.integers(0, 99), st.integers(0, 99))


def one_op(table: int, name: str, values: Sequence[Any], first: int, second: int, *fd: Any) -> Any:
    """The op on values chosen among the last five, by the table's column 0 (meshfuse) or 1 (torch)."""
    recent = values[-5:]
    a, b = recent[first % len(recent)], recent[second % len(recent)]
    return UNARY[name][table](*fd, a) if name in UNARY else BINARY[name][table](*fd, a, b)


@settings(max_examples=60)
@given(st.lists(OPS, min_size=3, max_size=14), st.booleans(), st.sets(st.integers(0, 13), max_size=2))
def test_random_programs_are_what_torch_computes(ops: list[Any], backward: bool, outputs: set[int]) -> None:
    with mf.FusionDefinition() as fd:
        values = given_ = [fd.define_tensor([N, N], dtype=DataType.Double) for _ in range(2)]
        for op in ops:
            values = [*values, one_op(0, op[0], values, op[1], op[2], fd)]
        chosen = [values[2 + i] for i in sorted(outputs) if i < len(ops) - 1] + [values[-1]]
        made = [*chosen, *(fd.grad(fd.ops.sum(chosen[-1]), given_) if backward else [])]
        for output in made:
            fd.add_output(fd.ops.mul(output, 1.0))
        fd.mesh_split(given_[0], mf.DeviceMesh((1,), ("r",)), [None, None])
    leaves = [torch.randn(N, N, generator=torch.Generator().manual_seed(i), dtype=torch.float64) / 3 for i in range(2)]
    wanted = inputs = [t.clone().requires_grad_() for t in leaves]
    for op in ops:
        wanted = [*wanted, one_op(1, op[0], wanted, op[1], op[2])]
    picked = [wanted[2 + i] for i in sorted(outputs) if i < len(ops) - 1] + [wanted[-1]]
    grads = torch.autograd.grad(picked[-1].sum(), inputs, allow_unused=True) if backward else ()
    expected = [*picked, *(torch.zeros(N, N).double() if g is None else g for g in grads)]
    with pytest.MonkeyPatch.context() as patch:
        fake_kernels.use(patch)
        for a, b in zip(fd.execute(leaves), expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-9)


# within a definition ----------------------------------------------------------------------------------------------


def planned(segmented: SegmentedDefinition, segment: Segment) -> tuple[list[Step], dict[int, TensorType]]:
    inner = list(dict.fromkeys(v for c in segment.computes for v in (*c.inputs, *c.outputs)))
    kinds = dict(zip(inner, value_types(segmented, inner, 0), strict=True))
    return steps(segmented.resharded.graph, segment.computes, kinds, set(segment.outputs)), kinds


def number(name: str) -> int:
    return int(re.fullmatch(r"v(\d+)(?:_own\d+)?", name)[1])  # type: ignore[index]


def fused(segmented: SegmentedDefinition) -> Iterator[Segment]:
    yield from (part.segment for _, parts in parts_of(segmented) for part in parts if not part.reason)


@pytest.mark.parametrize("name", list(definitions()))
def test_every_value_is_the_op_of_its_operands(name: str) -> None:
    """Under whatever name: ops are done in an order in which all that they take is there."""
    segmented = definitions()[name].latest(()).segmented
    for segment in fused(segmented):
        found, _ = planned(segmented, segment)
        there = {f"v{v}" for v in segment.inputs}
        for step in found:
            assert there.issuperset(step.takes) and there.isdisjoint(step.gives)
            assert tuple(map(number, step.takes)) == step.compute.inputs
            assert tuple(map(number, step.gives)) == step.compute.outputs
            there.update(step.gives)
        first = [step.compute for step in found if all("_" not in name for name in step.gives)]
        assert first == list(segment.computes)


@pytest.mark.parametrize("name", list(definitions()))
def test_what_is_broadcast_is_made_for_one_reader(name: str) -> None:
    """Unless it follows from a reduction, or is an input: nvFuser's kernels write shared ones behind their end."""
    segmented = definitions()[name].latest(()).segmented
    graph = segmented.resharded.graph
    for segment in fused(segmented):
        found, kinds = planned(segmented, segment)
        makers = {name: step for step in found for name in step.gives}
        readers = Counter(name for step in found for name in step.takes)
        for step in found:
            if graph.nodes[step.compute.node].call.op.rule is pointwise_rule:
                whole = kinds[step.compute.outputs[0]].numel
                small = [t for t in step.takes if t in makers and kinds[number(t)].numel < whole]
                wrong = [t for t in small if readers[t] > 1 and not reduces(t, makers, graph)]
                assert not wrong, wrong


def reduces(name: str, makers: dict[str, Step], graph: Graph) -> bool:
    """Whether a value follows from ops other than pointwise ones and changes of shape."""
    left, seen = [name], set[str]()
    while left:
        step = makers.get(one := left.pop())
        if step is None or one in seen:
            continue
        seen.add(one)
        op = graph.nodes[step.compute.node].call.op
        if not (op.rule is pointwise_rule or op.is_view or op.name in ("full", "iota", "triu")):
            return True
        left += step.takes
    return False


def test_a_mask_of_two_softmaxes_is_made_for_each() -> None:
    """Which nvFuser would make in the kernel of the first, and write far behind its end there."""
    with mf.FusionDefinition() as fd:
        x, y = fd.define_tensor([2, 8, 8]), fd.define_tensor([2, 8, 8])
        mask = fd.ops.triu(fd.ops.full([8, 8], True, DataType.Bool), 1)
        for scores in (x, y):
            fd.add_output(fd.ops.softmax(fd.ops.where(mask, -torch.inf, scores), -1))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None, None])
    segmented = fd.latest(()).segmented
    (segment,) = fused(segmented)
    found, _ = planned(segmented, segment)
    wheres = [s for s in found if segmented.resharded.graph.nodes[s.compute.node].name == "where"]
    masks = [s.takes[0] for s in wheres]
    assert len(masks) == len(set(masks)) == 2


def test_a_softmaxs_division_is_a_product_with_a_reciprocal_and_no_other_is() -> None:
    """Of a sum that may be far less than 1, the reciprocal overflows where the quotient does not."""

    def text(divide: Any) -> str:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([8, 32])
            fd.add_output(divide(fd.ops, x))
            fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
        segmented = fd.latest(()).segmented
        (segment,) = fused(segmented)
        return repr(build_segment(segmented, segment, 0).definition)

    def shares(o: Any, x: Any, top: Any, dims: list[int], over: list[int]) -> Any:
        parts = o.exp(o.sub(x, o.max(top, dims, True)))
        return o.truediv(parts, o.sum(parts, over, True))

    def of_square(o: Any, x: Any) -> Any:
        """Rows less the maxima of all rows, one per column: a row's sum may be as small as there are numbers."""
        parts = o.exp(o.sub(x, o.max(x, [1])))
        return o.truediv(parts, o.sum(parts, [1], True))

    def by_dims(o: Any, x: Any) -> Any:
        parts = o.exp(o.sub(x, o.broadcast_in_dim(o.max(x, [1]), [8, 32], [0])))
        return o.truediv(parts, o.sum(parts, [1], True))

    assert ".reciprocal(" in text(by_dims)
    assert ".reciprocal(" in text(lambda o, x: o.softmax(x, -1)) and ".div(" not in text(lambda o, x: o.softmax(x, -1))
    assert ".reciprocal(" in text(lambda o, x: shares(o, x, x, [1], [1]))
    for other in (
        lambda o, x: o.truediv(o.exp(x), o.sum(o.exp(x), [1], True)),
        lambda o, x: shares(o, x, x, [0, 1], [1]),
        lambda o, x: shares(o, x, x, [0], [1]),
        lambda o, x: shares(o, x, o.neg(x), [1], [1]),
        lambda o, x: of_square(o, o.matmul(x, o.permute(x, [1, 0]))),
        lambda o, x: o.truediv(x, o.sum(x, [1], True)),
        lambda o, x: o.truediv(x, 3.0),
    ):
        assert ".reciprocal(" not in text(other)
