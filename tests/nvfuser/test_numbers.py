"""What a kernel gives is compared with torch before it is used: a wrong one is left to torch, with the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from whole_programs import PROGRAMS, compare

import meshfuse as mf
from meshfuse.backends import Unsupported, assignment
from meshfuse.backends.nvfuser.backend import NvFuser
from meshfuse.backends.nvfuser.launch import CudaLauncher, NativePart, Run, drawn, share_wrong
from meshfuse.dtypes import DataType

pytestmark = pytest.mark.nvfuser


class Miscomputing(CudaLauncher):
    """Kernels that are the parts' text, on a CPU; of definitions with a `sum` some of the first output is wrong."""

    calls = 0

    def check(self, device: torch.device) -> None:
        """Every device will do."""

    def _first_call(self, part: NativePart, given: list[Any], device: torch.device) -> tuple[Any, Run]:
        def run(arguments: list[Any]) -> Sequence[torch.Tensor]:
            self.calls += 1
            made = [t.clone(memory_format=torch.preserve_format) for t in part.text(arguments)]
            if ".sum(" in repr(part.kernel.definition):
                made[0].view(-1)[-max(1, made[0].numel() // 8) :] += 1.0
            return made

        return run(given), run


def test_a_wrong_kernel_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Miscomputing()
    monkeypatch.setitem(assignment.MAKERS, "nvfuser", lambda: NvFuser(launcher))  # type: ignore[arg-type]
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS["block"]
    fd, inputs = program.definition(mf.DeviceMesh((2,), ("r",)), DataType.Float), program.inputs(torch.float32)
    for _ in range(2):
        compare(fd.simulate(inputs), program.expected(inputs), torch.float32)
    assert launcher.calls
    assert re.search(r"nvFuser computes something else: \d+% of output 0", fd.backends())


T = torch.tensor


@pytest.mark.parametrize(("a", "b", "share"), [
    (T([1.0, 2.0, 3.0, 4.0]), T([1.0, 2.0, 3.0, 4.0002]), 0.0),
    (T([1.0, 2.0, 3.0, 4.1]), T([1.0, 2.0, 3.0, 4.0]), 0.25),
    (T([math.nan, 1.0]), T([math.nan, math.nan]), 0.5),
    (T([math.inf, -math.inf, 1.0, 1.0]), T([math.inf, math.inf, math.inf, 1.0]), 0.5),
    (T([1e-9, -1e-9]), T([-1e-9, 1e-9]), 0.0),
    (T([True, False]), T([True, True]), 0.5),
    (T([5, 6]), T([5, 7]), 0.5),
    (T([1 + 2j]), T([1 + 3j]), 0.5),
    (T([1 + 2j]), T([1 + 2.0001j]), 0.0),
    (T([1, 2]).to(torch.uint64), T([3, 4]).to(torch.uint64), 0.0),
    (T([]), T([]), 0.0),
])  # fmt: skip
def test_the_share_of_wrong_elements(a: torch.Tensor, b: torch.Tensor, share: float) -> None:
    assert share_wrong(a, b) == share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_kernels_are_compared_with_numbers_that_differ(dtype: torch.dtype) -> None:
    """Equal ones would hide what a kernel reads from a wrong place, or which side of a mask it takes."""
    like = torch.empty((30, 4), dtype=dtype).t()
    found = drawn(like, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert (found.dtype, found.shape, found.stride()) == (dtype, like.shape, like.stride())
    numbers = found.cfloat() if dtype.is_complex else found.float()
    assert len(set(numbers.flatten().tolist())) > 1 and numbers.abs().max() < 1.6


def test_integers_that_may_be_indices_are_zeros() -> None:
    like = torch.ones((3,), dtype=torch.int64)
    assert not drawn(like, torch.device("cpu"), torch.Generator()).any()


def test_a_cpu_is_refused_before_anything_is_computed() -> None:
    """A device without nvFuser's kernels says so, before anything is computed."""
    with pytest.raises(Unsupported, match="computes on CUDA devices"):
        CudaLauncher().check(torch.device("cpu"))
