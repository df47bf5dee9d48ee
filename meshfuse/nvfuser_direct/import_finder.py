"""Support for `sys.modules["nvfuser_direct"] = meshfuse.nvfuser_direct`, where a script's imports cannot change.

Python would load a submodule of the alias (`from nvfuser_direct.pytorch_utils import ...`) a second time, under the
alias' name. The finder here gives it the module that is loaded already.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGE = __name__.rpartition(".")[0]


class _Loader:
    """A loader that returns a loaded module as it is."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: Any) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _SubmoduleFinder:
    """Finds the package's submodules under every name that the package has in sys.modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        parent, _, child = name.rpartition(".")
        if parent == PACKAGE or sys.modules.get(parent) is not sys.modules[PACKAGE]:
            return None
        try:
            module = importlib.import_module(f"{PACKAGE}.{child}")
        except ModuleNotFoundError:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(module))  # type: ignore[arg-type]


def install() -> None:
    """Put the finder before all others: the one for files would find a submodule's file."""
    if _SubmoduleFinder not in sys.meta_path:
        sys.meta_path.insert(0, _SubmoduleFinder)
