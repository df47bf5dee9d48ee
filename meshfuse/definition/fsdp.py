"""What a user says about fully sharded weights, of a model or of a definition, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..argument_checks import as_int, texts
from ..errors import caller_line, shown, user_error


@dataclass(frozen=True, slots=True, init=False)
class FSDP:
    """How parameters are fully sharded; `fsdp="dp"` is short for `fsdp=mf.FSDP("dp")`.

    axes: the axis, or axes, that every parameter, its gradient and its optimiser's state are cut over.
    stage: 3 gathers parameters for the forward and again for the backward; 1 and 2 keep them gathered from the forward
        to the backward (ZeRO's stages: optimiser states are cut in all of them; gradients leave a step cut in all).
    replicate: an axis that parameters are whole along, and gradients reduced over once more (HSDP).
    units: patterns of modules that are gathered at once; None for the layers of the longest list of modules.
    reshard_after_forward: False keeps parameters as stages 1 and 2 do.
    prefetch: how many units ahead of its use a unit is gathered.
    param_dtype, reduce_dtype: types to gather and compute in, and to reduce gradients in; None for their own.

    Raises DefinitionError for what is none of these.
    """

    axes: tuple[str, ...]
    stage: int
    replicate: str | None
    units: tuple[str, ...] | None
    reshard_after_forward: bool
    prefetch: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None

    def __init__(
        self, axes: str | Sequence[str], stage: int = 3, *, replicate: str | None = None,
        units: str | Sequence[str] | None = None, reshard_after_forward: bool = True, prefetch: int = 1,
        param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        line = caller_line()
        cut, patterns = texts(axes), units if units is None else texts(units)
        if cut is None or len(set(cut)) < len(cut):
            raise user_error("FSDP: axes", shown(axes), "the name of an axis, or a list of different ones", "", line)
        if replicate is not None and not isinstance(replicate, str):
            raise user_error("FSDP: replicate", shown(replicate), "the name of an axis, or None", "", line)
        if patterns is None and units is not None:
            raise user_error("FSDP: units", shown(units), "a pattern of names, or a list of some", "", line)
        if as_int(stage) not in (1, 2, 3):
            raise user_error("FSDP: stage", shown(stage), "1, 2 or 3", "", line)
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise user_error("FSDP: prefetch", shown(prefetch), "how many units ahead, 0 or more", "", line)
        values = {
            "axes": cut, "stage": as_int(stage), "replicate": replicate,
            "units": patterns,
            "reshard_after_forward": bool(reshard_after_forward) and stage == 3, "prefetch": prefetch,
            "param_dtype": param_dtype, "reduce_dtype": reduce_dtype,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)


class Member(NamedTuple):
    """A weight of a unit, and the axes over which it is cut and gathered."""

    unit: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units with the same options.

    members: by tensor, which is cut, its unit.
    prefetch: how many units ahead of its use a unit is gathered.
    is_kept: whether what the forward gathers stays so for the backward.
    replicate: an axis that weights are whole along, and gradients reduced over.
    ends: by gradient, beside those that `fd.grad` makes, the unit of its weight.
    is_rule: whether ranks compute with rows of their own, whatever would take less time, where all axes are of rows.
    """

    members: Mapping[int, Member]
    prefetch: int
    is_kept: bool
    replicate: str | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    is_rule: bool = True
