"""Moments over a sharded dim by one collective: as right as by two, taken where it is quicker, and left where not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse import compiler
from meshfuse.compiler import CompiledProgram
from meshfuse.lowering.instructions import Collective
from meshfuse.plans import plan_cache

# Starting a message takes as long as a hundred bytes.
LINK = mf.Link(1e9, 1e-7)
TP = {"tp": LINK}
# The largest relative change of a float32 by rounding it.
ROUNDING = 2.0**-24


def normed(
    shape: Sequence[int], mesh: mf.DeviceMesh, spec: Sequence[Any], last: int = 1, grad: bool = False
) -> mf.FusionDefinition:
    """layer_norm over the last dims; with `grad` of its operand's gradient, too."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape))
        y = fd.ops.layer_norm(x, list(shape[-last:]))
        fd.add_output(y)
        fd.mesh_split(x, mesh, list(spec))
        fd.mesh_split(y, mesh, list(spec))
        if grad:
            seed = fd.define_tensor(list(shape))
            fd.mesh_split(seed, mesh, list(spec))
            for made in fd.grad([y], [x], [seed]):
                fd.add_output(made)
    return fd


def calls(compiled: CompiledProgram) -> list[str]:
    """The kinds of the first rank's collectives."""
    return [i.kind for i in compiled.host_program(0).instructions if isinstance(i, Collective)]


def names(compiled: CompiledProgram) -> list[str]:
    return [node.name for node in compiled.graph.nodes]


SPECS = st.sampled_from([[None, "a"], ["a", "b"], [None, ["a", "b"]], ["b", "a"]])


@pytest.mark.slow
@settings(max_examples=40)
@given(st.tuples(st.integers(1, 5), st.integers(1, 13)), st.integers(1, 4), st.integers(1, 3), SPECS, st.booleans())
def test_the_results_are_torchs_on_any_mesh(shape, a, b, spec, grad):
    """Blocks may be short or empty, lie over two axes, and rows may be sharded beside them."""
    mesh = mf.DeviceMesh((a, b), ("a", "b"), links={"a": LINK, "b": LINK})
    fd = normed(shape, mesh, spec, grad=grad)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    wide, seed = x.double().requires_grad_(), torch.ones(shape) + x
    y = F.layer_norm(wide, shape[-1:])
    expected = [y, *torch.autograd.grad(y, [wide], seed.double())] if grad else [y]
    found = fd.simulate([x, seed] if grad else [x], check_replicas=True)
    for mine, right in zip(found, expected, strict=True):
        # What is the same everywhere is divided by the square root of eps.
        torch.testing.assert_close(mine.double(), right.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("ranks", "merged"), [(2, True), (3, True), (4, True), (3, False), (4, False)])
@pytest.mark.parametrize("width", [64, 67])
def test_moments_of_numbers_far_from_zero_keep_their_digits(ranks, width, merged):
    """Of a mean of 10 000 deviations: the results change no more than by another last digit of every number."""
    mesh = mf.DeviceMesh((ranks,), ("tp",), links=TP if merged else None)
    shift, shape = 1e4, (16, width * ranks)
    fd = normed(shape, mesh, [None, "tp"])
    assert ("block_merge" in names(fd.compile(shape))) == merged
    # The blocks' own means lie apart, too.
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + torch.arange(ranks).repeat_interleave(width)
    x = x + shift
    (found,) = fd.simulate([x], check_replicas=True)
    right = F.layer_norm(x.double(), shape[-1:])
    assert (found - right).abs().max() < 4 * shift * ROUNDING
    # The form with one sum of two, which has no digit left.
    mean, square = x.sum(-1, keepdim=True) / shape[1], (x * x).sum(-1, keepdim=True) / shape[1]
    naive = (x - mean) * torch.rsqrt((square - mean * mean).clamp(min=0) + 1e-5)
    assert (naive - right).abs().max() > 0.1


@pytest.mark.parametrize(("ranks", "links"), [(3, None), (8, None), (2, "laptop"), (4, "laptop")])
def test_one_collective_is_taken_where_it_is_quicker(ranks, links):
    """By bytes alone two reductions are better over more than two ranks."""
    shape = (256, 1024)
    mesh = mf.DeviceMesh((ranks,), ("tp",), links=links)
    compiled = normed(shape, mesh, [None, "tp"]).compile(shape)
    assert (calls(compiled) == ["all_gather"]) == bool(links)
    fd = normed(shape, mesh, [None, "tp"])
    two = 2 * 4 * shape[0] * 2 * (ranks - 1) / ranks
    assert fd.bill().total == (2 * 4 * shape[0] * (ranks - 1) if links else two)


def test_large_statistics_stay_two_reductions():
    """On the same links, where bytes take longer than starts; each may be reduced in parts."""
    mesh, shape = mf.DeviceMesh((8,), ("tp",), links="laptop"), (1 << 20, 64)
    fd = normed(shape, mesh, [None, "tp"])
    assert "block_merge" not in names(fd.compile(shape))
    assert fd.bill().total == 2 * (2 * 7 / 8 * shape[0] * 4)


@pytest.mark.parametrize("what", ["the sum", "the squares", "nothing"])
def test_what_the_user_names_is_made(what):
    """An output in the middle is the plain op's; the mean and the sum of squares may be outputs."""
    mesh, shape = mf.DeviceMesh((4,), ("tp",), links=TP), (16, 64)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape))
        total = fd.ops.sum(x, [1], keepdim=True)
        mean = total / shape[1]
        centred = x - mean
        squares = centred * centred
        spread = fd.ops.sum(squares, [1], keepdim=True)
        for made in {"the sum": [total], "the squares": [squares], "nothing": []}[what] + [mean, spread]:
            fd.add_output(made)
        fd.mesh_split(x, mesh, [None, "tp"])
        for made in (mean, spread):
            fd.mesh_split(made, mesh, [None, None])
    assert ("block_merge" in names(fd.compile(shape))) == (what == "nothing")
    x = torch.randn(shape)
    *_, mean, spread = fd.simulate([x], check_replicas=True)
    torch.testing.assert_close(mean, x.mean(1, keepdim=True))
    torch.testing.assert_close(spread, x.var(1, correction=0, keepdim=True) * shape[1])


@pytest.mark.parametrize("divisor", [15.0, 17])
def test_another_divisor_makes_no_mean(divisor):
    mesh, shape = mf.DeviceMesh((4,), ("tp",), links=TP), (16, 64)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape))
        centred = x - fd.ops.sum(x, [1], keepdim=True) / divisor
        fd.add_output(fd.ops.sum(centred * centred, [1], keepdim=True))
        fd.mesh_split(x, mesh, [None, "tp"])
    assert "block_merge" not in names(fd.compile(shape))
    x = torch.randn(shape)
    torch.testing.assert_close(
        fd.simulate([x])[0], (x - x.sum(1, keepdim=True) / divisor).square().sum(1, keepdim=True)
    )


def test_all_norms_of_a_model_are_merged_and_over_several_dims():
    """Each layer's, with rows sharded beside it and a second dim in the norm."""
    mesh, shape = mf.DeviceMesh((2, 2), ("dp", "tp"), links={"dp": LINK, "tp": LINK}), (16, 3, 40)
    with mf.FusionDefinition() as fd:
        y = x = fd.define_tensor(list(shape))
        for _ in range(3):
            y = fd.ops.tanh(fd.ops.layer_norm(y, list(shape[1:])))
        fd.add_output(y)
        for t in (x, y):
            fd.mesh_split(t, mesh, ["dp", None, "tp"])
    assert names(fd.compile(shape)).count("block_merge") == 3
    x = torch.randn(shape)
    right = x.double()
    for _ in range(3):
        right = torch.tanh(F.layer_norm(right, shape[1:]))
    torch.testing.assert_close(fd.simulate([x], check_replicas=True)[0].double(), right, rtol=1e-4, atol=1e-4)


def test_a_merged_plan_comes_back_from_the_disk(monkeypatch):
    mesh, shape = mf.DeviceMesh((4,), ("tp",), links=TP), (16, 64)
    kept = []

    def read_back(graph, world, plan, _how):
        kept.append(plan())
        return plan_cache.unpacked(plan_cache.packed(kept[-1]), graph)

    monkeypatch.setattr(compiler, "planned", read_back)
    compiled = normed(shape, mesh, [None, "tp"], grad=True).compile(shape, shape)
    assert "block_merge" in names(compiled)
    assert str(compiled.planned) == str(kept[0]) and compiled.planned is not kept[0]
