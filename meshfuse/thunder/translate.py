"""Symbols of a Thunder trace in ops of a definition."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from thunder.core.baseutils import NumberProxyInterface
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.distributed.prims import PrimIDs as DistPrims

from ..definition import annotating
from ..definition.tensor_view import TensorView
from ..dtypes import DataType, from_torch
from ..errors import SourceLine
from ..frontends.aten import Translation
from ..frontends.sizes import Sizes
from ..frontends.traced import TracedDefinition
from ..sharding.layout import Split
from ..sharding.value import Sharding
from .collectives import Move, Taken, WholeMesh, kind_of
from .prims import Layout, MeshPrims
from .rules import RULES

_SIZES = Sizes()  # Sizes in a trace are numbers.
_TRACE = SourceLine("<trace>", 0, "", "")  # of what no line of a script has made


@dataclass(frozen=True, slots=True)
class Meta:
    """What a rule is told of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def meta_of(proxy: TensorProxy) -> Meta:
    """Shape and dtype of a proxy."""
    dtype = to_torch_dtype(proxy.dtype)
    assert dtype is not None
    return Meta(tuple(int(n) for n in proxy.shape), dtype)


def has_known_dtype(proxy: TensorProxy) -> bool:
    """Whether definitions have the type of a proxy's elements."""
    try:
        return from_torch(to_torch_dtype(proxy.dtype)) is not DataType.Null
    except ValueError:
        return False


def line_of(bsym: Any) -> SourceLine | None:
    """The line that a symbol comes from, if Thunder knows it and it is none of Thunder's own."""
    file, where = bsym.source_filename, bsym.source_positions
    if not file or where is None or "/thunder/torch/" in file:
        return None
    return SourceLine(file, where.lineno or 0)


@dataclass(slots=True)
class Translator:
    """Writes symbols of a trace into a definition.

    values: what each proxy has become, by name: a TensorView.
    locals: of local proxies the whole tensor that they are this rank's shard of.
    names: what tensors are called, by name of the proxy.
    taken: Thunder's collectives that are written as well.
    whole: the mesh that these go along; without it they do nothing, as in a plan of the other axes.
    layouts: by name where tensors are to lie.
    moved: the tensors of collectives, by number.
    """

    fd: TracedDefinition
    values: dict[str, TensorView] = field(default_factory=dict)
    locals: dict[str, TensorView] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    taken: Taken = field(default_factory=Taken)
    whole: WholeMesh | None = None
    layouts: Mapping[str, Sharding] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.fd.at = _TRACE

    def take(self, proxy: TensorProxy, sharding: Sharding) -> None:
        """Make a proxy an input that lies so."""
        self.values[proxy.name] = self._input(proxy, tuple(proxy.shape), sharding, proxy.name)

    def take_local(self, proxy: TensorProxy, layout: Layout) -> None:
        """Make a local proxy an input: a whole tensor, of which each rank has its shard."""
        self.names[proxy.name] = layout.name
        view = self.locals[proxy.name] = self._input(proxy, layout.shape, layout.sharding, layout.name)
        if layout.stationary:
            annotating.keep_stationary(self.fd.recording, view.id, True, _TRACE)

    def _input(self, proxy: TensorProxy, shape: Sequence[int], sharding: Sharding, name: str) -> TensorView:
        line = replace(_TRACE, name=name)
        view = self.fd.new_input(shape, from_torch(meta_of(proxy).dtype), line)
        annotating.shard(self.fd.recording, view.id, sharding, None, line)
        return view

    def end(self, proxy: TensorProxy, sharding: Sharding) -> TensorView:
        """Return a tensor of the definition, which lies so."""
        view = self.locals[proxy.name] if proxy.name in self.locals else self.values[proxy.name]
        self.fd.at = replace(self.fd.at, name=self.names.get(proxy.name, proxy.name))
        made = self.fd.ops.set(view)
        annotating.shard(self.fd.recording, made.id, sharding, None, self.fd.at)
        self.fd.add_output(made)
        if view.id in self.moved:
            self.moved.add(made.id)
        return made

    def write(self, bsym: Any) -> None:
        """Write a symbol, or those that it is made of. What it reads must have values."""
        self.fd.at = line_of(bsym) or self.fd.at
        if bsym in self.taken:
            self._take_in(bsym)
        elif bsym.sym.id in _ANNOTATIONS:
            _ANNOTATIONS[bsym.sym.id](self, bsym.args, bsym.output)
        elif bsym.sym.id in RULES:
            self._apply(bsym)
        else:
            for part in bsym.subsymbols:
                self.write(part)

    def _take_in(self, bsym: Any) -> None:
        """Write a collective of Thunder's, or what belongs to it."""
        source, move = bsym.flat_proxy_args[0].name, self.taken.moves.get(id(bsym))
        view = self.locals[source] if source in self.locals else self.values[source]
        if move is not None and self.whole is not None:
            view = self._moved(view, move, self.whole)
        elif move is None and kind_of(bsym) is not DistPrims.WAIT:
            number = next(arg for arg in bsym.args if not isinstance(arg, TensorProxy))
            view = self.fd.ops.truediv(view, float(number))
        out = bsym.output.name
        self.values[out] = view
        if source in self.locals:
            self.locals[out] = view
        self.names.setdefault(out, str(self.names.get(source, source)))

    def _moved(self, view: TensorView, move: Move, whole: WholeMesh) -> TensorView:
        """The tensor gathered along an axis, or the sum of what ranks along it have."""
        here = self._annotated(view)
        if move.gathers:
            made, dims = self.fd.ops.set(view), [_without(layout, move.axis) for layout in here]
        else:
            n = whole.mesh.axis_size(move.axis)
            rows = self.fd.ops.expand(self.fd.ops.broadcast(view, [True] + [False] * view.ndim), [n, *view.type.shape])
            self._place(rows, Sharding.make(whole.mesh, [(Split(n, move.axis),), *here], rows.type.shape))
            made = self.fd.ops.sum(rows, [0])
            more = (Split(n, move.axis),)
            dims = [(*layout, *more) if d == move.dim else layout for d, layout in enumerate(here)]
            self.moved.add(rows.id)
        self._place(made, Sharding.make(whole.mesh, dims, view.type.shape))
        self.moved.update((made.id, *([view.id] if move.gathers else [])))
        return made

    def _annotated(self, view: TensorView) -> list[Any]:
        """How a tensor is annotated, dim by dim; whole where it is not."""
        note = self.fd.recording.own_annotations.get(view.id)
        return [()] * view.ndim if note is None or note.mesh is None else note.named()

    def _place(self, view: TensorView, sharding: Sharding) -> None:
        if not self.fd.recording.is_annotated(view.id):
            annotating.shard(self.fd.recording, view.id, sharding, None, self.fd.at)

    def _apply(self, bsym: Any) -> None:
        self.fd.at = replace(self.fd.at, name=self._name(bsym))
        args, kwargs = tree_map(self._argument, (tuple(bsym.args), dict(bsym.kwargs)))
        outputs = bsym.output if isinstance(bsym.output, (tuple, list)) else (bsym.output,)
        metas = [meta_of(out) for out in outputs]
        told = metas[0] if bsym.output is outputs[0] else metas
        made = RULES[bsym.sym.id](Translation(self.fd, told, _SIZES), *args, **kwargs)
        found = made if isinstance(made, (tuple, list)) else (made,)
        for out, view, meta in zip(outputs, found, metas, strict=False):
            view = self.values[out.name] = self._fitted(bsym, view, meta)
            if out.name in self.layouts:
                self._place(view, self.layouts[out.name])

    def _fitted(self, bsym: Any, view: TensorView, meta: Meta) -> TensorView:
        wanted = from_torch(meta.dtype)
        view = view if view.dtype is wanted else self.fd.ops.cast(view, wanted)
        assert tuple(view.type.shape) == meta.shape, f"{bsym.sym.name}: {view.type} in the place of {meta}"
        return view

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorProxy):
            return self.values[value.name]
        return value.value if isinstance(value, NumberProxyInterface) else value

    def _name(self, bsym: Any) -> str:
        """The module whose parameter an op reads, and the op's name."""
        found = (self.names[x.name] for x in bsym.flat_proxy_args if x.name in self.names)
        module = next(found, "").rpartition(".")[0]
        return f"{module}.{bsym.sym.name}" if module else bsym.sym.name


def _without(layout: Any, axis: str) -> Any:
    """The layout whole along an axis, which is the minor one."""
    return tuple([split for split in layout if split.axis != axis])


def _split(to: Translator, args: tuple[Any, ...], out: TensorProxy) -> None:
    x, *layout = args
    to.values[out.name], to.names[out.name] = to.locals[x.name], Layout(*layout).name


def _local(to: Translator, args: tuple[Any, ...], out: TensorProxy) -> None:
    x, *layout = args
    to.locals[out.name], to.names[out.name] = to.values[x.name], Layout(*layout).name


def _layout(*_: Any) -> None:
    """Read before a region is written."""


_ANNOTATIONS = {MeshPrims.MESH_SPLIT: _split, MeshPrims.MESH_LOCAL: _local, MeshPrims.MESH_LAYOUT: _layout}
