"""Composites that normalise by statistics, as torch's functions of these names.

Statistics over a sharded batch, or over sharded spatial dims, are sums and one small collective of the channels' size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import user_error
from .composite import as_wide, count_along, in_type_of, mean, norm_affine, norm_dims
from .shape_arithmetic import check_positive, check_same_size
from .vjp import sizes


def _moments(fd: Any, x: Any, dims: Sequence[int]) -> tuple[Any, Any, Any]:
    """(x less its mean, mean, variance) over dims, which stay with size 1."""
    average = mean(fd, x, list(dims), True)
    centred = fd.ops.sub(x, average)
    return centred, average, mean(fd, fd.ops.mul(centred, centred), list(dims), True)


def _per_channel(fd: Any, x: Any, given: Any, what: str) -> Any:
    """A vector with an element for each channel, along dim 1 of x."""
    check_same_size("a norm", f"the {what}'s size and the channels", given.type.shape[0], x.type.shape[1])
    return fd.ops.broadcast(given, [d != 1 for d in range(x.ndim)])


def _affine(fd: Any, x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else fd.ops.mul(x, _per_channel(fd, x, weight, "weight"))
    return x if bias is None else fd.ops.add(x, _per_channel(fd, x, bias, "bias"))


def _check_channels(name: str, x: Any) -> None:
    if x.ndim < 2:
        raise user_error(f"{name}: the operand", str(x.type), "[n, channels, ..]", "Add dims of batch and channels.")


def batch_norm(
    fd: Any,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    running_mean: Any = None,
    running_var: Any = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, Any, Any, Any, Any]:
    """(x normalised by channel, mean, 1 / standard deviation, running mean, running variance), of x [n, channels, ..].

    In training the statistics are those of the whole batch, on all ranks, and the running ones are returned moved
    towards them by `momentum`, the variance as that of a sample (n - 1). Otherwise the running ones are used, and
    returned as they are. What was not given is returned as None. (Ioffe & Szegedy 2015.)
    """
    _check_channels("batch_norm", x)
    ops, wide = fd.ops, as_wide(fd, x)
    if not training:
        return _by_running(fd, x, wide, (weight, bias), (running_mean, running_var), eps)
    dims = [d for d in range(x.ndim) if d != 1]
    centred, average, variance = _moments(fd, wide, dims)
    rstd = ops.rsqrt(ops.add(variance, eps))
    scale = rstd if weight is None else ops.mul(rstd, _per_channel(fd, x, weight, "weight"))
    out = in_type_of(fd, _affine(fd, ops.mul(centred, scale), None, bias), x)
    average, variance = (fd.stop_gradient(ops.squeeze(s, dims)) for s in (average, variance))
    count = count_along(x, dims)
    sample = ops.truediv(ops.mul(variance, count), ops.maximum(count - 1, 1))
    moved = [
        None if old is None else in_type_of(fd, ops.add(ops.mul(old, 1.0 - momentum), ops.mul(new, momentum)), old)
        for old, new in ((running_mean, average), (running_var, sample))
    ]
    return out, average, ops.squeeze(rstd, dims), *moved  # type: ignore[return-value]


def _by_running(
    fd: Any, x: Any, wide: Any, affine: tuple[Any, Any], running: tuple[Any, Any], eps: float
) -> tuple[Any, Any, Any, Any, Any]:
    average, variance = running
    if average is None or variance is None:
        raise user_error("batch_norm: running statistics", "None", "a mean and a variance by channel",
                         "Pass them, or training=True.")  # fmt: skip
    rstd = fd.ops.rsqrt(fd.ops.add(as_wide(fd, variance), eps))
    centred = fd.ops.sub(wide, _per_channel(fd, x, average, "running mean"))
    scale = rstd if affine[0] is None else fd.ops.mul(rstd, affine[0])
    made = fd.ops.mul(centred, _per_channel(fd, x, scale, "running variance"))
    return in_type_of(fd, _affine(fd, made, None, affine[1]), x), None, None, average, variance


def native_group_norm(
    fd: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Any, Any, Any]:
    """(x normalised, mean [n, groups], 1 / standard deviation [n, groups]), of x [n, channels, ..] (Wu & He 2018)."""
    _check_channels("group_norm", x)
    check_positive("group_norm", "groups", groups)
    channels = x.type.shape[1]
    if channels != -1 and channels % groups:
        raise user_error("group_norm: groups", f"{groups} of {channels} channels", "a divisor of the channels", "")
    whole = sizes(x)
    per_group = whole[1] // groups
    parts = fd.ops.reshape(as_wide(fd, x), [whole[0], groups, per_group, *whole[2:]])
    dims = list(range(2, parts.ndim))
    centred, average, variance = _moments(fd, parts, dims)
    rstd = fd.ops.rsqrt(fd.ops.add(variance, eps))
    made = fd.ops.reshape(fd.ops.mul(centred, rstd), whole)
    out = in_type_of(fd, _affine(fd, made, weight, bias), x)
    return out, fd.ops.squeeze(average, dims), fd.ops.squeeze(rstd, dims)


def group_norm(fd: Any, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """x [n, channels, ..] normalised over each image's channels of a group (Wu & He 2018)."""
    return native_group_norm(fd, x, groups, weight, bias, eps)[0]


def instance_norm(fd: Any, x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """x [n, channels, ..] normalised over each image's and channel's spatial dims (Ulyanov et al. 2016)."""
    _check_channels("instance_norm", x)
    if x.ndim < 3:
        raise user_error("instance_norm: the operand", str(x.type), "[n, channels, ..] with spatial dims", "")
    centred, _, variance = _moments(fd, as_wide(fd, x), range(2, x.ndim))
    made = fd.ops.mul(centred, fd.ops.rsqrt(fd.ops.add(variance, eps)))
    return in_type_of(fd, _affine(fd, made, weight, bias), x)


def native_layer_norm(
    fd: Any, x: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Any, Any, Any]:
    """(layer_norm, mean, 1 / standard deviation); the last two have the normalised dims with size 1."""
    dims = norm_dims(x, normalized_shape)
    centred, average, variance = _moments(fd, as_wide(fd, x), dims)
    rstd = fd.ops.rsqrt(fd.ops.add(variance, eps))
    return in_type_of(fd, norm_affine(fd, fd.ops.mul(centred, rstd), dims, weight, bias), x), average, rstd


NORM_COMPOSITES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (batch_norm, native_group_norm, group_norm, instance_norm, native_layer_norm)
}
