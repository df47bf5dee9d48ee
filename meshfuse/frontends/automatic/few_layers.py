"""A model with a few layers of each kind, which stand for all that are equal.

Equal layers get equal plans, so that a plan of three of them says what all take: the first, one from between, and the
last. Capturing and planning then take as long for a hundred layers as for three.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ..patterns import longest_list

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FewLayers:
    """Which layers stand for which.

    names: the full names of all layers, in their order.
    stands: by layer the number of the one that stands for it.
    """

    names: tuple[str, ...]
    stands: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> FewLayers:
        """The layers of a module's longest list; of those of a kind the first, the second and the last one stand."""
        kinds = layer_kinds(module)
        return cls(tuple(kinds), tuple(_stands([*kinds.values()])))

    def all(self) -> FewLayers:
        """The same layers, each for itself."""
        return FewLayers(self.names, tuple(range(len(self.names))))

    @property
    def kept(self) -> list[int]:
        """The layers that stand for any, in order."""
        return sorted(set(self.stands))

    @property
    def is_shorter(self) -> bool:
        """Whether there are fewer of them than layers."""
        return len(self.kept) < len(self.names)

    @contextmanager
    def alone(self, module: nn.Module) -> Iterator[None]:
        """In this context the module has no other layers."""
        if not self.is_shorter:
            yield
            return
        parent = module.get_submodule(self.names[0].rpartition(".")[0])
        before = dict(parent._modules)
        kept = {self.names[i].rpartition(".")[2] for i in self.kept}
        parent._modules = {name: layer for name, layer in before.items() if name in kept}
        try:
            yield
        finally:
            parent._modules = before

    def spread(self, found: Mapping[str, T]) -> dict[str, T]:
        """By full name of a parameter what was found, for the layers that others stand for as well."""
        made = dict(found)
        inside = {i: [(n, value) for n, value in found.items() if n.startswith(f"{self.names[i]}.")] for i in self.kept}
        for name, i in zip(self.names, self.stands, strict=True):
            made |= {name + n.removeprefix(self.names[i]): value for n, value in inside[i]}
        return made


def layer_kinds(module: nn.Module) -> dict[str, Hashable]:
    """By full name of a layer of a module's longest list what tells it apart: layers of a kind compute alike."""
    names = longest_list(module)
    return dict(zip(names, _kinds([module.get_submodule(name) for name in names]), strict=True))


def _stands(kinds: Sequence[Hashable]) -> Iterator[int]:
    places: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    for i, kind in enumerate(kinds):
        first, *rest = places[kind]
        yield i if i == first or i == places[kind][-1] else rest[0]


def _kinds(layers: Sequence[nn.Module]) -> list[Hashable]:
    """What tells layers apart: their modules, the shapes of weights, and plain values such as how many heads.

    A value that is the layer's own number in each of them does not.
    """
    facts = [_facts(layer) for layer in layers]
    counted = {key for key in (facts[0] if facts else ()) if all(f.get(key) == i for i, f in enumerate(facts))}
    return [frozenset((k, v) for k, v in found.items() if k not in counted) for found in facts]


def _facts(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, part in layer.named_modules():
        found[path, ""] = type(part)
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            found[path, name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        plain = {name: value for name, value in vars(part).items() if isinstance(value, (bool, int, float, str))}
        found |= {(path, name): value for name, value in plain.items()}
    return found
