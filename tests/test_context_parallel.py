"""Attention in a ring, and zig-zag orders: numbers and gradients, what is sent, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import counting
import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from defining import collectives
from meshfuse.lowering.instructions import Collective, Instruction, Launch, Wait

DOUBLE = mf.DataType.Double
BATCH, HEADS, SHARED, ROWS, WIDTH = 2, 4, 2, 48, 8
QKV = ((BATCH, HEADS, ROWS, WIDTH), *((BATCH, SHARED, ROWS, WIDTH),) * 2)


class Place(NamedTuple):
    """A mesh, how q, k and v lie on it, and the size of the ring."""

    mesh: mf.DeviceMesh
    spec: list[Any]
    ring: int


def line(size: int) -> mf.DeviceMesh:
    return mf.DeviceMesh((size,), ("cp",))


ALONG = [None, None, "cp", None]
PLACES = {
    **{f"ring of {n}": Place(line(n), ALONG, n) for n in (2, 3, 4, 8)},
    "one rank": Place(line(1), ALONG, 4),
    "ring of one": Place(line(2), ALONG, 1),
    "two blocks per rank": Place(line(4), ALONG, 8),
    "two ranks per block": Place(line(4), ALONG, 2),
    "a ring that the ranks do not divide": Place(line(4), ALONG, 6),
    "uneven blocks": Place(line(3), ALONG, 4),
    "batch": Place(mf.DeviceMesh((2, 4), ("dp", "cp")), ["dp", None, "cp", None], 4),
    "heads": Place(mf.DeviceMesh((4, 2), ("cp", "tp")), [None, "tp", "cp", None], 4),
    "more ranks than heads of k and v": Place(mf.DeviceMesh((2, 4), ("cp", "tp")), [None, "tp", "cp", None], 2),
    "two axes": Place(mf.DeviceMesh((2, 2), ("a", "b")), [None, None, ["b", "a"], None], 4),
    "whole": Place(line(2), [None] * 4, 2),
}
# (is_causal, zigzag)
MODES = {"full": (False, False), "causal": (True, False), "zig-zag": (True, True), "zig-zag, all seen": (False, True)}
ASKED = ("full", "causal", "zig-zag")


class Ring(NamedTuple):
    """A definition of attention in a ring with its gradients, and which rows its inputs are of."""

    fd: mf.FusionDefinition
    rows: torch.Tensor


def defined(
    place: Place,
    mode: str,
    dtype: mf.DataType = DOUBLE,
    *,
    backward: bool = True,
    lse: bool = False,
    sizes: Sequence[Sequence[int]] = QKV,
    sharded: str = "qkv",
    scale: float | None = None,
) -> Ring:
    causal, zigzag = MODES[mode]
    fd = mf.FusionDefinition()
    q, k, v = (fd.define_tensor(list(shape), dtype=dtype) for shape in sizes)
    made = list(fd.ops.ring_attention(q, k, v, place.ring, is_causal=causal, scale=scale, zigzag=zigzag))
    for output in made:
        fd.add_output(output)
    if backward:
        grads = [fd.define_tensor(list(sizes[0]), dtype=dtype)]
        grads += [fd.define_tensor(list(sizes[0][:3]), dtype=made[1].dtype)] if lse else []
        for grad in fd.grad(made[: len(grads)], [q, k, v], grads):
            fd.add_output(grad)
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        fd.mesh_split(tensor, place.mesh, place.spec if name in sharded else [None] * 4)
    rows = torch.arange(sizes[0][2])
    return Ring(fd, in_zigzag(rows, place.ring) if zigzag else rows)


def in_zigzag(x: torch.Tensor, ring: int) -> torch.Tensor:
    """Written out: first chunk, last chunk, second chunk, last but one, ..."""
    chunks = list(x.split(len(x) // (2 * ring)))
    found = []
    while chunks:
        found += [chunks.pop(0), chunks.pop()]
    return torch.cat(found)


def inputs_of(fd: mf.FusionDefinition) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    types = [fd.recording.tensors[ref.id].type for ref in fd.recording.inputs]
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(getattr(torch, t.dtype.value))
            for t in types]  # fmt: skip


def reference(inputs: Sequence[torch.Tensor], mode: str, scale: float | None = None) -> list[torch.Tensor]:
    """torch's attention and its log-sum-exp, and with more inputs the gradients of q, k and v, in float64."""
    q, k, v, *grads = (t.detach().double().clone() for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=MODES[mode][0], scale=scale)
    scores = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if MODES[mode][0]:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, float("-inf"))
    results = [out, scores.logsumexp(-1)]
    if grads:
        results += torch.autograd.grad(results[: len(grads)], leaves, grads)
    return [t.detach() for t in results]


def assert_right(ring: Ring, mode: str, tolerance: float, scale: float | None = None) -> None:
    """On inputs whose rows are in the ring's order, and so are those of the results."""
    inputs = inputs_of(ring.fd)
    same = inputs[0].shape[2] == inputs[1].shape[2]
    given = [t[:, :, ring.rows] for t in inputs] if same else inputs
    for found, wanted in zip(ring.fd.simulate(given, check_replicas=True), reference(inputs, mode, scale), strict=True):
        expected = wanted[:, :, ring.rows] if same else wanted
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


# numbers ----------------------------------------------------------------------------------------------------


NOTHING = {
    "no keys": ((2, 4, 6, 8), (2, 2, 0, 8), (2, 2, 0, 8)), "no rows": ((2, 4, 0, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    "no batch": ((0, 4, 6, 8), (0, 2, 6, 8), (0, 2, 6, 8)), "nothing": ((2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["ring of 3", "one rank", "ring of one", "whole"])
@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
def test_rings_without_elements_are_right(sizes: Any, name: str) -> None:
    place = PLACES[name]._replace(ring=3 if name == "ring of 3" else 1)
    for lse in (False, True):
        assert_right(defined(place, "full", lse=lse, sizes=sizes), "full", 1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("name", PLACES)
def test_attention_in_a_ring_and_its_gradients_are_torch_s(name: str, mode: str) -> None:
    assert_right(defined(PLACES[name], mode, lse=True), mode, 1e-10)


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize(("dtype", "tolerance"), [("Float", 2e-5), ("BFloat16", 3e-2), ("Half", 4e-3)])
def test_every_type_of_numbers(dtype: str, tolerance: float, mode: str) -> None:
    ring = defined(PLACES["ring of 4"], mode, mf.DataType[dtype])
    kinds = [ring.fd.recording.tensors[i].type.dtype.name for i in ring.fd.recording.outputs]
    assert kinds == [dtype, "Float", dtype, dtype, dtype]
    assert_right(ring, mode, tolerance)


@pytest.mark.parametrize("sharded", ["q", "kv", "v", "qkv"])
def test_whichever_operands_are_sharded(sharded: str) -> None:
    for mode in ASKED:
        assert_right(defined(PLACES["ring of 3"], mode, sharded=sharded), mode, 1e-10)


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("name", ["ring of 4", "ring of 3"])
def test_a_bias_and_a_mask_go_round_with_the_ring(name: str, mode: str) -> None:
    """The bias [h, s, s_k] in the ring's order with a gradient of its own, the mask [b, 1, 1, s_k] of padded keys."""
    place, (causal, zigzag) = PLACES[name], MODES[mode]
    (b, h, s, _), columns = QKV[0], QKV[1][2]
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor(list(shape), dtype=DOUBLE) for shape in (*QKV, (h, s, columns))]
    mask = fd.define_tensor([b, 1, 1, columns], dtype=mf.DataType.Bool)
    out, _ = fd.ops.ring_attention(*tensors[:3], place.ring, causal, None, zigzag, tensors[3], mask)
    for made in (out, *fd.grad(out, tensors[:3]), fd.grad(out, tensors[3])):
        fd.add_output(made)
    for tensor in tensors[:3]:
        fd.mesh_split(tensor, place.mesh, place.spec)
    inputs = inputs_of(fd)[:4]
    inputs.append(torch.rand(b, 1, 1, columns, generator=torch.Generator().manual_seed(2)) > 0.2)
    q, k, v, bias = leaves = [t.clone().requires_grad_() for t in inputs[:4]]
    keys, values = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    order = in_zigzag(torch.arange(s), place.ring) if zigzag else torch.arange(s)
    seen = inputs[4] & ((order <= order[:, None]) if causal else torch.tensor(True))
    scores = (q @ keys.mT * q.shape[-1] ** -0.5 + bias).masked_fill(~seen, float("-inf"))
    wanted = torch.nan_to_num(scores.softmax(-1)) @ values
    expected = [wanted, *torch.autograd.grad(wanted.sum(), leaves)]
    for found, value in zip(fd.simulate(inputs, check_replicas=True), expected, strict=True):
        torch.testing.assert_close(found, value.detach(), rtol=1e-10, atol=1e-10)


def test_where_all_is_seen_the_order_of_rows_changes_nothing() -> None:
    assert_right(defined(PLACES["ring of 4"], "zig-zag, all seen", lse=True), "zig-zag, all seen", 1e-10)


@pytest.mark.parametrize("mode", ["full", "causal"])
def test_keys_and_values_that_are_whole_anyway_do_not_travel(mode: str) -> None:
    assert defined(PLACES["ring of 4"], mode, sharded="q", backward=False).fd.bill().total == 0


@pytest.mark.parametrize("columns", [4, 12, 96])
def test_any_number_of_keys_is_right(columns: int) -> None:
    sizes = ((2, 4, 24, 8), *((2, 1, columns, 8),) * 2)
    assert_right(defined(PLACES["ring of 4"], "full", lse=True, sizes=sizes, scale=0.4), "full", 1e-10, 0.4)


def test_large_scores_are_merged_without_overflow() -> None:
    for mode in ASKED:
        assert_right(defined(PLACES["ring of 4"], mode, scale=300.0, backward=False), mode, 1e-9, 300.0)


def test_open_sizes_and_a_scale_that_is_a_scalar() -> None:
    fd = mf.FusionDefinition()
    q, k, v = (fd.define_tensor([-1, h, -1, 8], dtype=DOUBLE) for h in (4, 2, 2))
    scale = fd.define_scalar(dtype=DOUBLE)
    out, _ = fd.ops.ring_attention(q, k, v, 4, is_causal=True, scale=scale)
    fd.add_output(out)
    fd.add_output(fd.grad(out, k))
    for tensor in (q, k, v):
        fd.mesh_split(tensor, line(4), ALONG)
    for rows in (8, 16):
        inputs = [torch.randn(2, h, rows, 8, dtype=torch.float64) for h in (4, 2, 2)]
        ones = torch.ones_like(inputs[0])
        wanted = reference([*inputs, ones], "causal", 0.3)
        for found, expected in zip(fd.simulate([*inputs, 0.3]), (wanted[0], wanted[3]), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# what is sent -----------------------------------------------------------------------------------------------


def shard_bytes(place: Place) -> int:
    """Of one rank's k and v."""
    return 2 * 8 * math.prod(QKV[1]) // place.mesh.size


EXACT = ("ring of 2", "ring of 3", "ring of 4", "ring of 8", "batch", "heads")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("name", EXACT)
def test_ranks_send_their_keys_and_values_on_and_nothing_else(name: str, mode: str) -> None:
    """(n - 1) shards of k and v forward; and backward once more, and as many of their gradients: the least there is."""
    place = PLACES[name]
    hops = (place.ring - 1) * shard_bytes(place)
    forward, both = (defined(place, mode, backward=backward) for backward in (False, True))
    assert forward.fd.bill().total == hops
    assert both.fd.bill().total == 3 * hops
    assert counting.executed_bytes(both.fd, inputs_of(both.fd)) == both.fd.bill().total
    for fd in (forward.fd, both.fd):
        assert {entry.collective for entry in fd.bill().entries} == {"window"}
    for rank in place.mesh.ranks:
        for call in collectives(forward.fd, rank):
            sent = [int(n) for n in re.findall(r"\d+", call.text.split("[")[2])]
            assert call.kind == "all_to_all" and len(call.group) == place.ring
            assert len([n for n in sent if n]) == 1


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_hop_takes_one_message(ring: int) -> None:
    """Not one to each of the ring's ranks."""
    link = mf.Link(1e9, 1e-3)
    mesh = mf.DeviceMesh((ring,), ("cp",), links=link)
    bill = defined(Place(mesh, ALONG, ring), "causal", backward=False).fd.bill()
    assert bill.seconds == pytest.approx(2 * (ring - 1) * link.latency + bill.total / link.bandwidth)


def test_heads_are_not_repeated_on_their_way() -> None:
    few, many = (
        defined(PLACES["ring of 4"], "causal", sizes=((2, 8, 48, 8), *((2, heads, 48, 8),) * 2)) for heads in (1, 8)
    )
    assert many.fd.bill().total == 8 * few.fd.bill().total


@pytest.mark.parametrize("mode", ASKED)
def test_heads_of_a_group_on_several_ranks(mode: str) -> None:
    """Eight ranks with a head each, four of which share one of k and v: gradients of these are added up at home.

    They lie whole on the eight, as k and v do: each rank gets the other head's.
    """
    causal, zigzag = MODES[mode]
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((2, 8), ("cp", "tp"))
    q, k, v = (fd.define_tensor([1, heads, 32, 8], dtype=DOUBLE) for heads in (8, 2, 2))
    out, _ = fd.ops.ring_attention(q, k, v, 2, is_causal=causal, zigzag=zigzag)
    for output in (out, *fd.grad(out, [q, k, v])):
        fd.add_output(output)
    for tensor, heads in ((q, "tp"), (k, None), (v, None)):
        fd.mesh_split(tensor, mesh, [None, heads, "cp", None])
    head = 32 // 2 * 8 * 8
    assert fd.bill().total == 2 * (3 * head + 2 * 3 / 4 * head + head)
    rows = in_zigzag(torch.arange(32), 2) if zigzag else torch.arange(32)
    inputs = inputs_of(fd)
    wanted = reference([*inputs, torch.ones_like(inputs[0])], mode)
    found = fd.simulate([t[:, :, rows] for t in inputs], check_replicas=True)
    for one, other in zip(found, (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(one, other[:, :, rows], rtol=1e-10, atol=1e-10)


def test_gradients_of_half_precision_travel_in_float32() -> None:
    ring = defined(PLACES["ring of 4"], "zig-zag", mf.DataType.BFloat16)
    hops = 3 * shard_bytes(PLACES["ring of 4"]) // 8
    assert ring.fd.bill().total == 2 * (2 * hops) + 4 * hops


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_layer_around_the_ring_keeps_to_its_rows(backward: bool, zigzag: bool) -> None:
    """Projections of sharded rows: forward sends the ring's hops, backward beside those the gradients of weights."""
    fd, (b, s, d, h) = mf.FusionDefinition(), (2, 32, 16, 4)
    x, *weights = (fd.define_tensor(shape, dtype=DOUBLE) for shape in ([b, s, d], *[[d, d]] * 4))
    heads = [fd.ops.permute(fd.ops.reshape(fd.ops.linear(x, w), [b, s, h, d // h]), [0, 2, 1, 3]) for w in weights[:3]]
    out, _ = fd.ops.ring_attention(*heads, 4, is_causal=True, zigzag=zigzag)
    y = fd.ops.linear(fd.ops.reshape(fd.ops.permute(out, [0, 2, 1, 3]), [b, s, d]), weights[3])
    fd.add_output(y)
    # Slow ranks: at 50 Tflop/s a sequence of 32 is gathered, and all of it computed on every rank.
    fd.mesh_split(x, mf.DeviceMesh((4,), ("cp",), flops=1e9), [None, "cp", None])
    hops = 3 * 2 * b * s // 4 * d * 8
    for grad in fd.grad(y, weights) if backward else []:
        fd.add_output(grad)
    reduced = 4 * 2 * 3 / 4 * d * d * 8
    assert fd.bill().total == (3 * hops + reduced if backward else hops)


# order ------------------------------------------------------------------------------------------------------


def under_way(body: Sequence[Instruction]) -> list[set[str]]:
    """For every kernel with attention the works that are issued and not yet waited for."""
    works: set[str] = set()
    found: list[set[str]] = []
    for ins in body:
        if isinstance(ins, Collective):
            works.add(ins.work)
        elif isinstance(ins, Wait):
            works.discard(ins.work)
        elif isinstance(ins, Launch) and any("sdpfa_fwd" in text for text in ins.kernel.lines):
            found.append(set(works))
    return found


@pytest.mark.parametrize("mode", ASKED)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_next_block_is_on_its_way_while_this_one_is_worked_on(mode: str, rank: int) -> None:
    """Of k and v one block each is under way, never more: a rank's memory does not grow with the ring."""
    sizes = ((1, 16, 16384, 64), *((1, 8, 16384, 64),) * 2)  # worth a segment more
    fd = defined(PLACES["ring of 8"], mode, mf.DataType.Float, backward=False, sizes=sizes).fd
    found = under_way(fd.host_program(rank).instructions)
    assert max(map(len, found)) == 2
    beside = list(dict.fromkeys(frozenset(works) for works in found))
    assert [len(works) for works in beside] == [2] * 7 + [0]
    assert len(frozenset().union(*beside)) == 14


# zig-zag ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zigzag_sends_each_rank_what_it_lacks(ranks: int) -> None:
    mesh, rows = line(ranks), 16 * ranks
    x = torch.randn(rows, 3)
    for name, order in (("zigzag", in_zigzag(torch.arange(rows), ranks)), ("unzigzag", None)):
        index = order if order is not None else in_zigzag(torch.arange(rows), ranks).argsort()
        fd = mf.FusionDefinition()
        t = fd.define_tensor([rows, 3])
        made = getattr(fd.ops, name)(t, 0, ranks)
        fd.add_output(made)
        for tensor in (t, made):
            fd.mesh_split(tensor, mesh, ["cp", None])
        (found,) = fd.simulate([x], check_replicas=True)
        assert torch.equal(found, x[index])
        shards = torch.arange(rows).chunk(ranks), index.chunk(ranks)
        lacking = sum(int((~torch.isin(wanted, held)).sum()) for held, wanted in zip(*shards, strict=True))
        assert fd.bill().total == lacking * 3 * 4 / ranks


def test_rows_go_into_the_order_and_back() -> None:
    fd = mf.FusionDefinition()
    q, k, v = (fd.define_tensor(list(shape), dtype=DOUBLE) for shape in QKV)
    out, _ = fd.ops.ring_attention(*(fd.ops.zigzag(t, 2, 4) for t in (q, k, v)), 4, is_causal=True, zigzag=True)
    fd.add_output(fd.ops.unzigzag(out, 2, 4))
    fd.add_output(fd.grad(out, v))
    for tensor in (q, k, v):
        fd.mesh_split(tensor, line(4), ALONG)
    inputs = inputs_of(fd)
    wanted = reference([*inputs, torch.ones_like(inputs[0])], "causal")
    for found, expected in zip(fd.simulate(inputs), (wanted[0], wanted[4]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def products(fd: mf.FusionDefinition) -> float:
    """Operations of one rank's attention."""
    compiled = fd.compile()
    pairs = zip(compiled.graph.nodes, compiled.sharded.choices, strict=True)
    return sum(node.call.op.flops(node.call) / choice.placement.ways for node, choice in pairs
               if node.name in ("sdpfa_fwd", "sdpfa_bwd"))  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_zigzag_is_half_of_the_work(backward: bool) -> None:
    """Of n steps all but the first take half of what they take in the order of the sequence, on every rank."""
    plain, zigzag = (products(defined(PLACES["ring of 8"], mode, mf.DataType.Float, backward=backward).fd)
                     for mode in ("causal", "zig-zag"))  # fmt: skip
    assert zigzag == plain * (1 + 7 / 2) / 8


# what is said -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        (QKV, {"ring": 5}, "ring_attention: rows (dim 2) of query: found 48 in 5 blocks, needed a multiple of 5."),
        ((QKV[0], *((2, 2, 30, 8),) * 2), {"ring": 4}, "rows (dim 2) of key: found 30 in 4 blocks"),
        (QKV, {"ring": 48, "zigzag": True}, "found 48 in 96 blocks of a zig-zag order, needed a multiple of 96"),
        (QKV, {"ring": 0}, "ring_attention: ring: found 0, needed 1 or more"),
        ((QKV[0], *((2, 2, 24, 8),) * 2), {"ring": 2, "is_causal": True}, "found 48 and 24, needed as many"),
        (((3, *QKV[0]), (3, *QKV[1]), (3, *QKV[1])), {"ring": 2}, "needed 4 dims: batch, heads, rows, width"),
        (QKV, {"ring": 2, "dropout_p": 0.1}, "ring_attention: 'dropout_p' is not a parameter"),
    ],
)
def test_a_ring_that_cannot_be_is_an_error(sizes: Any, options: dict[str, Any], text: str) -> None:
    fd = mf.FusionDefinition()
    tensors = [fd.define_tensor(list(shape)) for shape in sizes]
    with pytest.raises(mf.DefinitionError, match=re.escape(text)):
        fd.ops.ring_attention(*tensors, **options)


def test_a_wrong_zigzag_is_an_error() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([12, 4])
    with pytest.raises(mf.DefinitionError, match=re.escape("found 12 elements in 8 blocks, needed equal blocks")):
        fd.ops.zigzag(x, 0, 4)
    with pytest.raises(mf.DefinitionError, match=re.escape("zigzag: ring: found 0, needed 1 to 65536")):
        fd.ops.zigzag(x, 0, 0)


def test_rounds_are_written_out_where_rows_are_sharded_only() -> None:
    for name, count in (("one rank", 2), ("whole", 2), ("ring of 4", 0)):
        compiled = defined(PLACES[name], "zig-zag").fd.compile()
        assert sum(node.name.startswith("ring_attention") for node in compiled.graph.nodes) == count
        assert sum(node.name.startswith("ring_attention") for node in compiled.planned.graph.nodes) == 2


def test_the_ring_is_printed_and_priced() -> None:
    fd = defined(PLACES["ring of 4"], "zig-zag", mf.DataType.Float, backward=False).fd
    assert "fd.ops.ring_attention(t0, t1, t2, 4, is_causal=True, zigzag=True)" in repr(fd)
    assert "runner-up" in fd.bill(alternatives=True).details()
    assert fd.explain().count("cp from t0") > 1
