"""Checks of what a user passes to the calls of a definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ..argument_checks import as_int
from ..dtypes import Category, DataType, from_torch, scalar_dtype
from ..errors import MeshfuseError, SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh
from ..ops.binding import described
from ..ops.shape_arithmetic import check_fits
from ..ops.values import TensorType
from ..scalars import python_cast
from ..sharding.value import MOST_DIMS

_LARGEST = 2**63 - 1
_NUMBERS: tuple[Any, ...] = (int, float, complex)
# Not sizes in an order, though some have a length and ints in them.
_NO_LISTS = (str, bytes, bytearray, Set, Mapping)


def named(line: SourceLine, name: Any, what: str) -> SourceLine:
    """The line of a tensor of this name; itself where there is none. Raises DefinitionError for what is no text."""
    if name is None:
        return line
    if not isinstance(name, str) or not name:
        raise user_error(f"{what}: name", shown(name), "a text, or None", 'Pass name="layers.0.weight".', line)
    return replace(line, name=name)


def checked_sizes(given: Any, line: SourceLine) -> tuple[int, ...]:
    """Sizes of an input tensor, -1 for open ones. Raises DefinitionError for anything else."""
    is_list = not isinstance(given, _NO_LISTS) and hasattr(given, "__len__") and hasattr(given, "__iter__")
    try:
        _check_count("define_tensor", len(given) if is_list else 0, line)
        found = tuple(map(as_int, given)) if is_list else (None,)
    except TypeError:  # a tensor of no dims, a TensorView
        found = (None,)
    if any(n is None or not -1 <= n <= _LARGEST for n in found):
        raise user_error(
            "define_tensor: shape", described(given), "a list of ints >= -1, one per dim",
            "Give every dim's size, -1 where the arguments decide it; fd.from_pytorch takes an example tensor.", line,
        )  # fmt: skip
    return found  # type: ignore[return-value]


def _check_count(what: str, dims: int, line: SourceLine | None = None) -> None:
    if dims > MOST_DIMS:
        raise user_error(f"{what}: more dims than a tensor has", str(dims), f"at most {MOST_DIMS}",
                         "Merge some of them.", line)  # fmt: skip


def check_contiguity(given: Any, line: SourceLine) -> None:
    """nvFuser's `contiguity`, which changes nothing. Raises DefinitionError for a dtype in its place."""
    if given is None or isinstance(given, (bool, list, tuple)):
        return
    raise user_error("define_tensor: contiguity", described(given), "True, False or a list of them",
                     "Leave it out; a type goes by name: dtype=mf.DataType.Half.", line)  # fmt: skip


def are_strides(contiguity: Any) -> bool:
    """Whether strides were passed as contiguity, as in nvFuser's second form."""
    return isinstance(contiguity, (list, tuple)) and any(type(c) is int for c in contiguity)


def checked_dtype(what: str, dtype: Any, line: SourceLine | None) -> DataType:
    """A DataType from nvFuser's or torch's name of it. Raises DefinitionError for anything else."""
    try:
        found = from_torch(dtype)
        if found is DataType.Null:
            raise ValueError
        return found
    except (ValueError, TypeError):
        raise user_error(
            f"{what}: dtype",
            shown(dtype),
            "an mf.DataType or a torch.dtype",
            "Pass mf.DataType.Float, for example.",
            line,
        ) from None


def checked_order(order: Any, strides: Any, shape: Sequence[int], line: SourceLine) -> tuple[int, ...] | None:
    """nvFuser's stride order (the place of each dim, 0 the fastest): as given, or from strides; None for row-major.

    Raises DefinitionError where it does not order the dims.
    """
    if order is None and strides is None:
        return None
    given, what = (order, "stride_order") if order is not None else (strides, "strides")
    found = tuple(map(as_int, given)) if isinstance(given, (list, tuple)) else (None,)
    if (
        None in found
        or len(found) != len(shape)
        or (order is not None and sorted(_wrapped(found)) != [*range(len(shape))])
    ):
        raise user_error(
            f"define_tensor: {what}",
            shown(given),
            f"{len(shape)} ints, one per dim" + (", each of 0 (the fastest) up once" if order is not None else ""),
            "Correct it or leave it out.",
            line,
        )
    result = _wrapped(found) if order is not None else _order_of(found)
    return result if result != tuple(reversed(range(len(shape)))) else None


def _wrapped(order: Sequence[Any]) -> tuple[int, ...]:
    return tuple(n + len(order) if n < 0 else n for n in order)


def _order_of(strides: Sequence[Any]) -> tuple[int, ...]:
    by_stride = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    return tuple(len(strides) - 1 - by_stride.index(d) for d in range(len(strides)))


def plain_number(value: Any) -> Any:
    """A Python number for one of numpy's, or of a class of its own such as an IntEnum; anything else as it is.

    Raises DefinitionError for an int of more than 64 bits.
    """
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    for kind in _NUMBERS:
        if isinstance(value, kind) and type(value) not in (kind, bool):
            value = kind(value)
    if type(value) is int and not -_LARGEST - 1 <= value <= _LARGEST:
        raise user_error("a number is too large", shown(value), "an int of 64 bits", "Pass a float.", caller_line())
    return value


def check_results(op: str, types: Sequence[TensorType]) -> None:
    """Raises DefinitionError for results of type Null, and for results larger than any memory."""
    for found in types:
        _check_count(op, found.ndim)
        if found.dtype is DataType.Null:
            raise user_error(f"{op}: dtype", "DataType.Null", "a type of elements", "Pass DataType.Float, for example.")
        check_fits(op, found)


def checked_number(what: str, value: Any, dtype: DataType | None, line: SourceLine) -> Any:
    """The value as a Python number of the dtype's kind. Raises DefinitionError where the dtype cannot hold it."""
    number = plain_number(value)
    if not isinstance(number, (bool, int, float, complex)):
        raise user_error(what, f"{shown(value)} ({type(value).__name__})", "a number", "Pass a Python number.", line)
    if not number_fits(number, dtype):
        assert dtype is not None
        raise user_error(what, shown(number), f"a number that {dtype.name} holds", "Pass a wider dtype.", line)
    return number if dtype is None else python_cast(number, dtype)


def number_fits(number: Any, dtype: DataType | None) -> bool:
    """Whether a scalar of the dtype can be this number, perhaps rounded; a bool counts as an int."""
    if dtype is None:
        return True
    small = not isinstance(number, int) or number in _range_of(dtype)
    return small and scalar_dtype(number).category <= dtype.category


def _range_of(dtype: DataType) -> range:
    """The integers that are taken for scalars of a type: its own, and those of 64 bits for others."""
    if dtype is DataType.Byte:
        return range(256)
    bits = 8 * dtype.itemsize if dtype.category is Category.INTEGER else 64
    return range(-(2 ** (bits - 1)), 2 ** (bits - 1))


def checked_mesh(mesh: Any, line: SourceLine) -> DeviceMesh:
    """A mesh from one of meshfuse's or torch's, or from ranks. Raises DefinitionError for anything else."""
    if isinstance(mesh, DeviceMesh):
        return mesh.plain()
    try:
        if mesh is None or isinstance(mesh, str):
            raise TypeError
        return mesh_of_torch(mesh)
    except MeshfuseError as error:
        error.where = line
        raise
    except (TypeError, ValueError):
        raise user_error("mesh", shown(mesh), "an mf.DeviceMesh or a torch DeviceMesh", "Pass a mesh.", line) from None


def mesh_of_torch(mesh: Any) -> DeviceMesh:
    """A mesh from a `torch.distributed.DeviceMesh`, or from ranks."""
    ranks = getattr(mesh, "mesh", mesh)
    return DeviceMesh(ranks, getattr(mesh, "mesh_dim_names", None))
