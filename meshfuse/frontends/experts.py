"""Expert parallelism: the experts of a model lie over an axis, and rows of tokens go to them and back.

Models of transformers say where their experts are computed by an interface of theirs. While a model is captured, this
one is chosen there; it is written in the ops of this file, which stand for `fd.ops.moe_dispatch` and the others
(`ops/experts.py`) and are never run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..argument_checks import as_int
from ..errors import MeshfuseError, SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh
from .patterns import matching, nearest
from .plan_value import Spec, axes_in

_NAME = "meshfuse"
_MARK = "_meshfuse_exchanges"


@dataclass(frozen=True, slots=True, init=False)
class Experts:
    """How experts lie over ranks: `experts=mf.Experts("ep")`.

    axes: the axis, or axes, that the experts of each layer are cut over. Tokens are usually cut over them, too.
    modules: patterns of the modules that have experts, or of modules right above these; None for all there are.
    capacity: None, and no row is dropped. Else each expert has room for so many times the rows that it had if all had
        as many, in each group of tokens; the last ones beyond that give nothing (GShard, Lepikhin et al. 2021). All
        sizes are then known before a step runs.
    groups: how many groups of neighbouring tokens fill that room by themselves; None for as many as ranks share the
        batch, whose tokens then go to experts and back by one all-to-all each. What is dropped follows from it.

    Any number of experts goes over any number of ranks. Raises DefinitionError for what is none of these.
    """

    axes: tuple[str, ...]
    modules: tuple[str, ...] | None
    capacity: float | None
    groups: int | None

    def __init__(
        self, axes: str | Sequence[str], modules: str | Sequence[str] | None = None, capacity: float | None = None,
        groups: int | None = None,
    ) -> None:  # fmt: skip
        line = caller_line()
        given = (axes,) if isinstance(axes, str) else axes
        if not isinstance(given, (list, tuple)) or not given or not all(isinstance(axis, str) for axis in given):
            raise user_error("Experts: axes", shown(axes), "the name of an axis, or of several", "", line)
        is_number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
        if capacity is not None and not (is_number and 0 < capacity < math.inf):
            raise user_error("Experts: capacity", shown(capacity), "a number above 0, or None: no row is dropped",
                             "Pass 1.25, or leave it out.", line)  # fmt: skip
        if groups is not None and (capacity is None or (as_int(groups) or 0) < 1):
            needed = "a number from 1 on" if capacity is not None else "a capacity, which each group has"
            raise user_error("Experts: groups", shown(groups), needed, "Leave it out.", line)
        patterns = (modules,) if isinstance(modules, str) else None if modules is None else tuple(modules)
        object.__setattr__(self, "axes", tuple(given))
        object.__setattr__(self, "modules", patterns)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "groups", groups)

    def room(self, inputs: Iterable[Spec], mesh: DeviceMesh) -> Room | None:
        """The room of every expert of a model with these inputs; None where no row is dropped."""
        if self.capacity is None:
            return None
        batch = max((math.prod(map(mesh.axis_size, axes_in([spec[:1]]))) for spec in inputs), default=1)
        return Room(*Fraction(str(self.capacity)).as_integer_ratio(), self.groups or batch)


@dataclass(frozen=True, slots=True)
class Room:
    """Room for rows: a part (`times` / `parts`) of what an expert gets if all get as much, in each group of tokens."""

    times: int
    parts: int
    groups: int

    def rows(self, tokens: int, chosen: int, experts: int) -> int:
        """Of one expert for one group of so many tokens, each of which chooses some experts."""
        return -(-tokens * chosen * self.times // (experts * self.parts))


def checked_experts(experts: Any, mesh: DeviceMesh, line: SourceLine) -> Experts | None:
    """What a user passed as `experts=`: an Experts, or its axis. Raises DefinitionError for anything else."""
    if experts is None:
        return None
    made = Experts(experts) if isinstance(experts, str) else experts
    if not isinstance(made, Experts):
        raise user_error("parallelize: experts", shown(experts), "an mf.Experts, or the name of an axis",
                         'Pass mf.Experts("ep").', line)  # fmt: skip
    wrong = [axis for axis in made.axes if axis not in mesh.names]
    if wrong:
        raise user_error("parallelize: experts: unknown mesh axis", repr(wrong[0]), f"one of {list(mesh.names)}",
                         "Use an axis of the mesh.", line)  # fmt: skip
    return made


def expert_modules(module: nn.Module, experts: Experts, line: SourceLine) -> list[str]:
    """The full names of the modules with experts. Raises DefinitionError where there are none, or ones not known."""
    every = {name: part for name, part in module.named_modules() if _has_experts(part)}
    found = [name for name in every if experts.modules is None or _is_named(name, experts.modules)]
    for pattern in experts.modules or ():
        if not any(_is_named(name, [pattern]) for name in every):
            near = nearest(pattern, [*every])
            raise user_error(f"Experts: {pattern!r} matches no module with experts",
                             f"near to it {near}" if near else "", f"such as {[*every][:3]}", "Correct the pattern.",
                             line)  # fmt: skip
    if not found:
        raise user_error(
            f"Experts: {type(module).__name__} has none", "no module of transformers with stacked experts",
            "a model such as Mixtral, Qwen3-MoE or DeepSeek-V3",
            "In a function or definition of your own, write them with fd.ops.moe_dispatch.", line,
        )  # fmt: skip
    for name in found:
        _check_known(name, every[name], line)
    return found


def exchangeable(module: nn.Module) -> list[str]:
    """The full names of the modules whose experts rows can be sent to."""
    line = caller_line()
    found = []
    for name, part in module.named_modules():
        with suppress(MeshfuseError):
            if _has_experts(part):
                _check_known(name, part, line)
                found.append(name)
    return found


def _has_experts(part: nn.Module) -> bool:
    weights = [getattr(part, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return hasattr(part, "is_transposed") and any(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether patterns fit a module or the one right above it."""
    return any(matching(pattern, [name, name.rpartition(".")[0]]) for pattern in patterns)


def _check_known(name: str, part: Any, line: SourceLine) -> None:
    own_gate = part.has_gate and type(part)._apply_gate is not _default_gate()
    for is_there, what in (
        (part.has_bias, "biases"), (part.has_post_expert_norm, "a norm of each expert's result"),
        (own_gate, "a gate of its own"),
    ):  # fmt: skip
        if is_there:
            raise user_error(f"Experts: {name} ({type(part).__name__}) has {what}", "",
                             "experts of two or three matrices, with an activation between them",
                             "Leave experts= out: its products are then cut by their plan.", line)  # fmt: skip


def _default_gate() -> Any:
    return sys.modules["transformers.integrations.moe"]._default_apply_gate


def expert_specs(
    module: nn.Module, names: Sequence[str], experts: Experts, specs: Mapping[str, Spec]
) -> dict[str, Spec]:
    """Where the weights of experts lie: over the axes by experts, and otherwise as a plan says."""
    found: dict[str, Spec] = {}
    entry = experts.axes[0] if len(experts.axes) == 1 else list(experts.axes)
    for name in names:
        for own, weight in module.get_submodule(name).named_parameters(recurse=False):
            full = f"{name}.{own}"
            found[full] = (entry, *specs.get(full, (None,) * weight.ndim)[1:])
    return found


# while a model is captured


@dataclass(frozen=True, slots=True)
class _Sending:
    """What a module is marked with. It outlives the capture, whose guards read it."""

    room: Room | None


@contextmanager
def exchanging(module: nn.Module, names: Mapping[str, Room | None]) -> Iterator[None]:
    """In this context these modules send rows to experts, with room for so many, whatever transformers would do."""
    parts: list[Any] = [module.get_submodule(name) for name in names]
    configs = {id(part.config): part.config for part in parts}.values()
    before = [(config, config._experts_implementation) for config in configs]
    if parts:
        sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    try:
        for part, room in zip(parts, names.values(), strict=True):
            setattr(part, _MARK, _Sending(room))
        for config in configs:
            config._experts_implementation = _NAME
        yield
    finally:
        for part in parts:
            delattr(part, _MARK)
        for config, implementation in before:
            config._experts_implementation = implementation


def _forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    """The result of one layer's experts for rows of hidden states."""
    if not hasattr(self, _MARK):  # one that the user's patterns leave out
        moe: Any = sys.modules["transformers.integrations.moe"]
        return moe.grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    x, room = hidden_states.to(self.down_proj.dtype), getattr(self, _MARK).room
    sent = _Exact.of(self, x, top_k_index) if room is None else _InRoom.of(self, x, top_k_index, room)
    if room is None and _is_swiglu(self):
        inner = swiglu(sent.times(sent.rows, self.gate_up_proj))
    elif self.has_gate:
        gate, up = (sent.times(sent.rows, half) for half in _halves(self))
        inner = self.act_fn(gate) * up
    else:
        inner = self.act_fn(sent.times(sent.rows, self.up_proj))
    back = sent.back(sent.times(inner, self.down_proj))
    return (back * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


class _Exact(NamedTuple):
    """Rows at their experts, none dropped."""

    rows: torch.Tensor
    expert: torch.Tensor
    chosen: torch.Tensor
    is_transposed: bool

    @classmethod
    def of(cls, part: Any, x: torch.Tensor, chosen: torch.Tensor) -> _Exact:
        rows, expert = dispatch(x, chosen, part.num_experts)
        return cls(rows, expert, chosen, part.is_transposed)

    def times(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows times the matrices of their experts."""
        return linear(rows, self.expert, weight, not self.is_transposed)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, chosen, width]: rows of experts at their tokens."""
        return collect(rows, self.chosen)


class _InRoom(NamedTuple):
    """Rows in the room that their experts have for each group of tokens: [experts, groups * room, width].

    place: [groups, rows of a group] where each row lies among those of all experts; behind them if there is no room.
    """

    rows: torch.Tensor
    place: torch.Tensor
    tokens: int
    chosen: int
    is_transposed: bool

    @classmethod
    def of(cls, part: Any, x: torch.Tensor, chosen: torch.Tensor, room: Room) -> _InRoom:
        (tokens, choices), groups, experts = chosen.shape, room.groups, part.num_experts
        of_group = -(-tokens // groups)
        missing = groups * of_group - tokens
        chosen, x = F.pad(chosen, (0, 0, 0, missing), value=experts), F.pad(x, (0, 0, 0, missing))
        most, expert = room.rows(of_group, choices, experts), chosen.reshape(groups, -1)
        is_here = F.one_hot(expert, experts + 1)[..., :experts]
        before = (is_here.cumsum(1) * is_here).sum(-1) - 1  # of the same expert, in its group; -1 for a missing token
        place = torch.where((before >= 0) & (before < most), expert * most + before, experts * most)
        copies = x.unsqueeze(1).expand(-1, choices, -1).reshape(groups, of_group * choices, -1)
        empty = copies.new_zeros((groups, experts * most + 1, x.shape[-1]))
        filled = empty.scatter(1, place.unsqueeze(-1).expand_as(copies), copies)[:, :-1]
        rows = filled.unflatten(1, (experts, most)).transpose(0, 1).flatten(1, 2)
        return cls(rows, place, tokens, choices, part.is_transposed)

    def times(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows times the matrices of their experts."""
        return torch.bmm(rows, weight if self.is_transposed else weight.transpose(1, 2))

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, chosen, width]: rows of experts at their tokens; zeros for those that had no room."""
        of_groups = rows.unflatten(1, (self.place.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        padded = F.pad(of_groups, (0, 0, 0, 1))
        found = padded.gather(1, self.place.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
        return found.reshape(-1, self.chosen, rows.shape[-1])[: self.tokens]


def _is_swiglu(part: Any) -> bool:
    """Whether gate and up are one matrix whose product goes through silu; others are multiplied one by one."""
    return part.has_gate and part.is_concatenated and type(part.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _halves(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of the gate and of what it lets through, which lie one behind the other, or by turns."""
    both, dim = part.gate_up_proj, 2 if part.is_transposed else 1
    if part.is_concatenated:
        gate, up = both.chunk(2, dim)
        return gate, up
    pairs = both.unflatten(dim, (-1, 2))
    return pairs.select(dim + 1, 0), pairs.select(dim + 1, 1)


# the ops of a captured graph; their shapes are those of ragged tensors in definitions


_NEVER_RUN = "experts of a captured graph are translated, not run"


@torch.library.custom_op("meshfuse::moe_dispatch", mutates_args=())
def dispatch(x: torch.Tensor, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, expert) of tokens at their experts."""
    raise AssertionError(_NEVER_RUN)


@dispatch.register_fake
def _(x: Any, experts: Any, count: int) -> Any:
    places = experts.new_empty((count, x.shape[0]), dtype=torch.int64)
    return x.new_empty((count, x.shape[0], x.shape[-1])), places


@torch.library.custom_op("meshfuse::moe_collect", mutates_args=())
def collect(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Rows of experts back at their tokens."""
    raise AssertionError(_NEVER_RUN)


@collect.register_fake
def _(rows: Any, experts: Any) -> Any:
    return rows.new_empty((*experts.shape, rows.shape[-1]))


@torch.library.custom_op("meshfuse::moe_linear", mutates_args=())
def linear(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Rows times the matrices of their experts."""
    raise AssertionError(_NEVER_RUN)


@linear.register_fake
def _(rows: Any, expert: Any, weight: Any, transposed: bool) -> Any:
    return rows.new_empty((*rows.shape[:2], weight.shape[1 if transposed else 2]))


@torch.library.custom_op("meshfuse::moe_weight_gradient", mutates_args=())
def weight_gradient(left: torch.Tensor, right: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """For each expert the product of its rows of both."""
    raise AssertionError(_NEVER_RUN)


@weight_gradient.register_fake
def _(left: Any, right: Any, expert: Any) -> Any:
    return left.new_empty((left.shape[0], left.shape[2], right.shape[2]))


@torch.library.custom_op("meshfuse::moe_swiglu", mutates_args=())
def swiglu(rows: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for rows of both."""
    raise AssertionError(_NEVER_RUN)


@swiglu.register_fake
def _(rows: Any) -> Any:
    return rows.new_empty((*rows.shape[:2], rows.shape[2] // 2))


@torch.library.custom_op("meshfuse::moe_swiglu_backward", mutates_args=())
def swiglu_backward(grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of swiglu by its rows."""
    raise AssertionError(_NEVER_RUN)


@swiglu_backward.register_fake
def _(grad: Any, rows: Any) -> Any:
    return torch.empty_like(rows)


def _dispatch_saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, experts, _ = inputs
    ctx.save_for_backward(experts)
    ctx.is_flat = x.ndim == 2
    ctx.mark_non_differentiable(*output[1:])


def _dispatch_backward(ctx: Any, grad: Any, *_: Any) -> Any:
    (experts,) = ctx.saved_tensors
    back = collect(grad.contiguous(), experts)
    return back.sum(1) if ctx.is_flat else back, None, None


def _collect_saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, experts = inputs
    ctx.save_for_backward(experts)
    ctx.count = rows.shape[0]


def _collect_backward(ctx: Any, grad: Any) -> Any:
    (experts,) = ctx.saved_tensors
    return dispatch(grad.contiguous(), experts, ctx.count)[0], None


def _linear_saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, grad: Any) -> Any:
    rows, expert, weight = ctx.saved_tensors
    grad = grad.contiguous()
    both = (grad, rows) if ctx.transposed else (rows, grad)
    by_rows = linear(grad, expert, weight, not ctx.transposed) if ctx.needs_input_grad[0] else None
    by_weight = weight_gradient(*both, expert) if ctx.needs_input_grad[2] else None
    return by_rows, None, by_weight, None


def _swiglu_saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: Any) -> Any:
    return swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_saved)
collect.register_autograd(_collect_backward, setup_context=_collect_saved)
linear.register_autograd(_linear_backward, setup_context=_linear_saved)
swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_saved)
