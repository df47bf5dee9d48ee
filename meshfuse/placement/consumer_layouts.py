"""Carrying wishes back: from what is wanted of an op's results to what is wanted of its operands."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ..sharding import layout as lay
from ..sharding.layout import WHOLE
from ..sharding.value import Sharding
from .factors import Layouts, layouts_of, merged, representable, tensor_layouts
from .growth import Kind
from .operand_layouts import Available

# How many different shardings of one tensor are kept as wanted.
ASKED = 3


@functools.lru_cache(maxsize=1 << 14)
def wishes(kind: Kind, wanted: tuple[Available, ...], free: tuple[bool, ...], plainly: bool) -> tuple[Available, ...]:
    """What is wanted of an op's operands, once the op has added what it needs to give what is wanted of its results.

    `wanted` is what is wanted of the op's tensors (operands, then results) before; `free[i]` tells whether operand i
    takes wishes: annotated tensors and inputs do not. `plainly`: what annotated results ask for is wanted as it is,
    too, without what else operands are split over, and so on back from there.
    """
    known = list(wanted)
    results = known[kind.read :]
    for turn, asked in enumerate(itertools.islice(itertools.zip_longest(*results), ASKED)):
        made = [new or old[0] for new, old in zip(asked, results, strict=True)]
        alone = [_layouts(kind, made, [()] * len(known))] if plainly and (turn or any(kind.said)) else []
        for layouts in (_layouts(kind, made, known), *alone):
            for operand, place in enumerate(kind.operands):
                if free[place]:
                    known[place] = _asked(kind, operand, known[place], layouts)
    return tuple(known[: kind.read])


def _layouts(kind: Kind, results: Sequence[Sharding], wanted: Sequence[Available]) -> Layouts:
    rule, call = kind.rule, kind.call
    votes = [layouts_of(rule, rule.results[j], call.results[j].shape, sharding.dims)
             for j, sharding in enumerate(results) if sharding.mesh == kind.mesh]  # fmt: skip
    votes += [layouts_of(rule, rule.operands[j], call.types[j].shape, wanted[place][0].dims)
              for j, place in enumerate(kind.operands)
              if wanted[place] and wanted[place][0].mesh == kind.mesh]  # fmt: skip
    votes.append((WHOLE,) * len(rule.factors))
    return representable(rule, merged(votes))


def _asked(kind: Kind, operand: int, wanted: Available, layouts: Layouts) -> Available:
    """The wishes with one more: it replaces the first one if it refines it, else comes last, up to `ASKED`."""
    dims = tensor_layouts(kind.rule, kind.rule.operands[operand], kind.call.types[operand].shape, layouts)
    if dims is None or wanted[0].mesh != kind.mesh:
        return wanted
    asked = Sharding(wanted[0].mesh, dims)
    if all(lay.is_prefix(a, b) for a, b in zip(wanted[0].dims, dims, strict=True)):
        return (asked, *(w for w in wanted[1:] if w != asked))
    return (*wanted, asked) if asked not in wanted and len(wanted) < ASKED else wanted
