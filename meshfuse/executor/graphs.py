"""A rank's step as one CUDA graph: its kernels and collectives are launched at once, at the cost of one launch.

A graph reads and writes the memory that it was captured with. So every call copies its arguments into buffers of the
graph's own, and its results out of them: whatever the user does with either, a replay gives right numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..errors import ArgumentError, SourceLine, user_error
from ..host_ir import HostProgram
from ..ops.factories import OFFSET
from ..runtime.device_watchdog import Pending, unwatched
from ..runtime.group import Group
from ..runtime.world import World
from .arguments import Inputs

Main = Callable[..., Any]
IsDone = Callable[[], bool]
# Executions before the capture: libraries and communicators allocate in their first ones what no graph may.
WARM_UP = 2
DEVICE = "cuda"


class Capturer(Protocol):
    """Makes graphs: CUDA, or a stand-in in tests."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run some times before the capture."""
        ...

    def capture(self, run: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], Callable[[], object]]:
        """Run once, and give (the results, a function that runs again and writes the same memory anew)."""
        ...

    def mark(self) -> IsDone:
        """What tells whether the device has done all that it was given until now."""
        ...


class Cuda:
    """Graphs of the current device."""

    def warm_up(self, run: Callable[[], object]) -> None:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        current.wait_stream(side)

    def capture(self, run: Callable[[], Sequence[Any]]) -> tuple[Sequence[Any], Callable[[], object]]:
        graph = torch.cuda.CUDAGraph()
        with unwatched(), torch.cuda.graph(graph):
            made = run()
        return made, graph.replay

    def mark(self) -> IsDone:
        event = torch.cuda.Event()
        event.record()
        return event.query


class Captured:
    """A program's main function as a graph, captured at the first call with the shapes and strides that it has.

    `check` is called before the capture, `replayed` after each replay with what tells whether that is done.
    """

    def __init__(self, main: Main, check: Callable[[], None], replayed: Callable[[IsDone], object] | None = None):
        self._main, self._check, self._replayed = main, check, replayed
        self._capturer: Capturer = Cuda()
        self._given: list[torch.Tensor] = []
        self._made: Sequence[Any] = ()
        self._replay: Callable[[], object] | None = None

    def __call__(self, *arguments: Any) -> list[Any]:
        """The outputs, in memory of their own. The last two arguments are the seed and the step."""
        tensors = arguments[:-2]
        if self._replay is None:
            self._capture(tensors, arguments[-2:])
        if tensors:
            torch._foreach_copy_(self._given, tensors)
        assert self._replay is not None
        self._replay()
        if self._replayed is not None:
            self._replayed(self._capturer.mark())
        return self._copied()

    def _copied(self) -> list[Any]:
        """The results in memory of their own, copied at the cost of one launch or two, as the arguments are."""
        made = [out for out in self._made if out is not None]
        copies = [torch.empty_like(out) for out in made]
        if made:
            torch._foreach_copy_(copies, made)
        left = iter(copies)
        return [None if out is None else next(left) for out in self._made]

    def _capture(self, tensors: Sequence[torch.Tensor], rest: tuple[Any, ...]) -> None:
        self._given = [tensor.clone() for tensor in tensors]

        def run() -> Sequence[Any]:
            return self._main(*self._given, *rest)

        self._capturer.warm_up(run)
        self._check()
        self._made, self._replay = self._capturer.capture(run)


def check_capturable(program: HostProgram, given: Inputs, line: SourceLine) -> None:
    """Raises ArgumentError for a program that no graph can hold, or one that is not on CUDA.

    Such are those with scalars, random numbers or rows of experts.
    """
    if given.device.type != DEVICE:
        raise _refused(f"arguments on {given.device}", f"tensors on a {DEVICE} device", line)
    if given.scalars:
        raise _refused(f"{len(given.scalars)} scalar inputs", "tensors alone: a graph keeps numbers", line)
    drawing = [kernel.name for kernel in program.kernels if OFFSET in kernel.params]
    if drawing:
        needed = "a program that draws none: a graph would draw the same ones at every step"
        raise _refused(f"random numbers, drawn in {', '.join(drawing)}", needed, line)
    rows = [about.tensor for about in program.communications if about.kind == "exchange"]
    if rows:
        raise _refused(f"rows of experts, {rows[0]}", "sizes that do not depend on numbers", line)


def check_groups(groups: Sequence[Group], line: SourceLine) -> None:
    """Raises ArgumentError where collectives go through the host, whose work is no part of a graph."""
    staged = [group for group in groups if group.is_staged]
    if staged:
        raise _refused(f"{staged[0]} of ranks that share a device", "a device for each rank", line)


def watched(world: World, groups: Sequence[Group]) -> Callable[[IsDone], object] | None:
    """What tells the world's watch of a replay with collectives of these groups; None where there are none."""
    groups = [group for group in groups if group.size > 1]
    ranks = tuple(sorted({rank for group in groups for rank in group.ranks}))

    def trouble() -> str:
        return next(filter(None, (group.trouble() for group in groups)), "")

    def replayed(is_done: IsDone) -> None:
        world.watchdog.put(Pending("a step's CUDA graph", ranks, is_done, trouble))

    return replayed if groups else None


def _refused(found: str, needed: str, line: SourceLine) -> Exception:
    return user_error("cuda_graph=True", found, needed, "Leave out cuda_graph.", line, ArgumentError)
