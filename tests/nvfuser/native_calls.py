"""Calls of ops for the real nvFuser, and what it says of their types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshfuse import DeviceMesh
from meshfuse.backends.nvfuser import NativeKernel
from meshfuse.dtypes import Category, DataType
from meshfuse.ops import OPS
from meshfuse.ops.binding import bind
from meshfuse.ops.local import LocalCall
from meshfuse.ops.opdef import Call, OpDef, Sample
from meshfuse.ops.values import TensorRef, TensorType
from meshfuse.sharding.value import Sharding

DTYPES = [
    *(DataType.Double, DataType.Float, DataType.Half, DataType.BFloat16, DataType.Int, DataType.Int32),
    *(DataType.Bool, DataType.ComplexFloat, DataType.ComplexDouble),
]
ONE_RANK = DeviceMesh((1,), ("x",))


def samples() -> Iterator[tuple[str, int]]:
    """(op, number of the sample) of the whole table."""
    for name, op in OPS.items():
        yield from ((name, i) for i in range(len(op.samples())))


def make_call(op: OpDef, sample: Sample, dtype: DataType | None = None, *, typed: bool = True) -> Call:
    """The sample as a call; with `dtype` its data (not its indices or conditions) are of that type.

    Raises DefinitionError where the op does not take the type, unless `typed` is False: then without results.
    """
    types: list[TensorType] = []
    data = _data_type(sample)

    def resolve(value: Any) -> Any:
        if not isinstance(value, TensorType):
            return value
        replaced = dtype is not None and value.dtype is data and len(types) not in sample.values
        types.append(TensorType(value.shape, dtype) if replaced else value)  # type: ignore[arg-type]
        return TensorRef(len(types) - 1)

    def argument(value: Any) -> Any:
        return dtype if dtype is not None and isinstance(value, DataType) else value

    args = bind(op, [argument(a) for a in sample.args], {k: argument(a) for k, a in sample.kwargs.items()}, resolve)
    results = op.infer(Call(op, args, tuple(types))) if typed else ()
    return Call(op, args, tuple(types), results)


def _data_type(sample: Sample) -> DataType | None:
    """The floating point type among a sample's tensors, or the first one of a tensor without given values."""
    given = [t for t in _leaves(sample) if isinstance(t, TensorType)]
    found = [t.dtype for i, t in enumerate(given) if i not in sample.values]
    return next((d for d in found if d.category is Category.FLOAT), found[0] if found else None)


def _leaves(sample: Sample) -> Iterator[Any]:
    for arg in (*sample.args, *sample.kwargs.values()):
        yield from arg if isinstance(arg, (list, tuple)) and not isinstance(arg, TensorType) else (arg,)


def on_one_rank(call: Call) -> LocalCall:
    taken, made = ([Sharding.replicated(ONE_RANK, t.ndim) for t in side] for side in (call.types, call.results))
    return LocalCall(call, [f"a{i}" for i in range(len(call.types))], taken, made, 0)


def found_type(tensor: Any) -> tuple[str, tuple[int | None, ...]]:
    """(dtype, sizes) of a TensorView, without its reduced dims; None for sizes that are symbolic."""
    sizes = tuple(int(text) if (text := str(n)).isdigit() else None for n in tensor.shape())
    return str(tensor.dtype()).removeprefix("DataType."), sizes


def differences(kernel: NativeKernel) -> list[str]:
    """Inputs and outputs of a built definition that are not of the types that meshfuse inferred."""
    fusion = kernel.definition.fusion
    inputs = [t for t in fusion.inputs() if hasattr(t, "get_logical_domain")]
    sides = ((inputs, kernel.inputs), (fusion.outputs(), kernel.outputs))
    pairs = [pair for tensors, types in sides for pair in zip(tensors, types, strict=True)]
    return [f"{t} is not {wanted}" for t, wanted in pairs if not _matches(t, wanted)]


def _matches(tensor: Any, wanted: TensorType) -> bool:
    dtype, sizes = found_type(tensor)
    if dtype != wanted.dtype.name or len(sizes) != wanted.ndim:
        return False
    return all(n is None or n == m for n, m in zip(sizes, wanted.shape, strict=True))
