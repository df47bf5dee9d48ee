"""Plans for a module: where its parameters lie on a mesh, and which activations are annotated.

A plan is a dict of patterns of full names (`patterns.py`). A value is a spec as `fd.mesh_split` takes it, a style of
Hugging Face's by name, or a ParallelStyle of torch. Styles say where weights lie; what they do to activations follows
from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..definition.annotation import layouts_of_spec
from ..definition.fsdp import FSDP
from ..definition.units import dim_to_cut
from ..errors import MeshfuseError, SourceLine, shown, user_error
from ..mesh import DeviceMesh
from ..sharding.layout import Split
from .experts import Experts, Room, expert_modules, expert_specs
from .fsdp import units_of, without_axes
from .patterns import matching, nearest
from .plan_value import Plan, Spec, axes_in

# By style of Hugging Face: (dim of a weight, of a bias) over the tensor parallel axis; None for whole. Dims of weights
# count from the back, as there are stacks of them.
_COLUMNS, _ROWS, _WHOLE = (-2, 0), (-1, None), (None, None)
HF_STYLES: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise",
                     "local_packed_colwise"), _COLUMNS),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise"), _ROWS),
    "embedding_rowwise": (0, None), "embedding_colwise": (1, None), "vocab_parallel": (0, None),
    **dict.fromkeys(("grouped_gemm", "ep_grouped_gemm"), (0, 0)),
    **dict.fromkeys((
        "moe_tp_experts", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "all_reduce",
        "local_params", "local", "moe_identity_expert", "replicate", "gather", "ep_router", "ep_dispatch_experts",
        "free_full_weight", "keep_full_weight", "isolated", "shared_expert",
    ), _WHOLE),
}  # fmt: skip
_PACKED = 2  # How many weights a packed one is made of.
_LINEAR, _EMBEDDING = "linear", "embedding"
# By class of torch's styles: which dim of a Linear's or Embedding's weight.
_TORCH_STYLES = {
    "ColwiseParallel": {_LINEAR: _COLUMNS, _EMBEDDING: (1, None)},
    "RowwiseParallel": {_LINEAR: _ROWS, _EMBEDDING: (0, None)},
}


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Where parameters lie, by full name, and how activations are annotated, by the name of the module that returns
    them.

    sharding: how parameters are fully sharded as well; None for not.
    units: by parameter the unit with which it is gathered.
    tensor_axis: the axis of tensor parallelism; None where no style names one.
    is_free: whether parameters may be moved along all axes, as an automatic plan has found.
    experts: the modules whose experts are cut over ranks, to which rows of tokens go, and for how many each has room;
        None where no row is dropped.
    """

    mesh: DeviceMesh
    parameters: Mapping[str, Spec]
    outputs: Mapping[str, Spec] = field(default_factory=dict)
    sharding: FSDP | None = None
    tensor_axis: str | None = None
    units: Mapping[str, str] = field(default_factory=dict)
    is_free: bool = False
    experts: Mapping[str, Room | None] = field(default_factory=dict)

    @property
    def fsdp(self) -> tuple[str, ...]:
        """The axes over which parameters are also cut, and gathered for use."""
        return self.sharding.axes if self.sharding is not None else ()

    def gathered(self, name: str) -> Spec | None:
        """How a parameter lies for its use; None where it is not cut over the axes of fsdp."""
        spec, over = self.parameters.get(name), self.gathered_over(name)
        cut = spec is not None and over and not set(over).isdisjoint(axes_in([spec]))
        return without_axes(spec, over) if cut else None

    def gathered_over(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter is gathered: those of fsdp, but for experts the ones that they lie over."""
        if name.rpartition(".")[0] not in self.experts:
            return self.fsdp
        lies = axes_in(self.parameters[name][:1])
        return tuple([axis for axis in self.fsdp if axis not in lies])

    def stays(self, name: str, spec: Spec | None) -> list[str]:
        """The axes along which a parameter of this spec stays, and ops come to it: all that it is not gathered over."""
        if self.is_free:
            return []
        named, over = axes_in(spec or ()), self.gathered_over(name)
        return [axis for axis in self.mesh.names if axis in named and axis not in over]

    def spec(self, name: str, ndim: int) -> Spec:
        """The spec of a parameter; whole on every rank if the plan says nothing of it."""
        return self.parameters.get(name, (None,) * ndim)


def module_plan(
    module: nn.Module, mesh: DeviceMesh, plan: Any, fsdp: Any, inputs: Mapping[str, Any], line: SourceLine,
    experts: Experts | None = None,
) -> ModulePlan:  # fmt: skip
    """What a plan means for a module.

    Raises DefinitionError for plans and styles that do not exist, patterns that match nothing, and specs that do not
    fit.
    """
    sharding = _sharding(mesh, fsdp, line)
    cut_over = sharding.axes if sharding is not None else ()
    is_free, exchanged = isinstance(plan, Plan), dict.fromkeys(plan.experts if isinstance(plan, Plan) else ())
    plan = plan.parameters if isinstance(plan, Plan) else plan
    entries = _entries(module, plan, line)
    reader = _Reader(module, mesh, cut_over, inputs, line)
    for pattern, value in entries.items():
        reader.read(pattern, value, strict=not isinstance(plan, str))
    if experts is not None:
        exchanged = dict.fromkeys(expert_modules(module, experts, line), experts.room(inputs.values(), mesh))
        reader.specs |= expert_specs(module, [*exchanged], experts, reader.specs)
    sizes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    found = {name: _with_fsdp(reader.specs.get(name), shape, mesh, cut_over) for name, shape in sizes.items()}
    for name, spec in found.items():
        layouts_of_spec(name, mesh, spec, len(sizes[name]), line)
    units = units_of(module, sharding) if sharding is not None else {}
    return ModulePlan(mesh, found, reader.outputs, sharding, reader.tensor_axis, units, is_free, exchanged)


def _sharding(mesh: DeviceMesh, fsdp: Any, line: SourceLine) -> FSDP | None:
    """How parameters are fully sharded, which a user says by an mf.FSDP, or by one axis or several."""
    if fsdp is None:
        return None
    given = fsdp if isinstance(fsdp, FSDP) else None
    axes: Any = given.axes if given is not None else (fsdp,) if isinstance(fsdp, str) else fsdp
    wrong = [axis for axis in axes if axis not in mesh.names] if isinstance(axes, (list, tuple)) else [fsdp]
    if given is not None and given.replicate is not None and given.replicate not in set(mesh.names) - set(axes):
        wrong = [given.replicate]
    if wrong:
        raise user_error("parallelize: fsdp", shown(wrong[0]), f"an mf.FSDP, or one or several of {list(mesh.names)}",
                         "Name axes of the mesh.", line)  # fmt: skip
    return given or (FSDP(tuple(axes)) if axes else None)


def _entries(module: nn.Module, plan: Any, line: SourceLine) -> Mapping[str, Any]:
    """A plan as a dict; that of Hugging Face as the model has it."""
    if plan is None:
        return {}
    if isinstance(plan, Mapping):
        wrong = [pattern for pattern in plan if not isinstance(pattern, str) or not pattern]
        if wrong:
            raise user_error("parallelize: plan", shown(wrong[0]), "patterns of full names as keys", "", line)
        return plan
    if plan == "auto":
        raise user_error(
            'parallelize: plan="auto"', "no shapes of arguments, which the best plan depends on",
            "what mf.plan returns",
            "Pass plan=mf.plan(model, mesh, *arguments), or example= with the arguments by name.", line,
        )  # fmt: skip
    if plan != "hf":
        raise user_error("parallelize: plan", shown(plan), '"hf", or a dict of patterns of full names', "", line)
    found = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not found:
        raise user_error(
            f'parallelize: plan="hf" for {type(module).__name__}', "no _tp_plan", "a model that has one",
            'Pass a dict, such as {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}.', line,
        )  # fmt: skip
    return found


class _Reader:
    """Reads a plan entry by entry: `specs` of parameters and of the `outputs` of modules."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, fsdp: Sequence[str], inputs: Mapping[str, Any], line: SourceLine
    ) -> None:
        self.module, self.mesh, self.line = module, mesh, line
        self._taken = {*fsdp, *axes_in(inputs.values())}
        self._modules = dict(module.named_modules())
        self._names = _names_of(module)
        self._known = {id(tensor): name for name, tensor in module.named_parameters()}
        self.specs: dict[str, Spec] = {}
        self.outputs: dict[str, Spec] = {}
        self.tensor_axis: str | None = None

    def read(self, pattern: str, value: Any, strict: bool) -> None:
        """Read an entry. One of Hugging Face's plan may match nothing in this model (not `strict`)."""
        name, colon, end = pattern.partition(":")
        if colon:
            self._read_output(pattern, name, end, value)
            return
        parameters = matching(name, self._names)
        modules = [found for found in matching(name, self._modules) if found]
        if not parameters and not modules and strict:
            raise self._no_match(pattern, [*self._modules, *self._names])
        for found in parameters:
            self._place(found, value, pattern)
        for found in modules:
            self._read_module(found, value, pattern)

    def _read_module(self, name: str, value: Any, pattern: str) -> None:
        """The weight and the bias of a module, and its output if the style is about that."""
        part, kind = self._modules[name], type(value).__name__
        if kind == "SequenceParallel":
            self.outputs[name] = ("sequence", value.sequence_sharding[0].dim, self._tp(pattern))
        elif kind in ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput"):
            raise user_error(
                f"plan: {pattern!r}", kind, "a style that says where weights lie, or a spec",
                f'Annotate the activation: {{"{pattern}:output": [None, "tp", None]}}.', self.line,
            )  # fmt: skip
        own = [child for child, _ in part.named_parameters(recurse=False)]
        if not own and isinstance(value, (list, tuple)):
            raise user_error(
                f"plan: {pattern!r}", f"module {name} without parameters of its own",
                "a parameter, or a module with a weight",
                f'For its result write "{pattern}:output".', self.line,
            )  # fmt: skip
        for child in own:
            if not isinstance(value, (list, tuple)) or child == "weight":
                self._place(f"{name}.{child}", value, pattern)

    def _place(self, name: str, value: Any, pattern: str) -> None:
        """Say where a parameter lies; of a tied one, under the name that it goes by."""
        tensor = self._names[name]
        spec = self._spec(name, tensor, value, pattern)
        kept = self._known_as(tensor)
        self.specs[kept] = spec if kept not in self.specs or not _is_whole(spec) else self.specs[kept]

    def _known_as(self, tensor: nn.Parameter) -> str:
        return self._known[id(tensor)]

    def _spec(self, name: str, tensor: nn.Parameter, value: Any, pattern: str) -> Spec:
        ndim, is_bias = tensor.ndim, name.rpartition(".")[2] == "bias"
        if isinstance(value, (list, tuple)):
            if len(value) != ndim:
                raise user_error(
                    f"plan: {pattern!r} for {name} of shape {list(tensor.shape)}", shown(value),
                    f"a list of {ndim} entries, one per dim", "Use None for dims that are not split.", self.line,
                )  # fmt: skip
            return tuple(value)
        if value is None:
            return (None,) * ndim
        weight, bias = self._dims(name, value, pattern)
        dim = bias if is_bias else weight
        if dim is None or not ndim:
            return (None,) * ndim
        packed = isinstance(value, str) and "packed" in value
        axis = self._tp(pattern)
        entry: Any = [Split(_PACKED), axis] if packed else axis
        place = dim % ndim if -ndim <= dim < ndim else 0
        return tuple(entry if d == place else None for d in range(ndim))

    def _dims(self, name: str, value: Any, pattern: str) -> tuple[int | None, int | None]:
        """(dim of a weight, dim of a bias) that a style cuts."""
        owner = self._modules.get(name.rpartition(".")[0])
        kind = type(value).__name__
        if isinstance(value, str) and value in HF_STYLES:
            weight, bias = HF_STYLES[value]
            # GPT-2's layers keep their weights the other way round.
            turned = type(owner).__name__ == "Conv1D" and weight in (-1, -2)
            return (-3 - (weight or 0), bias) if turned else (_of_kernel(owner, weight), bias)
        if kind in _TORCH_STYLES:
            return _TORCH_STYLES[kind][_EMBEDDING if isinstance(owner, nn.Embedding) else _LINEAR]
        if kind == "SequenceParallel":
            return _WHOLE
        near = nearest(value, list(HF_STYLES)) if isinstance(value, str) else []
        raise user_error(
            f"plan: {pattern!r}", f"{shown(value)}{f', near to it {near}' if near else ''}",
            "a spec (a list with an entry per dim), a style of Hugging Face's such as \"colwise\", ColwiseParallel(), "
            "RowwiseParallel() or SequenceParallel()", "Correct the entry.", self.line,
        )  # fmt: skip

    def _read_output(self, pattern: str, name: str, end: str, value: Any) -> None:
        modules = matching(name, self._modules)
        if end != "output" or not isinstance(value, (list, tuple)):
            raise user_error(
                f"plan: {pattern!r}", shown(value), 'a spec for "module:output"', "Write a list with an entry per dim.",
                self.line,
            )  # fmt: skip
        if not modules:
            raise self._no_match(pattern, list(self._modules))
        self.outputs.update(dict.fromkeys(modules, tuple(value)))

    def _no_match(self, pattern: str, names: list[str]) -> MeshfuseError:
        near = nearest(pattern.partition(":")[0], [name for name in names if name])
        return user_error(
            f"plan: {pattern!r} matches nothing in {type(self.module).__name__}", f"near to it {near}" if near else "",
            "the full name of a parameter or module, or the end of one", "Correct the pattern.", self.line,
        )  # fmt: skip

    def _tp(self, pattern: str) -> str:
        """The axis of tensor parallelism: "tp", or the only one that nothing else is cut over."""
        names = self.mesh.names
        left = ["tp"] if "tp" in names else [name for name in names if name not in self._taken]
        if len(left) == 1:
            self.tensor_axis = left[0]
            return left[0]
        raise user_error(
            f"plan: {pattern!r}: which axis is that of tensor parallelism", f"a mesh with the axes {list(names)}",
            'an axis called "tp", or one axis that neither inputs nor fsdp are cut over', "Name it tp.", self.line,
        )  # fmt: skip


def _of_kernel(owner: Any, dim: int | None) -> int | None:
    """The dim of a weight that is cut where a Linear's is cut along `dim`: a kernel has its own dims behind."""
    if isinstance(owner, nn.Bilinear) and dim == -2:
        return 0
    if not isinstance(owner, _ConvNd) or dim not in (-1, -2):
        return dim
    return int((dim == -1) != owner.transposed)


def _names_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by all of their names, tied ones as well."""
    return dict(module.named_parameters(remove_duplicate=False))


def _is_whole(spec: Spec) -> bool:
    return not axes_in(spec)


def _with_fsdp(spec: Spec | None, shape: Sequence[int], mesh: DeviceMesh, fsdp: Sequence[str]) -> Spec:
    """A parameter's spec with one dim cut over the fsdp axes as well.

    The first dim that nothing cuts and that they divide; else the first that is long enough. One that is smaller than
    the axes stays whole.
    """
    given = (None,) * len(shape) if spec is None else spec
    axes = tuple(axis for axis in fsdp if axis not in axes_in([given]))
    ranks = math.prod(mesh.axis_size(axis) for axis in axes)
    place = dim_to_cut(shape, [d for d, entry in enumerate(given) if entry is None], ranks, len(axes))
    if not axes or place is None:
        return given
    return tuple(list(axes) if d == place else e for d, e in enumerate(given))


def checked_specs(what: str, specs: Any, names: Sequence[str], mesh: DeviceMesh, line: SourceLine) -> dict[str, Spec]:
    """Specs by the name of an argument. Raises DefinitionError for names that the forward does not have."""
    if specs is None:
        return {}
    if not isinstance(specs, Mapping):
        example = f'a dict such as {{"{names[0] if names else "x"}": ["dp", None]}}'
        raise user_error(f"parallelize: {what}", shown(specs), example, "", line)
    for name, spec in specs.items():
        if name.partition(".")[0] not in names:
            near = nearest(name, names)
            raise user_error(
                f"parallelize: {what}: no argument is called {name!r}", f"near to it {near}" if near else "",
                f"one of {list(names)}", "Correct the name.", line,
            )  # fmt: skip
        if not isinstance(spec, (list, tuple)):
            raise user_error(f"parallelize: {what}[{name!r}]", shown(spec), "a list with one entry per dim", "", line)
        if what == "dynamic" and not all([type(dim) is int for dim in spec]):
            raise user_error(f"parallelize: {what}[{name!r}]", shown(spec), "a list of dims", "", line)
        unknown = [axis for axis in axes_in([spec]) if axis not in mesh.names] if what == "inputs" else []
        if unknown:
            raise user_error(f"parallelize: {what}[{name!r}]: unknown mesh axis", repr(unknown[0]),
                             f"one of {list(mesh.names)}", "Use an axis of the mesh.", line)  # fmt: skip
    return {name: tuple(spec) for name, spec in specs.items()}
