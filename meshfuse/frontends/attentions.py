"""The attentions of a captured graph under context parallelism: which of them go through a ring, and which not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import SourceLine, user_error
from .captured_graph import Captured
from .context import RING, Context
from .cut import base_name, is_view
from .fsdp import without_axes
from .lines import line_of
from .plans import axes_in
from .sdpa import BACKWARD, ENTER, FORWARD, LEAVE
from .sizes import Sizes
from .spread import Spread
from .steps import Setting

Node = torch.fx.Node
# By op the places of its query, key, value and, of its backward, of the output's gradient.
_OPERANDS = {0: "query", 1: "key", 2: "value"}
_NAMES = {FORWARD: _OPERANDS, BACKWARD: {**{place + 1: name for place, name in _OPERANDS.items()}, 0: "gradient"}}
_OUTPUT = 5  # The place of attention's output among what its backward reads.
_DIMS = 4  # Of a query: batch, heads, rows, width.
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"))


def check_attends(graph: Captured, context: Context | None, line: SourceLine) -> None:
    """Raises DefinitionError where there is a context, and no attention in a captured graph."""
    if context is not None and not graph.module.graph.find_nodes(op="call_function", target=FORWARD):
        raise user_error(
            "parallelize: context for a model without attention",
            "no call of torch.nn.functional.scaled_dot_product_attention",
            "at least one, without a gradient for its mask",
            'Have the model call it (transformers: attn_implementation="sdpa"), or leave context out.', line,
        )  # fmt: skip


def with_borders(graph: Captured, is_ring: bool) -> Captured:
    """A captured graph in which attention has its operands and results from `enter_attention` and `leave_attention`.

    What attention saves for its backward is between these. The graph that is given stays as it is.

    is_ring: whether attention is in a ring over all axes of its rows: then nothing moves at its borders.
    """
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    made.output(made.graph_copy(graph.module.graph, copies))
    entered: dict[tuple[Node, Node], Node] = {}
    left: dict[Node, Node] = {}
    for node in made.find_nodes(op="call_function", target=BACKWARD):
        node.update_arg(_OUTPUT, _base(node.args[_OUTPUT]))  # as attention has made it
    for target, names in _NAMES.items():
        for node in made.find_nodes(op="call_function", target=target):
            _enter(node, names, entered)
            left.update(_left(node, target is FORWARD, is_ring))
    copies = {old: left.get(new, new) for old, new in copies.items()}
    return replace(
        graph, module=torch.fx.GraphModule(graph.module, made),
        inputs=tuple((copies[node], source) for node, source in graph.inputs),
        outputs=tuple((copies.get(node), source) for node, source in graph.outputs),
    )  # fmt: skip


def _enter(node: Any, names: Mapping[int, str], entered: dict[tuple[Node, Node], Node]) -> None:
    """Have attention, or its backward, read nodes behind its operands.

    entered: those that are there already, by the operand and the attention: its backward reads the same.
    """
    owner = node if node.target is FORWARD else node.args[_OUTPUT].args[0]
    for place, name in names.items():
        given = node.args[place]
        if (given, owner) not in entered:
            made = entered[given, owner] = _inserted(node, f"attention_{name}", ENTER, (given,))
            made.meta = {**node.meta, "val": given.meta["val"]}
        node.update_arg(place, entered[given, owner])


def _left(node: Any, is_forward: bool, is_view: bool) -> Iterator[tuple[Node, Node]]:
    """Nodes behind the results of attention, which all read but its own backward."""
    names = ("output",) if is_forward else ("query_gradient", "key_gradient", "value_gradient")
    for x in [x for x in node.users if x.args[1] < len(names)]:
        readers = list(x.users)
        made = _inserted(x.next, f"attention_{names[x.args[1]]}", LEAVE, (x, is_view))
        made.meta = dict(x.meta)
        for user in readers:
            saved = user.args[_OUTPUT] if user.target is BACKWARD else None
            user.replace_input_with(x, made)
            if saved is x:
                user.update_arg(_OUTPUT, x)
        yield x, made


def _inserted(before: Node, name: str, target: Any, args: tuple[Any, ...]) -> Node:
    with before.graph.inserting_before(before):
        return before.graph.create_node("call_function", target, args, name=name)


def in_words(nodes: Iterable[Node], found: Mapping[Node, Spread]) -> dict[str, str]:
    """By name of an attention among nodes how it lies."""
    attentions = [node for node in nodes if node.target is FORWARD]
    return {line_of(node).name: str(found.get(node, "as the planner finds")) for node in attentions}


def spreads(
    graph: Captured, arguments: Mapping[Node, tuple[Any, ...]], setting: Setting, sizes: Sizes
) -> dict[Node, Spread]:
    """By node of attention, and of its borders, how it lies; those that are left out lie as the planner finds.

    arguments: replaces those of some nodes, as of masks that are seen to be causal.
    """
    context = setting.context
    if context is None or all(setting.mesh.axis_size(axis) == 1 for axis in context.axes):
        return {}
    parameters = {node: source.name for node, source in graph.of_kind("parameter")}
    found: dict[Node, Spread] = {}
    for target, names in _NAMES.items():
        for node in graph.module.graph.find_nodes(op="call_function", target=target):
            args = arguments.get(node, node.args)
            query, key, *_ = (args[place] for place in names)
            cut = {axis for name in _weights(query, parameters) for axis in _axes_of_use(setting, name)}
            made = _spread(setting, [_shape(x, sizes) for x in (query, key)], args[-3:], cut)
            if made is not None:
                ends = [x for result in node.users for x in result.users if x.target is LEAVE]
                found.update(dict.fromkeys((node, *(args[place] for place in names), *ends), made))
    return found


def _shape(node: Node, sizes: Sizes) -> list[int]:
    shape = sizes.shape(node.meta["val"])
    return [1] * (_DIMS - len(shape)) + list(shape)


def _spread(setting: Setting, shapes: list[list[int]], options: Any, cut: Collection[str]) -> Spread | None:
    """shapes: of query and key. options: dropout, whether it is causal, and the scale. cut: axes of heads."""
    (q, k), (dropout, is_causal, _) = shapes, options
    context, mesh = setting.context, setting.mesh
    assert context is not None
    if len(q) > _DIMS:
        return None
    size, batch = setting.batch if setting.batch is not None else (-1, None)
    rows, ring = ([axis for axis in axes if mesh.axis_size(axis) > 1] for axes in (context.axes, context.by(RING)))
    batch = without_axes((batch,), rows)[0] if q[0] == size else None
    heads = tuple(axis for axis in mesh.names if axis in cut and axis not in rows)
    found = Spread(mesh, setting.line, tuple(rows), tuple(ring), False, batch, heads, (q[1], k[1]))
    if ring and (dropout or (is_causal and q[2] != k[2]) or min(q[2], k[2]) < found.ring):
        return None
    return replace(found, is_zigzag=bool(ring) and context.zigzag and is_causal and q[2] % (2 * found.ring) == 0)


def _axes_of_use(setting: Setting, name: str) -> set[str]:
    """The axes over which a parameter is cut where it is used."""
    return axes_in(setting.plan.gathered(name) or setting.plan.parameters.get(name, ()))


def _weights(query: Node, names: Mapping[Node, str]) -> set[str]:
    """The parameters of the products that a query is made of, up to the nearest ones."""
    found, seen, waiting = set[str](), set[Node](), [query]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        if base_name(here) in _PRODUCTS:
            found |= {names[base] for x in here.all_input_nodes if (base := _base(x)) in names}
        else:
            waiting += here.all_input_nodes
    return found


def _base(node: Node) -> Node:
    """What a node is a view or a cast of."""
    while is_view(node) or base_name(node) == "_to_copy":
        node = node.all_input_nodes[0]
    return node
