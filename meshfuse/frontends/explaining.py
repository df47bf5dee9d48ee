"""Why tensors of a model lie as they do: what `model.explain` says."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SourceLine, shown, user_error
from ..report.explain import explain_all, explain_tensor
from .patterns import matches, nearest
from .steps import Half


def explained(halves: Mapping[str, Half], attention: Mapping[str, str], name: str | None, line: SourceLine) -> str:
    """Why the tensors of a name lie as they do, in all of these programs; without a name a table of all.

    halves: by title. attention: by name of an attention in words how it lies, under context parallelism.

    Raises DefinitionError for a name that no tensor has.
    """
    found = list[str]()
    if name is None and attention:
        found.append("\n".join(["attention", *(f"{at}: {how}" for at, how in attention.items())]))
    for title, half in halves.items():
        compiled = half.fd.latest()
        if name is None:
            found.append(f"{title}\n{explain_all(compiled)}")
        for tensor in compiled.graph.tensors:
            if name is not None and _is_called(tensor.line.name, name):
                found.append(f"{title}: {explain_tensor(compiled, tensor.id)}")
    if not found:
        names = [t.line.name for half in halves.values() for t in half.fd.latest().graph.tensors]
        raise user_error(
            "explain: no tensor of this name", shown(name), f"such as {nearest(str(name), names)}", "", line
        )
    return "\n\n".join(found)


def _is_called(tensor: str, name: str) -> bool:
    """Whether a tensor is the parameter of this name, or made by the module of this name."""
    return bool(tensor) and (matches(name, tensor) or matches(name, tensor.rpartition(".")[0]))
