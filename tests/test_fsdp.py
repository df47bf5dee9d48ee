"""Fully sharded parameters: bytes by the closed forms of ZeRO, in how many calls, and numbers as in eager torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshfuse as mf
from frontend_models import gradients_differ_by, pair
from meshfuse.frontends.fsdp import units_of
from meshfuse.frontends.parallel_module import _halves

WIDTH, LAYERS = 16, 3


class Layer(nn.Module):
    """All of a layer's parameters, its norm's and biases among them, divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


ROWS = {"x": ["dp", None], "y": ["dp", None]}


def trained(mesh: mf.DeviceMesh, fsdp: Any, inputs: Any = ROWS, rows: int = 8, **more: Any) -> tuple[Any, float, int]:
    """(the model after a backward, by how much its gradients are wrong, the bytes of its parameters)."""
    model, eager = pair(Stack)
    mf.parallelize(model, mesh, fsdp=fsdp, inputs=inputs, **more)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)
    for each in (model, eager):
        each(x, y).backward()
    return model, gradients_differ_by(model, eager), sum(p.nbytes for p in eager.parameters())


def calls(model: Any) -> dict[str, int]:
    """How many collectives each half's program has, by what they are."""
    found: dict[str, int] = {}
    for title, half in _halves(model).items():
        for line in str(half.fd.host_program(0)).splitlines():
            for kind in ("all_gather(", "reduce_scatter(", "all_to_all(", "all_reduce("):
                if f".{kind}" in line:
                    key = f"{title} {kind[:-1]}"
                    found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize(
    ("fsdp", "share"),
    [
        ("dp", 3),
        (mf.FSDP("dp", 2), 2),
        (mf.FSDP("dp", 1), 2),
        (mf.FSDP("dp", reshard_after_forward=False), 2),
    ],
)
def test_bytes_are_those_of_zero(fsdp: Any, share: int) -> None:
    """Rajbhandari et al. 2020: 3 (n-1)/n of the parameters for stage 3, 2 (n-1)/n for the others; however few rows
    there are, and though moving activations would take less time. The last two layers stay for the backward."""
    model, wrong, size = trained(mf.DeviceMesh((4,), ("dp",)), fsdp)
    assert wrong < 1e-5
    sent = {kind: sum(e.wire for e in model.bill().entries if e.collective == kind)
            for kind in ("all-gather", "reduce-scatter")}  # fmt: skip
    assert sent["reduce-scatter"] == pytest.approx(size * 3 / 4)
    gathered = (1 + (share - 2) * (LAYERS - 2) / LAYERS) * size * 3 / 4
    assert 0.9 * gathered < sent["all-gather"] <= gathered + 1  # biases of the last ops are not read again
    others = sum(e.wire for e in model.bill().entries if e.collective not in sent)
    assert others < 100  # the loss


def test_a_unit_is_gathered_in_one_call_ahead_of_its_use() -> None:
    model, _, _ = trained(mf.DeviceMesh((4,), ("dp",)), mf.FSDP("dp", prefetch=0))
    found = calls(model)
    assert found["forward all_gather"] <= LAYERS and found["backward all_gather"] <= LAYERS
    assert found.get("backward reduce_scatter", 0) + found.get("backward all_to_all", 0) <= LAYERS


def test_replicas_reduce_once_more() -> None:
    """Hybrid: parameters are gathered over one axis alone, gradients reduced over both."""
    mesh = mf.DeviceMesh((2, 2), ("r", "dp"))
    rows = {name: [["r", "dp"], None] for name in ROWS}
    model, wrong, size = trained(mesh, mf.FSDP("dp", replicate="r"), rows)
    assert wrong < 1e-5
    entries = [e for e in model.bill().entries if e.wire > 16]  # but the loss
    assert {e.axes for e in entries if e.collective == "all-gather"} == {"dp"}
    over_replicas = sum(e.wire for e in entries if e.axes == "r")
    assert over_replicas == pytest.approx(size / 2)  # an all-reduce over two ranks of a half each


def test_over_tensor_parallel_ranks_and_in_two_types() -> None:
    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))
    model, eager = pair(Stack)
    mf.parallelize(model, mesh, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, inputs=ROWS, fsdp="dp")
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for each in (model, eager):
        each(x, y).backward()
    assert gradients_differ_by(model, eager) < 1e-5
    gathered = {e.axes for e in model.bill().entries if "gathered" in e.tensor}
    assert gathered == {"dp"}
    half = mf.FSDP("dp", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, wrong, size = trained(mf.DeviceMesh((4,), ("dp",)), half)
    assert wrong < 1.5 * error_of_bfloat16()
    assert sum(e.wire for e in model.bill().entries if e.collective == "all-gather") <= size * 3 / 4 + 1


def error_of_bfloat16() -> float:
    """By how much the gradients of eager torch in bfloat16 differ from those in float32."""
    model, eager = pair(Stack)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)
    model.bfloat16()(x.bfloat16(), y.bfloat16()).backward()
    eager(x, y).backward()
    return gradients_differ_by(model, eager)


def test_units_by_pattern() -> None:
    model, wrong, _ = trained(
        mf.DeviceMesh((4,), ("dp",)), mf.FSDP("dp", units=["layers.*.up", "layers.*.down"], prefetch=2)
    )
    assert wrong < 1e-5
    text = str(_halves(model)["forward"].fd.latest().resharded)
    assert text.index("layers.0.up.weight.gathered") < text.index("layers.2.down.weight.gathered")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mf.FSDP("dp", 4), "FSDP: stage: found 4, needed 1, 2 or 3"),
        (lambda: mf.FSDP("dp", prefetch=-1), "FSDP: prefetch: found -1"),
        (lambda: mf.FSDP("dp", param_dtype=torch.int32), "Precision: param: found torch.int32"),
        (lambda: mf.FSDP("q"), "fsdp: found 'q', needed an mf.FSDP, or one or several of ['dp']"),
        (lambda: mf.FSDP("dp", replicate="dp"), "fsdp: found 'dp'"),
        (lambda: mf.FSDP("dp", units="blocks.*"), "FSDP: units: found 'blocks.*'"),
    ],
)
def test_what_is_said_of_mistakes(make: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as found:
        mf.parallelize(Stack(), mf.DeviceMesh((4,), ("dp",)), fsdp=make(), inputs=ROWS)
    assert said in str(found.value)


def test_a_unit_s_gradients_travel_while_the_next_unit_computes() -> None:
    """Kernels stand between the start of a unit's reduction and its wait, for all units but the last."""
    model, wrong, _ = trained(mf.DeviceMesh((2,), ("dp",)), "dp")
    program = list(
        map(str.strip, str(_halves(model)["backward"].fd.host_program(0)).partition("def main")[2].split("\n"))
    )
    begun = {line.split(" = ")[0]: i for i, line in enumerate(program) if ".all_to_all(" in line}
    beside = [sum(" = segment_" in line for line in program[begun[work] : program.index(f"{work}.wait()")])
              for work in begun]  # fmt: skip
    assert wrong < 1e-5 and len(beside) == LAYERS
    assert all(beside[:-1])


def test_what_stands_outside_of_layers_is_put_together_up_to_the_largest_unit() -> None:
    """A norm goes with the head behind it; a head as large as a layer stays alone."""
    tail = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16))
    model = nn.ModuleDict({"embed": nn.Embedding(400, WIDTH), "layers": Stack().layers, "tail": tail})
    found = units_of(model, mf.FSDP("dp"))
    assert set(found.values()) == {"embed", "layers.0", "layers.1", "layers.2", "tail.0"}
    model["embed"] = nn.Embedding(4, WIDTH)
    tail[1] = nn.Linear(WIDTH, 2 * WIDTH + 64)
    assert {"tail.0", "tail.1"} < set(units_of(model, mf.FSDP("dp")).values())


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("axes", [None, 3, b"dp", {"dp"}, ["dp", None], ["dp", "dp"]]),
        ("units", [3, {"a": 1}, ["a", 1]]),
        ("replicate", [3, ["dp"]]),
        ("stage", [True, 3.0, "3", torch.ones(2)]),
    ],
)
def test_options_of_another_kind(option: str, wrong: list[Any]) -> None:
    for value in wrong:
        options: dict[str, Any] = {"axes": "dp", option: value}
        with pytest.raises(mf.DefinitionError, match=f"FSDP: {option}: found "):
            mf.FSDP(**options)
