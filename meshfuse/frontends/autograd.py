"""Running the halves of a step: forward, and backward when torch's autograd asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..compiler import CompiledProgram
from ..errors import caller_line, user_error
from ..executor.argument_guards import PLAIN
from ..executor.dtensor import is_dtensor, settled
from ..runtime.world import World
from ..sharding.value import Sharding
from .calls import Call, check_apart
from .captured_graph import Captured, Source, differentiable
from .placing import Place, Places
from .steps import Half, Step

# Gives a module's tensor by its table and its name there.
Getter = tuple[Mapping[str, Any], str]
# What a call has of a module and of its arguments.
_OF_CALL = ("parameter", "buffer", "constant", "argument")


class Runner:
    """Runs the step that was planned for one kind of call. What all such calls have in common is worked out once, here.

    full: makes the runner whose backward takes gradients of all results; this one's takes those of numbers alone.
    """

    def __init__(
        self, module: nn.Module, graph: Captured, step: Step, places: Places, parameters: Mapping[str, Place],
        draw: Callable[[], int], backend: str | None, full: Callable[[], Runner] | None,
    ) -> None:  # fmt: skip
        self.graph, self.step, self._places = graph, step, places
        self._draw, self._backend, self.full = draw, backend, full
        reads = [s for s in step.backward.inputs if s.kind in _OF_CALL] if step.backward is not None else []
        written = [s.of_input() for s in step.forward.outputs if s.kind == "mutation"]  # Some are never read.
        self.sources = list(dict.fromkeys([*step.forward.inputs, *reads, *written]))
        self._getters = [_getter(module, graph, source) for source in self.sources]
        self._results = [source for source in step.forward.outputs if source.kind == "result"]
        self._changed = [source.place for source in written if source.kind == "argument"]
        self._states = graph.states()
        self._wraps = [self._wrap(source, i) for i, source in enumerate(self._results)]
        self._constant = [i for i, source in enumerate(self._results) if source.place in graph.detached]
        self._draws = any(node.draws for node in step.forward.fd.recording.nodes)
        at = {source: place for place, source in enumerate(self.sources)}
        self._fed, self._written = [at[s] for s in step.forward.inputs], [at[s] for s in written]
        self._read = [(at[source], source in written) for source in reads]
        if step.backward is not None:
            self._plan_backward(module, step.backward, reads, at, parameters)

    def _plan_backward(
        self, module: nn.Module, half: Half, reads: Sequence[Source], at: Mapping[Source, int],
        parameters: Mapping[str, Place],
    ) -> None:  # fmt: skip
        """Find out where the backward's inputs come from: from what is kept, saved, terms and tangents, in this order.

        Of each gradient also which source it is of, and how it becomes a DTensor.
        """
        tangents = [(i, Source("tangent", place=s.place)) for i, s in enumerate(self._results)]
        tangents = [(i, source) for i, source in tangents if source in half.inputs]
        terms = [source for source in half.inputs if source.kind == "terms"]
        saved = [Source("saved", place=i) for i in range(self.step.saved)]
        order = {s: i for i, s in enumerate([*reads, *saved, *terms, *(s for _, s in tangents)])}
        self._order, self._tangents = [order[source] for source in half.inputs], [i for i, _ in tangents]
        self._terms = [self._terms_of(module, source) for source in terms]
        left = {name: self._places.of_terms(name, [split.axis for split in sharding.partial if split.axis])
                for name, sharding in self.step.left.items()}  # fmt: skip
        self._gradients = [
            (at[s.of_input()], left.get(s.name) or parameters.get(s.name), self._places.shapes.get(s.name))
            for s in half.outputs
        ]
        # Places in `sources` of parameters that are DTensors, whose gradients lie as they do.
        self.alike = [] if self._places.is_simulated else [
            at[s.of_input()] for s in half.outputs if s.name in parameters and s.name not in left]  # fmt: skip
        self._fed_by: list[frozenset[int]] | None = None

    def _terms_of(self, module: nn.Module, source: Source) -> tuple[Place, str, Getter | None]:
        """Where terms of a parameter's gradient lie, its name, and where the parameter is."""
        place = self._places.of_terms(source.name, self.step.taken[source.name])
        return place, source.name, _getter(module, self.graph, Source("parameter", source.name))

    def _wrap(self, source: Source, place: int) -> Place | None:
        """How a result becomes a DTensor; None for a number, for what is simulated and where there is no gradient."""
        sharding = self.step.results[place]
        if source.place in self._states or self._places.is_simulated or self.step.backward is None or not sharding.ndim:
            return None
        return self._places.of_sharding(f"result {source.place}", sharding, self._shape(place))

    # a call

    def __call__(self, call: Call) -> Any:
        """The forward's results, as its tree of them."""
        pairs = zip(self.sources, self._getters, strict=True)
        values = [call.leaves[s.place] if g is None else g[0][g[1]] for s, g in pairs]
        if self._changed:
            check_apart(call, self._changed)
        found = self._without_backward(values) if self.step.backward is None else _Function.apply(self, *values)
        leaves = [self.step.fixed.get(place) for place in range(self.graph.results.num_leaves)]
        for source, value in zip(self._results, found, strict=True):
            leaves[source.place] = value
        results = pytree.tree_unflatten(leaves, self.graph.results)
        return results if not self.graph.kept else self._stored(*results)

    @torch.no_grad()
    def _without_backward(self, values: Sequence[Any]) -> list[Any]:
        """The forward's results; the programs' own ops are not recorded, in which a detach() is none."""
        return self.forward(values)[0]

    def _stored(self, results: Any, values: Sequence[Any]) -> Any:
        """The results; what the forward stores on its modules is stored."""
        for kept, value in zip(self.graph.kept, values, strict=True):
            setattr(kept.owner, kept.name, value)
        return results

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], int | None]:
        """(results, what is saved, the seed of random numbers) for tensors in the order of `sources`."""
        seed = self._draw() if self._draws else None
        return *self.forward_with(values, seed), seed

    def forward_with(self, values: Sequence[Any], seed: int | None) -> tuple[list[Any], list[Any]]:
        """(results, what is saved), with the random numbers of a seed."""
        outputs = self._run(self.step.forward, [_local(values[i]) for i in self._fed], seed)
        results, changed = len(self._results), len(self._written)
        for i, new in zip(self._written, outputs[results : results + changed], strict=True):
            with torch.no_grad():
                _local(values[i]).copy_(new)
        return [self._shown(i, out) for i, out in enumerate(outputs[:results])], outputs[results + changed :]

    def _shown(self, place: int, local: torch.Tensor) -> torch.Tensor:
        wrap = self._wraps[place]
        return local if wrap is None else wrap.wrapped(local.detach(), self._shape(place))

    def without_gradient(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results that have no gradient."""
        return [r for i, r in enumerate(results) if i in self._constant or not differentiable(r.dtype)]

    def program(self) -> CompiledProgram:
        """The program that ran last: with dynamic sizes one runner has several."""
        return self.step.forward.fd.latest()

    def placed_result(self, place: int, program: CompiledProgram) -> tuple[Sharding, tuple[int, ...]] | None:
        """How a result of a program lies on the ranks, by its place among the results' leaves, and its global shape."""
        for i, source in enumerate(self._results):
            if source.place == place:
                return self.step.results[i], program.graph.shape(program.graph.outputs[i])
        return None

    def _shape(self, place: int) -> tuple[int, ...]:
        graph = self.program().graph
        return graph.shape(graph.outputs[place])

    def _run(self, half: Half, values: list[torch.Tensor], seed: int | None = None) -> list[torch.Tensor]:
        if seed is not None:
            half.fd.seed_with(seed)
        if self._places.is_simulated:
            return half.fd.simulate(values)
        return half.fd.execute(values, backend=self._backend)

    # the backward

    def kept(self, values: Sequence[Any]) -> list[Any]:
        """The inputs that the backward reads; of what the forward changes a copy."""
        return [values[i].detach().clone() if is_changed else values[i] for i, is_changed in self._read]

    def before(self, values: Sequence[Any]) -> list[Any]:
        """What a forward is given, as it is before it; later calls may change it, too."""
        written = set(self._written)
        return [v.detach().clone() if i in written else v for i, v in enumerate(values)]

    def backward(self, kept: Sequence[Any], saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Gradients in the order of `sources`, None where there is none."""
        half = self.step.backward
        assert half is not None
        terms = [self._held_terms(*found) for found in self._terms]
        given = [self._tangent(i, tangents[i]) for i in self._tangents]
        fed = [*[_local(value) for value in kept], *saved, *terms, *given]
        outputs = self._run(half, [fed[i] for i in self._order])
        found: list[Any] = [None] * len(self.sources)
        none = self._unfed(tangents)
        for number, ((place, wrap, shape), local) in enumerate(zip(self._gradients, outputs, strict=True)):
            if number not in none:
                found[place] = local if wrap is None or shape is None else wrap.wrapped(local, shape)
        return found

    def _unfed(self, tangents: Sequence[Any]) -> set[int]:
        """The numbers of gradients that come of results alone that no gradient came for; torch has None for them.

        Those that have terms of earlier calls added to them are not nothing.
        """
        missing = {s.place for s, t in zip(self._results, tangents, strict=True) if t is None}
        if not missing:
            return set()
        if self._fed_by is None:
            fed, outputs = self.graph.fed_by(), self.step.backward.outputs if self.step.backward is not None else ()
            self._fed_by = [frozenset() if s.name in self.step.taken else fed.get(s, frozenset()) for s in outputs]
        return {number for number, places in enumerate(self._fed_by) if places and places <= missing}

    def _held_terms(self, place: Place, name: str, getter: Getter | None) -> torch.Tensor:
        """This rank's term of a parameter's gradient, which leaves `.grad`; zeros where it is there no more."""
        assert getter is not None
        parameter = getter[0][getter[1]]
        if is_dtensor(parameter.grad) and parameter.grad.placements == place.placements:
            found, parameter.grad = _local(parameter.grad), None
            return found
        shape = place.local_shape(self._places.shapes[name])
        return torch.zeros(shape, dtype=parameter.dtype, device=self._places.device)

    def _tangent(self, place: int, given: torch.Tensor | None) -> torch.Tensor:
        """The gradient of a result in its sharding; zeros where none came."""
        wrap = self._wraps[place]
        if given is None:
            sharding, shape = self.step.results[place], self._shape(place)
            local = shape if wrap is None else Place(sharding, wrap.torch_mesh).local_shape(shape)
            graph = self.program().graph
            return torch.zeros(local, dtype=_dtype(graph.tensors[graph.outputs[place]]), device=self._places.device)
        if wrap is not None and is_dtensor(given):
            placed: Any = given
            return placed.redistribute(wrap.torch_mesh, wrap.placements).to_local()
        return given.contiguous()

    def unexpected(self, tangents: Sequence[Any]) -> bool:
        """Whether a gradient came for a result that this step's backward takes none of."""
        return any([t is not None and i not in self._tangents for i, t in enumerate(tangents)])


def _dtype(tensor: Any) -> torch.dtype:
    return getattr(torch, tensor.type.dtype.value)


def _local(value: Any) -> Any:
    """This rank's own part of a DTensor; any other tensor as it is."""
    local = getattr(value, "_local_tensor", value)
    return local if type(local) in PLAIN else settled(local)


def _getter(module: nn.Module, graph: Captured, source: Source) -> Getter | None:
    """Where a module keeps a tensor; None for an argument of the call."""
    if source.kind == "argument":
        return None
    if source.name in graph.live and source.kind == "constant":
        return graph.live[source.name].holder, graph.live[source.name].key
    if source.kind == "constant":
        return {source.name: getattr(graph.module, source.name)}, source.name
    path, _, name = source.name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner._parameters if source.kind == "parameter" else owner._buffers), name


class _Function(torch.autograd.Function):
    """A step, as torch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        kept, again = runner.kept(values), runner.before(values) if runner.full is not None else ()
        results, saved, ctx.seed = runner.forward(values)
        ctx.runner, ctx.count, ctx.entry = runner, len(kept), World.entry()
        ctx.save_for_backward(*kept, *saved, *again)
        ctx.saved_count = len(saved)
        # Not saved for backward: torch would mind that a script changes them in place before it.
        ctx.primals = [v for v, needed in zip(values, ctx.needs_input_grad[1:], strict=True) if needed]
        ctx.mark_non_differentiable(*runner.without_gradient(results))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        with World.entered_by(ctx.entry), torch.no_grad():
            found = _gradients(ctx, tangents)
        if torch.is_grad_enabled():
            found = _without_gradients(found, ctx.primals)
        elif not torch.is_anomaly_enabled():  # torch looks for NaN in what it is handed.
            _put(ctx.runner.alike, ctx.next_functions, found)
        return None, *found


def _put(places: Sequence[int], nodes: Sequence[tuple[Any, int]], gradients: list[Any]) -> None:
    """Put gradients at these places into `.grad` of parameters that have none; torch is left to add up the others.

    Among these are terms of a sum, which a gradient that is summed can take in, but not be added to.
    It would put it there itself, but for a detach() of each, which takes a DTensor 20 us: more than all else that is
    done for a parameter on the host.
    """
    for place in places:
        node, gradient = nodes[place][0], gradients[place]
        leaf = getattr(node, "variable", None)
        if leaf is not None and gradient is not None and _is_only_put(leaf, gradient) and _is_accumulated(node):
            leaf.grad, gradients[place] = gradient, None


def _is_only_put(leaf: Any, gradient: Any) -> bool:
    """Whether torch would neither add nor cast a gradient nor hand it to a hook."""
    if leaf.grad is not None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return False
    return is_dtensor(leaf) and getattr(leaf, "grad_dtype", leaf.dtype) == gradient.dtype


def _is_accumulated(node: Any) -> bool:
    """Whether what runs is a backward() for this leaf among others, and not `torch.autograd.grad`."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def _gradients(ctx: Any, tangents: Sequence[Any]) -> list[Any]:
    runner, tensors = ctx.runner, ctx.saved_tensors
    kept, rest = tensors[: ctx.count], tensors[ctx.count :]
    saved, values = rest[: ctx.saved_count], rest[ctx.saved_count :]
    if not runner.unexpected(tangents):
        return runner.backward(kept, saved, tangents)
    return _again(runner, values, ctx.seed, tangents)


class _NoSecond(torch.autograd.Function):
    """Gradients, as an autograd that keeps how they came about (`create_graph`) sees them: as made of the primals."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([gradient.detach() for gradient in gradients])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        raise user_error(
            "a parallel model's gradients have no gradients", "a backward through some taken with create_graph=True",
            "a loss without gradients in it",
            "Write the model as a definition, whose gradients have gradients, or leave it as it was.", caller_line(),
        )  # fmt: skip


def _without_gradients(gradients: Sequence[Any], primals: Sequence[torch.Tensor]) -> list[Any]:
    """Gradients, to differentiate which is an error: torch would take them for constants."""
    found = [g for g in gradients if g is not None]
    made = iter(_NoSecond.apply(found, *primals) if found else ())
    return [None if gradient is None else next(made) for gradient in gradients]


def _again(runner: Runner, values: Sequence[Any], seed: int | None, tangents: Sequence[Any]) -> list[Any]:
    """The backward of a step with gradients that its plan did not expect: the forward runs once more for it."""
    assert runner.full is not None
    other = runner.full()
    by_source = dict(zip(runner.sources, values, strict=True))
    given = [by_source[source] for source in other.sources]
    kept = other.kept(given)
    _, saved = other.forward_with(other.before(given), seed)
    found = dict(zip(other.sources, other.backward(kept, saved, tangents), strict=True))
    return [found.get(source) for source in runner.sources]
