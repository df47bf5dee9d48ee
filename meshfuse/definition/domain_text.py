"""The sizes of loop axes, and nvFuser's text of a tensor: `T0_g_float[iS0{2}, ideviceIdx.x1{4}]`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import DataType
from ..mesh import STREAM, DeviceMesh
from .loop import Leaf, LoopDomain
from .recording import Recording

_TYPES = {
    DataType.Double: "double", DataType.Float: "float", DataType.Half: "__half", DataType.BFloat16: "__bfloat",
    DataType.Int: "int64_t", DataType.Int32: "int", DataType.Bool: "bool",
    DataType.ComplexFloat: "std::complex<float>", DataType.ComplexDouble: "std::complex<double>",
}  # fmt: skip
_BOUND = {None: "S", "DIDx": "deviceIdx.x", "DIDy": "deviceIdx.y", "DIDz": "deviceIdx.z", STREAM: "streamIdx"}


@dataclass(frozen=True, slots=True)
class Extents:
    """What is known about the sizes of a tensor's loop axes, from its shape (-1 where open) and mesh."""

    domain: LoopDomain
    shape: Sequence[int]
    mesh: DeviceMesh | None

    def known(self, leaf: Leaf) -> int | None:
        """The size of an axis, if the definition tells it."""
        if leaf.size is not None:
            return leaf.size
        dim, others = self.dim(leaf), self.others(leaf)
        return None if dim is None or self.shape[dim] < 0 or others is None else -(-self.shape[dim] // others)

    def dim(self, leaf: Leaf) -> int | None:
        """The tensor's dim that the axis is, or is part of; None for reductions and for axes over several dims."""
        roots = [root for root in self.domain.roots if not root[0].reduction]
        return next((d for d, root in enumerate(roots) if any(other is leaf for other in root)), None)

    def others(self, leaf: Leaf) -> int | None:
        """The product of the other parts of the axis' dim; None where one of them is open, or the axis has no dim."""
        root = next((root for root in self.domain.roots if any(other is leaf for other in root)), None)
        if root is None:
            return None
        sizes = [other.size or self._bound(other) for other in root if other is not leaf]
        return None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]

    def _bound(self, leaf: Leaf) -> int | None:
        return self.mesh.axis_size(leaf.axis) if self.mesh is not None and leaf.axis in self.mesh.names else None


@dataclass(frozen=True, slots=True, repr=False)
class TensorDomain:
    """A tensor's loop domain, as `tv.domain()` returns it; `first` is the number of its first axis."""

    extents: Extents
    first: int

    def __repr__(self) -> str:
        axes = (self.axis(leaf, place) for place, leaf in enumerate(self.extents.domain.loop))
        return f"[{', '.join(axes)}]"

    def axis(self, leaf: Leaf, place: int) -> str:
        """One axis as text: kind, what it is bound to, number, and size (? where arguments decide)."""
        size = self.extents.known(leaf)
        kind = "r" if leaf.reduction else "b" if size == 1 else "i"
        bound = _BOUND.get(leaf.axis, f"deviceIdx.{leaf.axis}")
        return f"{kind}{bound}{self.first + place}{{{'?' if size is None else size}}}"

    def is_tensor(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        """Whether arguments decide one of the sizes."""
        return any(self.extents.known(leaf) is None for leaf in self.extents.domain.loop)

    def definition(self) -> None:
        """None: no op makes a domain."""

    def uses(self) -> list[Any]:
        """Empty: no op reads one."""
        return []


def tensor_text(recording: Recording, tensor: int, domain: TensorDomain) -> str:
    """A tensor's number, place (g for arguments and results, l for others), type and domain, as text."""
    place = "g" if tensor in recording.outputs or tensor in recording.input_tensors() else "l"
    dtype, mesh = recording.tensors[tensor].type.dtype, domain.extents.mesh
    where = "" if mesh is None else f" ({mesh!r})"
    return f"T{tensor}_{place}_{_TYPES.get(dtype, dtype.value)}{domain}{where}"
