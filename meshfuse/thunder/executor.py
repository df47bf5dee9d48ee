"""Thunder's executor: regions of a trace as definitions that run on a mesh."""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from thunder.core.proxies import TensorProxy, unvariableify
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceProvenance, from_trace
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor, register_executor

from ..backends.assignment import requested
from ..definition.checks import checked_mesh
from ..errors import caller_line
from ..executor.spmd import named_ranks
from ..frontends.draws import GeneratorDraws
from ..frontends.traced import TracedDefinition
from ..mesh import DeviceMesh
from ..runtime.world import World
from ..sharding.value import Sharding
from .attention import SYMBOL, gradient, takes
from .collectives import Taken, WholeMesh, moves_alone
from .planning import locals_of, mesh_of, planned, take
from .prims import MeshPrims, mesh_layout
from .regions import Region, partition
from .rules import CHECKS, RULES
from .translate import Translator, has_known_dtype

NAME = "meshfuse"


class RegionCall:
    """A region as a function of its tensors, as this rank has them."""

    def __init__(self, fd: TracedDefinition, backend: str | None) -> None:
        self.fd, self.backend = fd, backend
        ranks = named_ranks(fd.recording, 1)
        self._is_simulated = World.current().size == 1 and len(ranks) > 1
        draws = any(node.draws for node in fd.recording.nodes)
        self._draw = GeneratorDraws(ranks) if draws else None

    def __call__(self, *tensors: Any) -> list[Any]:
        if self._draw is not None:
            self.fd.seed_with(self._draw())
        if self._is_simulated:
            return self.fd.simulate(tensors)
        return self.fd.execute(tensors, idle_ranks=True, backend=self.backend)

    def __repr__(self) -> str:
        return repr(self.fd)


class MeshExecutor(FusionExecutor):
    """Claims what lies between Thunder's own communication, and runs it as definitions.

    backend: what computes segments, as of `fd.execute`.
    mesh: that of all ranks; Thunder's collectives along its axes are taken into regions. None to leave them alone.
    """

    def __init__(self, backend: str | None, mesh: DeviceMesh | None = None) -> None:
        super().__init__(NAME)
        self.backend = backend
        self.whole = WholeMesh(mesh) if mesh is not None and World.current().size > 1 else None
        for symbol in (*RULES, MeshPrims.MESH_SPLIT, MeshPrims.MESH_LOCAL):
            self.register_supported(symbol, CHECKS.get(symbol))
        self.register_supported(SYMBOL, takes, grad_transform=gradient)

    def can_execute_or_fuse(self, bsym: Any) -> bool:
        """Thunder asks this before it takes our gradient of a symbol: attention that is written out has none."""
        return self.can_execute(bsym) if bsym.sym.id == SYMBOL.id else super().can_execute_or_fuse(bsym)

    def get_fuel(self, amount: int = 1, /) -> bool:
        return True

    def set_fuel(self, value: Any) -> None:
        pass

    def fusion_pass(self, trace: Any) -> Any:
        """Put definitions in the place of regions; how the tensors between them lie is planned for all of them."""
        trace = dce(trace)
        bsyms, found = trace.bound_symbols, None
        if self.whole is not None:
            taken = self.whole.taken(bsyms, mesh_of(bsyms))
            found = self._fused(bsyms, taken) if taken.moves else None
        made = from_trace(trace)
        made.bound_symbols = self._fused(bsyms, Taken()) if found is None else found
        made.set_provenance(TraceProvenance("Fusion by meshfuse"))
        return made

    def _fused(self, bsyms: Any, taken: Taken) -> list[Any] | None:
        """The symbols with definitions in the place of regions; None where collectives cannot be taken in so."""
        parts, mesh = partition(bsyms, self._fuses, taken), mesh_of(bsyms)
        plan, numbers = planned(parts, mesh, taken), itertools.count()
        placed = self.whole.placed(plan, parts, taken) if self.whole is not None and taken.moves else {}
        found = [
            self._region(item, plan, placed, taken, next(numbers)) if isinstance(item, Region) else item
            for item in parts.items
        ]
        return None if None in found else found

    def _region(
        self, region: Region, plan: dict[str, Sharding], placed: dict[str, Sharding], taken: Taken, number: int
    ) -> Any:
        """The symbol of a region: on the mesh of the plan, or with collectives on the whole one, as `placed` there."""
        if not any(bsym in taken for bsym in region.bsyms):
            return self.fuse(_with_layouts(region, plan), number)
        assert self.whole is not None
        to = _written(region, placed, taken, self.whole)
        axes = {move.axis for move in taken.moves.values()}
        if not moves_alone(to.fd.compile(), axes, to.moved, World.current().rank):
            return None
        call, bound = RegionCall(to.fd, self.backend), _with_layouts(region, placed)
        return _symbol(self, f"{NAME}{number}", call, list(region.inputs), list(region.outputs), bound.bound_symbols)

    def _fuses(self, bsym: Any) -> bool:
        tensors = [x for x in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs) if isinstance(x, TensorProxy)]
        one_device = len({x.device for x in tensors}) == 1
        return one_device and all(map(has_known_dtype, tensors)) and self.can_fuse(bsym)

    def fuse(self, region: Any, fusion_counter: int) -> Any:
        """A symbol that runs a region. All that it needs is in the region: how its inputs and outputs lie as well."""
        inputs, outputs = ([_proxy(x) for x in side] for side in (region.inputs, region.outputs))
        call = RegionCall(_definition(region.bound_symbols, inputs, outputs), self.backend)
        return _symbol(self, f"{NAME}{fusion_counter}", call, inputs, outputs, region.bound_symbols)


def _symbol(
    ex: FusionExecutor, name: str, call: RegionCall, inputs: list[TensorProxy], outputs: list[TensorProxy], bsyms: Any
) -> Any:
    """A symbol that runs a region. Thunder is not told that it is a fusion: its rematerialization moves ops from fusion
    to fusion, and here what goes between them is planned already.
    """

    def bound(bsym: Any) -> None:
        bsym._call_ctx = {name: call}

    made = Symbol(name=name, id=name, meta=lambda *_: tuple(outputs), executor=ex, _bind_postprocess=bound)
    return made.bind(*inputs, output=outputs, subsymbols=tuple(bsyms))


def _proxy(x: Any) -> TensorProxy:
    return x if isinstance(x, TensorProxy) else unvariableify(x)


def _with_layouts(region: Region, shardings: dict[str, Sharding]) -> Any:
    """A region in which it is said how its inputs and outputs lie."""
    first, last = (
        [mesh_layout.bind(x, shardings[x.name], output=x) for x in side] for side in (region.inputs, region.outputs)
    )
    return _Bound((*first, *region.bsyms, *last), region.inputs, region.outputs)


class _Bound:
    """What `fuse` takes, as Thunder's own regions have it."""

    def __init__(self, bound_symbols: tuple[Any, ...], inputs: Any, outputs: Any) -> None:
        self.bound_symbols, self.inputs, self.outputs = bound_symbols, inputs, outputs


def _definition(bsyms: Iterable[Any], inputs: list[TensorProxy], outputs: list[TensorProxy]) -> TracedDefinition:
    layouts = {b.args[0].name: b.args[1] for b in bsyms if b.sym.id is MeshPrims.MESH_LAYOUT}
    known = locals_of(bsyms)
    to = Translator(TracedDefinition(search="fast"))
    for x in inputs:
        take(to, x, known, layouts[x.name])
    for bsym in bsyms:
        to.write(bsym)
    for x in outputs:
        to.end(x, layouts[x.name])
    return to.fd


def _written(region: Region, shardings: dict[str, Sharding], taken: Taken, whole: WholeMesh) -> Translator:
    """A region on the whole mesh, with every tensor where the plan has it."""
    placed = {x.name: shardings[x.name] for x in (*region.inputs, *region.outputs)}
    to = Translator(TracedDefinition(search="follow"), taken=taken, whole=whole, layouts=shardings)
    known = {**locals_of(region.bsyms), **taken.planned}
    for x in region.inputs:
        if x.name in known:
            to.take_local(x, known[x.name]._replace(sharding=placed[x.name]))
            to.moved.update([to.locals[x.name].id] if x.name in taken.placed else [])
        else:
            to.take(x, placed[x.name])
    for bsym in region.bsyms:
        to.write(bsym)
    for x in region.outputs:
        to.end(x, placed[x.name])
    return to


def executor(backend: str | None = None, mesh: Any = None) -> MeshExecutor:
    """An executor for `thunder.jit(executors=[...])`, where it must stand before Thunder's own.

    mesh: meshfuse's or torch's mesh of all ranks. Thunder's all-gathers, all-reduces and reduce-scatters along its axes
        are then parts of regions; without it they run between them.

    backend: what computes segments between communications: "eager", "inductor", "nvfuser" or "auto", as of
        `fd.execute`; None is MESHFUSE_BACKEND, else "auto".

    Raises DefinitionError for another backend, and for what is no mesh.
    """
    line = caller_line()
    requested(backend, line)
    return MeshExecutor(backend, None if mesh is None else checked_mesh(mesh, line))


register_executor(MeshExecutor(None))
