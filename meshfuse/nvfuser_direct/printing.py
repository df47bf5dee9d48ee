"""The text of a definition as nvFuser writes it: a function that defines it again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..definition.recording import OpNode, Recording
from ..dtypes import DataType
from ..ops import COMPOSITES
from ..ops.values import REQUIRED, Param, ParamKind, ScalarRef, TensorRef
from ..report.reprint import annotation_lines, is_default, meshes_of
from .declared import Declared
from .numbering import plain_scalars, scalar_numbers

Step = TensorRef | ScalarRef | OpNode
_HEADER = "def nvfuser_fusion(fd : FusionDefinition) -> None :"
_INDENT = "    "
K = ParamKind
# Arguments that are values; everything else is passed by its name.
_BY_PLACE = (K.TENSOR, K.TENSORS, K.TENSOR_OR_SCALAR, K.SCALAR)


def function_text(recording: Recording, aliases: Mapping[int, int], declared: Mapping[int, Declared]) -> str:
    """The function `nvfuser_fusion(fd)` as text; it uses the names FusionDefinition and DataType.

    A definition with annotations imports meshfuse for its meshes. Definitions with equal texts are equal.
    """
    meshes = meshes_of(recording)
    lines = [f"# seed={seed}"] if (seed := recording.seed) is not None else []
    lines += ["import meshfuse as mf"] if meshes else []
    lines += [f"{name} = mf.{mesh!r}" for mesh, name in meshes.items()]
    lines += _Writer(recording, declared).lines()
    lines += [_output(tensor, aliases.get(place)) for place, tensor in enumerate(recording.outputs)]
    lines += [re.sub(r"\bt(\d+)\b", r"tv\1", line) for line in annotation_lines(recording, meshes)]
    return "\n".join([_HEADER, *(_INDENT + line for line in lines or ["pass"])]) + "\n"


def _output(tensor: int, alias: int | None) -> str:
    return f"fd.add_output(tv{tensor}{'' if alias is None else f', tv{alias}'})"


class _Writer:
    """Writes a definition line by line: one for each input, scalar and op."""

    def __init__(self, recording: Recording, declared: Mapping[int, Declared]):
        self.recording, self.declared = recording, declared
        self.plain, self.numbers = plain_scalars(recording), scalar_numbers(recording)

    def lines(self) -> list[str]:
        steps = _writing_order(self.recording)
        return [self._line(step) for step in steps if not (isinstance(step, ScalarRef) and step.id in self.plain)]

    def _line(self, step: Step) -> str:
        if isinstance(step, TensorRef):
            return self._input(step)
        return self._scalar(step) if isinstance(step, ScalarRef) else self._op(step)

    def _input(self, ref: TensorRef) -> str:
        made = self.recording.tensors[ref.id]
        declared = self.declared.get(ref.id) or Declared.of(made.type.shape)
        order = f", stride_order={list(made.stride_order)}" if made.stride_order is not None else ""
        return (
            f"tv{ref.id} = fd.define_tensor(shape={list(made.type.shape)}, contiguity={list(declared.contiguity)}, "
            f"dtype={self._text(made.type.dtype)}, is_cpu={declared.is_cpu}{order})"
        )

    def _scalar(self, ref: ScalarRef) -> str:
        made, name = self.recording.scalars[ref.id], f"c{self.numbers[ref.id]}"
        operands = [self._text(operand) for operand in made.operands]
        if made.op in ("input", "const"):
            return f"{name} = fd.define_scalar({(operands or ['None'])[0]}, dtype={self._text(made.dtype)})"
        if made.op == "size":
            return f"{name} = {operands[0]}.size({operands[1]})"
        operands += [f"dtype={self._text(made.dtype)}"] if made.op == "cast" else []
        return f"{name} = fd.ops.{made.op}({', '.join(operands)})"

    def _op(self, node: OpNode) -> str:
        made = ", ".join(f"tv{i}" for i in node.outputs)
        by_place, by_name = self._arguments(node)
        if node.op.name in COMPOSITES:  # `fd.ops` has a function of that name that gives something else
            keywords = ", ".join(f"{name!r}: {text}" for name, text in by_name)
            return f"{made} = fd.call({node.op.name!r}, [{', '.join(by_place)}], {{{keywords}}})"
        named = [f"{name}={text}" for name, text in by_name]
        return f"{made} = fd.ops.{node.op.name}({', '.join([*by_place, *named])})"

    def _arguments(self, node: OpNode) -> tuple[list[str], list[tuple[str, str]]]:
        by_place: list[str] = []
        by_name: list[tuple[str, str]] = []
        for param, given in zip(node.op.params, node.args, strict=True):
            value = self._normalized(node, param, given)
            if param.default is REQUIRED and param.kind in _BY_PLACE and not by_name:
                by_place.append(self._text(value))
            elif param.default is REQUIRED or not is_default(param, value):
                by_name.append((param.name, self._text(value)))
        return by_place, by_name

    def _normalized(self, node: OpNode, param: Param, value: Any) -> Any:
        """The value as nvFuser's text has it: dims as a list counted from the front, and the type of a result."""
        if param.kind is K.DTYPE and value is DataType.Null:
            return self.recording.tensors[node.outputs[0]].type.dtype
        ndim = self.recording.tensors[node.inputs[0]].type.ndim if node.inputs else 0
        if param.kind not in (K.DIMS, K.OPTIONAL_DIMS) or ndim == 0:
            return value
        dims = range(ndim) if value is None else (value,) if isinstance(value, int) else value
        return tuple(dim % ndim for dim in dims)

    def _text(self, value: Any) -> str:
        if isinstance(value, TensorRef):
            return f"tv{value.id}"
        if isinstance(value, ScalarRef):
            return self._text(self.plain[value.id]) if value.id in self.plain else f"c{self.numbers[value.id]}"
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, complex):
            return f"complex({self._text(value.real)}, {self._text(value.imag)})"
        return _float(value) if isinstance(value, float) else repr(value)


def _float(value: float) -> str:
    """A float as C++ prints it, with its point: six digits if these are enough, else all."""
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    short = f"{value:#.6g}"
    return short if float(short) == value else repr(value)


# the order in which nvFuser writes: inputs, and then what each output is made from


def _writing_order(recording: Recording) -> list[Step]:
    """All steps of a definition, each after those that it reads; what no output needs comes last."""
    order: list[Step] = list(recording.inputs)
    done = {id(step) if isinstance(step, OpNode) else step for step in order}
    outputs = [_maker(recording, TensorRef(tensor)) for tensor in recording.outputs]
    for start in (*outputs, *recording.history):
        # Definitions are deeper than Python's recursion limit.
        waiting = [(start, False)]
        while waiting:
            step, ready = waiting.pop()
            key = id(step) if isinstance(step, OpNode) else step
            if key in done:
                continue
            if ready:
                done.add(key)
                order.append(step)
            else:
                waiting.append((step, True))
                waiting += [(_maker(recording, ref), False) for ref in reversed(list(_read(recording, step)))]
    return order


def _maker(recording: Recording, ref: TensorRef | ScalarRef) -> Step:
    node = recording.producer(ref.id) if isinstance(ref, TensorRef) else None
    return ref if node is None else node


def _read(recording: Recording, step: Step) -> Iterator[TensorRef | ScalarRef]:
    if isinstance(step, OpNode):
        yield from _refs(step.args)
    elif isinstance(step, ScalarRef):
        yield from _refs(recording.scalars[step.id].operands)


def _refs(value: Any) -> Iterator[TensorRef | ScalarRef]:
    if isinstance(value, (TensorRef, ScalarRef)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _refs(part)
