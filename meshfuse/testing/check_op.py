"""`check_op`: is what an `OpDef` claims true? Every claim is tried against the op's own torch lowering.

the type rule: against what the lowering gives.
the factor rule: by running the lowering on shards and putting the results together.
the partial rule: on the terms of reductions.
windows, and the op on the parts of a dim.
the distributed form, and annotations: by whole definitions.
gradients: against torch's autograd through the lowering, in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from hypothesis import HealthCheck, Phase, assume, find, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, NoSuchExample

from ..argument_checks import as_int
from ..dtypes import Category, DataType
from ..errors import MeshfuseError, caller_line, error_text, located, shown, user_error
from ..executor.modes import on_cpu
from ..fusion_definition import FusionDefinition
from ..ops.binding import make_call
from ..ops.opdef import Call, OpDef, Sample
from ..ops.values import TensorType
from .calls import define_call, operands_of, whole
from .cases import (
    Case,
    factor_cases,
    factor_problem,
    free_factors,
    report,
    sizes_problem,
    type_problem,
    unreduced_cases,
    unreduced_problem,
    window_problem,
    wrong_results,
)
from .concat_distributive import concat_problem
from .defined import Annotated, defined_problem, form_cases, unsharded
from .layouts import MOST_RANKS, dim_layouts, meshes
from .order_free import order_problem
from .parts import ways

C = TypeVar("C")
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9)
_WIDE = {
    **dict.fromkeys((DataType.Float, DataType.Half, DataType.BFloat16), DataType.Double),
    DataType.ComplexFloat: DataType.ComplexDouble,
}


def check_op(op: OpDef, *, samples: Sequence[Sample] | None = None, max_examples: int = 50, max_ranks: int = 8) -> None:
    """Try everything that an op's record claims, on its samples (or those given) and on other shapes like them.

    Every factor of every sample is sharded evenly, unevenly, with empty shards, over two axes, a sub-axis, strided and
    nested; then come `max_examples` random shapes and layouts over up to `max_ranks` ranks, and a tenth as many whole
    definitions, their operands annotated in random ways (none with 0). The op need not be registered; ops that its
    gradients are written in are checked as well. The same examples are tried each time.

    Raises AssertionError for the first claim that does not hold, with the smallest counter-example that was found: the
    call, mesh, shardings and rank, what was found and expected, and what to do.
    """
    if not isinstance(op, OpDef):
        raise user_error("check_op", f"{shown(op)} ({type(op).__name__})", "an OpDef",
                         "Make one with mf.torch_op, or mf.OpDef(...).", caller_line())  # fmt: skip
    for name, value, low, high in (("max_examples", max_examples, 0, None), ("max_ranks", max_ranks, 2, MOST_RANKS)):
        found = as_int(value)
        if found is None or found < low or (high is not None and found > high):
            raise user_error(f"check_op: {name}", shown(value), f"an int >= {low}{f', at most {high}' if high else ''}",
                             "Leave it out, or pass one.", caller_line())  # fmt: skip
    with _one_thread(), _with_autograd(), _errors_as_claims(op), located(caller_line()), on_cpu():
        given = list(op.samples() if samples is None else samples)
        if not given:
            do = "Give samples=[mf.Sample((mf.TensorType(...), ...)), ...]."
            raise AssertionError(f"{op.name}: no samples\n  what to do {do}")
        _check(op, given, max_examples, max_ranks)


@contextlib.contextmanager
def _errors_as_claims(op: OpDef) -> Iterator[None]:
    """In this context, an error or wrong value from a function of the OpDef counts as a claim that does not hold."""
    try:
        yield
    except (AssertionError, MeshfuseError, HypothesisException):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise AssertionError(
            f"{op.name}: the record cannot be worked with\n  error      {error_text(error)}\n"
            f"  at         {os.path.basename(last.filename)}:{last.lineno}: {last.line}\n"
            "  what to do Look at the function of the record that this is raised in, or whose result it works on."
        ) from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """In this context torch uses one thread, which is fastest for small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _with_autograd() -> Iterator[None]:
    """In this context torch has derivatives, whatever the caller has switched off: gradients are checked by them."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _check(op: OpDef, given: Sequence[Sample], max_examples: int, max_ranks: int) -> None:
    for sample in given:
        _raise(type_problem(op, sample) or window_problem(op, sample))
    for sample in given:
        _try_all(op, factor_cases(op, sample), factor_problem, sharded_calls(op, [sample], max_ranks))
        for case in unreduced_cases(op, sample):
            _raise(unreduced_problem(op, case))
    # What has no dim to shard is the same on every rank.
    free = [sample for sample in given if free_factors(make_call(op, sample))]
    if free:
        _search(sharded_calls(op, free, max_ranks), lambda case: factor_problem(op, case), max_examples)
    _search(of_other_sizes(op, given), lambda sample: sizes_problem(op, sample), max_examples)
    for sample in given:
        forms = list(form_cases(op, sample))
        known = unsharded(op, sample) if forms else None
        for case in forms:
            _raise(defined_problem(op, case, known))
    _search(annotated_calls(op, given, max_ranks), lambda case: defined_problem(op, case), -(-max_examples // 10))
    for sample in given:
        _raise(concat_problem(op, sample) or order_problem(op, sample) or gradient_problem(op, sample))
    for adjoint in op.adjoints:
        samples = [_of_adjoint(op, sample) for sample in given if _is_float(make_call(op, sample))]
        samples = [sample for sample in samples if _is_float(make_call(adjoint, sample))]
        if samples:
            _check(adjoint, samples, max_examples // 2, max_ranks)


def _is_float(call: Call) -> bool:
    """Whether a result is of a type that has gradients: whole numbers and indices have none."""
    return any(ttype.dtype.category >= Category.FLOAT for ttype in call.results)


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise AssertionError(problem)


def _of_adjoint(op: OpDef, sample: Sample) -> Sample:
    """A sample for an adjoint: the gradients of the results, then the op's own arguments."""
    call = make_call(op, sample)
    values = {place + len(call.results): numbers for place, numbers in sample.values.items()}
    return Sample((*call.results, *sample.args), sample.kwargs, values)


# searching --------------------------------------------------------------------------------------------------


def _settings(count: int) -> settings:
    return settings(max_examples=count, database=None, deadline=None, derandomize=True,
                    suppress_health_check=[*_CHECKS], phases=(Phase.generate, Phase.shrink))  # fmt: skip


def _smallest(cases: st.SearchStrategy[C], problem: Callable[[C], str | None], count: int) -> str | None:
    """What is wrong with the smallest failing case that Hypothesis finds, as text; None where it finds none."""
    try:
        return problem(find(cases, lambda case: problem(case) is not None, settings=_settings(count)))
    except NoSuchExample:
        return None


def _search(cases: st.SearchStrategy[C], problem: Callable[[C], str | None], count: int) -> None:
    if count:  # Hypothesis takes no 0
        _raise(_smallest(cases, problem, count))


def _try_all(
    op: OpDef, cases: Iterator[Case], problem: Callable[[OpDef, Case], str | None], like: st.SearchStrategy[Case]
) -> None:
    """The first failure in these cases, or a smaller one found with other shapes and layouts."""
    found = next((p for case in cases if (p := problem(op, case)) is not None), None)
    if found is not None:
        raise AssertionError(_smallest(like, lambda case: problem(op, case), 300) or found)


@st.composite
def resized(draw: st.DrawFn, op: OpDef, samples: Sequence[Sample]) -> Sample:
    """A sample, or one with other sizes that the op takes."""
    made = draw(of_other_sizes(op, samples))
    assume(made in samples or _is_possible(op, made))
    return made


@st.composite
def of_other_sizes(draw: st.DrawFn, op: OpDef, samples: Sequence[Sample]) -> Sample:
    """A sample, or one with other sizes, whether the op takes them or not."""
    sample = draw(st.sampled_from(samples))
    call = make_call(op, sample)
    sizes = sorted({n for t in call.types for n in t.shape if n > 1})
    if sample.values or not sizes:
        return sample
    new = {n: draw(st.sampled_from([*_SIZES, n, n, n])) for n in sizes}

    def changed(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            return TensorType(tuple(new.get(n, n) for n in arg.shape), arg.dtype)
        return [changed(a) for a in arg] if isinstance(arg, list) else arg

    kwargs = {key: changed(value) for key, value in sample.kwargs.items()}
    return Sample(tuple(map(changed, sample.args)), kwargs, sample.values)


def _is_possible(op: OpDef, sample: Sample) -> bool:
    """Whether the op takes the call: sizes may depend on each other and on numbers."""
    try:
        return type_problem(op, sample) is None
    except Exception:
        return False


@st.composite
def sharded_calls(draw: st.DrawFn, op: OpDef, samples: Sequence[Sample], max_ranks: int = 8) -> Case:
    """A call of the op, with layouts over a mesh for one factor or for all."""
    sample = draw(resized(op, samples))
    call = make_call(op, sample)
    free, rule = free_factors(call), op.rule(call)
    assume(free)
    if draw(st.integers(0, 2)) < 2:
        factor = draw(st.sampled_from(free))
        how = draw(st.sampled_from([*ways(rule.factors[factor].size).values()]))
        return Case(sample, how.mesh, {factor: how.layout})
    mesh = draw(meshes(min_ranks=2, max_ranks=max_ranks).filter(lambda m: m.ranks == tuple(range(m.size))))
    layouts = draw(dim_layouts(mesh, [rule.factors[f].size for f in free]))
    return Case(sample, mesh, dict(zip(free, layouts, strict=True)))


@st.composite
def annotated_calls(draw: st.DrawFn, op: OpDef, samples: Sequence[Sample], max_ranks: int = 8) -> Annotated:
    """A definition of one call, with its operands and results annotated over a mesh."""
    sample = draw(resized(op, samples))
    call = make_call(op, sample)
    mesh = draw(meshes(min_ranks=2, max_ranks=max_ranks))
    kinds = [*call.types, *call.results]
    chosen = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=3, unique=True))
    return Annotated(sample, mesh, {i: draw(dim_layouts(mesh, kinds[i].shape)) for i in chosen})


# gradients --------------------------------------------------------------------------------------------------


class _Expected(NamedTuple):
    """Gradients by autograd of the results at `places`, each times one of `grads`, by the operands at `wrt`."""

    operands: list[torch.Tensor]
    places: list[int]
    wrt: list[int]
    grads: list[torch.Tensor]
    values: list[torch.Tensor]


def gradient_problem(op: OpDef, sample: Sample) -> str | None:
    """Compare the op's gradients in a definition with autograd through its lowering, in float64."""
    if op.vjp is None:
        return None
    sample = dataclasses.replace(
        sample, args=tuple(map(_widened, sample.args)), kwargs={k: _widened(v) for k, v in sample.kwargs.items()}
    )
    call = make_call(op, sample)
    expected = _by_autograd(call, sample)
    if expected is None:
        return None
    try:
        fd = _gradients(op, sample, expected.wrt, expected.places)
        found = fd.simulate([*expected.operands, *expected.grads])
    except MeshfuseError as error:
        if "no derivative" in str(error):
            return None  # the op says so of such calls
        return report(op, call, "the derivative cannot be written", [("error", str(error).splitlines()[0])],
                      "Correct vjp, or pass vjp=None.")  # fmt: skip
    wrong = wrong_results(found, expected.values, 1e-8)
    if wrong is None:
        return None
    facts = [("gradient", f"by operand {expected.wrt[wrong[0]]}"), ("wrong", wrong[2])]
    return report(op, call, "the derivative is not that of the lowering", facts,
                  "Correct vjp: the gradient of sum(result * grad) by each operand.")  # fmt: skip


def _by_autograd(call: Call, sample: Sample) -> _Expected | None:
    """The gradients to expect; None where torch has no derivative of the lowering."""
    operands = operands_of(call, sample)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in operands]
    results = whole(call, leaves)
    places = [i for i, t in enumerate(results) if t.requires_grad]
    wrt = [i for i, t in enumerate(leaves) if t.requires_grad]
    if not places:
        return None
    made = torch.Generator().manual_seed(3)
    grads = [torch.randn(results[i].shape, dtype=results[i].dtype, generator=made) for i in places]
    try:
        found = torch.autograd.grad([results[i] for i in places], [leaves[i] for i in wrt], grads, allow_unused=True)
    except RuntimeError:
        return None
    values = [torch.zeros_like(leaves[i]) if g is None else g for i, g in zip(wrt, found, strict=True)]
    return _Expected(operands, places, wrt, grads, values)


def _gradients(op: OpDef, sample: Sample, wrt: Sequence[int], places: Sequence[int]) -> FusionDefinition:
    fd = FusionDefinition(0)
    tensors, results = define_call(fd, op, sample)
    seeds = [fd.define_tensor(list(results[i].type.shape), dtype=results[i].dtype) for i in places]
    for grad in fd.grad([results[i] for i in places], [tensors[i] for i in wrt], seeds):
        fd.add_output(grad)
    return fd


def _widened(value: Any) -> Any:
    if isinstance(value, TensorType):
        return TensorType(value.shape, _WIDE.get(value.dtype, value.dtype))
    if isinstance(value, DataType):
        return _WIDE.get(value, value)
    return [_widened(v) for v in value] if isinstance(value, list) else value
