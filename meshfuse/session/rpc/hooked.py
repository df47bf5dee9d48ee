"""Gradients of leaves whose AccumulateGrad nodes have hooks: those of DDP, which average, and a user's own.

`torch.autograd.grad` runs none of these, and `backward` would write to `.grad`, which contexts share. torch's engine of
distributed autograd runs them and keeps gradients in a context of its own, where DDP looks for them. It does this
process' part alone: that context hears of no peer.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as torchs
from torch.autograd.graph import get_gradient_edge

_PREFIX = re.compile(r"^Error on Node \d+: ")


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def gradients(
    pairs: Pairs, received: Container[int], retain: bool, engine: Callable[[], Engine]
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Run a part of a backward pass, from tensors with their gradients; the leaves that they follow from, with theirs.

    Without its own leaves, those whose ids are not `received`, if the engine has accumulated these. Raises what a node
    raises.
    """
    nodes = list(accumulators_of([tensor for tensor, _ in pairs]))
    if not nodes:
        return []
    leaves = [leaf for leaf, _ in nodes]
    if _needs_engine([pair for pair in nodes if id(pair[0]) not in received]):
        leaves = [leaf for leaf in leaves if id(leaf) in received]
        return list(zip(leaves, engine().run(pairs, leaves, retain), strict=True))
    tensors, grads = zip(*pairs, strict=True)
    values = torch.autograd.grad(tensors, leaves, grads, retain_graph=retain, allow_unused=True)
    return list(zip(leaves, values, strict=True))


def _needs_engine(own: Sequence[tuple[torch.Tensor, Any]]) -> bool:
    """Whether some of these leaves may have hooks; with their nodes, if known.

    Those of DDP cannot be seen from Python, but need a process group.
    """
    return bool(own) and (dist.is_initialized() or any(_has_hooks(leaf, node) for leaf, node in own))


def _has_hooks(leaf: torch.Tensor, node: Any) -> bool:
    """Whether the node that accumulates a leaf's gradient has hooks of Python."""
    if node is None and leaf.layout != torch.strided:
        return False  # It has no views, by which its node could be found.
    handle = (node or get_gradient_edge(leaf).node).register_hook(_nothing)
    found = len(handle.hooks_dict_ref() or ())
    handle.remove()
    return found > 1


def _nothing(*_: Any) -> None:
    pass


class _Seed(torch.autograd.Function):
    """A scalar, as the engine wants roots to be, from which given gradients go to tensors."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.grads)


class Engine:
    """torch's engine with a context: the gradients of this process' leaves that it accumulates."""

    def __init__(self, rank: int):
        with contextlib.suppress(RuntimeError):  # It has been made, for another group of this process.
            torchs._init(rank)
        # A new context is current in the thread that makes it, as this one must not be: so that of another thread.
        with ThreadPoolExecutor(1) as thread:
            self._number: int = thread.submit(torchs._new_context).result()._context_id()
        weakref.finalize(self, torchs._release_context, self._number).atexit = False

    def run(self, pairs: Pairs, received: Sequence[torch.Tensor], retain: bool) -> list[torch.Tensor | None]:
        """Accumulate the gradients of leaves; those of `received` leaves of this pass. Raises what a node raises."""
        found: list[torch.Tensor | None] = [None] * len(received)
        hooks = [leaf.register_hook(_keep(found, place)) for place, leaf in enumerate(received)]
        tensors, grads = zip(*pairs, strict=True)
        try:
            with torch.enable_grad():
                root = _Seed.apply(grads, *tensors)
            torchs.backward(self._number, [root], retain)
        except RuntimeError as error:
            raise RuntimeError(_PREFIX.sub("", str(error))) from None
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """What has been accumulated, by leaf, received ones among them."""
        return torchs.get_gradients(self._number)


def _keep(found: list[torch.Tensor | None], place: int) -> Any:
    def hook(grad: torch.Tensor) -> None:
        found[place] = grad.detach()

    return hook


def leaves_of(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that tensors follow from, each once."""
    return (leaf for leaf, _ in accumulators_of(tensors))


def accumulators_of(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
    """The leaves that tensors follow from, each once, and the nodes that accumulate their gradients.

    The node is None for leaves among the tensors themselves.
    """
    seen: set[Any] = set()
    waiting: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor, None
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf, node
        waiting += [before for before, _ in node.next_functions if before is not None]
