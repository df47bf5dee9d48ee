"""Programs of equal layers, which share their decisions: as good as each for itself, and no dearer per layer."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import meshfuse as mf
from defining import graph_of
from interpreter import has_reference, interpret
from meshfuse.compiler import compile_sharded, decided
from meshfuse.graph import Graph
from meshfuse.planner import frame
from meshfuse.planner.answer import Optimum
from meshfuse.planner.effort import Effort
from meshfuse.planner.equal_layers import deciders
from meshfuse.planner.optimum import solved
from meshfuse.planner.prices import Prices
from meshfuse.planner.reshard_costs import whole_axes
from meshfuse.plans.plan_cost import plan_cost
from meshfuse.propagation import ShardedDefinition, propagate
from meshfuse.report.bill import bill_of
from meshfuse.testing import assert_same_as_unsharded, inputs_for

TP = mf.DeviceMesh((4,), ("tp",))
EIGHT = mf.DeviceMesh((8,), ("tp",))
GRID = mf.DeviceMesh((2, 2), ("dp", "tp"))
ROWS, WIDTH, HIDDEN = 8, 16, 32
Fd, T = mf.FusionDefinition, mf.TensorView
Spec = list[str | None]
# A layer takes the rows and the weights that it adds its own to.
Layer = Callable[[Fd, T, list[T]], T]


def weight(
    fd: Fd, shape: list[int], mesh: mf.DeviceMesh, spec: Spec, weights: list[T], dtype: mf.DataType = mf.DataType.Float
) -> T:
    made = fd.define_tensor(shape, dtype=dtype)
    fd.mesh_split(made, mesh, spec)
    weights.append(made)
    return made


def mlp(mesh: mf.DeviceMesh, first: Spec, second: Spec, hidden: int = HIDDEN) -> Layer:
    def layer(fd: Fd, x: T, weights: list[T]) -> T:
        width = x.type.shape[1]
        w, v = (
            weight(fd, shape, mesh, spec, weights)
            for shape, spec in (([width, hidden], first), ([hidden, width], second))
        )
        return x + fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(x, w)), v)

    return layer


def normed(mesh: mf.DeviceMesh, first: Spec) -> Layer:
    def layer(fd: Fd, x: T, weights: list[T]) -> T:
        width = x.type.shape[1]
        w = weight(fd, [width, width], mesh, first, weights)
        gain = weight(fd, [width], mesh, [None], weights)
        return x + fd.ops.tanh(fd.ops.matmul(fd.ops.rms_norm(x, [width], gain), w))

    return layer


def gated(mesh: mf.DeviceMesh) -> Layer:
    """A gated unit whose two halves are one product: the halves of its columns lie on other ranks than they meet on."""

    def layer(fd: Fd, x: T, weights: list[T]) -> T:
        rows, width = x.type.shape
        both = fd.ops.matmul(x, weight(fd, [width, 8 * width], mesh, [None, "tp"], weights))
        half, gate = (fd.ops.slice(both, [0, at], [rows, at + 4 * width]) for at in (0, 4 * width))
        return x + fd.ops.matmul(fd.ops.silu(gate) * half, weight(fd, [4 * width, width], mesh, ["tp", None], weights))

    return layer


def stacked(
    layers: list[Layer], mesh: mf.DeviceMesh, rows: Spec, size: tuple[int, ...] = (ROWS, WIDTH), *, grad: bool = True,
    search: str | None = None,
) -> Fd:  # fmt: skip
    """The layers one after the other, and the gradients by their weights."""
    weights: list[T] = []
    with mf.FusionDefinition(search=search) as fd:
        x = fd.define_tensor(list(size))
        fd.mesh_split(x, mesh, rows)
        for layer in layers:
            x = layer(fd, x, weights)
        loss = fd.ops.sum(x * x)
        fd.add_output(loss)
        for made in fd.grad(loss, weights) if grad else ():
            fd.add_output(made)
    return fd


def decisions(graph: Graph) -> int:
    """How many ops decide where they are: all others share the decision of one of these."""
    return len(set(deciders(graph)))


def each_for_itself(graph: Graph, mesh: mf.DeviceMesh) -> Optimum:
    """The optimum in which layers share nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "deciders", lambda graph, _: tuple(range(len(graph.nodes))))
        return solved(graph, mesh, Prices(whole_axes)).refined(parts=False)


def wire(plan: ShardedDefinition) -> float:
    return bill_of(compile_sharded(plan)).total


def check(fd: Fd) -> None:
    """The same numbers as torch's: of inputs so small that they do not grow from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    types = [fd.recording.tensors[i].type for i in fd.recording.input_tensors()]
    inputs = [torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype.value)) / 8 for t in types]
    assert has_reference(fd)
    assert_same_as_unsharded(fd, inputs, interpret(fd, inputs))


COLUMNS, LINES = ["dp", "tp"], ["tp", "dp"]
STACKS = {
    "one axis": lambda: stacked([mlp(TP, [None, "tp"], ["tp", None])] * 24, TP, [None, None]),
    "rows split": lambda: stacked([mlp(TP, ["tp", None], ["tp", None])] * 24, TP, ["tp", None]),
    "two axes": lambda: stacked([mlp(GRID, COLUMNS, LINES)] * 24, GRID, ["dp", None]),
    "axes that clash": lambda: stacked([mlp(GRID, LINES, COLUMNS)] * 24, GRID, ["dp", "tp"]),
    "forward only": lambda: stacked([mlp(GRID, COLUMNS, LINES)] * 110, GRID, ["dp", None], grad=False),
    "layers of two kinds in turn": lambda: stacked(
        [mlp(GRID, COLUMNS, LINES), normed(GRID, [None, "tp"])] * 12, GRID, ["dp", None]
    ),
    "one kind after another": lambda: stacked(
        [mlp(GRID, COLUMNS, LINES)] * 24 + [normed(GRID, ["tp", None])] * 14, GRID, ["dp", None]
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_equal_layers_have_equal_plans_that_are_as_good_as_each_for_itself(name: str) -> None:
    """Equal but for the first one and the last one, where something else begins or ends."""
    graph = graph_of(STACKS[name]())
    assert 6 * decisions(graph) < len(graph.nodes)
    ours, shared = propagate(graph, TP), deciders(graph, ends=True)
    assert ours.graph == graph
    assert all(ours.choices[op].placement == ours.choices[other].placement for op, other in enumerate(shared))
    assert 2 * len(set(shared)) < len(graph.nodes)
    assert plan_cost(ours).seconds <= each_for_itself(graph, TP).seconds * 1.001


def test_numbers_of_programs_whose_layers_share_decisions() -> None:
    for fd in (STACKS["layers of two kinds in turn"](), STACKS["one kind after another"]()):
        check(fd)


def test_an_annotation_of_one_layer_holds() -> None:
    """Layers that differ in what the user says are not equal."""
    layers = [mlp(GRID, COLUMNS, LINES)] * 24
    layers[7] = mlp(GRID, [None, "tp"], [None, None])
    fd = stacked(layers, GRID, ["dp", None])
    graph = graph_of(fd)
    shared = deciders(graph)
    whole = {i for i, said in graph.annotations.items() if not said.splits}
    odd = [node.id for node in graph.nodes if whole.intersection(node.inputs)]
    assert len(odd) >= 2
    assert all(shared.count(op) == 1 and shared[op] == op for op in odd)
    plan = propagate(graph, GRID)
    assert all(plan.shardings[i] == said for i, said in graph.annotations.items())
    check(fd)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_layers_in_any_order_give_right_numbers(seed: int) -> None:
    """Stretches with odd ones among them: whatever is left out, numbers and annotations are those of the whole."""
    chance = random.Random(seed)
    kinds = [mlp(GRID, COLUMNS, LINES), mlp(GRID, [None, "dp"], ["dp", None]), normed(GRID, ["tp", None])]
    layers: list[Layer] = []
    while len(layers) < 20:
        layers += chance.sample(kinds, chance.randint(1, 2)) * chance.choice([1, 2, 6, 12])
    fd = stacked(layers, GRID, chance.choice([["dp", None], [None, "tp"], ["dp", "tp"]]))
    graph = graph_of(fd)
    assert decisions(graph) < len(graph.nodes)
    plan = propagate(graph, GRID)
    assert all(plan.shardings[i] == said for i, said in graph.annotations.items())
    check(fd)


def read_at_the_end(count: int, read: str, grad: bool) -> Fd:
    """Layers of which the end reads something each: rows, or the second result of an op."""
    kept: list[T] = []
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([ROWS, WIDTH], dtype=mf.DataType.Double)
        weights = [fd.define_tensor([WIDTH, WIDTH], dtype=mf.DataType.Double) for _ in range(count)]
        for made, spec in ((x, ["dp", None]), *((w, ["tp", None]) for w in weights)):
            fd.mesh_split(made, GRID, spec)
        for w in weights:
            x = fd.ops.tanh(fd.ops.matmul(x * 0.25, w))
            variance, mean = fd.ops.var_mean(x, [1])
            kept.append(fd.ops.sum(x, [1]) if read == "rows" else variance)
            x = x - fd.ops.broadcast(mean, [False, True])
        loss = fd.ops.sum(sum(kept[1:], kept[0]) if read == "sums" else fd.ops.cat(kept, 0))
        for made in (loss, x, *(fd.grad(loss, weights[-2:]) if grad else ())):
            fd.add_output(made)
    return fd


@pytest.mark.parametrize(("count", "read", "grad"), [(90, "rows", False), (90, "sums", False), (60, "variances", True)])
def test_what_is_read_of_every_layer_is_there(count: int, read: str, grad: bool) -> None:
    """However many layers are left out, and behind which op the program ends."""
    fd = read_at_the_end(count, read, grad)
    inputs = inputs_for(fd)
    assert_same_as_unsharded(fd, inputs, interpret(fd, inputs))


def test_ops_of_two_layers_or_of_different_ones_decide_for_themselves() -> None:
    two = [mlp(TP, [None, "tp"], ["tp", None])] * 2
    odd = [mlp(TP, [None, "tp"], ["tp", None], HIDDEN + 4 * i) for i in range(24)]
    for layers in (two, odd):
        graph = graph_of(stacked(layers, TP, [None, None]))
        assert decisions(graph) == len(graph.nodes)


def shared(size: int) -> mf.FusionDefinition:
    """Layers that add the same tensor of so many rows to what they make."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([ROWS, WIDTH]), fd.define_tensor([size, WIDTH])
        fd.mesh_split(x, GRID, ["dp", None])
        fd.mesh_split(w, GRID, [None, "tp"])
        weights: list[T] = []
        for _ in range(60):
            v = weight(fd, [WIDTH, WIDTH], GRID, [None, "tp"], weights)
            x = fd.ops.tanh(fd.ops.matmul(x, v)) + x + fd.ops.sum(w, [0])
        fd.add_output(x)
        for made in fd.grad(x, weights):
            fd.add_output(made)
    return fd


def test_layers_that_share_a_large_tensor_are_planned_together() -> None:
    """Whether it pays to bring it where it is read depends on how many layers read it."""
    for size in (4 * WIDTH, 1):
        graph = graph_of(shared(size))
        assert 6 * decisions(graph) < len(graph.nodes)
        assert propagate(graph, GRID).seconds <= each_for_itself(graph, GRID).seconds * 1.001
    check(shared(4 * WIDTH))


# reading across layers ---------------------------------------------------------------------------------------------


DOUBLE = mf.DataType.Double  # what is rounded in one layer grows in those after it


def tail(fd: Fd, chance: random.Random, kept: list[T]) -> T:
    """What the end makes of something of every layer, or of many."""
    some = chance.choice([kept, kept[::2] + kept[1::3], kept[: len(kept) // 2], kept[::-1], [kept[0], kept[-1]]])
    how = chance.choice(["cat", "sum", "products"])
    if how == "cat":
        return fd.ops.cat(some, 0)
    made = some[0]
    for k in some[1:]:
        # Factors below one: with larger ones, the last digits of a layer are all that comes out.
        made = made + k if how == "sum" else fd.ops.sin(made) * fd.ops.sin(k)
    return made


def across(seed: int) -> Fd:
    """A stack of equal layers with reads across them: skips to other layers, losses or outputs of every layer, weights
    that all share, and an end that reads all.
    """
    chance = random.Random(seed)
    count, skip = chance.choice([40, 60, 90]), chance.choice([0, 2, 3, 25])
    mesh, kind, outputs = chance.choice([TP, GRID]), chance.choice(["loss", "sum", "rows", "product"]), seed % 3 == 0
    spec = chance.choice([["tp", None], [None, "tp"], [mesh.names[0], None]])
    weights: list[T] = []
    with mf.FusionDefinition(search=chance.choice(["fast", "auto"])) as fd:
        x = fd.define_tensor([ROWS, WIDTH], dtype=DOUBLE)
        fd.mesh_split(x, mesh, [chance.choice([None, mesh.names[0]]), None])
        for _ in range(chance.randint(0, 2)):
            x = fd.ops.sin(x)
        rows, kept, one = [x], list[T](), chance.random() < 0.3
        for _ in range(count):
            w = weights[0] if one and weights else weight(fd, [WIDTH, WIDTH], mesh, spec, weights, DOUBLE)
            x = fd.ops.tanh(fd.ops.linear(x, w))
            x = x + fd.ops.broadcast(fd.ops.mean(x, [1]), [False, True])
            x = x + rows[-skip] if 0 < skip <= len(rows) else x
            rows.append(x)
            made = {
                "loss": lambda x, w: fd.ops.var_mean(x, [1])[0],
                "sum": lambda x, w: fd.ops.sum(x, [1]),
                "rows": lambda x, w: fd.ops.permute(x, [1, 0]),
                "product": lambda x, w: fd.ops.sum(fd.ops.matmul(x, w), [0]),
            }[kind](x, w)
            kept.append(made)
        end = fd.ops.sum(tail(fd, chance, kept))
        for out in [end, x, *(kept if outputs else ())]:
            fd.add_output(out)
        for made in fd.grad(end, weights[:4]) if chance.random() < 0.4 else ():
            fd.add_output(made)
    return fd


# In program 67 what stands for the operands of some ops is unreduced, and they are not.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [*range(20), 67])
def test_reads_across_layers(seed: int) -> None:
    """Whatever layer a reader that stays reads, one that stays stands for it, and the numbers are torch's."""
    check(across(seed))


@pytest.mark.parametrize("layers", [90, 300])
def test_layers_that_the_end_reads_share_decisions(layers: int) -> None:
    weights, kept = list[T](), list[T]()
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([ROWS, WIDTH])
        fd.mesh_split(x, GRID, ["dp", None])
        for _ in range(layers):
            x = fd.ops.tanh(fd.ops.linear(x, weight(fd, [WIDTH, WIDTH], GRID, ["tp", None], weights)))
            x = x + fd.ops.sin(fd.ops.cos(fd.ops.exp(x)))
            kept.append(fd.ops.sum(x, [1]))
        fd.add_output(fd.ops.cat(kept, 0))
    assert decisions(graph_of(fd)) < 20


# no dearer per layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 5, 12])
def test_layers_share_decisions_in_the_backward_as_in_the_forward(count: int) -> None:
    """Whatever op of a layer the stretches of equal ones begin with, which differs between the two."""
    for mesh, rows in ((TP, [None, "tp", None]), (GRID, ["dp", "tp", None])):
        one, graph = (graph_of(stacked([attention(mesh, [None, None], [None, None])] * n, mesh, rows, (4, 8, WIDTH)))
                      for n in (1, count))  # fmt: skip
        assert decisions(graph) <= 2 * len(one.nodes)


LARGE = (4096, 1024)
KINDS = {
    "one axis": (mlp(TP, [None, "tp"], ["tp", None], 4096), TP, [None, None]),
    "rows split": (mlp(TP, [None, "tp"], ["tp", None], 4096), TP, ["tp", None]),
    "axes that clash": (mlp(GRID, LINES, COLUMNS, 4096), GRID, ["dp", None]),
    "gated": (gated(TP), TP, ["tp", None]),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_of_many_costs_no_more_than_one_of_few(name: str) -> None:
    layer, mesh, rows = KINDS[name]

    def bytes_of(layers: int) -> float:
        graph = graph_of(stacked([layer] * layers, mesh, rows, LARGE))
        return wire(decided(graph, mesh, Effort.THOROUGH))

    two, three = bytes_of(2), bytes_of(3)
    assert bytes_of(24) <= 1.02 * (three + 21 * (three - two))


def masked(count: int, mesh: mf.DeviceMesh, rows: Spec, first: Spec, mask: Spec) -> Fd:
    """Layers that all read one mask, which is large beside the rest, and the gradients by their weights."""
    weights: list[T] = []
    with mf.FusionDefinition() as fd:
        x, kept = fd.define_tensor([512, 64]), fd.define_tensor([512, 64], dtype=mf.DataType.Bool)
        fd.mesh_split(x, mesh, rows)
        fd.mesh_split(kept, mesh, mask)
        for _ in range(count):
            w, gain = (weight(fd, shape, mesh, spec, weights) for shape, spec in (([64, 64], first), ([64], [None])))
            x = x + fd.ops.where(kept, fd.ops.tanh(fd.ops.matmul(fd.ops.rms_norm(x, [64], gain), w)), 0.0)
        loss = fd.ops.sum(x * x)
        for made in (loss, *fd.grad(loss, weights)):
            fd.add_output(made)
    return fd


@pytest.mark.parametrize(
    ("mesh", "rows", "first", "mask"),
    [
        (TP, [None, "tp"], ["tp", None], [None, None]),
        (GRID, ["dp", "tp"], [None, "tp"], ["dp", None]),
        (GRID, ["dp", None], [None, "tp"], ["dp", None]),
    ],
)
def test_layers_that_share_a_mask_cost_no_more_than_few(
    mesh: mf.DeviceMesh, rows: Spec, first: Spec, mask: Spec
) -> None:
    """What all layers read is brought where it is read once."""

    def bytes_of(layers: int) -> float:
        graph = graph_of(masked(layers, mesh, rows, first, mask))
        return wire(decided(graph, mesh))

    three, four = bytes_of(3), bytes_of(4)
    assert bytes_of(40) <= 1.05 * (four + 36 * (four - three))


def attention(mesh: mf.DeviceMesh, first: Spec, second: Spec) -> Layer:
    """Attention written by hand, and a gelu: forward and backward well over a hundred ops."""

    def layer(fd: Fd, x: T, weights: list[T]) -> T:
        batch, length, width = x.type.shape

        def heads() -> T:
            rows = fd.ops.matmul(x, weight(fd, [width, width], mesh, first, weights))
            return fd.ops.permute(fd.ops.reshape(rows, [batch, length, HEADS, width // HEADS]), [0, 2, 1, 3])

        q, k, v = heads(), heads(), heads()
        scores = fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2])) * (width // HEADS) ** -0.5
        mixed = fd.ops.permute(fd.ops.matmul(fd.ops.softmax(scores, -1), v), [0, 2, 1, 3])
        merged = fd.ops.reshape(mixed, [batch, length, width])
        x = x + fd.ops.matmul(merged, weight(fd, [width, width], mesh, second, weights))
        return x + fd.ops.gelu(fd.ops.layer_norm(x, [width], None, None))

    return layer


HEADS = 4
FEW_LAYERS = {
    "one axis": (attention(TP, [None, None], [None, None]), TP, [None, "tp", None]),
    "two axes": (attention(GRID, [None, None], [None, None]), GRID, ["dp", "tp", None]),
    "weights, too": (attention(GRID, [None, "tp"], ["tp", None]), GRID, ["dp", "tp", None]),
    "by heads": (attention(TP, [None, "tp"], ["tp", None]), TP, [None, None, None]),
    "by heads and batch": (attention(GRID, [None, "tp"], ["tp", None]), GRID, ["dp", None, None]),
}


@pytest.mark.parametrize(
    "name, counts",
    [("two axes", (4,)), ("by heads and batch", (12,))],
)
def test_every_layer_of_some_costs_as_much(name: str, counts: tuple[int, ...]) -> None:
    """As many ops as are planned as they are, and more: there is no step between."""
    layer, mesh, rows = FEW_LAYERS[name]

    def bytes_of(layers: int) -> float:
        return wire(decided(graph_of(stacked([layer] * layers, mesh, rows, (4, 512, 256))), mesh))

    one, two = bytes_of(1), bytes_of(2)
    for layers in counts:
        assert bytes_of(layers) <= 1.02 * (two + (layers - 2) * (two - one))


@pytest.mark.parametrize(("alike", "many"), [(True, 36), (False, 18)])
def test_layers_of_long_programs_have_rows_in_groups_of_ranks_as_short_ones_do(alike: bool, many: int) -> None:
    """Rows in two groups and columns over the four ranks of each, which no op asks for, also of layers that differ."""

    def bytes_of(layers: int) -> float:
        different = [mlp(EIGHT, [None, "tp"], ["tp", None], 4096 + (0 if alike else 8 * i)) for i in range(layers)]
        graph = graph_of(stacked(different, EIGHT, [None, None], (4096, 1024)))
        assert layers < 10 or (decisions(graph) < len(graph.nodes)) == alike
        return wire(decided(graph, EIGHT))

    one, two = bytes_of(1), bytes_of(2)
    assert bytes_of(many) <= 1.05 * (two + (many - 2) * (two - one))


@pytest.mark.parametrize("name", FEW_LAYERS)
def test_numbers_of_few_layers_that_are_searched(name: str) -> None:
    layer, mesh, rows = FEW_LAYERS[name]
    fd = stacked([layer] * 5, mesh, rows, (4, 8, WIDTH))
    check(fd)


def test_an_effort_is_that_of_the_environment_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_SEARCH", "fast")
    assert mf.FusionDefinition()._programs.effort is Effort.FAST
    assert mf.FusionDefinition(search="thorough")._programs.effort is Effort.THOROUGH
    monkeypatch.setenv("MESHFUSE_SEARCH", "long")
    with pytest.raises(
        mf.DefinitionError, match="MESHFUSE_SEARCH: found 'long', needed 'follow', 'fast', 'auto' or 'thorough'"
    ):
        mf.FusionDefinition()


@pytest.mark.parametrize("wrong", ["slow", "", 1, True, ["fast"]])
def test_wrong_efforts(wrong: object) -> None:
    with pytest.raises(
        mf.DefinitionError, match=r"search: found .*, needed 'follow', 'fast', 'auto' or 'thorough'. .*\(at "
    ):
        mf.FusionDefinition(search=wrong)  # type: ignore[arg-type]
