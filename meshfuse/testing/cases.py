"""The cases that `check_op` tries, a call of an op and a way to shard it, and the checks of an op in each.

A function `..._problem` returns what is wrong, as text; None where nothing is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import Category
from ..errors import DefinitionError, KernelError, error_text
from ..mesh import DeviceMesh
from ..ops.binding import make_call
from ..ops.local import LocalCall
from ..ops.opdef import BlockOrder, Call, OpDef, Sample
from ..ops.rules import FactorKind, Rule, letter
from ..ops.values import TensorRef, TensorType
from ..placement.factors import carries
from ..sharding.layout import Layout, Split, axes, text
from ..sharding.value import Sharding
from .calls import SALT, names_of, operands_of, run_lowering, torch_dtype, whole
from .parts import Sharded, Wrong, ways

_CORRECT_TYPES = "Correct infer (of a torch_op: its rule, sizes or dtype) or the lowering."
REDUCTIONS = ("sum", "prod", "max", "min")


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an op, with some of its factors sharded."""

    sample: Sample
    mesh: DeviceMesh = dataclasses.field(default_factory=lambda: DeviceMesh((1,), ("x",)))
    layouts: Mapping[int, Layout] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unreduced:
    """A call of an op, of which some operands are terms of a reduction over an axis of two ranks."""

    sample: Sample
    operands: tuple[int, ...]
    reduce: str


def tolerance(call: Call) -> float:
    """How much of the largest number two results may differ by: some roundings of the least precise type."""
    floats = [torch_dtype(t) for t in (*call.types, *call.results) if t.dtype.category >= Category.FLOAT]
    rounding = max((torch.finfo(dtype).eps for dtype in floats), default=0.0)
    return max(4 * rounding, 2e-5) if rounding > 1e-12 else 1e-9


def report(op: OpDef, call: Call, what: str, facts: Sequence[tuple[str, str]], do: str) -> str:
    """The text of what is wrong."""
    lines = [f"{op.name}: {what}", f"  call       {call_text(call)}"]
    lines += [f"  {name:<10} {value}" for name, value in facts if value]
    return "\n".join([*lines, f"  what to do {do}"])


def call_text(call: Call) -> str:
    """A call with its operands' types."""
    types = iter(call.types)

    def shown(arg: Any) -> str:
        if isinstance(arg, TensorRef):
            return str(next(types))
        return f"[{', '.join(map(shown, arg))}]" if isinstance(arg, tuple) else str(arg)

    parts = [f"{p.name}: {shown(arg)}" if isinstance(arg, TensorRef) else f"{p.name}={shown(arg)}"
             for p, arg in zip(call.op.params, call.args, strict=True)]  # fmt: skip
    return f"{call.op.name}({', '.join(parts)}) -> {', '.join(map(str, call.results))}"


def difference(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> tuple[tuple[int, ...], str] | None:
    """(place, text) of the first element that differs by more than `limit` of the largest number; None where none does.

    Whole numbers must be equal.
    """
    a, b = (t.to(torch.int64) if t.dtype in (torch.uint64, torch.bool) else t for t in (found, wanted))
    exact = not (b.is_floating_point() or b.is_complex())
    same = a == b if exact else torch.isclose(a, b.to(a.dtype), rtol=limit, atol=limit * largest(b), equal_nan=True)
    if bool(same.all()):
        return None
    place = tuple((~same).nonzero()[0].tolist()) if same.ndim else ()
    count = int((~same).sum())
    what = f"element {list(place)} is {_number(found[place])}, expected {_number(wanted[place])}"
    return place, f"{what} ({count} of {same.numel()} differ)"


def largest(t: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor; 1 where all are smaller."""
    finite = t[torch.isfinite(t)]
    return max(1.0, float(finite.abs().amax())) if finite.numel() else 1.0


def _number(t: torch.Tensor) -> str:
    value = t.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def wrong_results(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], limit: float
) -> tuple[int, tuple[int, ...], str] | None:
    """(which result, where, the difference as text) of the first result that differs."""
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a.shape != b.shape:
            return place, (), f"result {place} has shape {list(a.shape)}, expected {list(b.shape)}"
        found_difference = difference(a, b, limit)
        if found_difference is not None:
            name = f"result {place}, " if len(wanted) > 1 else ""
            return place, found_difference[0], name + found_difference[1]
    return None


def computed(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results on one rank; the op must not change its operands."""
    before = [t.clone() for t in operands]
    found = whole(call, operands)
    for name, a, b in zip(names_of(call), before, operands, strict=True):
        if difference(a, b, 0.0) is not None:
            raise AssertionError(f"the lowering writes into {name}")
    return found


# the type rule ----------------------------------------------------------------------------------------------


def type_problem(op: OpDef, sample: Sample) -> str | None:
    """Compare the lowering's results on whole operands with the type rule, and with the dims of the factor rule."""
    call = make_call(op, sample)
    try:
        found = computed(call, operands_of(call, sample))
    except Exception as error:
        return report(op, call, "the lowering fails on whole operands", [("error", error_text(error))],
                      "Make infer refuse such a call, or the lowering take it.")  # fmt: skip
    problem = _results_problem(op, call, found)
    if problem is not None:
        return problem
    if not sample.values and any(t.numel() for t in found) and not any(_tells_anything(t) for t in found):
        return report(op, call, "no number of its results is finite, so that nothing can be compared", [],
                      "Give the op a domain=(low, high) of operands that it is defined for.")  # fmt: skip
    problems = (rule_problem(op, call), open_problem(op, call), chance_problem(op, sample, call))
    return next(filter(None, problems), None) or stride_problem(op, sample, call)


def sizes_problem(op: OpDef, sample: Sample) -> str | None:
    """As `type_problem`, of a sample with other sizes: nothing is wrong with those that the op refuses."""
    try:
        call = make_call(op, sample)
        found = whole(call, operands_of(call, sample))
    except KernelError as error:  # a torch_op's function has returned something else than its rule says
        return report(op, call, "the type rule is wrong", [("error", error_text(error))], _CORRECT_TYPES)
    except Exception:
        return None
    return _results_problem(op, call, found)


def _results_problem(op: OpDef, call: Call, found: Sequence[Any]) -> str | None:
    """Compare what the lowering gives with the type rule."""
    for place, (tensor, ttype) in enumerate(zip(found, call.results, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            return report(op, call, f"the lowering gives no tensor as result {place}",
                          [("found", f"{tensor!r} ({type(tensor).__name__})")],
                          "Return a tensor for each result of the rule.")  # fmt: skip
        if (tuple(tensor.shape), tensor.dtype) != (ttype.shape, torch_dtype(ttype)):
            facts = [("found", f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} from the lowering"),
                     ("expected", f"{ttype.dtype.value}{list(ttype.shape)} by infer")]  # fmt: skip
            return report(op, call, f"the type rule is wrong about result {place}", facts,
                          _CORRECT_TYPES)  # fmt: skip
    return None


def _tells_anything(t: torch.Tensor) -> bool:
    return not t.is_floating_point() or bool(torch.isfinite(t).any())


def chance_problem(op: OpDef, sample: Sample, call: Call) -> str | None:
    """Check that the lowering makes the same results of the same operands each time."""
    operands = operands_of(call, sample)
    wrong = wrong_results(whole(call, operands), whole(call, operands), tolerance(call))
    if wrong is None:
        return None
    return report(op, call, "the lowering makes something else of the same operands each time", [("wrong", wrong[2])],
                  "Ranks would disagree: take random numbers as an operand, from fd.ops.uniform.")  # fmt: skip


def stride_problem(op: OpDef, sample: Sample, call: Call) -> str | None:
    """Check that the lowering takes operands that are not row-major: shards are often views."""
    operands = operands_of(call, sample)
    for spread in ([torch.stack([t, t], -1)[..., 0] for t in operands], list(map(_turned, operands))):
        try:
            wrong = wrong_results(whole(call, spread), whole(call, operands), tolerance(call))
        except Exception as error:
            wrong = (0, (), f"it fails: {error_text(error)}")
        if wrong is not None:
            return report(op, call, "the lowering is wrong on operands that are not row-major in memory",
                          [("strides", ", ".join(str(list(t.stride())) for t in spread)), ("wrong", wrong[2])],
                          "Let the lowering call .contiguous() on what must be dense.")  # fmt: skip
    return None


def _turned(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with the first dim's next to each other in memory."""
    order = list(range(t.ndim))[::-1]
    return t.permute(order).contiguous().permute(order)


def rule_problem(op: OpDef, call: Call) -> str | None:
    """Check that the dims of the factor rule are made of its factors."""
    rule = op.rule(call)
    every = [{f for factors in dims for f in factors} for dims in rule.results]
    made = set[int]().union(*every[:1]).intersection(*every)
    both = [f for f in sorted(made) if rule.factors[f].kind is FactorKind.REDUCE and rule.factors[f].size > 1]
    if both:
        what = f"factor {letter(both[0])} is reduced and stands in every result"
        return report(op, call, what, [("rule", str(rule))], "Let it pass through, or leave it out of a result.")
    sides = [("operand", rule.operands, call.types), ("result", rule.results, call.results)]
    for name, tensors, types in sides:
        if len(tensors) != len(types) or any(len(d) != t.ndim for d, t in zip(tensors, types, strict=False)):
            return report(op, call, f"the factor rule has other {name}s than the call", [("rule", str(rule))],
                          "Give every tensor one tuple of factors per dim.")  # fmt: skip
        for place, (dims, ttype) in enumerate(zip(tensors, types, strict=True)):
            for d, factors in enumerate(dims):
                size = math.prod(rule.factors[f].size for f in factors)
                short = len(factors) > 1 and rule.factors[factors[-1]].kind is FactorKind.BLOCK  # blocks may be
                if size < ttype.shape[d] or (size > ttype.shape[d] and not short):
                    return report(op, call, f"the factors of dim {d} of {name} {place} make up {size}, not its size",
                                  [("rule", str(rule)), ("found", str(size)), ("expected", str(ttype.shape[d]))],
                                  "Correct the factors' sizes or their places.")  # fmt: skip
    return None


def open_problem(op: OpDef, call: Call) -> str | None:
    """Check that with open sizes the type rule says the same, as far as it can."""
    kinds = [TensorType(tuple(n if n == 1 else -1 for n in t.shape), t.dtype) for t in call.types]
    try:
        found = op.infer(Call(op, call.args, tuple(kinds)))
    except DefinitionError:
        return None  # an op may need to know its sizes
    for place, (a, b) in enumerate(zip(found, call.results, strict=True)):
        fits = len(a.shape) == len(b.shape) and all(n in (-1, m) for n, m in zip(a.shape, b.shape, strict=True))
        if not fits or a.dtype is not b.dtype:
            facts = [("open", f"{', '.join(map(str, kinds))} gives {a}"), ("known", f"gives {b}")]
            return report(op, call, f"the type rule of open sizes contradicts that of known ones in result {place}",
                          facts, "Return -1 where a size that a result's follows from is -1.")  # fmt: skip
    return None


# the factor rule --------------------------------------------------------------------------------------------


def free_factors(call: Call) -> list[int]:
    return [i for i, f in enumerate(call.op.rule(call).factors) if f.kind is not FactorKind.BLOCK and f.size > 1]


def factor_cases(op: OpDef, sample: Sample) -> Iterator[Case]:
    """Every factor sharded in every way, then neighbouring factors at once."""
    call = make_call(op, sample)
    sizes, free = [f.size for f in op.rule(call).factors], free_factors(call)
    for factor in free:
        for how in ways(sizes[factor]).values():
            yield Case(sample, how.mesh, {factor: how.layout})
    mesh = DeviceMesh((2, 3), ("x", "y"))
    for a, b in itertools.pairwise(free):
        yield Case(sample, mesh, {a: (Split(2, "x"),), b: (Split(3, "y"),)})


def factor_problem(op: OpDef, case: Case) -> str | None:
    """Compare the op's results on shards, put together, with its results on whole tensors."""
    call = make_call(op, case.sample)
    wrong_rule = rule_problem(op, call)
    if wrong_rule is not None:
        return wrong_rule
    operands = operands_of(call, case.sample)
    sharded = Sharded(call, case.mesh, case.layouts)
    try:
        found = sharded.run(operands)
        wrong = None if found is None else wrong_results(found, whole(call, operands), tolerance(call))
    except Wrong as error:
        return _factor_report(op, call, sharded, str(error), error.rank)
    if wrong is None:
        return None
    result, place, what = wrong
    return _factor_report(op, call, sharded, what, sharded.collected[result].rank_of(place))


def _factor_report(op: OpDef, call: Call, sharded: Sharded, what: str, rank: int | None) -> str:
    rule, shardings = sharded.rule, sharded.shardings()
    cut = [i for i, layout in enumerate(sharded.layouts) if axes(layout)]
    facts = [("rule", str(rule)), ("mesh", str(sharded.mesh))]
    facts += [("sharded", f"{_where(call, rule, i)} as [{text(sharded.layouts[i])}]") for i in cut]
    if shardings is not None:
        facts.append(("operands", ", ".join(map(str, shardings[0]))))
        facts.append(("results", ", ".join(map(str, shardings[1]))))
    facts += [("rank", "" if rank is None else str(rank)), ("wrong", what)]
    return report(op, call, "the factor rule does not hold", facts, _advice(rule, cut))


def _where(call: Call, rule: Rule, factor: int) -> str:
    """A factor in words, by the dims that it is in."""
    names = [n for p, arg in zip(call.op.params, call.args, strict=True) for n in _operand_names(p.name, arg)]
    places = [f"dim {d} of {name}" for name, dims in zip(names, rule.operands, strict=True)
              for d, factors in enumerate(dims) if factor in factors]  # fmt: skip
    places += [f"dim {d} of result {i}" for i, dims in enumerate(rule.results)
               for d, factors in enumerate(dims) if factor in factors]  # fmt: skip
    made = rule.factors[factor]
    kind = f"{made.reduce} reduction" if made.kind is FactorKind.REDUCE else made.kind.value
    return f"factor {letter(factor)} ({kind}, size {made.size}; {', '.join(places)})"


def _operand_names(name: str, arg: Any) -> list[str]:
    if isinstance(arg, TensorRef):
        return [name]
    return [f"{name}[{i}]" for i, one in enumerate(arg) if isinstance(one, TensorRef)] if type(arg) is tuple else []


def _advice(rule: Rule, cut: Sequence[int]) -> str:
    names = ", ".join(map(letter, cut))
    if any(rule.factors[i].kind is FactorKind.REDUCE for i in cut):
        reduce = next(rule.factors[i].reduce for i in cut if rule.factors[i].kind is FactorKind.REDUCE)
        return f"Ranks' results are combined by {reduce} over {names}: name another reduction, or mark it blocked."
    return (f"The rule says that the op works on parts of {names} alone. If it needs the dim whole, mark it blocked; "
            f"if it needs neighbours, give it a halo; else see which dims share the factor.")  # fmt: skip


# unreduced operands -----------------------------------------------------------------------------------------


def unreduced_cases(op: OpDef, sample: Sample) -> Iterator[Unreduced]:
    """Every combination of unreduced operands that the op says it can carry, asked as propagation asks it."""
    call = make_call(op, sample)
    count = len(call.types)
    for chosen in dict.fromkeys([*((i,) for i in range(count)), tuple(range(count))]):
        for reduce in REDUCTIONS if chosen else ():
            available = [[sharding] for sharding in _unreduced(call.types, chosen, reduce)]
            if carries(call, op.rule(call), available) is not None:
                yield Unreduced(sample, chosen, reduce)


def _unreduced(types: Sequence[TensorType], chosen: Sequence[int], reduce: str) -> list[Sharding]:
    mesh, terms = DeviceMesh((2,), ("x",)), (Split(2, "x"),)
    return [
        Sharding(mesh, ((),) * t.ndim, terms if i in chosen else (), reduce if i in chosen else "")
        for i, t in enumerate(types)
    ]


def unreduced_problem(op: OpDef, case: Unreduced) -> str | None:
    """Compare the op on each rank's terms, then reduced, with the op on the reduced operands."""
    call = make_call(op, case.sample)
    terms = [operands_of(call, case.sample, seed) for seed in (0, 1)]
    if case.reduce == "sum":  # What is in the op's domain may be a sum of terms of either sign.
        terms[1] = [b if i in case.sample.values else _of_both_signs(b) for i, b in enumerate(terms[1])]
    terms[1] = [b if i in case.operands else a for i, (a, b) in enumerate(zip(*terms, strict=True))]
    taken, made = _unreduced(call.types, case.operands, case.reduce), _unreduced(
        call.results, range(len(call.results)), case.reduce
    )  # fmt: skip
    parts = [
        run_lowering(LocalCall(call, names_of(call), taken, made, rank, number=SALT), terms[rank]) for rank in (0, 1)
    ]
    reduced = [_combined(a, b, case.reduce) if i in case.operands else a
               for i, (a, b) in enumerate(zip(*terms, strict=True))]  # fmt: skip
    found = [_combined(a, b, case.reduce) for a, b in zip(*parts, strict=True)]
    wrong = wrong_results(found, whole(call, reduced), 10 * tolerance(call))
    if wrong is None:
        return None
    names = [n for p, arg in zip(op.params, call.args, strict=True) for n in _operand_names(p.name, arg)]
    facts = [("partial", f"{op.partial.name}: {op.partial.value}"),
             ("unreduced", f"{', '.join(names[i] for i in case.operands)}, by {case.reduce} over 2 ranks"),
             ("wrong", f"of the reduced results {wrong[2]}")]  # fmt: skip
    return report(op, call, "the partial rule does not hold", facts,
                  "Say partial=Partial.NONE, or the kind in which the op is linear.")  # fmt: skip


def _of_both_signs(t: torch.Tensor) -> torch.Tensor:
    """The numbers, every other one with its sign turned; as they are where none has a sign."""
    if t.dtype == torch.bool or not t.dtype.is_signed:
        return t
    turned = torch.arange(t.numel(), device="cpu").remainder(2).mul(2).sub(1).reshape(t.shape)
    return t * turned.to(t.dtype)


def _combined(a: torch.Tensor, b: torch.Tensor, reduce: str) -> torch.Tensor:
    if a.dtype == torch.bool:
        return a | b if reduce in ("sum", "max") else a & b
    return {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}[reduce](a, b)


# windows ----------------------------------------------------------------------------------------------------


def window_problem(op: OpDef, sample: Sample) -> str | None:
    """Compare the result with the window of the first operand that the op says it is."""
    call = make_call(op, sample)
    window = op.window(call) if op.window is not None else None
    if window is None:
        return None
    operands = operands_of(call, sample)
    if isinstance(window, BlockOrder):
        return _order_problem(op, call, operands, window)
    found, fill = whole(call, operands)[0], window[1]
    wanted = torch.full(found.shape, fill, dtype=found.dtype)
    spans = [_span(offset, n, m) for offset, n, m in zip(window[0], operands[0].shape, found.shape, strict=True)]
    if all(b > a for a, b, _ in spans):
        to = tuple(slice(a, b) for a, b, _ in spans)
        wanted[to] = operands[0][tuple(slice(a + offset, b + offset) for a, b, offset in spans)]
    wrong = wrong_results([found], [wanted], 0.0)
    if wrong is None:
        return None
    facts = [("window", f"offsets {list(window[0])}, fill {fill}"), ("wrong", wrong[2])]
    return report(op, call, "the window is not what the op computes", facts,
                  "Give per dim which operand index result index 0 is, and what stands elsewhere.")  # fmt: skip


def _order_problem(op: OpDef, call: Call, operands: Sequence[torch.Tensor], window: BlockOrder) -> str | None:
    """Compare the result with the operand's blocks in the order that the op says."""
    blocks = operands[0].tensor_split(len(window.order), window.dim)
    wrong = wrong_results(whole(call, operands), [torch.cat([blocks[i] for i in window.order], window.dim)], 0.0)
    if wrong is None:
        return None
    facts = [("order", f"{list(window.order)} of dim {window.dim}"), ("wrong", wrong[2])]
    return report(op, call, "the order of blocks is not what the op makes", facts,
                  "Give the dim, and per block of the result which block of the operand it is.")  # fmt: skip


def _span(offset: int, n: int, m: int) -> tuple[int, int, int]:
    """(first, stop, offset): of m target indices those that have a source among n; index i has source i + offset."""
    return max(0, -offset), max(0, min(m, n - offset)), offset
