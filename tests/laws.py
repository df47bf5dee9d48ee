"""Laws of propagation: what may not change its outcome. Each takes a propagated graph and makes a twin of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

import meshfuse as mf
from meshfuse.errors import SourceLine
from meshfuse.graph import Graph, reordered
from meshfuse.propagation import ShardedDefinition
from meshfuse.propagation import propagate as propagate_once
from meshfuse.sharding import Layout, Sharding, Split
from meshfuse.sharding.value import canonical_partial

WORLD = mf.DeviceMesh([0])
NOWHERE = SourceLine("", 0, "", "")


def propagate(graph: Graph, default_mesh: mf.DeviceMesh) -> ShardedDefinition:
    """As compilation does it, with the forms that the graph's ops have."""
    return propagate_once(graph, default_mesh, parts=True)


def same_shardings(a: ShardedDefinition, b: ShardedDefinition) -> None:
    different = {i: f"{a.shardings[i]} and {b.shardings[i]}" for i in a.shardings if a.shardings[i] != b.shardings[i]}
    assert not different, f"{different}\n{a}\n\n{b}"


def same_placements(a: ShardedDefinition, b: ShardedDefinition) -> None:
    for node, mine, other in zip(a.graph.nodes, a.choices, b.choices, strict=True):
        assert mine.placement == other.placement, f"{node.name} {node.outputs}:\n{a}\n\n{b}"


def deterministic(done: ShardedDefinition, _: int) -> None:
    twin = propagate(done.graph, WORLD)
    assert str(twin) == str(done)
    same_shardings(done, twin)
    same_placements(done, twin)


def annotated(graph: Graph, more: Mapping[int, Sharding]) -> Graph:
    lines = {**graph.annotation_lines, **dict.fromkeys(more, NOWHERE)}
    return dataclasses.replace(graph, annotations={**graph.annotations, **more}, annotation_lines=lines)


def chosen(done: ShardedDefinition) -> dict[int, Sharding]:
    """The shardings that propagation chose and an annotation can say.

    Those of inputs are left out where there are several meshes: to say where an input is takes it from the others.
    """
    meshes = {sharding.mesh for sharding in done.shardings.values()}
    inputs = set(done.graph.input_tensors) if len(meshes) > 1 else set()
    free = set(done.shardings) - set(done.graph.annotations) - inputs
    return {i: done.shardings[i] for i in sorted(free) if not done.shardings[i].partial}


def annotated_with_all(done: ShardedDefinition, _: int) -> ShardedDefinition:
    """Propagated again, with everything that was chosen as annotations."""
    return propagate(annotated(done.graph, chosen(done)), WORLD)


def annotated_with_one(done: ShardedDefinition, seed: int) -> ShardedDefinition:
    """Propagated again, with one sharding that was chosen as an annotation."""
    free = sorted(chosen(done).items())
    return propagate(annotated(done.graph, dict(random.Random(seed).sample(free, k=min(1, len(free))))), WORLD)


# renaming axes ----------------------------------------------------------------------------------------------


def _names(mesh: mf.DeviceMesh) -> dict[str, str]:
    """New names, in another alphabetical order."""
    return {name: f"{chr(ord('z') - place)}_{name}" for place, name in enumerate(sorted(mesh.names))}


def renamed_mesh(mesh: mf.DeviceMesh) -> mf.DeviceMesh:
    return mf.DeviceMesh(mesh.shape, [_names(mesh)[n] for n in mesh.names], ranks=mesh.ranks)


def _renamed_layout(layout: Layout, names: Mapping[str, str]) -> Layout:
    return tuple(split._replace(axis=names.get(split.axis or "", split.axis)) for split in layout)


def renamed(sharding: Sharding) -> Sharding:
    names = _names(sharding.mesh)
    dims = tuple(_renamed_layout(layout, names) for layout in sharding.dims)
    partial: tuple[Split, ...] = _renamed_layout(sharding.partial, names)
    return Sharding(renamed_mesh(sharding.mesh), dims, canonical_partial(partial), sharding.reduce)


def renaming_axes_commutes(done: ShardedDefinition, _: int) -> None:
    graph = done.graph
    annotations = {i: renamed(sharding) for i, sharding in graph.annotations.items()}
    meshes = {i: sharding.mesh for i, sharding in graph.annotations.items()}
    reductions = {
        node.id: tuple(_renamed_layout(layout, _names(meshes[out])) for layout in graph.reductions[node.id])
        for node in graph.nodes if node.id in graph.reductions
        for out in node.outputs if out in meshes
    }  # fmt: skip
    twin = propagate(dataclasses.replace(graph, annotations=annotations, reductions=reductions), WORLD)
    different = {
        i: f"{home} and {twin.shardings[i]}" for i, home in done.shardings.items()
        if (renamed(home) if home.mesh != WORLD else home) != twin.shardings[i]
    }  # fmt: skip
    assert not different, f"{different}\n{done}\n\n{twin}"


# permuting ops ----------------------------------------------------------------------------------------------


def shuffled(graph: Graph, seed: int) -> Graph:
    """The graph with its ops in another order that respects who reads whom."""
    draw, known, order = random.Random(seed), set(graph.input_tensors), []
    left = list(graph.nodes)
    while left:
        ready = [node for node in left if known.issuperset(node.inputs)]
        node = draw.choice(ready)
        left.remove(node)
        order.append(node.id)
        known.update(node.outputs)
    return reordered(graph, order)


def permuting_independent_ops_commutes(done: ShardedDefinition, seed: int) -> None:
    same_shardings(done, propagate(shuffled(done.graph, seed), WORLD))


Law = Callable[[ShardedDefinition, int], None]
LAWS: tuple[Law, ...] = (
    deterministic,
    renaming_axes_commutes,
    permuting_independent_ops_commutes,
)
