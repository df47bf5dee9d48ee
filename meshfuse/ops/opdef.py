"""What every op is made of: one `OpDef` has all facts about an op. Passes read these, and know no op by its name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from ..dtypes import DataType
from ..fast_dataclass import quickly_made
from ..sharding.layout import Runs
from .rules import Rule
from .values import Param, TensorRef, TensorType
from .vjp import Vjp


class Partial(enum.Enum):
    """Which unreduced (partial) operands an op carries through to its result."""

    NONE = "needs its operands reduced"
    MOVE = "moves elements: any one partial operand passes, whatever the reduction"
    CAST = "linear where terms may be cast one by one: floating point, to no narrower type"
    JOINT = "linear in all tensor operands together: all must be partial"
    FIRST = "linear in the first tensor operand, floating point only"
    OVER = "linear in the first operand over a number that is neither 0 nor infinite, floating point only"
    EACH = "linear in each tensor operand: exactly one may be partial"
    PICKED = "picks elements by a mask or a place: all that it picks from must be partial, or the number 0"
    MAX = "the greatest of what it reads: any operands may be unreduced by max"
    MIN = "the least of what it reads: any operands may be unreduced by min"

    @property
    def reduce(self) -> str:
        """The reduction by which operands may be unreduced; MOVE carries any reduction."""
        return {Partial.MAX: "max", Partial.MIN: "min"}.get(self, "sum")

    @property
    def scales(self) -> bool:
        """Whether a term that is carried through may overflow where the whole sum does not."""
        return self in (Partial.EACH, Partial.OVER)


@quickly_made
@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One use of an op, with concrete or symbolic types, from which rules, lowerings and costs are computed."""

    op: OpDef
    args: tuple[Any, ...]
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.args[self.op.places[name]]

    def type_of(self, name: str) -> TensorType | None:
        """The type of the tensor passed for this parameter; None where something else was passed."""
        return self.types[self.first_operand(name)] if isinstance(self[name], TensorRef) else None

    def first_operand(self, name: str) -> int:
        """The place, among the tensor operands, of the first tensor passed for this parameter."""
        return sum(count_tensors(arg) for arg in self.args[: self.op.places[name]])

    @property
    def has_form(self) -> bool:
        """Whether the op has a distributed form for this call."""
        op = self.op
        return op.distributed is not None and (op.has_form is None or op.has_form(self))


def count_tensors(arg: object) -> int:
    """How many tensor operands an argument is: 1 for a tensor, the length of a list of tensors, else 0."""
    if isinstance(arg, TensorRef):
        return 1
    is_list = isinstance(arg, tuple) and bool(arg) and isinstance(arg[0], TensorRef)
    return len(arg) if is_list else 0  # type: ignore[arg-type]


def tensor_refs(args: Sequence[Any]) -> list[TensorRef]:
    """The tensors among an op's arguments, in order."""
    out: list[TensorRef] = []
    for arg in args:
        if type(arg) is TensorRef:
            out.append(arg)
        elif count_tensors(arg):
            out.extend(arg)
    return out


class Emit(Protocol):
    """What a lowering to torch sees of one call on one rank: its local operands' names, shapes and global indices."""

    @property
    def call(self) -> Call: ...

    @property
    def operands(self) -> Sequence[str]: ...

    @property
    def operand_shapes(self) -> Sequence[tuple[int, ...]]: ...

    @property
    def result_shapes(self) -> Sequence[tuple[int, ...]]: ...

    def scalar(self, name: str) -> str:
        """Python text of a scalar argument."""
        ...

    def operand(self, name: str) -> str | None:
        """The name of the tensor passed for a parameter; None where no tensor was passed."""
        ...

    def result_runs(self, result: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By dim of a result, the intervals of global indices that this rank computes."""
        ...

    def operand_runs(self, operand: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By dim of an operand, the intervals of global indices that this rank holds."""
        ...

    def salt(self) -> int:
        """This call's own number for random draws, the same on every rank and mesh."""
        ...

    def leads(self) -> bool:
        """Whether this rank adds what is added once: of the ranks with terms of one partial result, one leads."""
        ...


class ToTorch(Exception):
    """nvFuser cannot compute this call on this rank; the text is the reason."""


class NvfuserEmit(Protocol):
    """What a lowering to nvFuser sees of one call on one rank. Operands and results are TensorViews."""

    @property
    def call(self) -> Call: ...

    @property
    def ops(self) -> Any: ...

    @property
    def operands(self) -> Sequence[Any]: ...

    @property
    def operand_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The operands' local shapes."""
        ...

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The results' local shapes."""
        ...

    def operand(self, name: str) -> Any:
        """The tensor passed for a parameter; None where no tensor was passed."""
        ...

    def number(self, name: str) -> Any:
        """A scalar argument: a Python number, or a Val where it depends on the program's inputs."""
        ...

    def val(self, value: Any) -> Any:
        """A Val of a Python number."""
        ...

    def dtype(self, dtype: DataType) -> Any:
        """nvFuser's DataType. Raises ToTorch where it has none."""
        ...

    def operand_runs(self, operand: int) -> tuple[Runs, ...]:
        """By dim of an operand, the intervals of global indices that this rank holds."""
        ...

    def result_runs(self, result: int) -> tuple[Runs, ...]:
        """By dim of a result, the intervals of global indices that this rank computes."""
        ...

    def leads(self) -> bool:
        """Whether this rank adds what is added once: of the ranks with terms of one partial result, one leads."""
        ...

    def plain(self, **changed: Any) -> Any:
        """nvFuser's function of the op's name, with the arguments in `changed` replaced."""
        ...


# One Python expression: of the result, or of a tuple of all results; or one expression per result.
Lowering = Callable[[Emit], "str | tuple[str, ...]"]


class Writing(Protocol):
    """What an op's forms (`distributed`, `split_last_operand`, `ring_schedule`) append ops with.

    `rewrites.graph_writer.GraphWriter` is one.

    operand: the place of the operand with the sharded dim that a distributed form is for.
    pieces: the number of equal pieces of that dim that each lie on one rank: its blocks, unless a rank has several
        blocks that are not adjacent.
    """

    operand: int
    pieces: int

    def type(self, ref: TensorRef) -> TensorType:
        """The type of a tensor."""
        ...

    def call(self, name: str | OpDef, *args: Any, **kwargs: Any) -> Any:
        """Apply an op, given by name or as an OpDef: returns a TensorRef, or a tuple of them."""
        ...


def cast_to(r: Writing, x: TensorRef, dtype: DataType) -> TensorRef:
    """The tensor cast to a type; itself if it has that type."""
    return x if r.type(x).dtype is dtype else r.call("cast", x, dtype)


# (writer, call, operands) -> results, with the last operand added by another op.
SplitLastOperand = Callable[[Writing, "Call", tuple[TensorRef, ...]], "Sequence[TensorRef]"]


class BlockOrder(NamedTuple):
    """How an op reorders a dim's equal blocks: block i of the result is block order[i] of the operand."""

    dim: int
    order: tuple[int, ...]


# (writer, call, operands, a sharded dim that the op needs whole, the number of its blocks over ranks or 0 if it is not
# in blocks) -> results, or None if the call has no distributed form.
DistributedForm = Callable[[Writing, "Call", tuple[TensorRef, ...], int, int], "Sequence[TensorRef] | None"]


class RingSchedule(NamedTuple):
    """How ranks compute an op in rounds, between which blocks travel, if the user wants that.

    rule: the factor rule within one round: which blocks meet on a rank.
    write: (writer, call, operands) -> results, in ordinary ops: those of each round, local to their operands, and block
        orders (`BlockOrder`) by which blocks travel.
    """

    rule: Callable[[Call], Rule]
    write: Callable[[Writing, Call, tuple[TensorRef, ...]], Sequence[TensorRef]]


class Exchange(NamedTuple):
    """An op that moves rows between tokens and experts, by its factors of these.

    An axis may cut both: ranks then have some tokens and some experts, and send rows to each other.

    kind: "dispatch" brings rows of tokens to experts, "collect" rows of experts back to tokens.
    choice: the place of the operand that says which experts tokens go to, which is known to all ranks of a group.
    """

    tokens: int
    experts: int
    kind: Literal["dispatch", "collect"]
    choice: int


def _elementwise_flops(call: Call) -> float:
    if call.op.is_view:
        return 0.0  # Its readers read the operand's elements.
    return float(max((t.numel for t in (*call.results, *call.types)), default=0))


def flops_of_lookup(call: Call) -> float:
    """`flops` of an op that reads as many elements as its results have, however large its operands are."""
    return float(sum([made.numel for made in call.results]))


def _no_samples() -> tuple[Sample, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A call for tests: tensors are given as their types, everything else as it is passed.

    `values[i]` are the numbers of operand i where random ones would not do, such as indices: in row-major order, and
    repeated until the tensor is full.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of_floats(cls, *args: Any) -> Sample:
        """A sample of these arguments, in which a tuple stands for a Float tensor of that shape."""
        return cls(tuple(TensorType(a, DataType.Float) if isinstance(a, tuple) else a for a in args))


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """Everything about one op: passes read these facts, and know no op by its name.

    The first five are needed, the others have defaults. Facts of a call follow from the call alone.
    """

    name: str
    params: tuple[Param, ...]
    # The results' types, for a call whose `results` are not known yet. Raises DefinitionError for unfit operands.
    infer: Callable[[Call], tuple[TensorType, ...]]
    # The factor rule of a call with concrete types.
    rule: Callable[[Call], Rule]
    # Python text of the result(s) in torch, on a rank's local tensors.
    emit: Lowering
    # Which unreduced operands it carries through to its result.
    partial: Partial = Partial.NONE
    # Operations on the global tensors; by default one per element, none for a view.
    flops: Callable[[Call], float] = _elementwise_flops
    # Calls for tests, help and docs/ops.md.
    samples: Callable[[], Sequence[Sample]] = _no_samples
    # The op in nvFuser: None for its function of the same name, a lowering, or the reason to leave the op to torch.
    nvfuser: Callable[[NvfuserEmit], Any] | str | None = None
    # The op as a graph of other ops, for a sharded dim that it needs whole; if it needs none whole, for one that it
    # sums over.
    distributed: DistributedForm | None = None
    # For which calls there is a distributed form; None for all.
    has_form: Callable[[Call], bool] | None = None
    # How the op is computed in rounds, for operands that are sharded otherwise than `rule` takes them.
    ring_schedule: RingSchedule | None = None
    # Whether it knows ragged tensors, the rows of experts.
    on_rows: bool = False
    # How ranks compute it that have some of the tokens and some of the experts.
    exchange: Exchange | None = None
    # The op without its last operand, which another op adds (a bias, which is not part of the terms of a sum).
    split_last_operand: SplitLastOperand | None = None
    # For a result that is a window of the first operand, or of which that is a window: (by dim the operand's index at
    # the result's index 0, the fill of the rest). For an op that reorders blocks: their order. None for other calls.
    window: Callable[[Call], tuple[tuple[int, ...], Any] | BlockOrder | None] | None = None
    # Its gradients in ops of the table; None where it has no derivative.
    vjp: Vjp | None = None
    # Text of a statement that writes the one result into an existing tensor; None for calls that have none.
    into: Callable[[Emit, str], str | None] | None = None
    # Whether operands cast to a wider float type give a result of that type.
    accumulates_wide: bool = False
    # Whether the op may be computed on the parts of a dim: its results on these, put together or (for a reduced dim)
    # reduced, are then its result on the whole. A SHAPE parameter must be the result's shape.
    concat_distributive: bool = False
    # Of an op without that: the parameters whose tensors may be in another order along a factor that all of them have,
    # if the other tensors with this factor are, too. A sum over the factor is then the same.
    order_free: tuple[str, ...] = ()
    # Whether the result is a view of the first operand, if that is dense.
    is_view: bool = False
    # Whether the op does nothing where operand and result have the same shape, and is then left out.
    identity_when_same_shape: bool = False
    # Whether it only adds, repeats, merges or splits dims of its operand: what is known of all elements is still true.
    keeps_elements: bool = False
    # If it only repeats elements: of every dim of the operand the place among the result's dims.
    repeats: Callable[[Call], Sequence[int]] | None = None
    # Whether it computes nothing from elements, but moves them or makes them from their places: cheap to do again.
    is_cheap: bool = False
    # Whether a library computes it in nvFuser as in torch: cuBLAS or flash attention.
    uses_library: bool = False
    # The nvFuser scheduler of a kernel that has the op ("expr_eval", "resize"); "" if its other ops decide.
    scheduler: str = ""
    # Whether nvFuser has results follow the shardings of the weight and bias before that of the first operand.
    follows_weight_first: bool = False
    # In nvFuser, of every result (by place) the operand (by place) whose order of dims in memory it takes.
    laid_out_like: tuple[int, ...] = ()
    # The same in torch, on whole tensors and the op's other arguments: tests compare the lowering with it in float64.
    reference: Callable[..., Any] | None = None
    # Whether its value jumps: only exactly equal operands give equal results, so tests give it numbers that are exact.
    jumps: bool = False
    # The open interval from which tests draw real operands.
    domain: tuple[float, float] | None = None
    # A Python function that the emitted text calls as OP.name.
    compute: Callable[..., Any] | None = None
    # A registered op's own ops that its gradients are written in; they are registered with it.
    adjoints: tuple[OpDef, ...] = ()
    # What it computes, in a line for `help`, `meshfuse ops` and docs/ops.md.
    about: str = ""
    # For which calls it draws random numbers by the definition's seed; None for none.
    draws: Callable[[Call], bool] | None = None
    places: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {param.name: place for place, param in enumerate(self.params)})

    def __repr__(self) -> str:
        return f"OpDef({self.name})"

    @property
    def is_fused(self) -> bool:
        """Whether compilers compute it in one kernel with its neighbours: it does about one operation per element."""
        return self.flops is _elementwise_flops

    @property
    def is_lookup(self) -> bool:
        """Whether it reads as many elements as its results have, however large its operands are."""
        return self.flops is flops_of_lookup
