"""aten ops that have no rule, computed whole on every rank."""

from __future__ import annotations

from typing import Any

import torch

from .aten.torch_calls import torch_rule, whole


def replicated(node: torch.fx.Node) -> Any:
    """A rule by which torch computes a node's op whole on every rank; `explain` shows it as `whole_` and its name."""
    return torch_rule(node.target, whole)
