"""How inputs come to a program and how its outputs leave it, where that is otherwise than the plan has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ..sharding.layout import Layout
from ..sharding.value import Sharding

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Borders:
    """What arguments that are DTensors ask of a program; plans are made in factors of dims all the same.

    inputs: by tensor, how its dims are cut when it is passed.
    placed: where a free output is to be, told from where the best plan leaves it, its shape, and the layouts that
        inputs' dims have.
    left: how an output is cut when it is returned, told from where the plan leaves it, and its shape.
    """

    placed: Callable[[Sharding, Shape, Collection[Layout]], Sharding]
    left: Callable[[Sharding, Shape], Sharding]
    inputs: Mapping[int, tuple[Layout, ...]] = field(default_factory=dict)

    def passed(self, tensor: int, sharding: Sharding) -> Sharding:
        """The sharding in which an input is passed."""
        dims = self.inputs.get(tensor)
        return sharding if dims is None else sharding.with_dims(dims)
