"""Rules that follow from names: an op of ours with the name and the parameters of torch's needs none of its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from ...ops.registry import find
from .table import NAMED, RULES, Rule, Translation, aten
from .torch_calls import torch_rule, trailing

# Ops that check or hint, and make nothing.
_NOTHING = (
    "_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size",
    "_linalg_check_errors",
)  # fmt: skip
# Functions of single elements that are captured as simpler ones.
_WRITTEN = (aten.elu.default, aten.leaky_relu.default, aten.hardtanh.default, aten.ldexp.Tensor)


def rule_for(target: Any) -> Rule | None:
    """The rule of an op of a captured graph; None where it has none."""
    if target in RULES:
        return RULES[target]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    space, _, name = target._schema.name.partition("::")
    if target._schema.name in NAMED:
        return NAMED[target._schema.name]
    if name in _NOTHING:
        return _nothing
    return (_same_name(target, name) or _of_elements(target)) if space == "aten" else None


def has_rule(target: Any) -> bool:
    """Whether an op has a rule."""
    return rule_for(target) is not None


@functools.cache
def _of_elements(target: Any) -> Rule | None:
    """A rule by which torch computes a function of single elements that it does not write in others; else None."""
    if torch.Tag.pointwise not in target.tags or target._schema.is_mutable or target in _WRITTEN:
        return None
    return None if target in _core() else torch_rule(target, trailing(0))


@functools.cache
def _core() -> frozenset[Any]:
    """The ops that torch writes in a small set of others. To make the table takes a second."""
    return frozenset(dict(core_aten_decompositions()))


def _nothing(t: Translation, *args: Any, **kwargs: Any) -> None:
    return None


def _same_name(target: Any, name: str) -> Rule | None:
    """A rule that calls the op of ours of this name, if all of its parameters are torch's."""
    found, names = find(name), [argument.name for argument in target._schema.arguments]
    if found is None or not {param.name for param in found.params} <= set(names):
        return None
    kept = [param.name for param in found.params]

    def write(t: Translation, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return t.fd.call(name, [], {key: value for key, value in given.items() if key in kept})

    return write
