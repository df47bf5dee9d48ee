"""Calls of ops on concrete types, with their rules: equal calls are one object, worked out once."""

from __future__ import annotations

import functools
from typing import Any

from ..ops import ragged
from ..ops.binding import Keys, keys_of
from ..ops.opdef import Call, OpDef
from ..ops.rules import Rule
from ..ops.shape_arithmetic import check_rule
from ..ops.values import TensorType


class CallTable:
    """Calls that differ only in which tensors they take share one `Call` and one `Rule`.

    Passes recognise repeated structure, such as layers, by the identity of the call. Within a graph it is kept here,
    even if the cache of `_call_of` drops it.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Call, Rule]] = {}

    def get(self, op: OpDef, args: tuple[Any, ...], types: tuple[TensorType, ...]) -> tuple[Call, Rule]:
        """The call of an op on operands of these types, and its rule. DefinitionError where they do not fit the op."""
        key = (op, keys_of(args), types)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _call_of(*key)
        return found


@functools.lru_cache(maxsize=1 << 13)
def _call_of(op: OpDef, args: Keys, types: tuple[TensorType, ...]) -> tuple[Call, Rule]:
    """Equal calls of all graphs are one object, as long as the cache keeps it.

    Most calls of a definition's forms are equal, and what is worked out for one holds for the others.
    """
    given = tuple([arg for _, _, arg in args])
    call = Call(op, given, types, ragged.infer(Call(op, given, types)))
    rule = (op.ring_schedule.rule if op.ring_schedule else op.rule)(call)
    check_rule(call, rule)
    return call, rule
