"""Why tensors of a model lie as they do: what `model.explain` says."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SourceLine, shown, user_error
from ..report.explain import explain_all, explain_tensor
from .patterns import matches, nearest
from .steps import Half, Step


def explained(steps: Mapping[str, Step], name: str | None, line: SourceLine) -> str:
    """Why the tensors of a name lie as they do, in all programs of these steps; without a name a table of all.

    steps: by what their programs' titles begin with. Raises DefinitionError for a name that no tensor has.
    """
    found, halves = list[str](), _halves(steps)
    if name is None:
        found += [f"{head}attention\n{_rows(step.attention)}" for head, step in steps.items() if step.attention]
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


def _halves(steps: Mapping[str, Step]) -> dict[str, Half]:
    """The programs, by what to call them."""
    titles = ("forward", "backward", "backward of weights")
    return {f"{head}{title}": half for head, step in steps.items()
            for title, half in zip(titles, step.halves, strict=False)}  # fmt: skip


def _rows(attention: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {how}" for name, how in attention.items())


def _is_called(tensor: str, name: str) -> bool:
    """Whether a tensor is the parameter of this name, or made by the module of this name."""
    return bool(tensor) and (matches(name, tensor) or matches(name, tensor.rpartition(".")[0]))
