"""Arguments whose memory is not simply their numbers one after another, over every path that reads memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

import meshfuse as mf

pytestmark = pytest.mark.ranks

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64,
    torch.bool,
)  # fmt: skip


def numbers(dtype: torch.dtype, rows: int) -> torch.Tensor:
    made = torch.arange(1.0, 4 * rows + 1).reshape(rows, 4) % 7
    return (made * (1 + 2j)).to(dtype) if dtype.is_complex else made.to(dtype)


def strided(t: torch.Tensor) -> torch.Tensor:
    """Every other element of larger memory: a shard of one element has a stride of its own."""
    wide = torch.zeros([2 * n for n in t.shape], dtype=t.dtype)
    found = wide[::2, ::2]
    return found.copy_(t)


def lazy(t: torch.Tensor) -> torch.Tensor:
    """Memory of the negatives, or the conjugates."""
    if t.dtype.is_complex:
        return torch.conj(t.conj().resolve_conj())
    return torch._neg_view(-t) if t.dtype.is_floating_point else t


def both(t: torch.Tensor) -> torch.Tensor:
    return lazy(strided(t)) if t.dtype.is_floating_point or t.dtype.is_complex else strided(t)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": strided, "lazy": lazy, "both": both, "transposed": lambda t: t.t().contiguous().t(),
}  # fmt: skip


def on_rank_gathered(form: str) -> list[str]:
    """What came out otherwise than it went in, for every dtype, of blocks of one element, of several and of a chunk."""
    wrong = []
    for dtype in DTYPES:
        for rows, names in ((1, [None, "tp"]), (2, ["tp", None]), (6, [[mf.Split(2), mf.Split(2, "tp")], None])):
            whole = numbers(dtype, rows)[:, : 2 if rows == 1 else 4]
            with mf.FusionDefinition() as fd:
                x = fd.define_tensor(list(whole.shape), dtype=mf.DataType(str(dtype).removeprefix("torch.")))
                y = fd.ops.set(x)
                fd.add_output(y)
                mesh = mf.DeviceMesh((2,), ("tp",))
                fd.mesh_split(x, mesh, names)
                fd.mesh_split(y, mesh, [None, None])
            for _ in range(2):
                if not torch.equal(fd.execute([FORMS[form](mf.shard_tensor(whole, x))])[0], whole):
                    wrong.append(f"execute {dtype} {rows}")
                if not torch.equal(fd(FORMS[form](whole))[0], whole):
                    wrong.append(f"call {dtype} {rows}")
    return wrong


@pytest.mark.parametrize("form", FORMS)
def test_what_is_sent_are_the_numbers(ranks2, form: str) -> None:
    assert ranks2.run(on_rank_gathered, form) == [[], []]


def on_rank_compiled() -> list[bool]:
    """Whether results are right: the segment is compiled for a lazy view, and then called with others."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4])
        fd.add_output(fd.ops.add(fd.ops.mul(x, x), x))
        fd.mesh_split(x, mf.DeviceMesh((2,), ("tp",)), ["tp", None])
    shard = mf.shard_tensor(numbers(torch.float32, 4), x)
    found = [fd.execute([form(shard)], backend="inductor")[0] for form in (lazy, torch.clone, lazy)]
    return [torch.equal(one, shard * shard + shard) for one in found]


def test_compiled_segments_read_the_numbers(ranks2) -> None:
    assert ranks2.run(on_rank_compiled, timeout=280.0) == [[True] * 3] * 2


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return x.conj()


def on_rank_of_user() -> torch.Tensor:
    """An op of the user's that returns a lazy view, gathered."""
    op = mf.register_op(mf.torch_op("a b -> a b", name="conjugated")(conjugated))
    try:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([4, 4], dtype=mf.DataType.ComplexDouble)
            y = fd.ops.conjugated(x)
            fd.add_output(y)
            mesh = mf.DeviceMesh((2,), ("tp",))
            fd.mesh_split(x, mesh, ["tp", None])
            fd.mesh_split(y, mesh, [None, None])
        return fd.execute([mf.shard_tensor(numbers(torch.complex128, 4), x)])[0]
    finally:
        mf.unregister_op(op.name)


def test_lazy_results_of_a_users_op_are_settled(ranks2) -> None:
    for found in ranks2.run(on_rank_of_user):
        assert torch.equal(found, numbers(torch.complex128, 4).conj().resolve_conj())


def added(x: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, x.unbind(0))  # of one row: a view of it


def on_rank_summed() -> list[str]:
    """What a sum over rows, of which each rank has one, gives otherwise than it should at several calls, and writes."""
    op = mf.register_op(mf.torch_op("a b -> b", name="added")(added))
    try:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([2, 4])
            y = fd.ops.added(x)
            fd.add_output(y)
            mesh = mf.DeviceMesh((2,), ("tp",))
            fd.mesh_split(x, mesh, ["tp", None])
            fd.mesh_split(y, mesh, [None])
        whole, wrong = numbers(torch.float32, 2), []
        right, shard = whole.sum(0), mf.shard_tensor(whole, x).clone()
        for call in range(3):
            found = {"execute": fd.execute([shard]), "call": fd(whole), "simulate": fd.simulate([whole])}
            wrong += [f"{how} {call}" for how, (one,) in found.items() if not torch.equal(one, right)]
        written = {"shard": shard._version, "whole": whole._version}
        return wrong + [f"the {name} was written to" for name, version in written.items() if version]
    finally:
        mf.unregister_op(op.name)


def test_a_sum_that_is_a_view_of_an_argument_is_reduced_elsewhere(ranks2) -> None:
    """Reductions work in place: in the argument they would leave the sum, which the next call would add up again."""
    assert ranks2.run(on_rank_summed) == [[], []]
