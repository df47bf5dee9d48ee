"""How native definitions are launched, on stand-ins for nvFuser's: layouts, and outputs that lie otherwise."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.backends import Unsupported
from meshfuse.backends.nvfuser.launch import CudaLauncher, NativePart
from meshfuse.backends.nvfuser.memory_layout import dense_strides, memory_layout
from meshfuse.backends.nvfuser.segment import NativeKernel
from meshfuse.dtypes import DataType, from_torch
from meshfuse.ops.values import TensorType

CPU = torch.device("cpu", 0)
Body = Callable[[torch.Tensor], list[torch.Tensor]]


def launched(text: Body, native: Body, x: torch.Tensor) -> list[torch.Tensor]:
    """`native` in the place of a definition whose ops in torch are `text`, on x; first it is prepared."""
    made = text(x)
    outputs = tuple(TensorType(tuple(t.shape), DataType.Float) for t in made)
    owned = frozenset(i for i, t in enumerate(made) if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())
    definition = SimpleNamespace(execute=lambda arguments, device: native(*arguments))
    kernel = NativeKernel("segment_0", definition, (TensorType(tuple(x.shape), DataType.Float),), (), outputs)
    run = lambda arguments: text(*arguments)  # noqa: E731
    part = NativePart(kernel, run, str(uuid.uuid4()), (x.to("meta"),), tuple(map(dense_strides, made)), owned)
    return list(CudaLauncher().prepare(part, CPU)([x]))


CASES: dict[str, tuple[Body, Body]] = {
    "as it should": (lambda x: [x + 1, x * 2], lambda x: [x + 1, x * 2]),
    "a view of an input": (lambda x: [x.sum(1, True).clone()], lambda x: [x[:, :1]]),
    "one memory for two": (lambda x: [x + 1, x + 1], lambda x: [y := x + 1, y]),
    "another order": (lambda x: [x + 1], lambda x: [(x + 1).t().contiguous().t()]),
    "row-major for a permuted one": (lambda x: [(x + 1).t()], lambda x: [(x + 1).t().contiguous()]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(3, 1), (3, 4)])
def test_outputs_are_where_the_program_needs_them(name: str, shape: tuple[int, int]) -> None:
    """Each in the order of the text's, and in memory of its own where the text's are: the program may write there."""
    text, native = CASES[name]
    if name == "a view of an input" and shape[1] != 1:
        native = lambda x: [x.sum(1, True)]  # noqa: E731
    x = torch.rand(shape)
    before, found, expected = x.clone(), launched(text, native, x), text(x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert memory_layout(a) == memory_layout(b)
    kept = [t.clone() for t in found]
    for place, tensor in enumerate(found):
        tensor.add_(1)
        for later in range(place + 1, len(found)):
            assert torch.equal(found[later], kept[later])
    assert torch.equal(x, before)


def raising(text: str) -> Any:
    raise RuntimeError(text)


def refused(native: Body) -> str:
    with pytest.raises(Unsupported) as caught:
        launched(lambda x: [x + 1], native, torch.rand(2, 3))
    return str(caught.value)


def test_an_error_of_nvfuser_is_refused_in_one_line() -> None:
    def failing(x: torch.Tensor) -> Any:
        raise RuntimeError("INTERNAL ASSERT FAILED at x.cpp\nno scheduler takes this\n\nException raised from y")

    assert refused(failing) == "nvFuser cannot run it: no scheduler takes this"
    compiler = 'Error messages are below\n\n__tmp(77): error: no operator "-" matches these operands\n  1 error'
    assert refused(lambda x: raising(compiler)).endswith(
        'the kernel does not compile: no operator "-" matches these operands'
    )
    assert refused(lambda x: [x.t()]) == "nvFuser gives [((3, 2), 'float32')], needed [((2, 3), 'float32')]"
    assert refused(lambda x: [x.half()]) == "nvFuser gives [((2, 3), 'float16')], needed [((2, 3), 'float32')]"


def test_equal_parts_are_compiled_once() -> None:
    """As long as one of them is in use: those of other strides, dtypes or code are not equal."""
    calls: list[int] = []

    def native(x: torch.Tensor) -> list[torch.Tensor]:
        calls.append(1)
        return [x + 1]

    def prepared(x: torch.Tensor, source: str) -> Any:
        kinds = (TensorType(tuple(x.shape), from_torch(x.dtype)),)
        kernel = NativeKernel("segment_0", SimpleNamespace(execute=lambda a, device: native(*a)), kinds, (), kinds)
        part = NativePart(kernel, lambda a: [a[0] + 1], source, (x.to("meta"),), (dense_strides(x),), frozenset([0]))
        return CudaLauncher().prepare(part, CPU)

    x = torch.rand(2, 3)
    kept = [prepared(x, "v1 = v0 + 1"), prepared(x.clone(), "v1 = v0 + 1")]
    assert kept[0] is kept[1] and len(calls) == 1
    kept += [prepared(x.t(), "v1 = v0 + 1"), prepared(x.double(), "v1 = v0 + 1"), prepared(x, "v1 = v0 + 1.")]
    assert len(calls) == 4
    kept.clear()
    gc.collect()
    prepared(x, "v1 = v0 + 1")
    assert len(calls) == 5


def test_a_device_without_cuda_is_refused() -> None:
    with pytest.raises(Unsupported, match="nvFuser computes on CUDA devices, and these tensors are on cpu"):
        CudaLauncher().check(torch.device("cpu"))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Permuted, with holes and repeats."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = torch.empty([n * step for n, step in zip(shape, steps, strict=True)], device="meta")
    for dim, step in enumerate(steps):
        whole = whole.unfold(dim, 1, step).squeeze(-1) if whole.shape[dim] else whole
    for dim, n in enumerate(shape):
        if n and draw(st.booleans()) and draw(st.booleans()):
            whole = whole.narrow(dim, 0, 1).expand([n if d == dim else -1 for d in range(whole.ndim)])
    return whole.permute(draw(st.permutations(range(whole.ndim))))


@given(tensors())
def test_layouts(tensor: torch.Tensor) -> None:
    """Dense strides are dense and in the order of the tensor's; a definition for holes takes dense tensors."""
    dense = torch.empty_strided(tensor.shape, dense_strides(tensor), device="meta")
    layout, made = memory_layout(tensor), memory_layout(dense)
    assert all(flag is not False for flag in made.contiguity)
    assert [flag is None for flag in layout.contiguity] == [n == 1 for n in tensor.shape]
    assert sorted(layout.order) == list(range(tensor.ndim)) and layout.takes(layout)
    order = sorted(range(tensor.ndim), key=lambda d: -layout.order[d])
    assert layout.row_major == (order == list(range(tensor.ndim)))
    if tensor.numel() and 0 not in tensor.stride():
        assert layout.takes(made)
        assert made.takes(layout) == (False not in layout.contiguity)
        strides = [tensor.stride(d) for d in order if tensor.shape[d] != 1]
        assert strides == sorted(strides, reverse=True)
