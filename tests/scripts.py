"""Programs of the repository as modules, by their paths: several folders have a `run.py`, and none is a package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def script(path: str) -> ModuleType:
    """The program at this path from the root, as `tools/ops_page.py`; a new module at each call."""
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py").replace("/", "_"), ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
