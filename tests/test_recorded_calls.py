"""`loss.backward()` through calls of a definition, on simulated ranks and alone; against torch without shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse import programs

DOUBLE = mf.DataType.Double
MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed), dtype=torch.float64)


def defined(rows: int = -1, hidden: int = 20) -> mf.FusionDefinition:
    """Two products with a loss and the second's result as outputs."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([rows, 12], dtype=DOUBLE)
        w1, w2 = fd.define_tensor([hidden, 12], dtype=DOUBLE), fd.define_tensor([12, hidden], dtype=DOUBLE)
        y = fd.ops.linear(fd.ops.tanh(fd.ops.linear(x, w1)), w2)
        fd.add_output(fd.ops.mean(fd.ops.mul(y, y)))
        fd.add_output(y)
        fd.mesh_split(x, MESH, ["dp", None])
        fd.mesh_split(w1, MESH, ["tp", None])
        fd.mesh_split(w2, MESH, [None, "tp"])
    return fd


def reference(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.linear(F.linear(x, w1).tanh(), w2)
    return y.square().mean(), y


def leaves(rows: int = 8, hidden: int = 20, needs: Sequence[int] = (0, 1, 2)) -> list[torch.Tensor]:
    made = [numbers(rows, 12), numbers(hidden, 12), numbers(12, hidden)]
    return [t.requires_grad_(place in needs) for place, t in enumerate(made)]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("rows", "hidden"), [(8, 20), (7, 21)])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_gradients_are_those_of_torch(rows: int, hidden: int, which: tuple[int, ...]) -> None:
    found, wanted = leaves(rows, hidden), leaves(rows, hidden)
    for call, tensors in ((defined(hidden=hidden), found), (reference, wanted)):
        outputs = call(*tensors)
        sum([outputs[i].sin().sum() for i in which], torch.zeros((), dtype=torch.float64)).backward()
    for a, b in zip(found, wanted, strict=True):
        close(a.grad, b.grad)


def test_only_what_needs_a_gradient_gets_one_and_gradients_add_up() -> None:
    fd, tensors, wanted = defined(), leaves(needs=[1]), leaves(needs=[1])
    for _ in range(2):
        fd(*tensors)[0].backward()
        reference(*wanted)[0].backward()
    assert tensors[0].grad is None and tensors[2].grad is None
    close(tensors[1].grad, wanted[1].grad)


def test_without_a_gradient_nothing_is_recorded_or_planned_for_it() -> None:
    fd = defined()
    with torch.no_grad():
        assert not any(out.requires_grad for out in fd(*leaves()))
    assert not any(out.requires_grad for out in fd(*leaves(needs=[])))
    with pytest.raises(mf.DefinitionError, match="no backward of this definition has run yet: needed a call with"):
        fd.latest_backward()


def test_later_calls_of_the_same_shapes_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    real = programs.compile_definition
    monkeypatch.setattr(programs, "compile_definition", lambda *a, **k: planned.append(a[1]) or real(*a, **k))
    fd = defined()
    for _ in range(3):
        fd(*leaves())[0].backward()
    assert len(planned) == 2  # the forward, and the backward
    fd(*leaves(rows=6))[0].backward()
    assert len(planned) == 4


def test_a_training_loop_with_torch_s_optimiser_is_that_of_torch() -> None:
    fd = defined()
    losses = []
    for call in (fd, reference):
        tensors = leaves(needs=[1, 2])
        optimizer = torch.optim.AdamW(tensors[1:], lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(*tensors)[0]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(tensors[1:], 0.1)
            optimizer.step()
        losses.append(loss.detach())
    close(*losses)
    assert losses[0] < reference(*leaves())[0]
    assert fd.latest_backward().bill().total > 0


def test_gradients_of_gradients() -> None:
    found, wanted = leaves(), leaves()
    grads = []
    for call, tensors in ((defined(), found), (reference, wanted)):
        (first,) = torch.autograd.grad(call(*tensors)[0], tensors[1], create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), tensors))
    for a, b in zip(*grads, strict=True):
        close(a, b)


def test_the_backward_draws_what_its_forward_has_drawn() -> None:
    with mf.FusionDefinition(seed=3) as fd:
        x = fd.define_tensor([6, 8], dtype=DOUBLE)
        fd.add_output(fd.ops.dropout(x, 0.5))
        fd.mesh_split(x, MESH, ["dp", "tp"])
    x = torch.ones(6, 8, dtype=torch.float64, requires_grad=True)
    calls = [fd(x)[0] for _ in range(3)]
    assert not torch.equal(calls[0], calls[1])
    for out in reversed(calls):
        (found,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(found, out.detach()) and 0 < int((found == 0).sum()) < 48


def test_numbers_tensors_of_no_mesh_and_outputs_that_are_inputs() -> None:
    with mf.FusionDefinition() as fd:
        x, s, y = fd.define_tensor([3], dtype=DOUBLE), fd.define_scalar(), fd.define_tensor([3], dtype=DOUBLE)
        made = fd.ops.mul(fd.ops.mul(x, s), y)
        for out in (made, x, made, fd.ops.gt(x, 0.0), fd.stop_gradient(fd.ops.exp(y)), fd.ops.mul(y, 2.0)):
            fd.add_output(out)
    a, b = numbers(3).requires_grad_(), numbers(3, seed=1)
    for outputs in (fd(a, 2.5, b), fd.execute([a, 2.5, b])):
        assert [out.requires_grad for out in outputs] == [True, True, True, False, False, False]
        (found,) = torch.autograd.grad(outputs[0].sum() + (outputs[1] * 3).sum() + outputs[2][0], a)
        close(found, 2.5 * b * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64) + 3)
    with pytest.raises(RuntimeError, match="does not require grad"):
        fd(a, 2.5, b)[5].sum().backward()


def test_a_missing_derivative_is_an_error_of_the_backward_alone() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([3])
        fd.add_output(fd.ops.lgamma(x))
    (out,) = fd(torch.ones(3, requires_grad=True))
    with pytest.raises(mf.DefinitionError, match=r"lgamma has no derivative here.*\(at test_recorded_calls.py:"):
        out.sum().backward()


def test_an_error_of_the_backward_names_the_line_that_asked_for_it() -> None:
    """Frames of torch lie between the user's line and the backward."""
    fd = mf.FusionDefinition(max_wire=1.0)
    x = fd.define_tensor([4, 4])
    fd.mesh_split(x, MESH, ["dp", "tp"])
    fd.add_output(fd.ops.cumsum(x, 0))
    with pytest.warns(mf.PlanWarning):
        loss = fd(torch.ones(4, 4, requires_grad=True))[0].sum()
    with pytest.warns(mf.PlanWarning) as caught:
        loss.backward()
    assert {warning.filename for warning in caught} == {__file__}
