"""A shape takes over the plan of one near it, so that its first call does not wait for a plan of its own.

Which plan is best follows from sizes. If all sizes are within a factor of what they were, and split as evenly, the plan
made for one shape is mostly the best for the other, too; a search for a better one pays where the shape comes again
(`RENEWED`). What is taken over are the decisions (rewritings, layouts, shardings). They are made again for the
new sizes, and if one does not fit, nothing is taken over.

Only executions on real ranks take plans over. All ranks of a mesh do so alike, as they compile the same definitions on
it in the same order.
`fd.compile`, `fd.bill` and `fd.simulate` always search.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from ..errors import SourceLine, user_error
from ..graph import Graph, Node, rewritten
from ..mesh import DeviceMesh
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..ops.values import ParamKind, TensorType
from ..placement.factors import NO_CARRY, Placement, carries, placed
from ..placement.options import Choice, op_seconds
from ..placement.roofline import Stored, stored_by, stored_tensors
from ..propagation import ShardedDefinition
from ..reshard.windows import window_of, window_step
from ..sharding.layout import WHOLE, extent
from ..sharding.value import Sharding

# The factor by which sizes may differ, where nobody says another.
VARIABLE, NEAR = "MESHFUSE_NEAR", 2.0
# The executions of a shape after which it gets a plan of its own.
RENEWED = 16
# How many ops the plans have that are remembered, and how many plans of one structure.
_MOST_OPS, _EACH = 20_000, 4
_SIZES = (ParamKind.SIZE, ParamKind.SHAPE)


def nearness(line: SourceLine | None) -> float:
    """MESHFUSE_NEAR: the factor by which sizes may differ; 1 for none. Raises DefinitionError for anything else."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else NEAR
    except ValueError:
        found = math.nan
    if not found >= 1:
        raise user_error(VARIABLE, repr(text), "a factor, 1 or more", "2 is the default; 1 plans every shape.", line)
    return found


class Taken(NamedTuple):
    """A plan that was taken over, and the graph of other sizes that it was made for."""

    plan: ShardedDefinition
    source: Graph | None


# The plans of one structure, by it, in the order in which they were found.
_Found = OrderedDict[Hashable, list[tuple[Graph, ShardedDefinition]]]


class Plans:
    """Plans that searches found, by the structure of the graph; the ones used last are kept.

    They are kept apart by the ranks of the meshes: what other ranks plan, which these need not, changes nothing of what
    is kept of theirs.
    """

    def __init__(self) -> None:
        self._found: dict[frozenset[int], _Found] = {}
        self._lock = threading.Lock()

    def keep(self, graph: Graph, default_mesh: DeviceMesh, planned: ShardedDefinition) -> None:
        """Remember the plan that a search found for a graph of some sizes."""
        key = _structure(graph, default_mesh)
        with self._lock:
            found = self._found.setdefault(ranks_of(graph, default_mesh), OrderedDict())
            found[key] = [(graph, planned), *found.get(key, ())][:_EACH]
            found.move_to_end(key)
            while len(found) > 1 and _ops(found) > _MOST_OPS:
                found.popitem(last=False)

    def near(self, graph: Graph, default_mesh: DeviceMesh, factor: float) -> Taken | None:
        """The plan of a graph that differs in sizes alone, all within a factor; None where there is none.

        A plan that was made for these very sizes comes first.
        """
        key = _structure(graph, default_mesh)
        with self._lock:
            plans = list(self._found.get(ranks_of(graph, default_mesh), {}).get(key, ()))
        plans.sort(key=lambda entry: not _same_sizes(graph, entry[0]))
        made = ((_made(graph, plan), old) for old, plan in plans if _near(graph, old, factor))
        found = next(((plan, old) for plan, old in made if plan is not None), None)
        return found and Taken(found[0], None if _same_sizes(graph, found[1]) else found[1])


def _ops(found: _Found) -> int:
    return sum(len(graph.nodes) for plans in found.values() for graph, _ in plans)


def ranks_of(graph: Graph, default_mesh: DeviceMesh) -> frozenset[int]:
    """The ranks of the meshes of a graph; those of `default_mesh` where nothing is annotated."""
    return frozenset(rank for s in graph.annotations.values() for rank in s.mesh.ranks) or frozenset(default_mesh.ranks)


def _same_sizes(graph: Graph, other: Graph) -> bool:
    """Whether tensors have the same sizes, and ops the same arguments, such as the bounds of slices."""
    same_types = all(a.type == b.type for a, b in zip(graph.tensors, other.tensors, strict=True))
    return same_types and all(a.call.args == b.call.args for a, b in zip(graph.nodes, other.nodes, strict=True))


PLANS = Plans()


def _structure(graph: Graph, default_mesh: DeviceMesh) -> Hashable:
    """All of a graph that a plan follows from, but for sizes.

    Tensors of ops that no output needs count as well: those that a rewriting makes are numbered after them.
    """
    nodes = tuple([(id(n.call.op), n.inputs, n.outputs, n.origin) for n in graph.nodes])
    said = (
        tuple(sorted(graph.reductions.items())),
        tuple(sorted(graph.streams)),
        tuple(sorted(graph.stationary.items())),
        tuple(sorted(graph.once_in.items())),
    )
    annotations = tuple(sorted(graph.annotations.items(), key=_first))
    return (nodes, len(graph.tensors), graph.inputs, graph.outputs, annotations, said, default_mesh)


def _first(entry: tuple[int, Any]) -> int:
    return entry[0]


# whether it is near ------------------------------------------------------------------------------------------------


def _near(graph: Graph, old: Graph, factor: float) -> bool:
    """Whether all sizes are within the factor, and the ops' arguments the same but for sizes."""
    ttypes = {(new.type, was.type) for new, was in zip(graph.tensors, old.tensors, strict=True)}
    calls = {(new.call, was.call) for new, was in zip(graph.nodes, old.nodes, strict=True)}
    return all(_alike(*pair, factor) for pair in ttypes) and all(_same_arguments(*pair) for pair in calls)


def _alike(new: TensorType, old: TensorType, factor: float) -> bool:
    return (new.dtype, new.ndim) == (old.dtype, old.ndim) and all(
        n == m or (min(n, m) > 1 and max(n, m) <= factor * min(n, m)) for n, m in zip(new.shape, old.shape, strict=True)
    )


def _same_arguments(new: Call, old: Call) -> bool:
    """Whether two ops have the same arguments; numbers beside tensors may differ, as a mean divides by a size."""
    rows = zip(new.op.params, new.args, old.args, strict=True)
    return all(p.kind in _SIZES or repr(arg) == repr(was) or _numbers(p.kind, arg, was) for p, arg, was in rows)


def _numbers(kind: ParamKind, new: object, old: object) -> bool:
    return kind is ParamKind.TENSOR_OR_SCALAR and type(new) is type(old) and type(new) in (int, float)


# the plan for other sizes ------------------------------------------------------------------------------------------


def _made(graph: Graph, plan: ShardedDefinition) -> ShardedDefinition | None:
    """The plan's decisions, made for the sizes of this graph; None where one does not fit."""
    if any(rewriting.sized for rewriting in plan.graph.rewritings):
        return None
    made = rewritten(graph, plan.graph.rewritings)
    if not _same_wiring(made, plan.graph) or not _split_alike(made, plan):
        return None
    choices = list(_choices(made, plan))
    if len(choices) < len(plan.choices):
        return None
    found = ShardedDefinition(made, tuple(choices), plan.shardings)
    found.verify()
    return found


def _same_wiring(graph: Graph, old: Graph) -> bool:
    return len(graph.nodes) == len(old.nodes) and all(
        (new.call.op, new.inputs, new.outputs) == (was.call.op, was.inputs, was.outputs)
        for new, was in zip(graph.nodes, old.nodes, strict=True)
    )


def _split_alike(graph: Graph, plan: ShardedDefinition) -> bool:
    """Whether each dim of each tensor is divided evenly by its layout where it was before."""
    rows = {(sharding, graph.shape(i), plan.graph.shape(i)) for i, sharding in plan.shardings.items()}
    return all(_as_even(*row) for row in rows)


def _as_even(sharding: Sharding, new: tuple[int, ...], old: tuple[int, ...]) -> bool:
    if Sharding.make(sharding.mesh, sharding.dims, new, sharding.partial, sharding.reduce) is not sharding:
        return False
    rows = zip(sharding.dims, new, old, strict=True)
    return all((n % extent(dim) == 0) == (m % extent(dim) == 0) for dim, n, m in rows if dim)


def _choices(graph: Graph, plan: ShardedDefinition) -> Iterator[Choice]:
    """The choices for the new sizes, with their times; they end at the first that the new sizes do not allow."""
    known: dict[Any, Choice | None] = {}
    in_memory = stored_tensors(graph)
    for node, was, choice in zip(graph.nodes, plan.graph.nodes, plan.choices, strict=True):
        shardings = tuple([plan.shardings[i] for i in node.inputs])
        ends = tuple([plan.shardings[i] for i in node.outputs])
        stored = stored_by(node, in_memory)
        key = (node.call, was.rule, choice.placement, choice.source, shardings, ends, stored)
        if key not in known:
            known[key] = _choice(node, was.rule, choice, shardings, ends, stored)
        found = known[key]
        if found is None:
            return
        yield found


def _choice(
    node: Node, rule: Rule, choice: Choice, shardings: tuple[Sharding, ...], ends: tuple[Sharding, ...], stored: Stored
) -> Choice | None:
    if not _same_factors(node.rule, rule):
        return None
    placement = placed_again(node, choice.placement)
    if placement is None:
        return None
    return Choice(placement, choice.source, op_seconds(node.call, placement, shardings, ends, stored))


def _same_factors(new: Rule, old: Rule) -> bool:
    """Whether two rules are the same but for sizes."""
    kinds = [[(factor.kind, factor.reduce) for factor in rule.factors] for rule in (new, old)]
    return kinds[0] == kinds[1] and (new.operands, new.results) == (old.operands, old.results)


def placed_again(node: Node, old: Placement) -> Placement | None:
    """The placement for the new sizes of a node; None where its tensors would be laid out otherwise than before."""
    if old.step is None:
        carry = carries(node.call, node.rule, [[s] for s in old.operands]) if old.carry.axes else NO_CARRY
        found = placed(node.call, node.rule, _mesh(old), old.layouts, old.carry)
        return found if (found, carry) == (old, old.carry) else None
    window = window_of(node.call)
    if window is None:
        return None
    (src,), (dst,) = old.operands, old.results
    return Placement((WHOLE,) * len(node.rule.factors), (src,), (dst,), step=window_step(src, dst, window))


def _mesh(placement: Placement) -> DeviceMesh:
    return (*placement.operands, *placement.results)[0].mesh
