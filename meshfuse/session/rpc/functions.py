"""Marks of functions that `rpc` treats in another way, as `torch.distributed.rpc.functions` has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

ASYNC = "_meshfuse_async_execution"


def async_execution(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a `torch.futures.Future`: the caller gets the future's value, once it has one."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(marked, ASYNC, True)
    return marked
