"""A definition's annotations, and what follows from them and from its ops for its tensors' dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh
from ..ops.values import ScalarRef, TensorRef
from ..sharding.value import Sharding
from .annotation import (
    Annotation,
    check_agreement,
    contradiction,
    layouts_of_placements,
    layouts_of_sharding,
    layouts_of_spec,
)
from .checks import check_meshes, checked_mesh
from .loop import AxisView, LoopDomain
from .overlaps import Overlap, checked_overlap
from .primals import of_gradients
from .records import OpForm, OpNode, TensorDef, memory_order, reduction_flags
from .tensor_view import TensorView


class AnnotatedDefinition:
    """The part of a definition that annotates its tensors."""

    def __init__(self) -> None:
        self.tensors: list[TensorDef] = []
        self.nodes: list[OpNode] = []
        self.inputs: list[TensorRef | ScalarRef] = []
        self.outputs: list[int] = []
        self._annotations: dict[int, Annotation] = {}
        self.overlaps: dict[int, Overlap] = {}
        self.primals: dict[int, int] = {}  # of each gradient
        self._producers: dict[int, int] = {}
        # By what they follow from: they are asked for of every gradient.
        self._flags: dict[tuple[OpForm, int], tuple[bool, ...]] = {}
        self._open = True

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
        """Annotate with a `Sharding`, or with DTensor placements and their (torch or meshfuse) device mesh.

        Raises DefinitionError for another number of dims, for partial placements, for strided ones that no order of
        axes gives, and where an earlier annotation says something else.
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
        """Ask that a tensor's op, and the communication around it, be done in `chunks` parts of dim `dim`.

        While one chunk is communicated the next is computed; no number changes. With `ring=True` shards travel from
        rank to rank instead of through collectives; `chunks` must then be a multiple of the number of shards. Where it
        cannot be done the op runs whole, and `fd.explain(tensor)` says why. Raises DefinitionError for what is no
        number of chunks or dim, and where an earlier call asked for something else.
        """
        line = self._changing()
        asked = checked_overlap(self._own(tensor, "overlap", line), chunks, dim, ring, line)
        old = self.overlaps.get(tensor.id)
        if old is not None and old[:3] != asked[:3]:
            raise contradiction(tensor.label, f"overlap {asked[:3]}", f"{old[:3]} at {old.line}", line)
        self.overlaps[tensor.id] = asked

    def annotate_mesh(self, tensor: TensorView, mesh: Any) -> None:
        """Put a tensor on a mesh and leave open how it splits there: nvFuser's `set_device_mesh`."""
        line = self._changing()
        found, mesh = self.annotation(self._own(tensor, "set_device_mesh", line)), checked_mesh(mesh, line)
        if found.mesh is not None and found.mesh != mesh:
            raise contradiction(tensor.label, f"mesh {mesh}", f"mesh {found.mesh} at {found.line}", line)
        found.mesh, found.line = mesh, line

    def _annotate(
        self, tensor: TensorView, mesh: DeviceMesh, dims: Sequence[Any], line: SourceLine, implied: str = ""
    ) -> None:
        old = self._annotations.get(tensor.id)
        domain = LoopDomain.of_layouts(dims, self.reduction_flags(tensor.id))
        new = Annotation(line, domain, tensor.label, mesh, stated=True, implied=implied)
        if old is not None:
            check_agreement(old, new)
            new.allocation, new.memory = old.allocation, old.memory
        if old is None or old.mesh is None or old.meaning() != new.meaning():
            self._annotations[tensor.id] = new

    def _own(self, tensor: Any, what: str, line: SourceLine) -> TensorView:
        if not isinstance(tensor, TensorView) or tensor.fd is not self:
            raise user_error(
                what, f"{shown(tensor)} of another definition" if isinstance(tensor, TensorView) else shown(tensor),
                "a tensor of this definition", "Pass what this FusionDefinition's own calls returned.", line,
            )  # fmt: skip
        return tensor

    def _changing(self) -> SourceLine:
        """The user's line; raises DefinitionError once the definition may not change any more."""
        self.check_open()
        return caller_line()

    def annotation(self, tensor: TensorView) -> Annotation:
        """The tensor's annotation, which nvFuser's calls edit in place; an empty one is made where there is none."""
        self._own(tensor, "annotation", caller_line())
        if tensor.id not in self._annotations:
            domain = LoopDomain.whole(self.reduction_flags(tensor.id))
            self._annotations[tensor.id] = Annotation(caller_line(), domain, tensor.label)
        return self._annotations[tensor.id]

    def say(self, tensor: TensorView, annotation: Annotation) -> None:
        """Give a tensor an annotation that was made for a tensor of another definition."""
        self._annotations[tensor.id] = annotation

    def is_annotated(self, tensor: TensorView) -> bool:
        """Whether the user has put the tensor on a mesh."""
        found = self._annotations.get(self._own(tensor, "is_annotated", caller_line()).id)
        return found is not None and found.mesh is not None

    @property
    def annotations(self) -> Mapping[int, Annotation]:
        """By tensor, the annotations that name a mesh. An output gradient without its own has its primal's."""
        given = {i: a for i, a in self._annotations.items() if a.mesh is not None}
        return dict(sorted((of_gradients(self, given) | given).items()))

    def placed(self, tensor: int) -> Annotation | None:
        """`annotations.get(tensor)`; does not work out those of all gradients if this tensor is none."""
        found = self._annotations.get(tensor)
        if found is not None and found.mesh is not None:
            return found
        return self.annotations.get(tensor) if tensor in self.primals else None

    def check_complete(self, line: SourceLine | None) -> None:
        """Raises DefinitionError without outputs, and where an axis is parallelized on a tensor without a mesh."""
        if not self.outputs:
            raise user_error(
                "the definition has no outputs", "no add_output call", "at least one",
                "Call fd.add_output(t) for each result.", line,
            )  # fmt: skip
        check_meshes(self._annotations.values())

    @property
    def all_annotations(self) -> Mapping[int, Annotation]:
        """`annotations`, and those of tensors that nvFuser's calls have edited but put on no mesh."""
        return dict(sorted((self._annotations | dict(self.annotations)).items()))

    def set_allocation(self, tensor: TensorView, domain: LoopDomain, loop: Sequence[Any]) -> None:
        """Set the order in which a tensor's dims lie in memory, from axes of its loop domain, major to minor.

        Ignored for the loop domain of a kernel's copy or of unreduced terms, which says nothing of the tensor itself.
        Raises DefinitionError where a dim of the tensor is missing.
        """
        line = self._changing()
        found = self.annotation(tensor)
        axes = [axis for axis in loop if isinstance(axis, AxisView)] if isinstance(loop, (list, tuple)) else []
        leaves = [axis.leaf for axis in axes]
        dims = domain.dims_in_order(leaves)
        # A kernel's copy has axes over several dims, too, which say of no dim where it lies.
        is_whole = domain is not found.domain and set(map(id, leaves)) == set(map(id, domain.loop))
        if len(dims) != tensor.ndim and not is_whole:
            raise user_error(
                f"set_allocation_domain of {tensor.label}",
                shown(loop),
                f"axes of its loop domain {domain}, of every dim",
                "Pass tv.get_loop_domain(), or a list of tv.axis(i).",
                line,
            )
        if domain is found.domain:
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

    def reduction_flags(self, tensor: int) -> tuple[bool, ...]:
        """For every dim of the tensor's loop domain, True if the op that makes the tensor reduces it."""
        producer, ndim = self.producer(tensor), self.tensors[tensor].type.ndim
        if producer is None:
            return (False,) * ndim
        key = (producer.form, ndim)
        if key not in self._flags:
            self._flags[key] = reduction_flags(self.tensors, tensor, producer)
        return self._flags[key]

    def loop_dims(self, tensor: int) -> int:
        """How many dims the tensor's loop domain has: its own, and those that its op reduces."""
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
