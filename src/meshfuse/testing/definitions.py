"""Strategies for whole definitions and for annotations of them."""

from __future__ import annotations  # pyright: ignore[reportAssignmentType] - a strategy has that name

from collections.abc import Sequence

from hypothesis import strategies as st

from ..definition.tensor_view import TensorView
from ..fusion_definition import FusionDefinition
from ..mesh import DeviceMesh, ParallelType
from ..ops.base import TensorRef
from ..sharding.value import Sharding
from .blocks import FAMILIES, Block
from .layouts import dim_layouts, drawn_place, meshes
from .writer import MAX_NUMEL, SIZES, Writer

_KINDS = (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)


@st.composite
def definitions(
    draw: st.DrawFn, families: Sequence[str] = (), min_ops: int = 10, max_ops: int = 16,
    blocks: Sequence[Block] = (), sizes: Sequence[int] = SIZES, max_numel: int = MAX_NUMEL,
) -> FusionDefinition:  # fmt: skip
    """Definitions of at least `min_ops` random ops, not annotated. `families` (of `blocks.FAMILIES`) narrow the ops,
    or `blocks` name them; inputs are made of `sizes`, and no tensor has more than `max_numel` elements.

    What nothing reads is an output, and so are a few intermediate tensors. Inputs that index take any numbers
    that `inputs_for` gives them.
    """
    blocks = blocks or [b for name in families or FAMILIES for b in FAMILIES[name]]
    w = Writer(draw, sizes=tuple(draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=3))), max_numel=max_numel)
    for _ in range(draw(st.integers(1, 2))):
        w.input([w.size() for _ in range(draw(st.integers(1, 3)))])
    length = draw(st.integers(min_ops, max_ops))
    while len(w.fd.nodes) < length:
        draw(st.sampled_from(blocks))(w)
    _add_outputs(draw, w)
    return w.fd


def _add_outputs(draw: st.DrawFn, w: Writer) -> None:
    fd, read = w.fd, {i for node in w.fd.nodes for i in node.inputs}
    made = [v.tv.id for v in w.vars]
    unread = [i for node in fd.nodes if not read.intersection(node.outputs) for i in node.outputs[:1]]
    extra = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    for i in dict.fromkeys([*unread, *extra]):
        fd.add_output(TensorView(fd, TensorRef(i)))


@st.composite
def annotations(
    draw: st.DrawFn, fd: FusionDefinition, max_tensors: int = 6, second_mesh: bool = True
) -> FusionDefinition:
    """Annotate some tensors of a definition, which is returned, in any of the forms that there are."""
    chosen = [draw(meshes(min_ranks=2))]
    if second_mesh and chosen[0].size < 8 and draw(st.integers(0, 5)) == 5:
        chosen.append(draw(meshes(max_ranks=8 - chosen[0].size, first_rank=chosen[0].size)))
    inputs = [ref.id for ref in fd.inputs if isinstance(ref, TensorRef)]
    pools = [inputs, inputs, [*range(len(fd.tensors))], fd.outputs]
    wanted = draw(
        st.lists(st.sampled_from(pools).flatmap(st.sampled_from), min_size=2, max_size=max_tensors, unique=True)
    )
    for i in wanted:
        mesh = chosen[0] if len(chosen) == 1 else draw(st.sampled_from(chosen))
        _annotate(draw, fd, TensorView(fd, TensorRef(i)), mesh)
    return fd


def _annotate(draw: st.DrawFn, fd: FusionDefinition, tensor: TensorView, mesh: DeviceMesh) -> None:
    form = draw(st.sampled_from(("axes", "axes", "splits", "sharding", "loop")))
    shape = tensor.type.shape
    if form == "axes":
        fd.mesh_split(tensor, mesh, _axes(draw, mesh, tensor.ndim))
    elif form == "splits":
        fd.mesh_split(tensor, mesh, [list(layout) or None for layout in draw(dim_layouts(mesh, shape))])
    elif form == "sharding":
        fd.shard(tensor, Sharding.make(mesh, draw(dim_layouts(mesh, shape)), shape))
    else:
        _schedule(draw, tensor, mesh)


def _axes(draw: st.DrawFn, mesh: DeviceMesh, ndim: int) -> list[list[str] | None]:
    """GSPMD's form: for every dim the axes that split it."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name in draw(st.permutations(mesh.names)):
        place = drawn_place(draw, ndim)
        if place >= 0:
            dims[place].append(name)
    return [names or None for names in dims]


def _schedule(draw: st.DrawFn, tensor: TensorView, mesh: DeviceMesh) -> None:
    """nvFuser's form: splits of the loop domain (reduction axes too), whose parts are bound to mesh axes."""
    tensor.set_device_mesh(mesh)
    for kind, size in zip(_KINDS, reversed(mesh.shape), strict=False):
        free = [
            i for i, axis in enumerate(tensor.get_loop_domain()) if axis.leaf.axis is None and axis.leaf.size is None
        ]
        place = draw(st.sampled_from([-1, *free]))
        if place >= 0:
            inner = draw(st.booleans())
            tensor.split(place, size, inner_split=inner)
            tensor.axis(place + inner).parallelize(kind)
