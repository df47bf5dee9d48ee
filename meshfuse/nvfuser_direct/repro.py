"""Scripts that reproduce an execution, and comparison with the same definition without sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.testing._comparison import default_tolerances

from ..compiler import CompiledProgram
from ..definition.seeds import Seed
from ..errors import ArgumentError, caller_line, user_error
from ..executor.spmd import gather_output
from ..kernels.tensors import in_stride_order
from ..runtime.world import World
from ..sharding.data import shard
from .active import definition_of

if TYPE_CHECKING:
    from .definition import Fusion, FusionDefinition


def input_text(value: Any) -> str:
    """Python text for an input like this one: its number, or random elements in its shape, strides and dtype."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    local = getattr(value, "to_local", lambda: value)()
    shape, strides = tuple(local.shape), tuple(local.stride())
    # Integers may be indices, which must be in range.
    bounds = "" if local.dtype.is_floating_point or local.dtype.is_complex else ", low=0, high=2"
    options = f"dtype={local.dtype}, device={str(local.device)!r}{bounds}"
    if local.is_contiguous():
        return f"torch.testing.make_tensor({shape}, {options})"
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = size if local.numel() else 0
    return f"torch.testing.make_tensor(({count},), {options}).as_strided({shape}, {strides})"


_IMPORTS = (
    "import sys", "import meshfuse.nvfuser_direct", "sys.modules['nvfuser_direct'] = meshfuse.nvfuser_direct",
    "import torch", "from nvfuser_direct import FusionDefinition, DataType",
)  # fmt: skip


def script(fd: FusionDefinition, inputs: Sequence[str] | None) -> str:
    """A script that defines `fd` and, given inputs, executes it.

    Without its lines about meshfuse it is one for nvFuser.
    """
    lines = [f"# torch {torch.__version__}, {World.current().size} ranks", *_IMPORTS, repr(fd).rstrip("\n")]
    lines += ["with FusionDefinition() as fd:", "    nvfuser_fusion(fd)", ""]
    if inputs is not None:
        lines += ["inputs = [", *(f"    {text}," for text in inputs), "]", "fd.execute(inputs)", ""]
    return "\n".join(lines)


def unsharded_outputs(fd: FusionDefinition, inputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """This rank's shards of what the definition without annotations gives for the gathered inputs.

    All ranks call it after an execution with these inputs; it draws the same random numbers as that.
    """
    compiled, rank = _ran(fd), World.current().rank
    plain = object.__new__(type(fd))
    plain.__dict__.update(vars(fd))
    plain._annotations, plain._compiled, plain._simulated = {}, {}, {}
    plain._seed, plain._steps = Seed(fd.drawn[0]), {"simulated": fd.drawn[1]}
    results = plain.simulate([_gathered(fd, place, value) for place, value in enumerate(inputs)])
    shardings = compiled.output_shardings()
    return [
        shard(whole, sharding, rank) if rank in sharding.mesh else None
        for whole, sharding in zip(results, shardings, strict=True)
    ]


def _ran(fd: FusionDefinition) -> CompiledProgram:
    return fd.fec.compiled if fd.ran is None else fd.ran


def _gathered(fd: FusionDefinition, place: int, value: Any) -> Any:
    """The global tensor that this rank's argument is a shard of, in the definition's memory order."""
    whole = _whole(fd, place, value)
    if not isinstance(whole, torch.Tensor) or (order := fd.tensors[fd.inputs[place].id].stride_order) is None:
        return whole
    return in_stride_order(whole, list(order))


def _whole(fd: FusionDefinition, place: int, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if (full := getattr(value, "full_tensor", None)) is not None:
        return full()
    compiled, tensor = _ran(fd), fd.inputs[place].id
    if tensor not in fd.annotations:
        return value
    sharding, shape = compiled.sharded.shardings[tensor], compiled.graph.shape(tensor)
    local = value if World.current().rank in sharding.mesh else None
    return gather_output(World.current(), local, sharding, shape, value.dtype, value.device)


def compared(
    fd: FusionDefinition,
    outputs: list[Any],
    inputs: Sequence[Any],
    reference_outputs: Sequence[Any] | None,
    tolerances: Mapping[str, Any],
) -> list[Any]:
    """The outputs, if they equal the reference; None for a reference compares with the definition without sharding.

    Raises ArgumentError for a reference of another form, AssertionError for other numbers.
    """
    expected = unsharded_outputs(fd, inputs) if reference_outputs is None else reference_outputs
    if _kinds(expected) != _kinds(outputs):
        raise user_error(
            "validate: reference_outputs", _kinds(expected), f"a list like the outputs: {_kinds(outputs)}",
            "Pass them in the order of add_output.", caller_line(), ArgumentError,
        )  # fmt: skip
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted, **tolerances)
    return outputs


def _kinds(values: Any) -> str:
    """What a list holds, in words; all classes of tensors are one kind."""
    if not isinstance(values, (list, tuple)):
        return type(values).__name__
    names = ("a tensor" if isinstance(value, torch.Tensor) else repr(value) for value in values)
    return f"[{', '.join(names)}]"


def get_val_tolerances(fusion: Fusion, args: Sequence[Any] = ()) -> list[tuple[float, float]]:
    """(rtol, atol) for every output: those of torch.testing for its dtype."""
    fd = definition_of(fusion, "get_val_tolerances")
    found = (fd.tensors[i].type.dtype for i in fd.outputs)
    return [default_tolerances(getattr(torch, dtype.value)) for dtype in found]


def validate_with_auto_inferred_outputs(fusion: Fusion, fusion_outputs: Sequence[Any], args: Sequence[Any]) -> None:
    """Compare the outputs of the last execution, on these arguments, with the same definition without sharding.

    All ranks call it. Raises AssertionError where they differ.
    """
    wanted = unsharded_outputs(definition_of(fusion, "validate_with_auto_inferred_outputs"), args)
    for found, expected, (rtol, atol) in zip(fusion_outputs, wanted, get_val_tolerances(fusion), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
