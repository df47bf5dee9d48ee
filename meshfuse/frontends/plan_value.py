"""A plan for a model as a value: printed, saved, and passed to `mf.parallelize`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SourceLine, caller_line, user_error
from ..layer_folding import layer_pattern
from ..mesh import DeviceMesh
from ..number_text import duration, number
from ..sharding.layout import Split
from ..whole_files import write_whole

Spec = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a model's parameters and inputs lie; pass it to `mf.parallelize` as `plan`.

    parameters, inputs: by full name, and by name of an argument, a list with an entry per dim.
    seconds: the modelled time of a step.
    memory: the most bytes that a rank holds of weights, gradients and activations, as modelled.
    Printing it shows annotations to paste.
    """

    axes: tuple[tuple[str, int], ...]
    parameters: Mapping[str, Spec]
    inputs: Mapping[str, Spec]
    seconds: float
    memory: float

    def spec(self, name: str) -> Spec:
        """How a parameter, or an argument, lies. Raises DefinitionError for a name that the plan has not."""
        found = {**self.inputs, **self.parameters}
        if name not in found:
            raise user_error(
                "plan: no parameter or argument of this name", repr(name), f"such as {list(found)[:3]}", "",
                caller_line(),
            )  # fmt: skip
        return found[name]

    @property
    def family(self) -> str:
        """What kind of parallelism each axis has, in words."""
        return ", ".join(f"{name}: {self._kind(name)}" for name, size in self.axes if size > 1)

    def _kind(self, axis: str) -> str:
        cuts = [spec for spec in self.parameters.values() if axis in axes_in(spec)]
        if any(spec and axis in axes_in(spec[:1]) for spec in self.inputs.values()):
            return "fully sharded" if cuts else "data"
        if any(axis in axes_in(spec) for spec in self.inputs.values()):
            return "sequence and tensor" if cuts else "sequence"
        return "tensor" if cuts else "idle"

    def save(self, path: Any) -> None:
        """Write the plan as JSON."""
        made = {"axes": dict(self.axes), "parameters": dict(self.parameters), "inputs": dict(self.inputs),
                "seconds": self.seconds, "memory": self.memory}  # fmt: skip
        write_whole(Path(path), json.dumps(made, indent=1).encode())

    @classmethod
    def load(cls, path: Any) -> Plan:
        """Read a plan that `save` has written. Raises DefinitionError for another file."""
        line = caller_line()
        try:
            read = json.loads(Path(path).read_text())
            specs = [{n: tuple(spec) for n, spec in read[part].items()} for part in ("parameters", "inputs")]
            axes, costs = tuple(read["axes"].items()), (float(read["seconds"]), float(read["memory"]))
            return cls(axes, specs[0], specs[1], costs[0], costs[1])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise user_error(f"plan: {path}", f"{type(error).__name__}: {error}", "a file that Plan.save has written",
                             "", line) from None  # fmt: skip

    def check_mesh(self, mesh: DeviceMesh, line: SourceLine) -> None:
        """Raises DefinitionError where a mesh has other axes than the plan is for."""
        if dict(self.axes) != dict(zip(mesh.names, mesh.shape, strict=True)):
            raise user_error("plan: made for another mesh", str(mesh), f"one with the axes {dict(self.axes)}",
                             "Plan for this mesh.", line)  # fmt: skip

    def __str__(self) -> str:
        rows = [f"{name!r}: {list(spec)}," for name, spec in _folded(self.parameters).items()]
        inputs = ", ".join(f"{name!r}: {list(spec)}" for name, spec in self.inputs.items())
        tail = f"a step takes {duration(self.seconds)} modelled, and a rank holds {number(self.memory)} bytes"
        return "\n".join([self.family, "plan={", *(f"    {row}" for row in rows), "}", f"inputs={{{inputs}}}", tail])


def axes_in(spec: Iterable[Any]) -> set[str]:
    """The names of the axes in a spec, or in several."""
    found: set[str] = set()
    for entry in spec:
        if isinstance(entry, Split):
            found |= {entry.axis} if entry.axis else set()
        elif isinstance(entry, str):
            found.add(entry)
        elif isinstance(entry, (list, tuple)):
            found |= axes_in(entry)
    return found


def _folded(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Specs by pattern, where all parameters that a pattern of layers fits lie alike."""
    of: dict[str, set[str]] = {}
    for name, spec in specs.items():
        of.setdefault(layer_pattern(name), set()).add(str(spec))
    return {layer_pattern(name) if len(of[layer_pattern(name)]) == 1 else name: spec for name, spec in specs.items()}
