"""Definitions that ask for streams: the numbers are right whether or not the work is cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import CommunicatorBackend, DataType, FusionDefinition, MemoryType
from tools import STREAM, X, cut, line, place, same, size, split, whole_numbers

multidevice = nvfuser.multidevice
E = 4
HOST_IR = {"_enable_options": ["host_ir_lowering"]}


def row_parallel_linear_in_chunks() -> None:
    h, chunks, tokens = 2, 3, 6
    with FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1, h * 4], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor(shape=[h, h * 4], contiguity=True, dtype=DataType.BFloat16)
        fd.add_output(fd.ops.linear(x, w))
        place(line(), x, w)
        x.split(0, chunks, inner_split=False)
        x.axis(0).parallelize(STREAM)
        split(x, 2)
        split(w, 1)
    a, b = whole_numbers(tokens, h * 4), whole_numbers(h, h * 4)
    same(fd.execute([cut(a, x), cut(b, w)], **HOST_IR)[0], F.linear(a, b))


def column_parallel_linear_with_a_streamed_gather(ring: bool = False) -> None:
    fd, (x, w, gathered, y) = _gather_then_linear()
    split(x, 0)
    split(w, 0)
    for tv in (gathered, y):
        _stream(tv, ring)
    split(y, 2)
    a, b = torch.randn(2 * size(), E), torch.randn(3 * size(), E)
    same(fd.execute([cut(a, x), cut(b, w)], **HOST_IR)[0], cut(F.linear(a, b), y))


def _gather_then_linear() -> tuple[Any, tuple[Any, Any, Any, Any]]:
    """A definition, not split yet, and its tensors: two inputs, the first one gathered, and the product."""
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, E], contiguity=True), fd.define_tensor([-1, E], contiguity=True)
        gathered = fd.ops.set(x)
        y = fd.ops.linear(gathered, w)
        fd.add_output(y)
        place(line(), x, w, gathered, y)
    return fd, (x, w, gathered, y)


def _stream(tv: Any, ring: bool) -> None:
    tv.outer_split(0, size())
    if ring:
        tv.swizzle1d(0, X)
    tv.axis(0).parallelize(STREAM)


def column_parallel_linear_with_a_ring() -> None:
    column_parallel_linear_with_a_streamed_gather(ring=True)


def _products(fd: Any, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, list[list[int]]]:
    """The first output of an execution, and the shape of each matrix product's left operand."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        (found,) = fd.execute(arguments, **HOST_IR)
    return found, [event.input_shapes[0] for event in profile.events() if event.name == "aten::mm"]


def a_product_of_what_a_streamed_set_gathers(ring: bool = False) -> None:
    """Only the set is streamed: the product that reads it is cut as well."""
    fd, (x, w, gathered, y) = _gather_then_linear()
    for tv, axis in ((x, 0), (w, 0), (y, 1)):
        split(tv, axis)
    _stream(gathered, ring)
    a, b = torch.randn(2 * size(), E), torch.randn(3 * size(), E)
    found, seen = _products(fd, [cut(a, x), cut(b, w)])
    same(found, cut(F.linear(a, b), y))
    assert seen == [[2, E]] * size(), seen


def a_product_of_what_a_ring_gathers() -> None:
    a_product_of_what_a_streamed_set_gathers(ring=True)


def a_streamed_input_of_two_products() -> None:
    """The stream goes on: each chunk goes through both, without a mesh."""
    with FusionDefinition() as fd:
        x, u, v = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(3))
        fd.add_output(fd.ops.matmul(fd.ops.matmul(x, u), v))
        x.outer_split(0, 3)
        x.axis(0).parallelize(STREAM)
    a, b, c = torch.randn(6, 3), torch.randn(3, 5), torch.randn(5, 3)
    found, seen = _products(fd, [a, b, c])
    same(found, a @ b @ c)
    assert seen == [[2, 3], [2, 5]] * 3, seen


def a_gather_as_a_ring() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3 * size()], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        place(line(), x, y)
        split(x, 0)
        _stream(y, ring=True)
    whole = torch.randn(3 * size())
    same(fd.execute([cut(whole, x)], **HOST_IR)[0], whole)


def _gather_and_linear(shape: list[int], shard: int, backend: CommunicatorBackend) -> None:
    """x sharded over one dim, the result's first dim a stream, by nvFuser's MultiDeviceExecutor."""
    with FusionDefinition() as fd:
        x, w, b = (fd.define_tensor(shape=s, contiguity=True, dtype=DataType.BFloat16) for s in (shape, [6, 8], [6]))
        y = fd.ops.linear(x, w, b)
        fd.add_output(y)
        place(line(), x, w, b, y)
        x.axis(shard).parallelize(X)
        y.axis(0).parallelize(STREAM)
    params = multidevice.MultiDeviceExecutorParams()
    params.backend_type, params.use_allocation_cache = backend, True
    executor = multidevice.MultiDeviceExecutor(fd.fusion, params)
    a, weight, offset = whole_numbers(*shape), whole_numbers(6, 8), whole_numbers(6)
    for _ in range(2):
        (found,) = executor.run([cut(a, x), weight, offset])
        same(found, F.linear(a, weight, offset))
    assert "linear" in str(executor)


def gather_and_linear_stream_outermost() -> None:
    _gather_and_linear([3, size(), 2, 8], 1, CommunicatorBackend.nccl)


def gather_and_linear_shard_outermost() -> None:
    for backend in CommunicatorBackend:
        _gather_and_linear([size(), 2, 8], 0, backend)


class AgMatmul(FusionDefinition):
    """A definition as a class, which scripts call step by step or leave to the executor."""

    def definition(self) -> None:
        self.x = self.define_tensor([size(), 4, 8], contiguity=True)
        self.w = self.define_tensor([8, 6], contiguity=True)
        self.out = self.ops.matmul(self.x, self.w)
        self.add_output(self.out)

    def multidevice_schedule(self) -> None:
        place(line(), self.x, self.w, self.out)
        self.x.axis(0).parallelize(X)
        self.out.axis(0).parallelize(STREAM)
        self.x.set_memory_type(MemoryType.symmetric)


def definitions_as_classes() -> None:
    a, b = torch.randn(size(), 4, 8), torch.randn(8, 6)
    called = AgMatmul()
    with called:
        called.definition()
        called.multidevice_schedule()
    same(multidevice.MultiDeviceExecutor(called.fusion).run([cut(a, called.x), b])[0], a @ b)
    mine = a.chunk(size())[multidevice.Communicator.instance().rank()]
    same(AgMatmul().execute([mine, b])[0], a @ b)
