"""Kernels of a user's text or function, and the shapes of what they make."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..backends.eager import text_scope
from ..errors import SourceLine, error_text, shown, user_error
from ..lowering.instructions import Kernel

# Names of results, or by name their (shape, dtype).
Results = str | Sequence[str] | Mapping[str, tuple[Sequence[int], torch.dtype]]
Made = list[tuple[tuple[int, ...], torch.dtype]]
_SCOPE = frozenset({"torch", "F", "K", "S", "OP", "M", "device", *dir(builtins)})


class Typed(Protocol):
    """What is known of a kernel's operand."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def function_kernel(function: Any, name: str, inputs: Sequence[Typed], line: SourceLine) -> tuple[Kernel, Made]:
    """A kernel that calls a function, and what that makes."""
    if not callable(function):
        raise user_error("call", shown(function), "a function of tensors", "Pass one, then its buffers.", line)
    word = name or getattr(function, "__name__", "function")
    word = word if word.isidentifier() else "function"
    params = tuple([f"a{place}" for place in range(len(inputs))])
    made = _made_by(function, word, inputs, line)
    results = tuple([f"{word}{n or ''}" for n in range(len(made))])
    lines = (f"{', '.join(results)} = OP.{word}({', '.join(params)})",)
    return Kernel(f"run_{word}", params, lines, results, ((word, function),), origins=((word, line),)), made


def _made_by(function: Callable[..., Any], name: str, inputs: Sequence[Typed], line: SourceLine) -> Made:
    """Shapes and dtypes of what a function gives, found by calling it with `meta` tensors."""
    try:
        made = function(*map(_meta, inputs))
    except Exception as error:
        raise user_error(
            f"kernel {name} cannot run on tensors of these shapes", error_text(error),
            "torch code that runs on `meta` tensors as well",
            "Mend it, or write it as text, with `results` as {name: (shape, dtype)}.", line,
        ) from error  # fmt: skip
    found = made if isinstance(made, (list, tuple)) else (made,)
    if not found or not all(isinstance(x, torch.Tensor) for x in found):
        raise user_error(f"kernel {name}: results", shown(made), "a tensor, or a tuple of them",
                         "Return new tensors.", line)  # fmt: skip
    return [(tuple(x.shape), x.dtype) for x in found]


def text_kernel(
    name: Any, text: Any, results: Results, inputs: Mapping[str, Typed], line: SourceLine
) -> tuple[Kernel, Made]:
    """A kernel of Python text, and what it makes."""
    if not isinstance(name, str) or not name.isidentifier() or name == "main":
        raise user_error("kernel: name", shown(name), "a name of Python's", "Name the kernel, as a function.", line)
    names = (results,) if isinstance(results, str) else tuple(results)
    lines = _lines(name, text, names, inputs, line)
    kernel = Kernel(name, tuple(inputs), lines, names, origins=((name, line),) * len(lines))
    if isinstance(results, Mapping):
        return kernel, [(tuple(shape), dtype) for shape, dtype in results.values()]
    scope = text_scope({}, torch.device("meta"))
    exec("\n".join(kernel.source()), scope)
    return kernel, _made_by(scope[name], name, list(inputs.values()), line)


def _lines(
    name: str, text: Any, results: Sequence[str], inputs: Mapping[str, Typed], line: SourceLine
) -> tuple[str, ...]:
    """The text's statements, one per line. DefinitionError where it is none, or names what is not there."""
    try:
        parsed = ast.parse(text)
    except (SyntaxError, TypeError, ValueError) as error:
        raise user_error(f"kernel {name}: text", error_text(error), "lines of Python", "Write statements.",
                         line) from None  # fmt: skip
    found = [node for node in ast.walk(parsed) if isinstance(node, ast.Name)]
    stored = {node.id for node in found if isinstance(node.ctx, ast.Store)} | set(inputs)
    read = {node.id for node in found if isinstance(node.ctx, ast.Load)}
    missing = sorted((read - stored - _SCOPE) | (set(results) - stored))
    if missing:
        raise user_error(f"kernel {name}: names that are not there", ", ".join(missing),
                         "inputs, what earlier lines assign, torch and F", "Pass it as an input, or assign it.",
                         line)  # fmt: skip
    return tuple([part for node in parsed.body for part in ast.unparse(node).splitlines()])


def _meta(x: Typed) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
