"""Strategies for whole definitions, and for annotations of them."""

from __future__ import annotations  # pyright: ignore[reportAssignmentType] - a strategy has that name

from collections.abc import Sequence

from hypothesis import strategies as st

from ..argument_checks import check_flags
from ..definition.tensor_view import TensorView
from ..dtypes import DataType
from ..errors import caller_line
from ..fusion_definition import FusionDefinition
from ..mesh import DeviceMesh, ParallelType
from ..ops.opdef import OpDef
from ..ops.registry import names
from ..ops.values import TensorRef
from ..sharding.value import Sharding
from .asked import check_any, check_entries, check_int, check_names, check_sizes, check_type
from .blocks import FAMILIES
from .examples import shape_of
from .layouts import MOST_RANKS, dim_layouts, drawn_place, meshes
from .op_blocks import op_block
from .writer import DTYPES, MAX_NUMEL, SIZES, Block, DefinitionWriter

_MOST_OPS = 10_000
_KINDS = (ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z)


def definitions(
    families: Sequence[str] = (),
    min_ops: int = 1,
    max_ops: int = 16,
    *,
    ops: Sequence[OpDef | str] = (),
    blocks: Sequence[Block] = (),
    sizes: Sequence[int] = SIZES,
    max_numel: int = MAX_NUMEL,
    dtypes: Sequence[DataType] = DTYPES,
    open_sizes: bool = False,
) -> st.SearchStrategy[FusionDefinition]:
    """A Hypothesis strategy for definitions of `min_ops` to `max_ops` random ops, or a few more; not annotated.

    They shrink to few ops, small sizes and simple ops. What no op reads is an output, and so are a few other tensors;
    `inputs_for` gives inputs that fit.

    families: of `blocks.FAMILIES`, which ops there are; all of them by default.
    ops: names of ops (of the table, or registered) or OpDefs that make about half of each program, called as their
        samples call them.
    blocks: what programs are made of, in place of the families.
    sizes, dtypes: of inputs; what is listed several times comes more often.
    max_numel: the most elements of a tensor.
    open_sizes: let one program in four leave some sizes open (-1).

    Raises ArgumentError for families, ops or numbers that do not exist.
    """
    check_names("definitions: families", families, FAMILIES)
    check_entries("definitions: ops", ops, (str, OpDef), "a list of names of ops, or OpDefs")
    check_names("definitions: ops", [op for op in ops if isinstance(op, str)], names())
    check_int("definitions: max_ops", max_ops, 1, _MOST_OPS)
    check_int("definitions: min_ops", min_ops, 0, max_ops)
    check_int("definitions: max_numel", max_numel, 1)
    check_sizes("definitions: sizes", sizes)
    check_entries("definitions: dtypes", dtypes, DataType, "a list of mf.DataType")
    check_any("definitions: sizes", sizes)
    check_any("definitions: dtypes", dtypes)
    check_flags(caller_line(), open_sizes=open_sizes)
    return _definitions(families, (min_ops, max_ops), ops, blocks, sizes, max_numel, dtypes, open_sizes)


@st.composite
def _definitions(
    draw: st.DrawFn, families: Sequence[str], length_of: tuple[int, int], ops: Sequence[OpDef | str],
    blocks: Sequence[Block], sizes: Sequence[int], max_numel: int, dtypes: Sequence[DataType], open_sizes: bool,
) -> FusionDefinition:  # fmt: skip
    if not blocks:
        chosen = tuple(families) or (("pointwise", "shapes") if ops else tuple(FAMILIES))
        found = [b for name in chosen for b in FAMILIES[name]]
        blocks = [*found, *[op_block(op) for op in ops] * max(1, len(found) // max(1, len(ops)))]
    w = DefinitionWriter(
        draw, sizes=tuple(draw(st.lists(st.sampled_from(sizes), min_size=2, max_size=3))), max_numel=max_numel,
        dtypes=tuple(dtypes), open_sizes=open_sizes and draw(st.integers(0, 3)) == 3,
    )  # fmt: skip
    for _ in range(draw(st.integers(1, 2))):
        w.input([w.size() for _ in range(draw(st.integers(1, 3)))])
    length = draw(st.sampled_from(_lengths(*length_of)))
    while len(w.fd.recording.nodes) < length:
        draw(st.sampled_from(blocks))(w)
    _add_outputs(draw, w)
    return w.fd


def _lengths(low: int, high: int) -> list[int]:
    """Numbers of ops, mostly from the upper half. The smallest comes first, as counter-examples shrink to that."""
    return [*range(low, high + 1), *[*range((low + high) // 2, high + 1)] * 4]


def _add_outputs(draw: st.DrawFn, w: DefinitionWriter) -> None:
    fd, read = w.fd, {i for node in w.fd.recording.nodes for i in node.inputs}
    made = [v.tv.id for v in w.vars]
    unread = [i for node in fd.recording.nodes if not read.intersection(node.outputs) for i in node.outputs[:1]]
    extra = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    for i in dict.fromkeys([*unread, *extra]):
        fd.add_output(TensorView(fd, TensorRef(i)))


def annotations(
    fd: FusionDefinition, max_tensors: int = 6, second_mesh: bool = True, max_ranks: int = 8
) -> st.SearchStrategy[FusionDefinition]:
    """A Hypothesis strategy that annotates up to `max_tensors` of a definition's tensors, and gives it back.

    They lie on one mesh of 2 to `max_ranks` ranks, in any form; with `second_mesh` now and then on two meshes with as
    many ranks together. Raises ArgumentError for what is no definition, and for impossible numbers.
    """
    check_type("annotations: fd", fd, FusionDefinition, "Pass a definition.")
    check_int("annotations: max_tensors", max_tensors, 1, _MOST_OPS)
    check_int("annotations: max_ranks", max_ranks, 2, MOST_RANKS)
    check_flags(caller_line(), second_mesh=second_mesh)
    return _annotations(fd, max_tensors, second_mesh, max_ranks)


@st.composite
def _annotations(
    draw: st.DrawFn, fd: FusionDefinition, max_tensors: int, second_mesh: bool, max_ranks: int
) -> FusionDefinition:
    chosen = [draw(meshes(min_ranks=2, max_ranks=max_ranks))]
    if second_mesh and chosen[0].size < max_ranks and draw(st.integers(0, 5)) == 5:
        chosen.append(draw(meshes(max_ranks=max_ranks - chosen[0].size, first_rank=chosen[0].size)))
    known = [i for i in range(len(fd.recording.tensors)) if -1 not in shape_of(fd, i)]
    inputs = fd.recording.input_tensors()
    pools = [pool for pool in (inputs, inputs, known, [i for i in fd.recording.outputs if i in known]) if pool]
    wanted = draw(
        st.lists(st.sampled_from(pools).flatmap(st.sampled_from), min_size=1, max_size=max_tensors, unique=True)
    )
    for i in wanted:
        mesh = chosen[0] if len(chosen) == 1 else draw(st.sampled_from(chosen))
        _annotate(draw, fd, TensorView(fd, TensorRef(i)), mesh)
    return fd


def _annotate(draw: st.DrawFn, fd: FusionDefinition, tensor: TensorView, mesh: DeviceMesh) -> None:
    form = draw(st.sampled_from(("axes", "axes", "splits", "sharding", "loop", "stream")))
    shape = shape_of(fd, tensor.id)
    if form == "axes":
        fd.mesh_split(tensor, mesh, _axes(draw, mesh, tensor.ndim))
    elif form == "splits":
        fd.mesh_split(tensor, mesh, [list(layout) or None for layout in draw(dim_layouts(mesh, shape))])
    elif form == "sharding":
        fd.shard(tensor, Sharding.make(mesh, draw(dim_layouts(mesh, shape)), shape))
    else:
        _schedule(draw, tensor, mesh)
        if form == "stream":
            _stream(draw, tensor)


def _stream(draw: st.DrawFn, tensor: TensorView) -> None:
    """Make one part of the loop domain, which may be a reduction's, the steps of a loop."""
    free = [i for i, a in enumerate(tensor.get_loop_domain()) if a.leaf.axis is None and a.leaf.size is None]
    if free:
        place = draw(st.sampled_from(free))
        tensor.outer_split(place, draw(st.sampled_from((2, 3, 4))))
        tensor.axis(place).parallelize(ParallelType.stream)


def _axes(draw: st.DrawFn, mesh: DeviceMesh, ndim: int) -> list[list[str] | None]:
    """An annotation in GSPMD's form: for every dim the axes that split it."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name in draw(st.permutations(mesh.names)):
        place = drawn_place(draw, ndim)
        if place >= 0:
            dims[place].append(name)
    return [names or None for names in dims]


def _schedule(draw: st.DrawFn, tensor: TensorView, mesh: DeviceMesh) -> None:
    """An annotation in nvFuser's form: splits of the loop domain (also of reduction axes), bound to mesh axes."""
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
