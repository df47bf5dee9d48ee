"""What a forward changes besides tensors: attributes that it sets are results of the graph, set after each call.

Dynamo notes them while it traces. What cannot be had so, as a list that grows, is an error at the line that does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import AttributeMutationExisting, ValueMutationExisting
from torch.utils import _pytree as pytree

from ..errors import MeshfuseError, SourceLine, user_error
from .forward_reads import Scope, same
from .kv_caches import INNER, WithCaches
from .lines import is_users


@dataclass(frozen=True, slots=True)
class Change:
    """Something that a forward changes: attributes, or entries of a dict, or a list.

    source: Dynamo's name of whose they are. stored: the names of attributes or entries. values: the numbers and texts
    among what they are set to. line: the one that changes it.
    """

    source: Any
    stored: tuple[Any, ...]
    values: Mapping[Any, Any]
    line: SourceLine


@dataclass(frozen=True, slots=True)
class Kept:
    """An attribute that is set after each call. value: the number or text that the capture sets it to, if it is one."""

    owner: Any
    name: str
    line: SourceLine
    value: Any = None

    def counted(self) -> bool:
        return isinstance(self.value, int | float) and not isinstance(self.value, bool)


@contextmanager
def changes_noted() -> Iterator[list[Change]]:
    """Gives a list of what Dynamo's latest trace in this context has changed."""
    original, found = OutputGraph.get_replayed_side_effect_source_refs, list[Change]()

    def noted(graph: Any, **options: Any) -> list[str]:
        original(graph, **options)
        found[:] = _changes(graph.side_effects)
        return []

    with mock.patch.object(OutputGraph, "get_replayed_side_effect_source_refs", noted):
        yield found


def _changes(effects: Any) -> Iterator[Change]:
    for changed in effects._get_modified_vars():
        if isinstance(changed.mutation_type, AttributeMutationExisting | ValueMutationExisting):
            stored = effects.store_attr_mutations.get(changed) or _entries(changed)
            values = {name: new.as_python_constant() for name, new in stored.items() if new.is_python_constant()}
            yield Change(changed.source, tuple(stored), values, _line(effects.mutation_user_stacks.get(changed, ())))


def _entries(changed: Any) -> dict[Any, Any]:
    """The entries of a dict that are not those of before."""
    items = getattr(changed, "items", None)
    if not isinstance(items, dict):
        return {}
    return {key.vt.as_python_constant(): new for key, new in items.items() if new.source is None}


def _line(stacks: Sequence[Any]) -> SourceLine:
    """The innermost line outside of torch that made the latest change."""
    frames = [frame for frame in (stacks[-1] if stacks else ()) if is_users(frame.filename)]
    if not frames:
        return SourceLine("<captured>", 0, "")
    return SourceLine(frames[-1].filename, int(frames[-1].lineno or 0), frames[-1].name)


def kept_of(changes: Iterable[Change], module: nn.Module, scope: Scope, called: str) -> list[Kept]:
    """The attributes that a forward sets to something else than they are.

    Raises DefinitionError for what cannot be set after a call: lists, dicts, globals and variables of closures.
    """
    return [kept for change in changes for kept in _kept(change, module, scope, called)]


def _kept(change: Change, module: nn.Module, scope: Scope, called: str) -> Iterator[Kept]:
    if scope.is_of_call(change.source) or (isinstance(module, WithCaches) and "._fixed[" in _text(change.source)):
        return
    holder, name = scope.owner(change.source)
    owner = scope.value(change.source)
    if isinstance(owner, nn.Module) and type(owner).__module__.startswith("torch."):
        return  # What a module of torch's keeps for itself, as an LSTM its list of weights.
    if name == "_non_persistent_buffers_set":
        return  # Kept by torch where a buffer is set.
    if name in ("_buffers", "'_buffers'") and isinstance(owner, dict):
        owner = next((part for part in module.modules() if part._buffers is owner), owner)
    is_variable = isinstance(owner, CellType) or change.stored == (getattr(change.source, "global_name", ""),)
    is_settable = bool(change.stored) and not is_variable and not isinstance(owner, dict | list | set | None)
    for stored in change.stored if is_settable else ():
        if stored not in change.values or not same(getattr(owner, stored, None), change.values[stored]):
            yield Kept(owner, stored, change.line, change.values.get(stored))
    if not is_settable and not _is_as_before(holder, name, owner, change):
        raise _no_place(called, change)


def _is_as_before(holder: Any, name: Any, owner: Any, change: Change) -> bool:
    """Whether a global variable or a closure's is set to what it is."""
    if isinstance(owner, CellType):
        return same(owner.cell_contents, change.values.get("cell_contents"))
    return name in change.values and isinstance(holder, dict) and same(holder[name], change.values[name])


def _text(source: Any) -> str:
    return source.name if isinstance(source.name, str) else source.name()


def _no_place(called: str, change: Change) -> MeshfuseError:
    words = [word for word in re.findall(r"\w+", _text(change.source)) if not word.startswith("_")]
    name = words[-1] if words else ", ".join(map(str, change.stored))
    return user_error(
        f"{called} changes {name}", "a list, dict or variable that was there before the call",
        "one that the forward makes, or an attribute that it sets",
        f"Return it as a result, or set an attribute of the module: self.{name} = [...].", change.line,
    )  # fmt: skip


def check_counts(before: Iterable[Kept], now: Iterable[Kept], model: str) -> None:
    """Raise DefinitionError for a number that a forward counts up: each call would have to be captured anew."""
    known = {(id(kept.owner), kept.name): kept.value for kept in before if kept.counted()}
    for kept in now:
        earlier = known.get((id(kept.owner), kept.name))
        if kept.counted() and earlier is not None and earlier != kept.value:
            raise user_error(
                f"the forward of {model} changes {kept.name} at every call", f"{earlier}, then {kept.value}",
                "a tensor that counts",
                f'Make it a buffer: self.register_buffer("{kept.name}", torch.zeros((), dtype=torch.long)).', kept.line,
            )  # fmt: skip


class WithChanges(nn.Module):
    """A module whose results are its own and what it sets attributes to; buffers that it replaces it writes to.

    copied: the places of results that are inputs, or attributes of such: of these copies are returned. None for all.
    """

    def __init__(self, module: nn.Module, kept: Sequence[Kept], copied: frozenset[int] | None = frozenset()) -> None:
        super().__init__()
        setattr(self, INNER, module)
        self._copied = copied
        paths = {id(part): path for path, part in module.named_modules()}
        rows: list[tuple[Any, Any, str]] = [(paths.get(id(one.owner)), one.owner, one.name) for one in kept]
        self._buffers_replaced = [(path, name) for path, owner, name in rows if is_buffer(owner, name)]
        self._attributes = [
            (path, None if path is not None else owner, name)
            for path, owner, name in rows
            if not is_buffer(owner, name)
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, INNER)
        before = [_part(module, path)._buffers[name] for path, name in self._buffers_replaced]
        found = module.forward(*args, **kwargs)
        for old, (path, name) in zip(before, self._buffers_replaced, strict=True):
            old.copy_(getattr(_part(module, path), name).detach())
        owners = [_part(module, path) if path is not None else owner for path, owner, _ in self._attributes]
        if owners:
            found = found, [getattr(owner, row[2]) for owner, row in zip(owners, self._attributes, strict=True)]
        return found if self._copied == frozenset() else _with_copies(found, self._copied)


def _with_copies(results: Any, places: frozenset[int] | None) -> Any:
    leaves, tree = pytree.tree_flatten(results)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (places is None or place in places):
            leaves[place] = leaf.clone()
    return pytree.tree_unflatten(leaves, tree)


def _part(module: Any, path: str) -> Any:
    """A module in a module, under whose names its tensors are known."""
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module


def is_buffer(owner: Any, name: str) -> bool:
    return isinstance(owner, nn.Module) and name in owner._buffers
