"""A matrix product per group of rows, of columns or of inner indices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from ..dtypes import DataType
from ..errors import user_error
from ..kernels.table import kernel
from ..sharding.layout import Runs
from .nvfuser_lowering import is_whole
from .opdef import Call, Emit, NvfuserEmit, OpDef, Partial, Sample, ToTorch
from .rules import Rule, RuleBuilder
from .shape_arithmetic import check_dtypes, check_ndim, check_same_size
from .values import Param, ParamKind, TensorType
from .vjp import each, transposed

K = ParamKind

# The indices that grouped_mm may group: the rows of a 2-D @ 3-D, the columns of a 3-D @ 2-D, inner ones of 2-D @ 2-D.
_Grouped = Literal["rows", "columns", "inner"]
_GROUPED: dict[tuple[int, ...], _Grouped] = {(2, 3): "rows", (3, 2): "columns", (2, 2): "inner"}
# The operand that has them, and its dim.
_PLACES: dict[_Grouped, tuple[int, int]] = {"rows": (0, 0), "columns": (1, 1), "inner": (0, 1)}


def _kind(call: Call) -> _Grouped:
    """Which indices are grouped: "rows", "columns" or "inner"."""
    dims = tuple(t.ndim for t in call.types[:2])
    if dims not in _GROUPED:
        raise user_error(
            "grouped_mm: operands",
            f"{call.types[0]} and {call.types[1]}",
            "2-D and 3-D, 3-D and 2-D, or two 2-D",
            "Use matmul for a product without groups.",
        )
    return _GROUPED[dims]


def _grouped_infer(call: Call) -> tuple[TensorType, ...]:
    kind, (a, b, offsets) = _kind(call), call.types
    check_ndim("grouped_mm", "the offsets", offsets, 1, 1)
    check_same_size("grouped_mm", "the contracted dims", a.shape[-1], b.shape[-2])
    check_dtypes(Call(call.op, call.args, (a, b)))
    groups = {"rows": b.shape[0], "columns": a.shape[0], "inner": offsets.shape[0]}[kind]
    check_same_size("grouped_mm", "the numbers of groups", groups, offsets.shape[0])
    shape = (a.shape[-2], b.shape[-1])
    return (TensorType((offsets.shape[0], *shape) if kind == "inner" else shape, a.dtype),)


def _grouped_rule(call: Call) -> Rule:
    """m k, g k n -> m n, reduced over k and g: a rank multiplies the rows of its groups."""
    kind, (a, b, offsets), builder = _kind(call), call.types, RuleBuilder()
    rows, columns = builder.factor(a.shape[-2]), builder.factor(b.shape[-1])
    inner = builder.reduction(a.shape[-1])
    ends = (builder.blocked(offsets.shape[0]),)
    group = builder.factor(offsets.shape[0]) if kind == "inner" else builder.reduction(offsets.shape[0])
    left = (group, rows, inner) if kind == "columns" else (rows, inner)
    right = (group, inner, columns) if kind == "rows" else (inner, columns)
    return builder.build([left, right, ends], [(group, rows, columns) if kind == "inner" else (rows, columns)])


def _grouped_emit(e: Emit) -> str:
    kind = _kind(e.call)
    operand, dim = _PLACES[kind]
    along = e.operand_runs(operand)[dim]
    groups = e.result_runs(0)[0] if kind == "inner" else e.operand_runs(1 if kind == "rows" else 0)[0]
    return f"K.grouped_{kind}({', '.join(e.operands)}, {along}, {groups})"


def _grouped_flops(call: Call) -> float:
    """Every row, column or inner index takes part in the product of one group."""
    a, b = call.types[:2]
    return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _grouped_samples() -> list[Sample]:
    def sample(a: tuple[int, ...], b: tuple[int, ...], ends: Sequence[int]) -> Sample:
        types = (
            TensorType(a, DataType.Float),
            TensorType(b, DataType.Float),
            TensorType((len(ends),), DataType.Int32),
        )
        return Sample(types, values={2: ends})

    return [
        sample((8, 6), (3, 6, 4), (2, 2, 8)),
        sample((3, 8, 6), (6, 5), (1, 4, 5)),
        sample((4, 8), (8, 6), (3, 5, 8)),
    ]


@kernel
def grouped_rows(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, rows: Runs, groups: Runs) -> torch.Tensor:
    """[m, k] and [g, k, n] to [m, n]: each row times its group's matrix; zero if another rank has that matrix."""
    out = a.new_zeros(a.shape[0], b.shape[-1])
    bounds = _bounds(offsets, rows)
    for place, group in enumerate(_members(groups)):
        part = slice(bounds[group], bounds[group + 1])
        out[part] = torch.matmul(a[part], b[place])
    return out


@kernel
def grouped_columns(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, columns: Runs, groups: Runs
) -> torch.Tensor:
    """[g, m, k] and [k, n] to [m, n]: each column times its group's matrix."""
    return grouped_rows(b.transpose(0, 1), a.transpose(1, 2), offsets, columns, groups).transpose(0, 1)


@kernel
def grouped_inner(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, inner: Runs, groups: Runs) -> torch.Tensor:
    """[m, k] and [k, n] to [g, m, n]: one product for each group of inner indices."""
    spans = list(pairwise(_bounds(offsets, inner)))
    made = [torch.matmul(a[:, slice(*spans[g])], b[slice(*spans[g])]) for g in _members(groups)]
    return torch.stack(made) if made else a.new_zeros(0, a.shape[0], b.shape[1])


def _bounds(offsets: torch.Tensor, runs: Runs) -> list[int]:
    """The bounds of each group among the indices in `runs`; group g ends before the global index offsets[g]."""
    ends = [0, *offsets.tolist()]
    return [sum(max(0, min(end, b) - a) for a, b in runs) for end in ends]


def _members(runs: Runs) -> list[int]:
    return [i for a, b in runs for i in range(a, b)]


def _grouped_nvfuser(n: NvfuserEmit) -> Any:
    """Counts offsets within the rank's rows (columns, inner indices). The rank must hold every group."""
    a, b, offsets = n.call.types
    operand, dim = _PLACES[_kind(n.call)]
    runs = n.operand_runs(operand)[dim]
    stacked = [place for place, t in ((0, a), (1, b)) if t.ndim == 3]
    if len(runs) != 1 or any(not is_whole(n, place, 0) for place in stacked):
        raise ToTorch("the rank has some of the groups, or rows in pieces")
    if n.result_shapes[0] and n.call.results[0].ndim == 3 and n.result_shapes[0][0] != offsets.shape[0]:
        raise ToTorch("the rank has some of the groups")
    if is_whole(n, operand, dim):
        return n.plain()
    start, stop = runs[0]
    inside = n.ops.clamp(n.ops.sub(n.operands[2], start), n.val(0), n.val(stop - start))
    return n.plain(offsets=n.ops.cast(inside, n.dtype(offsets.dtype)))


_GROUPED_BWD = each(
    mat1=lambda b: b.ops.grouped_mm(b.grad, transposed(b, b["mat2"]), b["offsets"]),
    mat2=lambda b: b.ops.grouped_mm(transposed(b, b["mat1"]), b.grad, b["offsets"]),
)
OPS = (
    OpDef(
        "grouped_mm",
        tuple(Param(name, K.TENSOR) for name in ("mat1", "mat2", "offsets")),
        _grouped_infer,
        _grouped_rule,
        _grouped_emit,
        Partial.EACH,
        _grouped_flops,
        _grouped_samples,
        nvfuser=_grouped_nvfuser,
        vjp=_GROUPED_BWD,
        uses_library=True,
        scheduler="expr_eval",
        about="a product per group of rows (or columns), which end at `offsets`; with scales as `scaled_grouped_mm`",
    ),
)
