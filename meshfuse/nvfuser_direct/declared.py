"""Options of `define_tensor` that change nothing here, kept because nvFuser's texts repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..definition.checks import are_strides
from ..definition.tensor_view import TensorView
from .descriptors import compute_tensor_descriptor


@dataclass(frozen=True, slots=True)
class Declared:
    """What a script says of an input.

    contiguity: from the slowest dim to the fastest; None for dims of size 1.
    is_cpu: whether it is a scalar on the host.
    """

    contiguity: tuple[bool | None, ...]
    is_cpu: bool = False

    @classmethod
    def of(
        cls, shape: Sequence[int], contiguity: Any = None, is_cpu: bool = False, order: Sequence[int] | None = None
    ) -> Declared:
        """As a script says it: one flag for all dims or one for each; no dim is contiguous where nothing is said."""
        if isinstance(contiguity, (list, tuple)):
            return cls(tuple(contiguity), is_cpu)
        dims = range(len(shape)) if order is None else sorted(range(len(shape)), key=lambda dim: -order[dim])
        return cls(tuple(None if shape[dim] == 1 else bool(contiguity) for dim in dims), is_cpu)

    @classmethod
    def laid_out(cls, sizes: Sequence[int], strides: Sequence[int], is_cpu: bool = False) -> Declared:
        """As the strides of an example tensor tell it."""
        return cls(tuple(compute_tensor_descriptor(list(sizes), list(strides))[0]), is_cpu)


def declared(
    made: TensorView, contiguity: Any, is_cpu: bool, *, sizes: Any = None, strides: Any = None, **form: Any
) -> Declared:
    """What a call of define_tensor said of its input; in nvFuser's second form the example's strides say it."""
    if strides is None and are_strides(contiguity):
        strides = contiguity
    if strides is not None:
        return Declared.laid_out(made.type.shape if sizes is None else sizes, strides, is_cpu)
    return Declared.of(made.type.shape, contiguity, is_cpu, made.fd.tensors[made.id].stride_order)


def is_host_scalar(tensor: Any) -> bool:
    """Whether nvFuser would treat the tensor as a number on the host."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"
