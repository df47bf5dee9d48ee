"""Every op of the table: what it computes, along what it may be sharded, and what it does to unreduced
operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import meshfuse.kernels as K
import op_references as references
from attention_references import ATTENTION, GRADIENTS, attention, attention_bwd, seen_in_ring
from meshfuse.errors import KernelError
from meshfuse.lowering.rank_lowering import sums_in_new_memory
from meshfuse.ops import OPS
from meshfuse.ops.local import LocalCall
from meshfuse.ops.opdef import Call
from meshfuse.testing import check_op, parts
from meshfuse.testing.calls import names_of
from meshfuse.testing.cases import factor_cases
from op_harness import SALT, argument, make_call, operands_of, run_lowering, sample_ids, whole

SAMPLES = sample_ids()
RUNNABLE = [pair for pair in SAMPLES if pair[0] not in references.NVIDIA_ONLY]


def _sampled(name: str, place: int) -> tuple[Call, list[torch.Tensor]]:
    op = OPS[name]
    samples = op.samples()
    assert samples, f"{name} has no samples"
    call = make_call(op, samples[place])
    operands = operands_of(call, samples[place])
    if name in GRADIENTS:
        _save_forward(call, operands)
    return call, operands


def _save_forward(call: Call, operands: list[torch.Tensor]) -> None:
    """The output and log-sum-exp that the backward pass is given are those of its own forward pass."""
    inputs = [t.double() for t in operands[1:4]]
    added, causal, scale, kept = _options(call, operands)
    out, lse = attention([*inputs, *added], causal, scale, kept)
    operands[4], operands[5] = out.float(), lse.float()


def _options(call: Call, operands: list[torch.Tensor]) -> tuple[Any, Any, Any, Any]:
    """(bias, mask), causal, scale and dropout's factors of an op that gives gradients of attention."""
    bias, mask = (None if call[name] is None else operands[call[name].id] for name in ("bias", "mask"))
    if mask is not None and mask.dtype != torch.bool:
        bias, mask = mask.double() if bias is None else bias + mask, None
    bias = bias if bias is None else bias.double()
    if "ring" not in call.op.places:
        return (bias, mask), call["is_causal"], call["scale"], _kept(call, operands, operands[2])
    seen = seen_in_ring(operands[1].shape[-2], call["ring"], call["is_causal"], call["zigzag"], mask)
    return (bias, seen), False, call["scale"], None


def _kept(call: Call, operands: list[torch.Tensor], key: torch.Tensor) -> torch.Tensor | None:
    """Dropout's factors, of the random numbers that the op is given."""
    p = call["dropout_p"]
    if not p:
        return None
    query = operands[call.op.places["query"]]
    shape = (*query.shape[:-1], key.shape[-2])
    stream = (5, 2, 1) if call.op.name.startswith("sdpfa_bwd") else (5, 2, SALT)
    drawn = K.uniform(0.0, 1.0, [((0, n),) for n in shape], shape, stream, torch.float32, "cpu")
    return (drawn >= p).double() / (1 - p)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def _reference(call: Call, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results by the op's reference, in float64."""
    wide = [_wide(t) for t in operands]
    if call.op.name in GRADIENTS:
        more = "grad_logsumexp" in call.op.places and call["grad_logsumexp"] is not None
        grad_lse = wide[call["grad_logsumexp"].id] if more else None
        gradients = attention_bwd(wide[:4], *_options(call, operands), grad_lse)
        return list(gradients[GRADIENTS[call.op.name]])
    args = [argument(arg, wide) for arg in call.args]
    if call.op.name in ATTENTION:
        options = (call["is_causal"], call["scale"], _kept(call, operands, wide[1]))
        made = ATTENTION[call.op.name](args[:5], *options, *args[8:])
        state = ([5, SALT], 2) if call["dropout_p"] else ([0, 0], 0)  # Without dropout, nothing is drawn.
        return [*made, *map(torch.tensor, state)]
    made = references.REFERENCES[call.op.name](*args)
    return list(made) if isinstance(made, tuple) else [made]


def _assert_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        a, b = (t.long() if t.dtype == torch.uint64 else t for t in (a, b))
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def _tolerance(call: Call) -> float:
    if call.op.name == "nextafter":
        return 0.0
    return 2e-3 if any(t.dtype.is_reduced_float for t in (*call.types, *call.results)) else 2e-5


@pytest.mark.parametrize(("name", "place"), [pair for pair in RUNNABLE if pair[0] not in references.RANDOM])
def test_an_op_on_one_rank_computes_what_torch_does_in_float64(name: str, place: int) -> None:
    call, operands = _sampled(name, place)
    found = whole(call, operands)
    for tensor, ttype in zip(found, call.results, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (ttype.shape, getattr(torch, ttype.dtype.value))
    _assert_equal(found, _reference(call, operands), _tolerance(call))


@pytest.mark.parametrize("name", [name for name in OPS if name not in references.NVIDIA_ONLY])
def test_the_rules_of_an_op_hold(name: str) -> None:
    """On shards of every kind, on unreduced operands, in its distributed form, and its derivative."""
    check_op(OPS[name], max_examples=4)


@pytest.mark.parametrize("name", sorted(references.NVIDIA_ONLY))
def test_what_needs_nvidia_is_typed_and_says_so_when_run(name: str) -> None:
    call = make_call(OPS[name], OPS[name].samples()[0])
    assert call.results and len(call.op.rule(call).results) == len(call.results)
    with pytest.raises(KernelError, match=f"{name} cannot run here: it needs nvFuser and a GPU"):
        whole(call, [torch.empty(0)] * len(call.types))


def _places(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


@pytest.mark.parametrize(("name", "place"), RUNNABLE)
def test_a_sum_that_is_reduced_in_place_shares_no_memory_with_operands(
    name: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every dim that is summed, also where a rank has one index of it: the reduction would write to arguments."""
    run, shared = parts.run_lowering, list[list[int]]()

    def watched(local: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = run(local, operands)
        if not _places(operands).isdisjoint(_places(results)):
            shared.append([list(t.shape) for t in operands])
        return results

    monkeypatch.setattr(parts, "run_lowering", watched)
    sample = OPS[name].samples()[place]
    call, operands = _sampled(name, place)
    for case in factor_cases(OPS[name], sample):
        sharded = parts.Sharded(call, case.mesh, case.layouts)
        if sums_in_new_memory(call.op, sharded.rule, sharded.layouts):
            sharded.run(operands)
    assert not shared


@pytest.mark.parametrize("name", sorted({name for name, _ in RUNNABLE}))
def test_the_default_device_makes_no_difference(name: str) -> None:
    """Whole, and on shards: what an op makes beside its operands is where these are. Every text that differs from
    others by more than numbers is run, on a first and a last rank.
    """
    texts: set[str] = set()
    for sample in OPS[name].samples():
        call = make_call(OPS[name], sample)
        operands = operands_of(call, sample)
        _assert_same_on_meta(lambda call=call, operands=operands: whole(call, operands))
        for case in factor_cases(OPS[name], sample):
            for local, cut in _local_calls(parts.Sharded(call, case.mesh, case.layouts), operands, texts):
                _assert_same_on_meta(lambda local=local, cut=cut: run_lowering(local, cut))


def _local_calls(
    sharded: parts.Sharded, operands: list[torch.Tensor], texts: set[str]
) -> Iterator[tuple[LocalCall, list[torch.Tensor]]]:
    """The first and the last rank's call with its operands, where its text is none of `texts`, to which it is added."""
    shardings = sharded.shardings()
    for rank in {sharded.ranks[0], sharded.ranks[-1]} if shardings is not None else ():
        local = LocalCall(sharded.call, names_of(sharded.call), *shardings, rank, number=SALT)
        results = [f"out{i}" for i in range(len(shardings[1]))]
        text = re.sub(r"\d+", "0", "\n".join(local.statements(results)))
        if text not in texts:
            texts.add(text)
            yield local, sharded._cut(operands, rank)


def _assert_same_on_meta(run: Callable[[], list[torch.Tensor]]) -> None:
    wanted = run()
    with torch.device("meta"):
        found = run()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_every_op_has_samples_and_a_reference() -> None:
    assert not [name for name, op in OPS.items() if not op.samples()]
    covered = {*references.REFERENCES, *references.RANDOM, *references.NVIDIA_ONLY}
    covered |= {*ATTENTION, *GRADIENTS}
    assert set(OPS) <= covered
