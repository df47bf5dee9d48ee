"""Functions of `fd.ops` that are written in ops of the table: passes never see them.

Half precision is computed in float32 and returned in the operand's type, as in torch. A statistic over a sharded dim is
a local reduction and one small collective, never a gather: maxima and sums are computed in two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..argument_checks import as_int
from ..dtypes import Category, DataType
from ..errors import shown, user_error
from .block_order import zigzag_order
from .shape_arithmetic import check_dim, check_order, check_reduced, is_in_range
from .values import ParamKind

DimsArgument = int | Sequence[int] | None
Tensor = Any
# What a call is checked for: parameters by name, which mean the same in all composites.
PARAMETER_KINDS: dict[str, ParamKind] = {
    "dim": ParamKind.INT, "ring": ParamKind.INT, "ignore_index": ParamKind.INT, "dims": ParamKind.OPTIONAL_DIMS,
    "keepdim": ParamKind.BOOL, "training": ParamKind.BOOL, "dtype": ParamKind.DTYPE,
    "p": ParamKind.SCALAR, "eps": ParamKind.SCALAR, "normalized_shape": ParamKind.SHAPE,
    "targets": ParamKind.TENSOR, "weight": ParamKind.OPTIONAL_TENSOR, "bias": ParamKind.OPTIONAL_TENSOR,
}  # fmt: skip
MAY_BE_NONE = frozenset({"ignore_index"})  # Beside those whose default is None.
_MOST_BLOCKS = 1 << 16  # of a ring; more is a mistake


def as_wide(fd: Any, x: Any) -> Any:
    """x in float32 or wider."""
    dtype = x.dtype
    if dtype.category >= Category.FLOAT and not dtype.is_reduced_float:
        return x
    return fd.ops.cast(x, DataType.Float)


def in_type_of(fd: Any, x: Any, like: Any) -> Any:
    """x in the type of `like`, if that is floating point."""
    return x if x.dtype is like.dtype or like.dtype.category < Category.FLOAT else fd.ops.cast(x, like.dtype)


def _as_type(fd: Any, x: Any, dtype: DataType | None) -> Any:
    return x if dtype is None or x.dtype is dtype else fd.ops.cast(x, dtype)


def size(fd: Any, arg: Any, dim: int) -> Any:
    """The size of a dim, as a scalar of the definition."""
    return fd.size(arg, dim)


def shape(fd: Any, arg: Any) -> list[Any]:
    """The sizes of all dims, as scalars of the definition."""
    return arg.shape()


def gelu(fd: Any, x: Any, approximate: str = "none") -> Any:
    """The Gaussian error linear unit, exact or by tanh (Hendrycks & Gimpel 2016)."""
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        raise user_error("gelu: approximate", shown(approximate), "'none' or 'tanh'", "")
    ops, wide = fd.ops, as_wide(fd, x)
    if approximate == "none":
        gate = ops.erf(ops.mul(wide, math.sqrt(0.5)))
    else:
        cubic = ops.mul(ops.mul(ops.mul(wide, wide), wide), 0.044715)
        gate = ops.tanh(ops.mul(ops.add(wide, cubic), math.sqrt(2.0 / math.pi)))
    return in_type_of(fd, ops.mul(ops.mul(wide, 0.5), ops.add(gate, 1.0)), x)


def _max(fd: Any, x: Any, dims: DimsArgument) -> Any:
    """The maximum, which is subtracted before exp.

    The result does not depend on it, therefore gradients leave it out. If it is infinite, x minus it is NaN, as torch's
    softmax is.
    """
    return fd.stop_gradient(fd.ops.max(x, dims, True, empty=True))


def _finite_max(fd: Any, x: Any, dims: DimsArgument) -> Any:
    """The maximum, but 0 where it is infinite: the logarithm of a sum of exp is then infinite there, and not NaN."""
    top = fd.ops.max(x, dims, True, empty=True)
    return fd.stop_gradient(fd.ops.where(fd.ops.isfinite(top), top, 0.0))


def softmax(fd: Any, x: Any, dim: int = -1, dtype: DataType | None = None) -> Any:
    """exp(x) over its sum along a dim."""
    wide = as_wide(fd, _as_type(fd, x, dtype))
    numerator = fd.ops.exp(fd.ops.sub(wide, _max(fd, wide, dim)))
    return in_type_of(fd, fd.ops.truediv(numerator, fd.ops.sum(numerator, dim, True)), _as_type(fd, x, dtype))


def log_softmax(fd: Any, x: Any, dim: int = -1, dtype: DataType | None = None) -> Any:
    """The logarithm of softmax."""
    x = _as_type(fd, x, dtype)
    wide = as_wide(fd, x)
    shifted = fd.ops.sub(wide, _max(fd, wide, dim))
    return in_type_of(fd, fd.ops.sub(shifted, fd.ops.log(fd.ops.sum(fd.ops.exp(shifted), dim, True))), x)


def logsumexp(fd: Any, x: Any, dims: DimsArgument, keepdim: bool = False) -> Any:
    """The logarithm of the sum of exp(x) over dims."""
    reduced, wide = list(check_reduced("logsumexp", dims, x.ndim)), as_wide(fd, x)
    top = _finite_max(fd, wide, reduced)
    found = fd.ops.add(fd.ops.log(fd.ops.sum(fd.ops.exp(fd.ops.sub(wide, top)), reduced, True)), top)
    return in_type_of(fd, found if keepdim else fd.ops.squeeze(found, reduced), x)


def count_along(x: Any, dims: Sequence[int]) -> Any:
    """The number of elements along dims, as a scalar of the definition."""
    found: Any = 1
    for d in dims:
        found = x.size(d) * found
    return found


def mean(fd: Any, x: Any, dims: DimsArgument = None, keepdim: bool = False, dtype: DataType | None = None) -> Any:
    """The mean over dims (all of them for None)."""
    x = _as_type(fd, x, dtype)
    found = check_reduced("mean", dims, x.ndim)
    return in_type_of(fd, fd.ops.truediv(fd.ops.sum(as_wide(fd, x), list(found), keepdim), count_along(x, found)), x)


def norm_dims(x: Any, normalized_shape: Sequence[int]) -> list[int]:
    count = len(normalized_shape)
    if x.ndim == 0:
        raise user_error("a norm over the last dims", str(x.type), "a tensor with dims", "Reshape it to [1] before.")
    if not 0 < count <= x.ndim:
        raise user_error("normalized_shape", str(list(normalized_shape)), f"1 to {x.ndim} sizes", "Name the last dims.")
    for given, n in zip(normalized_shape, x.type.shape[-count:], strict=True):
        if as_int(given) not in (None, -1, n) and n != -1:
            raise user_error(
                "normalized_shape", str(list(normalized_shape)), f"the last sizes of {x.type}", "Correct it."
            )
    return list(range(x.ndim - count, x.ndim))


def norm_affine(fd: Any, x: Any, dims: Sequence[int], weight: Any, bias: Any) -> Any:
    x = x if weight is None else fd.ops.mul(x, _per_element(fd, "weight", weight, x, dims))
    return x if bias is None else fd.ops.add(x, _per_element(fd, "bias", bias, x, dims))


def _per_element(fd: Any, what: str, given: Any, x: Any, dims: Sequence[int]) -> Any:
    """A norm's parameter, checked to have the sizes of the dims that the norm is over: as in torch, none broadcasts."""
    wanted, found = [x.type.shape[d] for d in dims], given.type.shape
    fits = len(found) == len(wanted) and all(-1 in (n, m) or n == m for n, m in zip(found, wanted, strict=True))
    if not fits:
        raise user_error(f"the {what}", str(given.type), f"{wanted}, the normalized_shape", "Pass one of that shape.")
    return fd.ops.sized(given, [x.size(d) for d in dims]) if -1 in (*found, *wanted) else given


def layer_norm(
    fd: Any,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """(x - mean) / sqrt(variance + eps) over the last dims, times weight, plus bias (Ba et al. 2016).

    A sharded hidden dim needs two small collectives, or one (`rewrites.fuse_mean_variance`).
    """
    ops, dims, wide = fd.ops, norm_dims(x, normalized_shape), as_wide(fd, x)
    centred = ops.sub(wide, mean(fd, wide, dims, True))
    variance = mean(fd, ops.mul(centred, centred), dims, True)
    return in_type_of(fd, norm_affine(fd, ops.mul(centred, ops.rsqrt(ops.add(variance, eps))), dims, weight, bias), x)


def rms_norm(
    fd: Any, x: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """x / sqrt(mean(x²) + eps) over the last dims, times weight (Zhang & Sennrich 2019).

    eps: None for the type's own epsilon.
    """
    ops, dims, wide = fd.ops, norm_dims(x, normalized_shape), as_wide(fd, x)
    eps = eps if eps is not None else 2.0**-52 if wide.dtype is DataType.Double else 2.0**-23
    square = mean(fd, ops.mul(wide, wide), dims, True)
    return in_type_of(fd, norm_affine(fd, ops.mul(wide, ops.rsqrt(ops.add(square, eps))), dims, weight, None), x)


def cross_entropy(
    fd: Any, logits: Any, targets: Tensor, reduction: str = "mean", ignore_index: int | None = -100
) -> Any:
    """-log softmax(logits)[target], reduced by "mean", "sum" or "none"; logits [.., V] and integer targets [..].

    With V sharded: a maximum, a sum of exp and a masked look-up, each reduced at the size of the targets (the
    vocabulary-parallel loss of Megatron-LM). Targets equal to `ignore_index` count neither in the loss nor in the
    mean's count: -100, as in torch, unless another is named; for None there is none, and a mean over a sharded batch
    sends no count.
    """
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise user_error("cross_entropy: reduction", shown(reduction), "'mean', 'sum' or 'none'", "")
    if targets.ndim != logits.ndim - 1 or targets.dtype.category is not Category.INTEGER:
        raise user_error("cross_entropy: targets", f"{targets.type} for logits {logits.type}",
                         "integers, one for each row of the logits, whose last dim is the classes",
                         "Permute the logits where their classes are another dim; targets that are probabilities p "
                         "have the loss -fd.ops.sum(p * fd.ops.log_softmax(logits), -1).")  # fmt: skip
    ops, wide, last = fd.ops, as_wide(fd, logits), logits.ndim - 1
    valid = _counted(fd, targets, ignore_index)
    index = targets if valid is None else ops.where(valid, targets, 0)
    top = _max(fd, wide, last)
    total = ops.sum(ops.exp(ops.sub(wide, top)), last, True)
    picked = ops.take_along_axis(wide, ops.broadcast(index, [False] * last + [True]), last)
    loss = ops.squeeze(ops.sub(ops.add(ops.log(total), top), picked), [last])
    return in_type_of(fd, _reduced_loss(fd, loss, valid, reduction), logits)


def _counted(fd: Any, targets: Any, ignored: int | None) -> Any:
    """Which targets count, as a tensor of bools; None for all, as where their type does not have the ignored one."""
    return fd.ops.ne(targets, ignored) if ignored is not None and is_in_range(ignored, targets.dtype) else None


def _reduced_loss(fd: Any, loss: Any, valid: Any, reduction: str) -> Any:
    loss = loss if valid is None else fd.ops.where(valid, loss, 0.0)
    if reduction == "none":
        return loss
    total = _total(fd, loss)
    if reduction == "sum":
        return total
    return fd.ops.truediv(total, count_along(loss, range(loss.ndim)) if valid is None else _total(fd, valid))


def _total(fd: Any, x: Any) -> Any:
    """The sum over all dims, if there are any: of one bool it is the bool as a number."""
    return fd.ops.sum(x) if x.ndim else fd.ops.cast(x, DataType.Int) if x.dtype is DataType.Bool else x


def dropout(fd: Any, x: Any, p: float = 0.5, training: bool = True) -> Any:
    """Zeros with probability p, all others divided by 1 - p.

    The choice depends on global indices, not on the mesh.
    """
    if not training or p == 0.0:
        return fd.ops.set(x)
    if not 0.0 < p <= 1.0:
        raise user_error("dropout: p", str(p), "0 to 1", "Pass the share of elements to drop, as 0.1.")
    keep = fd.ops.ge(fd.ops.uniform(0.0, 1.0, x.shape()), p)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return in_type_of(fd, fd.ops.mul(fd.ops.mul(as_wide(fd, x), keep), scale), x)


def _with_elements(fd: Any, x: Any, dims: Sequence[int]) -> Any:
    """The tensor.

    Raises DefinitionError where it has no greatest element along dims; for open sizes, once they are known.
    """
    check_order("argmax", x.type)
    shape = x.type.shape
    if any(shape[d] == 0 for d in dims):
        raise user_error("argmax: a dim of size 0 has no largest element", str(x.type), "at least one element",
                         "Leave it out where the tensor is empty.")  # fmt: skip
    if all(shape[d] != -1 for d in dims):
        return x
    return fd.ops.sized(x, [fd.ops.maximum(n, 1) if d in dims else n for d, n in enumerate(x.shape())])


def argmax(fd: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The index of the first largest element along a dim; of the flattened tensor for None.

    NaN counts as the largest, as in torch. It equals no maximum, so it is looked for separately.
    """
    x = _with_elements(fd, x, range(x.ndim) if dim is None else [check_dim("argmax", dim, x.ndim)])
    if dim is None:
        found = argmax(fd, fd.ops.reshape(x, [count_along(x, range(x.ndim))]), 0)
        return fd.ops.broadcast(found, [True] * x.ndim) if keepdim else found
    ops, place = fd.ops, dim % x.ndim
    index = ops.broadcast(ops.iota(x.size(place)), [d != place for d in range(x.ndim)])
    is_top = ops.eq(x, ops.max(x, place, True))
    is_top = ops.logical_or(is_top, ops.isnan(x)) if x.dtype.category >= Category.FLOAT else is_top
    return ops.min(ops.where(is_top, index, x.size(place)), place, keepdim)


def _zigzag_order(ring: int) -> list[int]:
    if not 1 <= ring <= _MOST_BLOCKS:
        raise user_error("zigzag: ring", shown(ring), f"1 to {_MOST_BLOCKS}", "Give the number of blocks of the ring.")
    return list(zigzag_order(ring))


def zigzag(fd: Any, x: Any, dim: int, ring: int) -> Any:
    """A dim's chunks in zig-zag order, two for each block of a ring: block r is the chunks r and 2 ring - 1 - r.

    Each rank gets the pieces of a sharded dim that it lacks. `ring_attention(.., zigzag=True)` takes rows in this
    order.
    """
    return fd.ops.reorder_blocks(x, dim, _zigzag_order(ring))


def unzigzag(fd: Any, x: Any, dim: int, ring: int) -> Any:
    """The inverse of `zigzag`: chunks in the order of the sequence."""
    place = {chunk: place for place, chunk in enumerate(_zigzag_order(ring))}
    return fd.ops.reorder_blocks(x, dim, [place[chunk] for chunk in range(2 * ring)])


def _three(made: Any) -> tuple[Any, Any, Any]:
    """(product, scales or None, global scale or None) from the op's results."""
    found = made if isinstance(made, tuple) else (made,)
    return (*found, None, None)[:3]  # type: ignore[return-value]


def scaled_mm(fd: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """(product, scales of its blocks or None, its global scale or None)."""
    return _three(fd.call("scaled_mm", args, kwargs))


def grouped_mm(fd: Any, *args: Any, **kwargs: Any) -> Any:
    """A product of groups: a tensor; with scales, three results as of `scaled_mm`."""
    if len(args) <= 3 and "scale1" not in kwargs:
        return fd.call("grouped_mm", args, kwargs)
    return _three(fd.call("scaled_grouped_mm", args, kwargs))


COMPOSITES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        size,
        shape,
        gelu,
        softmax,
        log_softmax,
        logsumexp,
        mean,
        layer_norm,
        rms_norm,
        cross_entropy,
        dropout,
        argmax,
        zigzag,
        unzigzag,
        scaled_mm,
        grouped_mm,
    )
}
