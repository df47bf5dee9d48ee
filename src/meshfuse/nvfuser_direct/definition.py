"""nvFuser's `FusionDefinition`: meshfuse's, with the names and habits that nvFuser's scripts rely on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import fusion_definition as core
from ..compiler import CompiledProgram
from ..definition.namespaces import Fusion as CoreFusion
from ..definition.namespaces import OpNamespace
from ..definition.tensor_view import TensorView, Val
from ..errors import caller_line, user_error
from ..executor import spmd
from ..ops.base import TensorRef
from ..runtime.world import World
from ..sharding.layout import Split
from . import profiler, repro
from .followed import common_mesh, followed_outputs
from .multidevice import DeviceMesh, Sharding
from .strides import inferred_orders


class Ops(OpNamespace):
    """`fd.ops`, with the argument order that sdpfa_fwd had before it took a bias and a mask."""

    __slots__ = ()

    def sdpfa_fwd(self, query: Any, key: Any, value: Any, *options: Any, **named: Any) -> Any:
        """Attention. The options are bias, mask, dropout_p, is_causal, scale; or only the last three."""
        if options and not isinstance(options[0], (TensorView, type(None))):
            options = (None, None, *options)
        return self._fd.call("sdpfa_fwd", (query, key, value, *options), named)


class Fusion(CoreFusion):
    """`fd.fusion`: inputs, outputs and all values of a definition."""

    __slots__ = ()

    @property
    def definition(self) -> FusionDefinition:
        return self._fd  # type: ignore[return-value]

    def vals(self) -> list[TensorView | Val]:
        """All tensors and scalars of the definition."""
        tensors = [TensorView(self._fd, TensorRef(i)) for i in range(len(self._fd.tensors))]
        return [*tensors, *(value for value in self.inputs() if isinstance(value, Val))]

    def print_math(self) -> None:
        """Print the definition."""
        print(self)

    def __str__(self) -> str:
        return repr(self._fd)


@dataclass(frozen=True, slots=True)
class FusionExecutorCache:
    """What a script asks of a definition that has run."""

    definition: FusionDefinition
    compiled: CompiledProgram

    def get_output_shardings(self) -> list[Sharding]:
        """How each output of the last execution lies on its mesh."""
        shardings = self.compiled.output_shardings()
        pairs = zip(shardings, self.definition.bound_outputs(self.compiled), strict=True)
        return [Sharding(sharding, ones) for sharding, ones in pairs]

    def fusion(self) -> Fusion:
        return self.definition.fusion

    def is_compiled(self, inputs: Sequence[Any] = ()) -> bool:
        """True: it exists once there has been an execution."""
        return True


class FusionDefinition(core.FusionDefinition):
    """nvFuser's definition: a context manager, or a subclass with a `definition` method.

    That method (and `multidevice_schedule`) runs at the first execution, unless the script has called it.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.ops = Ops(self)
        self.fusion = Fusion(self)
        self._fec: FusionExecutorCache | None = None
        self._repro: list[str] | None = None

    def __enter__(self) -> FusionDefinition:
        return self

    def define_tensor(self, *args: Any, **options: Any) -> TensorView:
        """As meshfuse's; nvFuser's empty `stride_order` means none."""
        if "stride_order" in options and not options["stride_order"]:
            del options["stride_order"]
        return super().define_tensor(*args, **options)

    @property
    def fec(self) -> FusionExecutorCache:
        """What the last execution ran. AttributeError before the first, as in nvFuser."""
        if self._fec is None:
            raise AttributeError("fec: the definition has not run yet; call fd.execute first")
        return self._fec

    # annotating: meshes are kept as meshfuse writes them, for the definition's text

    def annotate_mesh(self, tensor: TensorView, mesh: Any) -> None:
        super().annotate_mesh(tensor, _plain(mesh))

    def mesh_split(self, tensor: TensorView, mesh: Any, spec: Sequence[Any]) -> None:
        super().mesh_split(tensor, _plain(mesh), spec)

    def shard(self, tensor: TensorView, sharding: Any, mesh: Any = None) -> None:
        plain = sharding.core if isinstance(sharding, Sharding) else sharding
        super().shard(tensor, plain, _plain(mesh))

    # running

    def execute(
        self,
        inputs: Sequence[Any],
        *,
        device: Any = None,
        auto_schedule: bool = True,
        save_repro_inputs: bool = False,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
        idle_ranks: bool = True,
    ) -> list[Any]:
        """This rank's shards (or DTensors) of the outputs from its shards of the inputs, without gradients.

        It runs where the inputs are. `device`, `auto_schedule` and the options change nothing. Raises as
        meshfuse's `execute` does.
        """
        self._define_by_methods()
        values = list(inputs)
        if save_repro_inputs:
            self._repro = [repro.input_text(value) for value in values]
        ran: list[spmd.RankProgram] = []
        start = time.perf_counter()
        with torch.no_grad(), _listening(ran):
            outputs = super().execute(values, idle_ranks=idle_ranks)
        if ran[-1].compiled is not getattr(self._fec, "compiled", None):
            self._fec = FusionExecutorCache(self, ran[-1].compiled)
        if profiler.profiling():
            profiler.record(self.fec.compiled, World.current().rank, values, outputs, time.perf_counter() - start)
        return outputs

    def manual_execute(self, inputs: Sequence[Any], heuristic_params: Any = None) -> list[Any]:
        """`execute`: meshfuse has no schedules that a script could choose by hand."""
        return self.execute(inputs)

    def _define_by_methods(self) -> None:
        if self.tensors:
            return
        for name in ("definition", "multidevice_schedule"):
            method = getattr(self, name, None)
            if method is not None:
                method()

    def output_orders(self) -> list[tuple[int, ...] | None]:
        """The memory order of every output: as annotated, else as it comes through from the inputs."""
        stated, inferred = super().output_orders(), inferred_orders(self)
        return [
            order if order is not None or self._says_order(tensor) else inferred[tensor]
            for tensor, order in zip(self.outputs, stated, strict=True)
        ]

    def _says_order(self, tensor: int) -> bool:
        annotation = self.all_annotations.get(tensor)
        return annotation is not None and annotation.allocation is not None

    def share_programs(self, other: FusionDefinition) -> None:
        """Use what was compiled for an equal definition. Its random numbers go on from that one's."""
        self._compiled, self._bound, self._simulated = other._compiled, other._bound, other._simulated
        self._steps = other._steps

    # asking

    def program_text(self) -> str:
        """This rank's program of the last execution; the definition where there was none."""
        rank = World.current().rank
        if self._fec is None or rank not in self._fec.compiled.ranks:
            return repr(self)
        return str(self._fec.compiled.host_program(rank))

    def _compile(self, found: Any, shapes: Any, world: Any, line: Any) -> CompiledProgram:
        """Outputs that nothing is said of lie where nvFuser leaves them, as the first shapes tell."""
        if not self._compiled and (mesh := common_mesh(self)) is not None:
            scalars = {i: found.scalars[i] for i in self._sized_by() if i in found.scalars}
            for tensor, bound in zip(self.outputs, followed_outputs(self, shapes, scalars), strict=True):
                if bound is not None and tensor not in self.annotations:
                    self._annotate_output(tensor, mesh, bound, line)
        return super()._compile(found, shapes, world, line)

    def _annotate_output(self, tensor: int, mesh: Any, bound: Mapping[str, int], line: Any) -> None:
        dims: list[tuple[Split, ...]] = [()] * self.tensors[tensor].type.ndim
        for axis, dim in bound.items():
            dims[dim] = (*dims[dim], Split(mesh.axis_size(axis), axis))
        self._annotate(TensorView(self, TensorRef(tensor)), mesh, dims, line)

    def bound_outputs(self, compiled: CompiledProgram) -> list[dict[str, int]]:
        """For every output the dims that are bound to mesh axes of one rank."""
        shapes, scalars, _ = next(key for key, made in self._compiled.items() if made is compiled)
        mesh = common_mesh(self)
        found = followed_outputs(self, dict(shapes), dict(scalars)) if mesh is not None else []
        ones = [] if mesh is None else [name for name in mesh.names if mesh.axis_size(name) == 1]
        kept = [{name: d for name, d in (bound or {}).items() if name in ones} for bound in found]
        return kept or [{} for _ in self.outputs]

    def last_repro_script(self) -> str:
        """A script that runs the definition on inputs of the shapes that were saved.

        Raises DefinitionError unless the last execution had save_repro_inputs=True.
        """
        if self._repro is None:
            raise user_error(
                "last_repro_script: no inputs were saved",
                needed="fd.execute(inputs, save_repro_inputs=True)",
                where=caller_line(),
            )
        return repro.script(self, self._repro)

    def repro_script_for(self, inputs: Sequence[Any] | None = None) -> str:
        """A script that runs the definition on inputs of the shapes of these."""
        return repro.script(self, [repro.input_text(value) for value in inputs or ()])

    def validate(
        self, inputs: Sequence[Any], reference_outputs: Sequence[Any] | None = None, **tolerances: Any
    ) -> list[Any]:
        """Execute and compare with the given shards, or with the same definition without any sharding.

        Returns the outputs. AssertionError where they differ by more than `tolerances` (rtol, atol) allow.
        """
        outputs = self.execute(inputs)
        expected = repro.unsharded_outputs(self, inputs) if reference_outputs is None else reference_outputs
        for found, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, wanted, **tolerances)
        return outputs


def _plain(mesh: Any) -> Any:
    return mesh.plain() if isinstance(mesh, DeviceMesh) else mesh


@contextlib.contextmanager
def _listening(ran: list[spmd.RankProgram]) -> Iterator[None]:
    """Collect the programs that this process runs."""
    spmd.finished.append(ran.append)
    try:
        yield
    finally:
        spmd.finished.remove(ran.append)


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Sequence[Any]) -> list[Any]:
    """DTensors in, DTensors out, on the mesh (its dim names included) of the inputs.

    Raises ArgumentError where an input's placements are not as annotated.
    """
    outputs = fd.execute(list(in_dtensors))
    pairs = zip(outputs, fd.fec.get_output_shardings(), strict=True)
    return [out if out is None or not sharding.ones else _with_ones(out, sharding) for out, sharding in pairs]


def _with_ones(out: Any, sharding: Sharding) -> Any:
    """The DTensor with the placements that say the same over mesh axes of one rank."""
    from torch.distributed.tensor import DTensor, Shard

    names, ones = sharding.core.mesh.names, sharding.ones
    placements = [Shard(ones[name]) if name in ones else p for name, p in zip(names, out.placements, strict=True)]
    return DTensor.from_local(
        out.to_local(), out.device_mesh, placements, run_check=False, shape=out.shape, stride=out.stride()
    )
