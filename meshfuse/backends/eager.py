"""The reference backend: a kernel's own text, which torch runs op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from .. import kernels
from ..runtime.buffers import Plain
from ..scalars import SCOPE
from . import Prepared, Task


def text_scope(functions: Mapping[str, Callable[..., Any]], device: torch.device) -> dict[str, Any]:
    """The globals of kernels' text; `functions` are those of registered ops by name."""
    scope: dict[str, Any] = {"torch": torch, "F": F, "K": kernels, "S": SCOPE, "device": device, "M": Plain(device)}
    scope["OP"] = SimpleNamespace(**{name: kernels.watched(name, function) for name, function in functions.items()})
    return scope


class Eager:
    """Compiles nothing."""

    name = "eager"

    def prepare(self, task: Task) -> Prepared:
        return task.eager
