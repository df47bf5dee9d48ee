"""Whole programs and single ops with nvFuser's own kernels: `make gpu-check`, on a machine with CUDA and nvFuser."""

from __future__ import annotations

import pytest
import torch
from whole_programs import PROGRAMS, compare

import meshfuse as mf
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.binding import make_call
from meshfuse.testing.calls import define_call, operands_of, retyped, whole
from op_references import NVIDIA_ONLY

pytestmark = pytest.mark.gpu

DTYPES = {torch.float64: DataType.Double, torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16}
# Random numbers differ between torch's devices, and some ops have no reference on a CPU.
RANDOM = {name for name, op in OPS.items() if isinstance(op.nvfuser, str)}
LEFT_OUT = RANDOM | NVIDIA_ONLY
# Some samples of these have no kernel (0.2.36): torch computes them, with the reason in the table.
UNRUN = {"scatter", "grouped_mm", "scaled_mm", "linear", "cumsum_bwd"}
SAMPLES = [
    (name, place)
    for name, op in OPS.items() if name not in LEFT_OUT
    for place, sample in enumerate(op.samples()) if not dict(sample.kwargs).get("dropout_p")
]  # fmt: skip


def chosen(fd: mf.FusionDefinition) -> set[tuple[str, str]]:
    (made,) = fd._simulated.values()
    return {(c.backend, c.why) for segments in made.simulation.segments for c in segments.chosen.values()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_programs(name: str, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS[name]
    fd, inputs = program.definition(mf.DeviceMesh((ranks,), ("r",)), DTYPES[dtype]), program.inputs(dtype, "cuda")
    for _ in range(2):
        compare(fd.simulate(inputs), program.expected(inputs), dtype)
    assert {backend for backend, _ in chosen(fd)} == {"nvfuser"}
    assert name == "dropout" or {why for _, why in chosen(fd)} == {"compiled"}


@pytest.mark.parametrize("backend", ["eager", "nvfuser"])
@pytest.mark.parametrize("name", [name for name, p in PROGRAMS.items() if name != "dropout" and not p.scalars])
def test_a_step_as_a_graph(name: str, backend: str) -> None:
    """Replayed with other arguments, and with those of before; earlier results stay."""
    program, dtype = PROGRAMS[name], torch.float32
    fd = program.definition(mf.DeviceMesh((1,), ("r",)), DTYPES[dtype])
    first = program.inputs(dtype, "cuda")
    steps = [first, [t.flip(0) if t.is_floating_point() else t for t in first], first]
    found = [fd.execute(inputs, backend=backend, cuda_graph=True) for inputs in steps]
    for outputs, inputs in zip(found, steps, strict=True):
        compare(outputs, program.expected(inputs), dtype)


@pytest.mark.parametrize("half", [None, DataType.BFloat16, DataType.Half], ids=str)
@pytest.mark.parametrize(("name", "place"), SAMPLES)
def test_every_op(name: str, place: int, half: DataType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a definition of its own, against torch on the CPU; also with its floating point operands in half precision."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    sample = OPS[name].samples()[place]
    if half is not None:
        sample = retyped(sample, half)
    try:
        call = make_call(OPS[name], sample)
    except mf.DefinitionError:
        assert half is not None  # Not for halves.
        return
    operands = operands_of(call, sample)
    with mf.FusionDefinition() as fd:
        for output in define_call(fd, OPS[name], sample)[1]:
            fd.add_output(output)
    found = fd.simulate([t.cuda() for t in operands])
    for a, b in zip(found, whole(call, operands), strict=True):
        tolerance = 2e-2 if half or a.dtype in (torch.float16, torch.bfloat16) else 2e-4
        if a.dtype is not torch.uint64:  # attention's random state
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
    unrun = [why for _, why in chosen(fd) if "nvFuser cannot run it" in why or "nvFuser gives" in why]
    assert name in UNRUN or not unrun
