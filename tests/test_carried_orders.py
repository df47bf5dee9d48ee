"""Zig-zag orders that are carried through a graph: the same numbers, and reorders where they cost least."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.graph import Graph, specialize
from meshfuse.rewrites.carry_block_orders import carry_block_orders
from meshfuse.testing.concat_distributive import evaluated

DOUBLE, RING = mf.DataType.Double, 2
ROWS, WIDTH = 8, 4


def graph_of(fd: mf.FusionDefinition) -> Graph:
    return specialize(fd.recording, {i: fd.recording.tensors[i].type.shape for i in fd.recording.input_tensors()}, {})


def reordered_bytes(graph: Graph) -> int:
    """The bytes of all tensors that are put into another order."""
    types = [graph.tensors[node.inputs[0]].type for node in graph.nodes if node.name == "reorder_blocks"]
    return sum(t.numel * t.dtype.itemsize for t in types)


def _shift(fd: Any, x: Any) -> Any:
    """Rows one place on: what another order may not be carried through."""
    shape = list(x.type.shape)
    cut = fd.ops.slice(x, [0] * len(shape), [*shape[:-2], shape[-2] - 1, shape[-1]])
    return fd.ops.pad(cut, [0, 0, 1, 0])


class Program:
    """A random program on tensors [2, rows, width], in which some are put into zig-zag order and back."""

    def __init__(self, seed: int) -> None:
        self.draw, self.fd = random.Random(seed), mf.FusionDefinition()
        self.tensors = [self.fd.define_tensor([2, ROWS, WIDTH], dtype=DOUBLE) for _ in range(2)]
        self.weight = self.fd.define_tensor([WIDTH, WIDTH], dtype=DOUBLE)
        self.table = self.fd.define_tensor([ROWS, WIDTH], dtype=DOUBLE)
        self.ids = self.fd.define_tensor([2, ROWS], dtype=mf.DataType.Int)
        for _ in range(12):
            self.tensors.append(self._step())
        for x in self.draw.sample(self.tensors[2:], 2):
            self.fd.add_output(x)
        self.fd.add_output(self.fd.ops.sum(self.tensors[-1], [0, 1]))

    def _step(self) -> Any:
        ops, x, y = self.fd.ops, *self.draw.choices(self.tensors, k=2)
        kind = self.draw.randrange(13)
        if kind < 4:
            return (ops.zigzag, ops.unzigzag)[kind % 2](x, 1, RING)
        merged = ops.reshape(x, [2 * ROWS, WIDTH])
        made = {
            4: lambda: ops.add(x, y), 5: lambda: ops.mul(x, y), 6: lambda: ops.linear(x, self.weight),
            7: lambda: ops.reshape(ops.matmul(merged, self.weight), [2, ROWS, WIDTH]),
            8: lambda: ops.mul(x, ops.sum(y, [1], keepdim=True)), 9: lambda: ops.var_mean(x, [2], 1, True)[1] + y,
            10: lambda: ops.add(ops.embedding_fwd(self.ids, self.weight), x),
            11: lambda: ops.add(x, self.table), 12: lambda: _shift(self.fd, x),
        }  # fmt: skip
        return made[kind]()


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_programs_keep_their_numbers_and_reorder_no_more(first: int) -> None:
    draw, changed = torch.Generator().manual_seed(first), 0
    for seed in range(first, first + 50):
        graph = graph_of(Program(seed).fd)
        carried = carry_block_orders(graph)
        shapes = [graph.tensors[i].type for i in graph.input_tensors]
        inputs = [torch.randint(WIDTH, t.shape, generator=draw) if t.dtype is mf.DataType.Int
                  else torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in shapes]  # fmt: skip
        for found, wanted in zip(evaluated(carried, inputs), evaluated(graph, inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        assert reordered_bytes(carried) <= reordered_bytes(graph), seed
        changed += reordered_bytes(carried) < reordered_bytes(graph)
    assert changed > 10


def _layer(fd: Any, x: Any, weights: list[Any]) -> Any:
    """Attention in a ring, whose rows are put in order for it alone, and a product, both with a residual."""
    heads = (fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [1, 16, 2, 4]), [0, 2, 1, 3]) for w in weights[:3])
    q, k, v = (fd.ops.zigzag(head, 2, RING) for head in heads)
    out = fd.ops.unzigzag(fd.ops.ring_attention(q, k, v, RING, is_causal=True, zigzag=True)[0], 2, RING)
    x = fd.ops.add(x, fd.ops.reshape(fd.ops.permute(out, [0, 2, 1, 3]), [1, 16, 8]))
    return fd.ops.add(x, fd.ops.relu(fd.ops.linear(x, weights[3])))


def _reference(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = (F.linear(x, w).view(1, 16, 2, 4).transpose(1, 2) for w in weights[:3])
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 16, 8)
    return x + F.relu(F.linear(x, weights[3]))


def test_layers_are_put_in_order_once_and_so_are_their_gradients() -> None:
    with mf.FusionDefinition() as fd:
        ids, table = fd.define_tensor([1, 16], dtype=mf.DataType.Int), fd.define_tensor([9, 8], dtype=DOUBLE)
        weights = [fd.define_tensor([8, 8], dtype=DOUBLE) for _ in range(4)]
        x = embedded = fd.ops.embedding_fwd(ids, table)
        for _ in range(2):
            x = _layer(fd, x, weights)
        loss = fd.ops.sum(fd.ops.mul(x, x))
        for made in (loss, *fd.grad(loss, [table, *weights])):
            fd.add_output(made)
        fd.mesh_split(ids, mf.DeviceMesh((2,), ("cp",)), [None, "cp"])
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(9, (1, 16), generator=draw)
    given = [torch.randn(n, 8, generator=draw, dtype=torch.float64).requires_grad_() for n in (9, 8, 8, 8, 8)]
    x = F.embedding(numbers, given[0])
    for _ in range(2):
        x = _reference(x, given[1:])
    wanted = x.square().sum()
    wanted.backward()
    found = fd(numbers, *(each.detach() for each in given))
    for made, reference in zip(found, (wanted, *(each.grad for each in given)), strict=True):
        torch.testing.assert_close(made, reference, rtol=1e-9, atol=1e-9)
    planned = fd.latest().planned.graph
    (reorder,) = [node for node in planned.nodes if node.name == "reorder_blocks"]
    assert planned.tensors[reorder.inputs[0]].type.dtype is mf.DataType.Int
    assert "its dim 1 is in zig-zag order, in 4 chunks" in str(fd.explain(embedded))


def test_what_is_wanted_in_order_is_put_in_order_where_that_is_cheapest() -> None:
    """Before the wide product, though its result is what is wanted."""
    with mf.FusionDefinition() as fd:
        x, wide = fd.define_tensor([1, 16, 8], dtype=DOUBLE), fd.define_tensor([64, 8], dtype=DOUBLE)
        weights = [fd.define_tensor([8, 8], dtype=DOUBLE) for _ in range(4)]
        fd.add_output(fd.ops.linear(_layer(fd, x, weights), wide))
    graph = carry_block_orders(graph_of(fd))
    found = [graph.tensors[node.inputs[0]].type.shape for node in graph.nodes if node.name == "reorder_blocks"]
    assert found == [(1, 16, 8), (1, 16, 8)]
