"""Prims that meshfuse adds to Thunder's traces: annotations, with their gradients, and attention as one op.

In a trace a weight that is cut is *local*: this rank's shard. `mesh_split` makes the whole tensor of it, in name: what
follows is written for whole tensors, and planned by meshfuse. `mesh_local` is the way back, as gradients take it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from thunder.core import dtypes
from thunder.core.prims import make_prim
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import register_augmented_forward, register_backward

from ..runtime.world import World
from ..sharding.value import Sharding


class MeshPrims(Enum):
    """The ids of meshfuse's prims."""

    MESH_SPLIT = auto()
    MESH_LOCAL = auto()
    MESH_LAYOUT = auto()
    ATTENTION = auto()
    ATTENTION_BACKWARD = auto()


class Layout(NamedTuple):
    """What an annotation says of a local tensor: how the whole one lies, its shape, and what it is called.

    stationary: whether no collective may move it.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    name: str
    stationary: bool = False

    def of_gradient(self) -> Layout:
        """That of the gradient, which is reduced and so moves."""
        return Layout(self.sharding, self.shape, f"{self.name}.grad")


def local_shape(sharding: Sharding, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's shard; the whole one where ranks are simulated."""
    world = World.current()
    return tuple(shape) if world.size == 1 else sharding.local_shape(shape, world.rank)


def _printed(bsym: Any, out: Any, args: Any, kwargs: Any) -> str:
    """A bound symbol as text, with shardings as an error or a bill has them."""
    shown = ", ".join(x.name if isinstance(x, TensorProxy) else str(x) for x in bsym.args)
    call = f"{bsym.sym.name}({shown})"
    if not isinstance(bsym.output, TensorProxy):
        return call
    made = bsym.output
    return f"{made.name} = {call}  # {made.type_string()}"


# annotations


def _split_meta(x: TensorProxy, *layout: Any) -> TensorProxy:
    return TensorProxy(like=x, shape=Layout(*layout).shape)


def _local_meta(x: TensorProxy, *layout: Any) -> TensorProxy:
    sharding, shape, *_ = layout
    return TensorProxy(like=x, shape=local_shape(sharding, shape))


def _layout_meta(x: TensorProxy, sharding: Sharding) -> TensorProxy:
    return x


mesh_split = make_prim(MeshPrims.MESH_SPLIT, "mesh_split", meta=_split_meta, python_printer=_printed)
mesh_local = make_prim(MeshPrims.MESH_LOCAL, "mesh_local", meta=_local_meta, python_printer=_printed)
# How an input or output of a region lies; it stands in regions alone, and computes nothing. It returns its argument, as
# Thunder drops parts of a symbol that return nothing.
mesh_layout = make_prim(MeshPrims.MESH_LAYOUT, "mesh_layout", meta=_layout_meta, python_printer=_printed)


@register_augmented_forward(MeshPrims.MESH_SPLIT)
def _split_forward(x: TensorProxy, *layout: Any) -> tuple[TensorProxy, tuple[Any, ...]]:
    return mesh_split(x, *layout), layout


@register_backward(MeshPrims.MESH_SPLIT)
def _split_backward(*saved: Any) -> TensorProxy:
    *layout, grad = saved
    return mesh_local(grad, *Layout(*layout).of_gradient())


@register_augmented_forward(MeshPrims.MESH_LOCAL)
def _local_forward(x: TensorProxy, *layout: Any) -> tuple[TensorProxy, tuple[Any, ...]]:
    return mesh_local(x, *layout), layout


@register_backward(MeshPrims.MESH_LOCAL)
def _local_backward(*saved: Any) -> TensorProxy:
    *layout, grad = saved
    return mesh_split(grad, *Layout(*layout).of_gradient())


# attention


def _attention_meta(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[TensorProxy, ...]:  # fmt: skip
    wide = dtypes.float64 if query.dtype == dtypes.float64 else dtypes.float32
    out = TensorProxy(like=query, shape=(*query.shape[:-1], value.shape[-1]))
    lse = TensorProxy(like=query, shape=query.shape[:-1], dtype=wide, requires_grad=False)
    state = [TensorProxy(like=query, shape=s, dtype=dtypes.uint64, requires_grad=False) for s in ((2,), ())]
    return out, lse, *state


def _attention_backward_meta(
    grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any
) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=x) for x in (query, key, value))


# Results: the output, the log-sum-exp of the rows, and the state of the random numbers that dropout drew by.
attention = make_prim(MeshPrims.ATTENTION, "mesh_attention", meta=_attention_meta)
attention_backward = make_prim(MeshPrims.ATTENTION_BACKWARD, "mesh_attention_backward", meta=_attention_backward_meta)
