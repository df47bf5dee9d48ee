"""Annotations of gradients: where the user gives none, a gradient lies as its primal does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SourceLine
from ..mesh import DeviceMesh
from ..sharding.layout import WHOLE, Layout
from .annotation import Annotation
from .loop import LoopDomain

if TYPE_CHECKING:
    from .annotated import AnnotatedDefinition


def of_gradients(fd: AnnotatedDefinition, given: Mapping[int, Annotation]) -> dict[int, Annotation]:
    """Annotations for outputs that are gradients: those of their primals, unless they have some of their own.

    A primal that is an input without an annotation is whole on every rank; if there is one mesh only, on that.
    """
    found: dict[int, Annotation] = {}
    meshes, inputs = {a.mesh for a in given.values()}, set(fd.input_tensors())
    for grad in set(fd.outputs).intersection(fd.primals).difference(given):
        primal = fd.primals[grad]
        said = given.get(primal)
        if said is not None and not said.is_streamed:
            found[grad] = _like(
                fd, grad, said.mesh, said.named(), said.line, f"{_as(fd, primal)} annotated at {said.line}"
            )
        elif said is None and len(meshes) == 1 and primal in inputs:
            made = fd.tensors[grad]
            whole = [WHOLE] * made.type.ndim
            found[grad] = _like(fd, grad, next(iter(meshes)), whole, made.line, f"{_as(fd, primal)} never annotated")
    return found


def _as(fd: AnnotatedDefinition, primal: int) -> str:
    return f"laid out as {fd.tensors[primal].label}, whose gradient it is,"


def _like(
    fd: AnnotatedDefinition, tensor: int, mesh: DeviceMesh | None, dims: Sequence[Layout], line: SourceLine,
    implied: str,
) -> Annotation:  # fmt: skip
    domain = LoopDomain.of_layouts(dims, fd.reduction_flags(tensor))
    return Annotation(line, domain, fd.tensors[tensor].line.label(f"t{tensor}"), mesh, stated=True, implied=implied)
