"""Whole programs and single ops with nvFuser's own kernels: `make gpu-check`, on a machine with CUDA and nvFuser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fake_kernels
import pytest
import torch
from whole_programs import PROGRAMS, compare

import meshfuse as mf
from meshfuse.backends import assignment
from meshfuse.backends.nvfuser.backend import NvFuser
from meshfuse.backends.nvfuser.launch import CudaLauncher, NativePart, Run
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
    (made,) = fd._execution.simulated.values()
    return {(c.backend, c.why) for segments in made.simulation.segments for c in segments.chosen.values()}


class Comparing(CudaLauncher):
    """Compares what each definition gives with what its text does on the same arguments."""

    calls = 0

    def prepare(self, part: NativePart, device: torch.device) -> Run:
        run = super().prepare(part, device)

        def both(arguments: list[Any]) -> Sequence[torch.Tensor]:
            self.calls += 1
            expected, made = [t.clone() for t in part.text(arguments)], run(arguments)
            for a, b in zip(made, expected, strict=True):
                limit = 1e-5 if a.dtype is torch.float32 else 1e-12 if a.dtype is torch.float64 else 2e-2
                if b.numel():
                    error = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-3)
                    assert error <= limit, f"{part.kernel.name}: {error}\n{part.kernel.definition!r}"
            return made

        return both


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_programs(
    name: str, staged: bool, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Comparing()
    if staged:
        fake_kernels.staged(monkeypatch)
    monkeypatch.setitem(assignment.MAKERS, "nvfuser", lambda: NvFuser(launcher))  # type: ignore[arg-type]
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS[name]
    fd, inputs = program.definition(mf.DeviceMesh((ranks,), ("r",)), DTYPES[dtype]), program.inputs(dtype, "cuda")
    for _ in range(2):
        compare(fd.simulate(inputs), program.expected(inputs), dtype)
    assert launcher.calls
    assert name == "dropout" or not [why for _, why in chosen(fd) if "nvFuser" in why]


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


@pytest.mark.parametrize("size, by", [(64, "inductor"), (2048, "nvfuser")])
def test_auto_compiles_by_nvfuser_what_keeps_the_gpu_busy(size: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHFUSE_BACKEND", raising=False)
    monkeypatch.setattr(assignment, "_COMPILE", 0.0)
    monkeypatch.setattr(assignment, "_COMPILE_OP", 0.0)
    x, w = (torch.randn(size, size, device="cuda") / size**0.5 for _ in range(2))
    with mf.FusionDefinition() as fd:
        made, weight = fd.define_tensor([size, size]), fd.define_tensor([size, size])
        for _ in range(4):
            made = fd.ops.sin(fd.ops.exp(fd.ops.relu(fd.ops.matmul(made, weight)) * 0.5) - 1.0)
        fd.add_output(made)
    expected = x.double()
    for _ in range(4):
        expected = torch.sin(torch.exp(torch.relu(expected @ w.double()) * 0.5) - 1.0)
    for _ in range(20):
        (found,) = fd.execute([x, w])
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    assert fd.backends().splitlines()[1].split()[1] == by, fd.backends()


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
