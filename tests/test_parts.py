"""Tensors that are put together of parts which lie over ranks: what is summed over them is summed part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import meshfuse as mf
from defining import graph_of, random_inputs
from meshfuse.compiler import compile_definition
from meshfuse.executor.arguments import Inputs
from meshfuse.graph import CallTable, Graph, Node, Tensor, numbered
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.rules import FactorKind
from meshfuse.ops.values import TensorRef, TensorType
from meshfuse.plans import plan_cache
from meshfuse.plans import shape_reuse as nearby
from meshfuse.rewrites.split_concats import Parted
from meshfuse.sharding.layout import Split
from meshfuse.testing import assert_same_as_unsharded, definitions, inputs_for
from meshfuse.testing.check import assert_close, tolerance_of
from meshfuse.testing.concat_distributive import evaluated, on_parts

T = mf.TensorView
N = 8
MESH = mf.DeviceMesh((N,), ("sp",))
WORLD = mf.DeviceMesh([0])
B, H, S, D = 2, 4, 64, 16
NEW = 3


# What is read where `OpDef.concat_distributive` is used; `check_op` compares it with the op's lowering.


@pytest.mark.parametrize(
    "name", ["mul", "sum", "matmul", "linear", "permute", "broadcast", "contract", "cast", "where"]
)
def test_what_was_put_together_is_not_any_more(name: str) -> None:
    """Along the first dim of the first operand."""
    op = OPS[name]
    sample = op.samples()[0]
    rule = op.rule(make_call(op, sample))
    (factor,) = rule.operands[0][-1 if rule.factors[0].kind is FactorKind.BLOCK else 0]
    graph = on_parts(op, sample, rule, factor, 1)
    read = {i for node in graph.nodes for i in node.inputs}
    joined = [node for node in graph.nodes if node.name == "cat"]
    assert read.issuperset(graph.input_tensors) and all(node.outputs[0] in graph.outputs for node in joined)


# Random programs, of which an input is put together of two: unsharded, so that nothing but the rewriting is tested.


def put_together(graph: Graph, tensor: int, sizes: Sequence[int], dim: int) -> Graph:
    """The graph with parts of these sizes in the place of an input."""
    whole, last = graph.tensors[tensor], len(graph.tensors)
    shapes = [tuple(n if d == dim else old for d, old in enumerate(whole.type.shape)) for n in sizes]
    made = [Tensor(last + i, TensorType(shape, whole.type.dtype), whole.line) for i, shape in enumerate(shapes)]
    refs = tuple(TensorRef(t.id) for t in made)
    call, rule = CallTable().get(OPS["cat"], (refs, dim, False), tuple(t.type for t in made))
    cat = Node(0, call, rule, tuple(t.id for t in made), (tensor,), whole.line, len(graph.nodes))
    place = graph.inputs.index(TensorRef(tensor))
    return dataclasses.replace(
        graph,
        tensors=(*graph.tensors, *made),
        nodes=(cat, *(numbered(node, node.id + 1) for node in graph.nodes)),
        inputs=(*graph.inputs[:place], *refs, *graph.inputs[place + 1 :]),
    )


def is_followed(graph: Graph) -> bool:
    """Whether an op was computed on the parts."""
    return len(graph.nodes) > 1 and graph.nodes[0].name != "cat"


@pytest.mark.slow
@pytest.mark.fuzz
def test_random_programs_on_parts_are_the_programs() -> None:
    followed = []

    @settings(max_examples=125 if settings.get_current_profile_name() == "ci" else settings().max_examples)
    @given(definitions(), st.data())
    def check(fd: mf.FusionDefinition, data: st.DataObject) -> None:
        inputs, graph = inputs_for(fd), graph_of(fd)
        dims = [(place, dim) for place, t in enumerate(inputs) if isinstance(t, torch.Tensor)
                for dim, n in enumerate(t.shape) if n > 1]  # fmt: skip
        assume(dims and len(inputs) == len(graph.input_tensors))
        place, dim = data.draw(st.sampled_from(dims))
        n = inputs[place].shape[dim]
        first = data.draw(st.integers(1, n - 1))
        sizes = data.draw(st.sampled_from([(first, n - first), (first, 0, n - first)]))
        other = Parted((0,))(put_together(graph, graph.input_tensors[place], sizes, dim))
        followed.append(is_followed(other))
        parts = [*inputs[:place], *inputs[place].split(sizes, dim), *inputs[place + 1 :]]
        for output, a, b in zip(fd.recording.outputs, evaluated(graph, inputs), evaluated(other, parts), strict=True):
            # What is less precise than Float is rounded for each part: a few times its epsilon.
            assert_close(b, a, max(1e-4, 4 * tolerance_of(fd, output) ** 2), str(other))

    check()
    assert sum(followed) > len(followed) / 4


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 1), st.data())
def test_windows_of_what_is_put_together(sizes: list[int], dim: int, data: st.DataObject) -> None:
    """From within a part, over several, of none; and of both dims."""
    parts = [torch.randn((n, 3) if dim == 0 else (3, n), dtype=torch.float64) for n in sizes]
    whole = torch.cat(parts, dim)
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape]
    (a, b), (c, d) = bounds
    with mf.FusionDefinition() as fd:
        made = [fd.define_tensor(list(part.shape), dtype=mf.DataType.Double) for part in parts]
        window = fd.ops.slice(fd.ops.cat(made, dim), [a, c], [b, d])
        for out in (fd.ops.exp(window), fd.ops.sum(window, [dim])):
            fd.add_output(out)
    found = evaluated(Parted((0,))(graph_of(fd)), parts)
    torch.testing.assert_close(found, [whole[a:b, c:d].exp(), whole[a:b, c:d].sum(dim)])


# Programs, and what is known to be the least that they move: bytes of a rank.


def all_reduce(elements: int) -> float:
    return 2 * (N - 1) / N * 4 * elements


def attention(fd: mf.FusionDefinition, q: T, k: T, v: T) -> T:
    scores = fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2])) * 0.25
    return fd.ops.matmul(fd.ops.softmax(scores, -1), v)


def split(fd: mf.FusionDefinition, shape: list[int], spec: list[str | None] | None = None) -> T:
    made = fd.define_tensor(shape)
    if spec is not None:
        fd.mesh_split(made, MESH, spec)
    return made


def cache(fd: mf.FusionDefinition, length: int = S) -> T:
    return split(fd, [B, H, length, D], [None, None, "sp", None])


def token(fd: mf.FusionDefinition) -> T:
    return split(fd, [B, H, NEW, D])


ATTENTION = all_reduce(B * H * NEW * D) + 2 * all_reduce(B * H * NEW)


def cache_and_tokens(fd: mf.FusionDefinition) -> T:
    k, v = (fd.ops.cat([cache(fd), token(fd)], 2) for _ in "kv")
    return attention(fd, token(fd), k, v)


def tokens_before_the_cache(fd: mf.FusionDefinition) -> T:
    k, v = (fd.ops.cat([token(fd), cache(fd)], 2) for _ in "kv")
    return attention(fd, token(fd), k, v)


def two_caches(fd: mf.FusionDefinition) -> T:
    k, v = (fd.ops.cat([cache(fd), cache(fd, S // 2)], 2) for _ in "kv")
    return attention(fd, token(fd), k, v)


def appended_twice(fd: mf.FusionDefinition) -> T:
    k, v = (fd.ops.cat([fd.ops.cat([cache(fd), token(fd)], 2), token(fd)], 2) for _ in "kv")
    return attention(fd, token(fd), k, v)


def with_nothing(fd: mf.FusionDefinition) -> T:
    """One of the parts is empty: of nothing there is no maximum."""
    k, v = (fd.ops.cat([cache(fd), split(fd, [B, H, 0, D]), token(fd)], 2) for _ in "kv")
    return attention(fd, token(fd), k, v)


def masked(fd: mf.FusionDefinition) -> T:
    """A bias along the keys, which is whole."""
    k, v = (fd.ops.cat([cache(fd), token(fd)], 2) for _ in "kv")
    bias = split(fd, [S + NEW])
    scores = fd.ops.matmul(token(fd), fd.ops.permute(k, [0, 1, 3, 2])) + bias
    return fd.ops.matmul(fd.ops.softmax(scores, -1), v)


def rotated(fd: mf.FusionDefinition) -> T:
    """Half of each key turned, as for places in a sequence."""
    k, v = (fd.ops.cat([cache(fd), token(fd)], 2) for _ in "kv")
    low = fd.ops.slice(k, [0, 0, 0, 0], [B, H, S + NEW, D // 2])
    high = fd.ops.slice(k, [0, 0, 0, D // 2], [B, H, S + NEW, D])
    return attention(fd, token(fd), fd.ops.cat([fd.ops.neg(high), low], 3), v)


def mean(fd: mf.FusionDefinition) -> T:
    rows = split(fd, [S, D], ["sp", None])
    return fd.ops.mean(fd.ops.cat([split(fd, [1, D]), rows], 0), [0])


def gram(fd: mf.FusionDefinition) -> T:
    rows = fd.ops.cat([split(fd, [S, D], ["sp", None]), split(fd, [NEW, D])], 0)
    return fd.ops.matmul(fd.ops.permute(rows, [1, 0]), rows)


LEAST: dict[Callable[[mf.FusionDefinition], T], float] = {
    cache_and_tokens: ATTENTION,
    tokens_before_the_cache: ATTENTION,
    two_caches: ATTENTION,
    appended_twice: ATTENTION,
    with_nothing: ATTENTION,
    masked: ATTENTION,
    rotated: ATTENTION,
    mean: all_reduce(D),
    gram: all_reduce(D * D),
}


def defined(program: Callable[[mf.FusionDefinition], T]) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        out = program(fd)
        fd.mesh_split(out, MESH, [None] * out.ndim)
        fd.add_output(out)
    return fd


@pytest.mark.slow
@pytest.mark.parametrize("program", LEAST, ids=lambda program: program.__name__)
def test_sums_over_parts_move_the_least(program: Callable[[mf.FusionDefinition], T]) -> None:
    fd = defined(program)
    assert fd.bill().total == pytest.approx(LEAST[program], rel=1e-9)
    assert_same_as_unsharded(fd, random_inputs(fd))


@pytest.mark.slow
@pytest.mark.parametrize("program", LEAST, ids=lambda program: program.__name__)
def test_gradients_through_parts(program: Callable[[mf.FusionDefinition], T]) -> None:
    """No part moves: a gradient is cut where they were put together. What is as large as the result moves twice."""
    with mf.FusionDefinition() as fd:
        out = program(fd)
        loss = fd.ops.sum(out * out, list(range(out.ndim)))
        for result in (loss, *fd.grad(loss, fd.fusion.inputs())):
            fd.add_output(result)
    of_bias = all_reduce(S + NEW) if program is masked else 0.0
    assert fd.bill().total <= 2 * LEAST[program] + of_bias
    assert_same_as_unsharded(fd, random_inputs(fd))


def test_what_has_a_name_is_as_the_user_says() -> None:
    """A tensor between that is annotated is put together, and lies where the annotation says."""
    with mf.FusionDefinition() as fd:
        k = fd.ops.cat([cache(fd), token(fd)], 2)
        scores = fd.ops.matmul(token(fd), fd.ops.permute(k, [0, 1, 3, 2]))
        fd.mesh_split(scores, MESH, [None, None, None, "sp"])
        fd.add_output(fd.ops.sum(fd.ops.exp(scores), [3]))
    wanted = fd.compile().sharded.shardings[scores.id]
    assert wanted.dims[-1] == (Split(N, "sp"),)
    assert_same_as_unsharded(fd, random_inputs(fd))


def test_the_whole_may_be_wanted_too() -> None:
    """The new cache is an output, laid out like the old one: that alone moves what it must."""

    def program(fd: mf.FusionDefinition, attends: bool) -> mf.FusionDefinition:
        with fd:
            k = fd.ops.cat([cache(fd), token(fd)], 2)
            fd.mesh_split(k, MESH, [None, None, "sp", None])
            fd.add_output(k)
            if attends:
                out = attention(fd, token(fd), k, k)
                fd.mesh_split(out, MESH, [None] * 4)
                fd.add_output(out)
        return fd

    fd, alone = program(mf.FusionDefinition(), True), program(mf.FusionDefinition(), False)
    assert fd.bill().total <= alone.bill().total + ATTENTION
    assert_same_as_unsharded(fd, random_inputs(fd))


def layers(count: int, search: str | None = None) -> mf.FusionDefinition:
    """Each attends to its own cache and the tokens."""
    with mf.FusionDefinition(search=search) as fd:
        x = token(fd)
        for _ in range(count):
            k, v = (fd.ops.cat([cache(fd), x * split(fd, [D])], 2) for _ in "kv")
            x = x + attention(fd, x, k, v)
        fd.mesh_split(x, MESH, [None] * 4)
        fd.add_output(x)
    return fd


@pytest.mark.slow
def test_so_do_many_layers() -> None:
    fd = layers(30)
    assert fd.bill().total <= 30 * ATTENTION * (1 + 1e-9)
    assert_same_as_unsharded(fd, [t / 8 for t in random_inputs(fd)])
    assert layers(30, "fast").bill().total > 2 * fd.bill().total


def test_many_parts_are_put_together() -> None:
    """Each op on parts would be as many ops."""
    with mf.FusionDefinition() as fd:
        rows = [split(fd, [N, D], ["sp", None]) for _ in range(20)]
        fd.add_output(fd.ops.sum(fd.ops.exp(fd.ops.cat(rows, 0)), [0]))
    assert Parted not in map(type, fd.compile().graph.rewritings)
    assert_same_as_unsharded(fd, random_inputs(fd))


@pytest.mark.slow
def test_a_plan_on_parts_is_stored_and_made_again() -> None:
    fd = defined(cache_and_tokens)
    plan = fd.compile().planned
    assert Parted in map(type, plan.graph.rewritings)
    again = plan_cache.unpacked(plan_cache.packed(plan), graph_of(fd))
    assert str(again) == str(plan)


@pytest.mark.slow
def test_the_plan_of_other_sizes_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are cut where the sizes at hand say."""
    monkeypatch.setattr("meshfuse.compiler.PLANS", nearby.Plans())
    with mf.FusionDefinition() as fd:
        kept, new, q = fd.define_tensor([B, H, -1, D]), fd.define_tensor([B, H, -1, D]), token(fd)
        fd.mesh_split(kept, MESH, [None, None, "sp", None])
        k = fd.ops.cat([kept, new], 2)
        fd.add_output(attention(fd, q, k, k))
    for length, more in ((S, 2), (S + N, 3)):
        shapes = ((B, H, length, D), (B, H, more, D), (B, H, NEW, D))
        sizes = dict(enumerate(shapes))
        compiled = compile_definition(fd.recording, sizes, {}, WORLD, near_factor=2.0)
        assert (compiled.taken_from is None) == (length == S) and Parted in map(type, compiled.graph.rewritings)
        fd._programs.compiled[fd._programs.key(Inputs({}, {}, torch.device("cpu")), sizes, WORLD)] = compiled
        assert_same_as_unsharded(fd, [torch.randn(shape) for shape in shapes])
