"""Expanded dims of any size: in nvFuser they take the size of a real dim, whatever size they were expanded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..definition.builder import DefinitionBuilder
from ..definition.records import OpNode
from ..definition.tensor_view import TensorView
from ..errors import SourceLine
from ..ops.opdef import Call, OpDef
from ..ops.pointwise import pointwise_rule

CallArguments = tuple[Sequence[Any], Mapping[str, Any]]


def fitting(
    fd: DefinitionBuilder, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], at: SourceLine
) -> CallArguments:
    """The arguments of an elementwise op.

    Operands that were expanded to another size than a real dim's are expanded anew.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, TensorView) and v.fd is fd]
    if op.rule is not pointwise_rule or len({v.type.shape for v in tensors}) < 2:
        return args, kwargs
    real = _real_sizes(fd, tensors)

    def fit(value: Any) -> Any:
        return _fit(fd, value, real, at) if isinstance(value, TensorView) and value.fd is fd else value

    return [fit(value) for value in args], {name: fit(value) for name, value in kwargs.items()}


def _real_sizes(fd: DefinitionBuilder, tensors: Sequence[TensorView]) -> dict[int, int]:
    """By dim, counted from the last, the known size of those that are no broadcasts."""
    real: dict[int, int] = {}
    for view in tensors:
        expanded = _expanded_dims(fd, view)
        for dim, size in enumerate(view.type.shape):
            if size > 1 and dim not in expanded:
                real.setdefault(dim - view.ndim, size)
    return real


def _fit(fd: DefinitionBuilder, view: TensorView, real: Mapping[int, int], at: SourceLine) -> TensorView:
    wanted = {dim: real[dim - view.ndim] for dim in _expanded_dims(fd, view) if dim - view.ndim in real}
    shape = view.type.shape
    if all(shape[dim] in (1, -1, size) for dim, size in wanted.items()):
        return view
    node = fd.producer(view.id)
    assert node is not None
    sizes = [wanted.get(dim, size) for dim, size in enumerate(_shape_argument(node))]
    source = TensorView(fd, node.args[0])
    rest = [sizes if param.name == "shape" else arg for param, arg in zip(node.op.params, node.args, strict=True)][1:]
    return fd.call_at(at, node.op.name, [source, *rest])


def _expanded_dims(fd: DefinitionBuilder, view: TensorView) -> list[int]:
    """The dims that broadcast_in_dim or expand has added or enlarged."""
    node = fd.producer(view.id)
    if node is None or node.op.repeats is None:
        return []
    source = fd.tensors[node.inputs[0]].type
    places = list(node.op.repeats(Call(node.op, node.args, (source,), (view.type,))))
    return [d for d in range(view.ndim) if d not in places or source.shape[places.index(d)] == 1]


def _shape_argument(node: OpNode) -> Sequence[Any]:
    return node.args[node.op.places["shape"]]
