"""The communicator, profiles and what a definition reports after it has run."""

from __future__ import annotations

import itertools
import os

import torch

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import DataType, FusionDefinition, LruFusionCache, PythonProfiler
from tools import X, cut, expect, line, place, rank, same, size, split


def communicator() -> None:
    world = nvfuser.multidevice.Communicator.instance()
    assert world is nvfuser.multidevice.Communicator.instance()
    assert (world.size(), world.rank()) == (int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    assert (world.local_size(), world.local_rank()) == (world.size(), world.rank())
    world.barrier()


def _row_parallel() -> tuple[FusionDefinition, list[torch.Tensor], torch.Tensor]:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, 3 * size()]), fd.define_tensor([4, 3 * size()])
        fd.x, fd.w = x, w  # Scripts keep tensors so.
        fd.add_output(fd.ops.linear(x, w))
        place(line(), x, w)
        split(x, -1)
        split(w, -1)
    a, b = torch.randn(5, 3 * size()), torch.randn(4, 3 * size())
    return fd, [cut(a, fd.x), cut(b, fd.w)], a @ b.T


def profile_of_the_last_execution() -> None:
    fd, inputs, wanted = _row_parallel()
    same(fd.execute(inputs)[0], wanted)
    with PythonProfiler() as profiler:
        fd.execute(inputs)
    expect(profiler, "all-reduce")
    profile = profiler.profile
    assert profile.segments == len(profile.kernel_profiles) == min(2, size()) and profile.host_time_ms > 0
    assert profile.input_bytes == sum(4 * t.numel() for t in inputs) and profile.output_bytes == 4 * 20
    assert nvfuser.get_fusion_profile() is profile
    nvfuser.reset_profiler()
    fd.execute(inputs)
    try:
        profiler.profile  # noqa: B018 - asking is what raises
    except ValueError as error:
        assert "there is no profile" in str(error)
    else:
        raise AssertionError("a profile of an execution that was not profiled")


def validate_against_no_sharding() -> None:
    fd, inputs, wanted = _row_parallel()
    same(fd.validate(inputs, atol=1e-4, rtol=1e-4)[0], wanted)
    fd.validate(inputs, [wanted], atol=1e-4, rtol=1e-4)
    try:
        fd.validate(inputs, [wanted + 1], atol=1e-4, rtol=1e-4)
    except AssertionError:
        return
    raise AssertionError("a wrong reference passes")


def validate_gathers_uneven_shards_and_repeats_random_numbers() -> None:
    with FusionDefinition() as fd:
        x, scale = fd.define_tensor([2 * size() + 1, 3]), fd.define_scalar(dtype=DataType.Double)
        y = fd.ops.mul(fd.ops.add(fd.ops.cumsum(x, 0), fd.ops.rand_like(x)), scale)
        fd.add_output(y)
        place(line(), x, y)
        split(x, 0)
        split(y, 0)
    inputs = [cut(torch.randn(2 * size() + 1, 3), x), 2.0]
    first, second = fd.validate(inputs)[0], fd.validate(inputs)[0]
    assert not first.numel() or not torch.equal(first, second)


def validate_gathers_in_the_memory_order_that_the_definition_names() -> None:
    for order in itertools.permutations(range(3)):
        with FusionDefinition() as fd:
            x = fd.define_tensor([2, 3, 4 * size()], stride_order=list(order))
            fd.add_output(fd.ops.sum(fd.ops.relu(x), [2]))
            place(line(), x)
            split(x, 2)
        dims = sorted(range(3), key=lambda d: -order[d])
        whole = torch.randn(2, 3, 4 * size()).permute(dims)
        laid_out = cut(whole.permute(*(dims.index(d) for d in range(3))), x).permute(dims).contiguous()
        fd.validate([laid_out.permute(*(dims.index(d) for d in range(3)))])


def repro_script_runs() -> None:
    fd, inputs, _ = _row_parallel()
    fd.execute(inputs, save_repro_inputs=True)
    space: dict[str, object] = {}
    exec(fd.last_repro_script(), space)
    made = space["inputs"]
    assert isinstance(made, list)
    assert [(t.shape, t.stride(), t.dtype) for t in made] == [(t.shape, t.stride(), t.dtype) for t in inputs]


def equal_definitions_share_their_programs() -> None:
    @LruFusionCache(max_fusions=2)
    def define(features: int) -> FusionDefinition:
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, features])
            fd.add_output(fd.ops.sum(x, [0]))
            place(line(), x)
            split(x, 0)
        return fd

    whole = torch.randn(2 * size(), 3)
    mine = whole.chunk(size())[rank()]
    first, second = define(3), define(3)
    for fd in (first, second):
        same(fd.execute([mine])[0], whole.sum(0))
    assert first is not second and first.latest() is second.latest()
    define(4)
    define(5)
    assert define.num_fusions() == 2 and "Cache Hits: 1" in define.stats()
    assert fd.fec.get_output_shardings()[0].axis_sharded_on(X) == -1
