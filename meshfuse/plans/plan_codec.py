"""Plans as JSON and back. Only the classes below are read, by their fields: what is stored runs no code.

Values that occur more than once, such as shardings, are written once: a plan of 500 ops is some 100 kB.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from ..costs import Link
from ..dtypes import DataType
from ..mesh import DeviceMesh
from ..ops.values import ScalarRef, TensorRef
from ..placement.factors import Carry, Placement
from ..placement.options import Choice, RunnerUp, Source
from ..reshard.steps import Reordering, Step, StepKind, Window
from ..rewrites.distributed_forms import Blocked, Distributed
from ..rewrites.fuse_mean_variance import Merged, Moments
from ..rewrites.hoist_slices import Picked
from ..rewrites.merge_windows import Joined
from ..rewrites.reassociate_sums import Regrouped
from ..rewrites.sink_pads import Surrounded
from ..rewrites.split_concats import Parted
from ..rewrites.update_in_place import DimSpan, DimSpans, Placed
from ..rewrites.window_views import Shifted, Term
from ..sharding.layout import Split
from ..sharding.value import Sharding

_CLASSES: tuple[type, ...] = (
    Blocked, Carry, Choice, DeviceMesh, Distributed, Joined, Link, Merged, Moments, Step, Parted, Picked, Placed,
    Placement, Regrouped, Reordering, RunnerUp, ScalarRef, Sharding, Shifted, Source, DimSpan, DimSpans, Split,
    Surrounded, TensorRef, Term, Window,
)  # fmt: skip
_ENUMS: tuple[type[enum.Enum], ...] = (DataType, StepKind)
_BY_NAME: dict[str, type] = {kind.__name__: kind for kind in (*_CLASSES, *_ENUMS)}
_PLAIN = (int, float, str, bool, type(None))


class NotStorable(ValueError):
    """A value of a class that plans do not consist of, or a text that is no plan."""


def dump(value: Any) -> str:
    """The value as text. Raises NotStorable for what `load` could not read."""
    writer = _RowWriter()
    root = writer.write(value)
    return json.dumps([root, writer.rows])


def load(text: str) -> Any:
    """The value of a text that `dump` made. Raises NotStorable for any other text."""
    try:
        root, rows = json.loads(text)
        values: list[Any] = []
        for row in rows:
            values.append(_made(row, values))
        return _read(root, values)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise NotStorable(f"no plan: {error}") from error


class _RowWriter:
    """Rows of [class, field, ...]; a field is a plain value, ["t", ...] for a tuple, or ["r", row]."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: dict[Any, int] = {}

    def write(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if type(value) is frozenset:
            return ["f", *map(self.write, sorted(value))]
        if type(value) in (tuple, list):
            return ["t", *map(self.write, value)]
        if type(value) is dict:
            return ["d", *([self.write(key), self.write(entry)] for key, entry in value.items())]
        # By identity as well: equal values of different types are different.
        key = (type(value), value)
        if key not in self._known:
            row = [type(value).__name__, *map(self.write, _fields(value))]
            self._known[key] = len(self.rows)
            self.rows.append(row)
        return ["r", self._known[key]]


def _fields(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    if kind in _ENUMS:
        return (value.name,)
    if kind not in _CLASSES:
        raise NotStorable(f"a {kind.__name__}")
    if isinstance(value, tuple):
        return tuple(value)
    if dataclasses.is_dataclass(value):
        return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return value.__reduce__()[1]


def _made(row: list[Any], values: list[Any]) -> Any:
    name, *fields = row
    kind = _BY_NAME[name]
    read = [_read(field, values) for field in fields]
    if issubclass(kind, enum.Enum):
        return kind[read[0]]
    if kind is DeviceMesh:
        shape, names, ranks, links, flops, memory = read
        return DeviceMesh(shape, names, ranks=ranks, links=links, flops=flops, memory=memory)
    return kind(*read)


def _read(field: Any, values: list[Any]) -> Any:
    if not isinstance(field, list):
        return field
    kind, *entries = field
    if kind == "r":
        return values[entries[0]]
    if kind == "d":
        return {_read(key, values): _read(entry, values) for key, entry in entries}
    if kind == "f":
        return frozenset(_read(entry, values) for entry in entries)
    if kind != "t":
        raise NotStorable(f"no plan: {kind!r}")
    return tuple(_read(entry, values) for entry in entries)
