"""What definitions compute again behind a product, instead of keeping it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_segments import PROGRAMS as SEGMENTS
from whole_programs import PROGRAMS

import meshfuse as mf
from meshfuse.backends.nvfuser.recomputing import Step, steps
from meshfuse.backends.nvfuser.segment import value_types
from meshfuse.dtypes import DataType
from meshfuse.graph import Graph
from meshfuse.host_ir.fusing import by_element
from meshfuse.ops.base import TensorType
from meshfuse.ops.pointwise import pointwise_rule
from meshfuse.segmentation import Segment, SegmentedDefinition

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import gpu_works  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.nvfuser


def planned(segmented: SegmentedDefinition, segment: Segment) -> tuple[list[Step], dict[int, TensorType]]:
    inner = list(dict.fromkeys(v for c in segment.computes for v in (*c.inputs, *c.outputs)))
    kinds = dict(zip(inner, value_types(segmented, inner, 0), strict=True))
    return steps(segmented.resharded.graph, segment.computes, kinds, set(segment.outputs)), kinds


def number(name: str) -> int:
    return int(re.fullmatch(r"v(\d+)(?:_(?:own)?\d+)?", name)[1])  # type: ignore[index]


def definitions() -> dict[str, mf.FusionDefinition]:
    mesh = mf.DeviceMesh((2,), ("r",))
    return {
        **{f"{name} of segments": make() for name, make in ((p.__name__, p) for p in SEGMENTS)},
        **{name: program.definition(mesh, DataType.Float) for name, program in PROGRAMS.items()},
        "block": gpu_works.Block(2, 8, 32, 4).definition(1),
        "composed block": gpu_works.Block(2, 8, 32, 4, fused=False).definition(2),
    }


@pytest.mark.parametrize("name", list(definitions()))
def test_every_value_is_the_op_of_its_operands(name: str) -> None:
    """Under whatever name: ops are done in an order in which all that they take is there."""
    segmented = definitions()[name].latest(()).segmented
    for segment in (part for part in segmented.parts if isinstance(part, Segment)):
        found, _ = planned(segmented, segment)
        there = {f"v{v}" for v in segment.inputs}
        for step in found:
            assert there.issuperset(step.takes) and there.isdisjoint(step.gives)
            assert tuple(map(number, step.takes)) == step.compute.inputs
            assert tuple(map(number, step.gives)) == step.compute.outputs
            there.update(step.gives)
        first = [step.compute for step in found if all("_" not in name for name in step.gives)]
        assert first == list(segment.computes)


def kept_bytes(segmented: SegmentedDefinition, found: list[Step], kinds: dict[int, TensorType]) -> int:
    """Of the values that ops other than products make and ops of a later stage read."""
    graph = segmented.resharded.graph
    stage: dict[str, int] = {}
    light: set[str] = set()
    kept: set[str] = set()
    for step in found:
        heavy = not by_element(graph.nodes[step.compute.node].call)
        here = max((stage.get(name, 0) for name in step.takes), default=0)
        if again := re.search(r"_(\d+)$", step.gives[0]):
            here = int(again[1])
        kept.update(name for name in step.takes if name in light and (heavy or stage.get(name, 0) < here))
        stage.update(dict.fromkeys(step.gives, here + heavy))
        light.update(() if heavy else step.gives)
    return sum(kinds[number(name)].nbytes for name in kept)


def test_a_blocks_gradient_keeps_what_products_read_and_little_more() -> None:
    """Bytes per element of the hidden layer: 24 of GELU's values alone if all are kept."""
    block = gpu_works.Block(2, 64, 32, 4)
    segmented = block.definition(1).latest(()).segmented
    (segment,) = (part for part in segmented.parts if isinstance(part, Segment))
    found, kinds = planned(segmented, segment)
    names = [(tuple(f"v{v}" for v in side) for side in (c.inputs, c.outputs)) for c in segment.computes]
    plain = [Step(c, *pair) for c, pair in zip(segment.computes, names, strict=True)]
    before, after = kept_bytes(segmented, plain, kinds), kept_bytes(segmented, found, kinds)
    assert after < 0.5 * before, (before, after)


def test_what_follows_from_two_large_values_is_kept() -> None:
    """To compute a residual again would read both of its terms; of a cast of it, the smaller form is kept."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([64, 64], dtype=DataType.BFloat16), fd.define_tensor([64, 64], dtype=DataType.BFloat16)
        first = fd.ops.cast(fd.ops.add(x, fd.ops.linear(x, w)), DataType.BFloat16)
        second = fd.ops.linear(fd.ops.cast(fd.ops.exp(first), DataType.BFloat16), w)
        fd.add_output(fd.ops.add(first, second))
        fd.mesh_split(x, mf.DeviceMesh((1,), ("r",)), [None, None])
    segmented = fd.latest(()).segmented
    (segment,) = (part for part in segmented.parts if isinstance(part, Segment))
    found, _ = planned(segmented, segment)
    assert all("_" not in name for step in found for name in step.gives)


@pytest.mark.parametrize("name", list(definitions()))
def test_what_is_broadcast_is_made_for_one_reader(name: str) -> None:
    """Unless it follows from a reduction, or is an input: nvFuser's kernels write shared ones behind their end."""
    segmented = definitions()[name].latest(()).segmented
    graph = segmented.resharded.graph
    for segment in (part for part in segmented.parts if isinstance(part, Segment)):
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
    found, _, graph = composed_attention()
    wheres = [s for s in found if graph.nodes[s.compute.node].call.op.name == "where"]
    masks = [s.takes[0] for s in wheres]
    assert len(masks) >= 2 and len(set(masks)) == len(masks)


def composed_attention() -> tuple[list[Step], dict[int, TensorType], Graph]:
    segmented = gpu_works.Block(2, 8, 32, 4, fused=False).definition(1).latest(()).segmented
    (segment,) = (part for part in segmented.parts if isinstance(part, Segment))
    return (*planned(segmented, segment), segmented.resharded.graph)
