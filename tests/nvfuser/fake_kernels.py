"""Native definitions that are built for real and run as torch code: what can be tested of them without a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from native_calls import differences

from meshfuse.backends import assignment
from meshfuse.backends.nvfuser.backend import NvFuser
from meshfuse.backends.nvfuser.launch import NativePart, Run, check_outputs, laid_out
from meshfuse.dtypes import from_torch

# What nvFuser's kernels write beside its memory (see backends/nvfuser/repeated.py), and what they do not compile with.
_MISCOMPUTED = re.compile(r"fd\.ops\.(?:expand\(|(?:sum|prod|max|min)\(.*dtype=DataType\.(?:BFloat16|Half)\))")
_INPUT = re.compile(r"define_tensor\(shape=(\[.*?\]), contiguity=(\[.*?\])(?:.*stride_order=(\[.*?\]))?.*\)")


class FakeLauncher:
    """Compares what a definition is called with and what it has to give with the definition that was built."""

    def __init__(self) -> None:
        self.parts: list[NativePart] = []
        self.calls = 0

    def check(self, device: torch.device) -> None:
        """Every device will do."""

    def prepare(self, part: NativePart, device: torch.device) -> Run:
        assert not differences(part.kernel)
        assert not _MISCOMPUTED.search(repr(part.kernel.definition))
        assert not [cut for cut in cuts(repr(part.kernel.definition)) if cut[0] > 0 and cut[1] - cut[0] == 1]
        self.parts.append(part)

        def run(arguments: list[Any]) -> Sequence[torch.Tensor]:
            self.calls += 1
            self._check(part, arguments)
            made = part.text(arguments)
            check_outputs(part, made)
            # A kernel's outputs are in new memory.
            return laid_out(made, part.strides, range(len(made)))

        return run

    def _check(self, part: NativePart, arguments: list[Any]) -> None:
        tensors, inputs = arguments[: len(part.kernel.inputs)], part.kernel.inputs
        assert [(tuple(t.shape), from_torch(t.dtype)) for t in tensors] == [t[:2] for t in inputs]
        numbers = arguments[len(inputs) :]
        assert len(numbers) == len(part.kernel.scalars) and all(isinstance(n, (int, float, complex)) for n in numbers)
        for (order, contiguity), tensor in zip(native_layouts(part), tensors, strict=True):
            check_strides(order, contiguity, tensor)


def cuts(definition: str) -> Iterator[tuple[int, int]]:
    """Where a definition's slices begin and end, by dim."""
    for starts, ends in re.findall(r"fd\.ops\.slice\(.*start_indices=(\[.*?\]), end_indices=(\[.*?\])", definition):
        yield from zip(ast.literal_eval(starts), ast.literal_eval(ends), strict=True)


def native_layouts(part: NativePart) -> Iterator[tuple[list[int], list[bool | None]]]:
    """Of each tensor input the dims from the slowest to the fastest, and whether each is contiguous, by nvFuser."""
    for found in _INPUT.finditer(repr(part.kernel.definition)):
        shape, contiguity, order = (ast.literal_eval(text or "[]") for text in found.groups())
        dims = sorted(range(len(shape)), key=lambda d: -(order or range(len(shape), 0, -1))[d])
        yield dims, contiguity


def check_strides(order: list[int], contiguity: list[bool | None], tensor: torch.Tensor) -> None:
    """A tensor lies as a definition's input must: contiguous dims follow on each other without holes."""
    expected = 1
    for dim, dense in reversed(list(zip(order, contiguity, strict=True))):
        if tensor.shape[dim] == 1 or tensor.numel() == 0:
            continue
        assert dense is not None and (not dense or tensor.stride(dim) == expected), (order, contiguity, tensor.stride())
        expected = tensor.stride(dim) * tensor.shape[dim]


def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments are taken apart at their products, as large ones are."""
    monkeypatch.setattr("meshfuse.backends.gpu_costs._HOST", 0.0)


def use(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    """Make fake kernels what MESHFUSE_BACKEND=nvfuser stands for."""
    launcher = FakeLauncher()
    maker: Callable[[], NvFuser] = lambda: NvFuser(launcher)  # noqa: E731
    monkeypatch.setitem(assignment.MAKERS, "nvfuser", maker)  # type: ignore[arg-type]
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    return launcher
