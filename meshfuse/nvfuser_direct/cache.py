"""`LruFusionCache`: equal definitions share the programs that the first of them has compiled."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..argument_checks import as_int
from ..errors import caller_line, shown, user_error
from ..report.reprint import definition_source
from .active import NvfuserDefinition, definition_of
from .definition import Fusion, FusionDefinition
from .executors import FusionExecutorCache


@dataclass(slots=True)
class _CachedFusion:
    definition: NvfuserDefinition
    visits: int = 0


class LRUCache:
    """Keeps the `max_fusions` definitions used last. Of definitions with the same text only the first compiles."""

    def __init__(self, max_fusions: int):
        if (as_int(max_fusions) or 0) < 1:
            raise user_error(
                f"{type(self).__name__}: max_fusions", shown(max_fusions), "an int >= 1", "Pass a larger one.",
                caller_line(),
            )  # fmt: skip
        self.max_fusions, self.compiled, self.lookups, self.hits = max_fusions, 0, 0, 0
        self._entries: OrderedDict[tuple[str, str], _CachedFusion] = OrderedDict()

    def cache_compile(self, fusion: Fusion) -> FusionExecutorCache:
        """A FusionExecutorCache of a fusion, which uses the programs of an equal fusion that is kept."""
        self.look_up(definition_of(fusion, "cache_compile"))
        return FusionExecutorCache(fusion)

    def look_up(self, made: NvfuserDefinition) -> None:
        """Let a definition use the programs of an equal one that is kept, or keep it for others."""
        self.lookups += 1
        # nvFuser's text does not tell a constant scalar from a plain number; the definition's own text does.
        key = (repr(made), definition_source(made.recording))
        entry = self._entries.get(key)
        if entry is None:
            self._insert(key, made)
            return
        self.hits += 1
        entry.visits += 1
        self._entries.move_to_end(key)
        made._execution.share(entry.definition._execution)

    def _insert(self, key: tuple[str, str], made: NvfuserDefinition) -> None:
        if len(self._entries) == self.max_fusions:
            self._entries.popitem(last=False)
        self._entries[key] = _CachedFusion(made)
        self.compiled += 1

    def num_fusions(self) -> int:
        """The number of definitions kept."""
        return len(self._entries)

    def stats(self) -> str:
        """A text with the counts of look-ups and hits, the definition used last first."""
        lines = [f"Max Fusions Allowed: {self.max_fusions}"]
        if not self._entries:
            return "\n".join([*lines, "The fusion cache is empty.", ""])
        lines.append(f"Total Fusions in Cache: {len(self._entries)}")
        lines += [f"Total Unique Fusions Compiled: {self.compiled}", "Cache Hits by LRU ordering:"]
        lines += [f"\t{i} -> {entry.visits} hits" for i, entry in enumerate(reversed(self._entries.values()))]
        rate = 100 * self.hits / self.lookups
        lines += [f"Cache Lookups: {self.lookups}", f"Cache Hits: {self.hits}", f"Hit Rate: {rate:g}%", ""]
        return "\n".join(lines)


class LruFusionCache(LRUCache):
    """A decorator for functions that return a FusionDefinition: their results go through the cache."""

    def __init__(self, max_fusions: int = 16384):
        super().__init__(max_fusions)

    def __call__(self, create: Callable[..., FusionDefinition]) -> Callable[..., FusionDefinition]:
        @functools.wraps(create)
        def cached(*args: Any, **kwargs: Any) -> FusionDefinition:
            made = create(*args, **kwargs)
            self.look_up(made)
            return made

        cached.stats = self.stats  # type: ignore[attr-defined]
        cached.num_fusions = self.num_fusions  # type: ignore[attr-defined]
        return cached
