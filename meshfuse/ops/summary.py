"""A summary of one op: how it is called, what it computes, and what sharding each dim of its operands does.

`help(fd.ops.sum)`, `meshfuse ops sum` and docs/ops.md show it. All of it follows from the op's OpDef and samples. The
*fate* of a dim is what sharding it does, in a word of `FATES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..dtypes import DataType
from .binding import bind, make_call, signature
from .opdef import Call, OpDef, Partial, Sample, tensor_refs
from .registry import find
from .rules import DimFactors, FactorKind, Rule
from .values import TensorRef, TensorType

# The fates of a dim (what sharding it does), and what each means.
FATES: Mapping[str, str] = {
    "pass": "may be sharded: every rank computes its part of the result, and nothing is communicated",
    "reduced": "may be sharded: every rank reduces its part, and results without the dim are unreduced: one "
    "collective of the result's size, where something needs it reduced",
    "in parts": "may be sharded: the op has a distributed form, in which ranks exchange less than the dim",
    "in rounds": "may be sharded, in equal blocks: these travel from rank to rank while ranks compute",
    "windows": "may be sharded: every rank is sent the elements that it lacks, and no others",
    "whole": "is needed whole: where it is sharded it is gathered first, or its axes move to another dim",
}
# What an op does with unreduced operands, in few words for tables.
CARRIES: Mapping[Partial, str] = {
    Partial.NONE: "no",
    Partial.MOVE: "any one",
    Partial.CAST: "sums, if cast wider",
    Partial.JOINT: "sums, in all",
    Partial.FIRST: "sums, in the first",
    Partial.OVER: "sums, over a number",
    Partial.EACH: "sums, in any one",
    Partial.PICKED: "sums, in all picked",
    Partial.MAX: "maxima, in any",
    Partial.MIN: "minima, in any",
}
assert {*CARRIES} == {*Partial}


class ExampleCall(NamedTuple):
    """A call with letters for its tensors' dims, as `sum([a, b], [0]) -> [b]`, and by fate the dims that have it."""

    text: str
    fates: Mapping[str, Sequence[str]]

    @property
    def outcome(self) -> str:
        """The fates as text: `a, c pass; b reduced by sum`."""
        if len(self.fates) < 2:
            return f"all {next(iter(self.fates), 'pass')}"
        return "; ".join(f"{', '.join(letters)} {fate}" for fate, letters in self.fates.items())


def help_text(op: OpDef) -> str:
    """How an op is called, what it computes and how it may be split, in a few lines."""
    found = examples(op)
    words = {_word(fate) for example in found for fate in example.fates}
    parts = [
        [signature(op)],
        [op.about] if op.about else [],
        [f"{example.text}: {example.outcome}" for example in found],
        [f"{word}: {meaning}" for word, meaning in FATES.items() if word in words],
        [f"unreduced operands: {op.partial.value}", f"gradient: {'yes' if op.vjp else 'none'}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _word(fate: str) -> str:
    """The word of `FATES` in a fate: "reduced by sum" has the word "reduced"."""
    return fate.split(" by ")[0]


def examples(op: OpDef) -> list[ExampleCall]:
    """The op's samples as example calls; of those whose dims have the same fates only the first."""
    found: dict[tuple[str, ...], ExampleCall] = {}
    for sample in op.samples():
        example = _example(op, sample)
        found.setdefault(tuple(example.fates), example)
    return [*found.values()]


def _example(op: OpDef, sample: Sample) -> ExampleCall:
    call = make_call(op, sample)
    rule = op.rule(call)
    letters = _letters(rule)
    results = ", ".join(_dims(dims, letters) for dims in rule.results)
    fates: dict[str, list[str]] = {}
    for factor in letters:
        fates.setdefault(_fate(call, rule, factor), []).append(letters[factor])
    order = [*FATES]
    in_order = dict(sorted(fates.items(), key=lambda entry: order.index(_word(entry[0]))))
    return ExampleCall(f"{op.name}({_arguments(sample, rule, letters)}) -> {results}", in_order)


def _letters(rule: Rule) -> dict[int, str]:
    """A letter for every factor, in the order in which the factors occur in the call."""
    named = dict.fromkeys(f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim)
    return {factor: chr(ord("a") + place) for place, factor in enumerate(named)}


def _dims(dims: DimFactors, letters: Mapping[int, str]) -> str:
    texts = ["".join(letters[f] for f in dim) if len(dim) < 2 else f"({' '.join(letters[f] for f in dim)})"
             for dim in dims]  # fmt: skip
    return f"[{', '.join(text or '1' for text in texts)}]"


def _arguments(sample: Sample, rule: Rule, letters: Mapping[int, str]) -> str:
    operands = iter(rule.operands)

    def text(arg: Any) -> str:
        if isinstance(arg, TensorType):
            kind = "" if arg.dtype is DataType.Float else arg.dtype.name
            return f"{kind}{_dims(next(operands), letters)}"
        if isinstance(arg, list) and any(isinstance(entry, TensorType) for entry in arg):
            return f"[{', '.join(map(text, arg))}]"
        return repr(arg)

    return ", ".join([*map(text, sample.args), *(f"{name}={text(arg)}" for name, arg in sample.kwargs.items())])


def _fate(call: Call, rule: Rule, factor: int) -> str:
    """A factor's fate, which for a reduction also names the operation."""
    found = rule.factors[factor]
    places = [(i, d) for i, dims in enumerate(rule.operands) for d, dim in enumerate(dims) if factor in dim]
    if _in_rounds(call, rule, places):
        return "in rounds"
    if found.kind is FactorKind.PASS:
        return "pass"
    if found.kind is FactorKind.REDUCE:
        return f"reduced by {found.reduce}"
    if call.op.window is not None and call.op.window(call) is not None:
        return "windows"
    return "in parts" if any(_has_form(call, operand, dim) for operand, dim in places) else "whole"


def _in_rounds(call: Call, rule: Rule, places: Sequence[tuple[int, int]]) -> bool:
    """Whether, in an op's rounds, one of these dims is in blocks that travel."""
    if call.op.ring_schedule is None:
        return False
    between = call.op.ring_schedule.rule(call)
    return any(len(between.operands[i][d]) > len(rule.operands[i][d]) for i, d in places)


def _has_form(call: Call, operand: int, dim: int) -> bool:
    """Whether the op has a distributed form for this dim of an operand, tried with two blocks."""
    if not call.has_form or call.op.distributed is None:
        return False
    refs = tuple(TensorRef(i) for i in range(len(call.types)))
    return call.op.distributed(_Trial(call, operand, 2), call, refs, dim, 2) is not None


class _Trial:
    """A `Writing` that keeps only types, to find out whether a distributed form exists."""

    def __init__(self, call: Call, operand: int, pieces: int):
        self.operand, self.pieces, self._types = operand, pieces, [*call.types]

    def type(self, ref: TensorRef) -> TensorType:
        return self._types[ref.id]

    def call(self, name: str | OpDef, *args: Any, **kwargs: Any) -> Any:
        op = find(name)
        assert op is not None, name
        bound = bind(op, args, kwargs, lambda value: value)
        made = op.infer(Call(op, bound, tuple(map(self.type, tensor_refs(bound)))))
        ids = range(len(self._types), len(self._types) + len(made))
        self._types += made
        return TensorRef(ids[0]) if len(made) == 1 else tuple(map(TensorRef, ids))
