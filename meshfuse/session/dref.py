"""`DRef`: a register of that number on every worker."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ..errors import ArgumentError, caller_line, shown, user_error
from . import builtin
from .compact import register_compact
from .executor import REGISTER, register


class Owner(Protocol):
    """The session that a DRef belongs to."""

    generation: int
    num_workers: int

    def free(self, number: int, generation: int) -> None: ...
    def check_open(self) -> None: ...
    def fetch(self, ref: DRef, worker: int) -> Any: ...
    def put(self, ref: DRef, worker: int, value: Any) -> None: ...
    def call_packed(self, function: Any, *args: Any, **kwargs: Any) -> DRef: ...
    def whole(self, ref: DRef) -> torch.Tensor: ...
    def is_pickling(self) -> bool: ...


class DRef:
    """What a call returned on every worker. The workers drop it some time after its last DRef is gone.

    A DRef to a function can be called, as `Session.call_packed`.
    """

    __slots__ = ("__weakref__", "_generation", "_session", "_what", "number", "placed")

    def __init__(self, session: Owner, number: int, what: str = "", placed: Any = None):
        self._session, self.number, self._what, self.placed = session, number, what, placed
        self._generation = session.generation

    @property
    def session(self) -> Owner:
        """The session that it is in."""
        return self._session

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.free(self.number, self._generation)

    def __call__(self, *args: Any, **kwargs: Any) -> DRef:
        return self._session.call_packed(self, *args, **kwargs)

    def __reduce__(self) -> Any:
        return register, (self.sent(),)

    def sent(self) -> int:
        """Its number, for a call of its session. Raises ArgumentError where another one's, or nobody's, is written."""
        self.check()
        if not self._session.is_pickling():
            raise user_error(
                "a DRef cannot be pickled", repr(self), "an argument of its own session's calls",
                "Get its value by debug_get_from_remote.", caller_line(), ArgumentError,
            )  # fmt: skip
        return self.number

    def check(self) -> None:
        """Raises ArgumentError for a DRef from before the session's restart."""
        if self._generation != self._session.generation:
            raise user_error(
                "a DRef from before the session's restart", repr(self), "one that was made after it",
                "Call again what makes it.", caller_line(), ArgumentError,
            )  # fmt: skip

    def debug_get_from_remote(self, worker_id: int) -> Any:
        """A copy of what the worker has in this register. Waits for all calls before; raises what they raised."""
        return self._session.fetch(self, self._worker(worker_id))

    def debug_copy_from(self, worker_id: int, value: Any) -> None:
        """Put a value into this register of one worker; a tensor is copied into the tensor that is there.

        An array of numpy is put there as a tensor.
        """
        value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        self._session.put(self, self._worker(worker_id), value)

    def __getitem__(self, worker_id: int) -> Any:
        return self.debug_get_from_remote(worker_id)

    def __len__(self) -> int:
        return self._session.num_workers

    def __bool__(self) -> bool:
        return True

    def full_tensor(self) -> torch.Tensor:
        """The global tensor of one that `distribute_tensor`, `load_shards` or a definition has distributed.

        ArgumentError for other values.
        """
        return self._session.whole(self)

    def backward(self, gradient: Any = None) -> None:
        """Run torch's backward pass on every worker, from the tensor that it has in this register.

        gradient: a DRef or a tensor, for what is no number. Gradients accumulate in `.grad` of the workers' leaves.
        """
        self._session.call_packed(builtin.backward, self, gradient)

    def _worker(self, worker_id: Any) -> int:
        size = self._session.num_workers
        if not isinstance(worker_id, int) or not 0 <= worker_id < size:
            # IndexError ends `for value in dref`.
            error = user_error("no such worker", shown(worker_id), f"a number from 0 to {size - 1}", "", caller_line(),
                               NoWorker)  # fmt: skip
            raise error
        return worker_id

    def __repr__(self) -> str:
        sharding, shape = getattr(self.placed, "sharding", None), getattr(self.placed, "shape", None)
        placed = f", {list(shape)} as {sharding}" if sharding is not None and shape is not None else ""
        what = f" of {self._what}" if self._what else ""
        return f"<DRef {self.number}{what} on {self._session.num_workers} workers{placed}>"


class NoWorker(ArgumentError, IndexError):
    """A worker's number that the session does not have."""


register_compact(REGISTER, DRef, DRef.sent)
