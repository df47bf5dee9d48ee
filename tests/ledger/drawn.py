"""Random programs with fixed seeds: ops of a theme on a mesh, some tensors annotated, some with gradients.

They depend on nothing but meshfuse's public functions, so that they stay the same programs when strategies change, or
ops are added. They are planned and never run: no number needs to make sense.
"""

from __future__ import annotations

import math

import meshfuse as mf

from .drawing import Draws, Tensor, Writer, shape
from .steps import ANY, ROUGH_THEMES, SMOOTH_THEMES, Step

COUNT = 300
THEMES = {**SMOOTH_THEMES, **ROUGH_THEMES}
MESHES = (
    (2,), (3,), (4,), (4,), (5,), (6,), (8,), (8,), (8,),
    (2, 2), (2, 2), (2, 3), (2, 4), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 2, 3),
)  # fmt: skip
AXES = ("dp", "tp", "cp")
FAST, SLOW = mf.Link(450e9, 5e-6), mf.Link(25e9, 20e-6)


def drawn(number: int) -> mf.FusionDefinition:
    """The random program of this number."""
    draws = Draws(number)
    theme = list(THEMES)[number % len(THEMES)]
    mesh = _mesh(draws)
    w = Writer(draws, draws.choice(mesh.shape), "fast" if number % 10 == 9 else "auto")
    for _ in range(1 + draws.below(2)):
        w.input([w.size() for _ in range(2 + draws.below(2))])
    # Over three axes planning takes longest.
    for _ in range(2 + draws.below(4 if len(mesh.shape) < 3 else 2)):
        _step(w, theme)(w)
    wanted = _outputs(w)
    gradients = _gradients(w, wanted) if theme in SMOOTH_THEMES and draws.chance(0.35) else []
    for tensor in (*wanted, *gradients):
        w.fd.add_output(tensor)
    _annotate_some(w, mesh, [*wanted, *gradients])
    return w.fd


def _mesh(draws: Draws) -> mf.DeviceMesh:
    sizes = draws.choice(MESHES)
    names = AXES[: len(sizes)]
    ranks = list(range(math.prod(sizes)))
    order = draws.sample(ranks, len(ranks)) if draws.chance(0.2) else ranks
    links = dict(zip(names, (SLOW, FAST, FAST), strict=False)) if draws.chance(0.3) else None
    return mf.DeviceMesh(sizes, names, ranks=order, links=links)


def _step(w: Writer, theme: str) -> Step:
    return w.draws.choice(THEMES[theme] if w.draws.chance(0.7) else ANY)


def _outputs(w: Writer) -> list[Tensor]:
    """What no op reads, and now and then another tensor."""
    fd = w.fd
    read = {i for node in fd.recording.nodes for i in node.inputs}
    made = [t for t in w.tensors if t not in w.inputs]
    unread = [t for t in made if t.id not in read]
    return [*unread, *(w.draws.sample([t for t in made if t not in unread], 1) if w.draws.chance(0.3) else [])]


def _gradients(w: Writer, outputs: list[Tensor]) -> list[Tensor]:
    """Those of the squares' sum of a result, by some inputs."""
    y = next((t for t in reversed(outputs) if t.dtype is w.dtype), None)
    if y is None:
        return []
    leaves = [t for t in w.inputs if t.dtype is w.dtype]
    return list(w.fd.grad(w.ops.sum(y * y) * 0.5, w.draws.sample(leaves, 1 + w.draws.below(3))))


# annotations ------------------------------------------------------------------------------------------------------


def _annotate_some(w: Writer, mesh: mf.DeviceMesh, outputs: list[Tensor]) -> None:
    """An input or more, sometimes a tensor inside or an output; and on two meshes in a few programs."""
    draws, inside = w.draws, [t for t in w.tensors if t not in w.inputs and t not in outputs]
    chosen = draws.sample([t for t in w.inputs if t.ndim], 1 + draws.below(3))
    for pool, probability in ((inside, 0.2), (outputs, 0.4)):
        chosen += draws.sample([t for t in pool if t.ndim], 1) if draws.chance(probability) else []
    second = mf.DeviceMesh((2,), ("pp",), ranks=[mesh.size, mesh.size + 1]) if draws.chance(0.06) else None
    for place, tensor in enumerate(chosen):
        on = second if second is not None and place == len(chosen) - 1 else mesh
        _annotate(draws, w.fd, tensor, on)
    if draws.chance(0.1):
        _overlap(draws, w, outputs)


def _annotate(draws: Draws, fd: mf.FusionDefinition, tensor: Tensor, mesh: mf.DeviceMesh) -> None:
    form = draws.choice(("axes", "axes", "axes", "axes", "splits", "loop"))
    if form == "axes":
        fd.mesh_split(tensor, mesh, _axes(draws, mesh, tensor.ndim))
    elif form == "splits":
        fd.mesh_split(tensor, mesh, _splits(draws, mesh, tensor))
    else:
        _schedule(draws, tensor, mesh)


def _axes(draws: Draws, mesh: mf.DeviceMesh, ndim: int) -> list[list[str] | None]:
    """Each axis on a dim, or (one time in four) on none."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name in draws.sample(mesh.names, len(mesh.names)):
        if draws.chance(3 / 4):
            draws.choice(dims).append(name)
    return [names or None for names in dims]


def _splits(draws: Draws, mesh: mf.DeviceMesh, tensor: Tensor) -> list[list[mf.Split] | None]:
    """Factors of dims: axes, halves of axes, and factors on no axis between them."""
    dims: list[list[mf.Split]] = [[] for _ in shape(tensor)]
    for name, size in zip(mesh.names, mesh.shape, strict=True):
        if draws.chance(1 / 4):
            continue
        halves = size in (4, 8) and draws.chance(0.5)
        for split in [mf.Split(2, name), mf.Split(size // 2, name, 2)] if halves else [mf.Split(size, name)]:
            dim = draws.choice(dims)
            dim += [mf.Split(draws.choice((2, 3)))] if draws.chance(0.3) else []
            dim.append(split)
    return [splits or None for splits in dims]


def _schedule(draws: Draws, tensor: Tensor, mesh: mf.DeviceMesh) -> None:
    """In nvFuser's words: parts of the loop domain, the inner or the outer, on mesh axes."""
    tensor.set_device_mesh(mesh)
    kinds = (mf.ParallelType.mesh_x, mf.ParallelType.mesh_y, mf.ParallelType.mesh_z)
    dims = draws.sample(range(tensor.ndim), len(mesh.shape))
    for kind, size, dim in sorted(zip(kinds, reversed(mesh.shape), dims, strict=False), key=lambda x: -x[2]):
        inner = draws.chance(0.3)
        tensor.split(dim, size, inner_split=inner)
        tensor.axis(dim + inner).parallelize(kind)


def _overlap(draws: Draws, w: Writer, outputs: list[Tensor]) -> None:
    """One result in chunks."""
    fitting = [t for t in outputs if t.ndim and t.dtype is w.dtype]
    if fitting:
        tensor = draws.choice(fitting)
        w.fd.overlap(tensor, draws.choice((2, 4)), dim=draws.below(tensor.ndim), ring=draws.chance(0.4))
