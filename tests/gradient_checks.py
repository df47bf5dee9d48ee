"""First and second gradients of a definition beside those of torch's autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import meshfuse as mf
from meshfuse.dtypes import Category, DataType


class Pair(NamedTuple):
    """A gradient as the definition has it, and torch's."""

    found: torch.Tensor
    wanted: torch.Tensor


class Gradients(NamedTuple):
    """Gradients of results by operands, and the second ones: those of the first by operands and results' gradients."""

    first: list[Pair]
    second: list[Pair]


Build = Callable[..., Sequence[Any]]
Annotate = Callable[[mf.FusionDefinition, Sequence[Any]], None]


def _numbers(like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in like]


def is_number(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def defined(fd: mf.FusionDefinition, t: torch.Tensor) -> Any:
    return fd.define_tensor(list(t.shape), dtype=DataType(str(t.dtype).removeprefix("torch.")))


def _by_torch(reference: Build, operands: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """(gradients of results, weights of the first gradients, first gradients, second gradients)."""
    leaves = [t.clone().requires_grad_() if is_number(t) else t for t in operands]
    results = list(reference(*leaves))
    wrt, seeds = [t for t in leaves if t.requires_grad], [t.requires_grad_() for t in _numbers(results, 3)]
    first = gradients_of(results, wrt, seeds)
    weights = _numbers(first, 4)
    return [t.detach() for t in seeds], weights, first, gradients_of(first, [*wrt, *seeds], weights)


def gradients_of(
    outputs: Sequence[torch.Tensor], wrt: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients, 0 where nothing depends on a tensor."""
    used = [(t, seed) for t, seed in zip(outputs, seeds, strict=True) if t.requires_grad]
    if not used:
        return [torch.zeros_like(t) for t in wrt]
    made = torch.autograd.grad(
        [t for t, _ in used], wrt, [seed for _, seed in used], create_graph=True, allow_unused=True
    )
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, made, strict=True)]


def both(
    build: Build,
    reference: Build,
    operands: Sequence[torch.Tensor],
    annotate: Annotate = lambda *_: None,
    kept: dict[str, mf.FusionDefinition] | None = None,
    name: str = "",
) -> Gradients:
    """The gradients of a function that is built on a definition from its operands, and of the same in torch.

    kept: where the function's definition is kept under its name, for operands of the same types.
    """
    seeds, weights, first, second = _by_torch(reference, operands)
    fd = kept.get(name) if kept is not None else None
    if fd is None:
        fd = _definition(build, operands, seeds, weights, annotate)
    if kept is not None:
        kept[name] = fd
    found = fd.simulate([*operands, *seeds, *weights])
    pairs = [Pair(a, b.detach()) for a, b in zip(found, [*first, *second], strict=True)]
    return Gradients(pairs[: len(first)], pairs[len(first) :])


def _definition(
    build: Build,
    operands: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    annotate: Annotate,
) -> mf.FusionDefinition:
    """The first and the second gradients, which are of the sums of results and first gradients times these."""
    fd = mf.FusionDefinition()
    tensors = [defined(fd, t) for t in operands]
    results = build(fd, *tensors)
    given, wanted = ([defined(fd, t) for t in values] for values in (seeds, weights))
    wrt = [t for t in tensors if t.dtype.category >= Category.FLOAT]
    once = fd.grad(results, wrt, given)
    for grad in (*once, *fd.grad(once, [*wrt, *given], wanted)):
        fd.add_output(grad)
    annotate(fd, tensors)
    return fd
