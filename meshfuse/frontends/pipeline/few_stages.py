"""Stages that do the same, as one: which stage of a model stands for which, when programs are made without being run.

The principle is that of classes of ranks (`lowering.rank_classes`), along the pipeline's axis. Stages between the first
and the last that have equal layers in a row, whose weights lie alike, differ in names and in which ranks they are on. A
model with the layers of one stage of each kind is captured, and a stage of it stands for all of its kind. That is right
if tensors cross borders to neighbours alone, and what each stage sends is what the next one takes; `fit` says whether.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..automatic.few_layers import FewLayers, layer_kinds
from ..plans import ModulePlan
from .assignment import Assignment
from .borders import Borders, Crossing


@dataclass(frozen=True, slots=True)
class FewStages:
    """kept: the stages that stand for others, in order. stands: by stage the place in `kept` of the one for it.

    layers: those of the kept stages, with which the model is captured.
    """

    kept: tuple[int, ...]
    stands: tuple[int, ...]
    layers: FewLayers
    cuts: tuple[str, ...]
    owners: Mapping[str, tuple[int, ...]]

    def borders(self, found: Sequence[Borders]) -> list[Borders]:
        """Of all stages, what crosses their borders."""
        if len(self.kept) == len(self.stands):
            return list(found)
        return [_moved(found[place], stage) for stage, place in enumerate(self.stands)]


def all_stages(assignment: Assignment) -> FewStages:
    """Each stage for itself."""
    every = tuple(range(assignment.schedule.stages))
    return FewStages(every, every, FewLayers((), ()), assignment.cuts, assignment.owners)


def few_stages(module: nn.Module, assignment: Assignment, plan: ModulePlan) -> FewStages:
    """The stages of a model that stand for all; all of them where cuts are not between layers of one list."""
    kinds, stages = _kinds(module, plan), assignment.schedule.stages
    names = list(kinds)
    if stages < 4 or not {*assignment.cuts} <= {*names}:
        return all_stages(assignment)
    starts = [0, *map(names.index, assignment.cuts), len(names)]
    rows = [names[a:b] for a, b in itertools.pairwise(starts)]
    firsts: dict[Hashable, int] = {}
    of = [stage if stage in (0, stages - 1) else firsts.setdefault(tuple(kinds[name] for name in row), stage)
          for stage, row in enumerate(rows)]  # fmt: skip
    kept = sorted(set(of))
    stays = {name for stage in kept for name in rows[stage]}
    layers = FewLayers(tuple(names), tuple(i if name in stays else 0 for i, name in enumerate(names)))
    owners = {name: tuple(kept.index(s) for s in held if s in kept) for name, held in assignment.owners.items()}
    return FewStages(tuple(kept), tuple(map(kept.index, of)), layers, tuple(rows[s][0] for s in kept[1:]), owners)


def _kinds(module: nn.Module, plan: ModulePlan) -> dict[str, Hashable]:
    """By layer what tells it apart, with how its weights lie."""
    lies: dict[str, list[Hashable]] = {}
    names = layer_kinds(module)
    for name, parameter in module.named_parameters():
        layer = next((layer for layer in names if name.startswith(f"{layer}.")), "")
        lies.setdefault(layer, []).append((name.removeprefix(layer), str(plan.spec(name, parameter.ndim))))
    return {name: (kind, tuple(lies.get(name, ()))) for name, kind in names.items()}


def fit(few: FewStages, found: Sequence[Borders]) -> bool:
    """Whether stages may stand for others: each hands its neighbours what these take, and nothing goes farther."""
    if len(few.kept) == len(few.stands):
        return True
    if any(abs(t - c.source) != 1 for borders in found for c in borders.sent for t in c.targets):
        return False
    pairs = itertools.pairwise(few.stands)
    return all(
        [_type(c) for c in found[a].given(back=False)] == [_type(c) for c in found[b].taken(back=False)]
        and [_type(c) for c in found[b].given(back=True)] == [_type(c) for c in found[a].taken(back=True)]
        for a, b in pairs
    )


def _type(crossing: Crossing) -> object:
    return crossing.shape, crossing.dtype


def _moved(borders: Borders, stage: int) -> Borders:
    """What crosses the borders of a stage, where another one stands for it."""
    sent = [replace(c, source=stage, targets=(stage + (-1 if c.back else 1),)) for c in borders.sent]
    received = [replace(c, source=stage + (1 if c.back else -1), targets=(stage,)) for c in borders.received]
    return Borders(tuple(received), tuple(sent))
