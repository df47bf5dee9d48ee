"""Static key-value caches of transformers among the arguments of a call: their tensors are inputs that it changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, MeshfuseError, SourceLine, caller_line, user_error

_TENSORS = ("keys", "values", "cumulative_length")
# The attribute under which a module stands in the one that is captured in its place; names are shown without it.
INNER = "_meshfuse_module"


def without_inner(name: str) -> str:
    """A full name as the user's module has it."""
    return name.replace(f"{INNER}.", "")


class Cached(NamedTuple):
    """A cache among the leaves of a call: its place, and where its tensors begin behind the leaves.

    heads: how many heads its keys have on all ranks together; 0 where the model does not say.
    """

    place: int
    first: int
    layers: int
    heads: int


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers."""
    return not isinstance(value, torch.Tensor) and hasattr(value, "layers") and hasattr(value, "get_seq_length")


def cache_key(value: Any) -> Any:
    """What a program depends on of a cache."""
    return type(value).__name__, tuple(type(layer).__name__ for layer in value.layers)


def with_cache_tensors(leaves: list[Any], module: Any, parts: int) -> tuple[list[Any], tuple[Cached, ...]]:
    """The leaves of a call with the tensors of its caches behind them, and where these are.

    parts: into how many parts the heads of a new cache are cut over ranks, of which it gets one.

    Raises ArgumentError for caches that grow: their sizes change from token to token.
    """
    found, extended = [], list(leaves)
    for place, leaf in enumerate(leaves):
        if is_cache(leaf):
            heads = _heads(module)
            _check(leaf, leaves, module, heads // parts if heads % parts == 0 else heads)
            found.append(Cached(place, len(extended), len(leaf.layers), heads))
            extended += [getattr(layer, name) for layer in leaf.layers for name in _TENSORS]
    return extended, tuple(found)


def _check(cache: Any, leaves: Sequence[Any], module: Any, heads: int) -> None:
    line = caller_line()
    static = all(getattr(layer, "is_compileable", False) and hasattr(layer, "max_cache_len") for layer in cache.layers)
    if not static or not cache.layers:
        raise user_error(
            "a cache that grows", type(cache).__name__, "transformers.StaticCache, whose sizes stay",
            'Pass StaticCache(config, max_cache_len=...), or cache_implementation="static" to generate.', line,
            ArgumentError,
        )  # fmt: skip
    if not all(layer.is_initialized for layer in cache.layers):
        _initialise(cache, leaves, module, heads, line)


def _initialise(cache: Any, leaves: Sequence[Any], module: Any, heads: int, line: SourceLine) -> None:
    """Make a new cache's tensors, by the model's config and the batch of the first argument."""
    text = _text_config(module)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    if text is None or first is None:
        raise user_error("a cache without tensors", type(cache).__name__, "one that is initialised",
                         "Call its early_initialization.", line, ArgumentError)  # fmt: skip
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = next(p.dtype for p in module.parameters())
    cache.early_initialization(
        batch_size=first.shape[0], num_heads=heads, head_dim=width, dtype=dtype, device=first.device
    )


def _text_config(module: Any) -> Any:
    """The config of a model's language part; None where there is none."""
    config = getattr(module, "config", None)
    found = getattr(config, "get_text_config", None)
    return config if found is None else found()


def _heads(module: Any) -> int:
    text = _text_config(module)
    return getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)


def a_new_cache(what: str, line: SourceLine) -> MeshfuseError:
    """The error of a forward that returns a cache that it has made."""
    return user_error(
        f"{what} returns a cache that it has made", "use_cache=True", "a static cache among the arguments, or none",
        "Pass past_key_values=StaticCache(config, max_cache_len=...), or leave use_cache out.", line, ArgumentError,
    )  # fmt: skip


class WithCaches(nn.Module):
    """A module called with all leaves of a call in a row; tensors of caches are set on copies of these first."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], tree: Any, caches: Sequence[Cached]) -> None:
        super().__init__()
        setattr(self, INNER, module)
        self._tree, self._caches = tree, caches
        self._fixed = {i: _template(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = list(tensors)
        count = self._tree.num_leaves
        leaves = [self._fixed[i] if i in self._fixed else given[i] for i in range(count)]
        for cached in self._caches:
            cache = self._fixed[cached.place]
            for number in range(cached.layers):
                at, layer = cached.first + len(_TENSORS) * number, cache.layers[number]
                layer.keys, layer.values, layer.cumulative_length = given[at], given[at + 1], given[at + 2]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return _without_caches(getattr(self, INNER)(*args, **kwargs))


def _template(leaf: Any) -> Any:
    """A copy of a cache whose tensors may be replaced; any other value as it is."""
    if not is_cache(leaf):
        return leaf
    made = copy.copy(leaf)
    made.layers = [copy.copy(layer) for layer in leaf.layers]
    return made


def _without_caches(results: Any) -> Any:
    """Results without the caches in them, which the caller has."""
    if hasattr(results, "past_key_values") and hasattr(results, "items"):
        return type(results)(**{key: value for key, value in results.items() if not is_cache(value)})
    return results
