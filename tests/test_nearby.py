"""Plans taken over from shapes nearby: numbers as torch computes them, and nothing taken over that does not fit.

Programs of the table take plans over in test_bills.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

import meshfuse as mf
from interpreter import has_reference, interpret
from meshfuse.compiler import CompiledProgram, compile_definition
from meshfuse.executor.arguments import Inputs
from meshfuse.plans import shape_reuse as nearby
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for

WORLD = mf.DeviceMesh([0])
GRID = mf.DeviceMesh((2, 2), ("dp", "tp"))
Define = Callable[[int], mf.FusionDefinition]


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with no plan known."""
    monkeypatch.setattr("meshfuse.compiler.PLANS", nearby.Plans())
    yield


def compiled(fd: mf.FusionDefinition, shapes: Sequence[Sequence[int]] | None = None) -> CompiledProgram:
    """The program of an execution with inputs of these shapes, which `fd.simulate` then runs."""
    tensors = fd.recording.input_tensors()
    given = [fd.recording.tensors[i].type.shape for i in tensors] if shapes is None else shapes
    sizes = {i: tuple(shape) for i, shape in zip(tensors, given, strict=True)}
    key = fd._programs.key(Inputs({}, {}, torch.device("cpu")), sizes, WORLD)
    fd._programs.compiled[key] = compile_definition(fd.recording, sizes, {}, WORLD, near_factor=2.0)
    return fd._programs.compiled[key]


# numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_random_programs_of_doubled_sizes_are_what_torch_computes() -> None:
    taken = []

    @settings(max_examples=80)
    @given(definitions().flatmap(annotations))
    def check(fd: mf.FusionDefinition) -> None:
        if len(fd.recording.inputs) > len(fd.recording.input_tensors()) or not has_reference(fd):
            return  # To filter these out is too much for Hypothesis.
        small = inputs_for(fd)
        large = [t.repeat([2 if n > 1 else 1 for n in t.shape]) for t in small]
        leave_open(fd)
        try:
            compiled(fd, [t.shape for t in small])
            taken.append(compiled(fd, [t.shape for t in large]).taken_from is not None)
        except mf.DefinitionError:
            return  # The program says a size that it has now another of.
        assert_same_as_unsharded(fd, large, interpret(fd, large))

    for _ in range(4):  # How many of the programs drawn give a reference is left to chance.
        check()
        if sum(taken) >= 20:
            break
    assert sum(taken) >= 20


def leave_open(fd: mf.FusionDefinition) -> None:
    """Have the definition not say the sizes of its tensors."""
    for i, made in enumerate(fd.recording.tensors):
        opened = made.type._replace(shape=tuple(1 if n == 1 else -1 for n in made.type.shape))
        fd.recording.tensors[i] = dataclasses.replace(made, type=opened)


# what fits --------------------------------------------------------------------------------------------------------


def rows(size: int, *, causal: bool = True, spec: Any = ("dp", None, None), dtype: Any = mf.DataType.Double):
    """Attention and a projection of so many rows."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 8, size, 4], dtype=dtype)
        w = fd.define_tensor([6, 4], dtype=dtype)
        out, *_ = fd.ops.sdpfa_fwd(x, x, x, is_causal=causal)
        fd.add_output(fd.ops.linear(out, w))
        fd.mesh_split(x, GRID, [*spec, None])
        fd.mesh_split(w, GRID, ["tp", None])
    return fd


def test_a_size_within_the_factor_takes_the_plan_over() -> None:
    first = compiled(rows(16))
    for size in (8, 17, 32):
        again = compiled(rows(size))
        assert again.taken_from is first.graph
        assert again.sharded.shardings == first.sharded.shardings


def test_the_same_sizes_again_have_the_plan_that_was_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(rows(16))
    compiled(rows(17))
    monkeypatch.setattr("meshfuse.compiler.planned", lambda *_: pytest.fail("planned again"))
    again = compiled(rows(16))
    assert again.taken_from is None
    assert str(again.sharded) == str(first.sharded)


def cut(starts: Sequence[int]) -> mf.FusionDefinition:
    """Halves of two tensors, from these rows on."""
    with mf.FusionDefinition() as fd:
        for start in starts:
            x = fd.define_tensor([16, 4], dtype=mf.DataType.Double)
            fd.add_output(fd.ops.slice(x, [start, 0], [start + 8, 4]) * 2.0)
            fd.mesh_split(x, GRID, ["tp", None])
    return fd


def test_other_bounds_are_other_sizes() -> None:
    """The plan is another's for them, even where all tensors have the shapes that they had."""
    compiled(cut([2, 4]))
    fd = cut([4, 4])
    assert compiled(fd).taken_from is not None
    x, y = (torch.randn(16, 4, dtype=torch.float64) for _ in range(2))
    for found, right in zip(fd.simulate([x, y]), (x[4:12] * 2, y[4:12] * 2), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    "other",
    [
        lambda: rows(33), lambda: rows(7), lambda: rows(1), lambda: rows(16, causal=False),
        lambda: rows(16, spec=("dp", "tp", None)), lambda: rows(16, dtype=mf.DataType.Float),
    ],
    ids=["too large", "too small", "one", "another argument", "another annotation", "another dtype"],
)  # fmt: skip
def test_another_program_takes_nothing_over(other: Callable[[], mf.FusionDefinition]) -> None:
    compiled(rows(16))
    assert compiled(other()).taken_from is None


def totals(unread: int) -> mf.FusionDefinition:
    """Running totals, beside so many ops that no output needs."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([16, 4], dtype=mf.DataType.Double)
        fd.add_output(fd.ops.cumsum(x, 0))
        for _ in range(unread):
            fd.ops.exp(x)
        fd.mesh_split(x, GRID, ["tp", None])
    return fd


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0)])
def test_a_program_beside_other_ops_that_no_output_needs_is_another(first: int, then: int) -> None:
    """What forms for sharded dims make is numbered behind all tensors of the definition."""
    compiled(totals(first))
    fd = totals(then)
    assert compiled(fd).taken_from is None
    x = torch.arange(64, dtype=torch.float64).reshape(16, 4)
    assert torch.equal(fd.simulate([x])[0], x.cumsum(0))


def test_a_dim_that_splits_less_evenly_takes_nothing_over() -> None:
    compiled(rows(16, spec=("dp", None, "tp")))
    assert compiled(rows(18, spec=("dp", None, "tp"))).taken_from is not None
    assert compiled(rows(17, spec=("dp", None, "tp"))).taken_from is None


def centred(width: int, divisor: int) -> mf.FusionDefinition:
    """What looks like a normalisation by the width, for links on which its sums are worth merging."""
    mesh = mf.DeviceMesh((4,), ("tp",), links="laptop")
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([256, width], dtype=mf.DataType.Double)
        mean = fd.ops.sum(x, [1], True) / divisor
        off = x - mean
        fd.add_output(off * fd.ops.rsqrt(fd.ops.sum(off * off, [1], True) + 1.0))
        fd.mesh_split(x, mesh, [None, "tp"])
    return fd


@pytest.mark.parametrize("divisor", [512, 768])
def test_moments_stay_merged_only_where_the_number_is_that_of_the_terms(divisor: int) -> None:
    first = compiled(centred(512, 512))
    assert any(node.name == "block_merge" for node in first.graph.nodes)
    fd = centred(768, divisor)
    assert (compiled(fd).taken_from is not None) == (divisor == 768)
    x = torch.randn(256, 768, dtype=torch.float64)
    off = x - x.sum(1, True) / divisor
    torch.testing.assert_close(fd.simulate([x])[0], off / ((off * off).sum(1, True) + 1).sqrt())


def shifted(size: int, by: float) -> mf.FusionDefinition:
    """A sum over ranks with a number added: the same op, carried through it only where the number may be."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([size, 8], dtype=mf.DataType.Double)
        w = fd.define_tensor([6, 8], dtype=mf.DataType.Double)
        fd.add_output(fd.ops.pad(fd.ops.linear(x, w), [1, 1, 0, 0], by) * by)
        fd.mesh_split(x, GRID, [None, "tp"])
        fd.mesh_split(w, GRID, [None, "tp"])
    return fd


@pytest.mark.parametrize(("before", "after"), [(0.0, 2.0), (2.0, 0.0), (2.0, 3.0)])
def test_other_numbers_beside_tensors(before: float, after: float) -> None:
    compiled(shifted(8, before))
    fd = shifted(12, after)
    compiled(fd)
    x, w = torch.randn(12, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(fd.simulate([x, w])[0], F.pad(F.linear(x, w), [1, 1], value=after) * after)


def test_forms_for_sharded_dims_are_written_again() -> None:
    def scanned(size: int) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([size, 3], dtype=mf.DataType.Double)
            fd.add_output(fd.ops.cumsum(x, 0))
            fd.mesh_split(x, GRID, [("dp", "tp"), None])
        return fd

    first, fd = compiled(scanned(16)), scanned(24)
    assert len(first.graph.nodes) > 1
    assert compiled(fd).taken_from is first.taken_from or len(compiled(fd).graph.nodes) == len(first.graph.nodes)
    x = torch.randn(24, 3, dtype=torch.float64)
    torch.testing.assert_close(fd.simulate([x])[0], x.cumsum(0))


def test_windows_that_were_joined_are_of_one_size() -> None:
    def blurred(size: int) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([size, 3], dtype=mf.DataType.Double)
            padded = fd.ops.pad(x, [0, 0, 1, 1])
            fd.add_output(fd.ops.slice(padded, [0, 0], [size, 3]) + fd.ops.slice(padded, [2, 0], [size + 2, 3]))
            fd.mesh_split(x, GRID, [("dp", "tp"), None])
        return fd

    assert compiled(blurred(16)).graph.rewritings
    fd = blurred(24)
    assert compiled(fd).taken_from is None
    x = torch.randn(24, 3, dtype=torch.float64)
    right = F.pad(x, [0, 0, 1, 1])
    torch.testing.assert_close(fd.simulate([x])[0], right[:24] + right[2:])


# what is kept -----------------------------------------------------------------------------------------------------


def test_asking_gets_the_plan_of_a_search() -> None:
    compiled(rows(16))
    assert rows(24).compile().taken_from is None


def test_so_many_ops_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "_MOST_OPS", 6)
    compiled(rows(16))
    compiled(shifted(8, 2.0))
    assert compiled(rows(24)).taken_from is not None
    for number in range(2, 6):
        compiled(centred(16 * number, 5))
    assert compiled(rows(24)).taken_from is None


def test_explain_says_whose_plan_it_is() -> None:
    compiled(rows(16))
    fd = rows(24)
    compiled(fd)
    said = r"taken over from the plan for x \(t0\) \[4, 8, 16, 4\], w \(t1\) \[6, 4\]"
    assert re.search(said, fd.explain())


@pytest.mark.parametrize("text", ["abc", "0.5", "nan", "-1"])
def test_a_factor_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_NEAR", text)
    with pytest.raises(mf.DefinitionError, match=f"MESHFUSE_NEAR: found '{text}'.*a factor, 1 or more"):
        nearby.nearness(None)
