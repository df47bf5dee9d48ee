"""Shardy's passes on a program's text, and the bill of the collectives that they put in.

The passes run in this process through jaxlib's MLIR bindings; nothing of jax is imported. Bytes are counted as for our
own bills: per rank, collectives as rings, the mean over the ranks. A dim that its axes do not divide is counted with
the elements that exist, not with padding.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import sdy, stablehlo

# Propagation with its priorities; the reshards that each op needs, as collectives; then all-reduces that are sliced
# become reduce-scatters. (`sdy-propagation-pipeline` holds the same propagation, but goes
# on to change annotations of inputs and outputs that do not divide or use a part of an axis, which is no reshard.)
PIPELINE = (
    "builtin.module(sdy-import-pipeline,sdy-user-priority-propagate,func.func(sdy-sharding-constraint-to-reshard,"
    "sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives),canonicalize)"
)
# An axis or a part of one: (name, product of the more major parts, size).
Axis = tuple[str, int, int]
Dims = tuple[tuple[Axis, ...], ...]

_AXIS = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')
_SHARDING = re.compile(r"<@mesh, \[(.*?)\](?:, replicated=\{.*?\})?(?:, unreduced=\{.*?\})?>")
_STEP = re.compile(r"(%\w+) = \"?sdy\.(all_\w+|reduce_scatter|collective_permute|reshard)\"? (.*?)(%\w+)(.*)")
_TYPE = re.compile(r": tensor<((?:\d+x)*)([a-z]+)(\d+)>")
_ARGUMENT = re.compile(r"(%arg\d+): tensor<[^>]*>(?: \{sdy\.sharding = #sdy\.sharding(<@mesh, \[.*?\].*?>)\})?")


class Unsaid(Exception):
    """The passes leave communication out that they do not say: the program cannot be compared."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective: among how many ranks, the layout before and after, the tensor's elements, bytes per rank."""

    kind: str
    ways: int
    dims: Dims
    numel: int
    wire: float


@dataclass(frozen=True, slots=True)
class Window:
    """Where a part of a result comes from: result index i of dim d is operand index i * steps[d] + starts[d]."""

    operand: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What Shardy made of a program: its text, its collectives and the layouts of its outputs."""

    text: str
    steps: tuple[Step, ...]
    outputs: tuple[Dims, ...]

    @property
    def wire(self) -> float:
        """Bytes per rank."""
        return sum(step.wire for step in self.steps)


@functools.cache
def _context() -> ir.Context:
    context, known = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(known)
    context.append_dialect_registry(known)
    sdy.register_dialect(context)
    stablehlo.register_dialect(context)
    context.load_all_available_dialects()
    context.enable_multithreading(False)
    return context


def passed(text: str, pipeline: str = PIPELINE) -> str:
    """The text after the passes."""
    with _context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        passmanager.PassManager.parse(pipeline).run(module.operation)
        return str(module)


def partitioned(text: str) -> Partitioned:
    """Run the passes and count."""
    found = passed(text)
    assert "sdy.reshard" not in found, found
    sizes = {name: int(n) for name, n in re.findall(r'"(\w+)"=(\d+)', found[: found.index("func.func")])}
    head = next(line for line in found.splitlines() if "@main" in line)
    known = {name: _dims(text, sizes) for name, text in _ARGUMENT.findall(head)}
    steps, same = [], set()
    for line in found[found.index("@main") :].splitlines()[1:]:
        made = re.match(r"\s*(%\w+) = ", line)
        if made is None:
            continue
        step = _STEP.search(line)
        known[made[1]] = _dims(line, sizes)
        if step is not None and step[2] != "all_slice" and step.groups()[1:] not in same:
            same.add(step.groups()[1:])  # equal collectives are one
            steps.append(_step(step[2], step[3], known[step[4]], known[made[1]], line, sizes))
        elif step is None:
            _check_even(line, known, known[made[1]])
            steps += _windows(line, known, known[made[1]], sizes)
    returned = re.findall(r"%\w+", next(line for line in found.splitlines() if line.strip().startswith("return")))
    return Partitioned(found, tuple(steps), tuple(known[name] for name in returned))


def _axes(text: str, sizes: dict[str, int]) -> tuple[Axis, ...]:
    return tuple((name, int(pre or 1), int(part or sizes[name])) for name, pre, part in _AXIS.findall(text))


def _dims(text: str, sizes: dict[str, int]) -> Dims:
    """The last sharding in a line, dim by dim; no dims where there is none."""
    found = _SHARDING.findall(text)
    return tuple(_axes(dim, sizes) for dim in re.findall(r"\{(.*?)\}", found[-1])) if found else ()


def _ways(axes: tuple[Axis, ...]) -> int:
    return math.prod(size for _, _, size in axes)


def _step(kind: str, listed: str, src: Dims, dst: Dims, line: str, sizes: dict[str, int]) -> Step:
    """One collective; `listed` are the axes that it names."""
    shape, _, bits = _TYPE.findall(line)[-1]
    numel, itemsize = math.prod(int(n) for n in shape.split("x") if n), max(int(bits) // 8, 1)
    over, ways = math.prod(map(_ways, dst)), _ways(_axes(listed, sizes))
    local = numel / over
    sent = {
        "all_gather": local * (ways - 1) / ways,
        "reduce_scatter": local * (ways - 1),
        "all_reduce": 2 * local * (ways - 1) / ways,
        "all_to_all": local * (ways - 1) / ways,
        "collective_permute": local * _moved(src, dst, sizes) if kind == "collective_permute" else 0.0,
    }
    return Step(kind, ways, dst, numel, sent[kind] * itemsize)


def _moved(src: Dims, dst: Dims, sizes: dict[str, int]) -> float:
    """The part of the ranks that need another block than they hold."""
    ranks = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    src = src or ((),) * len(dst)
    return sum(_block(src, rank, sizes) != _block(dst, rank, sizes) for rank in ranks) / len(ranks)


def _block(dims: Dims, rank: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    """Which block of each dim a rank holds."""
    out = []
    for axes in dims:
        place = 0
        for name, pre, size in axes:
            place = place * size + rank[name] // (sizes[name] // (pre * size)) % size
        out.append(place)
    return tuple(out)


_SHAPED = re.compile(r"stablehlo\.(reshape|broadcast_in_dim|gather)\b.*? : \((.*?)\) -> (tensor<.*?>)")


def _check_even(line: str, known: dict[str, Dims], dst: Dims) -> None:
    """Raises Unsaid for a reshape, broadcast or look-up with a dim that its axes do not divide, and for a reshape
    that Shardy has no rule for, which it lets go from any sharding to any other.

    Their results do not follow from the shards without communication, of which the text says nothing.
    """
    found = _SHAPED.search(line)
    if found is None:
        return
    names = re.findall(r"%\w+", line)[1:]
    shapes = [_shape(text)[0] for text in found[2].split(", ")]
    pairs = [*zip((known.get(name, ()) for name in names), shapes, strict=False), (dst, _shape(found[3])[0])]
    uneven = any(n % _ways(axes) for dims, shape in pairs for axes, n in zip(dims, shape, strict=False))
    ways = {math.prod(map(_ways, dims)) for dims, _ in pairs}
    if uneven or (found[1] == "reshape" and len(ways) > 1):
        raise Unsaid(line)


# windows ----------------------------------------------------------------------------------------------------

_WINDOWED = re.compile(r"stablehlo\.(slice|pad|concatenate) (.*?)(?: \{sdy.*?\})? : \((.*?)\) -> (tensor<.*?>)")


def _windows(line: str, known: dict[str, Dims], dst: Dims, sizes: dict[str, int]) -> list[Step]:
    """What a slice, pad or concatenate of a sharded dim sends.

    Shardy leaves these ops on the shards and has no collective for the elements that cross their borders. Whoever
    lowers them has to send each rank at least what it lacks: that much is counted.
    """
    found = _WINDOWED.search(line)
    if found is None:
        return []
    (shape, bits), sent = _shape(found[4]), 0.0
    for window in _sources(found[1], found[2], [_shape(text)[0] for text in found[3].split(", ")]):
        sent += _lacking(window, known.get(window.operand, ()), dst, shape, sizes)
    numel = math.prod(shape)
    return [Step(found[1], math.prod(sizes.values()), dst, numel, sent * max(bits // 8, 1))] if sent else []


def _shape(text: str) -> tuple[tuple[int, ...], int]:
    """The sizes and the bits per element of a type."""
    dims, _, bits = re.findall(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>", text)[0]
    return tuple(int(n) for n in dims.split("x") if n), int(bits)


def _sources(kind: str, text: str, shapes: list[tuple[int, ...]]) -> list[Window]:
    names = re.findall(r"%\w+", text)
    ones = (1,) * len(shapes[0])
    if kind == "slice":
        bounds = [[*map(int, part.split(":"))] for part in re.findall(r"\d+:\d+(?::\d+)?", text)]
        steps = tuple(b[2] if len(b) > 2 else 1 for b in bounds)
        return [Window(names[0], shapes[0], tuple(b[0] for b in bounds), steps)]
    if kind == "pad":
        low = re.findall(r"low = \[(.*?)\]", text)[0]
        return [Window(names[0], shapes[0], tuple(-int(n) for n in low.split(",")), ones)]
    dim, place, out = int(re.findall(r"dim = (\d+)", text)[0]), 0, []
    for name, shape in zip(names, shapes, strict=True):
        out.append(Window(name, shape, tuple(-place if d == dim else 0 for d in range(len(shape))), ones))
        place += shape[dim]
    return out


def _lacking(window: Window, src: Dims, dst: Dims, shape: tuple[int, ...], sizes: dict[str, int]) -> float:
    """Elements of the operand that a rank needs for its block of the result and does not hold: the mean over ranks."""
    ranks = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    src, dst, total = src or ((),) * len(shape), dst or ((),) * len(shape), 0
    for rank in ranks:
        needed = [
            {i * step + start for i in block} & set(range(n))
            for block, start, step, n in zip(
                _indices(dst, shape, rank, sizes), window.starts, window.steps, window.shape, strict=True
            )
        ]
        held = _indices(src, window.shape, rank, sizes)
        total += math.prod(map(len, needed)) - math.prod(len(a & b) for a, b in zip(needed, held, strict=True))
    return total / len(ranks)


def _indices(dims: Dims, shape: tuple[int, ...], rank: dict[str, int], sizes: dict[str, int]) -> list[set[int]]:
    """The indices that a rank holds of each dim: chunks of equal size, the last ones shorter."""
    out = []
    for place, axes, n in zip(_block(dims, rank, sizes), dims, shape, strict=True):
        chunk = -(-n // _ways(axes))
        out.append(set(range(place * chunk, min(n, (place + 1) * chunk))))
    return out
