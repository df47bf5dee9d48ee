"""`DefinitionBuilder`: what user code fills with inputs, ops and outputs. `fusion_definition` makes it run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ..argument_checks import as_int, check_flags
from ..dtypes import DataType, scalar_dtype
from ..errors import DtypeError, SourceLine, caller_line, line_in_script, located, shown, user_error
from ..ops import COMPOSITES
from ..ops.binding import bind, keys_of
from ..ops.opdef import Call, OpDef, tensor_refs
from ..ops.values import ScalarRef, TensorRef, TensorType
from ..scalars import ScalarDef, result_dtype
from .annotated import AnnotatedDefinition
from .checks import (
    are_strides,
    check_contiguity,
    check_results,
    checked_dtype,
    checked_number,
    checked_order,
    checked_sizes,
    composite_call,
    plain_number,
)
from .dtype_origins import add_origins
from .namespaces import Fusion, OpNamespace, find_op
from .records import OpForm, OpNode, TensorDef
from .scalar_calls import is_scalar_call, scalar_arguments
from .tensor_view import Sizes, TensorView, Val

# What stands between a user's line and the definition that it copies.
_COPYING = ("copy", "copyreg", "pickle", "cloudpickle", "dill", "joblib", "multiprocessing", "torch")
_MOST_SCALARS = 65536  # Of one define_vector: a larger number is a mistake, and would fill the memory.


class DefinitionBuilder(AnnotatedDefinition):
    """The part of `FusionDefinition` that defines: inputs, scalars, ops and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: dict[int, ScalarDef] = {}
        self.ops = OpNamespace(self)
        self._fusion = Fusion(self)
        self.history: list[TensorRef | ScalarRef | OpNode] = []
        self._forms: dict[OpForm, tuple[OpForm, tuple[TensorType, ...]]] = {}

    def __enter__(self) -> DefinitionBuilder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    @property
    def fusion(self) -> Fusion:
        """The definition as a graph of values: its inputs and outputs."""
        return self._fusion

    # inputs

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
    ) -> TensorView:
        """A new input tensor.

        shape: global sizes; -1 leaves a size to the arguments, which then must be more than 1.
        dtype: nvFuser's or torch's.
        stride_order: for every dim its place in memory, 0 the fastest; arguments must lie so. None: any order.
        sizes, strides: nvFuser's second form, the sizes and strides of an example tensor; sizes other than 1 are left
            open unless `static_sizes`.

        `contiguity`, `is_cpu` and `symbolic_sizes` are nvFuser's; they change nothing here, but for `symbolic_sizes` in
        the place of `shape`. Raises DefinitionError for what is no size, dtype or order of the dims.
        """
        line = self._changing()
        check_flags(line, static_sizes=static_sizes, is_cpu=is_cpu)
        if strides is None and contiguity is not None and are_strides(contiguity):
            strides = contiguity
        given = sizes if sizes is not None else shape if shape is not None else symbolic_sizes
        found = checked_sizes(given, line)
        check_contiguity(contiguity, line)
        if strides is not None and not static_sizes:
            found = tuple(n if n == 1 else -1 for n in found)
        order = checked_order(stride_order, strides, found, line)
        return self.new_input(TensorType(found, checked_dtype("define_tensor", dtype, line)), line, order)

    def from_pytorch(self, tensor: Any, static_sizes: bool = False) -> TensorView:
        """A new input with the shape, strides and dtype of a torch tensor; of a DTensor also its mesh and placements.

        Sizes other than 1 are left to the arguments unless `static_sizes`. Raises DefinitionError for anything but a
        tensor.
        """
        line = self._changing()
        check_flags(line, static_sizes=static_sizes)
        if not all(hasattr(tensor, name) for name in ("shape", "dtype", "stride")):
            raise user_error(
                "from_pytorch", f"{type(tensor).__name__}", "a torch tensor", "Pass an example tensor.", line
            )
        shape = tuple(tensor.shape)
        found = shape if static_sizes else tuple(n if n == 1 else -1 for n in shape)
        dtype = checked_dtype("from_pytorch", tensor.dtype, line)
        out = self.new_input(TensorType(found, dtype), line, checked_order(None, tensor.stride(), shape, line))
        if hasattr(tensor, "placements"):
            self.shard(out, tensor.placements, tensor.device_mesh)
        return out

    def define_scalar(self, value: Any = None, dtype: Any = None) -> Val:
        """A scalar input of this dtype (Double by default), whose number every call passes; given a number, a constant.

        Raises DefinitionError for what is no number, or none of the dtype.
        """
        line = self._changing()
        if isinstance(value, DataType):
            value, dtype = None, value
        found = None if dtype is None else checked_dtype("define_scalar", dtype, line)
        if value is None:
            out = self.new_scalar(ScalarDef("input", (), found or DataType.Double))
            self.inputs.append(out.ref)
            return out
        number = checked_number("define_scalar", value, found, line)
        return self.new_scalar(ScalarDef("const", (number,), found or scalar_dtype(number)))

    def define_vector(self, size: int | Sequence[Any], dtype: Any = DataType.Int) -> list[Val]:
        """A list of scalars: `size` inputs where it is an int; where it is a list, a constant for each of its numbers.

        Entries that are -1 or scalars already are kept as they are. Raises DefinitionError for anything else.
        """
        line = self._changing()
        count = as_int(size)
        if count is not None and 0 <= count <= _MOST_SCALARS:
            return [self.define_scalar(dtype=dtype) for _ in range(count)]
        if not isinstance(size, (list, tuple)):
            raise user_error(
                "define_vector",
                shown(size),
                f"how many scalars (at most {_MOST_SCALARS}), or a list of numbers",
                "",
                line,
            )
        return [v if isinstance(v, Val) or as_int(v) == -1 else self._constant(v, dtype, line) for v in size]

    def _constant(self, value: Any, dtype: Any, line: SourceLine) -> Val:
        return self.define_scalar(checked_number("define_vector", value, None, line), dtype)

    # ops

    def call_with_keywords(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """`call`, with keyword arguments: what the functions of `fd.ops` do."""
        return self.call(name, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises DefinitionError: pickles and copies would share half of a definition."""
        raise user_error(
            "a definition cannot be copied or pickled", type(self).__name__, "the code that makes it",
            "Call that code again where another is needed; print(fd) is it.",
            line_in_script(sys._getframe(1), _COPYING),
        )  # fmt: skip

    def call(self, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Apply an op, by its name or as an OpDef: a TensorView, a tuple of them, or (on scalars alone) a Val."""
        return self.call_at(caller_line(), name, args, kwargs)

    def call_at(
        self, line: SourceLine, name: str | OpDef, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`call`, at this line of the script."""
        with located(line):
            self.check_open()
            if not isinstance(args, (list, tuple)):
                needed = "a list of all arguments"
                raise user_error(
                    f"call of {shown(name)}: arguments", shown(args), needed, "Pass one list with all of them."
                )
            if not isinstance(kwargs, (dict, type(None), Mapping)):
                needed = "a dict of arguments by name, or None"
                raise user_error(
                    f"call of {shown(name)}: keywords", shown(kwargs), needed, "Pass {'dim': 0}, for example."
                )
            return self._apply(find_op(name), args, kwargs or {}, line)

    def call_composite(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a composite: a function of `fd.ops` that is written in ops of the table."""
        with located(caller_line()):
            self.check_open()
            return composite_call(self, name, COMPOSITES[name], args, kwargs, self._resolve)

    def _apply(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any], line: SourceLine) -> Any:
        if is_scalar_call(op, args, kwargs):
            return self._scalar_op(op, args, kwargs)
        return self.append(op, bind(op, args, kwargs, self._resolve), line)

    def append(self, op: OpDef, bound: tuple[Any, ...], line: SourceLine) -> Any:
        """Apply an op to its arguments as `bind` gives them: a TensorView, or a tuple of them."""
        inputs = tuple([ref.id for ref in tensor_refs(bound)])
        form, types = self._formed(op, bound, inputs)
        made = [self._new_tensor(t, line) for t in types]
        for tensor in made:
            self._producers[tensor.id] = len(self.nodes)
        node = OpNode(op, bound, inputs, tuple([t.id for t in made]), line, form)
        self.nodes.append(node)
        self.history.append(node)
        return made[0] if len(made) == 1 else tuple(made)

    def _formed(
        self, op: OpDef, bound: tuple[Any, ...], inputs: Sequence[int]
    ) -> tuple[OpForm, tuple[TensorType, ...]]:
        """The form of an op and the checked types of its results, which are worked out once for equal forms."""
        tensors = self.tensors
        form = OpForm(op, keys_of(bound), tuple([tensors[i].type for i in inputs]))
        found = self._forms.get(form)
        if found is None:
            types = self._inferred(Call(op, bound, form.types), inputs)
            check_results(op.name, types)
            found = self._forms[form] = form, types
        return found

    def _inferred(self, call: Call, inputs: Sequence[int]) -> tuple[TensorType, ...]:
        try:
            return call.op.infer(call)
        except DtypeError as error:
            add_origins(self, error, inputs)
            raise

    def _scalar_op(self, op: OpDef, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Val:
        refs = tuple(map(self._resolve, scalar_arguments(op, args, kwargs)))
        if op.name == "cast":
            return self.new_scalar(ScalarDef("cast", refs[:1], checked_dtype("cast", refs[1], None)))
        found = [self.scalars[r.id].dtype if isinstance(r, ScalarRef) else scalar_dtype(r) for r in refs]
        return self.new_scalar(ScalarDef(op.name, refs, result_dtype(op.name, found)))

    def size(self, tensor: TensorView, dim: int) -> Val:
        """The size of a dim (counted from the back if negative) as a scalar of the definition.

        Raises DefinitionError for a dim that the tensor does not have.
        """
        line = self._changing()
        ndim, place = self._own(tensor, "size", line).ndim, as_int(dim)
        if place is None or not -ndim <= place < ndim:
            raise user_error(
                f"size of {tensor.label}: no such dim",
                f"{shown(dim)}",
                f"a dim of {tensor.type}",
                "Pass an existing dim.",
                line,
            )
        return self.new_scalar(ScalarDef("size", (tensor.ref, place % ndim), DataType.Int))

    def add_output(self, output: TensorView, alias_input: TensorView | None = None) -> None:
        """Have the program return this tensor; outputs come in the order of these calls.

        Raises DefinitionError for anything but a tensor of this definition, and for `alias_input`: meshfuse writes into
        no arguments.
        """
        line = self._changing()
        if alias_input is not None:
            raise user_error(
                "add_output: alias_input", shown(alias_input), "None: meshfuse does not write into arguments",
                "Return the tensor and copy it.", line,
            )  # fmt: skip
        self.outputs.append(self._own(output, "add_output", line).id)

    def expression(self, node: OpNode) -> Any:
        """An op as `tensor.definition()` and `tensor.uses()` return it."""
        return node

    # internals

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, (TensorView, Val)):
            if value.fd is not self:
                raise user_error(
                    "op argument", f"{value!r} of another definition", "a value of this definition",
                    "Pass what this FusionDefinition's own calls returned.",
                )  # fmt: skip
            return value.ref
        return value() if isinstance(value, Sizes) else plain_number(value)

    def new_input(self, kind: TensorType, line: SourceLine, order: tuple[int, ...] | None) -> TensorView:
        """A new input tensor at this line of the script, in nvFuser's stride order if one is given."""
        tensor = self._new_tensor(kind, line, order)
        self.inputs.append(tensor.ref)
        self.history.append(tensor.ref)
        return tensor

    def _new_tensor(self, kind: TensorType, line: SourceLine, order: tuple[int, ...] | None = None) -> TensorView:
        ref = TensorRef(len(self.tensors))
        self.tensors.append(TensorDef(kind, f"t{ref.id}", line, order))
        return TensorView(self, ref)

    def new_scalar(self, made: ScalarDef) -> Val:
        """A new scalar; for an input the caller adds it to `inputs`, too."""
        ref = ScalarRef(len(self.scalars), made.dtype)
        self.scalars[ref.id] = made
        self.history.append(ref)
        return Val(self, ref)
