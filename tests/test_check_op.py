"""`check_op`, which must find every planted mistake in a rule; what strategies refuse; and the page on both."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import find

import meshfuse as mf
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.ops.opdef import BlockOrder, Call
from meshfuse.ops.rules import Factor, FactorKind, Rule
from meshfuse.testing import (
    annotations,
    assert_same_as_unsharded,
    check_op,
    definitions,
    dim_layouts,
    inputs_for,
    layouts,
    meshes,
    shapes_for,
    shardings,
)
from user_ops import DOUBLE, scaled_product, tensor

sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import forked
from rank_pool import base_environment

PAGE = Path(__file__).parent.parent / "docs" / "testing-an-op.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


NO_LIMITS = {"max_examples": (-1, 2.5, None, True, "a"), "max_ranks": (-1, 0, 1, 65, 10**9, True, None, "a", 2.0)}


@pytest.mark.parametrize("name", NO_LIMITS)
def test_limits_that_are_none(name: str) -> None:
    needed = {"max_examples": "an int >= 0", "max_ranks": "an int >= 2, at most 64"}[name]
    for limit in NO_LIMITS[name]:
        with pytest.raises(mf.DefinitionError, match=f"check_op: {name}: found .*, needed {needed}.*at test_check_op"):
            check_op(scaled_product, **{name: limit})


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_examples": 0}, {"max_examples": 1}, {"max_examples": 1, "max_ranks": 2}])
def test_check_op_works_with_the_least_limits(limits: dict[str, Any]) -> None:
    """With an op whose gradient has ops of its own, which are checked with half as many examples."""
    assert scaled_product.adjoints
    check_op(scaled_product, samples=scaled_product.samples()[:1], **limits)


MESH = mf.DeviceMesh((2,), ("x",))


def opened() -> mf.FusionDefinition:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([-1, 3])
    fd.add_output(fd.ops.relu(x))
    return fd


ASKED: list[tuple[str, Callable[[], Any]]] = [
    *[("meshes: max_axes", lambda v=v: meshes(max_axes=v)) for v in (0, 4, 2**40, None, True, 1.5)],
    *[("meshes: max_ranks", lambda v=v: meshes(max_ranks=v)) for v in (0, 65, "8")],
    ("meshes: min_ranks: found 9, needed an int, 0 to 8", lambda: meshes(min_ranks=9)),
    ("meshes: first_rank", lambda: meshes(first_rank=-1)),
    ("meshes: found none of 7 to 7 ranks on 1 axes of at most 6", lambda: meshes(1, min_ranks=7, max_ranks=7)),
    *[
        ("shardings: shape", lambda v=v: shardings(v, MESH))
        for v in (None, "ab", [-1], [None], range(10**12), iter([1]))
    ],
    ("shardings: mesh: found None (NoneType), needed a DeviceMesh", lambda: shardings([4], None)),  # type: ignore[arg-type]
    ("dim_layouts: mesh", lambda: dim_layouts([4], [4])),  # type: ignore[arg-type]
    ("layouts: splits", lambda: layouts(4, [(2, "x")])),  # type: ignore[list-item]
    ("layouts: n", lambda: layouts(None, [])),  # type: ignore[arg-type]
    ("definitions: families: found 'nope', needed one of", lambda: definitions(["nope"])),
    ("definitions: families", lambda: definitions("pointwise")),
    ("definitions: ops: found 'reluu', needed one of", lambda: definitions(ops=["reluu"])),
    ("definitions: ops", lambda: definitions(ops=[3])),  # type: ignore[list-item]
    ("definitions: min_ops: found 64, needed an int, 0 to 16", lambda: definitions(min_ops=64)),
    ("definitions: max_ops", lambda: definitions(max_ops=2**62)),
    ("definitions: sizes: found [], needed at least one", lambda: definitions(sizes=[])),
    ("definitions: dtypes: found (), needed at least one", lambda: definitions(dtypes=())),
    ("definitions: dtypes", lambda: definitions(dtypes=[torch.float32])),  # type: ignore[list-item]
    ("open_sizes", lambda: definitions(open_sizes=torch.ones(2))),  # type: ignore[arg-type]
    ("annotations: fd", lambda: annotations(None)),  # type: ignore[arg-type]
    ("annotations: max_ranks", lambda: annotations(mf.FusionDefinition(), max_ranks=1)),
    ("inputs_for: fd", lambda: inputs_for([])),  # type: ignore[arg-type]
    ("inputs_for: seed", lambda: inputs_for(mf.FusionDefinition(), -1)),
    *[
        (
            "inputs_for and shapes_for: open sizes: found x (t0): Float[?, 3], needed known ones",
            lambda ask=ask: ask(opened()),
        )
        for ask in (inputs_for, shapes_for)
    ],
    ("assert_same_as_unsharded: expected", lambda: assert_same_as_unsharded(mf.FusionDefinition(), [], [1])),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("text", "ask"), ASKED, ids=[f"{i}-{text}" for i, (text, _) in enumerate(ASKED)])
def test_strategies_that_cannot_draw_fail_where_they_are_made(text: str, ask: Callable[[], Any]) -> None:
    with pytest.raises(mf.ArgumentError) as caught:
        ask()
    assert str(caught.value).startswith(text) and "(at test_check_op.py:" in str(caught.value), str(caught.value)


def test_meshes_have_the_given_number_of_ranks() -> None:
    found = find(meshes(min_ranks=16, max_ranks=16, max_size=4), lambda mesh: mesh.ndim == 3)
    assert found.size == 16


# planted mistakes -------------------------------------------------------------------------------------------


def _with_factor(rule: Rule, place: int, factor: Factor) -> Rule:
    factors = tuple(factor if i == place else f for i, f in enumerate(rule.factors))
    return dataclasses.replace(rule, factors=factors)


def _first(rule: Rule, kind: FactorKind) -> int | None:
    return next((i for i, f in enumerate(rule.factors) if f.kind is kind and f.size > 1), None)


def reduction_as_pass(rule: Rule) -> Rule | None:
    place = _first(rule, FactorKind.REDUCE)
    return None if place is None else _with_factor(rule, place, Factor(rule.factors[place].size))


def other_reduction(rule: Rule) -> Rule | None:
    place = _first(rule, FactorKind.REDUCE)
    if place is None:
        return None
    old = rule.factors[place]
    return _with_factor(rule, place, dataclasses.replace(old, reduce="max" if old.reduce == "sum" else "sum"))


def blocked_as_pass(rule: Rule) -> Rule | None:
    place = _first(rule, FactorKind.BLOCK)
    return None if place is None else _with_factor(rule, place, Factor(rule.factors[place].size))


def pass_as_reduction(rule: Rule) -> Rule | None:
    place = _first(rule, FactorKind.PASS)
    return None if place is None else _with_factor(rule, place, Factor(rule.factors[place].size, FactorKind.REDUCE))


def swapped_in_the_result(rule: Rule) -> Rule | None:
    """The first two dims of the first result exchange their factors."""
    dims = rule.results[0]
    if len(dims) < 2 or dims[0] == dims[1]:
        return None
    return dataclasses.replace(rule, results=((dims[1], dims[0], *dims[2:]), *rule.results[1:]))


def left_out_of_an_operand(rule: Rule) -> Rule | None:
    """The first factor of the last operand is another one than the other tensors'."""
    last = rule.operands[-1] if rule.operands else ()
    if len(rule.operands) < 2 or not last or not last[0]:
        return None
    factors = (*rule.factors, Factor(rule.factors[last[0][0]].size))
    return Rule(factors, (*rule.operands[:-1], ((len(factors) - 1,), *last[1:])), rule.results)


MUTATIONS = [reduction_as_pass, other_reduction, blocked_as_pass, pass_as_reduction, swapped_in_the_result,
             left_out_of_an_operand]  # fmt: skip
MUTANTS = (
    "add", "where", "linear", "matmul", "sum", "max", "cumsum", "argsort", "topk", "var", "permute", "reshape", "slice",
    "pad", "cat", "take_along_axis", "index_select", "embedding_fwd", "scatter", "triu", "grouped_mm", "contract",
    "embedding_bwd", "block_cumsum", "broadcast_in_dim", "rand_like", "iota",
)  # fmt: skip


def _mutants() -> list[tuple[str, Callable[[Rule], Rule | None]]]:
    """Where a mutation changes the rule of the op's first sample."""
    found = []
    for name in MUTANTS:
        rule = OPS[name].rule(make_call(OPS[name], OPS[name].samples()[0]))
        found += [(name, mutation) for mutation in MUTATIONS if mutation(rule) is not None]
    return found


def _mutated(op: mf.OpDef, mutation: Callable[[Rule], Rule | None]) -> mf.OpDef:
    def rule(call: Call) -> Rule:
        return mutation(op.rule(call)) or op.rule(call)

    return dataclasses.replace(op, rule=rule, distributed=None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mutation"), _mutants(), ids=lambda value: getattr(value, "__name__", value))
def test_a_mistake_in_a_factor_rule_is_found(name: str, mutation: Callable[[Rule], Rule | None]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_op(_mutated(OPS[name], mutation), samples=OPS[name].samples()[:1], max_examples=10)
    text = str(caught.value)
    assert text.startswith(f"{name}: ") and f"\n  call       {name}(" in text and "\n  what to do " in text
    assert "factor" in text.splitlines()[0]


PARTIALS = [
    ("exp", mf.Partial.MOVE), ("relu", mf.Partial.JOINT), ("maximum", mf.Partial.EACH), ("pow", mf.Partial.FIRST),
    ("mul", mf.Partial.JOINT), ("add", mf.Partial.EACH), ("truediv", mf.Partial.EACH), ("linear", mf.Partial.JOINT),
    ("sum", mf.Partial.MOVE), ("cumprod", mf.Partial.FIRST), ("pad", mf.Partial.MOVE), ("neg", mf.Partial.MOVE),
    ("scatter", mf.Partial.EACH),
]  # fmt: skip


@pytest.mark.parametrize(("name", "partial"), PARTIALS)
def test_a_mistake_in_a_partial_rule_is_found(name: str, partial: mf.Partial) -> None:
    with pytest.raises(AssertionError, match=f"^{name}: the partial rule does not hold\n") as caught:
        check_op(dataclasses.replace(OPS[name], partial=partial), max_examples=5)
    assert f"partial    {partial.name}" in str(caught.value)


def _wider(call: Call) -> tuple[mf.TensorType, ...]:
    return tuple(t._replace(dtype=DOUBLE) for t in call.types)


def _off_by_one(call: Call) -> Any:
    offsets, fill = OPS["slice"].window(call)  # type: ignore[misc]
    return (offsets[0] + 1, *offsets[1:]), fill


def _backwards(call: Call) -> Any:
    dim, order = OPS["reorder_blocks"].window(call)  # type: ignore[misc]
    return BlockOrder(dim, order[::-1])


def _unshifted(r: Any, call: Call, operands: Any, dim: int, blocks: int) -> Any:
    """Each block's own prefix sums, without the blocks before."""
    return [r.call("block_cumsum", operands[0], dim, blocks)] if blocks else None


def _writing(e: Any) -> str:
    return f"{e.operands[0]}.mul_(2.0)"


OTHERS = {
    "types": ("cumsum", {"infer": _wider}, "the type rule is wrong about result 0"),
    "window": ("slice", {"window": _off_by_one}, "the window is not what the op computes"),
    "order of blocks": ("reorder_blocks", {"window": _backwards}, "the order of blocks is not what the op makes"),
    "chance": (
        "relu",
        {"emit": lambda e: f"{e.operands[0]}.bernoulli(0.5)"},
        "the lowering makes something else of the same operands each time",
    ),
    "parts": ("triu", {"concat_distributive": True}, "it is not the same on the parts of a dim"),
    "order": ("triu", {"order_free": ("arg",)}, "it is not the same in another order"),
    "distributed form": ("cumsum", {"distributed": _unshifted}, "the distributed form is wrong"),
    "derivative": ("tanh", {"vjp": OPS["sigmoid"].vjp}, "the derivative is not that of the lowering"),
    "writes": ("relu", {"emit": _writing}, "the lowering fails on whole operands"),
}


@pytest.mark.parametrize("mistake", OTHERS)
def test_other_mistakes_are_found(mistake: str) -> None:
    name, changes, text = OTHERS[mistake]
    with pytest.raises(AssertionError, match=f"^{name}: {text}\n"):
        check_op(dataclasses.replace(OPS[name], **changes), max_examples=5)


def test_an_op_without_samples_cannot_be_checked() -> None:
    with pytest.raises(AssertionError, match="scaled_product: no samples\n"):
        check_op(scaled_product, samples=[])


def test_a_report_says_all_that_is_needed_and_is_the_smallest() -> None:
    wrong = _mutated(OPS["linear"], reduction_as_pass)
    with pytest.raises(AssertionError) as caught:
        check_op(wrong, samples=[mf.Sample((tensor(4, 6), tensor(3, 6)))])
    *lines, advice = str(caught.value).splitlines()
    assert lines == REPORT.splitlines()
    assert advice.startswith("  what to do The rule says that the op works on parts of c alone. If it needs")


REPORT = """\
linear: the factor rule does not hold
  call       linear(input: Double[1, 2], weight: Double[1, 2], bias=None) -> Double[1, 1]
  rule       a c, b c -> a b
  mesh       DeviceMesh((2,), ('x',))
  sharded    factor c (pass-through, size 2; dim 1 of input, dim 1 of weight) as [x]
  operands   [-, x], [-, x]
  results    [-, -]
  rank       1
  wrong      element [0, 0] is -0.166794, expected -3.5243 (1 of 1 differ)
"""


# the page ---------------------------------------------------------------------------------------------------


def _printed(code: str, folder: Path) -> str:
    (folder / "page.py").write_text(code)
    done = forked.finished([str(folder / "page.py")], base_environment(), folder, 280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_page_s_code_prints_what_the_page_shows(place: int, tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    codes = [i for i, (kind, _) in enumerate(blocks) if kind == "python"]
    code, follows = blocks[codes[place]][1], blocks[codes[place] + 1 :][:1]
    shown = follows[0][1] if follows and follows[0][0] == "" else ""
    assert len(code.splitlines()) <= 40
    assert _printed(code, tmp_path) == shown
