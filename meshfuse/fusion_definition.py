"""`FusionDefinition`: define, annotate, run on real or simulated ranks, and ask what was decided."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from . import recorded_calls
from .argument_checks import as_int, check_flags
from .automatic_plan import AutoPlan
from .compiler import CompiledProgram
from .definition import annotating
from .definition.attributes import calling_ours, check_attribute
from .definition.checks import checked_mesh
from .definition.namespaces import Fusion
from .definition.op_namespace import OpNamespace
from .definition.recording import Recording
from .definition.tensor_view import TensorView, own, own_all
from .definition.written import WrittenDefinition
from .errors import caller_line, line_in_script, shown, user_error
from .execution import Execution
from .host_ir import HostProgram
from .html_text import Lines, html_lines
from .plans.halves import write_halves
from .preparation import prepared
from .programs import Programs, Shapes
from .recorded_calls import Backwards
from .report.bill import Bill, bill_of
from .report.explain import explain_all, explain_tensor, tensor_named
from .report.memory import Memory, modelled_memory
from .report.reprint import definition_source
from .report.shown_page import ShownPage, show_page
from .runtime.world import World
from .sharding.value import Sharding

# Called with every definition that is made: so the command line finds a script's definitions.
observers: list[Callable[[FusionDefinition], None]] = []
# What stands between a user's line and the definition that it copies.
_COPYING = ("copy", "copyreg", "pickle", "cloudpickle", "dill", "joblib", "multiprocessing", "torch")


class FusionDefinition(WrittenDefinition):
    """A program written for one large imaginary device, and how a few of its tensors split over a mesh of ranks.

    Use it as a context manager: define inputs, apply `fd.ops`, mark outputs, annotate. Then call it with global
    tensors, `execute` it on this process' rank (shards in, shards out) or `simulate` all ranks here (global tensors in
    and out). The first call with a new set of shapes compiles; later calls with the same shapes plan nothing.

    seed: of the program's random numbers, which are the same on every mesh (None: one that no other definition has,
        which follows from how many were made before).
    max_wire: bytes that a rank may send (None: MESHFUSE_MAX_WIRE, else no bound). A plan that sends more gives a
        PlanWarning that names the annotation to change. Without a bound there is one only for a very large collective,
        where another annotation would halve what the whole plan sends.
    max_memory: bytes that a rank may hold (None: MESHFUSE_MAX_MEMORY, else no bound). Where a plan holds more, gathered
        tensors are dropped after one use and gathered again for the next, then activations lie in parts; where that is
        not enough either, the DefinitionError says what takes the memory.
    search: how to plan (None: MESHFUSE_SEARCH, else "auto"). "follow": by rules alone, as GSPMD does, without prices.
        "fast": the best plan over whole axes, as the program is written. "auto": also written in other ops, and over
        parts of axes where bytes alone decide. "thorough": over parts of axes on all links.

    promotion: the type of elementwise ops of half precision: "nvfuser" (Float: nothing is rounded between ops), or
        "torch" (the operands' own: every result is rounded to it, by a cast that `print(fd)` shows).

    `recording` is what the script has written: tensors, ops, inputs, outputs and annotations, as data. The methods that
    ask about a plan take global `shapes`, one per input tensor, and without them mean the latest program: the one that
    ran or was compiled last.

    Raises DefinitionError for a seed, bound, search or promotion that is none of these.
    """

    _state: frozenset[str] = frozenset()  # The names of a made definition's own attributes.

    def __init__(
        self, seed: int | None = None, *, max_wire: float | None = None, max_memory: float | None = None,
        search: str | None = None, promotion: str = "nvfuser",
    ) -> None:  # fmt: skip
        if not isinstance(promotion, str) or promotion not in ("nvfuser", "torch"):
            raise user_error("FusionDefinition: promotion", shown(promotion), "'nvfuser' or 'torch'", "",
                             caller_line())  # fmt: skip
        if seed is not None and as_int(seed) is None:
            needed = "an int or None"
            do = "Pass the seed of its random numbers; its ops are defined by calls of fd.ops."
            raise user_error("FusionDefinition: seed", shown(seed), needed, do, caller_line())
        self._set_up(Recording(seed), max_wire, max_memory, search)
        self.recording.rounds = promotion == "torch"
        self.ops = OpNamespace(self)
        self._fusion = Fusion(self)
        self._state = frozenset(vars(self))
        for observe in observers:
            observe(self)

    def _set_up(
        self, recording: Recording, max_wire: float | None = None, max_memory: float | None = None,
        search: str | None = None,
    ) -> None:  # fmt: skip
        self.recording = recording
        self._programs = Programs(self, max_wire, max_memory, search)
        self._execution, self._backwards = Execution(self, self._programs), Backwards()

    def __setattr__(self, name: str, value: Any) -> None:
        """Scripts keep tensors as attributes. Raises DefinitionError for a name that the definition itself uses."""
        check_attribute(type(self), self._state, name, value, caller_line)
        super().__setattr__(name, value)

    def __init_subclass__(cls) -> None:
        """Check that the `__init__` of a subclass calls this one's: an error where it is instantiated says so."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            setattr(cls, "__init__", calling_ours(cls.__init__))  # noqa: B010  # no type of a method fits

    def __enter__(self) -> FusionDefinition:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def __repr__(self) -> str:
        return definition_source(self.recording)

    def _repr_html_(self) -> str:
        """The text of the definition, and the bill of its latest program if it has one."""
        made = self._programs.compiled
        return html_lines(repr(self)) + (bill_of(self.latest())._repr_html_() if made else "")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises DefinitionError: pickles and copies would share half of a definition."""
        raise user_error(
            "a definition cannot be copied or pickled", type(self).__name__, "the code that makes it",
            "Call that code again where another is needed; print(fd) is it.",
            line_in_script(sys._getframe(1), _COPYING),
        )  # fmt: skip

    # plan

    def auto(
        self, mesh: Any, *shapes: Sequence[int], max_memory: float | None = None,
        updates: Mapping[TensorView, TensorView] | None = None,
    ) -> AutoPlan:  # fmt: skip
        """Annotate every input that has no annotation, so that a step takes the least time on a mesh.

        Data, tensor, sequence and fully sharded parallelism, and what is between them, come out of one optimisation:
        each input may be split by any axes that divide its dims, and a gradient lies as the input whose gradient it is.
        Annotations that are there already bind. `print` of the result shows the calls to paste. Call it when all ops
        and outputs are written.

        shapes: the global shape of each input tensor; without them those of the definition. The inputs' places are
            chosen for these sizes, and stay for others.
        max_memory: bytes that a rank may hold, and the definition's bound from now on (None: the bound that it has).
            The fastest plan that is found to hold no more.
        updates: by input the output that is its next value, and lies as it does.

        Raises DefinitionError for a definition without outputs, for annotations on another mesh, and where no plan
        holds as little as `max_memory`.
        """
        line = self.recording.line_of_change()
        if not isinstance(updates, Mapping | None):
            raise user_error("auto: updates", shown(updates), "a dict of tensors by tensors",
                             "Pass {w: new_w}, by input the output that is its next value.", line)  # fmt: skip
        given = [own_all(self, pair, "auto: updates", line) for pair in (updates or {}).items()]
        pairs = {new.id: old.id for old, new in given}
        found, plan = self._programs.automatic(checked_mesh(mesh, line), shapes, max_memory, pairs, line)
        for tensor, sharding in found.items():
            annotating.shard(self.recording, tensor, sharding, None, line)
        return plan

    def pipeline(
        self, mesh: Any, pipeline: Any, *, loss: TensorView, wrt: Sequence[TensorView], cut: Sequence[TensorView],
        batch: Sequence[TensorView],
    ) -> Any:  # fmt: skip
        """This definition in stages over an axis of a mesh, worked off in micro-batches: a step gives loss, gradients.

        The definition is written for one micro-batch, on `mesh` without the pipeline's axis: stage k lies so on its own
        ranks. It needs no outputs and no `fd.grad`.

        pipeline: an `mf.Pipeline`: the axis, the schedule and the number of micro-batches.
        loss: a tensor without dims, the mean over a micro-batch's rows. wrt: weights whose gradients are wanted.
        cut: the last tensors of all stages but the last; ops behind one, in the order of the definition, are the next
            stage's. What follows from no weight is computed by each stage that reads it.
        batch: inputs that are cut into micro-batches along their first dim.

        The result has `simulate(inputs)` and `execute(inputs)`, which return the loss of the whole batch and a list of
        gradients, and `schedule()`, `bill()` and `memory()`.

        Raises DefinitionError for what does not fit.
        """
        line = self.recording.line_of_change()
        if not hasattr(pipeline, "of_definition"):
            raise user_error("fd.pipeline", shown(pipeline), "an mf.Pipeline",
                             'Pass mf.Pipeline("pp", "1f1b", microbatches=8).', line)  # fmt: skip
        given = {"loss": [loss], "wrt": wrt, "cut": cut, "batch": batch}
        views = [own_all(self, some, f"pipeline: {name}", line) for name, some in given.items()]
        return pipeline.of_definition(self, checked_mesh(mesh, line), views, line)

    # run

    def execute(
        self, inputs: Sequence[Any], *, idle_ranks: bool = False, backend: str | None = None, cuda_graph: bool = False
    ) -> list[Any]:  # fmt: skip
        """Run on this process' rank, on shards.

        `inputs` are this rank's shards of the input tensors (or DTensors), and scalars, in the order of their
        definition. Returns this rank's shard of every output: DTensors if an input was one, None for an output on a
        mesh that this rank is not part of.

        idle_ranks: allow a mesh of fewer ranks than the job has. The others need not call this, and may run
            definitions of their own meanwhile; where they do call it, they get None.
        backend: what computes the segments between communications: "eager" (torch, op by op), "inductor", "nvfuser", or
            "auto" (eager until compiling pays). None is MESHFUSE_BACKEND, else "auto".
        cuda_graph: capture the step on a GPU at its first call, and replay it from then on. The program must take no
            scalars and draw no random numbers.

        Outputs carry gradients where an input needs one: `loss.backward()` runs a backward by `fd.grad`. A loss of
        shards is that of the rank's own part, and the gradients are of the sum over ranks; of whole outputs every rank
        must make the same loss.

        Raises ArgumentError for arguments that do not fit, RankError where a peer fails or disagrees, RankTimeout where
        one does not answer, and KernelError or OutOfMemoryError where torch cannot compute an op.
        """
        options = (idle_ranks, backend, cuda_graph)
        return recorded_calls.run(self, lambda execution, given: execution.execute(given, options), inputs)

    def simulate(
        self, inputs: Sequence[Any], *, check_replicas: bool = False, check_streams: bool = False
    ) -> list[torch.Tensor]:
        """Run all ranks' programs in this process, on global tensors; returns the global outputs.

        check_replicas: compare all replicas of each shard of the outputs; AssertionError where two differ.
        check_streams: follow each rank's kernels and communications as a GPU would order them, by streams and events
            alone; AssertionError where two of them use the same memory and nothing orders them.

        Raises ArgumentError for arguments that do not fit.
        """
        return recorded_calls.run(
            self, lambda execution, given: execution.simulate(given, check_replicas, check_streams), inputs
        )

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """Global tensors in and out, on the ranks that a launcher started; on simulated ones where it started none.

        Outputs carry gradients where an input needs one: `loss.backward()` runs a backward by `fd.grad`, which is
        planned when it is first asked for. On real ranks every rank must pass the same tensors: the first call with new
        shapes compares them, and raises RankError where they differ. Other errors are those of `execute`.
        """
        if World.current().size == 1:
            return self.simulate(inputs)
        return recorded_calls.run(self, Execution.on_launched_ranks, inputs)

    def compile(self, *shapes: Sequence[int], scalars: Mapping[int, Any] | None = None) -> CompiledProgram:
        """Compile for these global shapes, one per input tensor; without shapes, for the sizes in the definition.

        `scalars` gives the values of scalar inputs that sizes depend on, by Val. Raises DefinitionError where a size is
        left open, and at the user's line where an op cannot take the sizes.
        """
        return self._programs.compile(shapes, scalars, caller_line())

    def prepared(
        self, inputs: Any, *shapes: Sequence[int], gathered: bool = False
    ) -> tuple[FusionDefinition, FusionDefinition]:
        """Cut this program in two definitions: what follows from `inputs` alone, and everything else.

        For weights that keep their values over many calls, as in inference. The first definition brings them to where
        they are read (a reshard, a cast, a product of two). The second takes the inputs that are left, in their order,
        and then what the first returned::

            once, each = fd.prepared([w])
            kept = once.execute([w_shard])
            out = each.execute([x_shard, *kept])

        gathered: also keep what is more of a tensor than the rank was given, such as a weight gathered from its shards.
            Without it the second definition does what would take more memory (a gather, a broadcast) at every call.

        Neither definition holds more than `max_memory`, as far as leaving more to the second helps.

        Both are for one set of global shapes: `shapes`, one per input tensor, or those of the latest call. The second
        draws other random numbers than this definition. Raises DefinitionError for anything in `inputs` that is no
        input.
        """
        line = caller_line()
        given = [t.id for t in own_all(self, inputs, "prepared", line)]
        check_flags(line, gathered=gathered)
        cut = prepared(self._programs, given, shapes, gathered, line)
        first, rest = self._like(), self._like()
        write_halves(self.recording, cut, first.recording, rest.recording)
        return first, rest

    def _like(self) -> FusionDefinition:
        return FusionDefinition(
            self.recording.seed, max_wire=self.max_wire, max_memory=self.max_memory, search=self._programs.effort.value
        )

    # ask

    def latest_backward(self) -> FusionDefinition:
        """The definition of the gradients that ran last for torch's autograd: ask it for its bill, say.

        Its inputs are this definition's, and then a gradient for each output that has one; its outputs are the
        gradients of the inputs that need one. Raises DefinitionError where no backward has run yet.
        """
        if self._backwards.latest is None:
            raise user_error("no backward of this definition has run yet", "", "a call with inputs that need gradients",
                             "Call loss.backward() on what it returns.", caller_line())  # fmt: skip
        return self._backwards.latest

    @property
    def max_wire(self) -> float | None:
        """The bytes that a rank may send; None for no bound."""
        return self._programs.max_wire

    @max_wire.setter
    def max_wire(self, value: float | None) -> None:
        self._programs.max_wire = value

    @property
    def max_memory(self) -> float | None:
        """The bytes that a rank may hold; None for no bound."""
        return self._programs.max_memory

    @max_memory.setter
    def max_memory(self, value: float | None) -> None:
        self._programs.max_memory = value

    def latest(self, shapes: Sequence[Sequence[int]] = ()) -> CompiledProgram:
        """The program that ran or was compiled last, for these shapes if any are given; compiled if there is none."""
        ran = self._programs.last_run
        return ran.compiled if ran is not None and not shapes else self._programs.latest(shapes, caller_line())

    def explain(self, tensor: TensorView | str | None = None, *shapes: Sequence[int]) -> str:
        """Why a tensor is sharded as it is, and what is communicated for it; without a tensor a table of them all.

        A tensor is named by itself, or as bills call it. Raises DefinitionError for what is none of the definition's.
        """
        line = caller_line()
        if tensor is None:
            return Lines(explain_all(self.latest(shapes)))
        if isinstance(tensor, str):
            compiled = self.latest(shapes)
            return Lines(explain_tensor(compiled, tensor_named(compiled, tensor, line)))
        return Lines(explain_tensor(self.latest(shapes), own(self, tensor, "explain", line).id))

    def bill(self, *shapes: Sequence[int], alternatives: bool = False) -> Bill:
        """The bytes that each rank sends, and their modelled seconds, by collective, mesh axis and source line.

        With `alternatives` each collective also has its runner-up: the best plan in which one of the annotations behind
        it is another one. That takes as long as some compilations; `print(bill.details())` shows them.
        """
        check_flags(caller_line(), alternatives=alternatives)
        return bill_of(self.latest(shapes), alternatives)

    def show(self, path: Any = None, *shapes: Sequence[int], alternatives: bool = False) -> ShownPage:
        """One page with the ops, their shardings, the collectives and a timeline, for a browser; a notebook shows it.

        path: the file to write; None for a temporary one, which a browser opens where there is a terminal, and for none
        in a notebook. With `alternatives` it has every collective's runner-up. Raises DefinitionError for a path that
        cannot be written.
        """
        line = caller_line()
        check_flags(line, alternatives=alternatives)
        return show_page([self.latest(shapes)], path, alternatives, line)

    def memory(self, *shapes: Sequence[int]) -> Memory:
        """The most bytes that a rank holds at once, as modelled, and in what; `print(fd.memory())` shows it."""
        return modelled_memory(self.latest(shapes))

    def host_program(self, rank: int, *shapes: Sequence[int]) -> HostProgram:
        """The program of a rank for the latest (or the given) global shapes, one per input tensor.

        Its text says what computes each kernel, and why, once the rank has bound the program. Raises DefinitionError
        for a rank that the program does not have.
        """
        return self._execution.host_program(self.latest(shapes), rank)

    def output_shardings(self, *shapes: Sequence[int]) -> list[Sharding]:
        """The sharding of every output, in the order of the outputs."""
        return self.latest(shapes).output_shardings()

    def backends(self, *shapes: Sequence[int]) -> str:
        """A table of what computes each segment, and why, for the latest (or the given) shapes.

        Where no rank has bound the program yet it says what MESHFUSE_BACKEND (else "auto") would choose for
        tensors on the CPU.
        """
        return self._execution.backends(self.latest(shapes), caller_line())

    # what a subclass for another front end does otherwise: nvfuser_direct.FusionDefinition

    def _complete(self) -> None:
        """Write what is missing, before the definition is compiled or its arguments are checked."""

    def _before_compiling(self, shapes: Shapes, scalars: Mapping[int, Any]) -> None:
        """Annotate what is missing, before the first program is compiled."""

    def _output_orders(self) -> list[tuple[int, ...] | None]:
        """For every output the stride order that it is returned in; None for row-major."""
        return self.recording.output_orders()

    def _random_state(self, device: torch.device, step: int) -> tuple[int, int]:
        """The seed and the offset by which step number `step` on this device draws random numbers."""
        return self._execution.random_state(step)
