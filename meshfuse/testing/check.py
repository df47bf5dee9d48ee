"""Arguments for a definition, and the comparison of its sharded run with a run on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..dtypes import Category, DataType
from ..errors import ArgumentError, caller_line, user_error
from ..executor.modes import on_cpu
from ..fusion_definition import FusionDefinition
from ..ops.values import TensorRef, TensorType
from .asked import check_entries, check_int, check_type
from .calls import fill, torch_dtype
from .cases import largest
from .examples import examples_of, shape_of


def inputs_for(fd: FusionDefinition, seed: int = 0) -> list[Any]:
    """Arguments for a definition: small whole numbers, and for index inputs numbers that are valid indices.

    Whole numbers have the same sum in every order, so that ops whose value jumps can be compared. Scalars are 1.5.
    """
    check_type("inputs_for: fd", fd, FusionDefinition, "Pass a definition.")
    check_int("inputs_for: seed", seed, 0, 2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    limits = dict(_index_limits(fd))
    with on_cpu():
        return [
            _values(fd, ref, limits, generator) if isinstance(ref, TensorRef) else _scalar(fd, ref)
            for ref in fd.recording.inputs
        ]


def _scalar(fd: FusionDefinition, ref: Any) -> Any:
    return (True, 2, 1.5, 1.5 + 0.5j)[fd.recording.scalars[ref.id].dtype.category]


def _values(fd: FusionDefinition, ref: TensorRef, limits: dict[int, int], made: torch.Generator) -> torch.Tensor:
    dtype, example = fd.recording.tensors[ref.id].type.dtype, examples_of(fd).get(ref.id)
    ttype = TensorType(_known_shape(fd, ref), dtype)
    if example is not None and (example.values is not None or example.domain is not None):
        return fill(ttype, example.values, example.domain, made)
    low, high = (0, limits.get(ref.id, 5)) if ttype.dtype.category < Category.FLOAT else (-3, 5)
    dtype, high = torch_dtype(ttype), 2 if ttype.dtype is DataType.Bool else high
    found = torch.randint(low, high, ttype.shape, generator=made).to(dtype)
    return found + 1j * torch.randint(low, high, ttype.shape, generator=made) if dtype.is_complex else found


def shapes_for(fd: FusionDefinition) -> list[tuple[int, ...]]:
    """The shapes of a definition's input tensors for `fd.compile`; open sizes are as the strategy drew them."""
    check_type("shapes_for: fd", fd, FusionDefinition, "Pass a definition.")
    return [_known_shape(fd, ref) for ref in fd.recording.inputs if isinstance(ref, TensorRef)]


def _known_shape(fd: FusionDefinition, ref: TensorRef) -> tuple[int, ...]:
    shape = shape_of(fd, ref.id)
    if -1 in shape:
        tensor = fd.recording.tensors[ref.id]
        raise user_error("inputs_for and shapes_for: open sizes", f"{tensor.label}: {tensor.type}", "known ones",
                         "Pass arguments of your own.", caller_line(), ArgumentError)  # fmt: skip
    return shape


def _index_limits(fd: FusionDefinition) -> Iterator[tuple[int, int]]:
    """(tensor, size of the smallest dim that it indexes) for tensors that are passed as an op's index."""
    found: dict[int, int] = {}
    for node in fd.recording.nodes:
        args = {param.name: arg for param, arg in zip(node.op.params, node.args, strict=True)}
        if "weight" in args and "padding_idx" in args:
            index, size = args["input"], shape_of(fd, args["weight"].id)[0]
        elif isinstance(args.get("index"), TensorRef) and "arg" in args:
            index, size = args["index"], shape_of(fd, args["arg"].id)[args["dim"]]
        else:
            continue
        if size >= 0:  # Sizes that are open in ops of a gradient are those of the ops that it is of.
            found[index.id] = min(size, found[index.id]) if index.id in found else size
    yield from found.items()


def unsharded_copy(fd: FusionDefinition) -> FusionDefinition:
    """The same definition without annotations."""
    seed = fd._execution.seed.value()
    copy = FusionDefinition(seed)
    copy._set_up(fd.recording.without_annotations(seed))
    copy._execution.steps = dict(fd._execution.steps)  # the same random numbers
    return copy


def tolerance_of(fd: FusionDefinition, output: int | None = None) -> float:
    """Half the digits of the least precise floating point type in the definition, or of what an output is made of."""
    behind = set(range(len(fd.recording.tensors))) if output is None else {output}
    for node in reversed(fd.recording.nodes) if output is not None else ():
        if not behind.isdisjoint(node.outputs):
            behind.update(node.inputs)
    dtypes = [fd.recording.tensors[i].type.dtype for i in behind]
    floats = [torch.finfo(getattr(torch, d.value)).eps for d in dtypes if d.category >= Category.FLOAT]
    return max(floats, default=0.0) ** 0.5


def assert_same_as_unsharded(
    fd: FusionDefinition, inputs: Sequence[Any], expected: Sequence[torch.Tensor] | None = None
) -> None:
    """Simulate `fd` on all of its ranks, and compare every output and every replica with the unsharded result.

    `expected` are the results to compare with; without them, the definition runs whole on one rank. Raises
    AssertionError where numbers differ by more than rounding.
    """
    check_type("assert_same_as_unsharded: fd", fd, FusionDefinition, "Pass a definition.")
    if expected is not None:
        count = len(fd.recording.outputs)
        needed = f"a tensor for each of {count} outputs"
        check_entries("assert_same_as_unsharded: expected", expected, torch.Tensor, needed)
        check_int("assert_same_as_unsharded: results expected", len(expected), count, count)
    wanted = expected if expected is not None else unsharded_copy(fd).simulate(inputs)
    found = fd.simulate(inputs, check_replicas=True)
    annotated = bool(fd.recording.annotations)
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        name = fd.recording.tensors[fd.recording.outputs[place]].name
        if a.shape != b.shape:
            raise AssertionError(f"output {name}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
        if annotated:
            name += f", {fd.latest().output_shardings()[place]}"
        assert_close(a, b, tolerance_of(fd, fd.recording.outputs[place]), f"output {name}")


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float, what: str) -> None:
    """Assert that tensors are equal but for rounding, relative to the largest number; exactly, if the type is exact."""
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        wrong = a != b
        if bool(wrong.any()):
            raise AssertionError(f"{what}: {_first(wrong, a, b)}")
        return
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    scale = largest(b)
    same = torch.isclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)
    if not bool(same.all()):
        raise AssertionError(f"{what}: {_first(~same, a, b)}, by more than {tolerance * scale:.1g}")


def _first(wrong: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str:
    """The first element that differs and the number of those that do, as text."""
    place = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} differ"
    return f"element {list(place)} is {a[place].item()}, expected {b[place].item()} ({count})"
