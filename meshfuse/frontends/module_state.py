"""What a parallel module knows of itself."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..errors import SourceLine, line_in_script, user_error
from .autograd import Runner
from .captured_graph import Captured
from .draws import GeneratorDraws
from .options import Options
from .pipeline.door import Stepper
from .placing import Place, Places, in_parts
from .plans import ModulePlan

STATE = "_meshfuse"  # The attribute of a module that has it.


@dataclass(slots=True, eq=False)
class State:
    """What a parallel module knows: its plan, where its parameters lie, and the programs of its calls.

    runners: by what a program depends on.
    graphs: what was captured, by what that depends on; several where forwards take other ways for some sizes.
    tables: the modules and the parameters, in order.
    names: of the forward's arguments.
    parts: into how many parts the heads of a new cache are cut, of which a rank has one.
    all_results: whether gradients came for other results than numbers.
    last: what ran last.
    stepper: runs `step`; None for a function.
    accumulates: whether gradients are left as terms of sums over ranks now.
    has_terms: whether some may be left so by earlier calls.
    """

    plan: ModulePlan
    options: Options
    places: Places
    parameters: dict[str, Place]
    line: SourceLine
    runners: dict[Any, Runner] = field(default_factory=dict)
    last: Runner | None = None
    graphs: dict[Any, list[Captured]] = field(default_factory=dict)
    draws: GeneratorDraws = field(default_factory=GeneratorDraws)
    all_results: bool = False
    tables: tuple[Any, Any] = ((), ())
    names: list[str] = field(default_factory=list)
    parts: int = 1
    stepper: Stepper | None = None
    accumulates: bool = False
    has_terms: bool = False

    def forget_changed(self, module: nn.Module) -> None:
        """Drop what was captured before something that the forward read was changed."""
        self.tables = list(module.modules()), list(module.parameters())
        self.graphs = {key: [g for g in graphs if g.reads.hold()] for key, graphs in self.graphs.items()}
        self.runners = {key: runner for key, runner in self.runners.items() if runner.graph.reads.hold()}

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """That of a copy of the module, which lies where the module does and makes programs of its own."""
        stepper = self.stepper.copied(memo) if self.stepper is not None else None
        return replace(
            self, parameters=dict(self.parameters), runners={}, last=None, graphs={}, draws=copy.copy(self.draws),
            tables=copy.deepcopy(self.tables, memo), stepper=stepper,
        )  # fmt: skip


class KeptModule(nn.Module):
    """What a parallel module does where it is loaded, copied and pickled."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Loads whole plain tensors as well, of which each rank takes its part."""
        in_parts(self, getattr(self, STATE).parameters, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own, with programs of its own. As copy.deepcopy makes it where nothing can be pickled."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises DefinitionError: programs, meshes and groups of ranks belong to this process."""
        raise user_error(
            f"a parallel {type(self).__name__} is pickled", "its programs and ranks", "its weights",
            "Save model.state_dict(), by torch.save or mf.save, and make and parallelize the model anew to load it.",
            line_in_script(sys._getframe(1), ("torch",)),
        )  # fmt: skip
