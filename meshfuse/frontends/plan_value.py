"""A plan for a model as a value: printed, saved, and passed to `mf.parallelize`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

from ..errors import SourceLine, caller_line, user_error
from ..layer_folding import layer_pattern
from ..mesh import DeviceMesh
from ..number_text import duration, number
from ..sharding.layout import Split
from ..whole_files import write_whole

Spec = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """What was not taken: in words what it is, its seconds and bytes (None where it was not planned), and why."""

    what: str
    seconds: float
    memory: float | None
    why: str

    def __str__(self) -> str:
        held = "" if self.memory is None else f", {number(self.memory)} bytes"
        least = "" if self.memory is not None else "at least "
        return f"{self.what}: {least}{duration(self.seconds)}{held}: {self.why}"


class Again(Protocol):
    """Plans again, under roles of axes."""

    def __call__(self, roles: Mapping[str, str] | None, microbatches: int | None, line: SourceLine) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a model's parameters and inputs lie, and how a step goes; pass it to `mf.parallelize` as `plan`.

    parameters, inputs: by full name, and by name of an argument, a list with an entry per dim. Those of a pipeline lie
        on the ranks of their stage.
    seconds: the modelled time of a step.
    memory: the most bytes that a rank holds of weights, gradients, an optimiser's states and activations, as modelled.
    idle, moving, peak: the part of it in which ranks wait for stages; seconds of it in which tensors move inside of a
        stage, nothing overlapped; the part of the mesh's operations per second that it makes use of.
    held: by rank of the pipeline's axis the bytes that it holds.
    loads: by stage the seconds of its work on a micro-batch.
    pipeline_axis, schedule, virtual, microbatches, cut: as of `mf.Pipeline`; "" for no stages.
    recomputes: whether the activations inside of each layer are computed again in the backward.
    experts: the modules whose experts rows of tokens are sent to.
    gap: by which part another place of weights and inputs might take less time with these stages, 0 for proven to be
        best; None for not known.
    alternatives: what else was considered.
    max_memory: the bound that it was made for.
    Printing it shows annotations to paste.
    """

    axes: tuple[tuple[str, int], ...]
    parameters: Mapping[str, Spec]
    inputs: Mapping[str, Spec]
    seconds: float
    memory: float
    idle: float = 0.0
    moving: float = 0.0
    peak: float = 0.0
    held: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    pipeline_axis: str = ""
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 1
    cut: tuple[str, ...] = ()
    recomputes: bool = False
    experts: tuple[str, ...] = ()
    gap: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    max_memory: float | None = None
    _again: Again | None = field(default=None, compare=False, repr=False)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.cut) + 1

    def priced(self, roles: Mapping[str, str], microbatches: int | None = None) -> Plan:
        """The best plan where axes have these roles, with its seconds and memory; by the same prices.

        roles: by axis "data", "fully sharded", "tensor", "sequence", "expert" or "pipeline"; others are open.
        microbatches: how many; None for as many as are best.

        Raises DefinitionError for axes and roles that do not exist, and for a plan that was read from a file.
        """
        if self._again is None:
            raise user_error("plan.priced: a plan that was read from a file", "no model", "what mf.plan has returned",
                             "Call mf.plan(..., roles=).", caller_line())  # fmt: skip
        return self._again(roles, microbatches, caller_line())

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
        kinds = ", ".join(f"{name}: {self._kind(name)}" for name, size in self.axes if size > 1)
        parts = f"; {self.microbatches} micro-batches" if self.microbatches > 1 else ""
        return f"{kinds}{parts}{'; layers computed again' if self.recomputes else ''}"

    def _kind(self, axis: str) -> str:
        if axis == self.pipeline_axis:
            return f"pipeline of {self.stages} stages ({self.schedule})"
        weights = {name: spec for name, spec in self.parameters.items() if len(spec) > 1}
        rows = any(spec and axis in axes_in(spec[:1]) for spec in self.inputs.values())
        inside = [spec for name, spec in weights.items() if name.rpartition(".")[0] in self.experts]
        if any(axis in axes_in(spec[:1]) for spec in inside):
            return "data and experts" if rows else "experts"
        is_cut = 2 * sum(axis in axes_in(spec) for spec in weights.values()) >= max(len(weights), 1)
        if rows:
            return "fully sharded" if is_cut else "data"
        if any(axis in axes_in(spec) for spec in self.inputs.values()):
            return "sequence and tensor" if is_cut else "sequence"
        return "tensor" if any(axis in axes_in(spec) for spec in weights.values()) else "idle"

    def save(self, path: Any) -> None:
        """Write the plan as JSON."""
        made = {name: getattr(self, name) for name in _KEPT}
        made |= {"axes": dict(self.axes), "alternatives": [asdict(each) for each in self.alternatives]}
        made["format"] = _FORMAT
        write_whole(Path(path), json.dumps(made, indent=1).encode())

    @classmethod
    def load(cls, path: Any) -> Plan:
        """Read a plan that `save` has written. Raises DefinitionError for another file."""
        line = caller_line()
        try:
            read = _checked(json.loads(Path(path).read_text()))
            for part in ("parameters", "inputs"):
                read[part] = {name: tuple(spec) for name, spec in read[part].items()}
            read |= {name: tuple(read[name]) for name in ("held", "loads")}
            read |= {"axes": tuple(read["axes"].items()), "cut": tuple(read["cut"]), "experts": tuple(read["experts"])}
            return cls(**{**read, "alternatives": tuple(Alternative(**each) for each in read["alternatives"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise user_error(
                f"plan: {path}", f"{type(error).__name__}: {error}", "what this version's Plan.save has written",
                "Plan anew with mf.plan, and save that.", line,
            ) from None  # fmt: skip

    def check_mesh(self, mesh: DeviceMesh, line: SourceLine) -> None:
        """Raises DefinitionError where a mesh has other axes than the plan is for."""
        if dict(self.axes) != dict(zip(mesh.names, mesh.shape, strict=True)):
            raise user_error("plan: made for another mesh", str(mesh), f"one with the axes {dict(self.axes)}",
                             "Plan for this mesh.", line)  # fmt: skip

    def __str__(self) -> str:
        rows = [f"    {name!r}: {list(spec)}," for name, spec in _folded(self.parameters).items()]
        inputs = ", ".join(f"{name!r}: {list(spec)}" for name, spec in self.inputs.items())
        others = [f"    {each}" for each in self.alternatives]
        return "\n".join([
            self.family, "plan={", *rows, "}", f"inputs={{{inputs}}}", *self._said(),
            f"a step takes {duration(self.seconds)} modelled, and a rank holds {number(self.memory)} bytes",
            f"{self.idle:.0%} idle, {duration(self.moving)} of moving tensors, {self.peak:.0%} of peak operations",
            *self._of_stages(), self._proof(), *(["not taken:", *others] if others else []),
        ])  # fmt: skip

    def _said(self) -> list[str]:
        """What else to pass to `mf.parallelize`."""
        found = []
        if self.pipeline_axis:
            virtual = f", virtual={self.virtual}" if self.virtual > 1 else ""
            said = f"{self.pipeline_axis!r}, {self.schedule!r}, {self.microbatches}{virtual}, cut={list(self.cut)}"
            found.append(f"pipeline=mf.Pipeline({said})")
        if self.recomputes:
            found.append(f"checkpoint={self.checkpoint!r}")
        return found

    def _of_stages(self) -> list[str]:
        """What each rank of the pipeline's axis holds and does."""
        if len(self.held) < 2:
            return []
        held, loads = (", ".join(map(say, each)) for say, each in ((number, self.held), (duration, self.loads)))
        return [f"bytes held by the ranks of {self.pipeline_axis}: {held}", f"work of a micro-batch by stage: {loads}"]

    @property
    def checkpoint(self) -> str | None:
        """The pattern of the modules that are computed again; None for none."""
        layers = [pattern for pattern in map(_pattern, self.parameters) if "*" in pattern]
        return layers[0][: layers[0].index("*") + 1] if self.recomputes and layers else None

    def _proof(self) -> str:
        if self.gap is None:
            return "where weights and inputs lie is the best that was found"
        return (
            f"where weights and inputs lie is within {self.gap:.2%} of the best with these stages"
            if self.gap
            else ("where weights and inputs lie is proven to be best with these stages")
        )


# What `save` writes, and of which types that is read; a number of another format has other words in it.
_FORMAT = 1
_KEPT = tuple(each.name for each in fields(Plan) if each.name != "_again")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "axes": dict, "parameters": dict, "inputs": dict, "held": list, "loads": list, "cut": list, "experts": list,
    "alternatives": list, "pipeline_axis": str, "schedule": str, "virtual": int, "microbatches": int,
    "recomputes": bool, "gap": (int, float, NoneType), "max_memory": (int, float, NoneType),
}  # fmt: skip
_INSIDE: Mapping[str, type | tuple[type, ...]] = {
    "axes": int, "parameters": list, "inputs": list, "held": (int, float), "loads": (int, float), "cut": str,
    "experts": str, "alternatives": dict,
}  # fmt: skip


def _checked(read: Any) -> dict[str, Any]:
    """What a file says, by name. Raises ValueError for other names than `save` writes, and for other types."""
    if not isinstance(read, dict) or read.pop("format", None) != _FORMAT:
        raise ValueError(f"no plan of format {_FORMAT}")
    if other := set(read) ^ set(_KEPT):
        raise ValueError(f"{sorted(other)} missing or not known")
    for name, value in read.items():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, _TYPES.get(name, (int, float))) or not all(
            isinstance(each, _INSIDE[name]) for each in inside
        ):
            raise ValueError(f"{name} is {value!r}"[:80])
    return read


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
    """Specs by pattern of layers, as most parameters that it fits lie; behind them those that lie otherwise.

    Of several entries that fit a parameter `mf.parallelize` takes the last that is not whole.
    """
    of: dict[str, Counter[Spec]] = {}
    for name, spec in specs.items():
        of.setdefault(_pattern(name), Counter())[_hashable(spec)] += 1
    most = {pattern: counts.most_common(1)[0][0] for pattern, counts in of.items() if _is_foldable(counts)}
    first: dict[str, Spec] = {}
    for name, spec in specs.items():
        folds = _hashable(spec) == most.get(_pattern(name))
        first.setdefault(_pattern(name) if folds else name, spec)
    return {name: first[name] for name in sorted(first, key=lambda name: name != _pattern(name) in first)}


def _is_foldable(counts: Counter[Spec]) -> bool:
    """Whether a pattern may stand for most: an entry behind it changes nothing where it says that one is whole."""
    _, *others = (spec for spec, _ in counts.most_common())
    return all(any(spec) for spec in others)


def _pattern(name: str) -> str:
    """A name with the first number of a layer left open, also where the name begins with it."""
    return layer_pattern(f"model.{name}").removeprefix("model.")


def _hashable(spec: Spec) -> Spec:
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)
