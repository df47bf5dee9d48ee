"""What a rank's program really holds: run alone in this process, with groups that move nothing."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import meshfuse as mf
from meshfuse.executor.bind import bind_program
from meshfuse.ops.values import TensorRef


class Silent:
    """A group whose communications are over at once and bring zeros."""

    def __getattr__(self, name: str) -> Any:
        return lambda buffer, *args: None if name == "send" else buffer.zero_()


def measured_bytes(fd: mf.FusionDefinition, rank: int = 0) -> int:
    """The most bytes that torch has allocated at once in a rank's program, with its arguments."""
    compiled = fd.latest()
    given = [_argument(compiled, ref, rank) for ref in compiled.graph.inputs]
    main = bind_program(fd.host_program(rank), lambda _: Silent(), torch.device("cpu"), simulated=True).main

    def run() -> Any:
        steps = main(*given)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            return end.value

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        out = run()
    events: list[Any] = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    del out
    peak = max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    return peak + sum(t.nbytes for t in given if isinstance(t, torch.Tensor))


def _argument(compiled: Any, ref: Any, rank: int) -> Any:
    assert isinstance(ref, TensorRef)
    made = compiled.graph.tensors[ref.id]
    shape = compiled.planned.shardings[ref.id].local_shape(made.type.shape, rank)
    dtype = getattr(torch, made.type.dtype.value)
    return torch.ones(shape, dtype=dtype)
