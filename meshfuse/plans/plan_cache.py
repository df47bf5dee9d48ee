"""Plans kept on disk, so that the second start of a script does not plan again, and handed over between ranks.

Planning is the dear part of compiling, and all it gives are decisions: which ops are written in other forms, and where
each op is computed. These are stored, under a digest of everything that they follow from: the definition, its shapes
and annotations, the default mesh, meshfuse's own code, torch's version. The rest of compiling is done again, from the
user's own lines. Whatever is wrong with a stored plan, or with the disk, planning goes on.

Of the ranks of a job that want the same plan, the first to come makes it, and the others take it over through the
job's store: on other machines, too, and without a disk.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .. import disk_cache
from ..errors import shown
from ..graph import Graph, rewritten
from ..mesh import DeviceMesh
from ..ops import OPS
from ..ops.opdef import Call
from ..ops.rules import Rule
from ..placement.factors import Placement
from ..placement.options import Choice, RunnerUp, Source
from ..propagation import ShardedDefinition
from ..runtime.world import World
from ..sharding.value import Sharding
from ..version import __version__
from .plan_codec import NotStorable, dump, load
from .process_lock import in_turn
from .shape_reuse import placed_again, ranks_of

# What is planned in less time is not worth a file.
WORTH = 0.1
_SUFFIX = ".plan"


def planned(
    graph: Graph, default_mesh: DeviceMesh, plan: Callable[[], ShardedDefinition], how: str = ""
) -> ShardedDefinition:
    """The plan for this graph, default mesh and effort (`how`).

    It is one that is on the disk, else one that another rank of this job makes or has made, else what `plan()` makes.
    """
    # What a user's own op does may change without a trace in its name: then its plans are of this job alone.
    lasting = all(OPS.get(node.name) is node.call.op for node in graph.nodes)
    folder, job = disk_cache.folder() if lasting else None, World.joined()
    if folder is None and job is None:
        return plan()
    try:
        key = key_of(graph, default_mesh, how)
    except OSError as error:
        disk_cache.warn(f"meshfuse's own files cannot be read: {error.strerror}")
        return plan()
    make = plan if folder is None else functools.partial(_in_turn, folder, key + _SUFFIX, graph, plan)
    found = None if folder is None else _recalled(folder, key + _SUFFIX, graph)
    if found is not None:
        return found
    return make() if job is None else _handed_over(job, key, graph, default_mesh, make)


def _in_turn(folder: Path, key: str, graph: Graph, plan: Callable[[], ShardedDefinition]) -> ShardedDefinition:
    """What `plan()` makes, unless another process makes it now, or has just made it."""
    with in_turn(folder / f"{key}{disk_cache.TURN}"):
        return _recalled(folder, key, graph) or _planned_now(folder, key, graph, plan)


def _handed_over(
    job: World, key: str, graph: Graph, default_mesh: DeviceMesh, make: Callable[[], ShardedDefinition]
) -> ShardedDefinition:
    """The plan that another rank of this job makes or has made, else what `make()` gives, which others then take."""
    with job.handover.text(key, ranks_of(graph, default_mesh), graph.in_words()) as handed:
        found = None
        if handed.text is not None:
            with contextlib.suppress(Exception):  # a text that another rank made may hold anything
                found = unpacked(handed.text, graph)
        if found is None:
            found = make()
            with contextlib.suppress(NotStorable, AssertionError, KeyError):
                handed.text = _text(graph, found) if handed.mine else None
    return found


def _planned_now(folder: Path, key: str, graph: Graph, plan: Callable[[], ShardedDefinition]) -> ShardedDefinition:
    start = time.perf_counter()
    found = plan()
    if time.perf_counter() - start > WORTH:
        _keep(folder, key, graph, found)
    return found


def _recalled(folder: Path, key: str, graph: Graph) -> ShardedDefinition | None:
    text = disk_cache.read(folder, key)
    if text is None:
        return None
    try:
        return unpacked(text, graph)
    except Exception as error:  # a file of the right form may hold anything
        disk_cache.warn(f"a stored plan cannot be used ({str(error) or type(error).__name__}); it is planned anew")
        return None


def _keep(folder: Path, key: str, graph: Graph, sharded: ShardedDefinition) -> None:
    try:
        text = _text(graph, sharded)
    except (NotStorable, AssertionError, KeyError) as error:
        disk_cache.warn(f"a plan cannot be stored: {error}")
        return
    if text is not None:
        disk_cache.write(folder, key, text)
    else:
        disk_cache.warn("a plan would not read back as it is, and is not stored")


def _text(graph: Graph, sharded: ShardedDefinition) -> str | None:
    """The plan as text; None if it would not read back as it is. Raises what a plan gives that cannot be written."""
    text = packed(sharded)
    return text if str(unpacked(text, graph)) == str(sharded) else None


def packed(sharded: ShardedDefinition) -> str:
    """The decisions that led to this sharded definition."""
    return dump((sharded.graph.rewritings, sharded.choices, tuple(sorted(sharded.shardings.items())), sharded.gap))


def unpacked(text: str, graph: Graph) -> ShardedDefinition:
    """The sharded definition that these decisions make of the graph. Raises where they do not fit it."""
    rewritings, choices, shardings, gap = load(text)
    sharded = ShardedDefinition(rewritten(graph, rewritings), tuple(choices), dict(shardings), gap)
    sharded.verify()
    _check_parts(sharded)
    return sharded


def _check_parts(sharded: ShardedDefinition) -> None:
    """Raises NotStorable (or what parts of other types give) unless each placement follows from its layouts."""
    graph = sharded.graph
    for i, sharding in sharded.shardings.items():
        if not isinstance(sharding, Sharding) or sharding.ndim != graph.tensors[i].type.ndim:
            raise NotStorable(f"no plan: {graph.tensors[i].label} lies in {shown(sharding)}")
    for node, choice in zip(graph.nodes, sharded.choices, strict=True):
        placement = choice.placement
        if not _is_told(choice) or placed_again(node, placement) != placement:
            raise NotStorable(f"no plan: {node.name} is not computed so")
        for out, result in zip(node.outputs, placement.results, strict=True):
            sharding = sharded.shardings[out]
            left = out in graph.outputs and _may_be_left(result, sharding, graph.shape(out))
            if sharding not in (result, graph.annotations.get(out)) and not left:
                raise NotStorable(f"no plan: {graph.tensors[out].label} is not made in {sharding}")


def _may_be_left(made: Sharding, sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether an output may be left at `sharding`, if its op makes it in `made`."""
    fits = Sharding.make(sharding.mesh, sharding.dims, shape) is sharding
    return fits and sharding.mesh == made.mesh


def _is_told(choice: Choice) -> bool:
    """Whether the parts of a choice that `explain` alone reads are of the types that it prints."""
    other = choice.runner_up
    return _is_costed(choice) and (other is None or (isinstance(other, RunnerUp) and _lies(other, choice.placement)))


def _is_costed(option: Choice | RunnerUp) -> bool:
    return isinstance(option.source, Source) and isinstance(option.seconds, float)


def _lies(other: RunnerUp, placement: Placement) -> bool:
    """Whether a runner-up has a sharding for each operand and result."""
    fits = len(other.operands) == len(placement.operands) and len(other.results) == len(placement.results)
    return fits and _is_costed(other) and all(isinstance(s, Sharding) for s in (*other.operands, *other.results))


# the key ----------------------------------------------------------------------------------------------------------


def key_of(graph: Graph, default_mesh: DeviceMesh, how: str = "") -> str:
    """A digest of all that a plan follows from. Raises OSError."""
    text = hashlib.sha256(_code_and_versions().encode())
    described: dict[int, str] = {}
    for node in graph.nodes:
        said = described.get(id(node.call))
        if said is None:
            said = described[id(node.call)] = _described(node.call, node.rule)
        text.update(f"{said}|{node.inputs}|{node.outputs}|{node.origin}\n".encode())
    placed = [f"{i} {sharding!r} {_mesh(sharding.mesh)}" for i, sharding in sorted(graph.annotations.items())]
    types = [(tensor.id, tensor.type) for tensor in graph.tensors]
    # What the user named to be worked on in chunks stays as it is: in other plans it may be written in other ops.
    stay, rare = sorted(graph.stationary.items()), sorted(graph.once_in.items())
    said = (sorted(graph.reductions.items()), sorted(graph.streams), stay, rare)
    rest = (placed, said, graph.inputs, graph.outputs, types, _mesh(default_mesh), how)
    text.update(repr(rest).encode())
    return text.hexdigest()[:40]


def _described(call: Call, rule: Rule) -> str:
    factors = (rule.factors, rule.operands, rule.results)
    return f"{call.op.name}|{call.args!r}|{call.types!r}|{call.results!r}|{factors!r}"


def _mesh(mesh: DeviceMesh) -> str:
    return repr(mesh.__reduce__()[1:])


@functools.cache
def _code_and_versions() -> str:
    """meshfuse's version, torch's, and (meshfuse may be edited) the sizes and times of its files. Raises OSError."""
    root = Path(__file__).parents[1]
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "they are no files of a folder, as in a zip archive")
    stamps = sorted(_stamps(root, ""))
    return "\n".join([__version__, torch.__version__, *stamps])


def _stamps(root: Path, folder: str) -> Iterator[str]:
    """The path, size and time of each Python file in a folder of the root and in those in it. Raises OSError."""
    with os.scandir(root / folder) as entries:
        for entry in entries:
            path = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _stamps(root, f"{path}/")
            elif path.endswith(".py"):
                found = entry.stat()
                yield f"{path} {found.st_size} {found.st_mtime_ns}"
