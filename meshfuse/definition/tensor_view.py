"""`TensorView` and `Val`: what the ops of a definition take and give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..argument_checks import as_int, check_flags
from ..dtypes import DataType
from ..errors import DefinitionError, SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh, ParallelType
from ..ops.values import ScalarRef, TensorRef, TensorType
from .annotating import put_on_mesh, set_allocation
from .arithmetic import Arithmetic, op_instead
from .copies import CommunicationType, copy_after, copy_before
from .domain_text import Extents, TensorDomain, tensor_text
from .loop import AxisView, Leaf, LoopDomain
from .recording import Definition

_NO_MOVES: Mapping[int, int] = MappingProxyType({})


class NotIterableError(DefinitionError, TypeError):
    """A tensor of a definition is no sequence of tensors."""


class NoAttributeError(DefinitionError, AttributeError):
    """A tensor of a definition has no such method or attribute."""


class Val(Arithmetic["Val | complex"]):
    """A scalar of the definition: an input, a constant, the size of a dim, or arithmetic on these."""

    __slots__ = ("ref",)

    def __init__(self, fd: Definition, ref: ScalarRef):
        self.fd, self.ref = fd, ref

    @property
    def dtype(self) -> DataType:
        return self.fd.recording.scalars[self.ref.id].dtype

    def is_tensor(self) -> bool:
        """False: tells scalars from tensors among a definition's values."""
        return False

    def is_symbolic(self) -> bool:
        """False for a constant."""
        return self.fd.recording.scalars[self.ref.id].op != "const"

    def definition(self) -> Any:
        """The arithmetic that makes the scalar; None for an input, a constant or the size of a dim."""
        made = self.fd.recording.scalars[self.ref.id]
        return None if made.op in ("input", "const", "size") else made

    def uses(self) -> list[Any]:
        """The scalars that are computed from this one."""
        return [made for made in self.fd.recording.scalars.values() if self.ref in made.operands]

    def __repr__(self) -> str:
        return f"Val(s{self.ref.id}: {self.dtype.name})"


class Sizes(Sequence["Val"]):
    """The sizes of a tensor: a function that lists them, as in nvFuser, and a sequence, as in torch."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: TensorView):
        self._tensor = tensor

    def __call__(self) -> list[Val]:
        return [self._tensor.size(dim) for dim in range(len(self))]

    def __len__(self) -> int:
        return self._tensor.ndim

    def __getitem__(self, dim: Any) -> Any:
        """A size, or those in a range of dims. Raises DefinitionError for a dim that the tensor does not have."""
        return self()[dim] if isinstance(dim, slice) else self._tensor.size(dim)

    def __iter__(self) -> Iterator[Val]:
        return iter(self())

    def __repr__(self) -> str:
        return repr(self._tensor.type.shape)


class TensorView(Arithmetic["TensorView | Val | complex"]):
    """A tensor of the definition: its type, its mesh, and its loop domain, which nvFuser's calls edit in place.

    The *loop domain* is a list of axes, at first one per dim. `split`, `merge` and `reorder` change the list,
    `axis(i).parallelize(...)` binds one of its axes to a mesh axis: together they say how the tensor is sharded.
    """

    __slots__ = ("_rfactored", "ref")

    def __init__(self, fd: Definition, ref: TensorRef, rfactored: LoopDomain | None = None):
        self.fd, self.ref, self._rfactored = fd, ref, rfactored

    @property
    def id(self) -> int:
        """The tensor's number in its definition."""
        return self.ref.id

    @property
    def type(self) -> TensorType:
        """Shape (-1 where the arguments decide) and dtype."""
        return self.fd.recording.tensors[self.ref.id].type

    @property
    def name(self) -> str:
        """`t` and the number: `t0`."""
        return self.fd.recording.tensors[self.ref.id].name

    @property
    def label(self) -> str:
        """The script's variable, if its line shows one, with the name: `x (t0)`."""
        return self.fd.recording.tensors[self.ref.id].label

    def is_tensor(self) -> bool:
        """True: tells tensors from scalars among a definition's values."""
        return True

    def num_dims(self) -> int:
        """The number of dims, as nvFuser calls it."""
        return self.ndim

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.type.ndim

    @property
    def dtype(self) -> DataType:
        return self.type.dtype

    @property
    def shape(self) -> Sizes:
        """The size of every dim, as scalars of the definition: `x.shape()` is their list, `x.shape[0]` the first."""
        return Sizes(self)

    def size(self, dim: int | None = None) -> Any:
        """The size of a dim, counted from the back if negative, as a scalar of the definition; without a dim, all.

        Raises DefinitionError for a dim that the tensor does not have.
        """
        return self.shape() if dim is None else self.fd.size(self, dim)

    def __len__(self) -> int:
        return self.ndim

    def __iter__(self) -> Iterator[Any]:
        raise user_error(f"{self.label} cannot be iterated over", f"{self.ndim} dims", "an op",
                         "Use fd.ops.select for one index of a dim.", caller_line(), NotIterableError)  # fmt: skip

    def __getitem__(self, index: Any) -> Any:
        raise user_error(f"{self.label} cannot be indexed", f"[{shown(index)}]", "an op",
                         "Use fd.ops.select for one index of a dim, fd.ops.slice for a range of each, "
                         "fd.ops.index_select for a list.", caller_line())  # fmt: skip

    def __setitem__(self, index: Any, value: Any) -> None:
        raise user_error(f"{self.label} cannot be written to", f"[{shown(index)}] = ...", "an op with a new result",
                         "Use fd.ops.where to choose by a condition, fd.ops.scatter by indices.",
                         caller_line())  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Raises NoAttributeError: what torch has as a method is a function of `fd.ops`."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise user_error(
            f"a tensor of a definition has no {name!r}", "", "", op_instead(name), caller_line(), NoAttributeError
        )

    def __matmul__(self, other: TensorView) -> TensorView:
        return self._op("matmul", self, other)

    def __rmatmul__(self, other: TensorView) -> TensorView:
        return self._op("matmul", other, self)

    @property
    def T(self) -> TensorView:
        """The transpose of a matrix. Raises DefinitionError for tensors that do not have two dims."""
        if self.ndim != 2:
            raise user_error(f"{self.label}.T", str(self.type), "two dims",
                             "Name the order: fd.ops.permute(tensor, [0, 2, 1]).", caller_line())  # fmt: skip
        return self._op("permute", self, [1, 0])

    def __repr__(self) -> str:
        return f"TensorView({self.name}: {self.type})"

    def __str__(self) -> str:
        return tensor_text(self.fd.recording, self.id, self.domain())

    def is_symbolic(self) -> bool:
        """True: no tensor is a constant."""
        return True

    def definition(self) -> Any:
        """The op that makes the tensor; None for an input."""
        node = self.fd.recording.producer(self.id)
        return None if node is None else self.fd._expression(node)

    def uses(self) -> list[Any]:
        """The ops that read the tensor."""
        return [self.fd._expression(node) for node in self.fd.recording.nodes if self.id in node.inputs]

    # nvFuser's scheduling calls

    @property
    def _domain(self) -> LoopDomain:
        return self._rfactored if self._rfactored is not None else self.fd.recording.annotation_to_edit(self.id).domain

    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        """Put the tensor on a mesh; it is whole on each of its ranks unless axes are parallelized.

        Raises DefinitionError where the tensor has been put on another mesh.
        """
        put_on_mesh(self.fd.recording, self.id, mesh)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that an annotation puts the tensor on; None if none does."""
        return self.fd.recording.annotation_to_edit(self.id).mesh

    def has_device_mesh(self) -> bool:
        """Whether an annotation puts the tensor on a mesh."""
        return self.fd.recording.is_annotated(self.id)

    def axis(self, index: int) -> AxisView:
        """An axis of the loop domain, counted from the back if negative. Raises DefinitionError where there is none."""
        domain = self._domain
        return AxisView(domain, domain.order[domain.place(index, f"axis of {self.label}")], self)

    def has_axis(self, domain: LoopDomain, leaf: Leaf) -> bool:
        """Whether `domain` is still this tensor's loop domain, and `leaf` still one of its axes."""
        return domain is self._domain and any(other is leaf for other in domain.order)

    def loop_text(self) -> str:
        """The loop domain in meshfuse's words, for errors."""
        return str(self._domain)

    def domain(self) -> TensorDomain:
        """The loop domain as a value whose `str` is nvFuser's text of it."""
        return self._numbered(self._domain)

    def _numbered(self, domain: LoopDomain) -> TensorDomain:
        extents, recording = Extents(domain, self.type.shape, self.mesh), self.fd.recording
        return TensorDomain(extents, sum(len(recording.reduction_flags(i)) for i in range(self.id)))

    def axis_text(self, domain: LoopDomain, leaf: Leaf) -> str:
        place = next((i for i, other in enumerate(domain.loop) if other is leaf), 0)
        return self._numbered(domain).axis(leaf, place)

    def extent(self, domain: LoopDomain, leaf: Leaf) -> Any:
        """The size of a loop axis: an int where the definition tells it, else a scalar of the definition."""
        extents = Extents(domain, self.type.shape, self.mesh)
        dim = extents.dim(leaf)
        if (known := extents.known(leaf)) is not None or dim is None:
            return known
        others = extents.others(leaf) or 1
        return self.size(dim) if others == 1 else (self.size(dim) + (others - 1)) // others

    def split(self, axis: int, factor: int, inner_split: bool = True) -> TensorView:
        """Split a loop axis; the inner part has size `factor` (the outer one with inner_split=False)."""
        self.fd.recording.check_open()
        check_flags(caller_line(), inner_split=inner_split)
        self._domain.split(axis, factor, inner_split)
        return self

    def outer_split(self, axis: int, factor: int) -> TensorView:
        """Split a loop axis into `factor` parts: the outer axis has size `factor`."""
        return self.split(axis, factor, False)

    def inner_split(self, axis: int, factor: int) -> TensorView:
        """Split a loop axis into parts of size `factor`: the inner axis has size `factor`."""
        return self.split(axis, factor, True)

    def merge(self, axis_o: int, axis_i: int) -> TensorView:
        """Join two loop axes into one, in the place of `axis_o`; both must be unbound.

        Neighbouring parts of one dim become one axis of that dim. Any other pair becomes an axis that only orders a
        kernel's work: it cannot be bound to a mesh axis. Raises DefinitionError where one is a reduction and the other
        not.
        """
        self.fd.recording.check_open()
        self._domain.merge(axis_o, axis_i)
        return self

    def cache_before(self, op_type: Any = None) -> TensorView:
        """nvFuser's copy of the tensor inside a kernel: accepted, and its schedule has no effect.

        With a CommunicationType, a tensor of its own: what the op makes that made this one, which is a copy of it from
        now on. Annotate both: what is sent follows. Raises DefinitionError for an input, and for an annotated tensor.
        """
        if isinstance(op_type, CommunicationType):
            return TensorView(self.fd, copy_before(self.fd.recording, self.id, self.fd.recording.line_of_change()))
        return TensorView(self.fd, self.ref, self._domain.copy())

    def cache_after(
        self,
        op_type: Any = None,
        cache_op: Any = None,
        propagate_allocation_domain: bool = True,
        cached_uses: Sequence[Any] = (),
    ) -> TensorView:
        """The same as `cache_before`; with a CommunicationType a copy, which the ops so far read in its place.

        Raises DefinitionError for a tensor that no op reads.
        """
        if isinstance(op_type, CommunicationType):
            return TensorView(self.fd, copy_after(self.fd.recording, self.id, self.fd.recording.line_of_change()))
        return self.cache_before()

    def to_local(self) -> TensorView:
        """The tensor itself: a rank's shard is what `execute` takes and returns. DTensor's call, for scripts of it."""
        return self

    def reorder(self, old2new: Mapping[int, int] | Sequence[int] = _NO_MOVES) -> TensorView:
        """Move loop axes: a mapping {old position: new position}, or a list with the old position for every new one."""
        self.fd.recording.check_open()
        self._domain.reorder(self._moves(old2new))
        return self

    def _moves(self, moves: Any) -> Mapping[int, int]:
        if isinstance(moves, Mapping):
            return moves
        places = range(len(self._domain.loop))
        found = tuple(map(as_int, moves)) if isinstance(moves, (list, tuple)) else ()
        if len(found) != len(places) or set(found) != set(places):
            raise user_error(
                f"reorder of {self.label}",
                shown(moves),
                "{old: new, ...}, or the old position for every new one",
                f"Its loop domain is {self._domain}.",
                caller_line(),
            )
        return {old: new for new, old in enumerate(found) if old is not None}

    def swizzle1d(self, axis: int, parallel_type: ParallelType) -> TensorView:
        """Let every rank begin its loop over the axis at another place: a ring. No data moves."""
        self.fd.recording.check_open()
        self._domain.order[self._domain.place(axis, "swizzle1d")].swizzled = True
        return self

    def rfactor(self, axes: Sequence[int]) -> TensorView:
        """Split a reduction in two steps: the reduction axes named in `axes` are reduced first, the others later.

        Returns the tensor of the terms in between. Binding one of its remaining reduction axes to a mesh axis says that
        the later step runs over the ranks of that axis. Raises DefinitionError for axes that are no reductions.
        """
        self.fd.recording.check_open()
        domain = self._domain
        chosen = [domain.order[domain.place(axis, "rfactor")] for axis in as_listed(axes)]
        if not chosen or not all(leaf.reduction for leaf in chosen):
            raise user_error(
                f"rfactor of {self.label}: only reduction axes can be factored out",
                f"axes {axes} of {domain}",
                "axes shown as r{...}",
                "Pass the positions of reduction axes.",
                caller_line(),
            )
        return TensorView(self.fd, self.ref, domain.factor_out(chosen))

    def swizzle(self, x: int, y: int) -> TensorView:
        """nvFuser's order of work inside a kernel. Accepted; changes nothing."""
        return self

    def set_allocation_domain(self, new_allocation_domain: Sequence[Any], new_contiguity: Any = True) -> None:
        """Lay the tensor out in memory in the order of these loop axes, major to minor; outputs have such strides.

        `new_contiguity` changes nothing. Raises DefinitionError unless every dim is there.
        """
        set_allocation(self.fd.recording, self.id, self._domain, new_allocation_domain)

    def get_loop_domain(self) -> list[AxisView]:
        """The axes of the loop domain, in their order."""
        domain = self._domain
        return [AxisView(domain, leaf, self) for leaf in domain.loop]

    def get_logical_domain(self) -> list[AxisView]:
        """For every dim that is no reduction, its first loop axis."""
        domain = self._domain
        return [AxisView(domain, root[0], self) for root in domain.roots if not root[0].reduction]

    get_root_domain = get_logical_domain

    def has_root(self) -> bool:
        """False: nvFuser's root domain, where it differs from the logical one, does not exist here."""
        return False

    def set_memory_type(self, memory_type: Any) -> None:
        """nvFuser's kind of memory (symmetric memory). Accepted; changes no value."""
        self.fd.recording.check_open()
        self.fd.recording.annotation_to_edit(self.id).memory = str(memory_type)


def own(fd: Definition, tensor: Any, what: str, line: SourceLine) -> TensorView:
    """The tensor. Raises DefinitionError for anything but a tensor of this definition."""
    if not isinstance(tensor, TensorView) or tensor.fd is not fd:
        raise user_error(
            what, f"{shown(tensor)} of another definition" if isinstance(tensor, TensorView) else shown(tensor),
            "a tensor of this definition", "Pass what this FusionDefinition's own calls returned.", line,
        )  # fmt: skip
    return tensor


def as_listed(given: Any) -> Sequence[Any]:
    """A list or tuple as it is; anything else as the only entry of one."""
    return given if isinstance(given, (list, tuple)) else (given,)


def own_all(fd: Definition, tensors: Any, what: str, line: SourceLine) -> list[TensorView]:
    """The tensors of a list, or a tensor alone. Raises DefinitionError as `own`."""
    return [own(fd, tensor, what, line) for tensor in as_listed(tensors)]
