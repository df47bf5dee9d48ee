"""What every op is made of: one `OpDef` holds all of an op's facts, and passes but `rewriting` know no names."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..dtypes import DataType

if TYPE_CHECKING:
    from ..gradients.context import Vjp
    from .nvfuser_lowering import NvfuserEmit


class TensorType(NamedTuple):
    """Shape (global; -1 where it is not known before the arguments come) and element type."""

    shape: tuple[int, ...]
    dtype: DataType

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join('?' if n < 0 else str(n) for n in self.shape)}]"


class TensorRef(NamedTuple):
    """A tensor of the definition, by number."""

    id: int


class ScalarRef(NamedTuple):
    """A scalar (nvFuser's Val) of the definition, by number, and its type where it is known."""

    id: int
    dtype: DataType | None = None


class ParamKind(enum.Enum):
    """What an op's parameter takes, and so how a call is bound, concretised and printed."""

    TENSOR = "tensor"
    OPTIONAL_TENSOR = "tensor or None"
    TENSORS = "list of tensors"
    TENSOR_OR_SCALAR = "tensor or scalar"
    SCALAR = "scalar"
    OPTIONAL_SCALAR = "scalar or None"
    INT = "int"
    DIM = "dim"
    DIMS = "dim or list of dims"
    OPTIONAL_DIMS = "dim, list of dims or None"
    INTS = "list of ints"
    SIZE = "int or scalar"
    SHAPE = "list of ints or scalars"
    BOOL = "bool"
    BOOLS = "list of bools"
    DTYPE = "DataType"


REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an op. `alias` is another keyword it goes by."""

    name: str
    kind: ParamKind
    default: Any = REQUIRED
    alias: str = ""


class FactorKind(enum.Enum):
    """What sharding a factor of an op does to it. A result that has a reduction's factor in its dims passes it through:
    it is reduced in the others.
    """

    PASS = "pass-through"
    REDUCE = "reduction"
    BLOCK = "blocked"


@dataclass(frozen=True, slots=True)
class Factor:
    """A dimension of an op's iteration space: its size, its kind and, for a reduction, by which operation."""

    size: int
    kind: FactorKind = FactorKind.PASS
    reduce: str = "sum"


# For every dim of a tensor the factors that it is made of, major to minor; () for a dim of size 1.
DimFactors = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An op's factor rule: which factors stand in which dims of its operands and results (as in GSPMD, Shardy)."""

    factors: tuple[Factor, ...]
    operands: tuple[DimFactors, ...]
    results: tuple[DimFactors, ...]

    def __str__(self) -> str:
        def side(tensors: Sequence[DimFactors]) -> str:
            return ", ".join(" ".join("".join(map(letter, dim)) or "1" for dim in dims) or "()" for dims in tensors)

        marks = [f"{letter(i)}:{f.kind.value}" for i, f in enumerate(self.factors) if f.kind is not FactorKind.PASS]
        return f"{side(self.operands)} -> {side(self.results)}" + (f"  ({', '.join(marks)})" if marks else "")


def letter(factor: int) -> str:
    """A factor of a rule by its number, in texts."""
    return chr(ord("a") + factor) if factor < 26 else f"f{factor}"


class RuleBuilder:
    """Collects the factors of a rule."""

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def factor(self, size: int, kind: FactorKind = FactorKind.PASS, reduce: str = "sum") -> tuple[int, ...]:
        """A new factor, as the factors of a dim: none at all where the size is 1, as there is nothing to shard."""
        if size == 1 and kind is not FactorKind.BLOCK:
            return ()
        self._factors.append(Factor(size, kind, reduce))
        return (len(self._factors) - 1,)

    def blocked(self, size: int) -> tuple[int, ...]:
        return self.factor(size, FactorKind.BLOCK)

    def reduction(self, size: int, reduce: str = "sum") -> tuple[int, ...]:
        return self.factor(size, FactorKind.REDUCE, reduce)

    def dims(
        self,
        shape: Sequence[int],
        chosen: Collection[int] = (),
        kind: FactorKind = FactorKind.PASS,
        reduce: str = "sum",
    ) -> DimFactors:
        """One factor per dim: of this kind for the chosen dims, pass-through for the others."""
        return tuple(self.factor(n, kind, reduce) if d in chosen else self.factor(n) for d, n in enumerate(shape))

    def build(self, operands: Sequence[DimFactors], results: Sequence[DimFactors]) -> Rule:
        return _rule(tuple(self._factors), tuple(operands), tuple(results))


# Equal rules are one object: what follows from a rule alone is worked out once for all ops that have it.
_rule = functools.lru_cache(maxsize=1 << 13)(Rule)


class Partial(enum.Enum):
    """How an op carries an unreduced sum in its operands to its result."""

    NONE = "needs its operands reduced"
    MOVE = "moves elements: any one partial operand passes, whatever the reduction"
    CAST = "linear where terms may be cast one by one: floating point, to no narrower type"
    JOINT = "linear in all tensor operands together: all must be partial"
    FIRST = "linear in the first tensor operand, floating point only"
    EACH = "linear in each tensor operand: exactly one may be partial"
    MAX = "the greatest of what it reads: any operands may be unreduced by max"
    MIN = "the least of what it reads: any operands may be unreduced by min"

    @property
    def reduce(self) -> str:
        """The reduction that it carries; MOVE carries any."""
        return {Partial.MAX: "max", Partial.MIN: "min"}.get(self, "sum")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One use of an op, with concrete or symbolic types: what rules, lowerings and costs are computed from."""

    op: OpDef
    args: tuple[Any, ...]
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.args[self.op.places[name]]

    def type_of(self, name: str) -> TensorType | None:
        """The type of the tensor passed as this parameter, None where something else was passed."""
        return self.types[self.first_operand(name)] if isinstance(self[name], TensorRef) else None

    def first_operand(self, name: str) -> int:
        """The number, among the operands, of the first tensor passed as this parameter, where one is."""
        return sum(count_tensors(arg) for arg in self.args[: self.op.places[name]])

    @property
    def has_form(self) -> bool:
        """Whether the op has a distributed form for such calls."""
        op = self.op
        return op.distributed is not None and (op.has_form is None or op.has_form(self))


def count_tensors(arg: object) -> int:
    """How many tensor operands an argument contributes."""
    if isinstance(arg, TensorRef):
        return 1
    is_list = isinstance(arg, tuple) and bool(arg) and isinstance(arg[0], TensorRef)
    return len(arg) if is_list else 0  # type: ignore[arg-type]


def tensor_refs(args: Sequence[Any]) -> list[TensorRef]:
    """The tensors among an op's arguments, in order."""
    out: list[TensorRef] = []
    for arg in args:
        if count_tensors(arg):
            out.extend((arg,) if isinstance(arg, TensorRef) else arg)
    return out


class Emit(Protocol):
    """What a lowering to torch sees of one call on one rank: names of local operands, and local geometry."""

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
        """The name of the tensor passed as a parameter, None where no tensor was passed."""
        ...

    def result_runs(self, result: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every dim of a result the intervals of global indices that the rank computes."""
        ...

    def operand_runs(self, operand: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The same of an operand."""
        ...

    def salt(self) -> int:
        """A number of this call's own, the same on every rank and mesh, for ops that draw random numbers."""
        ...

    def leads(self) -> bool:
        """True on the one rank, of those that compute terms of one partial result, that adds what is added once."""
        ...


# One Python expression: of the result, or of a tuple of all results; or one expression per result.
Lowering = Callable[[Emit], "str | tuple[str, ...]"]


class Writing(Protocol):
    """What an op's forms (`distributed`, `apart`, `rounds`) are written with: `rewriting.graphs.GraphWriter` is one.

    `operand` is the place of the operand whose dim a distributed form is for.
    """

    operand: int

    def type(self, ref: TensorRef) -> TensorType:
        """The type of a tensor."""
        ...

    def call(self, name: str | OpDef, *args: Any, **kwargs: Any) -> Any:
        """Apply an op, by name or itself: a TensorRef, or a tuple of them."""
        ...


def cast_to(r: Writing, x: TensorRef, dtype: DataType) -> TensorRef:
    """The tensor in a type; itself where it is of that type."""
    return x if r.type(x).dtype is dtype else r.call("cast", x, dtype)


# (writing, the call, its operands) -> its results, the last operand added by an op of its own.
Apart = Callable[[Writing, "Call", tuple[TensorRef, ...]], "Sequence[TensorRef]"]


class BlockOrder(NamedTuple):
    """What an op does that puts the equal blocks of a dim into another order: its block i was block order[i]."""

    dim: int
    order: tuple[int, ...]


# (writing, the call, its operands, a sharded dim of one of them that the op needs whole, in how many blocks it
# lies over ranks, 0 where it does not lie in blocks) -> its results, or None where it has no such form for this call.
DistributedForm = Callable[[Writing, "Call", tuple[TensorRef, ...], int, int], "Sequence[TensorRef] | None"]


class Rounds(NamedTuple):
    """How ranks compute an op together in rounds, where the user asks for it.

    rule: the op's factor rule between rounds: what lies beside what on a rank, though every rank needs more of it.
    write: (writing, the call, its operands) -> its results, the rounds as ordinary ops, each local where its operands
    are, and orders of blocks, which travel.
    """

    rule: Callable[[Call], Rule]
    write: Callable[[Writing, Call, tuple[TensorRef, ...]], Sequence[TensorRef]]


def _elementwise_flops(call: Call) -> float:
    if call.op.is_view:
        return 0.0  # Its elements are read where they are used.
    return float(max((t.numel for t in (*call.results, *call.types)), default=0))


def picked(call: Call) -> float:
    """Operations of an op that reads no more of its operands than it makes of them, however large they are."""
    return float(sum([made.numel for made in call.results]))


def _no_samples() -> tuple[Sample, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A call for tests: tensors as types, everything else as passed.

    `values` gives tensors (by their place among the operands) that cannot be any numbers, such as indices:
    the numbers in row-major order, repeated until the tensor is full.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of_floats(cls, *args: Any) -> Sample:
        """Of these arguments, where a tuple stands for a Float tensor of that shape."""
        return cls(tuple(TensorType(a, DataType.Float) if isinstance(a, tuple) else a for a in args))


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """Everything about one op.

    infer: the types of the results from a call whose `results` are not known yet (raises DefinitionError).
    rule: the factor rule of a call with concrete types. emit: Python text of the result(s) in torch, on local
    tensors. partial: what the op does with an unreduced operand. flops: operations on global
    tensors, if it is not one for each element (none of a view).
    window: for an op whose one result is a window of its first operand, or the other way round: (per dim, which
    operand index result index 0 is; what stands where the operand has nothing), or the order of a dim's blocks; None
    where the call is neither.
    distributed: the op as a graph of other ops, for a sharded dim of an operand that it needs whole (if it needs none
    so, that it sums over); has_form: for which calls there is one, None for all.
    apart: an op that adds its last operand once, where it has one that it sums nothing of, in two.
    rounds: how the op is computed where its operands are sharded otherwise than `rule` takes them, whatever it costs.
    into: a Python statement that writes the one result into an existing tensor, None where the call cannot.
    widens: of operands cast to a wider float type the lowering makes the result in that type.
    pieced: what the one result is on the parts of a dim, put together or (where the dim is reduced) reduced, is what it
    is on the dim; a SHAPE parameter is the result's shape.
    is_view: the result lies in the memory of the first operand, if that is dense.
    vanishes: where the result has the shape of the first operand it is that operand.
    nvfuser: what the op is in nvFuser: None for its function of the same name, or the reason to leave it to
    torch. vjp: its gradients as ops of the table; None where it has no derivative. domain: the open interval that
    tests draw real operands from. compute: a Python function that the emitted text calls as OP.name. adjoints: ops of a
    registered op's own that its gradients are written in; they are registered with it. about: what it computes, one
    line for `help`, `meshfuse ops` and docs/ops.md. draws: for which calls it draws random numbers by the definition's
    seed (of a call's arguments alone), None for none.
    """

    name: str
    params: tuple[Param, ...]
    infer: Callable[[Call], tuple[TensorType, ...]]
    rule: Callable[[Call], Rule]
    emit: Lowering
    partial: Partial = Partial.NONE
    flops: Callable[[Call], float] = _elementwise_flops
    samples: Callable[[], Sequence[Sample]] = _no_samples
    nvfuser: Callable[[NvfuserEmit], Any] | str | None = None
    distributed: DistributedForm | None = None
    has_form: Callable[[Call], bool] | None = None
    rounds: Rounds | None = None
    apart: Apart | None = None
    window: Callable[[Call], tuple[tuple[int, ...], Any] | BlockOrder | None] | None = None
    vjp: Vjp | None = None
    into: Callable[[Emit, str], str | None] | None = None
    widens: bool = False
    pieced: bool = False
    is_view: bool = False
    vanishes: bool = False
    domain: tuple[float, float] | None = None
    compute: Callable[..., Any] | None = None
    adjoints: tuple[OpDef, ...] = ()
    about: str = ""
    draws: Callable[[Call], bool] | None = None
    places: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {param.name: place for place, param in enumerate(self.params)})

    def __repr__(self) -> str:
        return f"OpDef({self.name})"
