"""A call of a module: its arguments as leaves, what its program depends on, and the shapes of all ranks together."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..definition.annotation import layouts_of_spec
from ..definition.checks import mesh_of_torch
from ..errors import ArgumentError, SourceLine, line_in_script, user_error
from ..executor.arguments import unreadable
from ..executor.dtensor import is_dtensor, sharding_of
from ..runtime.world import World
from ..sharding.data import shard
from ..sharding.strided import factors_of
from ..sharding.value import Sharding
from .kv_caches import Cached, cache_key, is_cache, with_cache_tensors
from .leaf_names import names_of_leaves
from .plans import ModulePlan, Spec


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call.

    leaves: all leaves of (args, kwargs), and behind them the tensors of `caches`; `places` are those of tensors.
    key: what its program depends on.
    has_gradient: whether a gradient may be asked for.
    """

    leaves: list[Any]
    tree: pytree.TreeSpec
    places: tuple[int, ...]
    key: Any
    has_gradient: bool
    caches: tuple[Cached, ...] = ()


def read_call(module: Any, tables: Sequence[Any], parts: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Read a call of a module. `tables` are its modules, of which training matters, and its parameters.

    parts: into how many parts the heads of a new cache are cut.
    """
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    caches: tuple[Cached, ...] = ()
    if any([is_cache(leaf) for leaf in leaves]):
        leaves, caches = with_cache_tensors(leaves, module, parts)
    modules, parameters = tables
    places = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)])
    for place in places:
        if problem := unreadable(leaves[place], leaves[place].dtype, "gradients come from backward()"):
            wrong, found, needed, do = problem
            line = line_in_script(sys._getframe(2), ("torch",))
            raise user_error(
                f"tensor number {place + 1} of the arguments{wrong}", found, needed, do, line, ArgumentError
            )
    records = torch.is_grad_enabled()
    wanted = tuple([p.requires_grad for p in parameters]) if records else ()
    given = records and any([leaves[i].requires_grad for i in places])
    modes = tuple([m.training for m in modules])
    key = (tree, tuple([_key(leaf, records) for leaf in leaves]), wanted, modes, _autocast())
    return Call(leaves, tree, places, key, records and (given or True in wanted), caches)


def _key(leaf: Any, records: bool) -> Any:
    """What a program depends on of an argument: of a tensor its type and shape, of anything else its value."""
    if not isinstance(leaf, torch.Tensor):
        return cache_key(leaf) if is_cache(leaf) else _value_key(leaf) if leaf.__hash__ is not None else id(leaf)
    given: Any = leaf
    placed = tuple(given.placements) if is_dtensor(leaf) else None
    return tuple(leaf.shape), leaf.dtype, placed, records and leaf.requires_grad


def _value_key(value: Any) -> Any:
    """Equal for the same value of the same type: True, 1 and 1.0 are equal in Python, and so are 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def check_apart(call: Call, changed: Sequence[int]) -> None:
    """Raise ArgumentError where a tensor that the forward changes shares memory with another argument.

    The graph takes arguments for tensors apart: of the change the other one would see nothing.

    changed: the places of arguments that are changed in place.
    """
    spans = {place: _span(call.leaves[place]) for place in call.places}
    for place in changed:
        for other, span in spans.items():
            if other != place and span[0] < spans[place][1] and spans[place][0] < span[1]:
                numbers = sorted((place + 1, other + 1))
                raise user_error(
                    "an argument that the forward changes in place shares memory with another",
                    f"tensors number {numbers[0]} and {numbers[1]} of the arguments", "tensors apart",
                    "Pass a clone() of one.", line_in_script(sys._getframe(1), ("torch",)), ArgumentError,
                )  # fmt: skip


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and last address of a tensor's elements; none of an empty one."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]
    if not local.numel():
        return 0, 0
    reach = sum((n - 1) * abs(step) for n, step in zip(local.shape, local.stride(), strict=True))
    return local.data_ptr(), local.data_ptr() + (reach + 1) * local.element_size()


def _autocast() -> Any:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds])


class Arguments:
    """The tensors of a call, as they are on all ranks together.

    shapes, specs: by place among the leaves the global shape, and how the argument is cut.
    names: by place what the forward calls it.
    """

    def __init__(
        self, parameters: Sequence[str], inputs: Mapping[str, Spec], plan: ModulePlan, simulated: bool, call: Call,
        line: SourceLine,
    ) -> None:  # fmt: skip
        self.call, self.mesh, self.line, self._simulated = call, plan.mesh, line, simulated
        self.names = _names(parameters, call)
        self.specs: dict[int, Spec] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        for place in call.places:
            leaf = call.leaves[place]
            if is_dtensor(leaf):
                self._read_dtensor(place, leaf)
            else:
                self._read(place, leaf, inputs.get(self.names[place]))
        for cached in call.caches:
            self._read_cache(cached, inputs, plan)

    def of_batch(self) -> tuple[frozenset[int], int]:
        """The arguments that have the rows of the batch, and how many these are: as `step` cuts into micro-batches."""
        shapes = {i: shape for i, shape in self.shapes.items() if shape}
        first = [i for i, spec in self.specs.items() if spec and spec[0] is not None and i in shapes] or list(shapes)
        rows = shapes[first[0]][0] if first else 1
        return frozenset(i for i, shape in shapes.items() if shape[0] == rows), rows

    def _read_cache(self, cached: Cached, inputs: Mapping[str, Spec], plan: ModulePlan) -> None:
        """Keys and values are cut as `inputs` says of the cache; else by batch, and by heads for tensor parallelism."""
        spec = inputs.get(self.names[cached.place])
        batch = {leaf[0]: s[0] for i, s in self.specs.items() if (leaf := self.call.leaves[i].shape)}
        for place in range(cached.first, cached.first + 3 * cached.layers):
            shape = self.call.leaves[place].shape
            if len(shape) > 1:
                heads = plan.tensor_axis if self._has_own_heads(shape[1], cached, plan.tensor_axis) else None
                self._read(place, self.call.leaves[place], spec or (batch.get(shape[0]), heads, None, None))

    def _has_own_heads(self, n: int, cached: Cached, axis: str | None) -> bool:
        """Whether ranks of an axis have heads of their own; on real ranks a cache has a rank's heads alone."""
        ranks = self.mesh.axis_size(axis) if axis is not None else 1
        return ranks > 1 and (n % ranks == 0 if self._simulated else n * ranks == cached.heads)

    def _read(self, place: int, leaf: torch.Tensor, spec: Spec | None) -> None:
        shape = tuple(leaf.shape)
        self.shapes[place] = shape
        if spec is None:
            return
        name = self.names[place]
        if len(spec) != len(shape):
            raise user_error(
                f"argument {name}: inputs has one entry per dim", f"{list(spec)} for shape {list(shape)}",
                f"{len(shape)} entries, or a tensor of {len(spec)} dims", "Correct inputs of mf.parallelize.",
                self.line, ArgumentError,
            )  # fmt: skip
        layouts = layouts_of_spec(name, self.mesh, spec, len(shape), self.line)
        self.specs[place] = spec
        if not self._simulated:
            ranks = [_ranks(layout) for layout in layouts]
            self.shapes[place] = tuple(n * m for n, m in zip(shape, ranks, strict=True))

    def _read_dtensor(self, place: int, leaf: Any) -> None:
        shape, name = tuple(leaf.shape), self.names[place]
        mesh = mesh_of_torch(leaf.device_mesh)
        sharding = sharding_of(mesh, tuple(leaf.placements), shape)
        if mesh.grid != self.mesh.grid or sharding is None:
            raise user_error(
                f"argument {name}: a DTensor that the plan has no place for", f"{tuple(leaf.placements)} on {mesh}",
                f"Shard or Replicate on {self.mesh}", "Redistribute it.", self.line, ArgumentError,
            )  # fmt: skip
        self.shapes[place] = shape
        self.specs[place] = tuple([list(factors_of(layout) or layout) or None for layout in sharding.dims])

    def whole(
        self, dynamic: Mapping[str, Sequence[int]], device: torch.device, dtype: torch.dtype | None = None,
        instead: Mapping[int, int] | None = None,
    ) -> list[Any]:  # fmt: skip
        """The leaves with whole tensors without numbers in the place of shards; those of floats in another type.

        instead: by size of dynamic dims another one that they have.
        """
        leaves = list(self.call.leaves)
        for place in self.call.places:
            leaf = leaves[place]
            found = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
            # torch reads a tensor without dims while it traces, but keeps no number that comes of it.
            shape = list(self.shapes[place])
            new = torch.empty if shape else torch.zeros
            dims = self._dynamic_dims(place, dynamic)
            for dim in dims:
                shape[dim] = (instead or {}).get(shape[dim], shape[dim])
            made = new(shape, dtype=found, device=device)
            for dim in dims:
                torch._dynamo.mark_dynamic(made, dim)
            leaves[place] = made.requires_grad_(leaf.requires_grad)
        return leaves

    def _dynamic_dims(self, place: int, dynamic: Mapping[str, Sequence[int]]) -> list[int]:
        """The dims of an argument whose sizes change. Raises ArgumentError for those that it does not have."""
        name, ndim = self.names[place], len(self.shapes[place])
        dims = dynamic.get(name, ())
        if any([not -ndim <= dim < ndim for dim in dims]):
            raise user_error(
                f"dynamic[{name!r}]", f"{list(dims)} for shape {list(self.shapes[place])}", f"dims below {ndim}",
                "Correct dynamic of mf.parallelize.", self.line, ArgumentError,
            )  # fmt: skip
        return [dim % ndim for dim in dims]

    def key(self, dynamic: Mapping[str, Sequence[int]]) -> Any:
        """What the captured graph depends on: the call's key without the sizes of dynamic dims."""
        head, leaves, *rest = self.call.key
        listed = list(leaves)
        for place in self.call.places:
            dims = self._dynamic_dims(place, dynamic)
            shape = tuple([None if d in dims else n for d, n in enumerate(self.shapes[place])])
            listed[place] = (shape, *leaves[place][1:])
        return head, tuple(listed), *rest

    def batch(self) -> tuple[int, Any] | None:
        """(size, axes) of the first dim of the first argument that is cut along it; None where none is."""
        for place, spec in self.specs.items():
            if spec and spec[0] is not None:
                return self.shapes[place][0], spec[0]
        return None

    def text(self) -> str:
        """The shapes of all arguments, here and in all."""
        return ", ".join(
            f"{self.names[i]} {list(self.call.leaves[i].shape)} here, {list(shape)} in all"
            for i, shape in self.shapes.items()
        )


def shards_of_arguments(
    plan: ModulePlan, specs: Mapping[str, Spec], names: Sequence[str], whole: Mapping[str, torch.Tensor],
    line: SourceLine,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Of whole arguments of these names what this rank passes. Raises DefinitionError for other names, ArgumentError
    for a tensor of other dims than its spec has entries."""
    rank, found = World.current().rank, dict(whole)
    for name, tensor in whole.items():
        if name not in names:
            raise user_error(f"no argument is called {name!r}", "", f"one of {[*names]}", "", line)
        spec = specs.get(name)
        if spec is not None and len(spec) != tensor.ndim:
            raise user_error(f"argument {name}: one dim per entry of its spec", f"shape {list(tensor.shape)}",
                             f"{len(spec)} dims, for {list(spec)}", "Pass the whole tensor.", line,
                             ArgumentError)  # fmt: skip
        if spec is not None and World.current().size > 1:
            layouts = layouts_of_spec(name, plan.mesh, spec, tensor.ndim, line)
            found[name] = shard(tensor, Sharding.make(plan.mesh, layouts, tuple(tensor.shape)), rank)
    return found


def _ranks(layout: Any) -> int:
    found = 1
    for split in layout:
        found *= split.size if split.bound else 1
    return found


def _names(parameters: Sequence[str], call: Call) -> list[str]:
    """What each leaf is called, and the tensors of caches behind them."""
    count = call.tree.num_leaves
    names = names_of_leaves(parameters, *pytree.tree_unflatten(call.leaves[:count], call.tree))
    for cached in call.caches:
        parts = ("keys", "values", "length")
        names += [f"{names[cached.place]}.{layer}.{part}" for layer in range(cached.layers) for part in parts]
    return names
