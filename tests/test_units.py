"""`fd.units`: weights of plain definitions, fully sharded: bytes by the closed forms of ZeRO, calls, and numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import meshfuse as mf

WIDTH, HIDDEN, LAYERS = 16, 32, 3
NAMES = ("up", "bias", "down")
SHAPES = {"up": (HIDDEN, WIDTH), "bias": (HIDDEN,), "down": (WIDTH, HIDDEN)}


@dataclass(frozen=True)
class Made:
    """A definition of a stack of layers, its loss and gradients, and its weights by layer."""

    fd: mf.FusionDefinition
    mesh: mf.DeviceMesh
    weights: list[list[Any]]

    def ran(self, width: int = WIDTH) -> float:
        """By how much the loss and the gradients are wrong."""
        draw = torch.Generator().manual_seed(0)
        shapes = [(8, width), (8, width), *(t.type.shape for layer in self.weights for t in layer)]
        arguments = [torch.randn(list(shape), generator=draw) * 0.3 for shape in shapes]
        found = self.fd(*arguments)
        wanted = by_torch([a.double() for a in arguments])
        return max((f.double() - w).abs().max().item() for f, w in zip(found, wanted, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(4 * torch.Size(t.type.shape).numel() for layer in self.weights for t in layer)

    def sent(self, kind: str) -> float:
        return sum(e.wire for e in self.fd.bill().entries if e.collective == kind)

    def calls(self) -> dict[str, int]:
        text = str(self.fd.host_program(0))
        kinds = ("all_gather", "reduce_scatter", "all_to_all")
        return {kind: text.count(f".{kind}(") for kind in kinds}


def by_torch(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    x, y, *weights = [a.requires_grad_(i > 1) for i, a in enumerate(arguments)]
    for up, bias, down in zip(*[iter(weights)] * 3, strict=True):
        x = x + torch.tanh(x @ up.T + bias) @ down.T
    loss = (x - y).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def stack(
    units: Callable[[Made], None], shape: Sequence[int] = (4,), names: Sequence[str] = ("dp",), rows: Any = "dp",
    width: int = WIDTH,
) -> Made:  # fmt: skip
    mesh = mf.DeviceMesh(shape, names)
    with mf.FusionDefinition() as fd:
        x, y = (fd.define_tensor([8, width], name=name) for name in "xy")
        sizes = {name: [n * width // WIDTH for n in shape] for name, shape in SHAPES.items()}
        weights = [[fd.define_tensor(sizes[n], name=f"layers.{i}.{n}") for n in NAMES] for i in range(LAYERS)]
        made, hidden = Made(fd, mesh, weights), x
        for up, bias, down in weights:
            inner = fd.ops.linear(hidden, up, bias)
            hidden = fd.ops.add(hidden, fd.ops.linear(fd.ops.tanh(inner), down))
        wrong = fd.ops.sub(hidden, y)
        loss = fd.ops.mean(fd.ops.mul(wrong, wrong), [0, 1])
        fd.add_output(loss)
        for gradient in fd.grad(loss, [t for layer in weights for t in layer]):
            fd.add_output(gradient)
        for t in (x, y):
            fd.mesh_split(t, mesh, [rows, None])
        units(made)
    return made


def of_layers(fsdp: Any) -> Callable[[Made], None]:
    return lambda made: made.fd.units(made.mesh, fsdp, "layers.*")


@pytest.mark.parametrize(
    ("fsdp", "share"),
    [("dp", 3), (mf.FSDP("dp", 2), 2), (mf.FSDP("dp", 1), 2), (mf.FSDP("dp", reshard_after_forward=False), 2)],
)
def test_bytes_are_those_of_zero(fsdp: Any, share: int) -> None:
    """Rajbhandari et al. 2020: 3 (n-1)/n of the weights for stage 3, 2 (n-1)/n for others; the last two stay."""
    made = stack(of_layers(fsdp))
    assert made.ran() < 1e-6
    part = made.nbytes * 3 / 4
    not_read_again = sum(4 * torch.Size(t.type.shape).numel() for layer in made.weights for t in layer[1:2])
    not_read_again += 4 * HIDDEN * WIDTH  # the first layer's `up`: x gets no gradient
    not_read_again += 2 * 4 * 2 * HIDDEN * WIDTH  # the last two layers
    assert made.sent("reduce-scatter") == pytest.approx(part)
    again = (not_read_again * 3 / 4) if share == 3 else 0
    assert made.sent("all-gather") == pytest.approx((share - 1) * part - again)
    assert made.sent("all-reduce") < 100  # the loss


def test_a_unit_takes_three_calls_and_the_last_ones_two() -> None:
    found = stack(of_layers("dp")).calls()
    assert found["all_gather"] == 2 * LAYERS - 2
    assert found["reduce_scatter"] + found["all_to_all"] == LAYERS


def test_units_are_gathered_in_turn_and_again() -> None:
    def order(prefetch: int) -> list[str]:
        text = str(stack(of_layers(mf.FSDP("dp", prefetch=prefetch))).fd.latest().resharded)
        marks = ("all-gather", "linear(", "matmul(")
        lines = [line for line in text.splitlines() if any(mark in line for mark in marks)]
        return [line.partition("layers.")[2][0] if "gathered" in line else "op" for line in lines]

    turns = [unit for unit, before in zip(order(0), ["", *order(0)], strict=False) if unit not in (before, "op")]
    assert turns == ["0", "1", "2", "1", "0"]
    assert order(0)[:4] == ["0", "0", "0", "op"] and order(1)[:7] == [*"000111", "op"]


def test_what_was_gathered_is_dropped() -> None:
    """Stage 3 holds shards and two units, stage 2 all weights, where these take most of the memory."""
    width = 256
    thrifty, other = (stack(of_layers(mf.FSDP("dp", stage, prefetch=0)), width=width) for stage in (3, 2))
    layer = thrifty.nbytes / LAYERS
    held = [made.fd.memory().peak - made.nbytes / 4 for made in (thrifty, other)]
    assert held[0] < 2.7 * layer  # a layer, its gradients, and shards of gradients
    assert held[1] - held[0] > 0.9 * layer


def test_replicas_reduce_once_more() -> None:
    made = stack(of_layers(mf.FSDP("dp", replicate="r")), (2, 2), ("r", "dp"), ["r", "dp"])
    assert made.ran() < 1e-6
    entries = [e for e in made.fd.bill().entries if e.wire > 16]
    assert {e.axes for e in entries if e.collective == "all-gather"} == {"dp"}
    assert sum(e.wire for e in entries if e.axes == "r") == pytest.approx(made.nbytes / 2)


def test_over_tensor_parallel_ranks() -> None:
    def units(made: Made) -> None:
        for up, bias, down in made.weights:
            made.fd.mesh_split(up, made.mesh, ["tp", "dp"], stationary="tp")
            made.fd.mesh_split(bias, made.mesh, [["tp", "dp"]], stationary="tp")
            made.fd.mesh_split(down, made.mesh, ["dp", "tp"], stationary="tp")
        made.fd.units(made.mesh, "dp", *made.weights)

    made = stack(units, (2, 2), ("dp", "tp"))
    assert made.ran() < 1e-6
    gathers = [e for e in made.fd.bill().entries if "gathered" in e.tensor]
    assert {e.axes for e in gathers} == {"dp"} and gathers


def test_casts_of_weights_and_their_transposes() -> None:
    """A unit of casts travels in bfloat16; a transpose that stands at the top is made of what was gathered."""
    mesh = mf.DeviceMesh((4,), ("dp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, WIDTH], name="x")
        weights = [fd.define_tensor([WIDTH, WIDTH], name=f"w{i}") for i in range(2)]
        casts = [fd.ops.cast(w, mf.DataType.BFloat16) for w in weights]
        turned = [fd.ops.permute(c, [1, 0]) for c in casts]
        hidden = fd.ops.cast(x, mf.DataType.BFloat16)
        for t in turned:
            hidden = fd.ops.cast(fd.ops.tanh(fd.ops.matmul(hidden, t)), mf.DataType.BFloat16)
        loss = fd.ops.sum(fd.ops.cast(hidden, mf.DataType.Float), [0, 1])
        for out in (loss, *fd.grad(loss, weights)):
            fd.add_output(out)
        fd.mesh_split(x, mesh, ["dp", None])
        fd.units(mesh, "dp", *([c] for c in casts))
    draw = torch.Generator().manual_seed(1)
    arguments = [torch.randn(8, WIDTH, generator=draw), *(torch.randn(WIDTH, WIDTH, generator=draw) for _ in weights)]
    x_, *w_ = [a.clone().requires_grad_() for a in arguments]
    hidden_ = x_
    for w in w_:
        hidden_ = torch.tanh(hidden_ @ w.T)
    wanted = [hidden_.sum(), *torch.autograd.grad(hidden_.sum(), w_)]
    for found, want in zip(fd(*arguments), wanted, strict=True):
        assert (found - want).norm() < 0.05 * want.norm()
    gathers = [e.wire for e in fd.bill().entries if e.collective == "all-gather"]
    assert (
        gathers == [WIDTH * WIDTH * 2 * 3 / 4] * 2
    )  # The second stays for the backward, which does not read the first.
    assert "permute" not in str(fd.latest().resharded).partition("linear")[0].partition("all-gather")[0]


def test_a_backward_of_autograd_gathers_again() -> None:
    mesh = mf.DeviceMesh((4,), ("dp",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, WIDTH], name="x")
        weights, y = [fd.define_tensor([WIDTH, WIDTH], name=f"w.{i}") for i in range(3)], x
        for w in weights:
            y = fd.ops.tanh(fd.ops.linear(y, w))
        fd.add_output(y)
        fd.mesh_split(x, mesh, ["dp", None])
        fd.units(mesh, "dp", "w.*")
    given = [torch.randn(8, WIDTH), *(torch.randn(WIDTH, WIDTH) for _ in weights)]
    mine, plain = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    fd(*mine)[0].square().sum().backward()
    functools.reduce(lambda y, w: torch.tanh(y @ w.T), plain[1:], plain[0]).square().sum().backward()
    for a, b in zip(mine, plain, strict=True):
        assert a.grad is not None and b.grad is not None and (a.grad - b.grad).abs().max() < 1e-4
    gathers = [e.tensor[:3] for e in fd.latest_backward().bill().entries if e.collective == "all-gather"]
    assert gathers == ["w.0", "w.1", "w.2", "w.0"]


def test_its_text_says_the_same() -> None:
    made = stack(of_layers("dp"))
    space: dict[str, Any] = {}
    exec(repr(made.fd), space)
    other = space["fd"]
    assert other.bill().entries and [e.wire for e in other.bill().entries] == [e.wire for e in made.fd.bill().entries]
    assert repr(other) == repr(made.fd)


def names_twice(made: Made) -> None:
    made.fd.units(made.mesh, "dp", made.weights[0], "layers.*")


def annotated_whole(made: Made) -> None:
    made.fd.mesh_split(made.weights[0][0], made.mesh, [None, None])
    made.fd.units(made.mesh, "dp", "layers.*")


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (of_layers("q"), "units: fsdp: found 'q', needed one or several of ['dp']"),
        (of_layers(3), "units: fsdp: found 3, needed an mf.FSDP, or one or several of ['dp']"),
        (of_layers(mf.FSDP("dp", replicate="dp")), "units: fsdp: found 'dp'"),
        (of_layers(mf.FSDP("dp", reduce_dtype=torch.float32)), "Cast weights by fd.ops.cast"),
        (lambda m: m.fd.units(m.mesh, "dp"), "units: which weights: found none, needed a pattern of names"),
        (lambda m: m.fd.units(m.mesh, "dp", "layer.*"), "units: 'layer.*': found no input of such a name; near to it"),
        (lambda m: m.fd.units(m.mesh, "dp", [m.fd.ops.add(*m.weights[0][::2])]), "add"),
        (names_twice, "layers.0.up (t2) is in two units"),
        (annotated_whole, "needed cut over dp of"),
    ],
)
def test_errors(units: Any, said: str) -> None:
    with pytest.raises(mf.DefinitionError) as raised:
        stack(units)
    assert said in str(raised.value)
