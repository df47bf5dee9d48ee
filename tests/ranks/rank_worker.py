"""One rank of a RankPool: runs the functions that it is sent, and sends back what they return or raise."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_LOADED: dict[str, Any] = {}


def load(target: str) -> Callable[..., Any]:
    """`path.py:function`, `module:function`, or source text that defines `main`."""
    if "\n" in target:
        space: dict[str, Any] = {"__name__": "rank_source"}
        exec(compile(target, "<rank source>", "exec"), space)
        return space["main"]
    name, _, function = target.rpartition(":")
    if name not in _LOADED:
        _LOADED[name] = _load_file(name) if name.endswith(".py") else importlib.import_module(name)
    return getattr(_LOADED[name], function)


def _load_file(path: str) -> Any:
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer(message: bytes) -> bytes:
    """Run one command; the reply is a pickled (worked, result or traceback).

    What it sets in the environment does not last: the next command may be another test's.
    """
    with mock.patch.dict(os.environ):
        try:
            target, args = pickle.loads(message)
            return pickle.dumps((True, load(target)(*args)))
        except Exception:
            return pickle.dumps((False, traceback.format_exc()))
        finally:
            _leave_torch()


def _leave_torch() -> None:
    """End torch's process groups: each has a thread that wakes a hundred times a second."""
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def main() -> None:
    torch.set_num_threads(1)
    pipe = Connection(int(os.environ["RANK_PIPE"]))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(answer(message))


if __name__ == "__main__":
    main()
