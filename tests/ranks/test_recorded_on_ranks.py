"""`loss.backward()` through `fd.execute` and `fd(...)` on gloo ranks: plain shards, DTensors and whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_dtensor import distributed, numbers, torch_mesh

import meshfuse as mf

pytestmark = pytest.mark.ranks

DOUBLE = mf.DataType.Double
AXES = ("dp", "tp")


def defined(rows: int) -> tuple[mf.FusionDefinition, list[Any]]:
    mesh = mf.DeviceMesh((2, 2), AXES)
    with mf.FusionDefinition() as fd:
        x, w, b = (fd.define_tensor(shape, dtype=DOUBLE) for shape in ([rows, 8], [12, 8], [12]))
        y = fd.ops.tanh(fd.ops.linear(x, w, b))
        fd.add_output(y)
        fd.add_output(fd.ops.mean(fd.ops.mul(y, y)))
        for tensor, spec in ((x, ["dp", None]), (w, ["tp", None]), (y, ["dp", "tp"])):
            fd.mesh_split(tensor, mesh, spec)
    return fd, [x, w, b]


def leaves(rows: int) -> list[torch.Tensor]:
    return [numbers(rows, 8), numbers(12, 8), numbers(12)]


def wanted(rows: int) -> list[torch.Tensor]:
    """The gradients of the sum of cosines, and of the mean of squares, of one layer."""
    tensors = [t.requires_grad_() for t in leaves(rows)]
    y = F.linear(*tensors).tanh()
    return list(torch.autograd.grad(y.cos().sum() + 3 * y.square().mean(), tensors))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def on_rank_shards(rows: int) -> tuple[bool, bool]:
    fd, views = defined(rows)
    shards = [mf.shard_tensor(t, v).clone().requires_grad_() for t, v in zip(leaves(rows), views, strict=True)]
    for _ in range(2):
        y, mean = fd.execute(shards)
        (y.cos().sum() + 3 * mean).backward()
    for shard, view, whole in zip(shards, views, wanted(rows), strict=True):
        close(shard.grad, 2 * mf.shard_tensor(whole, view))
    made = len(fd._programs.compiled), len(fd.latest_backward()._programs.compiled)
    return made == (1, 1), not shards[0].grad.requires_grad


@pytest.mark.parametrize("rows", [6, 5])
def test_shards_get_the_gradients_of_the_sum_over_ranks(ranks4: Any, rows: int) -> None:
    assert ranks4.run(on_rank_shards, rows) == [(True, True)] * 4


def on_rank_dtensors(rows: int, plain_bias: bool) -> list[str]:
    mesh = torch_mesh((2, 2), AXES)
    tensors = [distributed(t, mesh, p) for t, p in zip(leaves(rows), ("0R", "R0", "RR"), strict=True)]
    tensors[2] = leaves(rows)[2] if plain_bias else tensors[2]
    tensors = [t.requires_grad_() for t in tensors]
    fd, _ = defined(rows)
    y, mean = fd.execute(tensors)
    (y.cos().sum() + 3 * mean).backward()  # the sum's gradient comes as a partial or replicated DTensor
    for tensor, whole in zip(tensors, wanted(rows), strict=True):
        is_plain = not hasattr(tensor, "placements")
        close(tensor.grad if is_plain else tensor.grad.full_tensor(), whole)
        assert is_plain or tensor.grad.placements == tensor.placements
    return [str(type(t.grad).__name__) for t in tensors]


@pytest.mark.parametrize(("rows", "plain_bias"), [(6, False), (5, False), (6, True)])
def test_dtensors_get_dtensors_in_their_placements(ranks4: Any, rows: int, plain_bias: bool) -> None:
    kinds = ["DTensor", "DTensor", "Tensor" if plain_bias else "DTensor"]
    assert ranks4.run(on_rank_dtensors, rows, plain_bias) == [kinds] * 4


def on_rank_whole(rows: int) -> None:
    fd, _ = defined(rows)
    tensors = [t.requires_grad_() for t in leaves(rows)]
    y, mean = fd(*tensors)
    (y.cos().sum() + 3 * mean).backward()
    for tensor, whole in zip(tensors, wanted(rows), strict=True):
        close(tensor.grad, whole)


def test_whole_tensors_get_whole_gradients(ranks4: Any) -> None:
    ranks4.run(on_rank_whole, 5)


def on_rank_two_meshes() -> str:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4], dtype=DOUBLE)
        y = fd.ops.set(fd.ops.mul(x, 2.0))
        fd.add_output(y)
        fd.mesh_split(x, mf.DeviceMesh([0, 1], ("d",)), ["d"])
        fd.mesh_split(y, mf.DeviceMesh([2, 3], ("d",)), ["d"])
    (out,) = fd.execute([torch.ones(2, dtype=torch.float64, requires_grad=True)])
    try:
        return "no part" if out is None else str(out.sum().backward())
    except mf.DefinitionError as error:
        return str(error)


def test_an_output_that_some_ranks_lack_is_an_error_and_no_wait(ranks4: Any) -> None:
    found = ranks4.run(on_rank_two_meshes)
    assert found[:2] == ["no part"] * 2
    for text in found[2:]:
        assert "backward through output y (t2): found one on" in text and "Write fd.grad in the definition." in text


def trained(call: Any, params: list[Any], x: Any, steps: int = 3) -> list[torch.Tensor]:
    """Losses of a few steps with a norm of gradients that is bounded, and the parameters after them, whole."""
    optimizer, losses = torch.optim.AdamW(params, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call([x, *params])[1]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.05)
        optimizer.step()
        losses += [loss.detach(), norm]
    return [t.full_tensor() if hasattr(t, "placements") else t.detach() for t in (*losses, *params)]


def layer(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    y = F.linear(*tensors).tanh()
    return [y, y.square().mean()]


def on_rank_trained() -> None:
    fd, (x, w, b) = defined(6)
    whole = leaves(6)
    params = mf.optim_params({w: whole[1], b: whole[2]})
    expected = trained(layer, [t.clone().requires_grad_() for t in whole[1:]], whole[0])
    close(trained(fd.execute, params, mf.shard_tensor(whole[0], x)), expected)
    assert torch.equal(whole[1], leaves(6)[1])  # the script's own tensors stay


def test_torch_s_optimiser_trains_the_parameters_of_a_definition(ranks4: Any) -> None:
    ranks4.run(on_rank_trained)


def error_of(tensors: Any) -> str:
    try:
        return f"no error: {mf.optim_params(tensors)}"
    except ValueError as error:
        return str(error)


def annotated(mesh: mf.DeviceMesh | None, spec: list[Any]) -> dict[Any, torch.Tensor]:
    fd = mf.FusionDefinition()
    t = fd.define_tensor([8])
    if mesh is not None:
        fd.mesh_split(t, mesh, spec)
    return {t: torch.ones(8)}


def on_rank_refused() -> list[str]:
    one, two = annotated(None, []), annotated(mf.DeviceMesh([0, 1], ("d",)), ["d"])
    part = annotated(mf.DeviceMesh((4,), ("d",)), [[mf.Split(2, "d")]])
    return [error_of(given) for given in (one, two, part, {}, dict.fromkeys(one, 3), {**one, **two}, [*one])]


def test_what_can_be_no_parameters_is_an_error(ranks4: Any) -> None:
    needed = [
        "nothing is annotated: found no mesh", "a mesh of other ranks than the job has: found", "cannot be a DTensor",
        *["needed a dict of the inputs of one definition to their tensors. Pass {w1: torch.randn(...), w2: ...}."] * 4,
    ]  # fmt: skip
    for found in ranks4.run(on_rank_refused):
        assert len(found) == len(needed) and all(a in b for a, b in zip(needed, found, strict=True)), found
