"""A PyTorch model on a worker: `parallelize` has made it, and the controller calls it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import checkpoint
from ..compiler import CompiledProgram
from ..errors import ArgumentError, shown, user_error
from ..executor.dtensor import is_dtensor
from ..frontends.autograd import Runner
from ..frontends.module_state import STATE, State
from ..frontends.parallel_module import parallelize, rejoin, seed_draws
from ..frontends.placing import Place
from ..mesh import DeviceMesh
from ..sharding.layout import is_even
from ..sharding.value import Sharding
from . import torch_group
from .distributed import ModuleFacts, Placed
from .executor import current

_LAYOUT = "layout"


Wrapping = tuple[Place, tuple[int, ...]]  # where a DTensor lies, and its global shape


class WorkerModule:
    """A model on this worker. In each epoch its groups are others."""

    def __init__(self, module: nn.Module, seed: int):
        self._module, self._epoch = module, current().epoch
        self._generator = torch.Generator()
        self.optimizers: list[torch.optim.Optimizer] = []
        self._wrappings: dict[Any, tuple[Wrapping | None, Any]] = {}
        self.seed(seed)
        seed_draws(module, self._generator)
        torch_group.uses(self.state.places.torch_mesh)

    def seed(self, seed: int) -> None:
        """Begin the random numbers of its dropouts anew."""
        self._generator.manual_seed(seed)

    @property
    def state(self) -> State:
        """What `parallelize` knows of it."""
        return getattr(self._module, STATE)

    def live(self) -> Any:
        """The module, on this epoch's groups."""
        if self._epoch != current().epoch or not torch_group.is_joined():
            torch_group.join(self.state.places.device)
            rejoin(self._module)
            self._epoch = current().epoch
            self._wrappings.clear()
        return self._module

    def wrapping(self, name: str, where: Any, index: int | None = None) -> Wrapping | None:
        """What makes a DTensor of an argument; None for shards that the model reads as they lie. See `run`."""
        key = (name, where) if index is None else (name, id(where.program), index)
        if key not in self._wrappings:
            found = self._find_wrapping(name, where if index is None else where.placed(index))
            self._wrappings[key] = (found, None if index is None else where.program)  # whose id is so nobody else's
        return self._wrappings[key][0]

    def _find_wrapping(self, name: str, where: Placed | tuple[int, ...] | None) -> Wrapping | None:
        if where is None:
            return None
        shape, places = where.shape if isinstance(where, Placed) else where, self.state.places
        spec = self.state.options.inputs.get(name)
        usual = places.of_spec(name, spec, shape) if spec is not None and len(spec) == len(shape) else None
        place = places.of_sharding(name, where.sharding, shape) if isinstance(where, Placed) else usual
        if place is None or (
            usual is not None and place.sharding == usual.sharding and _is_even(place.sharding, shape)
        ):
            return None
        return place, shape


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model returned: its leaves, their tree, and what ran."""

    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    runner: Runner | None
    program: CompiledProgram | None

    def placed(self, place: int) -> Placed | None:
        """How a result lies on the workers; None for what is no tensor of the program."""
        return None if self.runner is None else _placed(self.runner, self.program, place)


def _placed(runner: Runner, program: Any, place: int) -> Placed | None:
    found = runner.placed_result(place, program)
    if found is None:
        return None
    sharding, shape = found
    if current().size == 1:  # Its ranks are simulated, and every result is whole.
        sharding = Sharding.replicated(DeviceMesh([0]), len(shape))
    return Placed(sharding, shape)


def _is_even(sharding: Sharding, shape: Sequence[int]) -> bool:
    """Whether all ranks have shards of one shape: then that tells the global one."""
    return all(is_even(layout, n) for layout, n in zip(sharding.dims, shape, strict=True))


def make_plain(make: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> nn.Module:
    """Make a model with the same random numbers on every worker."""
    torch_group.check_free()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make if isinstance(make, nn.Module) else _maker(make)(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise user_error(f"load_module: what {_name_of(make)} returned", shown(model), "an nn.Module", "",
                         cls=ArgumentError)  # fmt: skip
    return model


def make_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Any, options: Mapping[str, Any], seed: int
) -> WorkerModule:  # fmt: skip
    """Have a model run over the mesh, once all workers have made it."""
    with torch_group.told_of_failures():
        torch_group.join(next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu")))
        return WorkerModule(parallelize(model, mesh, plan, **options), seed)


def _name_of(make: Any) -> str:
    return make if isinstance(make, str) else getattr(make, "__name__", type(make).__name__)


def _maker(make: Any) -> Callable[..., Any]:
    """The function that a text "module:name" names."""
    if not isinstance(make, str):
        return make
    module, _, name = make.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise user_error(f"load_module: {make!r}", f"no function {name!r} in {module}", '"module:name" of one', "",
                         cls=ArgumentError)  # fmt: skip
    return found


def facts_of(made: WorkerModule) -> ModuleFacts:
    """What the controller knows of a model."""
    module = made.live()
    plain = getattr(type(module), "_plain", type(module))
    return ModuleFacts(
        plain.__name__, sum(p.numel() for p in module.parameters()), tuple(made.state.names)
    )  # fmt: skip


def run(
    made: WorkerModule, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Sequence[tuple[Any, ...]],
    records: bool, into: Sequence[tuple[int, int]], tree: str,
) -> Outputs:  # fmt: skip
    """Call the model.

    placed: of arguments their place among the leaves, their name, and how shards lie: a Placed, the shape of those cut
    as its `inputs` say, or the outputs of a model and a place there. records: whether a gradient may be asked for.
    into: places of results, and the registers that they go into; the results' tree must then have the text `tree`.
    """
    with torch_group.told_of_failures(), torch.set_grad_enabled(records):
        module = made.live()
        if placed and not made.state.places.is_simulated:
            args, kwargs = _with_dtensors(made, args, kwargs, placed)
        leaves, spec = pytree.tree_flatten(module(*args, **kwargs))
    runner = made.state.last
    outputs = Outputs(leaves, spec, runner, None if runner is None else runner.program())
    if into:
        _keep(outputs, into, tree)
    return outputs


def _keep(outputs: Outputs, into: Sequence[tuple[int, int]], tree: str) -> None:
    """Put results into registers. ArgumentError where they are others than the controller expects."""
    if str(outputs.tree) != tree:
        raise user_error("a model's results", str(outputs.tree), f"{tree}, as at the first such call",
                         "Return results of one structure.", cls=ArgumentError)  # fmt: skip
    registers = current().registers
    for place, number in into:
        registers[number] = outputs.leaves[place]


def _with_dtensors(made: WorkerModule, args: Any, kwargs: Any, placed: Sequence[tuple[Any, ...]]) -> tuple[Any, Any]:
    """The arguments, with DTensors in the place of shards that the model would not read as they lie."""
    wrong = [(told[0], where) for told in placed if (where := made.wrapping(*told[1:])) is not None]
    if not wrong and not torch.is_grad_enabled():
        return args, kwargs
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for place, *_ in placed:
        leaves[place] = _on_its_own(leaves[place])
    for place, (where, shape) in wrong:
        if not is_dtensor(leaves[place]):
            leaves[place] = where.wrapped(leaves[place], shape).requires_grad_(leaves[place].requires_grad)
    return pytree.tree_unflatten(leaves, tree)


def _on_its_own(leaf: torch.Tensor) -> torch.Tensor:
    """A shard that follows from nothing: a backward pass ends at a model's arguments."""
    return leaf if is_dtensor(leaf) or not leaf.requires_grad else leaf.detach().requires_grad_()


def form_of(outputs: Outputs) -> tuple[Any, str]:
    """A model's results with True in the place of each tensor and False in that of others, and the text of the tree."""
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in outputs.leaves]
    return pytree.tree_unflatten(is_tensor, outputs.tree), str(outputs.tree)


def leaf_of(outputs: Outputs, index: int) -> Any:
    """One of a model's results."""
    return outputs.leaves[index]


def placed_of(outputs: Outputs, index: int) -> Placed | None:
    """How one of a model's results lies on the workers."""
    return outputs.placed(index)


def apply(made: WorkerModule, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with the model before its other arguments."""
    with torch_group.told_of_failures():
        return function(made.live(), *args, **kwargs)


def apply_to_optimizer(made: WorkerModule, number: int, function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with one of the model's optimizers before its other arguments."""
    with torch_group.told_of_failures():
        made.live()
        return function(made.optimizers[number], *args, **kwargs)


def make_optimizer(made: WorkerModule, kind: Any, args: Any, kwargs: Any) -> int:
    """Make an optimizer of the model's parameters; its number."""
    made.optimizers.append(kind(made.live().parameters(), *args, **kwargs))
    return len(made.optimizers) - 1


def step(optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters."""
    optimizer.step()


def seed_with(made: WorkerModule, seed: int) -> None:
    """Begin the random numbers of its dropouts anew."""
    made.seed(seed)


# weights


def whole_state(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """All weights and buffers by name, whole, on worker 0; the others help."""
    found: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict().items():
        whole = value.full_tensor() if is_dtensor(value) else value
        if current().worker == 0:
            found[name] = whole.detach().cpu()
    return found if current().worker == 0 else None


def set_state(module: nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> tuple[list[str], list[str]]:
    """Put whole weights into the shards of this worker; (missing names, unexpected names)."""
    parallel: State = getattr(module, STATE)
    own = module.state_dict(keep_vars=True)
    missing, unexpected = [n for n in own if n not in state], [n for n in state if n not in own]
    if strict and (missing or unexpected):
        raise user_error("load_state_dict", f"missing {missing[:3]}, unexpected {unexpected[:3]}",
                         "the names of the model", "Pass strict=False to leave the others.",
                         cls=ArgumentError)  # fmt: skip
    with torch.no_grad():
        for name in own.keys() - {*missing}:
            _put(name, own[name], state[name], parallel)
    return missing, unexpected


def _put(name: str, target: Any, value: torch.Tensor, parallel: State) -> None:
    if tuple(value.shape) != tuple(target.shape):
        raise user_error(f"load_state_dict: {name}", f"shape {list(value.shape)}", f"{list(target.shape)}", "",
                         cls=ArgumentError)  # fmt: skip
    if is_dtensor(target):
        place = parallel.places.of_parameter(name, tuple(target.shape))
        target._local_tensor.copy_(place.part(value))
    else:
        target.copy_(value)


def save(made: WorkerModule, path: str) -> None:
    """Save weights, and the states of optimizers, as one checkpoint."""
    module = made.live()
    state: dict[str, Any] = {f"model.{name}": value for name, value in module.state_dict().items()}
    layout = []
    for number, optimizer in enumerate(made.optimizers):
        entries = {f"{name}.{key}": value for name, key, value in _states(module, optimizer)}
        state |= {f"optimizer.{number}.{name}": value for name, value in entries.items()}
        groups = [{k: v for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups]
        kinds = {name: _is_like_parameter(value) for name, value in entries.items()}
        layout.append({"groups": groups, "entries": kinds})
    checkpoint.save(path, {**state, _LAYOUT: json.dumps(layout)})


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None))) or (
        isinstance(value, (list, tuple)) and all(isinstance(v, (int, float)) for v in value)
    )


def _is_like_parameter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _states(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, str, Any]]:
    names = {id(p): name for name, p in module.named_parameters()}
    return [(names[id(p)], key, value) for p, states in optimizer.state.items() for key, value in states.items()
            if id(p) in names and value is not None]  # fmt: skip


def restore(made: WorkerModule, path: str) -> None:
    """Load what `save` has saved, in whatever shardings that was."""
    module = made.live()
    layout = json.loads(checkpoint.load(path, {_LAYOUT: None})[_LAYOUT])
    if len(layout) < len(made.optimizers):
        raise user_error("restore", f"the states of {len(layout)} optimizers", f"{len(made.optimizers)}, as there are",
                         "Make the optimizers after restoring.", cls=ArgumentError)  # fmt: skip
    wanted: dict[str, Any] = {f"model.{name}": value for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    for number, told in enumerate(layout[: len(made.optimizers)]):
        for entry, is_like in told["entries"].items():
            like = parameters[entry.rpartition(".")[0]]
            wanted[f"optimizer.{number}.{entry}"] = torch.zeros_like(like).detach() if is_like else None
    found = checkpoint.load(path, wanted)
    for number, optimizer in enumerate(made.optimizers):
        _restore_optimizer(optimizer, parameters, layout[number], number, {**wanted, **found})


def _restore_optimizer(optimizer: Any, parameters: Mapping[str, Any], told: Any, number: int, found: Any) -> None:
    for group, values in zip(optimizer.param_groups, told["groups"], strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    for entry in told["entries"]:
        name, _, key = entry.rpartition(".")
        optimizer.state[parameters[name]][key] = found[f"optimizer.{number}.{entry}"]
