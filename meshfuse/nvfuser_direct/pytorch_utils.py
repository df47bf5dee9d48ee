"""Element types of torch and nvFuser, and facts about the CUDA device that benchmarks ask for."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..dtypes import DataType, from_torch, scalar_dtype
from ..errors import DefinitionError, SourceLine, caller_line, shown, user_error

_SCALARS = {bool: DataType.Bool, int: DataType.Int, float: DataType.Double, complex: DataType.ComplexDouble}


def torch_dtype_to_nvfuser_dtype(dtype: Any) -> DataType:
    """The DataType of a torch.dtype or Python number type. Raises ValueError for a type that has none."""
    return _SCALARS[dtype] if dtype in _SCALARS else from_torch(dtype)


def nvfuser_dtype_to_torch_dtype(dtype: DataType) -> torch.dtype:
    """The torch.dtype of a DataType. Raises ValueError for Null, and for types that this torch does not have."""
    found = getattr(torch, dtype.value, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: found {shown(dtype)}, needed a type that torch {torch.__version__} has")
    return found


def python_scalar_to_nvfuser_dtype(a: bool | int | float | complex) -> DataType:
    """The DataType of a Python number."""
    return scalar_dtype(a)


# nvFuser's names, and torch's for the same properties.
_PROPERTIES: Mapping[str, str] = {
    "gpu_name": "name",
    "gpu_compute_capability_major": "major",
    "gpu_compute_capability_minor": "minor",
    "gpu_gmem_bytes": "total_memory",
    "gpu_sm_count": "multi_processor_count",
    "gpu_max_threads_per_block": "max_threads_per_block",
    "gpu_max_threads_per_sm": "max_threads_per_multi_processor",
    "gpu_smem_bytes_per_block": "shared_memory_per_block",
    "gpu_regs_per_block": "regs_per_multiprocessor",
    "gpu_clock_rate_khz": "clock_rate",
    "gpu_l2_bytes": "L2_cache_size",
    "gpu_mem_clock_khz": "memory_clock_rate",
    "gpu_mem_bus_width": "memory_bus_width",
}
_PEAK = "gpu_peak_bandwidth_gbps"


class DeviceError(DefinitionError, OSError):
    """There is no CUDA device to ask."""


class NoDeviceProperties(dict[str, Any]):
    """What `DEVICE_PROPERTIES` is without a CUDA device: false, with a value for every key.

    nvFuser has None there, and its benchmarks read entries as they are imported; with these they can be.
    """

    def __init__(self) -> None:
        super().__init__({**dict.fromkeys(_PROPERTIES, 0), "gpu_name": "no CUDA device", _PEAK: math.nan})

    def __bool__(self) -> bool:
        return False


def check_device(what: str, do: str, line: SourceLine) -> None:
    """Raises DeviceError without a CUDA device."""
    if not torch.cuda.is_available():
        raise user_error(f"{what}: there is no CUDA device", do=do, where=line, cls=DeviceError)


def get_device_properties() -> dict[str, Any]:
    """The current CUDA device in nvFuser's words; 0 for what this torch does not tell.

    Raises DeviceError without a device.
    """
    check_device("get_device_properties", "pytorch_utils.DEVICE_PROPERTIES is false then.", caller_line())
    return _in_nvfusers_words(torch.cuda.get_device_properties(torch.cuda.current_device()))


def _in_nvfusers_words(device: Any) -> dict[str, Any]:
    found = {name: getattr(device, own, 0) for name, own in _PROPERTIES.items()}
    # Two transfers per clock; kHz and bits to GB/s. Where torch does not tell them, a share of nan is nan.
    peak = 2 * found["gpu_mem_bus_width"] * found["gpu_mem_clock_khz"] / 8e6
    return found | {_PEAK: peak or math.nan}


def __getattr__(name: str) -> Any:
    """`DEVICE_PROPERTIES`: false without a CUDA device.

    It is looked up when it is used, so that an import starts no CUDA.
    """
    if name != "DEVICE_PROPERTIES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return get_device_properties() if torch.cuda.is_available() else NoDeviceProperties()


def retry_on_oom_or_skip_test(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for tests: where memory runs out, empty the cache and try again, and then skip."""

    @functools.wraps(func)
    def retried(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:
            pass  # what the traceback holds is freed when this block ends
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            import pytest

            pytest.skip(f"out of memory, twice: {error}")

    return retried
