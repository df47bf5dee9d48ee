"""nvFuser's CUTLASS kernels. They need its CUDA library; here they raise an error that says so."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import caller_line, user_error


class NoKernelError(NotImplementedError):
    """meshfuse has no such kernel."""


def _missing(name: str, instead: str) -> NoReturn:
    error = user_error(
        f"nvf_cutlass.{name}", f"a call of nvFuser's CUTLASS kernel on {name.split('_')[0]} operands",
        "NVIDIA's nvfuser_direct and a GPU of compute capability 10", instead, caller_line(),
    )  # fmt: skip
    raise NoKernelError(str(error))


def grouped_mm(*operands: Any, **options: Any) -> NoReturn:
    _missing("grouped_mm", "Use fd.ops.grouped_mm.")


def mxfp8_scaled_mm(*operands: Any, **options: Any) -> NoReturn:
    _missing("mxfp8_scaled_mm", "Use fd.ops.scaled_mm.")


def nvfp4_scaled_mm(*operands: Any, **options: Any) -> NoReturn:
    _missing("nvfp4_scaled_mm", "Use fd.ops.scaled_mm on dequantized operands.")


def nvfp4_scaled_mm_blockscale(*operands: Any, **options: Any) -> NoReturn:
    _missing("nvfp4_scaled_mm_blockscale", "Use fd.ops.scaled_mm on dequantized operands.")


def nvfp4_scaled_grouped_mm(*operands: Any, **options: Any) -> NoReturn:
    _missing("nvfp4_scaled_grouped_mm", "Use fd.ops.grouped_mm on dequantized operands.")
