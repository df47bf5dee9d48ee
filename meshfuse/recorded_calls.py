"""Calls that torch's autograd records: outputs carry gradients where inputs need them.

The backward is a definition of its own: the same ops, `fd.grad` of the outputs, and what comes for these as further
inputs. It is made and planned when torch first asks for it, and computes again what it needs of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from .compiler import CompiledProgram
from .definition import annotating
from .definition.recording import Recording
from .definition.reverse import append_gradients, dependents
from .definition.tensor_view import TensorView
from .errors import SourceLine, caller_line, user_error
from .execution import Execution
from .executor.dtensor import is_dtensor
from .ops.values import TensorRef, TensorType
from .programs import Programs
from .runtime.world import World

_any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
Run = Callable[[Execution, Sequence[Any]], list[Any]]


class Recordable(Protocol):
    """The definition that is called."""

    recording: Recording
    ops: Any
    _execution: Execution
    _programs: Programs
    _backwards: Backwards

    def _like(self) -> Any: ...


class Key(NamedTuple):
    """What a backward is made for: places of inputs and of outputs, and how the forward's program leaves these."""

    wrt: tuple[int, ...]
    given: tuple[int, ...]
    shardings: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class Backwards:
    """The backwards of a definition that torch has asked for.

    latest: the one that ran last.
    """

    def __init__(self) -> None:
        self.latest: Any = None
        self._made: dict[Key, Any] = {}
        self._fixed: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, fd: Recordable, key: Key, line: SourceLine) -> Any:
        """The definition for these gradients."""
        if key not in self._made:
            self._made[key] = _backward_of(fd, key, line)
        self.latest = self._made[key]
        return self.latest

    def without_gradient(self, recording: Recording, wrt: tuple[int, ...]) -> tuple[int, ...]:
        """The places of the outputs that depend on none of these inputs."""
        if wrt not in self._fixed:
            found = dependents(recording, [recording.inputs[place].id for place in wrt], recording.constants)
            self._fixed[wrt] = tuple([place for place, i in enumerate(recording.outputs) if i not in found])
        return self._fixed[wrt]


def run(fd: Recordable, how: Run, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a call, recorded by torch's autograd where it is on and an input needs a gradient."""
    if not (torch.is_grad_enabled() and type(inputs) in (list, tuple) and _any_requires_grad(*inputs)):
        return how(fd._execution, inputs)
    with torch.no_grad():
        outputs = _each_once(how(fd._execution, inputs))
    last = fd._programs.last_run
    assert last is not None
    return list(DefinitionCall.apply(_Call(fd, how, last.compiled, fd._execution.latest_draw), outputs, *inputs))


def _each_once(outputs: Sequence[Any]) -> list[Any]:
    """The outputs as different objects, as torch records each object once."""
    found: list[Any] = []
    for out in outputs:
        if out is not None and any(out is other for other in found):
            out = out.detach()
        found.append(out)
    return found


class DefinitionCall(torch.autograd.Function):
    """A call, as torch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, outputs: list[Any], *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*[value for value in inputs if isinstance(value, torch.Tensor)])
        ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.layouts = [(out.device_mesh, out.placements) if is_dtensor(out) else None for out in outputs]
        wrt = tuple([place for place, needed in enumerate(ctx.needs_input_grad[2:]) if needed])
        fixed = [outputs[i] for i in call.fd._backwards.without_gradient(call.fd.recording, wrt)]
        ctx.mark_non_differentiable(*[out for out in fixed if out is not None])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if number is None else number for number in ctx.numbers]
        pairs = enumerate(zip(tangents, ctx.layouts, strict=True))
        given = {i: _laid_out(tangent, layout) for i, (tangent, layout) in pairs if tangent is not None}
        wrt = tuple([place for place, needed in enumerate(ctx.needs_input_grad[2:]) if needed])
        found: list[Any] = [None] * len(values)
        if given:
            for place, gradient in zip(wrt, ctx.call.gradients(values, given, wrt), strict=True):
                found[place] = _as_primal(gradient, values[place])
        return None, None, *found


def _laid_out(tangent: Any, layout: tuple[Any, Any] | None) -> Any:
    """The gradient of an output, which lies as the output does."""
    if layout is None or not is_dtensor(tangent):
        return tangent.contiguous()
    return tangent if tangent.placements == layout[1] else tangent.redistribute(*layout)


def _as_primal(gradient: Any, primal: Any) -> Any:
    """The gradient of an input as the input was passed: a DTensor in its placements, or this rank's own tensor."""
    if gradient is None or not is_dtensor(gradient):
        return gradient
    if not is_dtensor(primal):
        return gradient.to_local()
    same = gradient.placements == primal.placements
    return gradient if same else gradient.redistribute(primal.device_mesh, primal.placements)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that was recorded: how it ran, its program, and the seed and step of its random numbers."""

    fd: Recordable
    how: Run
    compiled: CompiledProgram
    drawn: tuple[int, int]

    def gradients(self, values: Sequence[Any], tangents: dict[int, Any], wrt: tuple[int, ...]) -> list[Any]:
        """The gradients of some inputs, from those of some outputs by their places."""
        line, graph = caller_line(), self.compiled.graph
        given = tuple(sorted(tangents))
        shardings = self.compiled.output_shardings()
        self._check_ranks(given, line)
        shapes = tuple([tuple(graph.shape(graph.outputs[place])) for place in given])
        key = Key(wrt, given, tuple([shardings[place] for place in given]), shapes)
        back = self.fd._backwards.of(self.fd, key, line)
        back._execution.pinned_draw = self.drawn
        return run(back, self.how, [*values, *(tangents[place] for place in given)])

    def _check_ranks(self, given: Sequence[int], line: SourceLine) -> None:
        """Raises DefinitionError where a rank of the program has no part of an output: it could not take part."""
        if World.current().size == 1:
            return
        ranks = {rank for a in self.compiled.graph.annotations.values() for rank in a.mesh.ranks}
        for place in given:
            mesh = self.compiled.output_shardings()[place].mesh
            if self.compiled.graph.annotations and not ranks <= set(mesh.ranks):
                label = self.fd.recording.tensors[self.fd.recording.outputs[place]].label
                raise user_error(
                    f"backward through output {label}", f"one on {mesh} of a definition on {len(ranks)} ranks",
                    "an output on every rank: the others would not take part", "Write fd.grad in the definition.", line,
                )  # fmt: skip


def _backward_of(fd: Recordable, key: Key, line: SourceLine) -> Any:
    """A definition of the gradients alone; its inputs are those of the forward, and then one per output that counts."""
    made, old = fd._like(), fd.recording
    new: Recording = made.recording
    old.write_into(new)
    sources = [new.outputs[place] for place in key.given]
    new.outputs.clear()
    seeds = []
    for source, sharding, shape in zip(sources, key.shardings, key.shapes, strict=True):
        at = old.tensors[source]
        given = new.new_input(TensorType(shape, at.type.dtype), at.line.of_gradient(), None)
        if old.annotations:
            annotating.shard(new, given.id, sharding, None, line)
        seeds.append(TensorView(made, given))
    outputs = [TensorView(made, TensorRef(i)) for i in sources]
    wrt = [TensorView(made, TensorRef(old.inputs[place].id)) for place in key.wrt]
    new.outputs += [grad.id for grad in append_gradients(made, outputs, wrt, seeds, line)]
    return made
