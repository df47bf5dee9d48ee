"""A captured graph in ops of a definition, node by node."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..definition.tensor_view import TensorView
from ..dtypes import from_torch
from ..errors import MeshfuseError, SourceLine, user_error
from .aten import Translation, rule_for
from .lines import line_of
from .replicated import replicated
from .sizes import Sizes
from .spread import Spread
from .traced import TracedDefinition


@dataclass(slots=True)
class Translator:
    """Writes nodes of a graph into a definition.

    values: what each node has become: a TensorView, a tuple of them, or a number.
    sizes: the numbers of the graph's symbolic sizes.
    replaced: by node other arguments than it has.
    replicate: whether ops without a rule are computed whole on every rank.
    spreads: by node of attention how it lies, under context parallelism.
    """

    fd: TracedDefinition
    sizes: Sizes
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    replaced: Mapping[torch.fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    replicate: bool = False
    spreads: Mapping[torch.fx.Node, Spread] = field(default_factory=dict)

    def input(self, node: torch.fx.Node, line: SourceLine, dtype: Any = None, rows: int = 0) -> TensorView:
        """Make a node an input of the definition, as it is (or of another type); the line has its name.

        rows: how many rows of experts it has, if it has some.
        """
        value = node.meta["val"]
        shape = self.sizes.shape(value)
        made = self.fd.new_input(shape, from_torch(dtype or value.dtype), line, rows)
        self.values[node] = made
        return made

    def write(self, nodes: Iterable[torch.fx.Node]) -> None:
        """Write nodes in their order; those that they read must have values."""
        for node in nodes:
            self.values[node] = self._written(node)

    def _written(self, node: torch.fx.Node) -> Any:
        if "val" in node.meta and not isinstance(node.meta["val"], (torch.Tensor, tuple, list)):
            return self.sizes.number(node.meta["val"])
        args, kwargs = self._argument(self.replaced.get(node, node.args)), self._argument(node.kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]]
        self.fd.at = line_of(node)
        try:
            return self._fitted(node, self._rule(node)(self._translation(node), *args, **kwargs))
        except MeshfuseError as error:
            error.where = self.fd.at if self.fd.at.line or error.where is None else error.where
            raise

    def _rule(self, node: torch.fx.Node) -> Any:
        found = rule_for(node.target)
        if found is None and self.replicate:
            return replicated(node)
        if found is None:
            raise no_rule(node)
        return found

    def _translation(self, node: torch.fx.Node) -> Translation:
        first = node.args[0] if node.args else None
        taken = first.meta.get("val") if isinstance(first, torch.fx.Node) else None
        return Translation(self.fd, node.meta.get("val"), self.sizes, self.spreads.get(node), taken)

    def _argument(self, value: Any) -> Any:
        """An argument of a node with the values of the nodes in it."""
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, (tuple, list)):
            return (
                type(value)(map(self._argument, value))
                if type(value) in (tuple, list)
                else [*map(self._argument, value)]
            )
        if isinstance(value, Mapping):
            return {key: self._argument(entry) for key, entry in value.items()}
        return self.sizes.number(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value

    def _fitted(self, node: torch.fx.Node, made: Any) -> Any:
        """Results in the types and shapes that the graph says."""
        told = node.meta.get("val")
        if isinstance(made, (tuple, list)):
            assert isinstance(told, (tuple, list)), node
            return tuple(self._one(node, x, value) for x, value in zip(made, told, strict=True))
        return self._one(node, made, told)

    def _one(self, node: torch.fx.Node, made: Any, told: Any) -> Any:
        if not isinstance(made, TensorView) or not isinstance(told, torch.Tensor):
            return made
        wanted, shape = from_torch(told.dtype), self.sizes.shape(told)
        made = made if made.dtype is wanted else self.fd.ops.cast(made, wanted)
        assert list(made.type.shape) == shape, f"{node.target}: {made.type} in the place of {shape}"
        return made


def no_rule(node: torch.fx.Node) -> MeshfuseError:
    """The error of an op that has no counterpart."""
    line = line_of(node)
    return user_error(
        f"{line.name}: no op of meshfuse stands for {node.target}", f"{_types(node)}",
        "an op that frontends/aten has a rule for",
        'Write the line in other functions, register an op of that name (mf.register_op), or pass fallback="replicate" '
        "to have it computed whole on every rank.", replace(line, name=""),
    )  # fmt: skip


def _types(node: torch.fx.Node) -> str:
    """The operands' types, as text."""
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    return ", ".join(f"{v.dtype}{list(v.shape)}".removeprefix("torch.") for v in values if isinstance(v, torch.Tensor))
