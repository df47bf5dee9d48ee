"""Weights that other ranks hold: a rank's own module has None in their place, and tracing sees tensors on meta."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class Elsewhere:
    """What was taken out of a module: by module and name a parameter without numbers."""

    taken: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)

    @contextmanager
    def there(self) -> Iterator[None]:
        """In this context the module has all of its parameters, of others' on meta."""
        for owner, name, stand_in in self.taken:
            owner._parameters[name] = stand_in
        try:
            yield
        finally:
            for owner, name, _ in self.taken:
                owner._parameters[name] = None


def take_out(module: nn.Module, kept: Collection[str]) -> Elsewhere:
    """Leave a module these parameters, by full name, and take out all others; tied ones stay tied."""
    found = Elsewhere()
    own = {id(p) for name, p in module.named_parameters() if name in kept}
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in own:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                found.taken.append((part, name, made[id(parameter)]))
    for owner, name, _ in found.taken:
        owner._parameters[name] = None
    return found
