"""What models of transformers do by default that a captured graph cannot have."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

# By version of transformers the function that says whether torch's attention takes fewer keys' heads than the query's.
_ASKS_FOR_GROUPS = ("use_gqa_in_sdpa", "use_gqa_in_sdpa_attention")


@contextmanager
def without_new_caches(module: nn.Module) -> Iterator[None]:
    """In this context models of transformers make no caches of their own, which configs have them do by default.

    They would grow from call to call, and nobody has asked for them; a call with `use_cache=True` does.
    """
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    made = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in made:
        config.use_cache = False
    try:
        yield
    finally:
        for config in made:
            config.use_cache = True


@contextmanager
def with_shared_heads() -> Iterator[None]:
    """In this context attention of transformers does not repeat keys and values for the heads that share them.

    It does so beside a mask, as kernels of torch need it there. Repeated ones would be sent as often as they are there.
    """
    attention: Any = sys.modules.get("transformers.integrations.sdpa_attention")
    before = {name: function for name in _ASKS_FOR_GROUPS if (function := getattr(attention, name, None)) is not None}
    for name in before:
        setattr(attention, name, lambda *_: True)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(attention, name, function)


def install_recorders(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks that record hidden states, attention weights and what else a model can, such as the logits of
    routers, where a call or a config asks for these.

    transformers does so in the first such forward, under a lock, which no graph can have.
    """
    recording: Any = sys.modules.get("transformers.utils.output_capturing")
    if not hasattr(recording, "maybe_install_capturing_hooks"):
        return
    parts = [part for part in module.modules() if getattr(part, "_can_record_outputs", None)]
    recorded = {name for part in parts for name in getattr(part, "_can_record_outputs", ())}
    asked = ["output_hidden_states", "output_attentions", *(f"output_{name}" for name in recorded)]
    configs = [getattr(part, "config", None) for part in module.modules()]
    if any(kwargs.get(name) or any(getattr(c, name, False) is True for c in configs) for name in asked):
        for part in parts:
            recording.maybe_install_capturing_hooks(part)


def with_static_cache(module: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `generate`, with a static cache where the call says nothing of caches.

    The one that transformers takes then grows with every token, and each size would be a program of its own.
    """
    config = kwargs.get("generation_config") or module.generation_config
    said = [kwargs.get(name, getattr(config, name, None)) for name in ("cache_implementation", "past_key_values")]
    wants = kwargs.get("use_cache", getattr(config, "use_cache", True)) is not False
    if not wants or any(value is not None for value in said) or not getattr(module, "_can_compile_fullgraph", False):
        return dict(kwargs)
    return {"disable_compile": True, **kwargs, "cache_implementation": "static"}
