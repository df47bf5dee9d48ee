"""A segment on one rank as one nvFuser definition of local tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...dtypes import DataType
from ...graph import Graph
from ...lowering.effects import effects
from ...lowering.instructions import Instruction
from ...lowering.kernel_text import scalar_inputs
from ...lowering.segments import Segment, SegmentedDefinition
from ...ops.local import LocalCall
from ...ops.nvfuser_lowering import repeated_to
from ...ops.opdef import ToTorch
from ...ops.values import ScalarRef, TensorType
from ...resharding import Compute
from ...scalars import ScalarDef, in_order
from .copies import Traced, copied
from .divisors import quotient, softmax_divisions
from .load import load_nvfuser
from .memory_layout import MemoryLayout
from .native_call import NativeCall
from .repeated import Narrow, narrowest, reads_narrow, repeated, repeats
from .unshared import Step, steps

SizeOf = Callable[[Any, int], int]


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """A built nvFuser definition, and what it takes (local tensors, then scalars by number) and gives."""

    name: str
    definition: Any
    inputs: tuple[TensorType, ...]
    scalars: tuple[int, ...]
    outputs: tuple[TensorType, ...]

    def __str__(self) -> str:
        return str(self.definition.fusion)


class _NativeBuilder:
    """An open nvFuser definition, with the definition's scalars that it has met so far."""

    def __init__(self, fd: Any, types: Any, scalars: Mapping[int, ScalarDef], size: SizeOf):
        self.fd, self.types, self.scalars, self.size = fd, types, scalars, size
        self._vals: dict[int, Any] = {}  # By number, so that what several expressions need is written once.
        self.divisions: frozenset[int] = frozenset()  # Ops that are products with a reciprocal.

    def define(self, ttype: TensorType, layout: MemoryLayout | None = None) -> Any:
        """An input, dense and row-major where no layout is given; dims of size 1 are broadcast."""
        flags = [None if n == 1 else True for n in ttype.shape] if layout is None else layout.slowest_first()
        order = [] if layout is None or layout.row_major else list(layout.order)
        return self.fd.define_tensor(
            list(ttype.shape), contiguity=flags, dtype=self.dtype(ttype.dtype), stride_order=order
        )  # fmt: skip

    def dtype(self, dtype: DataType) -> Any:
        """nvFuser's DataType. Raises ToTorch where it has none."""
        found = getattr(self.types, dtype.name, None)
        if found is None:
            raise ToTorch(f"nvFuser has no {dtype.name}")
        return found

    def scalar(self, value: Any) -> Any:
        """A Val of a scalar: an input of the kernel, a constant or an expression of both."""
        if not isinstance(value, ScalarRef):
            return self.fd.define_scalar(value)
        for number in in_order(value, self.scalars):
            if number not in self._vals:
                self._vals[number] = self._made(self.scalars[number])
        return self._vals[value.id]

    def _made(self, made: ScalarDef) -> Any:
        """A Val for a scalar whose operands have one already; inputs come before all others."""
        if made.op in ("const", "size"):
            value = made.operands[0] if made.op == "const" else self.size(*made.operands)
            return self.fd.define_scalar(value)
        given = made.operands[:1] if made.op == "cast" else made.operands
        operands = [self._vals[o.id] if isinstance(o, ScalarRef) else self.fd.define_scalar(o) for o in given]
        if made.op == "cast":
            return self.fd.ops.cast(operands[0], self.dtype(made.dtype))
        return getattr(self.fd.ops, made.op)(*operands)

    def scalar_input(self, number: int) -> int:
        self._vals[number] = self.fd.define_scalar(dtype=self.dtype(self.scalars[number].dtype))
        return number

    def call(self, local: LocalCall, operands: Sequence[Any]) -> tuple[Any, ...]:
        return NativeCall(local, operands, self.fd, self.dtype, self.scalar).results()

    def pointwise(self, local: LocalCall, operands: Sequence[Any]) -> Any:
        if local.number in self.divisions:
            return quotient(self.fd.ops, *operands)
        (made,) = self.call(local, operands)
        return made


@contextlib.contextmanager
def _definition(nvfuser: ModuleType) -> Iterator[Any]:
    """An open nvFuser definition. nvFuser prints every error that leaves one; here an error is only raised."""
    failed: Exception | None = None
    with nvfuser.FusionDefinition() as fd:
        try:
            yield fd
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed


def build_call(local: LocalCall) -> NativeKernel:
    """A definition of a single op on one rank; its scalars must be numbers.

    Raises ToTorch with the reason where nvFuser cannot compute it, NvfuserMissing without nvFuser.
    """
    nvfuser = load_nvfuser()
    inputs, outputs = local_types(local)
    with _definition(nvfuser) as fd:
        builder = _NativeBuilder(fd, nvfuser.DataType, {}, _no_size)
        for made in builder.call(local, [builder.define(t) for t in inputs]):
            fd.add_output(made)
    return NativeKernel(local.call.op.name, fd, inputs, (), outputs)


def local_types(local: LocalCall) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """The types of the operands and of the results that a rank has."""
    call = local.call
    operands = tuple(TensorType(s, t.dtype) for s, t in zip(local.operand_shapes, call.types, strict=True))
    results = tuple(TensorType(s, t.dtype) for s, t in zip(local.result_shapes, call.results, strict=True))
    return operands, results


@dataclass(frozen=True, slots=True)
class MemoryLayouts:
    """The memory layouts of a segment's inputs and outputs."""

    inputs: tuple[MemoryLayout, ...]
    outputs: tuple[MemoryLayout, ...]

    @property
    def row_major(self) -> bool:
        return all(layout.row_major for layout in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies that a definition does beside the ops of a segment: `unpacks` before them, `packs` after.

    It takes tensors of these names and types, and gives those of `gives`.
    """

    unpacks: tuple[Instruction, ...]
    packs: tuple[Instruction, ...]
    takes: Mapping[str, TensorType]
    gives: tuple[str, ...]


def build_segment(
    segmented: SegmentedDefinition,
    segment: Segment,
    rank: int,
    layouts: MemoryLayouts | None = None,
    copies: Copies | None = None,
) -> NativeKernel:
    """The kernel of a segment on a rank of its mesh.

    Inputs and outputs are in the order of the segment's, or of `copies`. Without `layouts` they are dense and
    row-major; outputs are dense in the order of their layouts. Raises ToTorch with the op and the reason where an op of
    the segment is left to torch, NvfuserMissing without nvFuser.
    """
    nvfuser = load_nvfuser()
    graph, done = segmented.resharded.graph, copies or _no_copies(segmented, segment, rank)
    with _definition(nvfuser) as fd:
        builder = _NativeBuilder(fd, nvfuser.DataType, graph.scalars, lambda t, dim: graph.shape(t.id)[dim])
        given = layouts.inputs if layouts is not None else (None,) * len(done.takes)
        pairs = zip(done.takes.items(), given, strict=True)
        values = _Values({name: Traced(fd, builder.define(t, lies), t) for (name, t), lies in pairs}, builder)
        scalars = tuple(builder.scalar_input(i) for i in scalar_inputs(graph, segment.computes))
        values.known.update(copied(fd, builder.dtype, done.unpacks, values.known))
        inner = dict.fromkeys(v for c in segment.computes for v in (*c.inputs, *c.outputs))
        ttypes = dict(zip(inner, value_types(segmented, list(inner), rank), strict=True))
        builder.divisions = softmax_divisions(graph, {c.node for c in segment.computes})
        for step in steps(graph, segment.computes, ttypes, set(segment.outputs)):
            _compute(builder, graph, step, values, rank, [ttypes[v] for v in step.compute.outputs])
        made = {name for step in done.packs for name in effects(step).makes}
        read = {name for step in done.packs for name in effects(step).reads}
        for name in (read | {*done.gives}) - made:
            values.whole(name)
        values.known.update(copied(fd, builder.dtype, done.packs, values.known))
        for place, name in enumerate(done.gives):
            fd.add_output(_laid_out(fd, values.known[name].value, layouts, place))
    inputs, outputs = tuple(done.takes.values()), tuple(values.known[name].type for name in done.gives)
    return NativeKernel(segment.name, fd, inputs, scalars, outputs)


def _no_copies(segmented: SegmentedDefinition, segment: Segment, rank: int) -> Copies:
    ttypes = value_types(segmented, segment.inputs, rank)
    takes = {f"v{v}": ttype for v, ttype in zip(segment.inputs, ttypes, strict=True)}
    return Copies((), (), takes, tuple(f"v{v}" for v in segment.outputs))


def _laid_out(fd: Any, tensor: Any, layouts: MemoryLayouts | None, place: int) -> Any:
    """The tensor with the order of its dims set.

    Unless told, nvFuser lets outputs follow the order of its inputs' dims.
    """
    if layouts is None or layouts.row_major or len(layouts.outputs[place].order) < 2:
        return tensor
    return fd.ops.stride_order(tensor, list(layouts.outputs[place].order))


def local_call(graph: Graph, compute: Compute, rank: int) -> LocalCall:
    """An op of a segment on a rank."""
    node, placed = graph.nodes[compute.node], compute.placement
    names = [f"v{v}" for v in compute.inputs]
    return LocalCall(node.call, names, placed.operands, placed.results, rank, number=node.id)


class _Values:
    """A definition's values by name: `known` ones, and those of which elements repeat, as long as nothing needs all."""

    def __init__(self, known: dict[str, Traced], builder: _NativeBuilder):
        self.known, self._builder = known, builder
        self._narrow: dict[str, tuple[Narrow, TensorType]] = {}

    def put(self, name: str, value: Narrow, ttype: TensorType) -> None:
        if value.shape == ttype.shape:
            self.known[name] = Traced(self._builder.fd, value.view, ttype)
        else:
            self._narrow[name] = (value, ttype)

    def narrow(self, name: str) -> Narrow:
        if name in self._narrow:
            return self._narrow[name][0]
        return Narrow(self.known[name].value, self.known[name].type.shape)

    def whole(self, name: str) -> Any:
        """The value with all its elements, repeated once for all that need them."""
        if name not in self.known:
            value, ttype = self._narrow[name]
            fd = self._builder.fd
            view = repeated_to(fd.ops, self._builder.dtype(DataType.Bool), value.view, ttype.shape)
            self.known[name] = Traced(fd, view, ttype)
        return self.known[name].value


def _compute(
    builder: _NativeBuilder, graph: Graph, step: Step, values: _Values, rank: int, ttypes: Sequence[TensorType]
) -> None:
    """Puts an op's results among the values."""
    node = graph.nodes[step.compute.node]
    try:
        made = _made(builder, local_call(graph, step.compute, rank), step.takes, values)
    except ToTorch as reason:
        raise ToTorch(f"{node.name} ({node.line}): {reason}") from None
    for name, value, ttype in zip(step.gives, made, ttypes, strict=True):
        values.put(name, value, ttype)


def _made(builder: _NativeBuilder, local: LocalCall, names: Sequence[str], values: _Values) -> Sequence[Narrow]:
    call, shapes = local.call, local.result_shapes
    if repeats(call):
        return [repeated(builder.fd.ops, call, values.narrow(names[0]), shapes[0])]
    if reads_narrow(call):
        operands = [values.narrow(name) for name in names]
        return [Narrow(builder.pointwise(local, [o.view for o in operands]), narrowest(operands, len(shapes[0])))]
    pairs = zip(builder.call(local, [values.whole(name) for name in names]), shapes, strict=True)
    return [Narrow(view, shape) for view, shape in pairs]


def value_types(segmented: SegmentedDefinition, values: Sequence[int], rank: int) -> tuple[TensorType, ...]:
    """The local types of these values on a rank."""
    found = [segmented.resharded.values[v] for v in values]
    ttypes = [segmented.resharded.graph.tensors[value.tensor].type for value in found]
    return tuple(
        TensorType(value.sharding.local_shape(ttype.shape, rank), ttype.dtype)
        for value, ttype in zip(found, ttypes, strict=True)
    )


def _no_size(tensor: Any, dim: int) -> int:
    raise AssertionError("a single op has no scalars that follow tensors")
