"""What users are told of a forward that cannot be captured."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..errors import MeshfuseError, SourceLine, user_error
from .kv_caches import INNER, a_new_cache
from .lines import is_users

_HOOKS_OF_GRADIENTS = (
    (
        "Module-level backwards hooks", "a backward hook of a module inside of it", "one of the whole model",
        "Register it on the model itself, or call register_hook on a tensor in the module's forward.",
    ),
    (
        "Tensor.retain_grad()", "retain_grad() of a tensor that the forward makes", "a result",
        "Return the tensor, and take its gradient of the result.",
    ),
)  # fmt: skip
_CLASS = re.compile(r"<class '([^']+)'>")


def not_captured(module: nn.Module, error: Exception, line: SourceLine, given: str) -> MeshfuseError:
    """The error of a forward that torch cannot trace, at the user's line that stops it."""
    where = _users_line(error) or line
    text = " ".join(str(error).split())
    if text.startswith("n=copy_, n.args[0]=_tensor_constant"):
        return user_error(
            f"{called(module)} changes a tensor in place that is no buffer", "one that is an attribute or global",
            "a buffer of the model, or an argument",
            'Make it one: self.register_buffer("name", tensor), with persistent=False to leave it out of state dicts.',
            where,
        )  # fmt: skip
    if "cache_utils" in text and "in output" in text:
        return a_new_cache(called(module), where)
    if "out.backend_input must not be None" in text:
        return user_error(f"{called(module)} returns no tensor that its ops make", "", "at least one", "", where)
    for words, found, needed, do in _HOOKS_OF_GRADIENTS:
        if words in text:
            return user_error(f"{called(module)} cannot be captured", found, needed, do, where)
    if "pytree" in text and (named := _CLASS.search(text)) is not None:
        return _unregistered(called(module), named[1], where)
    what = f"{called(module)} is not one graph"
    return user_error(
        f"{what}: {where.text}" if where.text else what, f"{text[:300]}, arguments {given}",
        "tensor code without data-dependent control flow and calls into other libraries",
        "Use torch.where in the place of `if`, take prints out, or compute it outside of the model.", where,
    )  # fmt: skip


def _unregistered(what: str, name: str, where: SourceLine) -> MeshfuseError:
    short = name.rpartition(".")[2]
    return user_error(
        f"{what} takes or returns a class that torch cannot look into", name,
        "tensors, numbers, and tuples, lists, dicts and registered dataclasses of them",
        f"For a dataclass call torch.export.register_dataclass({short}) once.", where,
    )  # fmt: skip


def _users_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's that dynamo was at."""
    stack = getattr(error, "real_stack", None) or []
    for frame in reversed(list(stack)):
        if is_users(frame.filename):
            return SourceLine(frame.filename, int(frame.lineno or 0), frame.name)
    return None


def called(module: Any) -> str:
    """What an error calls that which is captured."""
    inner = getattr(module, INNER, module)
    function = getattr(inner, "_function", None)
    return (
        f"the forward of {type(inner).__name__}" if function is None else f"{getattr(function, '__name__', function)}"
    )


def only_attributes(found: str) -> MeshfuseError:
    """The error of a result that no op of the graph makes."""
    return user_error(
        "a result that is an attribute of an argument or a parameter", found, "one that an op makes",
        "Write x.transpose(0, 1) in the place of x.T, x.transpose(-2, -1) of x.mT, torch.real(x) of x.real, "
        "torch.imag(x) of x.imag, and x.detach() of x.data.",
    )  # fmt: skip
