"""Block-scaled matrix products, and nvFuser's nvfp4 ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtypes import DataType
from ..errors import DtypeError, KernelError, user_error
from ..kernels.table import kernel
from .opdef import Call, Emit, NvfuserEmit, OpDef, Sample
from .promotion import dtype_text
from .rules import DimFactors, Rule, RuleBuilder
from .shape_arithmetic import UNKNOWN, aligned_dims, broadcasts_to, check_ndim, check_positive, check_same_size
from .values import Param, ParamKind, TensorType

K = ParamKind

_SCALED = (
    *(Param(name, K.TENSOR) for name in ("mat1", "mat2", "scale1", "scale2")),
    *(Param(name, K.OPTIONAL_TENSOR, None) for name in ("alpha", "bias", "beta")),
    Param("dtype", K.DTYPE, DataType.BFloat16),
    Param("output_block_scale_size", K.INT, 0),
    Param("output_block_scale_dtype", K.DTYPE, DataType.BFloat16),
    Param("output_gamma", K.BOOL, False),
)


def _scaled_results(call: Call, out: tuple[int, ...]) -> tuple[TensorType, ...]:
    """The types of the product and of the optional results: its blocks' scales, its global scale."""
    made, block = [TensorType(out, call["dtype"])], call["output_block_scale_size"]
    if block:
        check_positive(call.op.name, "output_block_scale_size", block)
        made.append(TensorType((*out[:-1], _blocks(out[-1], block)), call["output_block_scale_dtype"]))
    if call["output_gamma"]:
        made.append(TensorType((), DataType.Float))
    return tuple(made)


def _scaled_infer(call: Call) -> tuple[TensorType, ...]:
    a, b = call.types[:2]
    check_ndim("scaled_mm", "the first operand", a, 2, 2)
    check_ndim("scaled_mm", "the second operand", b, 2, 2)
    check_same_size("scaled_mm", "the contracted dims", a.shape[1], b.shape[0])
    made = _scaled_results(call, (a.shape[0], b.shape[1]))
    if not _packed(call) and len(made) == 1:
        _check_scaling(call, made[0].shape)
    return made


def _check_scaling(call: Call, out: tuple[int, ...]) -> None:
    """Raises DefinitionError unless scales, alpha, beta and bias fit. Not for packed numbers."""
    for name, operand in (("scale1", call.types[0]), ("scale2", call.types[1])):
        _check_scale(name, call.type_of(name), operand)
    for name in ("alpha", "beta"):
        if (t := call.type_of(name)) is not None and any(n not in (1, UNKNOWN) for n in t.shape):
            raise user_error(f"scaled_mm: {name}", str(t), "a tensor of one number", "Multiply the result by it.")
    if (bias := call.type_of("bias")) is not None and not broadcasts_to(bias.shape, out):
        raise user_error("scaled_mm: bias", str(bias), f"a shape that broadcasts to {list(out)}", "Reshape it.")


def _check_scale(name: str, scale: TensorType | None, operand: TensorType) -> None:
    """Raises DefinitionError unless it has one number, or per dim one, one per element or one per equal block."""
    assert scale is not None
    one = scale.ndim < 2 and all(n in (1, UNKNOWN) for n in scale.shape)
    blocks = scale.ndim == 2 and all(map(_in_blocks, operand.shape, scale.shape))
    if not one and not blocks:
        raise user_error(f"scaled_mm: {name}", f"{scale} for {operand}",
                         "one number, or for each dim one per element or per equal block", "Reshape it.")  # fmt: skip


def _in_blocks(n: int, blocks: int) -> bool:
    return UNKNOWN in (n, blocks) or blocks == 1 or (0 < blocks <= n and -(-n // -(-n // blocks)) == blocks)


def _scaled_rule(call: Call) -> Rule:
    """m k, k n -> m n. Scales per row or column follow m and n; k, and a dim with a scale per block, are whole."""
    (a, b), builder = call.types[:2], RuleBuilder()
    if len(call.results) > 1 or not _runs_on_cpu(call):
        return whole_rule(call)
    inner = builder.blocked(a.shape[1])
    scales, shape = call.types[2:4], (a.shape[0], b.shape[1])
    out = tuple(_outer(builder, scales[dim], dim, n) for dim, n in enumerate(shape))
    scale_dims = [_scale_dims(builder, scales[dim], dim, shape[dim], out[dim]) for dim in range(2)]
    given = [(name, t) for name in ("alpha", "bias", "beta") if (t := call.type_of(name)) is not None]
    others = [aligned_dims(t.shape, shape, out) if name == "bias" else ((),) * t.ndim for name, t in given]
    return builder.build([(out[0], inner), (inner, out[1]), *scale_dims, *others], [out])


def _outer(builder: RuleBuilder, scale: TensorType, dim: int, n: int) -> tuple[int, ...]:
    """The factor of a dim of the result: blocked if the scale has one number per block of it."""
    return builder.blocked(n) if scale.ndim == 2 and scale.shape[dim] not in (1, n) else builder.factor(n)


def _scale_dims(builder: RuleBuilder, scale: TensorType, dim: int, n: int, factor: tuple[int, ...]) -> DimFactors:
    """The factors of a scale, which has the result's factor in `dim` if it has a number for each of its n elements."""
    return tuple(
        factor if d == dim and size == n and scale.ndim == 2 else builder.blocked(size)
        for d, size in enumerate(scale.shape)
    )


def _packed(call: Call) -> bool:
    return any(t.dtype is DataType.Float4_e2m1fn for t in call.types)


def _runs_on_cpu(call: Call) -> bool:
    return not _packed(call) and len(call.results) == 1


def _scaled_emit(e: Emit) -> str:
    if not _runs_on_cpu(e.call):
        return _missing_emit(e)
    names = [str(e.operand(name)) for name in ("mat1", "mat2", "scale1", "scale2", "alpha", "bias", "beta")]
    return f"K.scaled_mm({', '.join(names)}, {dtype_text(e.call['dtype'])})"


@kernel
def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    beta: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """alpha * (a * scale_a) @ (b * scale_b) + beta * bias, computed in float32."""
    out = torch.matmul(a.float() * _spread(scale_a, a), b.float() * _spread(scale_b, b))
    out = out if alpha is None else out * alpha
    if bias is not None:
        out = out + (bias if beta is None else bias * beta)
    return out.to(dtype)


def _spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One factor per element, from a scale per tensor, row, column or block."""
    scale = scale.float()
    if scale.ndim != like.ndim:
        return scale
    for d, n in enumerate(like.shape):
        if scale.shape[d] not in (1, n):
            scale = scale.repeat_interleave(-(-n // scale.shape[d]), d).narrow(d, 0, n)
    return scale


def _scaled_samples() -> list[Sample]:
    def t(*shape: int) -> TensorType:
        return TensorType(shape, DataType.Float)

    kinds = {"dtype": DataType.Float}
    return [
        Sample((t(6, 8), t(8, 4), t(6, 1), t(1, 4)), kinds),
        Sample((t(6, 8), t(8, 4), t(6, 2), t(2, 4)), kinds),
        Sample((t(6, 8), t(8, 4), t(), t(), t(), t(4)), kinds),
        Sample((t(6, 8), t(8, 4), t(2, 2), t(2, 2), t(1), t(6, 1), t()), kinds),
    ]


# What only NVIDIA's kernels compute


def whole_rule(call: Call) -> Rule:
    """The rule of an op that needs all operands whole."""
    builder = RuleBuilder()
    tensors = [tuple(map(builder.blocked, t.shape)) for t in (*call.types, *call.results)]
    return builder.build(tensors[: len(call.types)], tensors[len(call.types) :])


def is_nvidia_only(op: OpDef) -> bool:
    """Whether an op is typed and propagated here but does not run on a CPU."""
    return op.emit is _missing_emit


def _missing_emit(e: Emit) -> str:
    return f"K.needs_nvidia({e.call.op.name!r})"


@kernel
def needs_nvidia(op: str) -> torch.Tensor:
    """Raises KernelError: only NVIDIA's kernels read packed 4-bit numbers and swizzled scales."""
    raise user_error(
        f"{op} cannot run here: it needs nvFuser and a GPU with nvfp4 (compute capability 10.0 or later)", "", "",
        "Run the definition with the nvFuser backend on such a GPU, or use matmul or grouped_mm in bfloat16.",
        cls=KernelError,
    )  # fmt: skip


def _scaled_grouped_infer(call: Call) -> tuple[TensorType, ...]:
    a, b = call.types[:2]
    check_ndim(call.op.name, "the first operand", a, 2, 3)
    check_ndim(call.op.name, "the second operand", b, 2, 3)
    return _scaled_results(call, (a.shape[0], b.shape[-1]))


def _scaled_grouped_nvfuser(n: NvfuserEmit) -> Any:
    """By an overload of nvFuser's grouped_mm."""
    call, names = n.call, ("mat1", "mat2", "offsets", "scale1", "scale2")
    options = {name: n.operand(name) for name in ("alpha", "bias", "beta") if n.operand(name) is not None}
    return n.ops.grouped_mm(
        *(n.operand(name) for name in names), **options, dtype=n.dtype(call["dtype"]),
        output_block_scale_size=call["output_block_scale_size"],
        output_block_scale_dtype=n.dtype(call["output_block_scale_dtype"]), output_gamma=call["output_gamma"],
    )  # fmt: skip


def _cutlass_infer(call: Call) -> tuple[TensorType, ...]:
    """[m, k] and [g, k, n] to [m, n]."""
    a, b = call.types[:2]
    check_ndim(call.op.name, "the first operand", a, 2, 2)
    check_ndim(call.op.name, "the second operand", b, 3, 3)
    return (TensorType((a.shape[0], b.shape[2]), call["dtype"]),)


def _blocks(n: int, size: int) -> int:
    return n if n == UNKNOWN else -(-n // size)


def _quantize_infer(call: Call) -> tuple[TensorType, ...]:
    """The numbers in 4 bits, and one float8 scale per block of the last dim."""
    x = call.types[0]
    check_ndim(call.op.name, "the input", x, 1)
    check_positive(call.op.name, "block_size", call["block_size"])
    if x.dtype not in (DataType.Float, DataType.Half, DataType.BFloat16):
        raise user_error(f"{call.op.name}: the input", str(x), "Float, Half or BFloat16", "Cast it to Float.",
                         cls=DtypeError)  # fmt: skip
    scales = (*x.shape[:-1], _blocks(x.shape[-1], call["block_size"]))
    return (TensorType(x.shape, call["dtype"]), TensorType(scales, DataType.Float8_e4m3fn))


def _grouped_quantize_infer(call: Call) -> tuple[TensorType, ...]:
    """As without groups: that each group's scales are padded to tiles of 128 x 4 only affects memory."""
    check_ndim(call.op.name, "the input", call.types[0], 2, 2)
    return _quantize_infer(call)


def _preprocess_infer(call: Call) -> tuple[TensorType, ...]:
    check_ndim(call.op.name, "the input", call.types[0], 2, 2)
    return (call.types[0],)


def _types(*kinds: tuple[tuple[int, ...], DataType]) -> tuple[TensorType, ...]:
    return tuple(TensorType(*kind) for kind in kinds)


_INT, _FP4, _FP8 = DataType.Int32, DataType.Float4_e2m1fn, DataType.Float8_e4m3fn
_ENDS = ((3,), _INT)


def _missing(
    name: str,
    params: tuple[Param, ...],
    infer: Callable[[Call], tuple[TensorType, ...]],
    sample: Sequence[TensorType],
    nvfuser: Callable[[NvfuserEmit], Any] | None = None,
    *,
    about: str,
    scheduler: str = "",
) -> OpDef:
    """An op that is typed and propagated here, and runs with nvFuser on NVIDIA's GPUs only."""
    found = [Sample(tuple(sample))]
    return OpDef(
        name, params, infer, whole_rule, _missing_emit, samples=lambda: found, nvfuser=nvfuser,
        about=f"{about}; needs NVIDIA's kernels", scheduler=scheduler,
    )  # fmt: skip


_INPUT, _GLOBAL = Param("input", K.TENSOR), Param("global_scale", K.OPTIONAL_TENSOR, None)
_OFFSETS = tuple(Param(name, K.TENSOR) for name in ("input_offsets", "output_offsets"))
_BLOCK, _PACKED = Param("block_size", K.INT, 16), Param("dtype", K.DTYPE, _FP4)
_MATS = tuple(Param(name, K.TENSOR) for name in ("mat1", "mat2", "offsets"))
_CUTLASS = ("mat1", "mat2", "scale1", "scale2", "alpha", "problem_sizes", "expert_offsets", "sf_offsets")
OPS = (
    OpDef(
        "scaled_mm",
        _SCALED,
        _scaled_infer,
        _scaled_rule,
        _scaled_emit,
        samples=_scaled_samples,
        uses_library=True,
        scheduler="expr_eval",
        about="matrix product of block-scaled operands; `fd.ops.scaled_mm` gives (product, scales, global scale)",
    ),
    _missing(
        "scaled_grouped_mm",
        (*_MATS, *_SCALED[2:]),
        _scaled_grouped_infer,
        _types(((8, 32), _FP4), ((3, 32, 16), _FP4), _ENDS, ((8, 2), _FP8), ((3, 2, 16), _FP8)),
        _scaled_grouped_nvfuser,
        about="grouped product of block-scaled operands",
        scheduler="expr_eval",
    ),
    _missing(
        "cutlass_nvfp4_grouped_mm",
        (*(Param(n, K.TENSOR) for n in _CUTLASS), _SCALED[7]),
        _cutlass_infer,
        _types(
            ((8, 32), _FP4),
            ((3, 32, 16), _FP4),
            ((8, 2), _FP8),
            ((3, 16, 2), _FP8),
            ((3,), DataType.Float),
            ((3, 3), _INT),
            _ENDS,
            _ENDS,
        ),
        about="grouped nvfp4 product",
    ),
    _missing(
        "nv_block_quantize",
        (_INPUT, _GLOBAL, Param("swizzle_block_scales", K.BOOL, False), _BLOCK, _PACKED),
        _quantize_infer,
        _types(((8, 32), DataType.Float)),
        about="nvfp4 numbers and their blocks' scales",
    ),
    _missing(
        "nv_grouped_block_quantize",
        (_INPUT, *_OFFSETS, _GLOBAL, _BLOCK, _PACKED),
        _grouped_quantize_infer,
        _types(((8, 32), DataType.Float), _ENDS, _ENDS),
        about="the same, group by group",
    ),
    _missing(
        "preprocess_grouped_matmul_input_sf",
        (_INPUT, *_OFFSETS),
        _preprocess_infer,
        _types(((8, 4), _FP8), _ENDS, _ENDS),
        about="scales in the order that the grouped product reads",
    ),
)
