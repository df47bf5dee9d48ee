"""`repr(fd)` is Python that rebuilds an equal definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshfuse as mf
from defining import rebuilt
from meshfuse.definition.annotation import Annotation
from meshfuse.definition.loop import LoopDomain
from meshfuse.ops import OPS
from meshfuse.ops.opdef import Sample
from meshfuse.ops.values import TensorType

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))


def same_definition(a: mf.FusionDefinition, b: mf.FusionDefinition) -> bool:
    """Whether inputs, ops, outputs and annotations are equal; source lines may differ."""
    return _facts(a) == _facts(b)


def _facts(fd: mf.FusionDefinition) -> tuple[Any, ...]:
    """All that a definition says. Numbers as text: nan equals itself, and 1, 1.0 and True differ."""
    nodes = [(node.op.name, repr(node.args), node.inputs, node.outputs) for node in fd.recording.nodes]
    notes = {i: _annotation_facts(a) for i, a in fd.recording.all_annotations.items() if _says_something(a)}
    tensors = [(made.type, made.stride_order) for made in fd.recording.tensors]
    overlaps = {i: overlap[:3] for i, overlap in fd.recording.overlaps.items()}
    return (
        tensors,
        repr(fd.recording.scalars),
        nodes,
        fd.recording.inputs,
        fd.recording.outputs,
        notes,
        overlaps,
        fd.recording.seed,
    )


def _says_something(annotation: Annotation) -> bool:
    domain = annotation.domain.unmerged()
    edited = (
        len(domain.order) > len(domain.roots)
        or not _in_order(domain)
        or any(leaf.axis or leaf.swizzled for leaf in domain.order)
    )
    return annotation.mesh is not None or edited or annotation.allocation is not None or annotation.memory is not None


def _in_order(domain: LoopDomain) -> bool:
    flat = [leaf for root in domain.roots for leaf in root]
    return all(a is b for a, b in zip(flat, domain.order, strict=True))


def _annotation_facts(annotation: Annotation) -> tuple[Any, ...]:
    domain = annotation.domain.unmerged()
    leaves = {id(leaf): place for place, leaf in enumerate(domain.order)}
    roots = [
        [(leaf.size, leaf.axis, leaf.reduction, leaf.swizzled, leaf.pre, leaves[id(leaf)]) for leaf in root]
        for root in domain.roots
    ]
    return (annotation.mesh, roots, annotation.allocation, annotation.memory)


def check(fd: mf.FusionDefinition) -> None:
    twin = rebuilt(fd)
    assert same_definition(fd, twin), repr(fd)
    assert repr(twin) == repr(fd)


def _sample_definition(name: str, sample: Sample) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:

        def value(arg: Any) -> Any:
            if isinstance(arg, TensorType):
                return fd.define_tensor(list(arg.shape), dtype=arg.dtype)
            if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], TensorType):
                return [value(a) for a in arg]
            return arg

        made = fd.call(name, [value(a) for a in sample.args], {k: value(v) for k, v in sample.kwargs.items()})
        for result in made if isinstance(made, tuple) else (made,):
            fd.add_output(result)
    return fd


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_prints_and_reads_back(name: str) -> None:
    samples = OPS[name].samples()
    assert samples
    for sample in samples:
        check(_sample_definition(name, sample))


def test_the_text_is_the_code_that_makes_it() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8, 4], dtype=mf.DataType.BFloat16)
        w = fd.define_tensor([16, 4], dtype=mf.DataType.BFloat16)
        y = fd.ops.sum(fd.ops.linear(x, w), 1)
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["dp", None, None])
        fd.mesh_split(w, MESH, [["tp", "dp"], None])
    assert (
        repr(fd)
        == """\
import meshfuse as mf

mesh0 = mf.DeviceMesh((2, 4), ('dp', 'tp'))
with mf.FusionDefinition() as fd:
    t0 = fd.define_tensor([-1, 8, 4], dtype=mf.DataType.BFloat16)
    t1 = fd.define_tensor([16, 4], dtype=mf.DataType.BFloat16)
    t2 = fd.ops.linear(t0, t1)
    t3 = fd.ops.sum(t2, dims=1)
    fd.add_output(t3)
    fd.mesh_split(t0, mesh0, ['dp', None, None])
    fd.mesh_split(t1, mesh0, [['tp', 'dp'], None])
"""
    )


def _nvfuser_style(fd: mf.FusionDefinition, x: mf.TensorView, y: mf.TensorView) -> None:
    """Splits of all kinds, a split reduction dim, order, streams and memory order."""
    x.set_device_mesh(MESH)
    x.outer_split(0, 2)
    x.axis(0).parallelize(mf.ParallelType.mesh_y)
    x.inner_split(2, 4)
    x.outer_split(2, 3)
    x.axis(3).parallelize(mf.ParallelType.stream)
    x.reorder({3: 0})
    x.swizzle1d(0, mf.ParallelType.stream)
    x.set_allocation_domain([x.axis(2), x.axis(5), x.axis(3)])
    y.set_device_mesh(MESH)
    y.outer_split(-1, 4)
    y.axis(-2).parallelize(mf.ParallelType.mesh_x)
    y.set_memory_type("symmetric")


def _mixed(fd: mf.FusionDefinition, x: mf.TensorView, y: mf.TensorView) -> None:
    """A mesh_split that nvFuser's calls then go on with."""
    fd.mesh_split(x, MESH, [[mf.Split(3), mf.Split(2, "tp", 2)], None, "dp"])
    x.outer_split(3, 2)
    x.axis(3).parallelize(mf.ParallelType.stream)
    fd.mesh_split(y, MESH, ["dp", None, None])
    y.outer_split(-1, 4)
    y.axis(-2).parallelize(mf.ParallelType.mesh_x)


def _mesh_only(fd: mf.FusionDefinition, x: mf.TensorView, y: mf.TensorView) -> None:
    x.set_device_mesh(mf.DeviceMesh([3, 1, 2]))
    y.set_allocation_domain([y.axis(2), y.axis(0), y.axis(1)])


def _by_number(fd: mf.FusionDefinition, x: mf.TensorView, y: mf.TensorView) -> None:
    fd.mesh_split(x, MESH, [-1, [1, 0], "stream"])
    fd.shard(y, mf.Sharding(MESH, ((mf.Split(3), mf.Split(4, "tp")), (), ())))


@pytest.mark.parametrize("annotate", [_nvfuser_style, _mixed, _mesh_only, _by_number])
@pytest.mark.parametrize("static", [True, False])
def test_annotations_print_and_read_back(annotate: Callable[..., None], static: bool) -> None:
    with mf.FusionDefinition(seed=5) as fd:
        x = fd.define_tensor([24, 16, 8] if static else [-1, -1, -1], stride_order=[0, 2, 1])
        w = fd.define_tensor([12, 8])
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        fd.add_output(fd.ops.relu(y))
        annotate(fd, x, y)
    check(fd)


def test_scalars_and_special_numbers() -> None:
    with mf.FusionDefinition() as fd:
        n = fd.define_scalar(dtype=mf.DataType.Int)
        x = fd.define_tensor([-1, 4])
        k = fd.define_scalar(3)
        a, b = fd.define_vector(2)
        width = x.size(1) * k + n % 2
        y = fd.ops.full([width, a, 2], float("-inf"), mf.DataType.Float)
        z = fd.ops.where(fd.ops.isnan(y), float("nan"), fd.ops.cast(b, mf.DataType.Double) / 2)
        c = fd.ops.mul(fd.ops.cast(z, mf.DataType.ComplexFloat), complex(0.0, float("inf")))
        fd.add_output(c)
        fd.add_output(fd.ops.add(x, -0.0))
    check(fd)
    assert [type(ref).__name__ for ref in fd.recording.inputs] == ["ScalarRef", "TensorRef", "ScalarRef", "ScalarRef"]


def test_definitions_that_differ_are_not_equal() -> None:
    def make(value: Any = 1.0, annotate: bool = False, shape: int = 4, order: Any = None) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([shape, 4], stride_order=order)
            fd.add_output(fd.ops.mul(x, value))
            if annotate:
                x.set_device_mesh(MESH)
        return fd

    assert same_definition(make(), make())
    for other in (make(1), make(2.0), make(annotate=True), make(shape=5), make(order=[0, 1])):
        assert not same_definition(make(), other)


def test_an_empty_definition_prints_and_reads_back() -> None:
    check(mf.FusionDefinition())
