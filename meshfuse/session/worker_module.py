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
from ..errors import ArgumentError, shown, user_error
from ..executor.dtensor import is_dtensor
from ..frontends.autograd import Runner
from ..frontends.leaf_names import names_of_leaves
from ..frontends.module_state import STATE, State
from ..frontends.parallel_module import parallelize, rejoin, seed_draws
from ..mesh import DeviceMesh
from ..sharding.value import Sharding
from . import torch_group
from .distributed import ModuleFacts, Placed, ResultOf
from .executor import current

_LAYOUT = "layout"


class WorkerModule:
    """A model on this worker. In each epoch its groups are others."""

    def __init__(self, module: nn.Module, seed: int):
        self._module, self._epoch = module, current().epoch
        self._generator = torch.Generator()
        self.optimizers: list[torch.optim.Optimizer] = []
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
        return self._module


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model returned: its leaves, their tree, and what ran."""

    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    runner: Runner | None

    def placed(self, place: int) -> Placed | None:
        """How a result lies on the workers; None for what is no tensor of the program."""
        return None if self.runner is None else _placed(self.runner, place)


def _placed(runner: Runner, place: int) -> Placed | None:
    found = runner.placed_result(place)
    if found is None:
        return None
    sharding, shape = found
    if current().size == 1:  # Its ranks are simulated, and every result is whole.
        sharding = Sharding.replicated(DeviceMesh([0]), len(shape))
    return Placed(sharding, shape)


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


Where = Placed | ResultOf | tuple[int, ...]


def facts_of(made: WorkerModule) -> ModuleFacts:
    """What the controller knows of a model."""
    module = made.live()
    plain = getattr(type(module), "_plain", type(module))
    return ModuleFacts(
        plain.__name__, sum(p.numel() for p in module.parameters()), tuple(made.state.names)
    )  # fmt: skip


def run(
    made: WorkerModule, args: Sequence[Any], kwargs: Mapping[str, Any], placed: Mapping[int, Where],
    records: bool,
) -> Outputs:  # fmt: skip
    """Call the model. placed: by place among the leaves how shards lie, or the shape of those cut as its `inputs` say.

    records: whether a gradient may be asked for.
    """
    with torch_group.told_of_failures(), torch.set_grad_enabled(records):
        module = made.live()
        if placed and not made.state.places.is_simulated:
            args, kwargs = _with_dtensors(made.state, args, kwargs, placed)
        leaves, tree = pytree.tree_flatten(module(*args, **kwargs))
    return Outputs(leaves, tree, made.state.last)


def _with_dtensors(state: State, args: Any, kwargs: Any, placed: Mapping[int, Any]) -> tuple[Any, Any]:
    names = names_of_leaves(state.names, args, kwargs)
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for index, where in placed.items():
        leaves[index] = _dtensor(state, names[index], leaves[index], where)
    return pytree.tree_unflatten(leaves, tree)


def _dtensor(state: State, name: str, local: Any, told: Where) -> Any:
    """A shard as a DTensor, whose placements and global shape the model reads."""
    where = told.outputs.placed(told.index) if isinstance(told, ResultOf) else told
    if where is None or is_dtensor(local):
        return local
    if isinstance(where, Placed):
        place, shape = state.places.of_sharding(name, where.sharding, where.shape), where.shape
    else:
        place, shape = state.places.of_spec(name, state.options.inputs[name], where), where
    return place.wrapped(local.detach(), shape).requires_grad_(local.requires_grad)


def form_of(outputs: Outputs) -> tuple[Any, str]:
    """A model's results with True in the place of each tensor and False in that of others, and the text of the tree."""
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in outputs.leaves]
    return pytree.tree_unflatten(is_tensor, outputs.tree), str(outputs.tree)


def leaf_of(outputs: Outputs, index: int, tree: str) -> Any:
    """One of a model's results. ArgumentError where they are others than the controller expects."""
    if str(outputs.tree) != tree:
        raise user_error("a model's results", str(outputs.tree), f"{tree}, as at the first such call",
                         "Return results of one structure.", cls=ArgumentError)  # fmt: skip
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
