"""`fd.fec` and `fd.ke`: what a script can ask of a definition that has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compiler import CompiledProgram
from ..definition.namespaces import Fusion as CoreFusion
from ..errors import DefinitionError, caller_line, user_error
from .active import NvfuserDefinition, definition_of
from .multidevice import Sharding


class EmptyDefinitionError(DefinitionError, NotImplementedError):
    """A definition without any ops or outputs was executed."""


class ExecutorError(DefinitionError, AssertionError):
    """A call out of order: the definition already runs in the other way, or has not run yet."""


class FusionExecutorCache:
    """A definition that runs by `execute`. Where nvFuser shows texts of kernels, it shows this rank's program.

    Made from a fusion, it runs the fusion's definition.
    """

    def __init__(self, fusion: CoreFusion, fusion_id: int = 0, auto_schedule: bool = True):
        self.definition = definition_of(fusion, "FusionExecutorCache")
        self.fusion_id, self._fusion = fusion_id, fusion

    @property
    def compiled(self) -> CompiledProgram:
        """The program of the last execution. Raises ExecutorError before the first."""
        if self.definition._ran is None:
            raise user_error("FusionExecutorCache: the fusion has not run yet", do="Call execute(inputs) first.",
                             where=caller_line(), cls=ExecutorError)  # fmt: skip
        return self.definition._ran

    def get_output_shardings(self) -> list[Sharding]:
        """The sharding of every output of the last execution."""
        shardings = self.compiled.output_shardings()
        pairs = zip(shardings, self.definition._bound_outputs(self.compiled), strict=True)
        found = [Sharding(sharding, ones) for sharding, ones in pairs]
        return [sharding for place, sharding in enumerate(found) if place not in self.definition._aliases]

    def fusion(self) -> Any:
        return self._fusion

    def is_compiled(self, inputs: Sequence[Any] = (), **options: Any) -> bool:
        """Whether there has been an execution."""
        return self.definition._ran is not None

    def execute(self, inputs: Sequence[Any], **options: Any) -> list[Any]:
        return self.definition.execute(inputs, **options)

    def get_scheduled_ir(self, inputs: Sequence[Any] = (), **options: Any) -> str:
        return self.definition._program_text()

    get_most_recent_scheduled_ir = get_cuda_kernel = get_scheduled_ir


class KernelExecutor:
    """A definition that runs by `manual_execute`, on torch's kernels: a script's schedule has no effect."""

    def __init__(self, fusion_id: int = 0, concrete_id: int = 0, runtime_id: int = 0, group_id: int = 0) -> None:
        self._definition: NvfuserDefinition | None = None

    def compile(
        self,
        fusion: CoreFusion,
        args: Sequence[Any] = (),
        launch_constraints: Any = None,
        compile_params: Any = None,
        scheduler_type: Any = None,
    ) -> None:
        """Take the definition to run. Launch and compile parameters have no effect on torch's kernels."""
        self._definition = definition_of(fusion, "KernelExecutor.compile")

    def is_compiled(self) -> bool:
        return self._definition is not None

    def is_programmatic_dependent_launch_enabled(self) -> bool:
        """False: torch launches the kernels."""
        return False

    def run(self, args: Sequence[Any], launch_constraints: Any = None, compile_params: Any = None) -> list[Any]:
        """The outputs. Raises ExecutorError before `compile`."""
        if self._definition is None:
            raise user_error("KernelExecutor.run: there is no definition", do="Call compile(fd.fusion, args) first.",
                             where=caller_line(), cls=ExecutorError)  # fmt: skip
        return self._definition._run(args, scheduled=False)
