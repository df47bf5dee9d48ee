"""Where a node of a captured graph comes from: the user's source line and the path of the module."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import torch

from ..errors import SourceLine
from .kv_caches import without_inner

_HERE = os.path.dirname(__file__)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)')
# What a path of dynamo's begins with, such as L['self'] or L['args'][0], and its way to say a child by number.
_ROOT = re.compile(r"^L\[[^\]]*\](?:\[\d+\])?\.?")
_CHILD = re.compile(r"\._modules\['([^']*)'\]|\[(\d+)\]|\['([^']*)'\]")


def is_users(path: str) -> bool:
    """Whether a file is neither torch's nor one of the frontends'."""
    return "/torch/" not in path and not path.startswith(("<", _HERE))


def line_of(node: torch.fx.Node) -> SourceLine:
    """The innermost line outside of torch that made the node, named by the module's path and the op."""
    frames = [f for f in _FRAME.finditer(node.meta.get("stack_trace") or "") if is_users(f["file"])]
    path = module_path(node)
    name = f"{path}.{node.name}" if path else node.name
    if not frames:
        return SourceLine("<captured>", 0, "", "", name)
    last = frames[-1]
    return SourceLine(last["file"], int(last["line"]), last["function"].strip(), None, name)


def module_path(node: torch.fx.Node) -> str:
    """The full name of the innermost module that made the node; "" where none is known."""
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _readable(list(stack.values())[-1][0]) if stack else ""


def module_paths(node: torch.fx.Node) -> set[str]:
    """The full names of all modules whose forward the node is part of."""
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return {_readable(path) for path, _ in stack.values()}


@functools.cache
def _readable(path: str) -> str:
    """A path of dynamo's as a full name."""
    found = _CHILD.sub(lambda m: "." + next(g for g in m.groups() if g is not None), _ROOT.sub("", path))
    return without_inner(found.removeprefix(".") + ".").removesuffix(".")
