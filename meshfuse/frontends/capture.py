"""A module's forward and backward as one graph of aten ops, by torch's own tracing.

Dynamo runs the forward on fake tensors and gives one graph of torch functions, or says at which line of the user's it
cannot. AOTAutograd makes of that the joint graph, in which every input and output has a descriptor: which parameter,
which argument, whose gradient. What this needs of torch is private to it and was read in torch 2.13.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import _get_frame
from torch._dynamo.exc import TorchDynamoException, UserError
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ..errors import MeshfuseError, SourceLine, user_error
from ..long_work import saying
from .capture_errors import called, not_captured, only_attributes
from .captured_graph import Captured, Source, differentiable
from .decompositions import decompositions
from .forward_changes import Kept, WithChanges, changes_noted, is_buffer, kept_of
from .forward_reads import ForwardReads, Scope, reads_of
from .functions import others_captured, with_both_branches
from .hugging_face import install_recorders, without_new_caches
from .kv_caches import without_inner
from .size_guards import NO_GUARDS, guards_of
from .traceable import globals_removed, others_traced

Stores = Literal["results", "left", "refused"]
# Tracing changes torch for the whole process, such as its list of trace functions: one thread at a time.
_LOCK = threading.RLock()
# What torch raises where it cannot trace: errors of its own, and those of the ops that it runs on fake tensors.
_NOT_TRACED = (TorchDynamoException, UserError, RuntimeError, AssertionError, LookupError, TypeError, ValueError)


def captured(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device, line: SourceLine,
    *, scalars_only: bool = False, dtype: torch.dtype | None = None, given: Callable[[], str] = str,
    stores: Stores = "results",
) -> Captured:  # fmt: skip
    """The joint graph of module(*args, **kwargs).

    Parameters and buffers are replaced by fake tensors on the device meanwhile: they may be DTensors or on meta, where
    torch would lose gradients without a word. Arguments must be whole tensors; their numbers are not read.

    scalars_only: only results without dims have a gradient, if there are such.
    dtype: the type of floating point parameters in the graph; None for their own.
    given: says in an error which arguments there were.
    stores: what becomes of attributes that the forward sets: more results, nothing, or an error.

    Raises DefinitionError where the forward is not one graph, with the user's line.
    """
    with _LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(saying(f"capturing {called(module)}"))
        stack.enter_context(globals_removed())
        stack.enter_context(_quiet())
        stack.enter_context(without_new_caches(module))
        stack.enter_context(_without_fused_layers())
        install_recorders(module, kwargs)
        stack.enter_context(faked(module, device, dtype))
        try:
            return _with_first_names(_traced(stack, module, args, kwargs, scalars_only, stores), module)
        except MeshfuseError:
            raise
        except SyntaxError as error:  # of torch's, where nothing that the graph makes is a result
            raise only_attributes("it alone, such as x.T") from error
        except _NOT_TRACED as error:
            raise not_captured(module, error, line, given()) from error


def _traced(
    stack: contextlib.ExitStack, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], scalars_only: bool,
    stores: Stores,
) -> Captured:  # fmt: skip
    made, reads, kept = _with_kept(module, args, kwargs, stores)
    detached = _detached(made, args, kwargs)
    _detach_in_place(made)
    _copy_views(made)
    scalars_only = scalars_only and _detach_others(made)
    with_both_branches(made)
    stack.enter_context(tracing(TracingContext(made.meta["fake_mode"])))
    table = decompositions()
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    is_dynamic = any(hasattr(leaf, "_dynamo_dynamic_indices") for leaf in leaves)
    with others_captured():
        joint = aot_export_joint_with_descriptors(
            stack, made, tuple(args), dict(kwargs), decompositions=table, ignore_shape_env=not is_dynamic
        )
    graph = joint.graph_module.graph
    _without_gradients_of_changes(graph)
    inputs = [(node, _source_of_input(node.meta["desc"])) for node in graph.find_nodes(op="placeholder")]
    for node, source in inputs:
        if "val" not in node.meta:  # a number
            node.meta["val"] = leaves[source.place]
    inputs += [(node, _constant(joint.graph_module, node)) for node in graph.find_nodes(op="get_attr")]
    live = {source.name: reads.place_of(getattr(joint.graph_module, source.name)) for _, source in inputs
            if source.kind == "constant"}  # fmt: skip
    (end,) = graph.find_nodes(op="output")
    returned = pytree.tree_leaves(end.args[0], is_leaf=lambda leaf: leaf is None)
    ends = [(node, _source_of_output(desc)) for node, desc in zip(returned, end.meta["desc"], strict=True) if desc]
    outputs = tuple([(node if _is_tensor(node) else None, source) for node, source in ends])
    fixed = {source.place: _value(node) for node, source in ends if not _is_tensor(node) and source.kind == "result"}
    env = made.meta["fake_mode"].shape_env
    sizes = guards_of(env, inputs, leaves, (tuple(args), dict(kwargs))) if is_dynamic else NO_GUARDS
    return Captured(
        joint.graph_module, tuple(inputs), outputs, joint.out_spec, scalars_only, reads, fixed, sizes, kept,
        {name: read for name, read in live.items() if read is not None}, detached,
    )  # fmt: skip


def _detached(made: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The places of results that need no gradient, as those of a detach()."""
    leaves, _ = _results(made, args, kwargs)
    return frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and not leaf.requires_grad)


def _without_gradients_of_changes(graph: torch.fx.Graph) -> None:
    """Have zeros in the place of the gradients of what the forward changes in place: none comes for them."""
    taken = graph.find_nodes(op="placeholder")
    for node in taken:
        desc = node.meta["desc"]
        if isinstance(desc, descriptors.TangentAOTInput) and not isinstance(desc.output, descriptors.PlainAOTOutput):
            value = node.meta["val"]
            with graph.inserting_after(taken[-1]):
                zeros = graph.call_function(
                    torch.ops.aten.full.default, (list(value.shape), 0.0), {"dtype": value.dtype}
                )
            zeros.meta = {"val": value}
            node.replace_all_uses_with(zeros)
            graph.erase_node(node)


def _is_tensor(returned: Any) -> bool:
    return isinstance(returned, torch.fx.Node) and isinstance(_value(returned), torch.Tensor)


def _value(returned: Any) -> Any:
    """What a graph returns: a tensor without numbers, a symbolic size, or the number itself."""
    return returned.meta.get("val") if isinstance(returned, torch.fx.Node) else returned


def _with_kept(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stores: Stores
) -> tuple[torch.fx.GraphModule, ForwardReads, tuple[Kept, ...]]:
    """Dynamo's graph, in which attributes that the forward sets are results, and these attributes."""
    try:
        made, reads, found = _forward_graph(module, args, kwargs)
    except (AssertionError, SyntaxError) as error:
        if "out.backend_input must not be None" not in str(error) and not isinstance(error, SyntaxError):
            raise
        return *_forward_graph(WithChanges(module, (), None), args, kwargs)[:2], ()  # All results are inputs.
    replaced = [one for one in found if is_buffer(one.owner, one.name)]
    kept = [one for one in found if one not in replaced]
    if kept and stores == "refused":
        raise user_error(
            f"{called(module)} sets {kept[0].name}", "a step of micro-batches", "a forward that sets no attributes",
            "Return it as a result, or keep it in a buffer.", kept[0].line,
        )  # fmt: skip
    kept = kept if stores == "results" else []
    if replaced or kept:
        made, reads, _ = _forward_graph(WithChanges(module, [*replaced, *kept]), args, kwargs)
    if copied := _taken_over(made, args, kwargs):
        made, reads, _ = _forward_graph(WithChanges(module, [*replaced, *kept], copied), args, kwargs)
    return made, reads, tuple(kept)


def _results(made: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The leaves of the forward's results, and those of them that the graph makes."""
    (end,) = made.graph.find_nodes(op="output")
    codegen: Any = made.graph._codegen
    codegen.process_inputs(*args, *kwargs.values())
    values = [node.meta["example_value"] if isinstance(node, torch.fx.Node) else node for node in end.args[0]]
    return pytree.tree_leaves(codegen.process_outputs(values)), values


def _taken_over(made: torch.fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The places of results that the graph does not make and that are no arguments without gradients."""
    leaves, values = _results(made, args, kwargs)
    known = {id(value) for value in values}
    known |= {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if not getattr(leaf, "requires_grad", False)}
    return frozenset(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and id(leaf) not in known)


def _forward_graph(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.fx.GraphModule, ForwardReads, list[Kept]]:
    """Dynamo's graph, as `dynamo_graph_capture_for_export` makes it, what the forward read for it, and what it sets."""
    export, given = functional_export, (module, tuple(args), dict(kwargs))
    effects = torch._dynamo.config.patch(replay_side_effects=False, side_effect_replay_policy="warn")
    with (
        export._compiling_state_context(),
        effects,
        export.get_metrics_context(),
        others_traced(),
        changes_noted() as changes,
    ):
        found = export.fullgraph_capture(*given)
    scope = Scope(module, _get_frame(*given))
    reads = reads_of(found.graph_capture_output.output_graph.guards, module, scope)
    kept = [] if isinstance(module, WithChanges) else kept_of(changes, module, scope, called(module))
    return export.create_fx_graph_from_captured_output(found, *given), reads, kept


def _with_first_names(graph: Captured, module: nn.Module) -> Captured:
    """The graph with tied parameters under the first of their names, as `named_parameters` has them."""
    first = {id(p): without_inner(name) for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    names = {without_inner(name): first[id(p)] for name, p in every}

    def renamed(pairs: Sequence[tuple[Any, Source]]) -> tuple[tuple[Any, Source], ...]:
        return tuple((node, replace(s, name=names.get(s.name, s.name)) if "parameter" in (s.kind, s.of) else s)
                     for node, s in pairs)  # fmt: skip

    return replace(graph, inputs=renamed(graph.inputs), outputs=renamed(graph.outputs))


def _constant(module: torch.fx.GraphModule, node: torch.fx.Node) -> Source:
    """A tensor that the graph holds, as an input.

    Raises DefinitionError for a fake one: Dynamo returns x.T of an argument so, and not as an op of the graph; and for
    the body of a loop or another function of functions.
    """
    value = getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor):
        (name, *_) = [str(user.target) for user in node.users] or [str(node.target)]
        raise user_error(
            f"{name} has functions among its arguments", "one that a graph of ops does not have", "ops alone",
            "Write a loop in Python, whose steps are then all in the graph, and a choice with torch.where.",
        )  # fmt: skip
    if not _has_numbers(value):
        raise only_attributes(f"one of shape {list(value.shape)}")
    node.meta.setdefault("val", value)
    return Source("constant", str(node.target))


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether a tensor has memory: to read one of a trace ends the process."""
    try:
        value.data_ptr()
    except RuntimeError:
        return False
    return True


def _source_of_input(desc: Any) -> Source:
    if isinstance(desc, descriptors.ParamAOTInput):
        return Source("parameter", without_inner(desc.target))
    if isinstance(desc, descriptors.BufferAOTInput):
        return Source("buffer", without_inner(desc.target))
    if isinstance(desc, descriptors.PlainAOTInput):
        return Source("argument", place=desc.idx)
    if isinstance(desc, descriptors.TangentAOTInput):
        return Source("tangent", place=_source_of_output(desc.output).place)
    raise user_error("an input of the captured graph", type(desc).__name__, "a parameter, buffer or argument")


def _source_of_output(desc: Any) -> Source:
    if isinstance(desc, descriptors.PlainAOTOutput):
        return Source("result", place=desc.idx)
    if isinstance(desc, descriptors.InputMutationAOTOutput):
        return _renamed("mutation", _source_of_input(desc.mutated_input))
    if isinstance(desc, descriptors.GradAOTOutput):
        return _renamed("gradient", _source_of_input(desc.grad_of))
    raise user_error("an output of the captured graph", type(desc).__name__, "a result, a mutation or a gradient")


def _renamed(kind: str, source: Source) -> Source:
    return Source(kind, source.name, source.place, source.kind)


def _detach_in_place(made: torch.fx.GraphModule) -> None:
    """Have what follows a detach_() read its result: AOTAutograd loses it."""
    nodes = list(made.graph.nodes)
    for place, node in enumerate(nodes):
        if node.target in ("detach_", torch.detach_):
            taken, later, node.op, node.target = node.args[0], set(nodes[place + 1 :]), "call_method", "detach"
            taken.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    made.recompile()


def _copy_views(made: torch.fx.GraphModule) -> None:
    """Let results be no views of inputs or of each other: AOTAutograd takes no gradients of such."""
    (end,) = made.graph.find_nodes(op="output")
    given = {_memory_of(node) for node in made.graph.nodes if node.op in ("placeholder", "get_attr")} - {None}
    with made.graph.inserting_before(end):
        for node in end.all_input_nodes:
            if _memory_of(node) in given and node.meta["example_value"].requires_grad:
                copied = made.graph.call_method("clone", (node,))
                copied.meta = dict(node.meta)
                end.replace_input_with(node, copied)
            given.add(_memory_of(node))
    made.recompile()


def _memory_of(node: torch.fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("example_value")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def _detach_others(made: torch.fx.GraphModule) -> bool:
    """Let no gradient come from results that have dims, if there are others; whether there are."""
    (end,) = made.graph.find_nodes(op="output")
    values = {node: node.meta.get("example_value", node.meta.get("val")) for node in end.all_input_nodes}
    floats = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and differentiable(v.dtype)}
    if not any(v.requires_grad for v in floats.values() if not v.ndim):
        return False
    with made.graph.inserting_before(end):
        for node in (n for n, v in floats.items() if v.ndim):
            free = made.graph.call_method("detach", (node,))
            free.meta = dict(node.meta)
            end.replace_input_with(node, free)
    made.recompile()
    return True


# what tracing needs


@contextlib.contextmanager
def faked(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> Iterator[FakeTensorMode]:
    """In this context all parameters and buffers of the module are fake tensors on a device.

    dtype: that of floating point parameters; None for their own.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    tables: list[dict[str, Any]] = [t for part in module.modules() for t in (part._parameters, part._buffers)]
    saved = [(table, dict(table)) for table in tables]
    stand_ins: dict[int, torch.Tensor] = {}
    try:
        for table, values in saved:
            for name, value in values.items():
                if value is not None:
                    if id(value) not in stand_ins:
                        stand_ins[id(value)] = _fake(value, mode, device, dtype)
                    table[name] = stand_ins[id(value)]
        yield mode
    finally:
        for table, values in saved:
            table.update(values)


def _fake(value: torch.Tensor, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    cast = dtype is not None and isinstance(value, nn.Parameter) and value.is_floating_point()
    with mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=dtype if cast else value.dtype, device=device)
    # torch.func.functional_call has plain tensors that need gradients in the place of parameters.
    trains = isinstance(value, nn.Parameter) or value.requires_grad
    return nn.Parameter(made, requires_grad=value.requires_grad) if trains else made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loggers do not break the graph: models warn in their forward."""
    config, before = torch._dynamo.config, set(torch._dynamo.config.ignore_logging_functions)
    names = ("debug", "info", "warning", "error", "warning_once", "warning_advice", "info_once")
    found = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    config.ignore_logging_functions |= found  # pyright: ignore[reportAttributeAccessIssue]
    try:
        # Sizes are numbers, but for those that are marked. LSTMs and GRUs are written out, step by step.
        # Gradients that a forward takes itself, such as forces of an energy, are part of its graph.
        static = config.patch(
            automatic_dynamic_shapes=False, assume_static_by_default=True, allow_rnn=True, trace_autograd_ops=True
        )
        with warnings.catch_warnings(), static:
            warnings.filterwarnings("ignore", "While compiling, we found certain side effects", UserWarning)
            warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN", UserWarning)
            yield
    finally:
        config.ignore_logging_functions = before  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def _without_fused_layers() -> Iterator[None]:
    """nn.MultiheadAttention and nn.TransformerEncoder are traced as ops, and not as torch's one op for evaluation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
