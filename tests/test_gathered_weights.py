"""Long programs whose rows outgrow their weights, so that to gather these takes less than to reduce sums of all rows;
and those whose weights outgrow their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

import meshfuse as mf
from meshfuse.testing import assert_same_as_unsharded

DP, TP = 2, 4
MESH = mf.DeviceMesh((DP, TP), ("dp", "tp"))
TALL = mf.DeviceMesh((TP, DP), ("dp", "tp"))
HEADS = 4
Fd, T = mf.FusionDefinition, mf.TensorView
Rows = Sequence[str | tuple[str, ...] | None]


class Stack:
    """Layers of attention and an MLP, split as Megatron-LM does, and their gradients; also over dp, as FSDP does."""

    def __init__(
        self, layers: int, batch: int, length: int, width: int, dtype: mf.DataType = mf.DataType.Float, *,
        mesh: mf.DeviceMesh = MESH, fsdp: bool = False, search: str = "auto", vocabulary: int = 0,
        rows: Rows = ("dp", None, None), head: bool = True, weights: Rows | None = None,
    ):  # fmt: skip
        self.rows, self.split = rows, weights
        self.size, self.dtype, self.mesh, self.weights = (batch, length, width), dtype, mesh, list[T]()
        self.other = "dp" if fsdp else None
        with mf.FusionDefinition(search=search) as fd:
            x = self.looked_up(fd, vocabulary) if vocabulary else self.given(fd)
            for _ in range(layers):
                x = self.mlp(fd, x + self.attention(fd, fd.ops.layer_norm(x, [width])))
            if vocabulary and head:
                x = fd.ops.linear(x, self.weight(fd, vocabulary, width, True))
            loss = fd.ops.mean(x * x)
            for made in (loss, *fd.grad(loss, self.weights)):
                fd.add_output(made)
        self.fd = fd

    def weight(self, fd: Fd, out: int, into: int, columns: bool) -> T:
        made = fd.define_tensor([out, into], dtype=self.dtype)
        fd.mesh_split(made, self.mesh, self.split or (["tp", self.other] if columns else [self.other, "tp"]))
        self.weights.append(made)
        return made

    def given(self, fd: Fd) -> T:
        x = fd.define_tensor(self.size, dtype=self.dtype)
        fd.mesh_split(x, self.mesh, self.rows)
        return x

    def looked_up(self, fd: Fd, vocabulary: int) -> T:
        tokens = fd.define_tensor(self.size[:2], dtype=mf.DataType.Int)
        fd.mesh_split(tokens, self.mesh, ["dp", None])
        return fd.ops.embedding_fwd(tokens, self.weight(fd, vocabulary, self.size[-1], True))

    def attention(self, fd: Fd, x: T) -> T:
        batch, length, width = self.size

        def heads() -> T:
            rows = fd.ops.linear(x, self.weight(fd, width, width, True))
            return fd.ops.permute(fd.ops.reshape(rows, [batch, length, HEADS, width // HEADS]), [0, 2, 1, 3])

        mixed, *_ = fd.ops.sdpfa_fwd(heads(), heads(), heads(), is_causal=True)
        merged = fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [batch, length, width])
        return fd.ops.linear(merged, self.weight(fd, width, width, False))

    def mlp(self, fd: Fd, x: T) -> T:
        width = self.size[-1]
        hidden = fd.ops.gelu(fd.ops.linear(fd.ops.layer_norm(x, [width]), self.weight(fd, 4 * width, width, True)))
        return x + fd.ops.linear(hidden, self.weight(fd, width, 4 * width, False))

    @property
    def gathered(self) -> float:
        """Bytes per rank if every weight is gathered over tp, and its gradient scattered there and summed over dp."""
        nbytes = sum(4 * math.prod(made.type.shape) for made in self.weights)
        return 2 * (TP - 1) / TP * nbytes + 2 * (DP - 1) / DP * nbytes / TP


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers, batch, width", [(8, 64, 256), (8, 128, 2048), (24, 128, 2048)])
def test_weights_are_gathered_where_rows_outgrow_them(layers: int, batch: int, width: int) -> None:
    stack = Stack(layers, batch, 512, width)
    assert stack.fd.bill().total <= 1.02 * stack.gathered


def in_torch(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The loss and the gradients, unsharded."""
    batch, length, width = x.shape
    for at in range(0, len(weights), 6):
        q, k, v, out, up, down = weights[at : at + 6]
        rows = functional.layer_norm(x, [width])
        heads = [(rows @ w.T).view(batch, length, HEADS, width // HEADS).transpose(1, 2) for w in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ out.T
        x = x + functional.gelu(functional.layer_norm(x, [width]) @ up.T) @ down.T
    loss = (x * x).mean()
    return [loss, *torch.autograd.grad(loss, weights)]


def test_numbers_of_a_program_whose_weights_are_gathered() -> None:
    stack = Stack(8, 16, 64, 16, mf.DataType.Double)
    torch.manual_seed(0)
    x, *weights = (torch.randn(stack.fd.recording.tensors[i].type.shape, dtype=torch.float64) / 4
                   for i in stack.fd.recording.input_tensors())  # fmt: skip
    found = [made.detach() for made in in_torch(x, [w.requires_grad_() for w in weights])]
    assert_same_as_unsharded(stack.fd, [x, *(w.detach() for w in weights)], found)


# Below, bytes are those of plans in which every op is placed after the one before it, for the least that it then takes.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width, nbytes", [(1024, 367_001_606), (2048, 0.9 * 1_337_982_982)])
def test_weights_are_left_where_they_outgrow_rows(width: int, nbytes: float) -> None:
    """Gathered over dp they would be more than the rows of all groups."""
    assert Stack(8, 4, 512, width, mesh=TALL, fsdp=True).fd.bill().total <= nbytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows, nbytes", [(("dp", "tp", None), 635_437_063), (("dp", None, "tp"), 934_723_591)])
def test_weights_are_gathered_where_rows_that_are_split_outgrow_them(rows: Rows, nbytes: int) -> None:
    """Rows are then gathered for weights, and sums scattered: as much as if rows were whole and sums reduced."""
    assert Stack(5, 8, 2048, 1024, rows=rows).fd.bill().total <= 0.8 * nbytes


def test_weights_are_gathered_over_one_axis_of_two_where_the_other_takes_less() -> None:
    """Rows and weights lie over both axes. To gather rows over tp takes less than the large weights of an MLP."""
    both = ("dp", "tp")
    fd = Stack(5, 8, 512, 1024, rows=(both, None, None), weights=(both, None)).fd
    assert fd.bill().total <= 0.75 * 440_401_927


def stored_in_parts(layers: int) -> Fd:
    """Blocks whose weights and gradients are stored over one axis of the two that samples lie over, as in FSDP with
    replicas.
    """
    mesh, (batch, length, width, hidden) = mf.DeviceMesh((2, 4), ("dp", "fs")), (8, 128, 256, 1024)
    weights: list[T] = []
    with mf.FusionDefinition() as fd:
        ops = fd.ops

        def weight(*shape: int) -> T:
            made = fd.define_tensor(list(shape))
            fd.mesh_split(made, mesh, ["fs"] + [None] * (len(shape) - 1))
            weights.append(made)
            return made

        def product(rows: T, into: int) -> T:
            return ops.matmul(rows, weight(rows.type.shape[-1], into))

        def normalised(rows: T) -> T:
            return ops.rms_norm(rows, [width], weight(width))

        def heads(rows: T) -> T:
            made = ops.reshape(product(rows, width), [batch, length, HEADS, width // HEADS])
            return ops.permute(made, [0, 2, 1, 3])

        x = fd.define_tensor([batch, length, width])
        fd.mesh_split(x, mesh, [("dp", "fs"), None, None])
        for _ in range(layers):
            n = normalised(x)
            mixed, *_ = ops.sdpfa_fwd(heads(n), heads(n), heads(n), is_causal=True)
            x = x + product(ops.reshape(ops.permute(mixed, [0, 2, 1, 3]), [batch, length, width]), width)
            n = normalised(x)
            x = x + product(ops.silu(product(n, hidden)) * product(n, hidden), width)
        loss = ops.sum(x * x)
        fd.add_output(loss)
        for made in fd.grad(loss, weights):
            fd.mesh_split(made, mesh, ["fs"] + [None] * (made.ndim - 1))
            fd.add_output(made)
    return fd


def test_layers_whose_storage_is_split_cost_as_much_in_long_programs_as_in_short_ones() -> None:
    one, two, three = (stored_in_parts(layers) for layers in (1, 2, 3))
    assert three.bill().total <= 1.01 * (2 * two.bill().total - one.bill().total)


def test_layers_of_a_language_model_cost_as_much_in_long_programs_as_in_short_ones() -> None:
    """With logits so large that ranks share their rows, as if the tokens were split so."""
    one, two, three = (Stack(layers, 8, 512, 1024, vocabulary=32768).fd for layers in (1, 2, 3))
    assert three.bill().total <= 1.01 * (2 * two.bill().total - one.bill().total)
