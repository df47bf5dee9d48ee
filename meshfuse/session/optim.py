"""Optimizers of parameters on many workers, as `torch.distributed.optim.DistributedOptimizer`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, caller_line, shown, user_error
from . import autograd, tape
from .dref import DRef
from .rpc.calls import calls
from .rpc.rref import RRef

_stepping = threading.Lock()


class DistributedOptimizer:
    """One optimizer of this class on every worker that owns parameters.

    optimizer_class: torch.optim's SGD, Adam, AdamW, Adagrad or another one; further arguments go to it.
    params_rref: references to the parameters, or DRefs of a session to them.

    `step(context_id)` updates all of them by the gradients of that autograd context. Steps of several contexts on one
    worker come one after the other. Raises what any worker's optimizer raises.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Sequence[Any], *args: Any, **kwargs: Any
    ):
        params = list(params_rref)
        if not callable(optimizer_class):
            raise user_error("DistributedOptimizer: optimizer_class", shown(optimizer_class), "a class of torch.optim",
                             "", caller_line(), ArgumentError)  # fmt: skip
        self._session: Any = None
        if params and all(isinstance(ref, DRef) for ref in params):
            self._session = params[0].session
            self._remote = self._session.call(_Local, optimizer_class, params, args, kwargs)
            return
        if not params or not all(isinstance(rref, RRef) for rref in params):
            raise user_error("DistributedOptimizer: params_rref", shown(params), "RRefs of parameters, one or more", "",
                             caller_line(), ArgumentError)  # fmt: skip
        owners: dict[int, list[RRef[Any]]] = {}
        for rref in params:
            owners.setdefault(rref.owner().id, []).append(rref)
        made = [calls().start(rank, _make, (optimizer_class, rrefs, args, kwargs), {}, None)
                for rank, rrefs in owners.items()]  # fmt: skip
        self._optimizers: list[RRef[_Local]] = torch.futures.wait_all(made)

    def step(self, context_id: Any) -> None:
        """Update the parameters by the gradients that the context has accumulated."""
        if self._session is not None:
            self._session.call(tape.step, context_id.number, self._remote)
            return
        calls().contexts.get(context_id)
        steps = [calls().start(optimizer.owner(), _step, (optimizer, context_id), {}, None)
                 for optimizer in self._optimizers]  # fmt: skip
        torch.futures.wait_all(steps)


class _Local:
    """The optimizer of one worker."""

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params: list[torch.Tensor], args: Any, kwargs: Any
    ):
        self.params, self.optimizer = params, optimizer_class(params, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """One step with the gradients of a context."""
        self.step_with(autograd.get_gradients(context_id))

    def step_with(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Put gradients where the optimizer looks for them, for one step."""
        with _stepping:
            for param in self.params:
                param.grad = grads.get(param)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def _make(optimizer_class: Any, params: Sequence[RRef[Any]], args: Any, kwargs: Any) -> RRef[_Local]:
    return RRef(_Local(optimizer_class, [rref.local_value() for rref in params], args, kwargs))


def _step(optimizer: RRef[_Local], context_id: int) -> None:
    optimizer.local_value().step(context_id)


__all__ = ["DistributedOptimizer"]
