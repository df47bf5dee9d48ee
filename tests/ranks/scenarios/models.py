"""Whole blocks: triangle updates of AlphaFold 3, and a transformer block forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import DataType, FusionDefinition
from tools import X, Y, Z, columns, cut, place, rows, same, size, split

C = 8


def _layer_norm(fd: FusionDefinition, x: Any, w: Any, b: Any) -> Any:
    kind, shape = x.dtype(), fd.ops.shape(x)
    wide = fd.ops.cast(x, dtype=DataType.Float)
    var, mean = fd.ops.var_mean(wide, dims=[-1], correction=0, keepdim=True)
    y = fd.ops.mul(fd.ops.sub(wide, mean), fd.ops.rsqrt(fd.ops.add(var, fd.define_scalar(1e-5))))
    y = fd.ops.mul(y, fd.ops.broadcast_in_dim(w, shape=shape, broadcast_dims=[-1]))
    y = fd.ops.add(y, fd.ops.broadcast_in_dim(b, shape=shape, broadcast_dims=[-1]))
    return fd.ops.cast(y, dtype=kind)


def _gated(fd: FusionDefinition, z: Any, w_p: Any, gate: Any, w_g: Any) -> Any:
    product = fd.ops.mul(fd.ops.linear(z, w_p), fd.ops.sigmoid(fd.ops.linear(gate, w_g)))
    return fd.ops.cast(product, dtype=z.dtype())


def _triangle(fd: FusionDefinition, z: Any, weights: list[Any], mask: Any, outgoing: bool) -> tuple[Any, Any]:
    """(the result, the matmul in it)"""
    batch, tokens = fd.ops.size(z, 0), fd.ops.size(z, 1)
    norm_w, norm_b, p_in, g_in, out_w, out_b, p_out, g_out = weights
    normed = _layer_norm(fd, z, norm_w, norm_b)
    both = _gated(fd, normed, p_in, normed, g_in)
    wide = fd.ops.broadcast_in_dim(mask, shape=[batch, tokens, tokens, C], broadcast_dims=[0, 1, 2])
    both = fd.ops.where(wide, both, 0.0)  # C columns beside 2C: what was expanded takes the other's size
    a = fd.ops.slice(both, [0, 0, 0, 0], [batch, tokens, tokens, C])
    b = fd.ops.slice(both, [0, 0, 0, C], [batch, tokens, tokens, 2 * C])
    left, right = ([0, 3, 1, 2], [0, 3, 2, 1]) if outgoing else ([0, 3, 2, 1], [0, 3, 1, 2])
    product = fd.ops.matmul(fd.ops.permute(a, left), fd.ops.permute(b, right))
    normed_out = _layer_norm(fd, fd.ops.permute(product, [0, 2, 3, 1]), out_w, out_b)
    return _gated(fd, normed_out, p_out, normed, g_out), product


def _triangle_torch(z: torch.Tensor, weights: list[torch.Tensor], mask: torch.Tensor, outgoing: bool) -> Any:
    norm_w, norm_b, p_in, g_in, out_w, out_b, p_out, g_out = weights
    normed = F.layer_norm(z, (C,), norm_w, norm_b)
    both = F.linear(normed, p_in) * F.linear(normed, g_in).sigmoid()
    a, b = (part * mask[..., None] for part in both.split(C, -1))
    product = torch.einsum("bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc", a, b)
    return F.linear(F.layer_norm(product, (C,), out_w, out_b), p_out) * F.linear(normed, g_out).sigmoid()


def triangle_update(outgoing: bool = True) -> None:
    """On a mesh of three axes, with symbolic sizes."""
    narrow = 2 if size() >= 4 else 1
    shape = (rows() // narrow, columns(), narrow)
    mesh = nvfuser.multidevice.DeviceMesh(torch.arange(size()).reshape(shape))
    sizes = [[C], [C], [2 * C, C], [2 * C, C], [C], [C], [C, C], [C, C]]
    with FusionDefinition() as fd:
        z = fd.define_tensor(shape=[-1, -1, -1, C], contiguity=True)
        weights = [fd.define_tensor(shape=s, contiguity=True) for s in sizes]
        mask = fd.define_tensor(shape=[-1, -1, -1], dtype=DataType.Bool, contiguity=True)
        y, product = _triangle(fd, z, weights, mask, outgoing)
        fd.add_output(y)
        place(mesh, z, mask, product, *weights)
        for tv in (z, mask):
            for dim, kind in ((2, X), (1, Y), (0, Z)):
                split(tv, dim, kind)
        split(product, -1, X if outgoing else Y)
        for dim, kind in ((3, X), (2, Y), (0, Z)):
            split(product, dim, kind)
    values = [torch.randn(s) for s in sizes]
    whole, keep = torch.randn(3 * shape[0], 6, 6, C), torch.rand(3 * shape[0], 6, 6) > 0.3
    (found,) = fd.execute([cut(whole, z), *values, cut(keep, mask)])
    same(found, cut(_triangle_torch(whole, values, keep, outgoing), z), rtol=1e-3, atol=1e-3)


def triangle_update_incoming() -> None:
    triangle_update(outgoing=False)
