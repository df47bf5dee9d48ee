"""`torch.futures.wait_all` that ends with the first error.

torch's own waits for all futures where the error is one that Python has set: its C++ sees an error only in futures of
torch's own agent. While this process is in a group of `rpc`, this stands in its place.
"""

from __future__ import annotations

from typing import Any

import torch

_torchs_own = torch.futures.wait_all


def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all futures. Raises the error of one as soon as there is one, of its own class."""
    # What a callback raises C++ does see, though without its class.
    seen = torch.futures.collect_all([future.then(_value) for future in futures])
    try:
        seen.wait()
    except Exception as error:
        found = error
    else:
        return [future.wait() for future in futures]
    for future in futures:
        if future.done():
            future.wait()
    raise found


def _value(future: torch.futures.Future[Any]) -> None:
    future.value()


def install(is_in_group: bool) -> None:
    """Have `torch.futures.wait_all` be the one above, or torch's own."""
    torch.futures.wait_all = wait_all if is_in_group else _torchs_own
