"""What a definition consists of: tensors, scalars, ops, outputs and annotations, as the script has written them.

`Recording` is data. What users call stands in `FusionDefinition` and `TensorView`, the stages read a recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from ..errors import SourceLine, caller_line, user_error
from ..fast_dataclass import quickly_made
from ..mesh import DeviceMesh
from ..ops import ragged
from ..ops.binding import Keys, keys_of
from ..ops.opdef import Call, OpDef, tensor_refs
from ..ops.rules import FactorKind, Rule
from ..ops.values import ScalarRef, TensorRef, TensorType
from ..scalars import ScalarDef
from ..sharding.layout import WHOLE, Layout
from .annotation import Annotation
from .checks import check_results, named
from .fsdp import UnitGroup
from .loop import LoopDomain


@quickly_made
@dataclass(frozen=True, slots=True)
class TensorDef:
    """A tensor of a definition: its symbolic type and where it came from."""

    type: TensorType
    name: str
    line: SourceLine
    stride_order: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """The script's own variable, if its line shows one, with the name: `x (t0)`."""
        return self.line.label(self.name)


class Overlap(NamedTuple):
    """A request to work on a tensor in chunks of a dim, in a ring or not, and the user's line that makes it."""

    dim: int
    chunks: int
    ring: bool
    line: SourceLine


class OpForm(NamedTuple):
    """What an op of a definition is, but for which tensors it takes; of equal ones a definition has one object."""

    op: OpDef
    keys: Keys
    types: tuple[TensorType, ...]


@quickly_made
@dataclass(frozen=True, slots=True)
class OpNode:
    """One op of a definition; `inputs` and `outputs` are numbers of tensors.

    Ops of one `form` differ only in which tensors they take.
    """

    op: OpDef
    args: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    line: SourceLine
    form: OpForm

    @property
    def draws(self) -> bool:
        """Whether the op draws random numbers by the definition's seed."""
        return self.op.draws is not None and self.op.draws(Call(self.op, self.args, ()))


# A step of a script: an input, a scalar or an op.
Entry = TensorRef | ScalarRef | OpNode


class Recording:
    """What a script has written into a definition.

    inputs, outputs: tensors and scalars in the order of their definition; numbers of tensors.
    scalars: by number.
    history: inputs, scalars and ops in the order in which they were made.
    own_annotations: by tensor, those of calls, also without a mesh; nvFuser's calls edit them in place.
    overlaps: by tensor, the requests of `fd.overlap`.
    primals: by gradient the tensor whose gradient it is.
    constants: tensors that no gradient passes.
    units: weights that are gathered together for their use.
    once_in: by output that is added up over so many runs, how many: it is brought to its place once in them.
    sweeps: by call of `fd.grad` the numbers of the ops that it has appended.
    rounds: whether results of half precision are rounded to it at once, as in torch, and not Float as in nvFuser.
    is_open: whether it may still change; False once something was compiled from it.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.tensors: list[TensorDef] = []
        self.nodes: list[OpNode] = []
        self.scalars: dict[int, ScalarDef] = {}
        self.inputs: list[TensorRef | ScalarRef] = []
        self.outputs: list[int] = []
        self.history: list[Entry] = []
        self.own_annotations: dict[int, Annotation] = {}
        self.overlaps: dict[int, Overlap] = {}
        self.primals: dict[int, int] = {}
        self.constants: set[int] = set()
        self.units: list[UnitGroup] = []
        self.sweeps: list[range] = []
        self.once_in: dict[int, int] = {}
        self.rounds, self.is_open = False, True
        self._producers: dict[int, int] = {}
        # Worked out once for ops of one form, as gradients have many of these.
        self._forms: dict[OpForm, tuple[OpForm, tuple[TensorType, ...]]] = {}
        self._flags: dict[tuple[OpForm, int], tuple[bool, ...]] = {}

    def without_annotations(self, seed: int | None) -> Recording:
        """The same inputs, ops and outputs in a recording without annotations."""
        plain = Recording(seed)
        plain.tensors, plain.nodes, plain.scalars = self.tensors, self.nodes, self.scalars
        plain.inputs, plain.outputs, plain.history = self.inputs, self.outputs, self.history
        plain.is_open, plain._producers, plain._flags = False, self._producers, self._flags
        return plain

    def write_into(self, new: Recording) -> None:
        """Write all of it into an empty recording, which may then go on."""
        for name in ("tensors", "nodes", "inputs", "outputs", "history", "units", "sweeps"):
            getattr(new, name).extend(getattr(self, name))
        for name in ("scalars", "overlaps", "primals", "constants", "once_in", "_producers"):
            getattr(new, name).update(getattr(self, name))
        new.own_annotations.update((i, replace(a, domain=a.domain.copy())) for i, a in self.own_annotations.items())

    def line_of_change(self) -> SourceLine:
        """The user's line; raises DefinitionError once the definition may not change any more."""
        self.check_open()
        return caller_line()

    def check_open(self) -> None:
        """Raises DefinitionError once the definition has run: its plans would not hold any more."""
        if not self.is_open:
            raise user_error(
                "this definition has been compiled and cannot change any more", "", "",
                "Make a new FusionDefinition.", caller_line(),
            )  # fmt: skip

    # writing

    def new_input(self, ttype: TensorType, line: SourceLine, order: tuple[int, ...] | None) -> TensorRef:
        """A new input tensor at this line of the script, in nvFuser's stride order if one is given."""
        ref = self._new_tensor(ttype, line, order)
        self.inputs.append(ref)
        self.history.append(ref)
        return ref

    def _new_tensor(self, ttype: TensorType, line: SourceLine, order: tuple[int, ...] | None = None) -> TensorRef:
        ref = TensorRef(len(self.tensors))
        self.tensors.append(TensorDef(ttype, f"t{ref.id}", line, order))
        return ref

    def new_scalar(self, made: ScalarDef) -> ScalarRef:
        """A new scalar; for an input the caller adds it to `inputs`, too."""
        ref = ScalarRef(len(self.scalars), made.dtype)
        self.scalars[ref.id] = made
        self.history.append(ref)
        return ref

    def name(self, tensor: int, name: Any, line: SourceLine) -> None:
        """Give a tensor a name of its own; None leaves it as it is. Raises DefinitionError for what is no text."""
        made, checked = self.tensors[tensor], named(line, name, "add_output")
        if checked is not line:
            self.tensors[tensor] = replace(made, line=replace(made.line, name=name))

    def append(self, op: OpDef, bound: tuple[Any, ...], line: SourceLine) -> tuple[TensorRef, ...]:
        """Append an op with its arguments as `bind` gives them. Raises as the op's type rule does."""
        inputs = tuple([ref.id for ref in tensor_refs(bound)])
        form, types = self._formed(op, bound, inputs)
        made = tuple([self._new_tensor(t, line) for t in types])
        for ref in made:
            self._producers[ref.id] = len(self.nodes)
        node = OpNode(op, bound, inputs, tuple([ref.id for ref in made]), line, form)
        self.nodes.append(node)
        self.history.append(node)
        return made

    def _formed(
        self, op: OpDef, bound: tuple[Any, ...], inputs: Sequence[int]
    ) -> tuple[OpForm, tuple[TensorType, ...]]:
        """The form of an op and the checked types of its results."""
        tensors = self.tensors
        form = OpForm(op, keys_of(bound), tuple([tensors[i].type for i in inputs]))
        found = self._forms.get(form)
        if found is None:
            types = ragged.infer(Call(op, bound, form.types))
            check_results(op.name, types)
            found = self._forms[form] = form, types
        return found

    def rewrite(self, history: Sequence[Entry]) -> None:
        """Put these inputs, scalars and ops, in their order, in the place of all there are."""
        self.history = list(history)
        self.nodes = [entry for entry in history if isinstance(entry, OpNode)]
        self._producers = {out: place for place, node in enumerate(self.nodes) for out in node.outputs}

    # annotations

    def annotation_to_edit(self, tensor: int) -> Annotation:
        """The tensor's annotation, which nvFuser's calls edit in place; an empty one is made where there is none."""
        if tensor not in self.own_annotations:
            domain = LoopDomain.whole(self.reduction_flags(tensor))
            self.own_annotations[tensor] = Annotation(caller_line(), domain, self.tensors[tensor].label)
        return self.own_annotations[tensor]

    def is_annotated(self, tensor: int) -> bool:
        """Whether the user has put the tensor on a mesh."""
        found = self.own_annotations.get(tensor)
        return found is not None and found.mesh is not None

    @property
    def annotations(self) -> Mapping[int, Annotation]:
        """By tensor, the annotations that name a mesh. An output gradient without its own has its primal's."""
        given = {i: a for i, a in self.own_annotations.items() if a.mesh is not None}
        return dict(sorted((_of_gradients(self, given) | given).items()))

    @property
    def all_annotations(self) -> Mapping[int, Annotation]:
        """`annotations`, and those of tensors that nvFuser's calls have edited but put on no mesh."""
        return dict(sorted((self.own_annotations | dict(self.annotations)).items()))

    def placed(self, tensor: int) -> Annotation | None:
        """`annotations.get(tensor)`; does not work out those of all gradients if this tensor is none."""
        found = self.own_annotations.get(tensor)
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
        _check_meshes(self.own_annotations.values())

    # what follows

    def input_tensors(self) -> list[int]:
        """The numbers of the tensors among the inputs, in the order of definition."""
        return [ref.id for ref in self.inputs if isinstance(ref, TensorRef)]

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
            self._flags[key] = _reduction_flags(self.tensors, tensor, producer)
        return self._flags[key]

    def output_orders(self) -> list[tuple[int, ...] | None]:
        """For every output nvFuser's stride order (0 is the fastest dim); None for row-major."""
        return [self._order_of_output(tensor) for tensor in self.outputs]

    def _order_of_output(self, tensor: int) -> tuple[int, ...] | None:
        annotation = self.own_annotations.get(tensor)
        allocation = annotation.allocation if annotation is not None else None
        return _memory_order(self.tensors[tensor].type.ndim, allocation, self.producer(tensor))


class Definition(Protocol):
    """What the values of a definition, and functions of them, need of the FusionDefinition that they belong to."""

    recording: Recording
    ops: Any

    def call(self, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any: ...
    def size(self, tensor: Any, dim: int) -> Any: ...
    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any: ...
    def _expression(self, node: OpNode) -> Any: ...


def _check_meshes(annotations: Iterable[Annotation]) -> None:
    """Raises DefinitionError where an axis is bound to a mesh axis and the tensor has no mesh."""
    for annotation in annotations:
        if annotation.mesh is None and annotation.is_on_devices:
            raise user_error(
                f"tensor {annotation.label} is parallelized and has no mesh",
                str(annotation.domain),
                "a mesh",
                "Call its set_device_mesh.",
                annotation.line,
            )


def _of_gradients(recording: Recording, given: Mapping[int, Annotation]) -> dict[int, Annotation]:
    """Annotations for outputs that are gradients: those of their primals, unless they have some of their own.

    A primal that is an input without an annotation is whole on every rank; if there is one mesh only, on that.
    """
    found: dict[int, Annotation] = {}
    meshes, inputs = {a.mesh for a in given.values()}, set(recording.input_tensors())
    for grad in set(recording.outputs).intersection(recording.primals).difference(given):
        primal = recording.primals[grad]
        own, made = given.get(primal), recording.tensors[grad]
        if own is not None and not own.is_streamed:
            why = f"{_as(recording, primal)} annotated at {own.line}"
            found[grad] = _like(recording, grad, own.mesh, own.named(), own.line, why)
        elif own is None and len(meshes) == 1 and primal in inputs:
            dims, why = [WHOLE] * made.type.ndim, f"{_as(recording, primal)} never annotated"
            found[grad] = _like(recording, grad, next(iter(meshes)), dims, made.line, why)
    return found


def _as(recording: Recording, primal: int) -> str:
    return f"laid out as {recording.tensors[primal].label}, whose gradient it is,"


def _like(
    recording: Recording, tensor: int, mesh: DeviceMesh | None, dims: Sequence[Layout], line: SourceLine,
    implied: str,
) -> Annotation:  # fmt: skip
    domain = LoopDomain.of_layouts(dims, recording.reduction_flags(tensor))
    return Annotation(
        line, domain, recording.tensors[tensor].line.label(f"t{tensor}"), mesh, stated=True, implied=implied
    )


def _reduction_flags(tensors: Sequence[TensorDef], tensor: int, producer: OpNode) -> tuple[bool, ...]:
    """For every dim of a tensor's loop domain, True where it is a reduction of the op that makes it.

    An op of one operand keeps its reduced dims in their places; matmul-like ops have theirs at the end.
    """
    kept = (False,) * tensors[tensor].type.ndim
    rule = rule_of(tensors, producer)
    if rule is None:
        return kept
    kept_by_some = {factor for dims in rule.results for dim in dims for factor in dim}
    reduced = {i for i, f in enumerate(rule.factors) if f.kind is FactorKind.REDUCE and i not in kept_by_some}
    if len(rule.operands) != 1:
        return (*kept, *(True,) * len(reduced))
    if len(rule.operands[0]) != len(kept) + len(reduced):
        return kept
    return tuple(bool(reduced.intersection(dim)) for dim in rule.operands[0])


def rule_of(tensors: Sequence[TensorDef], node: OpNode) -> Rule | None:
    """The op's factor rule, with stand-ins for open sizes. None where these do not fit: such ops reduce nothing."""
    types, results = (tuple(_known(tensors[i].type) for i in side) for side in (node.inputs, node.outputs))
    try:
        return node.op.rule(Call(node.op, node.args, types, results))
    except (ValueError, TypeError, LookupError):
        return None


def _known(ttype: TensorType) -> TensorType:
    """A type with stand-ins for its open sizes, to ask rules that need sizes."""
    return TensorType(tuple(7 if n < 0 else n for n in ttype.shape), ttype.dtype)


def _memory_order(ndim: int, allocation: tuple[int, ...] | None, producer: OpNode | None) -> tuple[int, ...] | None:
    """nvFuser's stride order of a tensor with this allocation domain, or made by this op; None for row-major."""
    order = None
    if allocation is not None:
        order = tuple(ndim - 1 - allocation.index(d) for d in range(ndim))
    elif producer is not None and "stride_order" in producer.op.places:
        order = tuple(n % ndim for n in producer.args[producer.op.places["stride_order"]])
    return order if order != tuple(reversed(range(ndim))) else None
