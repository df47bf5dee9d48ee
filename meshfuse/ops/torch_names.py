"""torch's and numpy's names for what is called otherwise here: used in errors for unknown names, and in docs/ops.md.

They have torch's derivatives, too, also at 0 and at NaN: with `relu` a root has the gradient 0 at 0. In the texts x, y,
q, k and v are tensors, i is a tensor of indices and n a number.
"""

from __future__ import annotations

_ROWS = {
    "fd.ops.broadcast(x, [True, False, False]), True for each new dim": "unsqueeze expand_dims",
    "fd.ops.permute(x, [1, 0]), with the order of all dims": "transpose t mT swapaxes swapdims movedim moveaxis",
    "fd.ops.reshape(x, shape)": "view flatten unflatten ravel view_as reshape_as",
    "fd.ops.cat([x, y], dim)": "concat concatenate",
    "fd.ops.cat, of tensors that fd.ops.broadcast gave a new dim": "stack",
    "fd.ops.slice(x, starts, stops) for each part": "split chunk narrow unbind",
    "fd.ops.expand(x, shape)": "broadcast_to expand_as",
    "fd.ops.broadcast for a new dim, fd.ops.expand and fd.ops.reshape": "repeat tile repeat_interleave",
    "fd.ops.matmul, fd.ops.linear or fd.ops.contract, on permuted and reshaped tensors": "einsum tensordot",
    "fd.ops.matmul(x, y)": "bmm mm mv dot inner",
    "fd.ops.cast(x, mf.DataType.Float)": "to type float double half bfloat16 int long astype type_as",
    "fd.ops.full(shape, 0.0, mf.DataType.Float)": "zeros ones empty new_zeros new_ones",
    "fd.ops.full(x.shape(), 0.0, x.dtype)": "zeros_like ones_like full_like empty_like",
    "fd.ops.iota(length, start, step)": "arange range linspace",
    "fd.ops.uniform(0.0, 1.0, shape)": "rand",
    "fd.ops.normal(0.0, 1.0, shape)": "randn",
    "fd.ops.cast(fd.ops.eq(fd.ops.broadcast(i, [False, True]), fd.ops.iota(n)), mf.DataType.Float)": "one_hot",
    "fd.ops.embedding_fwd(i, weight)": "embedding",
    "fd.ops.take_along_axis(x, i, dim)": "take_along_dim",
    "fd.ops.embedding_bwd(x, i, n), which adds the rows of x where i names them, to n rows of zeros": "segment_sum "
    "scatter_sum",
    "fd.ops.where(mask, value, x)": "masked_fill",
    "fd.ops.triu(x.T).T": "tril",
    "x * x": "square",
    "fd.ops.sqrt(fd.ops.relu(fd.ops.sum(x * x, dims)))": "norm",
    "fd.ops.sqrt(fd.ops.relu(fd.ops.var(x, dims)))": "std",
    "fd.ops.max(x, dims)": "amax",
    "fd.ops.min(x, dims)": "amin",
    "fd.ops.clamp(x, low, high)": "clip clamp_min clamp_max",
    "fd.ops.silu(x)": "swish",
    "fd.ops.where(fd.ops.gt(x, 0.0), x, 0.01 * x)": "leaky_relu",
    "fd.ops.where(fd.ops.lt(x, 0.0), fd.ops.expm1(fd.ops.clamp(x, None, 0.0)), x)": "elu",
    "fd.ops.where(fd.ops.gt(x, 20.0), x, fd.ops.log1p(fd.ops.exp(fd.ops.where(fd.ops.gt(x, 20.0), 0.0, x))))": (
        "softplus"
    ),
    "fd.ops.mean((x - y) * (x - y))": "mse_loss",
    "fd.ops.sdpfa_fwd(q, k, v, is_causal=True)[0]": "scaled_dot_product_attention attention",
    "fd.ops.convolution(x, weight, bias, stride, padding, dilation)": "conv1d conv2d conv3d conv",
    "fd.ops.convolution(x, weight, bias, stride, padding, dilation, True, output_padding)": "conv_transpose1d "
    "conv_transpose2d conv_transpose3d",
    "fd.ops.max_pool(x, kernel, stride, padding)[0]": "max_pool1d max_pool2d max_pool3d",
    "fd.ops.avg_pool(x, kernel, stride, padding)": "avg_pool1d avg_pool2d avg_pool3d",
    "fd.ops.adaptive_avg_pool(x, sizes)": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "fd.ops.upsample_nearest(x, sizes) or fd.ops.upsample_linear(x, sizes)": "interpolate upsample",
    "fd.stop_gradient(fd.ops.set(x))": "detach",
    "fd.ops.set(x)": "clone contiguous",
    "fd.grad(loss, [x, y])": "backward",
    "x.ndim": "dim",
}
# By torch's name.
INSTEAD = {name: text for text, names in _ROWS.items() for name in names.split()}


def rows() -> list[tuple[list[str], str]]:
    """(the names, what to write for them), row by row."""
    return [(names.split(), text) for text, names in _ROWS.items()]
