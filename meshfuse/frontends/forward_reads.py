"""What a captured forward read beside its arguments: a call is captured anew where something of that has changed.

Dynamo names it in its guards: numbers, texts, functions and tensors that are attributes of modules, of their
configurations or of Python modules, global or in closures, and which modules ran. Their children, hooks and replaced
forwards are in the graph as well. Of tensors the numbers are read at each call.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import SourceLine, user_error

_VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
_FUNCTIONS = ("CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "ID_MATCH")
_CONTENTS = ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IMPORTED = "__import_"  # Dynamo's names of Python modules.


@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A tensor that a forward read of an attribute, a list or a global variable, where it is at each call.

    holder, key: the dict or list that has it. name: what an error calls it. found: what it was when it was captured.
    """

    holder: Any
    key: Any
    name: str
    found: torch.Tensor

    def holds(self) -> bool:
        """Whether a tensor is there that the same graph takes."""
        now, found = self.holder[self.key], self.found
        return now is found or (
            isinstance(now, torch.Tensor) and now.shape == found.shape and now.dtype == found.dtype
            and now.requires_grad == found.requires_grad
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForwardReads:
    """What a forward read, with what it found.

    attributes: (owner, name, value). items: (dict, list or tuple, key, value). tables: modules' dicts, each with its
    content. replaced: modules, each with the forward that stands in for its class's. contents: lists with their lengths
    and dicts with their keys. entries: (dict, key, whether it is there).
    """

    attributes: tuple[tuple[Any, str, Any], ...] = ()
    items: tuple[tuple[Any, Any, Any], ...] = ()
    tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    replaced: tuple[tuple[nn.Module, Any], ...] = ()
    contents: tuple[tuple[Any, Any], ...] = ()
    entries: tuple[tuple[Any, Any, bool], ...] = ()
    tensors: tuple[ReadTensor, ...] = ()

    def hold(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return (
                all([now == before for now, before in self.tables])
                and all(
                    [
                        getattr(owner, name) is value or same(getattr(owner, name), value)
                        for owner, name, value in self.attributes
                    ]
                )
                and all([holder[key] is value or same(holder[key], value) for holder, key, value in self.items])
                and all([module.__dict__.get("forward") is forward for module, forward in self.replaced])
                and all([_content(holder) == content for holder, content in self.contents])
                and all([(key in holder) == was for holder, key, was in self.entries])
                and all([read.holds() for read in self.tensors])
            )
        except (AttributeError, LookupError, TypeError, ValueError):  # Something is not there any more.
            return False

    def again(self) -> ForwardReads:
        """The same, with what is there now: a capture sets some of it for itself."""
        attributes = tuple([(owner, name, getattr(owner, name)) for owner, name, _ in self.attributes])
        return replace(self, attributes=attributes, items=tuple([(on, key, on[key]) for on, key, _ in self.items]))

    def place_of(self, tensor: torch.Tensor) -> ReadTensor | None:
        """Where a tensor was read; None for one that the forward has made."""
        return next((read for read in self.tensors if read.found is tensor), None)


def check_trained(reads: ForwardReads, called: str, line: SourceLine) -> None:
    """Raise DefinitionError for a tensor that a gradient may be asked for and that is no parameter: it gets none."""
    for read in reads.tensors:
        if read.found.requires_grad:
            raise user_error(
                f"{called} reads a tensor that needs a gradient and is neither a parameter nor an argument",
                f"{read.name} of shape {list(read.found.shape)}", "one that needs none",
                "Make it an nn.Parameter of the model, pass it as an argument, or detach() it.", line,
            )  # fmt: skip


NOTHING_READ = ForwardReads()


def same(now: Any, before: Any) -> bool:
    """Whether a value is what it was, of the same type."""
    return now is before or (type(now) is type(before) and bool(now == before))


def _content(holder: Any) -> Any:
    return tuple(holder) if isinstance(holder, Mapping) else len(holder)


def reads_of(guards: Iterable[Any], module: nn.Module, scope: Scope) -> ForwardReads:
    """What the forward of a module read, by the guards of its capture, whose names stand for what `scope` says."""
    reader = _Reader(module, scope)
    for guard in guards:
        reader.note(getattr(guard.create_fn, "func", guard.create_fn).__name__, guard)
    inner = [part for part in module.modules() if part is not module]
    tables = [module._modules, *itertools.chain.from_iterable(_tables(part) for part in inner)]
    replaced = tuple([(part, part.__dict__.get("forward")) for part in inner])
    return ForwardReads(
        tuple(reader.attributes.values()), tuple(reader.items.values()),
        tuple([(table, dict(table)) for table in tables]), replaced, tuple(reader.contents.values()),
        tuple(reader.entries.values()), tuple(reader.tensors.values()),
    )  # fmt: skip


class Scope:
    """What Dynamo's sources of a call stand for: of its variables the module alone, globals, and Python modules."""

    def __init__(self, module: nn.Module, frame: Any) -> None:
        self.globals: dict[str, Any] = frame.globals
        code, flags = frame.code, (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
        names = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]
        self._own = set(names[: sum([bool(code.co_flags & flag) for flag in flags])])
        self._names = {"L": dict(_modules_in(frame.locals, module)), "G": _Globals(frame.globals)}
        self._known: dict[str, Any] = {}

    def value(self, source: Any) -> Any:
        """What a source stands for; None for an argument, or for what Dynamo made while it traced."""
        name = source.name if isinstance(source.name, str) else source.name()
        if name not in self._known:
            self._known[name] = _value(name, self._names)
        return self._known[name]

    def is_of_call(self, source: Any) -> bool:
        """Whether a source is the tuple or dict of a call's own arguments, such as that of **kwargs."""
        return getattr(source, "local_name", None) in self._own

    def owner(self, source: Any) -> tuple[Any, Any]:
        """What a source is an attribute or an item of, and as which; (None, None) for what is neither."""
        name = getattr(source, "global_name", None)
        if name is not None:
            return (self.globals, name) if name in self.globals else (None, None)
        key = getattr(source, "member", None)
        key = getattr(source, "index", None) if key is None else key
        base = getattr(source, "base", None)
        return (None, None) if base is None or not isinstance(key, str | int) else (self.value(base), key)


class _Reader:
    """Collects what guards name. Tables of modules are known without them."""

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        self._scope = scope
        tables = [(part._parameters, part._buffers, part._modules) for part in module.modules()]
        self._skipped = {id(table) for table in itertools.chain.from_iterable(tables)}
        self.attributes = dict[Any, tuple[Any, str, Any]]()
        self.items = dict[Any, tuple[Any, Any, Any]]()
        self.contents = dict[Any, tuple[Any, Any]]()
        self.entries = dict[Any, tuple[Any, Any, bool]]()
        self.tensors = dict[Any, ReadTensor]()

    def note(self, kind: str, guard: Any) -> None:
        source = guard.originating_source
        if kind in _CONTENTS:
            self._note_content(self._scope.value(source))
        elif kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS"):
            self._note_entry(self._scope.value(source), getattr(guard.create_fn, "keywords", {}).get("key"))
        elif kind == "TENSOR_MATCH":
            self._note_tensor(*self._scope.owner(source))
        elif kind in (*_VALUES, *_FUNCTIONS):
            self._note_value(*self._scope.owner(source), kind in _FUNCTIONS)

    def _note_value(self, owner: Any, key: Any, is_function: bool) -> None:
        """Calls are told apart by what trains; what libraries have for themselves is not changed."""
        if owner is None or key == "training" or (is_function and self._is_of_library(owner)):
            return
        if _has_item(owner, key):
            self.items[id(owner), key] = (owner, key, owner[key])
        elif isinstance(key, str) and hasattr(owner, key):
            self.attributes[id(owner), key] = (owner, key, getattr(owner, key))

    def _note_content(self, holder: Any) -> None:
        if isinstance(holder, list | tuple | dict) and id(holder) not in self._skipped:
            self.contents[id(holder)] = (holder, _content(holder))

    def _note_entry(self, holder: Any, key: Any) -> None:
        if isinstance(holder, dict) and isinstance(key, str | int) and id(holder) not in self._skipped:
            self.entries[id(holder), key] = (holder, key, key in holder)

    def _note_tensor(self, owner: Any, key: Any) -> None:
        if owner is None or id(owner) in self._skipped:
            return
        holder = owner if _has_item(owner, key) else _Attributes(owner)
        try:
            found = holder[key]
        except (AttributeError, LookupError, TypeError):
            return
        if isinstance(found, torch.Tensor):
            self.tensors[id(owner), key] = ReadTensor(holder, key, str(key), found)

    def _is_of_library(self, owner: Any) -> bool:
        if isinstance(owner, dict):
            return owner is not self._scope.globals
        return isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] in ("torch", "builtins")


class _Attributes:
    """The attributes of an object as items."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)


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
    return [module._modules, *[getattr(module, name) for name in HOOKS]]


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
