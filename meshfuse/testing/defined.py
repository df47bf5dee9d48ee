"""One call in a definition of its own, annotated, and perhaps in its distributed form: cases for `check_op`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..compiler import CompiledProgram, compile_sharded
from ..errors import SourceLine, error_text
from ..execution import Execution
from ..executor.arguments import Inputs
from ..fusion_definition import FusionDefinition
from ..graph import specialize
from ..mesh import DeviceMesh
from ..ops.binding import make_call
from ..ops.opdef import OpDef, Sample
from ..ops.rules import FactorKind
from ..programs import Programs
from ..propagation import propagate
from ..rewrites.distributed_forms import Blocked, blocked, with_forms
from ..sharding.layout import Layout, Split
from ..sharding.value import Sharding
from .calls import define_call, operands_of
from .cases import report, tolerance, wrong_results


@dataclass(frozen=True, slots=True)
class Annotated:
    """A call, of which some operands and results (in this order) are annotated; with `form` in its distributed form."""

    sample: Sample
    mesh: DeviceMesh
    layouts: Mapping[int, tuple[Layout, ...]]
    form: Blocked | None = None


class _Formed(Programs):
    """Compiles a definition whose first op is written in its distributed form, even if that costs more."""

    form: Blocked

    def program(
        self,
        given: Inputs,
        shapes: dict[int, tuple[int, ...]],
        default_mesh: DeviceMesh,
        line: SourceLine,
        near_factor: float = 1.0,
    ) -> CompiledProgram:
        graph = specialize(self.fd.recording, shapes, {})
        return compile_sharded(propagate(with_forms(graph, {0: self.form}), default_mesh))


def form_cases(op: OpDef, sample: Sample) -> Iterator[Annotated]:
    """Every dim that is needed whole, in blocks that are even, short or empty, on two axes, and not in blocks."""
    call = make_call(op, sample)
    if not call.has_form:
        return
    rule = op.rule(call)
    for operand, (dims, ttype) in enumerate(zip(rule.operands, call.types, strict=True)):
        for d, factors in enumerate(dims):
            if any(rule.factors[f].kind is FactorKind.BLOCK for f in factors):
                for mesh, layout in _blockings(ttype.shape[d]):
                    layouts = tuple(layout if e == d else () for e in range(ttype.ndim))
                    form = blocked(operand, d, layout)
                    if _has_form(op, sample, form):
                        yield Annotated(sample, mesh, {operand: layouts}, form)


def _blockings(n: int) -> Iterator[tuple[DeviceMesh, Layout]]:
    with_empty = next(parts for parts in range(2, n + 2) if -(-n // parts) * (parts - 1) >= n)
    for parts in dict.fromkeys((2, 3, with_empty)):
        yield DeviceMesh((parts,), ("x",)), (Split(parts, "x"),)
    yield DeviceMesh((2, 2), ("x", "y")), (Split(2, "y"), Split(2, "x"))
    yield DeviceMesh((2,), ("x",)), (Split(max(2, -(-n // 2))), Split(2, "x"))


def _has_form(op: OpDef, sample: Sample, form: Blocked) -> bool:
    fd = FusionDefinition(0)
    tensors, results = define_call(fd, op, sample)
    for result in results:
        fd.add_output(result)
    graph = specialize(fd.recording, {t.id: t.type.shape for t in tensors}, {})
    try:
        return with_forms(graph, {0: form}).nodes != graph.nodes
    except Exception:
        return True  # what is wrong with it is then told


def _definition(op: OpDef, case: Annotated, annotated: bool) -> FusionDefinition:
    fd = FusionDefinition(0)
    if annotated and case.form is not None:
        programs = fd._programs = _Formed(fd, None, None, None)
        programs.form, fd._execution = case.form, Execution(fd, programs)
    tensors, results = define_call(fd, op, case.sample)
    for result in results:
        fd.add_output(result)
    everything = [*tensors, *results]
    for i, layouts in case.layouts.items() if annotated else ():
        fd.shard(everything[i], Sharding.make(case.mesh, layouts, everything[i].type.shape))
    return fd


def unsharded(op: OpDef, sample: Sample) -> list[torch.Tensor]:
    """The results of the definition on one rank."""
    operands = operands_of(make_call(op, sample), sample)
    return _definition(op, Annotated(sample, DeviceMesh((1,), ("x",)), {}), False).simulate(operands)


def defined_problem(op: OpDef, case: Annotated, known: Sequence[torch.Tensor] | None = None) -> str | None:
    """Compare the sharded definition, simulated, with the definition on one rank (`known`: its results)."""
    call = make_call(op, case.sample)
    operands = operands_of(call, case.sample)
    wanted = unsharded(op, case.sample) if known is None else known
    try:
        found = _definition(op, case, True).simulate(operands, check_replicas=True)
    except Exception as error:
        return _report(op, case, error_text(error))
    wrong = wrong_results(found, wanted, tolerance(call))
    return None if wrong is None else _report(op, case, wrong[2])


def _report(op: OpDef, case: Annotated, what: str) -> str:
    call = make_call(op, case.sample)
    kinds = [*call.types, *call.results]
    count = len(call.types)
    facts: list[tuple[str, str]] = [("mesh", str(case.mesh))]
    for i, layouts in case.layouts.items():
        name = f"operand {i}" if i < count else f"result {i - count}"
        facts.append((name, f"{kinds[i]} as {Sharding.make(case.mesh, layouts, kinds[i].shape)}"))
    if case.form is None:
        return report(op, call, "a definition of it is wrong when annotated", [*facts, ("wrong", what)],
                      "The op's rules hold by themselves: please report this to meshfuse.")  # fmt: skip
    facts.append(("form", f"for dim {case.form.dim} of operand {case.form.operand} in {case.form.blocks} blocks"))
    return report(op, call, "the distributed form is wrong", [*facts, ("wrong", what)],
                  "Correct distributed, or return None where it has no form.")  # fmt: skip
