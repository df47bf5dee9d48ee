"""nvFuser's `FusionDefinition`: meshfuse's, with the names and habits that nvFuser's scripts rely on."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from .. import fusion_definition as core
from ..compiler import CompiledProgram
from ..definition.namespaces import Fusion as CoreFusion
from ..definition.recording import OpNode
from ..definition.tensor_view import TensorView, Val, own
from ..dtypes import DataType
from ..errors import ArgumentError, SourceLine, caller_line, shown, user_error
from ..executor import spmd
from ..ops import OPS
from ..ops.opdef import OpDef
from ..ops.values import TensorRef
from ..programs import Shapes
from ..runtime.world import World
from . import active, profiler, repro
from .active import Methods
from .call_arguments import check_alias, flattened, write_aliases
from .declared import Declared, declared, is_host_scalar
from .executors import EmptyDefinitionError, ExecutorError, FusionExecutorCache, KernelExecutor
from .expanded import fitting
from .exprs import Expr, expression
from .generators import next_draws
from .implied_outputs import annotate_outputs
from .multidevice import Sharding
from .nvfuser_messages import add_sentence, unfit_argument
from .nvfuser_propagation import common_mesh, follow_meshes, followed_outputs, inferred_orders
from .op_calls import Ops
from .printing import function_text
from .schedule import Schedule


class Fusion(CoreFusion):
    """`fd.fusion`: inputs, outputs and all values of a definition.

    `Fusion()` makes a definition of its own, which a FusionGuard makes the active one.
    """

    __slots__ = ("_added",)

    def __init__(self, definition: FusionDefinition | None = None):
        super().__init__(definition or FusionDefinition())
        self._added: list[Any] = []
        if definition is None:
            self.definition._fusion = self

    def add_input(self, input: TensorView | Val) -> None:
        """Put an input that define_tensor or define_scalar returned behind those that were added before it.

        Inputs that are never added come last. Raises DefinitionError for a value that is no input.
        """
        if getattr(input, "ref", None) not in self._fd.recording.inputs or input.ref in self._added:
            raise user_error(
                "add_input", shown(input), "a result of define_tensor or define_scalar, once",
                "Inputs are there already when an fd defines them.", caller_line(),
            )  # fmt: skip
        self._added.append(input.ref)
        self._fd.recording.inputs = [
            *self._added,
            *(ref for ref in self._fd.recording.inputs if ref not in self._added),
        ]

    @property
    def definition(self) -> FusionDefinition:
        return self._fd  # type: ignore[return-value]

    def vals(self) -> list[TensorView | Val]:
        """All tensors and scalars of the definition."""
        tensors = [TensorView(self._fd, TensorRef(i)) for i in range(len(self._fd.recording.tensors))]
        return [*tensors, *(value for value in self.inputs() if isinstance(value, Val))]

    def print_math(self, from_outputs_only: bool = True) -> str:
        """The definition's whole text."""
        return str(self)

    def print_kernel(self, compile_params: Any = None) -> str:
        """This rank's program, as meshfuse has no kernels of its own to show."""
        return self.definition._program_text()

    def add_output(self, output: TensorView, alias_input: TensorView | None = None) -> None:
        self.definition.add_output(output, alias_input)

    def __str__(self) -> str:
        return repr(self._fd)


class FusionDefinition(core.FusionDefinition):
    """nvFuser's definition: a context manager, or the base of a class with a `definition` method.

    That method (and `multidevice_schedule`, in older scripts `multigpu_schedule`) runs once, before the first
    execution, simulation or question, unless the script has called it.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.ops = Ops(self)
        self._fusion = Fusion(self)
        self.sched = Schedule(self)
        self._aliases: dict[int, int] = {}
        self._declared: dict[int, Declared] = {}  # of inputs
        self._fec: FusionExecutorCache | None = None
        self._ke: KernelExecutor | None = None
        self._repro: list[str] | None = None
        self._ran: CompiledProgram | None = None  # by the last execution, whichever way
        self._drawn = (seed or 0, 0)  # what it drew random numbers by
        self._entries: list[Any] = []
        self._entered = False
        self._methods = Methods()
        self._state = frozenset(vars(self))

    def __enter__(self) -> FusionDefinition:
        self._entries.append(active.enter(self))
        self._entered = True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._entries:  # None, where a script calls this by itself.
            active.leave(self._entries.pop())
        super().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return function_text(self.recording, self._aliases, self._declared)

    def define_tensor(
        self,
        shape: Sequence[int] | None = None,
        contiguity: Any = None,
        dtype: Any = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] | None = None,
        **form: Any,
    ) -> TensorView:
        """As in meshfuse. nvFuser's empty `stride_order` means none; contiguity is kept for the definition's text."""
        made = super().define_tensor(shape, contiguity, dtype, is_cpu, stride_order or None, **form)
        self._declared[made.id] = declared(made, contiguity, is_cpu, **form)
        return made

    def from_pytorch(self, tensor: Any, static_sizes: bool = False) -> TensorView:
        made = super().from_pytorch(tensor, static_sizes)
        self._declared[made.id] = Declared.laid_out(tensor.shape, tensor.stride(), is_host_scalar(tensor))
        return made

    def add_output(self, output: TensorView, alias_input: TensorView | None = None) -> None:
        """Return a tensor; with `alias_input` write it into that argument instead, each rank its own shard.

        It is then laid out as the argument is, and left out of the results. Raises DefinitionError for an alias
        that is no input of the tensor's dtype and number of dims, or that another output is written into.
        """
        if alias_input is not None:
            tensor = own(self, output, "add_output", caller_line())
            check_alias(self._aliases, tensor, alias_input, caller_line())
        super().add_output(output)
        if alias_input is not None:
            self._aliases[len(self.recording.outputs) - 1] = alias_input.id

    def prepared(
        self, inputs: Any, *shapes: Sequence[int], gathered: bool = False
    ) -> tuple[core.FusionDefinition, core.FusionDefinition]:
        """As in meshfuse. Raises DefinitionError where an output is written into an argument."""
        if self._aliases:
            written = ", ".join(self.recording.tensors[i].label for i in self._aliases.values())
            raise user_error("prepared: arguments are written", written, "outputs that are returned",
                             "Return them, and copy them into arguments.", caller_line())  # fmt: skip
        return super().prepared(inputs, *shapes, gathered=gathered)

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        """As in meshfuse. Expanded operands of elementwise ops take the sizes of real ones, as in nvFuser."""
        if op.name in OPS:
            args, kwargs = fitting(self, op, args, kwargs, line)
        return super()._apply(op, args, kwargs, line)

    def _expression(self, node: OpNode) -> Expr:
        """An op in the form that nvFuser's scripts look at."""
        return expression(self, node)

    @property
    def ke(self) -> KernelExecutor:
        """What `manual_execute` runs. AttributeError before, as in nvFuser."""
        if self._ke is None:
            raise AttributeError("ke: the definition has not run so; call fd.manual_execute first")
        return self._ke

    @property
    def fec(self) -> FusionExecutorCache:
        """What `execute` runs: made by the first, unless it is set. AttributeError before, as in nvFuser."""
        if self._fec is None:
            raise AttributeError("fec: the definition has not run yet; call fd.execute first")
        return self._fec

    @fec.setter
    def fec(self, cache: FusionExecutorCache) -> None:
        """Take what LRUCache.cache_compile made of this definition's fusion; DefinitionError for anything else."""
        if getattr(cache, "definition", None) is not self:
            raise user_error("fec", shown(cache), "a FusionExecutorCache of this definition's fusion",
                             "Pass cache.cache_compile(fd.fusion).", caller_line())  # fmt: skip
        self._fec = cache

    @property
    def fusion(self) -> Fusion:
        """The fusion of `fec` if there is one, as nvFuser's scripts delete `_fusion` when they have set `fec`."""
        return self._fusion if self._fec is None else self._fec.fusion()

    def shard(self, tensor: TensorView, sharding: Any, mesh: Any = None) -> None:
        super().shard(tensor, sharding.core if isinstance(sharding, Sharding) else sharding, mesh)

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
        if self._ke is not None:
            raise _second("execute after manual_execute", "KernelExecutor already exists! Use manual_execute()")
        values = flattened(self.recording, inputs)
        if save_repro_inputs:
            self._repro = [repro.input_text(value) for value in values]
        return self._run(values, idle_ranks=idle_ranks)

    def _run(self, values: Sequence[Any], *, idle_ranks: bool = True, scheduled: bool = True) -> list[Any]:
        """The outputs from a rank's arguments.

        `scheduled` says, for the profile, that nvFuser would choose the scheduler.
        """
        self._methods.run(self)
        self._check_defined()
        ran: list[spmd.RankProgram] = []
        start = time.perf_counter()
        try:
            with torch.no_grad(), _listening(ran):
                outputs = super().execute(values, idle_ranks=idle_ranks)
        except ArgumentError as error:
            add_sentence(error, unfit_argument(self, values))
            raise
        seconds = time.perf_counter() - start
        self._ran = ran[-1].compiled
        if self._fec is None and scheduled:
            self._fec = FusionExecutorCache(self.fusion)
        if profiler.profiling():
            user = None if scheduled else "user"
            profiler.record(self._ran, World.current().rank, values, outputs, seconds, user)
        return self._written(outputs, values)

    def _written(self, outputs: list[Any], values: Sequence[Any]) -> list[Any]:
        """The outputs that are left when those with an alias are written into their arguments."""
        if not self._aliases:
            return outputs
        return write_aliases(self.recording, self._aliases, outputs, values, caller_line())

    def _random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        """As torch's generator draws, as in nvFuser.

        With a seed of the definition's own, and on several ranks, whose generators may differ, the definition's seed
        counts.
        """
        by_torch = self._drawing > 0 and self.recording.seed is None and World.current().size == 1
        self._drawn = next_draws(device, self._drawing) if by_torch else super()._random_state(device, step)
        return self._drawn

    @functools.cached_property
    def _drawing(self) -> int:
        """How many ops draw random numbers; the definition must not change any more."""
        return sum(node.draws for node in self.recording.nodes)

    def simulate(
        self, inputs: Sequence[Any], *, check_replicas: bool = False, check_streams: bool = False
    ) -> list[Any]:
        values = flattened(self.recording, inputs)
        with torch.no_grad():  # as `execute`
            outputs = super().simulate(values, check_replicas=check_replicas, check_streams=check_streams)
        return self._written(outputs, values)

    def manual_execute(self, inputs: Sequence[Any], heuristic_params: Any = None) -> list[Any]:
        """`execute`, by a KernelExecutor. ExecutorError after an `execute`."""
        if self._fec is not None:
            raise _second("manual_execute after execute", "FusionExecutorCache already exists! Use execute()")
        self._ke = self._ke or KernelExecutor()
        if not self._ke.is_compiled():
            self._ke.compile(self.fusion, inputs)
        return self._ke.run(flattened(self.recording, inputs))

    def validate_definition(self) -> tuple[bool, str | None]:
        """(whether it can run, what is wrong)."""
        if not self.recording.tensors and not self.recording.scalars:
            return False, "the definition has no content"
        return (True, None) if self.recording.outputs else (False, "the definition has no outputs")

    def _check_defined(self) -> None:
        valid, problem = self.validate_definition()
        if not valid:
            raise user_error(
                str(problem), "", "inputs, ops and at least one output", self._to_define(), caller_line(),
                EmptyDefinitionError,
            )  # fmt: skip

    def _to_define(self) -> str:
        if not self._entered and not self.recording.tensors:
            return "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion."
        return f"{'' if self.recording.tensors else 'Fusion is empty! '}Call fd.add_output(t) for what it is to return."

    def _complete(self) -> None:
        self._methods.run(self)
        follow_meshes(self.recording)

    def _output_orders(self) -> list[tuple[int, ...] | None]:
        """The memory order of every output: as annotated, else as the inputs' orders lead to."""
        stated, inferred = super()._output_orders(), inferred_orders(self.recording)
        return [
            order if order is not None or self._says_order(tensor) else inferred[tensor]
            for tensor, order in zip(self.recording.outputs, stated, strict=True)
        ]

    def _says_order(self, tensor: int) -> bool:
        annotation = self.recording.all_annotations.get(tensor)
        return annotation is not None and annotation.allocation is not None

    def _unsharded(self) -> FusionDefinition:
        """The same program without annotations, which draws the same random numbers as the last execution did."""
        plain = object.__new__(type(self))
        plain.__dict__.update(vars(self))
        plain._set_up(self.recording.without_annotations(self._drawn[0]))
        plain._execution.steps["simulated"] = self._drawn[1]
        return plain

    # asking

    def _program_text(self) -> str:
        """This rank's program of the last execution; the definition where there was none."""
        rank = World.current().rank
        if self._ran is None or rank not in self._ran.ranks:
            return repr(self)
        return str(self._ran.host_program(rank))

    def _before_compiling(self, shapes: Shapes, scalars: Mapping[int, Any]) -> None:
        """Annotate outputs without annotations as nvFuser would leave them."""
        annotate_outputs(self.recording, self._aliases, shapes, scalars)

    def _bound_outputs(self, compiled: CompiledProgram) -> list[dict[str, int]]:
        """For every output, by mesh axis of one rank the dim that is bound to it."""
        sizes = tuple((i, compiled.graph.shape(i)) for i in sorted(compiled.graph.input_tensors))
        made_for = next(key for key in self._programs.compiled if key.shapes == sizes)
        mesh = common_mesh(self.recording)
        found = followed_outputs(self.recording, mesh, dict(sizes), dict(made_for.scalars)) if mesh is not None else []
        ones = [] if mesh is None else [name for name in mesh.names if mesh.axis_size(name) == 1]
        kept = [{name: d for name, d in (bound or {}).items() if name in ones} for bound in found]
        return kept or [{} for _ in self.recording.outputs]

    def last_repro_script(self) -> str:
        """A script that runs the definition on inputs of the shapes that were saved.

        Raises ExecutorError unless the last execution had save_repro_inputs=True.
        """
        if self._repro is None:
            raise user_error(
                "last_repro_script: no inputs were saved",
                do="fd.last_repro_script() cannot provide a repro because "
                "fd.execute(inputs, save_repro_inputs=True) was not executed!",
                where=caller_line(),
                cls=ExecutorError,
            )
        return repro.script(self, self._repro)

    def repro_script_for(self, inputs: Sequence[Any] | None = None) -> str:
        """A script that runs the definition on inputs with these inputs' shapes."""
        given = None if inputs is None else [repro.input_text(value) for value in flattened(self.recording, inputs)]
        return repro.script(self, given)

    def validate(
        self, inputs: Sequence[Any], reference_outputs: Sequence[Any] | None = None, device: Any = None, **options: Any
    ) -> list[Any]:
        """Execute and compare with the given shards, or with the same definition without any sharding.

        Returns the outputs. `options` are those of `execute`, and tolerances (rtol, atol); AssertionError where the
        outputs differ by more than these allow.
        """
        given = {name: options.pop(name) for name in _EXECUTION if name in options}
        return repro.compared(self, self.execute(inputs, device=device, **given), inputs, reference_outputs, options)

    def manual_validate(
        self, inputs: Sequence[Any], reference_outputs: Sequence[Any] | None = None, **tolerances: Any
    ) -> list[Any]:
        """`validate`, by `manual_execute`."""
        return repro.compared(self, self.manual_execute(inputs), inputs, reference_outputs, tolerances)


# What `execute` takes besides its arguments.
_EXECUTION = ("auto_schedule", "save_repro_inputs", "_enable_options", "_disable_options", "idle_ranks")


def _second(what: str, do: str) -> Exception:
    """The error of a definition that is run in a second way, when its profile and its cache are those of the first."""
    return user_error(what, do=f"{do} to execute the fusion.", where=caller_line(), cls=ExecutorError)


@contextlib.contextmanager
def _listening(ran: list[spmd.RankProgram]) -> Iterator[None]:
    """In this context, collect the programs that this process runs."""
    spmd.finished.append(ran.append)
    try:
        yield
    finally:
        spmd.finished.remove(ran.append)
