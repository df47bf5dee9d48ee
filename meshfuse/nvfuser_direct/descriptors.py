"""nvFuser's description of a tensor's strides."""

from __future__ import annotations

from collections.abc import Sequence

from ..argument_checks import as_int
from ..errors import ArgumentError, caller_line, shown, user_error


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
