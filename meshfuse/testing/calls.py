"""One call of an op, as one of its samples gives it: types, numbers for its operands, and its results on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from .. import kernels
from ..definition.tensor_view import TensorView
from ..dtypes import Category, DataType
from ..fusion_definition import FusionDefinition
from ..mesh import DeviceMesh
from ..ops.local import LocalCall
from ..ops.opdef import Call, OpDef, Sample
from ..ops.values import TensorType
from ..sharding.value import Sharding

# What stands for the place of the call in a program, and for the seed and step of the run.
SALT, SEED, OFFSET = 11, 5, 2


def torch_dtype(ttype: TensorType) -> torch.dtype:
    return getattr(torch, ttype.dtype.value)


def fill(
    ttype: TensorType, values: Sequence[float] | None, domain: tuple[float, float] | None, made: torch.Generator
) -> torch.Tensor:
    """A tensor of this type: the given values repeated, or random numbers from the domain."""
    dtype = torch_dtype(ttype)
    if values is not None:
        return torch.tensor(list(itertools.islice(itertools.cycle(values), ttype.numel))).to(dtype).reshape(ttype.shape)
    if dtype == torch.bool:
        return torch.rand(ttype.shape, generator=made) < 0.5
    if ttype.dtype.category is Category.INTEGER:
        return torch.randint(1, 7, ttype.shape, generator=made).to(dtype)
    if domain is not None and ttype.dtype.category is Category.FLOAT:
        unit = torch.rand(ttype.shape, dtype=torch.float64, generator=made)
        return (unit * (domain[1] - domain[0]) + domain[0]).to(dtype)
    wide = torch.complex64 if ttype.dtype.category is Category.COMPLEX else torch.float32
    return torch.randn(ttype.shape, dtype=wide, generator=made).to(dtype)


def operands_of(call: Call, sample: Sample, seed: int = 0) -> list[torch.Tensor]:
    """Operands for a call."""
    made = torch.Generator().manual_seed(seed)
    return [fill(t, sample.values.get(i), call.op.domain, made) for i, t in enumerate(call.types)]


def names_of(call: Call) -> list[str]:
    return [f"a{i}" for i in range(len(call.types))]


def run_lowering(local: LocalCall, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of the op's lowering on one rank's operands."""
    scope: dict[str, Any] = {"torch": torch, "F": F, "K": kernels, "seed": SEED, "offset": OFFSET, "device": "cpu"}
    scope["OP"] = SimpleNamespace(**{local.call.op.name: local.call.op.compute})
    scope |= dict(zip(local.operands, operands, strict=True))
    targets = [f"out{i}" for i in range(len(local.call.results))]
    exec("\n".join(local.statements(targets)), scope)
    return [scope[target] for target in targets]


def whole(call: Call, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a call on one rank that holds everything."""
    mesh = DeviceMesh((1,), ("x",))
    taken, made = ([Sharding.replicated(mesh, t.ndim) for t in side] for side in (call.types, call.results))
    return run_lowering(LocalCall(call, names_of(call), taken, made, 0, number=SALT), operands)


def define_call(fd: FusionDefinition, op: OpDef, sample: Sample) -> tuple[list[TensorView], list[TensorView]]:
    """A call in a definition, on new inputs: (its operands, its results)."""
    tensors: list[TensorView] = []

    def defined(arg: Any) -> Any:
        if isinstance(arg, TensorType):
            tensors.append(fd.define_tensor(list(arg.shape), dtype=arg.dtype))
            return tensors[-1]
        return [defined(a) for a in arg] if isinstance(arg, list) else arg

    args = [defined(arg) for arg in sample.args]
    made = fd.call(op, args, {key: defined(value) for key, value in sample.kwargs.items()})
    return tensors, list(made) if isinstance(made, tuple) else [made]


def retyped(sample: Sample, dtype: DataType) -> Sample:
    """The sample with another type in all places of Float."""
    args, kwargs = (_retyped(value, dtype) for value in (sample.args, dict(sample.kwargs)))
    return replace(sample, args=args, kwargs=kwargs)


def _retyped(value: Any, dtype: DataType) -> Any:
    if isinstance(value, TensorType):
        return TensorType(value.shape, dtype) if value.dtype is DataType.Float else value
    if isinstance(value, (list, tuple)):
        return type(value)([_retyped(v, dtype) for v in value])
    if isinstance(value, dict):
        return {key: _retyped(v, dtype) for key, v in value.items()}
    return dtype if value is DataType.Float else value
