"""A PyTorch model on a session's workers, as its controller sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..definition.annotation import layouts_of_spec
from ..errors import ArgumentError, caller_line, shown, user_error
from ..frontends.leaf_names import names_of_leaves
from ..mesh import DeviceMesh
from ..sharding.data import shard
from ..sharding.value import Sharding
from .compact import NamedFunction
from .controller import Controller
from .distributed import ModuleFacts, Placed
from .dref import DRef
from .errors import SessionError

# What models need on workers, and not here: capturing takes torch's compiler. It is loaded with the first model.
_WORKERS = "meshfuse.session.worker_module"
_on_workers = functools.partial(NamedFunction, _WORKERS)


# (place among the leaves, name, how it lies): a Placed, the shape of what is cut, or a model's outputs and the place
# among them.
Told = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of calls of one form: names of arguments; of results the places of tensors, tree and its text."""

    names: Sequence[str]
    places: Sequence[int]
    spec: pytree.TreeSpec
    text: str


class RemoteModule:
    """A PyTorch model that runs on a session's workers, as `mf.parallelize` has it. `Session.load_module` makes it.

    Call it as the model, with global tensors, which are cut as its `inputs` say, with DRefs, and with other values. The
    result has the model's structure, with DRefs in the place of tensors. Calls wait for nothing but the first with new
    shapes, which learns the structure. Under `torch.no_grad()` no gradient is recorded.
    """

    def __init__(
        self, session: Controller, made: DRef, facts: ModuleFacts, mesh: DeviceMesh, inputs: Mapping[str, Any]
    ):  # fmt: skip
        self._session, self._made, self._facts, self._mesh, self._inputs = session, made, facts, mesh, inputs
        self._known: dict[Any, _Known] = {}
        self.training = True

    def __repr__(self) -> str:
        where = ", ".join(f"{name} {size}" for name, size in zip(self._mesh.names, self._mesh.shape, strict=True))
        return f"<{self._facts.kind} of {self._facts.parameters:,} parameters over {where} of {self._session!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on all workers."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        key = (tree, tuple(map(_key, leaves)), torch.is_grad_enabled(), self.training)
        known = self._known.get(key)
        names = known.names if known is not None else names_of_leaves(self._facts.names, args, kwargs)
        placed = self._placed(names, leaves)
        if known is None:
            outputs = self._run(leaves, tree, placed, (), "")
            known = self._known[key] = self._learn(names, outputs)
            refs = [self._session.call(_on_workers("leaf_of"), outputs, place) for place in known.places]
        else:
            refs = self._session.registers(len(known.places), "a result of a model")
            into = tuple([(place, ref.number) for place, ref in zip(known.places, refs, strict=True)])
            outputs = self._run(leaves, tree, placed, into, known.text)
        return self._results(known, outputs, refs)

    def _learn(self, names: Sequence[str], outputs: DRef) -> _Known:
        """What a first call has returned. Waits."""
        form, text = self._session.fetch(self._session.call(_on_workers("form_of"), outputs), 0)
        are_tensors, spec = pytree.tree_flatten(form)
        return _Known(names, [place for place, is_tensor in enumerate(are_tensors) if is_tensor], spec, text)

    def _results(self, known: _Known, outputs: DRef, refs: Sequence[DRef]) -> Any:
        leaves: list[Any] = [None] * known.spec.num_leaves
        for place, ref in zip(known.places, refs, strict=True):
            ref.placed = _ResultPlace(self._session, outputs, place)
            leaves[place] = ref
        return pytree.tree_unflatten(leaves, known.spec)

    def _call(self, function: Any, *args: Any) -> DRef:
        """Call a function of this package with the model."""
        hold(self._session)
        return self._session.call(function, self._made, *args)

    def _placed(self, names: Sequence[str], leaves: Sequence[Any]) -> tuple[Told, ...]:
        """How arguments lie on the workers, of those that have a place there: what `worker_module.run` takes."""
        placed = []
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            where = self._where(name, leaf)
            if where:
                placed.append((i, name, *where))
        return tuple(placed)

    def _where(self, name: str, leaf: Any) -> tuple[Any, ...]:
        """How an argument lies on the workers: as it was distributed, as a model made it, or as `inputs` says."""
        if isinstance(leaf, DRef):
            if isinstance(leaf.placed, _ResultPlace):
                return leaf.placed.outputs, leaf.placed.index
            placed = leaf.placed if isinstance(leaf.placed, Placed) else None
            if placed is not None and placed.sharding.mesh.grid != self._mesh.grid:
                raise user_error(
                    f"argument {name}", f"a tensor distributed over {placed.sharding.mesh}",
                    f"one over the model's mesh, {self._mesh}", "", caller_line(), ArgumentError,
                )  # fmt: skip
            return () if placed is None else (placed,)
        is_cut = isinstance(leaf, torch.Tensor) and name in self._inputs
        return (tuple(leaf.shape),) if is_cut else ()

    def _run(
        self, leaves: Sequence[Any], tree: pytree.TreeSpec, placed: tuple[Told, ...], into: Any, text: str
    ) -> DRef:  # fmt: skip
        """Run it; the results at some places into these registers. text: the tree that they must have then."""
        told = (placed, torch.is_grad_enabled(), into, text)
        cut = {i: self._sharding(name, where[0]) for i, name, *where in placed if isinstance(where[0], tuple)}
        if not cut or self._session.num_workers == 1:
            return self._call(_on_workers("run"), *pytree.tree_unflatten(leaves, tree), *told)
        hold(self._session)
        calls = []
        for worker in range(self._session.num_workers):
            own = [shard(leaf, cut[i], worker) if i in cut else leaf for i, leaf in enumerate(leaves)]
            calls.append((self._made, *pytree.tree_unflatten(own, tree), *told))
        return self._session.call_each(_on_workers("run"), calls, self._facts.kind)

    def _sharding(self, name: str, shape: tuple[int, ...]) -> Sharding:
        spec = self._inputs[name]
        if len(spec) != len(shape):
            raise user_error(f"argument {name}", f"shape {list(shape)}", f"{len(spec)} dims, as in inputs", "",
                             caller_line(), ArgumentError)  # fmt: skip
        layouts = layouts_of_spec(name, self._mesh, spec, len(shape), caller_line())
        return Sharding.make(self._mesh, layouts, shape).placement(shape)

    # The model as a whole

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DRef:
        """Run function(model, *args, **kwargs) on every worker; a DRef to what it returns.

        There the model is an nn.Module whose parameters are DTensors. DRefs in the arguments stand for what each worker
        has in them.
        """
        return self._call(_on_workers("apply"), function, args, kwargs)

    def train(self, mode: bool = True) -> RemoteModule:
        """Let dropouts drop, and the like; with False not."""
        self.training = bool(mode)
        self.call(_train, self.training)
        return self

    def eval(self) -> RemoteModule:
        """Set what trains aside."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.call(_zero_grad, set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> DRef:
        """Scale all gradients so that their norm together is at most `max_norm`; a DRef to the norm before."""
        return self.call(_clip, max_norm, norm_type)

    def manual_seed(self, seed: int) -> None:
        """Begin the random numbers of its dropouts anew."""
        self._call(_on_workers("seed_with"), seed)

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], *args: Any, **kwargs: Any) -> RemoteOptimizer:
        """An optimizer of the model's parameters: torch.optim.AdamW, for example, and its arguments."""
        number = self._call(_on_workers("make_optimizer"), kind, args, kwargs)
        return RemoteOptimizer(self._session, self._made, number, getattr(kind, "__name__", str(kind)))

    def bill(self) -> Any:
        """The bytes that each worker sends in the latest step, forward and backward. Waits."""
        return self._session.fetch(self.call(_bill), 0)

    def explain(self, name: str | None = None) -> str:
        """Why a parameter or an activation lies as it does; without a name a table of all. Waits."""
        return self._session.fetch(self.call(_explain, name), 0)

    # Weights

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Read weights from safetensors; each worker reads its slices alone. Waits. Raises CheckpointError."""
        self.call(_load, os.fspath(path), strict)
        self._session.sync()

    def init_weights(self, seed: int = 0) -> None:
        """Initialise parameters and buffers, with the same numbers on every mesh."""
        self.call(_init_weights, seed)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights and buffers, whole, in this process. Waits."""
        return self._session.fetch(self.call(_on_workers("whole_state")), 0)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Put whole weights into the workers' shards; (missing names, unexpected names). Waits.

        Raises ArgumentError for other shapes, and with `strict` for other names.
        """
        return self._session.fetch(self.call(_on_workers("set_state"), dict(state), strict), 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save weights and the states of all optimizers as one checkpoint, which `mf.load` reads, too. Waits."""
        self._call(_on_workers("save"), _folder(path))
        self._session.sync()

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load what `save` has saved, on any mesh; into the optimizers that there are. Waits."""
        self._call(_on_workers("restore"), _folder(path))
        self._session.sync()


class _ResultPlace:
    """How a model's result lies on the workers, which they are asked when somebody wants to know it."""

    def __init__(self, session: Controller, outputs: DRef, index: int):
        self._session, self.outputs, self.index = session, outputs, index
        self._found: list[Placed | None] = []

    def __call__(self) -> Placed | None:
        if not self._found:
            asked = self._session.call(_on_workers("placed_of"), self.outputs, self.index)
            self._found.append(self._session.fetch(asked, 0))
        return self._found[0]


class RemoteOptimizer:
    """An optimizer on a session's workers, of a model there."""

    def __init__(self, session: Controller, made: DRef, number: DRef, kind: str):
        self._session, self._made, self._number, self._kind = session, made, number, kind

    def __repr__(self) -> str:
        return f"<{self._kind} of {self._session!r}>"

    def step(self) -> None:
        """Update the parameters by their gradients."""
        self.call(_on_workers("step"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its parameters."""
        self.call(_zero_grad, set_to_none)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DRef:
        """Run function(optimizer, *args, **kwargs) on every worker: for schedules, for example."""
        hold(self._session)
        call = _on_workers("apply_to_optimizer")
        return self._session.call(call, self._made, self._number, function, args, kwargs)


def load_module(
    session: Controller, make: Any, mesh: Any, plan: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None,
    seed: int | None, options: Mapping[str, Any],
) -> RemoteModule:  # fmt: skip
    """A model on all workers of a session."""
    is_path = isinstance(make, str) and all(make.partition(":"))
    if not is_path and (isinstance(make, str) or not callable(make)):
        raise user_error("load_module", shown(make), 'a function that makes a model, its "module:name", or a model', "",
                         caller_line(), ArgumentError)  # fmt: skip
    wanted = list(range(session.num_workers))
    is_mesh = isinstance(mesh, DeviceMesh)
    if not is_mesh or (len(wanted) > 1 and sorted(mesh.ranks) != wanted):
        raise user_error("load_module: mesh", shown(mesh), f"an mf.DeviceMesh of all {len(wanted)} workers", "",
                         caller_line(), ArgumentError)  # fmt: skip
    number = torch.initial_seed() % (1 << 62) if seed is None else seed
    session._import_late(_WORKERS)
    plain = session.call(_on_workers("make_plain"), make, tuple(args), dict(kwargs or {}), number)
    session.sync()  # Where one worker cannot make it, the others must not wait for that one.
    hold(session)
    made = session.call(_on_workers("make_parallel"), plain, mesh, plan, dict(options), number)
    facts = session.fetch(session.call(_on_workers("facts_of"), made), 0)
    session.sync()
    return RemoteModule(session, made, facts, mesh, options.get("inputs") or {})


# The session whose workers have torch's default process group: this process, which has its worker 0, has one of them.
_holder: list[weakref.ref[Controller]] = []


def hold(session: Controller) -> None:
    """Let this session's workers have torch's default process group next; another session's leave it first."""
    before = _holder[0]() if _holder else None
    if before is session:
        return
    _holder[:] = [weakref.ref(session)]
    if before is not None:
        with contextlib.suppress(SessionError):  # It has ended.
            _let_go(before)


def _let_go(session: Controller) -> None:
    """Have a session's workers leave torch's group. Raises what its calls before have raised, once they have."""
    try:
        session.sync()
    finally:
        session.call(NamedFunction("meshfuse.session.torch_group", "leave"))
        session.sync()


def _key(leaf: Any) -> Any:
    """What the structure of a result may depend on: of tensors shape and type, of other values these themselves."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, DRef):
        return DRef
    return leaf if leaf.__hash__ is not None else repr(leaf)


def _folder(path: Any) -> str:
    return os.path.abspath(os.fspath(path))


# What runs on the workers.


def _train(model: Any, mode: bool) -> None:
    model.train(mode)


def _zero_grad(model: Any, set_to_none: bool) -> None:
    model.zero_grad(set_to_none=set_to_none)


def _clip(model: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _bill(model: Any) -> Any:
    return model.bill()


def _explain(model: Any, name: str | None) -> str:
    return model.explain(name)


def _load(model: Any, path: str, strict: bool) -> None:
    model.load(path, strict=strict)


def _init_weights(model: Any, seed: int) -> None:
    model.init_weights(seed)
