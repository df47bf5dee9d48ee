"""`FusionDefinition`: the builder that user code fills with ops and annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ..dtypes import DataType, scalar_dtype
from ..errors import SourceLine, caller_line, located, user_error
from ..mesh import DeviceMesh
from ..ops import COMPOSITES
from ..ops.base import Call, OpDef, ScalarRef, TensorRef, TensorType, tensor_refs
from ..ops.binding import bind
from ..scalars import ScalarDef, result_dtype
from ..sharding.value import Sharding
from ..user_values import as_int
from .annotation import (
    Annotation,
    check_agreement,
    contradiction,
    layouts_of_placements,
    layouts_of_sharding,
    layouts_of_spec,
)
from .checks import (
    check_contiguity,
    check_meshes,
    check_results,
    checked_dtype,
    checked_mesh,
    checked_number,
    checked_order,
    checked_sizes,
    composite_call,
    mesh_of_torch,
    plain_number,
)
from .loop import AxisView, LoopDomain
from .namespaces import Fusion, OpNamespace, find_op
from .overlaps import Overlap, checked_overlap
from .primals import of_gradients
from .records import OpNode, TensorDef, memory_order, reduction_flags
from .scalar_calls import is_scalar_call, scalar_arguments
from .tensor_view import TensorView, Val

_MOST_SCALARS = 65536  # Of one define_vector: a larger number is a mistake, and would fill the memory.


class DefinitionBuilder:
    """The part of `FusionDefinition` that defines and annotates."""

    def __init__(self) -> None:
        self.tensors: list[TensorDef] = []
        self.scalars: dict[int, ScalarDef] = {}
        self.nodes: list[OpNode] = []
        self.inputs: list[TensorRef | ScalarRef] = []
        self.outputs: list[int] = []
        self.ops = OpNamespace(self)  # type: ignore[arg-type]
        self.fusion = Fusion(self)  # type: ignore[arg-type]
        self.history: list[TensorRef | ScalarRef | OpNode] = []
        self._annotations: dict[int, Annotation] = {}
        self.overlaps: dict[int, Overlap] = {}
        self.primals: dict[int, int] = {}  # of each gradient
        self._producers: dict[int, int] = {}
        self._open = True

    def __enter__(self) -> DefinitionBuilder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    # inputs

    def define_tensor(
        self,
        shape: Sequence[int] | None = None,
        contiguity: Any = None,
        dtype: Any = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        static_sizes: bool = False,
        symbolic_sizes: Sequence[int] | None = None,
    ) -> TensorView:
        """An input tensor. `shape` holds global sizes, -1 where the arguments decide (and are more than 1).

        nvFuser's second form takes `sizes` and `strides` of an example tensor. Raises DefinitionError for
        what is no size, dtype or order of the dims.
        """
        line = self._changing()
        if strides is None and contiguity is not None and _are_strides(contiguity):
            strides = contiguity
        given = sizes if sizes is not None else shape if shape is not None else symbolic_sizes
        found = checked_sizes(given, line)
        check_contiguity(contiguity, line)
        if strides is not None and not static_sizes:
            found = tuple(n if n == 1 else -1 for n in found)
        order = checked_order(stride_order, strides, found, line)
        return self._new_input(TensorType(found, checked_dtype("define_tensor", dtype, line)), line, order)

    def from_pytorch(self, tensor: Any, static_sizes: bool = False) -> TensorView:
        """An input with the shape, strides and dtype of a torch tensor; of a DTensor also its sharding.

        Sizes other than 1 are left to the arguments unless they are static. Raises DefinitionError for anything else.
        """
        line = self._changing()
        if not all(hasattr(tensor, name) for name in ("shape", "dtype", "stride")):
            raise user_error(
                "from_pytorch", f"{type(tensor).__name__}", "a torch tensor", "Pass an example tensor.", line
            )
        shape = tuple(tensor.shape)
        found = shape if static_sizes else tuple(n if n == 1 else -1 for n in shape)
        dtype = checked_dtype("from_pytorch", tensor.dtype, line)
        out = self._new_input(TensorType(found, dtype), line, checked_order(None, tensor.stride(), shape, line))
        if hasattr(tensor, "placements"):
            self.shard(out, tensor.placements, tensor.device_mesh)
        return out

    def define_scalar(self, value: Any = None, dtype: Any = None) -> Val:
        """A scalar input of this dtype; or, given a number, a constant."""
        line = self._changing()
        if isinstance(value, DataType):
            value, dtype = None, value
        found = None if dtype is None else checked_dtype("define_scalar", dtype, line)
        if value is None:
            out = self._new_scalar(ScalarDef("input", (), found or DataType.Double))
            self.inputs.append(out.ref)
            return out
        number = checked_number("define_scalar", value, found, line)
        return self._new_scalar(ScalarDef("const", (number,), found or scalar_dtype(number)))

    def define_vector(self, size: int | Sequence[Any], dtype: Any = DataType.Int) -> list[Val]:
        """As many scalar inputs as a number says, or a constant per entry of a list (-1 stays as it is)."""
        line = self._changing()
        count = as_int(size)
        if count is not None and 0 <= count <= _MOST_SCALARS:
            return [self.define_scalar(dtype=dtype) for _ in range(count)]
        if not isinstance(size, (list, tuple)):
            raise user_error(
                "define_vector",
                repr(size),
                f"how many scalars (at most {_MOST_SCALARS}), or a list of numbers",
                "",
                line,
            )
        return [v if isinstance(v, Val) or as_int(v) == -1 else self._constant(v, dtype, line) for v in size]

    def _constant(self, value: Any, dtype: Any, line: SourceLine) -> Val:
        return self.define_scalar(checked_number("define_vector", value, None, line), dtype)

    # ops

    def call_with_keywords(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """`call` in the form of the op's own function, as `fd.ops` has it."""
        return self.call(name, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """No pickles and copies, which would share half of a definition. Raises DefinitionError."""
        raise user_error(
            "a definition cannot be copied or pickled", type(self).__name__, "the code that makes it",
            "Call that code again where another is needed; print(fd) is it.", caller_line(),
        )  # fmt: skip

    def call(self, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Apply an op by its name, or an OpDef: a TensorView, a tuple of them, or (for scalars alone) a Val."""
        return self.call_at(caller_line(), name, args, kwargs)

    def call_at(
        self, line: SourceLine, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `call`, asked for by this line of the user's."""
        with located(line):
            self.check_open()
            if not isinstance(args, (list, tuple)):
                needed = "a list of all arguments"
                raise user_error(f"call of {name!r}: arguments", repr(args), needed, "Pass one list with all of them.")
            if not isinstance(kwargs, (dict, Mapping, type(None))):
                needed = "a dict of arguments by name, or None"
                raise user_error(f"call of {name!r}: keywords", repr(kwargs), needed, "Pass {'dim': 0}, for example.")
            return self._apply(find_op(name), args, kwargs or {}, line)

    def call_composite(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply a function that is written in ops of the table."""
        with located(caller_line()):
            self.check_open()
            return composite_call(self, name, COMPOSITES[name], args, kwargs)

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        if is_scalar_call(op, args, kwargs):
            return self._scalar_op(op, args, kwargs)
        bound = bind(op, args, kwargs, self._resolve)
        inputs = tuple(ref.id for ref in tensor_refs(bound))
        types = op.infer(Call(op, bound, tuple(self.tensors[i].type for i in inputs)))
        check_results(op.name, types)
        made = [self._new_tensor(t, line) for t in types]
        for tensor in made:
            self._producers[tensor.id] = len(self.nodes)
        self.nodes.append(OpNode(op, bound, inputs, tuple(t.id for t in made), line))
        self.history.append(self.nodes[-1])
        return made[0] if len(made) == 1 else tuple(made)

    def _scalar_op(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Val:
        refs = tuple(map(self._resolve, scalar_arguments(op, args, kwargs)))
        if op.name == "cast":
            return self._new_scalar(ScalarDef("cast", refs[:1], checked_dtype("cast", refs[1], None)))
        found = [self.scalars[r.id].dtype if isinstance(r, ScalarRef) else scalar_dtype(r) for r in refs]
        return self._new_scalar(ScalarDef(op.name, refs, result_dtype(op.name, found)))

    def size(self, tensor: TensorView, dim: int) -> Val:
        """The size of a dim as a scalar of the definition."""
        line = self._changing()
        ndim, place = self._own(tensor, "size", line).ndim, as_int(dim)
        if place is None or not -ndim <= place < ndim:
            raise user_error(
                f"size of {tensor.label}: no such dim",
                f"{dim!r}",
                f"a dim of {tensor.type}",
                "Pass an existing dim.",
                line,
            )
        return self._new_scalar(ScalarDef("size", (tensor.ref, place % ndim), DataType.Int))

    def add_output(self, output: TensorView, alias_input: TensorView | None = None) -> None:
        """Return a tensor from the program. Its order among the outputs is the order of these calls.

        Raises DefinitionError for anything but a tensor of this definition, and for `alias_input`: nothing is
        written into arguments.
        """
        line = self._changing()
        if alias_input is not None:
            raise user_error(
                "add_output: alias_input", repr(alias_input), "None: meshfuse does not write into arguments",
                "Return the tensor and copy it.", line,
            )  # fmt: skip
        self.outputs.append(self._own(output, "add_output", line).id)

    # annotations

    def mesh_split(self, tensor: TensorView, mesh: DeviceMesh, spec: Sequence[Any]) -> None:
        """Annotate how a tensor splits over a mesh (GSPMD's mesh_split).

        `spec` has one entry per dim: None (or -1), a mesh axis by name or number, a list of axes from major
        to minor, or a list of `Split(size, axis)` for any factorisation. Raises DefinitionError for unknown
        or repeated axes, a wrong number of entries, or an annotation that contradicts an earlier one.
        """
        line = self._changing()
        ndim, mesh = self._own(tensor, "mesh_split", line).ndim, checked_mesh(mesh, line)
        self._annotate(tensor, mesh, layouts_of_spec(tensor.label, mesh, spec, ndim, line), line)

    def shard(self, tensor: TensorView, sharding: Any, mesh: Any = None) -> None:
        """Annotate with a `Sharding`, or with DTensor placements and a (torch or meshfuse) device mesh.

        Raises DefinitionError for another number of dims, for placements that are no `Shard` or `Replicate`, and where
        it contradicts an earlier annotation.
        """
        line = self._changing()
        ndim = self._own(tensor, "shard", line).ndim
        if isinstance(sharding, Sharding):
            layouts = layouts_of_sharding(tensor.label, sharding, ndim, line)
            if mesh is not None and checked_mesh(mesh, line) != sharding.mesh:
                raise contradiction(tensor.label, f"mesh {mesh}", f"mesh {sharding.mesh} in its sharding", line)
            self._annotate(tensor, sharding.mesh, layouts, line)
            return
        mesh = checked_mesh(mesh, line)
        self._annotate(tensor, mesh, layouts_of_placements(tensor.label, mesh, sharding, ndim, line), line)

    def overlap(self, tensor: TensorView, chunks: int, dim: int = 0, ring: bool = False) -> None:
        """Ask that what makes a tensor and what is communicated for it be done in chunks of one of its dims.

        While a chunk is communicated the next one is computed; no number changes. `ring=True` asks that shards
        travel from rank to rank: `chunks` must be a multiple of their number. Where that cannot be done it runs whole,
        and `fd.explain(tensor)` says why. Raises DefinitionError for wrong numbers.
        """
        line = self._changing()
        asked = checked_overlap(self._own(tensor, "overlap", line), chunks, dim, ring, line)
        old = self.overlaps.get(tensor.id)
        if old is not None and old[:3] != asked[:3]:
            raise contradiction(tensor.label, f"overlap {asked[:3]}", f"{old[:3]} at {old.line}", line)
        self.overlaps[tensor.id] = asked

    def annotate_mesh(self, tensor: TensorView, mesh: Any) -> None:
        """nvFuser's set_device_mesh."""
        line = self._changing()
        found, mesh = self.annotation(self._own(tensor, "set_device_mesh", line)), checked_mesh(mesh, line)
        if found.mesh is not None and found.mesh != mesh:
            raise contradiction(tensor.label, f"mesh {mesh}", f"mesh {found.mesh} at {found.line}", line)
        found.mesh, found.line = mesh, line

    def _annotate(self, tensor: TensorView, mesh: DeviceMesh, dims: Sequence[Any], line: SourceLine) -> None:
        old = self._annotations.get(tensor.id)
        domain = LoopDomain.of_layouts(dims, self.reduction_flags(tensor.id))
        new = Annotation(line, domain, tensor.label, mesh, stated=True)
        if old is not None:
            check_agreement(old, new)
            new.allocation, new.memory = old.allocation, old.memory
        if old is None or old.mesh is None or old.meaning() != new.meaning():
            self._annotations[tensor.id] = new

    def _own(self, tensor: Any, what: str, line: SourceLine) -> TensorView:
        if not isinstance(tensor, TensorView) or tensor.fd is not self:
            raise user_error(
                what, f"{tensor!r} of another definition" if isinstance(tensor, TensorView) else repr(tensor),
                "a tensor of this definition", "Pass what this FusionDefinition's own calls returned.", line,
            )  # fmt: skip
        return tensor

    def _changing(self) -> SourceLine:
        """The user's line, in a definition that may still change."""
        self.check_open()
        return caller_line()

    def annotation(self, tensor: TensorView) -> Annotation:
        """The tensor's annotation, made empty where there is none."""
        if tensor.id not in self._annotations:
            domain = LoopDomain.whole(self.reduction_flags(tensor.id))
            self._annotations[tensor.id] = Annotation(caller_line(), domain, tensor.label)
        return self._annotations[tensor.id]

    def is_annotated(self, tensor: TensorView) -> bool:
        """Whether an annotation of the user's puts the tensor on a mesh."""
        found = self._annotations.get(tensor.id)
        return found is not None and found.mesh is not None

    @property
    def annotations(self) -> Mapping[int, Annotation]:
        """The annotations that name a mesh, by tensor: those of gradients that follow their primals, too."""
        given = {i: a for i, a in self._annotations.items() if a.mesh is not None}
        return dict(sorted((of_gradients(self, given) | given).items()))

    def check_complete(self, line: SourceLine | None) -> None:
        """Raises DefinitionError without outputs, and for axes parallelized on a tensor without a mesh."""
        if not self.outputs:
            raise user_error(
                "the definition has no outputs", "no add_output call", "at least one",
                "Call fd.add_output(t) for each result.", line,
            )  # fmt: skip
        check_meshes(self._annotations.values())

    @property
    def all_annotations(self) -> Mapping[int, Annotation]:
        """Those too that name no mesh."""
        return dict(sorted((self._annotations | dict(self.annotations)).items()))

    def set_allocation(self, tensor: TensorView, loop: Sequence[Any]) -> None:
        """The memory order of a tensor's dims, from a list of its loop axes."""
        line = self._changing()
        found = self.annotation(tensor)
        axes = [axis for axis in loop if isinstance(axis, AxisView)] if isinstance(loop, (list, tuple)) else []
        dims = found.domain.dims_in_order([axis.leaf for axis in axes])
        if len(dims) != tensor.ndim:
            raise user_error(
                f"set_allocation_domain of {tensor.label}",
                repr(loop),
                f"axes of its loop domain {found.domain}, of every dim",
                "Pass tv.get_loop_domain(), or a list of tv.axis(i).",
                line,
            )
        found.allocation = dims

    def output_orders(self) -> list[tuple[int, ...] | None]:
        """For every output nvFuser's stride order (0 is the fastest dim); None for row-major."""
        return [self._order_of_output(tensor) for tensor in self.outputs]

    def _order_of_output(self, tensor: int) -> tuple[int, ...] | None:
        annotation = self._annotations.get(tensor)
        allocation = annotation.allocation if annotation is not None else None
        return memory_order(self.tensors[tensor].type.ndim, allocation, self.producer(tensor))

    def producer(self, tensor: int) -> OpNode | None:
        """The op that makes a tensor, None for an input."""
        return self.nodes[self._producers[tensor]] if tensor in self._producers else None

    def expression(self, node: OpNode) -> Any:
        """An op as a tensor's `definition` and `uses` give it."""
        return node

    def reduction_flags(self, tensor: int) -> tuple[bool, ...]:
        """For every dim of the loop domain whether the op that makes the tensor reduces it."""
        return reduction_flags(self.tensors, tensor, self.producer(tensor))

    def loop_dims(self, tensor: int) -> int:
        """How many dims a tensor has, those that its op reduces counted."""
        return len(self.reduction_flags(tensor))

    def input_tensors(self) -> list[int]:
        """The numbers of the tensors among the inputs, in the order of definition."""
        return [ref.id for ref in self.inputs if isinstance(ref, TensorRef)]

    def check_open(self) -> None:
        """Raises DefinitionError once the definition has run: its plans would not hold any more."""
        if not self._open:
            raise user_error(
                "this definition has been compiled and cannot change any more", "", "",
                "Make a new FusionDefinition.", caller_line(),
            )  # fmt: skip

    # internals

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, (TensorView, Val)):
            if value.fd is not self:
                raise user_error(
                    "op argument", f"{value!r} of another definition", "a value of this definition",
                    "Pass what this FusionDefinition's own calls returned.",
                )  # fmt: skip
            return value.ref
        return plain_number(value)

    def _new_input(self, kind: TensorType, line: SourceLine, order: tuple[int, ...] | None) -> TensorView:
        tensor = self._new_tensor(kind, line, order)
        self.inputs.append(tensor.ref)
        self.history.append(tensor.ref)
        return tensor

    def _new_tensor(self, kind: TensorType, line: SourceLine, order: tuple[int, ...] | None = None) -> TensorView:
        ref = TensorRef(len(self.tensors))
        self.tensors.append(TensorDef(kind, f"t{ref.id}", line, order))
        return TensorView(self, ref)  # type: ignore[arg-type]

    def _new_scalar(self, made: ScalarDef) -> Val:
        ref = ScalarRef(len(self.scalars), made.dtype)
        self.scalars[ref.id] = made
        self.history.append(ref)
        return Val(self, ref)  # type: ignore[arg-type]


def _are_strides(contiguity: Any) -> bool:
    return isinstance(contiguity, (list, tuple)) and any(type(c) is int for c in contiguity)


__all__ = ["DefinitionBuilder", "OpNode", "TensorDef", "mesh_of_torch"]
