"""The nearest annotation that a split leads to, by the steps between the dims of tensors that hand it on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

# A tensor and one of its dims; None for a sum that is unreduced.
Place = tuple[int, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A tensor, and those that its split leads on to: to the nearest annotated one, else to the nearest end."""

    tensor: int
    annotated: bool
    length: int
    end: int
    next: Way | None = field(repr=False)

    def tensors(self) -> Iterator[int]:
        """All of them, this one first."""
        here: Way | None = self
        while here is not None:
            yield here.tensor
            here = here.next


class Ways:
    """The ways of all places from which somebody asks, each place looked at once, however many ask.

    Steps must lead on in one direction only, towards inputs or towards outputs, so that none leads back.
    """

    def __init__(self, steps: Callable[[Place], Iterable[Place]], annotated: Callable[[int], bool]):
        self._steps, self._annotated = steps, annotated
        self._known: dict[Place, Way] = {}

    def of(self, place: Place) -> Way:
        """From a place, which may be annotated itself."""
        return self._known[place] if place in self._known else self._found(place)

    def after(self, place: Place) -> Way | None:
        """From what a place leads to; None where it leads to nothing."""
        return _nearest(map(self.of, self._steps(place)))

    def _found(self, place: Place) -> Way:
        # Depth first with a stack of its own: programs are deeper than Python's.
        stack = [place]
        while stack:
            here = stack[-1]
            steps = () if self._annotated(here[0]) else tuple(self._steps(here))
            missing = [step for step in steps if step not in self._known]
            stack.extend(missing)
            if not missing:
                self._known[stack.pop()] = self._way(here[0], steps)
        return self._known[place]

    def _way(self, tensor: int, steps: Iterable[Place]) -> Way:
        ahead = _nearest(self._known[step] for step in steps)
        if ahead is None:
            return Way(tensor, self._annotated(tensor), 0, tensor, None)
        return Way(tensor, ahead.annotated, ahead.length + 1, ahead.end, ahead)


def _nearest(ways: Iterable[Way]) -> Way | None:
    """The shortest way to an annotation, else the shortest; of equal ones the first."""
    return min(ways, key=lambda way: (not way.annotated, way.length), default=None)
