"""Schedules in nvFuser's words: questions about kernels, and changes of their copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import FusionDefinition


def normalized(fd: FusionDefinition, x: Any, dim: int) -> Any:
    return fd.ops.div(x, fd.ops.sum(fd.ops.exp(x), dims=[dim], keepdim=True))


COPIES: dict[str, Callable[[mf.TensorView], mf.TensorView]] = {
    "cache_after": lambda tv: tv.cache_after(),
    "cache_before": lambda tv: tv.cache_before(),
    "a copy's copy": lambda tv: tv.cache_after().split(0, 4).cache_before(),
}
EDITED: dict[str, Callable[[mf.TensorView], Any]] = {
    "as it is": lambda copy: copy,
    "split": lambda copy: copy.split(2, 4).split(1, 4),
    "split and reordered": lambda copy: copy.split(2, 4).split(1, 4).split(3, 2).reorder({3: -2, 2: -4}),
    "merged": lambda copy: copy.merge(0, 1).split(0, 128),
    "permuted": lambda copy: copy.reorder({0: 2}),
}


@pytest.mark.parametrize("edit", EDITED)
@pytest.mark.parametrize("copied", COPIES)
def test_the_memory_of_a_kernels_copy_is_none_of_the_tensors(copied: str, edit: str) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1] * 3, contiguity=[True] * 3)
        y = fd.ops.set(x)
        fd.add_output(y)
        for tensor in (x, y):
            copy = COPIES[copied](tensor)
            EDITED[edit](copy)
            copy.set_allocation_domain(copy.get_loop_domain(), new_contiguity=True)
            with pytest.raises(mf.DefinitionError, match=r"set_allocation_domain of .* needed axes of its loop domain"):
                copy.set_allocation_domain(tensor.get_loop_domain())
            with pytest.raises(mf.DefinitionError, match=r"set_allocation_domain of .* needed axes of its loop domain"):
                tensor.set_allocation_domain(copy.get_loop_domain())
    assert "set_allocation_domain" not in repr(fd)
    whole = torch.randn(5, 3, 7)
    (found,) = fd.execute([whole])
    assert torch.equal(found, whole) and found.is_contiguous()


def test_the_memory_of_unreduced_terms_is_none_of_the_sums() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1])
        y = fd.ops.sum(x, [1])
        fd.add_output(y)
        y.split(1, 2)
        terms = y.rfactor([1])
        terms.set_allocation_domain(terms.get_loop_domain())
        y.set_allocation_domain([y.axis(-1), y.axis(0)])
    (found,) = fd.execute([torch.ones(3, 4, 5)])
    assert found.stride() == (1, 3) and torch.equal(found, torch.full((3, 5), 4.0))


@pytest.mark.parametrize(("factor", "order"), [(1, (0, 1, 2)), (2, (1, 0, 2))])
def test_a_factor_of_one_does_not_say_where_a_dim_lies(factor: int, order: tuple[int, ...]) -> None:
    """A script that splits by its number of ranks has such factors on one rank."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 6, 10], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        y.outer_split(2, factor)
        y.outer_split(1, factor)
        y.reorder({1: 0})
        y.set_allocation_domain(y.get_loop_domain(), True)
    whole = torch.randn(2, 6, 10)
    (found,) = fd.execute([whole])
    assert torch.equal(found, whole) and found.permute(order).is_contiguous()


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_stream_of_one_chunk_is_a_loop_as_well(chunks: int) -> None:
    """Scripts that cut by their number of ranks look for products that fill a part of the result, on one rank, too."""
    with FusionDefinition() as fd:
        x, w = (fd.define_tensor([-1, -1], contiguity=True) for _ in range(2))
        fd.add_output(fd.ops.linear(fd.ops.set(x), w))
        x.outer_split(0, chunks)
        x.axis(0).parallelize(nvfuser.ParallelType.stream)
    a, b = torch.randn(6, 5), torch.randn(3, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        (found,) = fd.execute([a, b])
    torch.testing.assert_close(found, torch.nn.functional.linear(a, b))
    rows = 6 // chunks
    seen = [event.input_shapes for event in profile.events() if event.name == "aten::mm"]
    assert seen == [[[rows, 5], [5, 3], [rows, 3]]] * chunks


SCHEDULED: dict[str, Callable[[FusionDefinition, Any], Any]] = {
    "no_op": lambda fd, x: x,
    "pointwise": lambda fd, x: fd.ops.exp(fd.ops.add(x, x)),
    "reduction": lambda fd, x: fd.ops.exp(fd.ops.sum(x, dims=[1])),
    "reduction of two": lambda fd, x: fd.ops.add(fd.ops.sum(x, dims=[1]), fd.ops.sum(fd.ops.exp(x), dims=[1])),
    "inner_persistent": lambda fd, x: normalized(fd, x, 1),
    "inner_persistent twice": lambda fd, x: normalized(fd, fd.ops.sub(x, fd.ops.max(x, dims=[-1], keepdim=True)), 1),
    "outer_persistent": lambda fd, x: normalized(fd, x, 0),
    "inner_outer_persistent": lambda fd, x: fd.ops.add(normalized(fd, x, 1), fd.ops.sum(x, dims=[0])),
    "resize": lambda fd, x: fd.ops.slice(fd.ops.neg(x), [0, 0], [2, 2]),
    "expr_eval": lambda fd, x: fd.ops.matmul(x, x),
    "none, as one sum needs the other": lambda fd, x: fd.ops.sum(fd.ops.sum(x, dims=[1]), dims=[0]),
    "none, as sums differ": lambda fd, x: fd.ops.add(fd.ops.sum(x, dims=[0]), fd.ops.sum(x, dims=[1])),
    "none, as a product is one by itself": lambda fd, x: fd.ops.relu(fd.ops.matmul(x, x)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_the_scheduler_that_ops_ask_for(name: str) -> None:
    whole = torch.randn(4, 4)
    with FusionDefinition() as fd:
        fd.add_output(SCHEDULED[name](fd, fd.from_pytorch(whole)))
    kind = nvfuser.SchedulerType.__members__.get(name.split()[0])
    wanted = [] if kind in (None, nvfuser.SchedulerType.none) else [kind]
    assert nvfuser.schedule.find_compatible_schedulers(fd.fusion, [whole]) == wanted
    assert fd.sched.find_compatible_schedulers() == wanted == fd.sched.find_compatible_schedulers(fd.fusion, [whole])
    for other in nvfuser.SchedulerType:
        can, why = nvfuser.schedule.can_schedule(fd.fusion, other, [whole])
        assert can == (other in wanted) and can == (why == "")
        assert fd.sched.can_schedule(other) == (can, why)
    assert nvfuser.schedule.compute_heuristics(fd.fusion, nvfuser.SchedulerType.reduction, [whole]).scheduler_type is (
        nvfuser.SchedulerType.reduction
    )


def test_what_no_scheduler_is_found_for() -> None:
    with pytest.raises(mf.DefinitionError, match="find_compatible_schedulers: found 3, needed a fusion"):
        nvfuser.schedule.can_schedule(3, nvfuser.SchedulerType.pointwise)  # type: ignore[arg-type]
