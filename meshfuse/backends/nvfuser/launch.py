"""One native definition as a function of local tensors: how it is run on a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from .. import Unsupported
from .partition import refusal
from .segment import NativeKernel

# By how much a kernel's numbers may differ from torch's, as a part of the largest; and in what share of the elements,
# as a comparison may turn out otherwise where both sides are about equal.
_LIMITS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-3, torch.complex64: 1e-3}
_TOLERATED = 0.01

# Called with the tensors and then the numbers that a definition takes; gives its outputs in order.
Run = Callable[[list[Any]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class NativePart:
    """A built definition, and its stand-in: `text` is the same ops in torch, called like a definition.

    source: the text's code, with values numbered in their order, and the types of scalars: definitions of the same
        code, examples and strides are the same.
    examples: its arguments, tensors on the meta device.
    strides: those that its outputs must have.
    owned: the places of outputs that must be in memory of their own, as the text's are.
    """

    kernel: NativeKernel
    text: Run
    source: str
    examples: tuple[Any, ...]
    strides: tuple[tuple[int, ...], ...]
    owned: frozenset[int]

    def key(self, device: torch.device) -> tuple[Any, ...]:
        """What tells it from other parts on a device."""
        given = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in self.examples]
        return (self.source, str(device), tuple(given), self.strides, self.owned)


class Launcher(Protocol):
    """Runs native definitions."""

    def check(self, device: torch.device) -> None:
        """Raises Unsupported for a device that nothing can run on."""
        ...

    def prepare(self, part: NativePart, device: torch.device) -> Run:
        """The definition, ready to be called any number of times. Raises Unsupported with nvFuser's reason."""
        ...


class CudaLauncher:
    """nvFuser's own kernels: compiled in `prepare`, by a call with numbers of our own; later calls compile nothing.

    What this call gives is compared with what the text does: some of nvFuser's kernels are wrong. Equal parts (of the
    layers of a model, of simulated ranks) are compiled once, as long as one of them is in use.
    """

    _known: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], Any]] = weakref.WeakValueDictionary()

    def check(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unsupported(f"nvFuser computes on CUDA devices, and these tensors are on {device}")

    def prepare(self, part: NativePart, device: torch.device) -> Run:
        key = part.key(device)
        run = self._known.get(key)
        if run is None:
            run = self._known[key] = self._compiled(part, device)
        return run

    def _compiled(self, part: NativePart, device: torch.device) -> Run:
        try:
            given = _example(part.examples, device)
            made, execute = self._first_call(part, given, device)
        except RuntimeError as error:
            raise Unsupported(f"nvFuser cannot run it: {refusal(error)}") from error
        check_outputs(part, made)
        check_numbers(part, given, made)
        copied = misplaced(part, given, made)

        def repaired(arguments: list[Any]) -> Sequence[torch.Tensor]:
            return laid_out(execute(arguments), part.strides, copied)

        return repaired if copied else execute

    def _first_call(
        self, part: NativePart, given: list[Any], device: torch.device
    ) -> tuple[Sequence[torch.Tensor], Run]:
        """What the definition gives for these arguments, and what to call from then on."""
        index = torch.cuda.current_device() if device.index is None else device.index
        definition = part.kernel.definition
        return definition.execute(given, device=index), _executor(definition, index)


def _executor(definition: Any, index: int) -> Run:
    """The definition's own `execute` once it is compiled, without what it checks at every call."""
    native = getattr(definition, "fec", None)
    if native is None:
        return lambda arguments: definition.execute(arguments, device=index)
    none: list[str] = []
    return lambda arguments: native.execute(arguments, device=index, _enable_options=none, _disable_options=none)


def _example(examples: Sequence[Any], device: torch.device) -> list[Any]:
    """Arguments like the examples, for a first call that is compared with torch's."""
    generator = torch.Generator(device).manual_seed(0)
    return [drawn(v, device, generator) if isinstance(v, torch.Tensor) else v for v in examples]


def drawn(like: torch.Tensor, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """A tensor of the same type and strides: real and complex numbers with parts from 0.1 to 1.1, masks of both values.

    Integers are zeros: they may be indices, and other ones may not be there.
    """
    last = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    memory = torch.zeros(last + 1 if like.numel() else 0, dtype=like.dtype, device=device)
    if like.is_floating_point() or like.is_complex():
        parts = torch.view_as_real(memory) if like.is_complex() else memory
        wide = parts if parts.dtype.itemsize > 1 else parts.float()
        parts.copy_(wide.uniform_(0.1, 1.1, generator=generator))
    elif like.dtype is torch.bool:
        memory.random_(0, 2, generator=generator)
    return memory.as_strided(like.shape, like.stride())


def check_outputs(part: NativePart, made: Sequence[torch.Tensor]) -> None:
    """Raises Unsupported where outputs do not have the shapes and dtypes that the plan gives them."""
    found = [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in made]
    wanted = [(tuple(t.shape), t.dtype.value) for t in part.kernel.outputs]
    if found != wanted:
        raise Unsupported(f"nvFuser gives {found}, needed {wanted}")


def check_numbers(part: NativePart, given: Sequence[Any], made: Sequence[torch.Tensor]) -> None:
    """Raises Unsupported where outputs are far from what the text computes, unless memory does not suffice for that."""
    try:
        expected = part.text([*given])
        shares = [share_wrong(a, b) for a, b in zip(made, expected, strict=True)]
    except torch.OutOfMemoryError:
        return
    if wrong := [f"{share:.0%} of output {place}" for place, share in enumerate(shares) if share > _TOLERATED]:
        raise Unsupported(f"nvFuser computes something else: {', '.join(wrong)}")


def share_wrong(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of elements in which two tensors differ by more than rounding does, beside the largest of b.

    The random state that attention gives (UInt64) is nvFuser's own, and of no use.
    """
    if not b.numel() or b.dtype is torch.uint64:
        return 0.0
    limit = _LIMITS.get(b.dtype, 1e-6)
    a, b = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (a, b))
    finite = b.nan_to_num(0.0, 0.0, 0.0)
    near = (a - b).abs() <= limit * finite.abs().max().clamp_min(0.1)
    return 1.0 - (near | (a == b) | (a.isnan() & b.isnan())).double().mean().item()


def misplaced(part: NativePart, given: Sequence[Any], made: Sequence[torch.Tensor]) -> list[int]:
    """The places of outputs that have wrong strides, or are in another tensor's memory where they must not be.

    nvFuser gives a view of an input for what it finds to be one, such as a sum over a dim of size 1. The program may
    write into it, as an all-reduce in place does.
    """
    seen = {_memory(t) for t in given if isinstance(t, torch.Tensor) and t.numel()}
    found: list[int] = []
    for place, tensor in enumerate(made):
        shared = tensor.numel() > 0 and _memory(tensor) in seen
        if (shared and place in part.owned) or not lies_so(tensor, part.strides[place]):
            found.append(place)
        elif tensor.numel():
            seen.add(_memory(tensor))
    return found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lies_so(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides; those of dims of size 1 do not count."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(n == 1 or a == b for n, a, b in pairs)


def laid_out(
    made: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]], copied: Sequence[int]
) -> Sequence[torch.Tensor]:
    """The outputs, of which those at the places in `copied` are copied to memory of their own with these strides."""
    out = list(made)
    for place in copied:
        tensor = made[place]
        memory = torch.empty_strided(tensor.shape, strides[place], dtype=tensor.dtype, device=tensor.device)
        out[place] = memory.copy_(tensor)
    return out
