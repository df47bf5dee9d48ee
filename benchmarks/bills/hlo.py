"""The collectives of an optimized HLO module, counted as rings: bytes per device on the wire."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# HLO is counted as if it moved what the program says: a bfloat16 that the compiler chose counts as the float32 it is.
ITEMSIZE = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "bf16": 4,
    "f16": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_PASSES = ("bitcast", "copy", "reshape", "transpose", "get-tuple-element", "convert")


@dataclass(slots=True)
class Instruction:
    """One line of a computation: `rest` is its operands and attributes."""

    name: str
    shape: str
    op: str
    rest: str
    operands: list[str] = field(default_factory=list)
    root: bool = False

    def called(self, attribute: str) -> str | None:
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None


Computation = dict[str, Instruction]


def read(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    found: dict[str, Computation] = {}
    entry, here = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and " = " not in line.split("{")[0]:
            here = found.setdefault(head.group(1), {})
            entry = head.group(1) if line.startswith("ENTRY") else entry
            continue
        made = _INSTRUCTION.match(line)
        if made and here is not None:
            name, shape, op, rest = made.groups()
            operands = _NAME.findall(rest.split(")", 1)[0])
            here[name] = Instruction(name, shape, op, rest, operands, line.lstrip().startswith("ROOT"))
    return found, entry


def wire_bytes(text: str, devices: int) -> float:
    """Bytes per device of a module's collectives, those in loops as often as they run.

    Raises ValueError for a loop with collectives that runs nobody knows how often.
    """
    computations, entry = read(text)
    return _bytes_of(computations, entry, devices)


def _bytes_of(computations: dict[str, Computation], name: str, devices: int) -> float:
    total, here = 0.0, computations[name]
    for made in here.values():
        kind = made.op.removesuffix("-start")
        if kind in KINDS:
            total += sum(_wire(kind, made, part, devices) for part in _parts(kind, computations, here, made))
        for inner in _inner(made):
            total += _times(made, _bytes_of(computations, inner, devices))
    return total


def _inner(made: Instruction) -> Iterator[str]:
    """Computations that an instruction runs; those of reductions and fusions hold no collectives."""
    if made.op == "while":
        yield made.called("body") or ""
    elif made.op == "call":
        yield made.called("to_apply") or ""
    elif made.op == "conditional":
        yield from _NAME.findall(re.search(r"branch_computations=\{(.*?)\}", made.rest).group(1))  # type: ignore[union-attr]


def _times(made: Instruction, wire: float) -> float:
    if not wire or made.op != "while":
        return wire
    count = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', made.rest)
    if count is None:
        raise ValueError(f"a loop with collectives of unknown length: {made.name}")
    return wire * int(count.group(1))


# Bytes of one array that an instruction makes, and whether each device keeps a slice of it only.
Part = tuple[float, bool]


def _parts(kind: str, computations: dict[str, Computation], here: Computation, made: Instruction) -> Iterator[Part]:
    """The arrays that a collective makes, several where the compiler has combined some."""
    shapes = _SHAPE.findall(made.shape)
    for place, (dtype, dims) in enumerate(shapes):
        size = ITEMSIZE[dtype] * math.prod(map(int, filter(None, dims.split(","))))
        scattered = False
        if kind == "all-reduce":
            single = len(shapes) == 1
            holders = [made] if single else [i for i in here.values() if _is_element(i, made.name, place)]
            scattered = bool(holders) and all(_is_scattered(computations, here, holder) for holder in holders)
        yield size, scattered


def _is_element(made: Instruction, of: str, place: int) -> bool:
    return made.op == "get-tuple-element" and of in made.operands and f"index={place}" in re.split(r"[,\s]+", made.rest)


def _wire(kind: str, made: Instruction, part: Part, devices: int) -> float:
    size, scattered = part
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", made.rest.split("source_target_pairs=")[1].split("}}")[0] + "}")
        return size * sum(a != b for a, b in pairs) / devices
    n = _group_size(made.rest, devices)
    if kind == "all-reduce":
        return (1 if scattered else 2) * (n - 1) / n * size
    return (n - 1) * size if kind == "reduce-scatter" else (n - 1) / n * size


def _group_size(rest: str, devices: int) -> int:
    """Devices per group: `replica_groups=[groups,size]<=[...]`, `{{0,1},{2,3}}`, `mesh['a'=4,'b'=2] {'a'}`, `{}`: all.

    Raises ValueError for a form that is not known.
    """
    text = rest.split("replica_groups=", 1)[1] if "replica_groups=" in rest else "{}"
    if text.startswith("mesh["):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", text.split("]", 1)[0]))
        named = text.split("]", 1)[1].split("}", 1)[0]
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named)
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    grid = re.match(r"\[\d+,(\d+)\]", text)
    if grid:
        return int(grid.group(1))
    listed = re.match(r"\{\{([\d,]+)\}", text)
    if listed is None and not text.startswith("{}"):
        raise ValueError(f"replica_groups of an unknown form: {text[:80]}")
    return len(listed.group(1).split(",")) if listed else devices


def _is_scattered(computations: dict[str, Computation], here: Computation, made: Instruction) -> bool:
    """True for an all-reduce of which each device keeps a slice only: it means a reduce-scatter."""
    users = [other for other in here.values() if made.name in other.operands]
    return bool(users) and not made.root and all(_takes_a_slice(computations, here, made.name, user) for user in users)


def _takes_a_slice(computations: dict[str, Computation], here: Computation, name: str, user: Instruction) -> bool:
    if user.op == "dynamic-slice":
        return user.operands[0] == name
    if user.op == "fusion":
        inside = computations[user.called("calls") or ""]
        places = [f"parameter({i})" for i, operand in enumerate(user.operands) if operand == name]
        taken = [i for i in inside.values() if i.op == "parameter" and f"parameter({i.rest.split(')')[0]})" in places]
        return all(_is_scattered(computations, inside, parameter) for parameter in taken)
    return user.op in _PASSES and _is_scattered(computations, here, user)
