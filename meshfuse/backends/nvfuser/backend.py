"""Segments run by nvFuser: a native definition for every run of ops that it takes, torch for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...lowering.effects import effects
from ...ops.values import TensorType
from .. import Prepared, Task, Unsupported
from .copies import type_of
from .launch import CudaLauncher, Launcher, NativePart, Run, laid_out, lies_so
from .load import load_nvfuser
from .memory_layout import dense_strides, memory_layout
from .partition import Partition, copies_of, halves, partitioned_kernel, refusal, without_packs
from .segment import MemoryLayouts, build_segment, value_types
from .text import bind_kernel, canonical, part_kernel

# Parts of one segment that may fail to compile, before what is left of the last one goes to torch whole.
_MOST_FAILURES = 24


@dataclass(frozen=True, slots=True)
class PreparedPartition:
    """A part of a segment that is ready to run: the names that it takes and gives, and why it is left to torch."""

    run: Run
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    reason: str
    ops: int


class NvFuser:
    """Compiles what nvFuser takes of a segment, once per rank and program. Raises NvfuserMissing without nvFuser.

    `launcher` runs the native definitions.
    """

    name = "nvfuser"

    def __init__(self, launcher: Launcher | None = None) -> None:
        load_nvfuser()
        self.launcher: Launcher = CudaLauncher() if launcher is None else launcher

    def prepare(self, task: Task) -> Prepared:
        """The segment's parts as one function.

        Raises Unsupported, with the reasons, where nvFuser takes none of them.
        """
        self.launcher.check(task.device)
        if task.segment is None:
            raise Unsupported("the kernel is a part of a segment, in a loop")
        types = dict(zip(parameters(task), map(_type_of, task.arguments), strict=True))
        types = {name: ttype for name, ttype in types.items() if ttype is not None}
        parts = partitioned_kernel(task.definition, task.segment, task.rank, task.kernel, types)
        steps = self._steps(task, parts)
        if all(step.reason for step in steps):
            raise Unsupported("; ".join(dict.fromkeys(step.reason for step in steps)))
        return _Compiled(task, steps)

    def _steps(self, task: Task, parts: Sequence[Partition]) -> list[PreparedPartition]:
        """The parts compiled. One that nvFuser cannot run is halved, until what it cannot run stands alone."""
        left, found, failures, memory = list(parts), list[PreparedPartition](), 0, _FakeValues(task)
        while left:
            part = left.pop(0)
            step = self._step(task, part, len(found), memory)
            if step is None:
                left[:0] = without_packs(part)
                continue
            failed = step.reason and not part.reason
            if failed and len(part.segment.computes) > 1 and failures < _MOST_FAILURES:
                failures += 1
                left[:0] = halves(part)
            else:
                found.append(step)
        return found

    def _step(self, task: Task, part: Partition, place: int, memory: _FakeValues) -> PreparedPartition | None:
        """The part compiled, or as torch code with the reason; None where it is not known what its packs make."""
        kernel = part_kernel(task.definition, part, task.rank, f"{task.kernel.name}_part_{place}")
        text = bind_kernel(kernel, task.device)
        taken = [memory.values[name] for name in kernel.params]
        made = memory.traced(text, taken)
        if made is None:
            if part.packs and part.segment.computes:
                return None
            values = [int(name[1:]) for name in part.gives]
            made = memory.assumed(value_types(task.definition, values, task.rank))
            text = _lying_as(text, made)
        run, takes, reason = text, kernel.params, part.reason
        if not reason:
            try:
                run, count = self._native(task, part, (text, canonical(kernel)), taken, made)
                takes = takes[:count]
                made = [memory.empty(t, dense_strides(t)) for t in made]
            except Unsupported as error:
                reason = str(error)
        memory.values.update(zip(kernel.results, made, strict=True))
        ops = len(part.segment.computes) + len(part.unpacks) + len(part.packs)
        return PreparedPartition(run, takes, kernel.results, reason, ops)

    def _native(
        self,
        task: Task,
        part: Partition,
        reference: tuple[Run, str],
        taken: Sequence[Any],
        made: Sequence[torch.Tensor],
    ) -> tuple[Run, int]:
        """The part compiled, and how many of the text's arguments it takes: all but the random state.

        `reference` is the text, and its code with values numbered in order.
        """
        text, source = reference
        given = [t for t in taken if isinstance(t, torch.Tensor)]
        layouts = MemoryLayouts(tuple(map(memory_layout, given)), tuple(map(memory_layout, made)))
        types = {name: type_of(t) for name, t in zip(part.takes, taken, strict=False)}
        copies = copies_of(task.definition, part, task.rank, types)
        try:
            kernel = build_segment(task.definition, part.segment, task.rank, layouts, copies)
        except RuntimeError as error:
            raise Unsupported(f"nvFuser refuses it: {refusal(error)}") from error
        scalars = task.definition.resharded.graph.scalars
        source += "".join(f"\n{scalars[number].dtype}" for number in kernel.scalars)
        count = len(kernel.inputs) + len(kernel.scalars)
        examples = tuple(_on_meta(value) for value in taken[:count])
        strides = tuple(map(dense_strides, made))
        alike = text if len(taken) == count else _completed(text, taken[count:])
        native = NativePart(kernel, alike, source, examples, strides, _owned(given, made))
        return self.launcher.prepare(native, task.device), count


class _FakeValues:
    """The strides of a segment's values, found by running its parts on fake tensors."""

    def __init__(self, task: Task):
        self.mode, self.device = FakeTensorMode(), task.device
        self.values: dict[str, Any] = {}
        for name, value in zip(parameters(task), task.arguments, strict=True):
            self.values[name] = self.empty(value, value.stride()) if isinstance(value, torch.Tensor) else value

    def empty(self, like: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=self.device)

    def traced(self, text: Run, taken: list[Any]) -> list[torch.Tensor] | None:
        """A part's results; None where its Python fails, as where it needs the values that fake tensors do not have."""
        try:
            with self.mode, torch.no_grad():
                return list(text(taken))
        except Exception:
            return None

    def assumed(self, types: Sequence[TensorType]) -> list[torch.Tensor]:
        """Results of these types, dense and row-major."""
        with self.mode:
            return [torch.empty(t.shape, dtype=getattr(torch, t.dtype.value), device=self.device) for t in types]


def _lying_as(text: Run, made: Sequence[torch.Tensor]) -> Run:
    """The text, with a copy of each result whose strides differ from those of `made`."""
    strides = [t.stride() for t in made]

    def run(arguments: list[Any]) -> Sequence[torch.Tensor]:
        found = text(arguments)
        return laid_out(found, strides, [i for i, t in enumerate(found) if not lies_so(t, strides[i])])

    return run


def _completed(text: Run, rest: Sequence[Any]) -> Run:
    """The text with the arguments that a definition does not take: a random state, of which it makes no use."""
    return lambda arguments: text([*arguments, *rest])


def parameters(task: Task) -> tuple[str, ...]:
    """The kernel's parameters under the names that parts have for them: an input of two meshes is one value on each."""
    assert task.segment is not None
    unpacked = {name for step in task.kernel.unpacks for name in effects(step).makes}
    values = [name for v in task.segment.inputs if (name := f"v{v}") not in unpacked]
    return (*values, *task.kernel.params[len(values) :])


def _type_of(value: Any) -> TensorType | None:
    return type_of(value) if isinstance(value, torch.Tensor) else None


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _owned(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> frozenset[int]:
    """The places of results that share no memory with an argument or with a result before them."""
    seen = {t.untyped_storage()._cdata for t in given}
    found: set[int] = set()
    for place, tensor in enumerate(made):
        memory = tensor.untyped_storage()._cdata
        if memory not in seen:
            found.add(place)
        seen.add(memory)
    return frozenset(found)


class _Compiled:
    """Runs the parts in turn, over values by name; each value is dropped after its last use.

    Definitions are made for the order of their inputs' dims in memory: for inputs in another order the text runs.
    """

    def __init__(self, task: Task, steps: Sequence[PreparedPartition]):
        self.note, self.steps = partitions_text(steps), tuple(steps)
        assert task.segment is not None
        self._eager, self._params = task.eager, parameters(task)
        self._results = task.kernel.results
        self._known: set[tuple[Any, ...]] = set()
        pairs = enumerate(task.arguments)
        self._layouts = tuple((place, memory_layout(a)) for place, a in pairs if isinstance(a, torch.Tensor))
        self._places = tuple(place for place, _ in self._layouts)
        self._plan = tuple((s.run, s.takes, s.gives, dead) for s, dead in zip(steps, self._dying(), strict=True))
        # A single part that takes and gives what the segment does needs no values by name: it saves a microsecond.
        plain = len(steps) == 1 and (steps[0].takes, steps[0].gives) == (self._params, self._results)
        self._alone = steps[0].run if plain else None

    def _dying(self) -> list[tuple[str, ...]]:
        last = {name: place for place, step in enumerate(self.steps) for name in (*step.takes, *step.gives)}
        kept = set(self._results)
        return [tuple(n for n, at in last.items() if at == place and n not in kept) for place in range(len(self.steps))]

    def __call__(self, *arguments: Any) -> Any:
        strides = tuple([arguments[place].stride() for place in self._places])
        if strides not in self._known and not self._takes(arguments, strides):
            return self._eager(*arguments)
        if self._alone is not None:
            made = self._alone([*arguments])
            return made[0] if len(made) == 1 else tuple(made)
        values = dict(zip(self._params, arguments, strict=True))
        for run, takes, gives, dead in self._plan:
            values.update(zip(gives, run([values[name] for name in takes]), strict=True))
            for name in dead:
                del values[name]
        found = tuple([values[name] for name in self._results])
        return found[0] if len(found) == 1 else found

    def _takes(self, arguments: Sequence[Any], strides: tuple[Any, ...]) -> bool:
        """Whether tensors with these strides fit the definitions; strides that fit are remembered."""
        fits = all(layout.takes(memory_layout(arguments[place])) for place, layout in self._layouts)
        if fits:
            self._known.add(strides)
        return fits


def partitions_text(steps: Sequence[PreparedPartition]) -> str:
    """How many of a segment's ops are nvFuser's, and why the others are not."""
    left = [step for step in steps if step.reason]
    if not left:
        return "compiled"
    native = [step for step in steps if not step.reason]
    count, others = (sum(step.ops for step in part) for part in (native, left))
    reasons = "; ".join(dict.fromkeys(step.reason for step in left))
    definitions = "definition" if len(native) == 1 else "definitions"
    return f"{count} ops compiled in {len(native)} {definitions}, {others} left to torch: {reasons}"
