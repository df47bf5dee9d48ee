"""`FusionDefinition`: the builder that user code fills with ops and annotations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..dtypes import DataType, from_torch, scalar_dtype
from ..errors import SourceLine, caller_line, user_error
from ..mesh import DeviceMesh
from ..ops import COMPOSITES, OPS
from ..ops.base import Call, FactorKind, OpDef, ParamKind, ScalarRef, TensorRef, TensorType, count_tensors
from ..ops.binding import bind
from ..scalars import FUNCTIONS, ScalarDef, result_dtype
from ..sharding.value import Sharding
from .annotation import Annotation, layouts_of_placements, layouts_of_spec
from .loop import LoopDomain
from .tensor_view import TensorView, Val


@dataclass(frozen=True, slots=True)
class TensorDef:
    """A tensor of a definition: its symbolic type and where it came from."""

    type: TensorType
    name: str
    line: SourceLine
    stride_order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class OpNode:
    """One op of a definition. `inputs` and `outputs` number tensors."""

    op: OpDef
    args: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: SourceLine


class OpNamespace:
    """`fd.ops`: every op of the table and every composite, as a function."""

    __slots__ = ("_fd",)

    def __init__(self, fd: FusionDefinition):
        self._fd = fd

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in COMPOSITES:
            return functools.partial(COMPOSITES[name], self._fd)
        if name not in OPS:
            raise AttributeError(f"meshfuse has no op {name!r}; it has {', '.join(sorted([*OPS, *COMPOSITES]))}")
        return functools.partial(self._fd.call_with_keywords, name)

    def __dir__(self) -> list[str]:
        return sorted([*OPS, *COMPOSITES])


class DefinitionBuilder:
    """The part of `FusionDefinition` that defines and annotates."""

    def __init__(self) -> None:
        self.tensors: list[TensorDef] = []
        self.scalars: dict[int, ScalarDef] = {}
        self.nodes: list[OpNode] = []
        self.inputs: list[TensorRef | ScalarRef] = []
        self.outputs: list[int] = []
        self.ops = OpNamespace(self)  # type: ignore[arg-type]
        self._annotations: dict[int, Annotation] = {}
        self._producers: dict[int, int] = {}
        self._open = True

    def __enter__(self) -> DefinitionBuilder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    # inputs -----------------------------------------------------------------------------------------------------

    def define_tensor(
        self, shape: Sequence[int] | None = None, contiguity: Any = None, dtype: Any = DataType.Float,
        is_cpu: bool = False, stride_order: Sequence[int] | None = None, *, sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None, static_sizes: bool = False, symbolic_sizes: Sequence[int] | None = None,
    ) -> TensorView:  # fmt: skip
        """An input tensor. `shape` holds global sizes, -1 where the arguments decide (and must be more than 1 or not
        broadcast). nvFuser's second form takes `sizes` and `strides` of an example tensor.

        Raises DefinitionError for sizes below -1.
        """  # noqa: D205
        if strides is None and contiguity is not None and _are_strides(contiguity):
            strides = contiguity
        given = sizes if sizes is not None else shape if shape is not None else symbolic_sizes
        example = strides is not None and not static_sizes
        found = tuple(int(n) if not example or n == 1 else -1 for n in (given or ()))
        if given is None or any(n < -1 for n in found):
            raise user_error("define_tensor: shape", repr(given), "sizes >= -1", "Pass a list with one size per dim.", caller_line())
        order = tuple(stride_order) if stride_order is not None else _order_of(strides)
        tensor = self._new_tensor(TensorType(found, _dtype_of(dtype)), caller_line(), order)
        self.inputs.append(tensor.ref)
        return tensor

    def from_pytorch(self, tensor: Any, static_sizes: bool = False) -> TensorView:
        """An input with the shape, strides and dtype of a torch tensor; of a DTensor also its sharding."""
        shape = tuple(tensor.shape)
        found = shape if static_sizes else tuple(n if n == 1 else -1 for n in shape)
        out = self._new_tensor(TensorType(found, from_torch(tensor.dtype)), caller_line(), _order_of(tensor.stride()))
        self.inputs.append(out.ref)
        if hasattr(tensor, "placements"):
            self.shard(out, tensor.placements, tensor.device_mesh)
        return out

    def define_scalar(self, value: Any = None, dtype: Any = None) -> Val:
        """A scalar input of this dtype; or, given a number, a constant."""
        if isinstance(value, DataType):
            value, dtype = None, value
        found = from_torch(dtype) if dtype is not None else scalar_dtype(value) if value is not None else DataType.Double
        made = ScalarDef("input", (), found) if value is None else ScalarDef("const", (value,), found)
        out = self._new_scalar(made)
        if value is None:
            self.inputs.append(out.ref)
        return out

    def define_vector(self, values: int | Sequence[Any], dtype: Any = DataType.Int) -> list[Val]:
        """Scalars: as many inputs as a number says, or one constant per entry of a list (-1 stays an open size)."""
        if isinstance(values, int):
            return [self.define_scalar(dtype=dtype) for _ in range(values)]
        return [v if isinstance(v, Val) or v == -1 else self.define_scalar(v, dtype) for v in values]

    # ops --------------------------------------------------------------------------------------------------------

    def call_with_keywords(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, args, kwargs)

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Apply an op of the table: a TensorView (a tuple of them for several results), or a Val for scalars alone."""
        line = caller_line()
        try:
            self.check_open()
            return self._apply(OPS[name], args, kwargs or {}, line)
        except ValueError as error:
            if getattr(error, "where", line) is None:
                error.where = line  # type: ignore[attr-defined]
            raise

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        if self._is_scalar_call(op, args, kwargs):
            return self._scalar_op(op.name, [*args, *kwargs.values()])
        bound = bind(op, args, kwargs, self._resolve)
        inputs = tuple(ref.id for ref in tensor_refs(bound))
        types = op.infer(Call(op, bound, tuple(self.tensors[i].type for i in inputs)))
        made = [self._new_tensor(t, line) for t in types]
        for tensor in made:
            self._producers[tensor.id] = len(self.nodes)
        self.nodes.append(OpNode(op, bound, inputs, tuple(t.id for t in made), line))
        return made[0] if len(made) == 1 else tuple(made)

    def _is_scalar_call(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = [*args, *kwargs.values()]
        numbers = (Val, bool, int, float, complex, DataType)
        scalars_only = bool(given) and all(isinstance(a, numbers) for a in given)
        return scalars_only and (op.name in FUNCTIONS or op.name == "cast") and any(isinstance(a, Val) for a in given)

    def _scalar_op(self, name: str, operands: Sequence[Any]) -> Val:
        refs = tuple(self._resolve(operand) for operand in operands)
        if name == "cast":
            return self._new_scalar(ScalarDef("cast", refs[:1], refs[1]))
        found = [self.scalars[r.id].dtype if isinstance(r, ScalarRef) else scalar_dtype(r) for r in refs]
        return self._new_scalar(ScalarDef(name, refs, result_dtype(name, found)))

    def size(self, tensor: TensorView, dim: int) -> Val:
        """The size of a dim as a scalar of the definition."""
        ref = self._resolve(tensor)
        ndim = tensor.ndim
        if not -ndim <= dim < ndim:
            raise user_error("size: dim out of range", f"dim {dim} of {tensor}", f"{-ndim} to {ndim - 1}", "", caller_line())
        return self._new_scalar(ScalarDef("size", (ref, dim % ndim), DataType.Int))

    def add_output(self, tensor: TensorView | Val, alias_input: TensorView | None = None) -> None:
        """Return a tensor from the program. Its order among the outputs is the order of these calls."""
        if not isinstance(tensor, TensorView):
            raise user_error("add_output", repr(tensor), "a tensor of this definition", "Outputs are tensors.", caller_line())
        self.outputs.append(self._resolve(tensor).id)

    # annotations --------------------------------------------------------------------------------------------------

    def mesh_split(self, tensor: TensorView, mesh: DeviceMesh, spec: Sequence[Any]) -> None:
        """Annotate how a tensor splits over a mesh (GSPMD's mesh_split).

        `spec` has one entry per dim: None (or -1), a mesh axis by name or number, a list of axes from major to minor,
        or a list of `Split(size, axis)` for any factorisation. Raises DefinitionError for unknown or repeated axes, a
        wrong number of entries, or an annotation that contradicts an earlier one.
        """
        line = caller_line()
        ndim = self._checked(tensor, line).ndim
        self._annotate(tensor, mesh, layouts_of_spec(tensor.name, mesh, spec, ndim, line), line)

    def shard(self, tensor: TensorView, sharding: Any, mesh: Any = None) -> None:
        """Annotate with a `Sharding`, or with DTensor placements and a (torch or meshfuse) device mesh."""
        line = caller_line()
        ndim = self._checked(tensor, line).ndim
        if isinstance(sharding, Sharding):
            if sharding.partial:
                raise user_error(
                    f"tensor {tensor.name}: an annotation must say where the elements are", f"{sharding}",
                    "a sharding without partial axes", "Leave the axis out: the reduction is then done here.", line,
                )  # fmt: skip
            self._annotate(tensor, sharding.mesh, sharding.dims, line)
            return
        mesh = mesh if isinstance(mesh, DeviceMesh) else mesh_of_torch(mesh)
        self._annotate(tensor, mesh, layouts_of_placements(tensor.name, mesh, sharding, ndim, line), line)

    def annotate_mesh(self, tensor: TensorView, mesh: Any) -> None:
        """nvFuser's set_device_mesh."""
        line = caller_line()
        self._checked(tensor, line)
        found = self.annotation(tensor)
        mesh = mesh if isinstance(mesh, DeviceMesh) else mesh_of_torch(mesh)
        if found.mesh is not None and found.mesh != mesh:
            raise _contradiction(tensor.name, f"mesh {mesh}", f"mesh {found.mesh} at {found.line}", line)
        found.mesh, found.line = mesh, line

    def _annotate(self, tensor: TensorView, mesh: DeviceMesh, dims: Sequence[Any], line: SourceLine) -> None:
        old = self._annotations.get(tensor.id)
        new = Annotation(line, LoopDomain.of_layouts(dims, self._reduction_flags(tensor.id)), mesh)
        if old is not None and old.mesh is not None:
            before = (old.mesh, old.domain.layouts())
            if before != (mesh, new.domain.layouts()):
                raise _contradiction(tensor.name, f"{mesh} {new.domain}", f"{old.mesh} {old.domain} at {old.line}", line)
        self._annotations[tensor.id] = new

    def _checked(self, tensor: TensorView, line: SourceLine) -> TensorView:
        self.check_open()
        if not isinstance(tensor, TensorView) or tensor.fd is not self:
            raise user_error(
                "annotation", f"{tensor!r} of another definition" if isinstance(tensor, TensorView) else repr(tensor),
                "a tensor of this definition", "Annotate the tensors that this FusionDefinition made.", line,
            )  # fmt: skip
        return tensor

    def annotation(self, tensor: TensorView) -> Annotation:
        """The tensor's annotation, made empty where there is none."""
        if tensor.id not in self._annotations:
            self._annotations[tensor.id] = Annotation(caller_line(), LoopDomain.whole(self._reduction_flags(tensor.id)))
        return self._annotations[tensor.id]

    def is_annotated(self, tensor: TensorView) -> bool:
        found = self._annotations.get(tensor.id)
        return found is not None and found.mesh is not None

    @property
    def annotations(self) -> Mapping[int, Annotation]:
        """The annotations that name a mesh, by tensor."""
        return {i: a for i, a in sorted(self._annotations.items()) if a.mesh is not None}

    def set_allocation(self, tensor: TensorView, loop: Sequence[Any]) -> None:
        """The memory order of a tensor's dims, from a list of its loop axes."""
        found = self.annotation(tensor)
        dim_of = {id(leaf): d for d, root in enumerate(r for r in found.domain.roots if not r[0].reduction) for leaf in root}
        dims = [dim_of[id(axis.leaf)] for axis in loop if id(axis.leaf) in dim_of]
        found.allocation = tuple(dict.fromkeys(dims))

    def _reduction_flags(self, tensor: int) -> tuple[bool, ...]:
        """For every dim of the loop domain, True where it is a reduction of the op that makes the tensor.

        The op's single operand keeps its reduced dims in their places; matmul-like ops have theirs at the end.
        """
        kept = (False,) * self.tensors[tensor].type.ndim
        if tensor not in self._producers:
            return kept
        node = self.nodes[self._producers[tensor]]
        types = tuple(_known(self.tensors[i].type) for i in node.inputs)
        results = tuple(_known(self.tensors[i].type) for i in node.outputs)
        try:
            rule = node.op.rule(Call(node.op, node.args, types, results))
        except (ValueError, TypeError):
            return kept
        reduced = {i for i, factor in enumerate(rule.factors) if factor.kind is FactorKind.REDUCE}
        if len(rule.operands) == 1 and sum(kept) == 0 and len(rule.operands[0]) == len(kept) + len(reduced):
            return tuple(bool(reduced.intersection(dim)) for dim in rule.operands[0])
        return (*kept, *(True,) * len(reduced))

    def check_open(self) -> None:
        """Raises DefinitionError once the definition has run: its plans would not hold any more."""
        if not self._open:
            raise user_error(
                "this definition has been compiled and cannot change any more", "", "",
                "Make a new FusionDefinition.", caller_line(),
            )  # fmt: skip

    # internals ----------------------------------------------------------------------------------------------------

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, (TensorView, Val)):
            if value.fd is not self:
                raise user_error("op argument", f"{value!r} of another definition", "a value of this definition")
            return value.ref
        return value

    def _new_tensor(self, kind: TensorType, line: SourceLine, order: tuple[int, ...] | None = None) -> TensorView:
        ref = TensorRef(len(self.tensors))
        self.tensors.append(TensorDef(kind, f"t{ref.id}", line, order))
        return TensorView(self, ref)  # type: ignore[arg-type]

    def _new_scalar(self, made: ScalarDef) -> Val:
        ref = ScalarRef(len(self.scalars), made.dtype)
        self.scalars[ref.id] = made
        return Val(self, ref)  # type: ignore[arg-type]


def tensor_refs(args: Sequence[Any]) -> list[TensorRef]:
    """The tensors among an op's arguments, in order."""
    out: list[TensorRef] = []
    for arg in args:
        if count_tensors(arg):
            out.extend((arg,) if isinstance(arg, TensorRef) else arg)
    return out


def mesh_of_torch(mesh: Any) -> DeviceMesh:
    """A meshfuse mesh of a `torch.distributed.DeviceMesh`, or of ranks."""
    ranks = getattr(mesh, "mesh", mesh)
    return DeviceMesh(ranks, getattr(mesh, "mesh_dim_names", None))


def _contradiction(name: str, new: str, old: str, line: SourceLine) -> Exception:
    return user_error(
        f"tensor {name} is annotated twice", f"{new} after {old}", "one annotation, or equal ones",
        "Remove one, or reshard with fd.ops.set and annotate its result.", line,
    )  # fmt: skip


def _known(kind: TensorType) -> TensorType:
    """A type with a stand-in for unknown sizes, to ask rules that need sizes."""
    return TensorType(tuple(7 if n < 0 else n for n in kind.shape), kind.dtype)


def _are_strides(contiguity: Any) -> bool:
    return isinstance(contiguity, (list, tuple)) and any(type(c) is int for c in contiguity)


def _order_of(strides: Sequence[int] | None) -> tuple[int, ...] | None:
    """nvFuser's stride order (the place of each dim, 0 the fastest); None for row-major."""
    if strides is None:
        return None
    by_stride = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    order = tuple(len(strides) - 1 - by_stride.index(d) for d in range(len(strides)))
    return order if order != tuple(reversed(range(len(strides)))) else None


def _dtype_of(dtype: Any) -> DataType:
    return from_torch(dtype)


__all__ = ["DefinitionBuilder", "OpNode", "ParamKind", "TensorDef", "mesh_of_torch", "tensor_refs"]
