"""The nearest annotation from which a tensor's split can come, by steps between dims of tensors that pass splits on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..traversal import inner_first

# A tensor and one of its dims; None for a sum that is unreduced.
Place = tuple[int, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A tensor, and by `next` those that its split leads to: up to the nearest annotated one, else to an end."""

    tensor: int
    annotated: bool
    length: int
    end: int
    next: Way | None = field(repr=False)

    def tensors(self) -> Iterator[int]:
        """The tensors of the way, this one first."""
        here: Way | None = self
        while here is not None:
            yield here.tensor
            here = here.next


class Ways:
    """The ways from all places of interest; each place is looked at once.

    `steps` must lead in one direction only, towards inputs or towards outputs, so that no way leads back.
    """

    def __init__(self, steps: Callable[[Place], Iterable[Place]], annotated: Callable[[int], bool]):
        self._steps, self._annotated = steps, annotated
        self._known: dict[Place, Way] = {}

    def of(self, place: Place) -> Way:
        """The way from a place, which may be annotated itself."""
        if place not in self._known:
            for here in inner_first(place, self._unknown):
                ahead = _nearest(self._known[step] for step in self._steps_of(here))
                self._known[here] = self._way(here[0], ahead)
        return self._known[place]

    def after(self, place: Place) -> Way | None:
        """The nearest way from the places that a place leads to; None where it leads nowhere."""
        return _nearest(map(self.of, self._steps(place)))

    def _steps_of(self, place: Place) -> Iterable[Place]:
        return () if self._annotated(place[0]) else self._steps(place)

    def _unknown(self, place: Place) -> list[Place]:
        return [step for step in self._steps_of(place) if step not in self._known]

    def _way(self, tensor: int, ahead: Way | None) -> Way:
        if ahead is None:
            return Way(tensor, self._annotated(tensor), 0, tensor, None)
        return Way(tensor, ahead.annotated, ahead.length + 1, ahead.end, ahead)


def _nearest(ways: Iterable[Way]) -> Way | None:
    """The shortest way to an annotation, else the shortest way; the first of equal ones."""
    return min(ways, key=lambda way: (not way.annotated, way.length), default=None)
