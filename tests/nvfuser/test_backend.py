"""Whole programs through the nvFuser backend: real definitions, fake kernels; numbers against unsharded torch."""

from __future__ import annotations

import itertools

import fake_kernels
import pytest
import torch
from whole_programs import PROGRAMS, compare

import meshfuse as mf
from meshfuse.dtypes import DataType

pytestmark = pytest.mark.nvfuser

DTYPES = {torch.float64: DataType.Double, torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16}


def chosen(fd: mf.FusionDefinition) -> list[tuple[str, str]]:
    (made,) = fd._simulated.values()
    return [(c.backend, c.why) for segments in made.simulation.segments for c in segments.chosen.values()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_programs(name: str, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = fake_kernels.use(monkeypatch)
    program = PROGRAMS[name]
    fd, inputs = program.definition(mf.DeviceMesh((ranks,), ("r",)), DTYPES[dtype]), program.inputs(dtype)
    # On a CPU torch lays some products of 16-bit floats out otherwise than it traces them: their readers run as text.
    least = 0.9 if dtype is torch.bfloat16 else 1.0
    for calls in (1, 2):
        compare(fd.simulate(inputs), program.expected(inputs), dtype)
        assert least * calls * len(launcher.parts) <= launcher.calls <= calls * len(launcher.parts) > 0
    assert {backend for backend, _ in chosen(fd)} == {"nvfuser"}


def test_what_is_left_to_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels.use(monkeypatch)
    program = PROGRAMS["dropout"]
    fd = program.definition(mf.DeviceMesh((2,), ("r",)), DataType.Float)
    fd.simulate(program.inputs(torch.float32))
    for _, why in chosen(fd):
        assert " ops compiled in 2 definitions, 1 left to torch: " in why and "random numbers" in why


ORDERS = list(itertools.permutations(range(3)))


def laid_out(inputs: list[torch.Tensor], order: tuple[int, ...]) -> list[torch.Tensor]:
    back = [order.index(d) for d in range(3)]
    return [t.permute(order).contiguous().permute(back) for t in inputs]


@pytest.mark.parametrize("order", ORDERS)
def test_inputs_of_any_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions are made for how the first call's inputs lie; later ones that do not fit run as text."""
    launcher = fake_kernels.use(monkeypatch)
    program = PROGRAMS["permuted"]
    fd = program.definition(mf.DeviceMesh((1,), ("r",)), DataType.Double)
    for later in (order, *ORDERS):
        inputs, before = laid_out(program.inputs(torch.float64), later), launcher.calls
        compare(fd.execute(inputs), program.expected(inputs), torch.float64)
        assert (launcher.calls > before) == (later == order)


def test_inputs_with_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made for dense inputs does not take others; what is made for holes and repeats takes both."""
    launcher = fake_kernels.use(monkeypatch)
    program = PROGRAMS["permuted"]
    dense = program.inputs(torch.float64)
    holes = [torch.zeros([2 * n for n in t.shape], dtype=t.dtype)[::2, ::2, ::2].copy_(t) for t in dense]
    repeated = [t[:, :1].expand(t.shape) for t in dense]
    for first, counts in ((dense, (1, 0, 0)), (holes, (1, 1, 1)), (repeated, (1, 0, 1))):
        fd = program.definition(mf.DeviceMesh((1,), ("r",)), DataType.Double)
        for later, taken in zip((first, dense, holes, repeated), (1, *counts), strict=True):
            before = launcher.calls
            compare(fd.execute(later), program.expected(later), torch.float64)
            assert (launcher.calls > before) == taken


def test_a_cpu_leaves_segments_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS["softmax"]
    fd, inputs = program.definition(mf.DeviceMesh((2,), ("r",)), DataType.Float), program.inputs(torch.float32)
    compare(fd.simulate(inputs), program.expected(inputs), torch.float32)
    told = "nvfuser: nvFuser computes on CUDA devices, and these tensors are on cpu"
    assert set(chosen(fd)) == {("eager", told)}
