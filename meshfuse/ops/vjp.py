"""What VJPs (vector-Jacobian products) are written with: one use of an op, and the gradients of its results.

A VJP gives gradients by parameter, for the tensors that need one; a gradient may be a `WindowGradient`. For complex
numbers the gradient is that of the real and imaginary parts, as in torch: a holomorphic op multiplies by the conjugate
of its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ..dtypes import Category
from ..fast_dataclass import quickly_made

Tensor = Any  # a TensorView of the definition; where an op takes numbers too, perhaps a number or a Val


@quickly_made
@dataclass(frozen=True, slots=True)
class Backward:
    """One use of an op.

    ops: appends ops to the definition.
    arguments: those of the use, by parameter.
    grads: the gradients of the results, in their shapes and dtypes; None for results that nothing depends on.
    active: the numbers of the tensors that need gradients.
    """

    name: str
    ops: Any
    arguments: Mapping[str, Any]
    results: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]
    active: AbstractSet[int]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def grad(self) -> Tensor:
        """The gradient of the first result."""
        return self.grads[0]

    @property
    def result(self) -> Tensor:
        """The first result."""
        return self.results[0]

    @property
    def dim(self) -> int:
        """The argument `dim`, a dim of `arg`, counted from the front."""
        return self["dim"] % self["arg"].ndim

    @property
    def dims(self) -> list[int]:
        """The argument `dims`, dims of `arg`, as ascending dims counted from the front."""
        return listed_dims(self["dims"], self["arg"].ndim)

    def needs(self, name: str) -> bool:
        """Whether any tensor passed as this parameter needs a gradient."""
        value = self.arguments[name]
        listed = value if isinstance(value, (list, tuple)) else (value,)
        return any(is_tensor(v) and v.id in self.active for v in listed)

    def conj(self, x: Tensor) -> Tensor:
        """The complex conjugate; anything real as it is."""
        if isinstance(x, complex):
            return x.conjugate()
        if not is_tensor(x) or x.dtype.category < Category.COMPLEX:
            return x
        return self.ops.complex(self.ops.real(x), self.ops.neg(self.ops.imag(x)))

    def times(self, derivative: Tensor) -> Tensor:
        """The operand's gradient, if `derivative` is the result's derivative by it."""
        return self.ops.mul(self.grad, self.conj(derivative))

    def over(self, divisor: Tensor) -> Tensor:
        """The operand's gradient, if 1 / `divisor` is the result's derivative by it."""
        return self.ops.truediv(self.grad, self.conj(divisor))


Vjp = Callable[[Backward], Mapping[str, Any]]
OperandGradient = Callable[[Backward], Tensor]


def is_tensor(value: Any) -> bool:
    """Whether it is a TensorView, and not a number, a Val or anything else that an op takes."""
    return hasattr(type(value), "ndim") and hasattr(value, "fd")  # of the type: to ask a tensor's takes longer


def each(**parts: OperandGradient) -> Vjp:
    """A VJP from one function per parameter, which is only called where that parameter needs a gradient."""
    return lambda b: {name: part(b) for name, part in parts.items() if b.needs(name)}


def elementwise(**parts: OperandGradient) -> Vjp:
    """As `each`, with every gradient summed over the dims in which the operand was broadcast."""
    return lambda b: {name: sum_to(b, part(b), b[name]) for name, part in parts.items() if b.needs(name)}


def nothing(_: Backward) -> Mapping[str, Any]:
    """The VJP of an op that is constant wherever it has a derivative."""
    return {}


def sizes(t: Tensor) -> list[Any]:
    """The shape of a tensor: numbers where they are known, Vals where they are open."""
    return [n if n >= 0 else t.size(d) for d, n in enumerate(t.type.shape)]


def sum_to(b: Backward, grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of an operand that was broadcast to the shape of `grad`, or with open sizes may have been."""
    if grad.type.shape == like.type.shape and -1 not in like.type.shape:
        return grad
    found = _known_sum(b, grad, like)
    return b.ops.sum_to(found, sizes(like)) if _may_be_repeated(b, like) else found


def _may_be_repeated(b: Backward, like: Tensor) -> bool:
    """Whether an open dim of an operand may be of size 1 where the result has another size."""
    open_dims = [d - like.ndim for d, n in enumerate(like.type.shape) if n < 0]
    others = [t.type.shape for t in b.arguments.values() if is_tensor(t) and t.id != like.id]
    has_shape = "shape" in b.arguments
    return any(has_shape or any(len(shape) >= -d and shape[d] != 1 for shape in others) for d in open_dims)


def _known_sum(b: Backward, grad: Tensor, like: Tensor) -> Tensor:
    """`grad` summed over the dims that it alone has, and over those whose size in the operand is known to be 1."""
    extra = grad.ndim - like.ndim
    pairs = zip(grad.type.shape[extra:], like.type.shape, strict=True)
    inner = [extra + d for d, (n, m) in enumerate(pairs) if m == 1 and n != 1]
    outer = list(range(extra))
    if not inner:
        return b.ops.sum(grad, outer) if outer else grad
    kept = b.ops.sum(grad, [*outer, *inner], True)
    return b.ops.squeeze(kept, outer) if outer else kept


def numel_along(t: Tensor, dims: Sequence[int]) -> Any:
    """The number of elements along dims: a number where the sizes are known, else a Val."""
    found: Any = 1
    for d in dims:
        n = t.type.shape[d]
        found = found * n if n >= 0 else t.size(d) * found
    return found


def listed_dims(dims: Any, ndim: int) -> list[int]:
    """An argument that is one dim, a list of dims or None (all) as ascending dims, counted from the front."""
    if dims is None:
        return list(range(ndim))
    return sorted(d % ndim for d in ((dims,) if isinstance(dims, int) else dims))


def restored(b: Backward, reduced: Tensor, like: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The result of a reduction over dims, repeated to the operand's shape."""
    if not dims:
        return reduced
    if keepdim or not reduced.ndim:
        return b.ops.expand(reduced, sizes(like))
    return b.ops.broadcast_in_dim(reduced, sizes(like), [d for d in range(like.ndim) if d not in dims])


def kept(b: Backward, reduced: Tensor, like: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The result of a reduction over dims, with those dims of size 1."""
    if keepdim or not dims:
        return reduced
    return b.ops.broadcast(reduced, [d in dims for d in range(like.ndim)])


def transposed(b: Backward, x: Tensor) -> Tensor:
    """The tensor with its last two dims swapped."""
    return b.ops.permute(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])
