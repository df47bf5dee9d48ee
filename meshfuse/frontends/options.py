"""What a user of `parallelize` asks for, and what a call is planned with because of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import SourceLine
from .accumulating import SYNCED, Sync
from .calls import Arguments, Call
from .context import Context
from .plans import ModulePlan, Spec
from .precision import Precision
from .steps import Setting


@dataclass(frozen=True, slots=True)
class Options:
    """What a user has asked for, beside the plan."""

    inputs: Mapping[str, Spec]
    dynamic: Mapping[str, Spec]
    precision: Precision | None
    backend: str | None
    max_memory: float | None
    replicate: bool
    recomputed: tuple[str, ...] = ()
    context: Context | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The type to compute in; None for the module's own."""
        return self.precision.param if self.precision is not None else None

    def setting(
        self, module: nn.Module, plan: ModulePlan, arguments: Arguments, line: SourceLine, free: bool,
        sync: Sync = SYNCED,
    ) -> Setting:  # fmt: skip
        """What a call of the module is planned with; `line`, `free` and `sync` as there."""
        leaves = enumerate(arguments.call.leaves)
        return Setting(
            plan, dict(enumerate(arguments.names)), arguments.shapes, arguments.specs, line,
            self._kept_dtypes(module, arguments.call), {i: leaf for i, leaf in leaves if type(leaf) is int},
            self.precision.reduce if self.precision is not None else None,
            arguments.batch(), free, self.replicate, bool(self.dynamic), self.max_memory,
            sync=sync, context=self.context,
        )  # fmt: skip

    def _kept_dtypes(self, module: nn.Module, call: Call) -> dict[Any, torch.dtype]:
        """The types in which parameters, by name, and arguments, by place, are kept where the graph has another."""
        if self.dtype is None:
            return {}
        kept: dict[Any, torch.dtype] = {n: p.dtype for n, p in module.named_parameters() if p.is_floating_point()}
        return kept | {i: call.leaves[i].dtype for i in call.places if call.leaves[i].is_floating_point()}
