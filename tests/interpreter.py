"""What a definition means: its ops in plain torch, one after another, on whole tensors in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import meshfuse as mf
from attention_references import attention
from meshfuse.dtypes import Category, DataType
from meshfuse.ops.values import ParamKind, ScalarRef, TensorRef
from meshfuse.scalars import evaluate
from op_references import REFERENCES

_WIDEST = (torch.bool, torch.int64, torch.float64, torch.complex128)


def widened(tensor: Any, dtype: DataType) -> torch.Tensor:
    """The tensor in the widest type of the kind that `dtype` is of."""
    return tensor.to(_WIDEST[dtype.category])


def narrow(tensor: Any, dtype: DataType) -> torch.Tensor:
    """The tensor in the very type, with its range."""
    return tensor.to(getattr(torch, dtype.value))


def _sdpfa(q: Any, k: Any, v: Any, bias: Any, mask: Any, _: Any, is_causal: Any, scale: Any) -> tuple[Any, ...]:
    out, lse = attention([q, k, v, bias, mask], is_causal, scale, None)
    return out, lse, None, None


def _cast(x: torch.Tensor, dtype: DataType) -> torch.Tensor:
    return x.trunc() if dtype.category is Category.INTEGER and x.is_floating_point() else x


def _scatter(x: torch.Tensor, index: torch.Tensor, src: torch.Tensor, dim: int) -> torch.Tensor:
    enough = src.dim() == index.dim() and all(n >= m for n, m in zip(src.shape, index.shape, strict=True))
    return x.scatter(dim, index, src if enough else src.expand(index.shape))


_FUNCTIONS = {**REFERENCES, "cast": _cast, "sdpfa_fwd": _sdpfa, "scatter": _scatter}


def has_reference(fd: mf.FusionDefinition) -> bool:
    """Whether every op has one, and no number is of less than single precision: those follow the op's own rounding."""
    low = any(t.type.dtype.category is Category.FLOAT and t.type.dtype.itemsize < 4 for t in fd.recording.tensors)
    drawn = any(node.args[node.op.places["dropout_p"]] for node in fd.recording.nodes if "dropout_p" in node.op.places)
    return (
        not low and not drawn and all(node.op.name in _FUNCTIONS and _follows(fd, node) for node in fd.recording.nodes)
    )


def _follows(fd: mf.FusionDefinition, node: Any) -> bool:
    """Whether gradients of a ring are given what its own forward pass made, which their reference works out anew."""
    made = {out: other for other in fd.recording.nodes for out in other.outputs}
    given = [made.get(i) for i in node.inputs[4:6]]
    return node.op.name != "ring_attention_bwd" or all(n is not None and n.op.name == "ring_attention" for n in given)


def interpret(
    fd: mf.FusionDefinition, inputs: Sequence[Any], outputs: Sequence[int] | None = None, ops: int | None = None,
    as_type: Callable[[Any, DataType], torch.Tensor] = widened,
) -> list[torch.Tensor]:  # fmt: skip
    """The outputs of a definition; or these tensors, which the first so many ops make."""
    tensors = interpreted(fd, inputs, ops, as_type)
    return [tensors[i] for i in (fd.recording.outputs if outputs is None else outputs)]


def interpreted(
    fd: mf.FusionDefinition, inputs: Sequence[Any], ops: int | None = None,
    as_type: Callable[[Any, DataType], torch.Tensor] = widened,
) -> dict[int, torch.Tensor]:  # fmt: skip
    """All tensors that the first so many ops make, by number, each as `as_type` has it."""
    tensors: dict[int, torch.Tensor] = {}
    scalars: dict[int, Any] = {}
    for ref, value in zip(fd.recording.inputs, inputs, strict=True):
        if isinstance(ref, TensorRef):
            tensors[ref.id] = as_type(value, fd.recording.tensors[ref.id].type.dtype)
        else:
            scalars[ref.id] = value
    for node in fd.recording.nodes[:ops]:
        args = [_value(fd, arg, tensors, scalars) for arg in node.args]
        numbers = [param.kind is ParamKind.TENSOR_OR_SCALAR for param in node.op.params]
        results = _FUNCTIONS[node.op.name](*map(_operand, args, numbers))
        for i, result in zip(node.outputs, results if len(node.outputs) > 1 else (results,), strict=True):
            if result is not None:  # attention's random state
                tensors[i] = as_type(result, fd.recording.tensors[i].type.dtype)
                wanted = fd.recording.tensors[i].type.shape
                assert all(n in (m, -1) for m, n in zip(tensors[i].shape, wanted, strict=True)), node
    return tensors


def _value(fd: mf.FusionDefinition, arg: Any, tensors: Mapping[int, torch.Tensor], scalars: Mapping[int, Any]) -> Any:
    if isinstance(arg, TensorRef):
        return tensors[arg.id]
    if isinstance(arg, ScalarRef):
        return evaluate(arg, fd.recording.scalars, scalars, lambda ref, dim: tensors[ref.id].shape[dim])
    if isinstance(arg, tuple):
        return [_value(fd, one, tensors, scalars) for one in arg]
    return arg


def _operand(arg: Any, number: bool) -> Any:
    """A number in a tensor's place as a tensor."""
    if not number or isinstance(arg, torch.Tensor):
        return arg
    return torch.tensor(arg, dtype=torch.float64 if isinstance(arg, float) else None)
