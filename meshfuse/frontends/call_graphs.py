"""The graphs of a parallel module's calls: one for all sizes of dynamic dims that the forward treats alike."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils import _pytree as pytree

from ..errors import SourceLine
from .calls import Arguments, Call
from .capture import captured
from .captured_graph import Captured
from .forward_reads import HOOKS, check_trained
from .hugging_face import with_shared_heads
from .kv_caches import WithCaches
from .module_state import State
from .recompute import mark_recomputed


def graph_of_call(
    module: Any, state: State, arguments: Arguments, line: SourceLine, all_results: bool,
    plain: Callable[[], AbstractContextManager[None]],
) -> Captured:  # fmt: skip
    """The graph of a call, captured unless one that is known is right for its sizes.

    all_results: whether it has gradients of all results, where some are numbers.
    plain: makes a context in which the module is its own, as it was before it was parallel.
    """

    key = (arguments.key(state.options.dynamic), all_results)
    known = state.graphs.setdefault(key, [])
    found = next((graph for graph in known if graph.sizes.hold(arguments.shapes)), None)
    if found is None:
        found = _traced(module, state, arguments, line, all_results, plain)
        known.append(found)
    return found


def _traced(
    module: Any, state: State, arguments: Arguments, line: SourceLine, all_results: bool,
    plain: Callable[[], AbstractContextManager[None]],
) -> Captured:  # fmt: skip
    options, call, device = state.options, arguments.call, state.places.device
    example = arguments.whole(options.dynamic, device, options.dtype)
    shared = with_shared_heads() if options.context is not None else nullcontext()
    records = torch.is_grad_enabled()
    with plain(), shared, _without_hooks(module), torch.set_grad_enabled(call.has_gradient):
        entry, args, kwargs = _entry(module, call, example)
        found = captured(
            entry, args, kwargs, device, line, scalars_only=call.has_gradient and not all_results,
            dtype=options.dtype, given=arguments.text,
        )  # fmt: skip
        mark_recomputed(found, options.recomputed)
    if records:
        check_trained(found.reads, f"the forward of {type(module).__name__}", line)
    return replace(found, reads=found.reads.again())


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """In this context a module has no hooks of its own, and modules none that all have: torch runs them around the
    program of each call."""
    tables = [(module, name) for name in HOOKS] + [(nn_module, f"_global{name}") for name in HOOKS]
    saved = [(owner, name, getattr(owner, name)) for owner, name in tables]
    if any(hooks for owner, _, hooks in saved if owner is nn_module):
        warnings.warn(
            f"Hooks of all modules, as of register_module_forward_hook, run around {type(module).__name__} as a whole "
            "and not around the modules in it. Register them on these modules.", stacklevel=2,
        )  # fmt: skip
    try:
        for owner, name, _ in saved:
            setattr(owner, name, OrderedDict())
        yield
    finally:
        for owner, name, hooks in saved:
            setattr(owner, name, hooks)


def _entry(module: nn.Module, call: Call, leaves: list[Any]) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What is captured for a call, with its arguments: the module, or one that puts tensors into caches first."""
    if not call.caches:
        return module, *pytree.tree_unflatten(leaves, call.tree)
    count = call.tree.num_leaves
    plain = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(plain) == len(call.places)
    given = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    return WithCaches(module, leaves[:count], call.tree, call.caches), tuple(given), {}
