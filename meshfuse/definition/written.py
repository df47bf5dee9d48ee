"""What a script writes of a definition: inputs, ops, outputs, annotations and gradients, as data in a `Recording`.

Nothing here knows a plan: `fusion_definition.py` compiles what was written, runs it, and says what was decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..argument_checks import check_flags
from ..dtypes import DataType
from ..errors import SourceLine, caller_line, shown, user_error
from ..mesh import DeviceMesh
from ..ops.opdef import OpDef
from ..ops.values import ScalarRef
from . import annotating, applying, inputs
from .checks import checked_mesh, named
from .namespaces import Fusion
from .op_namespace import OpNamespace
from .recording import OpNode, Recording
from .reverse import append_gradients
from .row_choices import check_rows
from .tensor_view import TensorView, Val, own, own_all
from .units import declare


class WrittenDefinition:
    """The methods of a FusionDefinition by which a script writes it. Each change has the script's line.

    Raises DefinitionError where a definition that has run, or another one's tensors, would be changed.
    """

    recording: Recording
    ops: OpNamespace
    _fusion: Any  # a Fusion; another front end has one of its own

    # define

    def define_tensor(
        self,
        shape: Sequence[int] | None = None,
        contiguity: Any = None,
        dtype: Any = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        static_sizes: bool = False,
        symbolic_sizes: Sequence[int] | None = None,
        name: str | None = None,
    ) -> TensorView:
        """A new input tensor.

        shape: global sizes; -1 leaves a size to the arguments, which then must be more than 1.
        dtype: nvFuser's or torch's.
        stride_order: for every dim its place in memory, 0 the fastest; arguments must lie so. None: any order.
        sizes, strides: nvFuser's second form, the sizes and strides of an example tensor; sizes other than 1 are left
            open unless `static_sizes`.
        name: what bills and `explain` call the tensor; None for the variable that the line assigns.

        `contiguity`, `is_cpu` and `symbolic_sizes` are nvFuser's; they change nothing here, but for `symbolic_sizes` in
        the place of `shape`. Raises DefinitionError for what is no size, dtype or order of the dims.
        """
        line = named(self.recording.line_of_change(), name, "define_tensor")
        check_flags(line, static_sizes=static_sizes, is_cpu=is_cpu)
        given = sizes if sizes is not None else shape if shape is not None else symbolic_sizes
        ref = inputs.define_tensor(
            self.recording, given, contiguity, dtype, stride_order, strides, static_sizes, line
        )  # fmt: skip
        return TensorView(self, ref)

    def from_pytorch(self, tensor: Any, static_sizes: bool = False) -> TensorView:
        """A new input with the shape, strides and dtype of a torch tensor; of a DTensor also its mesh and placements.

        Sizes other than 1 are left to the arguments unless `static_sizes`. Raises DefinitionError for anything but a
        tensor.
        """
        line = self.recording.line_of_change()
        return TensorView(self, inputs.from_pytorch(self.recording, tensor, static_sizes, line))

    def define_scalar(self, value: Any = None, dtype: Any = None) -> Val:
        """A scalar input of this dtype (Double by default), whose number every call passes; given a number, a constant.

        Raises DefinitionError for what is no number, or none of the dtype.
        """
        line = self.recording.line_of_change()
        return Val(self, inputs.define_scalar(self.recording, value, dtype, line))

    def define_vector(self, size: int | Sequence[Any], dtype: Any = DataType.Int) -> list[Val]:
        """A list of scalars: `size` inputs where it is an int; where it is a list, a constant for each of its numbers.

        Entries that are -1 or scalars already are kept as they are. Raises DefinitionError for anything else.
        """
        line = self.recording.line_of_change()
        made = inputs.define_vector(self.recording, size, dtype, line)
        return [Val(self, entry) if isinstance(entry, ScalarRef) else entry for entry in made]

    def call(self, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Apply an op, by its name or as an OpDef: a TensorView, a tuple of them, or (on scalars alone) a Val."""
        made = applying.call_at(self, caller_line(), name, args, kwargs)
        return applying.rounded(self, made) if self.recording.rounds else made

    def size(self, tensor: TensorView, dim: int) -> Val:
        """The size of a dim (counted from the back if negative) as a scalar of the definition.

        Raises DefinitionError for a dim that the tensor does not have.
        """
        line = self.recording.line_of_change()
        return Val(self, inputs.define_size(self.recording, own(self, tensor, "size", line).ref, dim, line))

    def add_output(self, output: TensorView, alias_input: TensorView | None = None, *, name: str | None = None) -> None:
        """Have the program return this tensor; outputs come in the order of these calls.

        name: what bills and `explain` call the tensor from now on.

        Raises DefinitionError for anything but a tensor of this definition, for rows of experts, and for `alias_input`:
        meshfuse writes into no arguments.
        """
        line = self.recording.line_of_change()
        if alias_input is not None:
            raise user_error(
                "add_output: alias_input", shown(alias_input), "None: meshfuse does not write into arguments",
                "Return the tensor and copy it.", line,
            )  # fmt: skip
        number = own(self, output, "add_output", line).id
        self._check_output(number, line)
        self.recording.name(number, name, line)
        self.recording.outputs.append(number)

    def _check_output(self, number: int, line: SourceLine) -> None:
        made = self.recording.tensors[number]
        if made.type.rows:
            raise user_error(
                f"add_output: {made.label} has rows of experts", str(made.type), "a tensor of a known size",
                "Bring the rows back to their tokens first: fd.ops.moe_combine, or fd.ops.moe_collect.", line,
            )  # fmt: skip

    @property
    def fusion(self) -> Fusion:
        """The definition as a graph of values: its inputs and outputs."""
        return self._fusion

    # annotate

    def mesh_split(
        self, tensor: TensorView, mesh: DeviceMesh, spec: Sequence[Any], stationary: bool | str | Sequence[str] = False
    ) -> None:
        """Annotate how a tensor splits over a mesh (GSPMD's mesh_split).

        `spec` has one entry per dim: None (or -1), a mesh axis by name or number, a list of axes from major
        to minor, or a list of `Split(size, axis)` for any factorisation. No collective moves the tensor along the
        axes in `stationary` (True: all): ops come to it. Raises DefinitionError for unknown
        or repeated axes, a wrong number of entries, or an annotation that contradicts an earlier one.
        """
        line = self.recording.line_of_change()
        annotating.mesh_split(self.recording, own(self, tensor, "mesh_split", line).id, mesh, spec, line, stationary)

    def stationary(self, *tensors: TensorView, along: bool | str | Sequence[str] = True) -> None:
        """Let no collective move these annotated tensors along axes of their mesh (True: all): ops come to them.

        So Megatron's tensor parallelism keeps its weights; a weight that is stationary along `tp` only may be gathered
        along `dp`, as FSDP does. Raises DefinitionError for a tensor without an annotation, and for unknown axes.
        """
        line = self.recording.line_of_change()
        for tensor in tensors:
            annotating.keep_stationary(self.recording, own(self, tensor, "stationary", line).id, along, line)

    def shard(self, tensor: TensorView, sharding: Any, mesh: Any = None) -> None:
        """Annotate with a `Sharding`, or with DTensor placements and their (torch or meshfuse) device mesh.

        Raises DefinitionError for another number of dims, for partial placements, for strided ones that no order of
        axes gives, and where an earlier annotation says something else.
        """
        line = self.recording.line_of_change()
        annotating.shard(self.recording, own(self, tensor, "shard", line).id, sharding, mesh, line)

    def overlap(self, tensor: TensorView, chunks: int, dim: int = 0, ring: bool = False) -> None:
        """Ask that a tensor's op, and the communication around it, be done in `chunks` parts of dim `dim`.

        While one chunk is communicated the next is computed; no number changes. With `ring=True` shards travel from
        rank to rank instead of through collectives; `chunks` must then be a multiple of the number of shards. Where it
        cannot be done the op runs whole, and `fd.explain(tensor)` says why. Raises DefinitionError for what is no
        number of chunks or dim, and where an earlier call asked for something else.
        """
        line = self.recording.line_of_change()
        number = own(self, tensor, "overlap", line).id
        annotating.overlap(self.recording, number, chunks, dim, ring, line)

    def units(self, mesh: Any, fsdp: Any, *units: str | Sequence[TensorView]) -> None:
        """Fully shard weights over axes of a mesh, and gather them for their use alone, unit by unit.

        A unit, such as a layer, is gathered in one call per dtype before its first op, and dropped after its last; in
        the backward that `fd.grad` appends again. Its gradients are reduced and scattered in one call.

        fsdp: an `mf.FSDP` with the axes and options, or the axes alone.
        units: for each a list of its weights, which are inputs or casts of some; or a pattern of inputs' names:
            "layers.*" makes a unit of all whose names begin with "layers.0". Those of the FSDP if there are none.

        Weights without an annotation are cut along the first dim that the axes divide; others must be cut over these.
        On a mesh whose axes are all of rows, ranks compute with rows of their own, whatever would take less time.

        Raises DefinitionError for axes that the mesh does not have, patterns that fit no input, tensors that are no
        weights or in two units, and weights that are annotated without the axes.
        """
        line = self.recording.line_of_change()
        given = [entry if isinstance(entry, str) else [t.id for t in own_all(self, entry, "units", line)]
                 for entry in units]  # fmt: skip
        declare(self.recording, checked_mesh(mesh, line), fsdp, given, line)

    # gradients

    def grad(self, outputs: Any, wrt: Any, grad_outputs: Any = None) -> Any:
        """Append the backward of this definition; returns the gradients by `wrt`, a list where `wrt` is a list.

        A gradient has its primal's shape and dtype. It is the derivative of the sum of output * grad_output over all
        `outputs`, a grad_output of None standing for ones, and zeros where no output depends on the primal. A gradient
        that is added as an output is sharded as its primal is annotated (whole, where the primal is an input without an
        annotation), unless the gradient is annotated itself.

        Raises DefinitionError for tensors that are no real or complex numbers, and where an op on the way has no
        derivative.
        """
        line = self.recording.line_of_change()
        made = append_gradients(self, outputs, wrt, grad_outputs, line)
        return made if isinstance(wrt, (list, tuple)) else made[0]

    def stop_gradient(self, tensor: TensorView) -> TensorView:
        """Let no gradient pass through `tensor`, and return it; for one use of it alone, pass `fd.ops.set(tensor)`."""
        self.recording.constants.add(own(self, tensor, "stop_gradient", self.recording.line_of_change()).id)
        return tensor

    # what a subclass for another front end does otherwise: nvfuser_direct.FusionDefinition

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        """Apply an op to arguments as a script passes them."""
        made = applying.apply(self, op, args, kwargs, line)
        if isinstance(made, TensorView) and (op.on_rows or op.is_fused):
            check_rows(self.recording)
        return made

    def _expression(self, node: OpNode) -> Any:
        """An op as `tensor.definition()` and `tensor.uses()` return it."""
        return node
