"""Strides of inputs as nvFuser describes them: they change nothing here, but its texts repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..argument_checks import as_int
from ..definition.checks import are_strides
from ..definition.tensor_view import TensorView
from ..errors import ArgumentError, caller_line, shown, user_error


@dataclass(frozen=True, slots=True)
class Declared:
    """What a script declares of an input.

    contiguity: from the slowest dim to the fastest; None for dims of size 1.
    is_cpu: whether it is a scalar on the host.
    """

    contiguity: tuple[bool | None, ...]
    is_cpu: bool = False

    @classmethod
    def of(
        cls, shape: Sequence[int], contiguity: Any = None, is_cpu: bool = False, order: Sequence[int] | None = None
    ) -> Declared:
        """From one flag for all dims or one for each; no dim is contiguous without any."""
        if isinstance(contiguity, (list, tuple)):
            return cls(tuple(contiguity), is_cpu)
        dims = range(len(shape)) if order is None else sorted(range(len(shape)), key=lambda dim: -order[dim])
        return cls(tuple(None if shape[dim] == 1 else bool(contiguity) for dim in dims), is_cpu)

    @classmethod
    def laid_out(cls, sizes: Sequence[int], strides: Sequence[int], is_cpu: bool = False) -> Declared:
        """From the strides of an example tensor."""
        return cls(tuple(compute_tensor_descriptor(list(sizes), list(strides))[0]), is_cpu)


def declared(
    made: TensorView, contiguity: Any, is_cpu: bool, *, sizes: Any = None, strides: Any = None, **form: Any
) -> Declared:
    """The options of a call of define_tensor; in nvFuser's second form they follow from the example's strides."""
    if strides is None and are_strides(contiguity):
        strides = contiguity
    if strides is not None:
        return Declared.laid_out(made.type.shape if sizes is None else sizes, strides, is_cpu)
    return Declared.of(made.type.shape, contiguity, is_cpu, made.fd.recording.tensors[made.id].stride_order)


def is_host_scalar(tensor: Any) -> bool:
    """Whether nvFuser would treat the tensor as a number on the host."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """(contiguity, stride order) of a tensor with these sizes and strides.

    The stride order gives every dim its place in memory, with 0 the fastest; dims of stride 0 and of equal strides keep
    their order. Contiguity goes from the slowest dim to the fastest: None for dims of size 1 or stride 0, else whether
    the dim's stride is the size times the stride of the next dim that is not None.

    Raises ArgumentError unless both are lists of ints of one length.
    """
    given = (sizes, strides)
    listed = all(isinstance(part, (list, tuple)) and None not in map(as_int, part) for part in given)
    if not listed or len(sizes) != len(strides):
        raise user_error("compute_tensor_descriptor", f"{shown(sizes)}, {shown(strides)}",
                         "a size and a stride for every dim", "Pass t.size() and t.stride().",
                         caller_line(), ArgumentError)  # fmt: skip
    dims = _fastest_first(strides)
    order = [dims.index(d) for d in range(len(sizes))]
    contiguity: list[bool | None] = []
    step = 1
    for d in dims:
        broadcast = sizes[d] == 1 or strides[d] == 0
        contiguity.append(None if broadcast else strides[d] == step)
        step = step if broadcast else sizes[d] * strides[d]
    return contiguity[::-1], order


def _fastest_first(strides: Sequence[int]) -> list[int]:
    """The dims by stride, fastest first.

    It is an insertion sort from the last dim on, in which a stride of 0 compares with none.
    """
    dims = list(reversed(range(len(strides))))
    for start in range(1, len(dims)):
        here = start
        for other in range(start - 1, -1, -1):
            low, high = strides[dims[other]], strides[dims[here]]
            if low and high and low > high:
                dims[other], dims[here] = dims[here], dims[other]
                here = other
            elif low and high and low < high:
                break
    return dims
