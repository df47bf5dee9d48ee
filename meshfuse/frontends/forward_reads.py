"""What a captured forward read beside its arguments: a call is captured anew where something of that has changed.

Dynamo names it in its guards: numbers and texts that are attributes of modules, of their configurations or of Python
modules, and which modules ran. Their children, hooks and replaced forwards are in the graph as well.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

_VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IMPORTED = "__import_"  # Dynamo's names of Python modules.


@dataclass(frozen=True, slots=True)
class ForwardReads:
    """What a forward read, with what it found.

    attributes: (owner, name, value). items: (dict, list or tuple, key, value). tables: modules' dicts, each with its
    content. replaced: modules, each with the forward that stands in for its class's.
    """

    attributes: tuple[tuple[Any, str, Any], ...] = ()
    items: tuple[tuple[Any, Any, Any], ...] = ()
    tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    replaced: tuple[tuple[nn.Module, Any], ...] = ()

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return (
                all([now == before for now, before in self.tables])
                and all([getattr(owner, name) == value for owner, name, value in self.attributes])
                and all([holder[key] == value for holder, key, value in self.items])
                and all([module.__dict__.get("forward") is forward for module, forward in self.replaced])
            )
        except (AttributeError, LookupError, TypeError):  # Something is not there any more.
            return False

    def again(self) -> ForwardReads:
        """The same, with what is there now: a capture sets some of it for itself."""
        attributes = tuple([(owner, name, getattr(owner, name)) for owner, name, _ in self.attributes])
        return replace(self, attributes=attributes, items=tuple([(on, key, on[key]) for on, key, _ in self.items]))


NOTHING_READ = ForwardReads()


def reads_of(guards: Iterable[Any], module: nn.Module, frame: Any) -> ForwardReads:
    """What the forward of a module read, by the guards of its capture, and Dynamo's frame of the call."""
    scope = {"L": dict(_modules_in(frame.locals, module)), "G": _Globals(frame.globals)}
    attributes, items = dict[Any, tuple[Any, str, Any]](), dict[Any, tuple[Any, Any, Any]]()
    for owner, source in _values_read(guards, scope):
        member, index = getattr(source, "member", None), getattr(source, "index", None)
        if member is not None and hasattr(owner, member):
            attributes[id(owner), member] = (owner, member, getattr(owner, member))
        elif isinstance(index, str | int) and _has_item(owner, index):
            items[id(owner), index] = (owner, index, owner[index])
    inner = [part for part in module.modules() if part is not module]
    tables = [module._modules, *itertools.chain.from_iterable(_tables(part) for part in inner)]
    replaced = tuple([(part, part.__dict__.get("forward")) for part in inner])
    return ForwardReads(
        tuple(attributes.values()), tuple(items.values()), tuple([(table, dict(table)) for table in tables]), replaced
    )


def _modules_in(local: Mapping[str, Any], module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Of the variables of a frame those that are the module, or begin with it, as `*args` of a wrapped forward."""
    for name, value in local.items():
        if value is module:
            yield name, module
        elif isinstance(value, tuple) and value and value[0] is module:
            yield name, (module,)


def _has_item(owner: Any, index: Any) -> bool:
    if isinstance(owner, list | tuple):
        return isinstance(index, int) and -len(owner) <= index < len(owner)
    return isinstance(owner, dict) and index in owner


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    return [module._modules, *[getattr(module, name) for name in _HOOKS]]


def _values_read(guards: Iterable[Any], scope: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The sources of numbers and texts in the guards, each with what it is an attribute or an item of."""
    known = dict[str, Any]()
    for guard in guards:
        kind = getattr(guard.create_fn, "func", guard.create_fn).__name__
        base = getattr(guard.originating_source, "base", None)
        if kind not in _VALUES or base is None or getattr(guard.originating_source, "member", "") == "training":
            continue  # Calls are told apart by what trains.
        name = base.name if isinstance(base.name, str) else base.name()
        if name not in known:
            known[name] = _value(name, scope)
        if known[name] is not None:
            yield known[name], guard.originating_source


def _value(name: str, scope: Mapping[str, Any]) -> Any:
    """What a guard's name stands for; None for an argument, or for what Dynamo made while it traced."""
    try:
        return eval(name, dict(scope))  # the name is an expression of Dynamo's
    except (AttributeError, LookupError, NameError, TypeError, SyntaxError):
        return None


class _Globals(dict[str, Any]):
    """The globals of a forward, and Python modules under Dynamo's names."""

    def __missing__(self, name: str) -> Any:
        found = sys.modules.get(name.removeprefix(_IMPORTED).replace("_dot_", "."))
        if found is None:
            raise KeyError(name)
        return found
