"""Rows that go from tokens to experts and back: numbers, gradients and bytes on simulated ranks, beside plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.errors import SourceLine
from meshfuse.executor import graphs
from meshfuse.executor.arguments import Inputs

WIDTH, INNER = 8, 16
Tensors = tuple[torch.Tensor, ...]


def mesh(**axes: int) -> mf.DeviceMesh:
    return mf.DeviceMesh(tuple(axes.values()), tuple(axes), links="bytes")


def layer(
    mesh: mf.DeviceMesh, tokens: Any, inner: Any, sizes: tuple[int, int, int], width: int = WIDTH,
    dtype: torch.dtype = torch.float64,
) -> mf.FusionDefinition:  # fmt: skip
    """A layer of experts and its gradients; tokens and experts are cut as they say, experts along ep.

    sizes: of tokens, experts and slots. The operands are x, experts, scores, and two weights.
    """
    count, experts, slots = sizes
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([count, width], dtype=dtype)
        chosen = fd.define_tensor([count, slots], dtype=torch.int64)
        scores = fd.define_tensor([count, slots], dtype=dtype)
        up, down = (fd.define_tensor([experts, width, INNER], dtype=dtype) for _ in range(2))
        rows, expert = fd.ops.moe_dispatch(x, chosen, experts)
        made = fd.ops.moe_linear(fd.ops.silu(fd.ops.moe_linear(rows, expert, up)), expert, down, transposed=True)
        y = fd.ops.moe_combine(made, chosen, scores)
        gradients = fd.grad(fd.ops.sum(fd.ops.mul(y, y), [0, 1]), [x, scores, up, down])
        for tensor in (x, chosen, scores, y, gradients[0], gradients[1]):
            fd.mesh_split(tensor, mesh, [tokens, None])
        for tensor in (up, down, *gradients[2:]):
            fd.mesh_split(tensor, mesh, ["ep", None, inner], stationary=tensor in (up, down))
        for tensor in (y, *gradients):
            fd.add_output(tensor)
    return fd


def operands(
    routes: str, sizes: tuple[int, int, int], width: int = WIDTH, dtype: torch.dtype = torch.float64
) -> Tensors:
    count, experts, slots = sizes
    made = torch.Generator().manual_seed(1)
    each = {
        "any": lambda: torch.randperm(experts, generator=made)[:slots],
        "all to the first": lambda: torch.arange(slots),
        "all to the last": lambda: experts - 1 - torch.arange(slots),
    }[routes]
    chosen = torch.stack([each() for _ in range(count)])
    floats = [(count, width), (count, slots), (experts, width, INNER), (experts, width, INNER)]
    x, scores, up, down = (torch.randn(shape, generator=made, dtype=dtype) for shape in floats)
    return x, chosen, scores, up, down


def in_torch(x: torch.Tensor, chosen: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients, every row with the weights of its own."""
    x, scores, up, down = (t.clone().requires_grad_() for t in (x, *rest))
    inner = F.silu(torch.einsum("tw,tswi->tsi", x, up[chosen]))
    y = (torch.einsum("tsi,tswi->tsw", inner, down[chosen]) * scores[..., None]).sum(1)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, scores, up, down])]


CASES: dict[str, tuple[mf.DeviceMesh, Any, Any, tuple[int, int, int]]] = {
    "tokens and experts": (mesh(ep=4), "ep", None, (32, 8, 2)),
    "tokens on more axes": (mesh(dp=2, ep=2), ["dp", "ep"], None, (32, 8, 2)),
    "tokens on more axes, the other way round": (mesh(dp=2, ep=2), ["ep", "dp"], None, (32, 8, 2)),
    "tokens on other axes": (mesh(dp=2, ep=2), "dp", None, (32, 8, 2)),
    "experts cut inside": (mesh(ep=2, tp=2), "ep", "tp", (32, 8, 2)),
    "three axes": (mesh(dp=2, ep=2, tp=2), ["dp", "ep"], "tp", (32, 8, 2)),
    "sizes that do not divide": (mesh(ep=4), "ep", None, (30, 6, 3)),
    "more ranks than fit": (mesh(ep=3), "ep", None, (32, 8, 1)),
    "links of a real machine": (mf.DeviceMesh((4,), ("ep",)), "ep", None, (32, 8, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_torchs_wherever_rows_go(case: str) -> None:
    cut = CASES[case]
    fd = layer(*cut)
    for routes in ("any", "all to the first", "all to the last"):
        given = operands(routes, cut[3])
        for found, wanted in zip(fd.simulate(given), in_torch(*given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_row_travels_once_each_way(ranks: int) -> None:
    """Four passes of the rows that leave their rank, and the choice of experts once.

    Between two ranks, to gather the tokens sends as much as to send their rows.
    """
    sizes, width = (512, 8, 2), 256
    fd = layer(mesh(ep=ranks), "ep", None, sizes, width, torch.float32)
    fd.compile()
    rows = 512 * 2 * width * 4 / ranks * (ranks - 1) / ranks
    choice = 512 * 2 * 8 * (ranks - 1) / ranks
    assert fd.bill().total == pytest.approx(choice + 4 * rows)
    assert ranks == 2 or [e.collective for e in fd.bill().entries].count("exchange") == 4


def test_sums_do_not_depend_on_the_number_of_ranks() -> None:
    sizes = (32, 8, 2)
    given = operands("any", sizes, dtype=torch.float32)
    found = [layer(mesh(ep=ranks), "ep", None, sizes, WIDTH, torch.float32).simulate(given)[0] for ranks in (1, 2, 4)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    x, chosen, *rest = operands("any", (32, 8, 2))
    chosen[3, 1] = 8
    with pytest.raises(mf.KernelError, match=r"moe_dispatch: an index is out of range on rank .*: found 8"):
        layer(*CASES["tokens and experts"]).simulate([x, chosen, *rest])


def _rows(fd: mf.FusionDefinition, width: int = 4) -> Sequence[Any]:
    x, chosen = fd.define_tensor([8, width]), fd.define_tensor([8, 2], dtype=torch.int64)
    return fd.ops.moe_dispatch(x, chosen, 4)


def test_what_rows_cannot_do_is_said() -> None:
    fd = mf.FusionDefinition()
    rows, expert = _rows(fd)
    x = fd.define_tensor([4, 8, 4])
    cases = [
        (lambda: fd.ops.sum(rows, [1]), "sum: rows of experts"),
        (lambda: fd.ops.reshape(rows, [32, 4]), "reshape: rows of experts"),
        (lambda: fd.ops.add(rows, x), "add: rows of experts"),
        (lambda: fd.add_output(rows), "add_output: .* has rows of experts"),
        (lambda: fd.ops.moe_linear(x, expert, fd.define_tensor([4, 4, 4])), "moe_linear: rows"),
        (lambda: fd.ops.moe_linear(rows, expert, fd.define_tensor([3, 4, 4])), "the numbers of experts"),
        (lambda: fd.ops.moe_dispatch(fd.define_tensor([8, 4]), fd.define_tensor([8, 2]), 4), "experts"),
        (lambda: fd.ops.moe_dispatch(fd.define_tensor([8, 4]), fd.define_tensor([7, 2], dtype=torch.int64), 4),
         "the numbers of tokens"),
        (lambda: fd.ops.moe_dispatch(fd.define_tensor([8, 4]), fd.define_tensor([8, 2], dtype=torch.int64), 0),
         "num_experts"),
        (lambda: fd.ops.moe_swiglu(_rows(fd, 3)[0]), "moe_swiglu: rows"),
        (lambda: fd.ops.add(rows, _rows(fd)[0]), "add: rows that follow several choices of experts"),
        (lambda: fd.ops.moe_collect(rows, fd.define_tensor([8, 2], dtype=torch.int64)), "moe_collect: rows that"),
    ]  # fmt: skip
    for call, text in cases:
        with pytest.raises(mf.DefinitionError, match=text):
            call()


def test_gates_of_rows_are_torchs() -> None:
    with mf.FusionDefinition() as fd:
        x, chosen = fd.define_tensor([16, 8], dtype=torch.float64), fd.define_tensor([16, 2], dtype=torch.int64)
        rows, _ = fd.ops.moe_dispatch(x, chosen, 4)
        y = fd.ops.moe_collect(fd.ops.moe_swiglu(rows), chosen)
        (gradient,) = fd.grad(fd.ops.sum(fd.ops.mul(y, y), [0, 1, 2]), [x])
        for tensor in (x, chosen, gradient):
            fd.mesh_split(tensor, mesh(ep=2), ["ep", None])
        fd.add_output(y)
        fd.add_output(gradient)
    given = torch.randn(16, 8, dtype=torch.float64)
    own = given.clone().requires_grad_()
    gate, up = own.chunk(2, -1)
    wanted = (F.silu(gate) * up)[:, None].expand(-1, 2, -1)
    wanted.square().sum().backward()
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(16)])
    found = fd.simulate([given, chosen])
    torch.testing.assert_close(found[0], wanted.detach())
    torch.testing.assert_close(found[1], own.grad)


def test_no_graph_holds_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    fd = layer(*CASES["tokens and experts"])
    fd.compile()
    with pytest.raises(mf.ArgumentError, match="cuda_graph=True: found rows of experts"):
        graphs.check_capturable(fd.host_program(0), Inputs({}, {}, torch.device("cpu")), SourceLine("a.py", 1))
