"""A graph of ours as StableHLO text with `sdy` shardings, for the ops that both have.

Every tensor of the graph becomes one value; what StableHLO says in several ops (an implicit broadcast, a kept dim) is
written as those. Annotations are closed: neither side may change them. Where an annotation binds a split of a dim that
is not outermost there is no such text, and `Untranslatable` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshfuse.dtypes import Category, DataType
from meshfuse.graph import Graph, Node
from meshfuse.mesh import DeviceMesh
from meshfuse.ops.reductions import reduced_dims
from meshfuse.ops.rules import FactorKind
from meshfuse.ops.values import ScalarRef, TensorRef, TensorType
from meshfuse.ops.windows import slice_bounds
from meshfuse.sharding import Layout, Sharding, Split

TYPES = {
    DataType.Double: "f64", DataType.Float: "f32", DataType.Half: "f16", DataType.BFloat16: "bf16",
    DataType.Int: "i64", DataType.Int32: "i32", DataType.Bool: "i1",
}  # fmt: skip
UNARY = {
    "abs": "abs", "exp": "exponential", "expm1": "exponential_minus_one", "log": "log", "log1p": "log_plus_one",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sine", "cos": "cosine", "tanh": "tanh", "sigmoid": "logistic",
    "floor": "floor", "ceil": "ceil", "sign": "sign",
}  # fmt: skip
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "truediv": "divide", "maximum": "maximum",
    "minimum": "minimum", "pow": "power", "mod": "remainder",
}  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
REDUCERS = {"sum": ("add", "0"), "prod": ("multiply", "1"), "max": ("maximum", "0"), "min": ("minimum", "0")}


class Untranslatable(Exception):
    """The graph holds something that StableHLO with `sdy` has no text for."""


def type_text(ttype: TensorType) -> str:
    return f"tensor<{''.join(f'{n}x' for n in ttype.shape)}{TYPES[ttype.dtype]}>"


def number(value: object, dtype: DataType) -> str:
    if dtype is DataType.Bool:
        return "true" if value else "false"
    return f"{float(value):e}" if dtype.category is Category.FLOAT else str(int(value))  # type: ignore[arg-type]


def mesh_text(mesh: DeviceMesh) -> str:
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.names, mesh.shape, strict=True))
    return f"sdy.mesh @mesh = <[{axes}]>"


def axis_text(split: Split, mesh: DeviceMesh) -> str:
    assert split.axis is not None
    whole = split.pre == 1 and split.size == mesh.axis_size(split.axis)
    return f'"{split.axis}"' if whole else f'"{split.axis}":({split.pre}){split.size}'


def dim_text(layout: Layout, mesh: DeviceMesh) -> str:
    if not all(split.bound for split in layout):
        raise Untranslatable(f"layout {layout}")
    return "{" + ", ".join(axis_text(split, mesh) for split in layout) + "}"


def sharding_text(sharding: Sharding) -> str:
    return f"@mesh, [{', '.join(dim_text(layout, sharding.mesh) for layout in sharding.dims)}]"


@dataclass(slots=True)
class Writer:
    """The text while it is written. `names[t]` is the value of tensor t."""

    graph: Graph
    mesh: DeviceMesh
    lines: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    count: int = 0

    def new(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def line(self, text: str, signature: str) -> str:
        name = self.new()
        self.lines.append(f"    {name} = {text} : {signature}")
        return name

    def operand(self, node: Node, place: int) -> str:
        return self.names[node.inputs[place]]

    def constant(self, value: object, ttype: TensorType) -> str:
        return self.line(f"stablehlo.constant dense<{number(value, ttype.dtype)}>", type_text(ttype))

    def broadcast(self, name: str, ttype: TensorType, shape: Sequence[int], dims: Sequence[int] | None = None) -> str:
        """The value spread to a shape: `dims` are the places of its dims there, the last ones if not given."""
        wide = TensorType(tuple(shape), ttype.dtype)
        if wide.shape == ttype.shape:
            return name
        dims = range(len(shape) - ttype.ndim, len(shape)) if dims is None else dims
        text = f"stablehlo.broadcast_in_dim {name}, dims = [{', '.join(map(str, dims))}]"
        return self.line(text, f"({type_text(ttype)}) -> {type_text(wide)}")

    def convert(self, name: str, ttype: TensorType, dtype: DataType) -> str:
        to = TensorType(ttype.shape, dtype)
        if ttype.dtype is dtype:
            return name
        return self.line(f"stablehlo.convert {name}", f"({type_text(ttype)}) -> {type_text(to)}")

    def reshape(self, name: str, ttype: TensorType, to: TensorType) -> str:
        return self.line(f"stablehlo.reshape {name}", f"({type_text(ttype)}) -> {type_text(to)}")


Emitter = Callable[[Writer, Node], str]


def _tensors(w: Writer, node: Node) -> list[tuple[str, TensorType]]:
    return [(w.names[i], ttype) for i, ttype in zip(node.inputs, node.call.types, strict=True)]


def _pointwise(w: Writer, node: Node) -> str:
    """Tensor operands spread to the result's shape and folded two by two; numbers change no sharding."""
    result = node.call.results[0]
    if node.name == "where":
        return _select(w, node)
    values = [(w.broadcast(name, ttype, result.shape), ttype.dtype) for name, ttype in _tensors(w, node)]
    if result.dtype is DataType.Bool:
        return _test(w, values, result)
    same = [w.convert(name, TensorType(result.shape, dtype), result.dtype) for name, dtype in values]
    if len(same) == 1:
        return _unary(w, node.name, same[0], result)
    out = same[0]
    for other in same[1:]:
        out = w.line(f"stablehlo.{BINARY.get(node.name, 'add')} {out}, {other}", type_text(result))
    return out


def _unary(w: Writer, name: str, value: str, result: TensorType) -> str:
    known = UNARY.get(name, "negate") if result.dtype.category is Category.FLOAT else "negate"
    return w.line(f"stablehlo.{known} {value}", type_text(result))


def _test(w: Writer, values: list[tuple[str, DataType]], result: TensorType) -> str:
    (left, dtype), (right, other) = values[0], values[-1]
    right = w.convert(right, TensorType(result.shape, other), dtype)
    text = type_text(TensorType(result.shape, dtype))
    return w.line(f"stablehlo.compare EQ, {left}, {right}", f"({text}, {text}) -> {type_text(result)}")


def _select(w: Writer, node: Node) -> str:
    result, found, branches = node.call.results[0], iter(_tensors(w, node)), []
    for param, arg in zip(node.call.op.params, node.call.args, strict=True):
        if isinstance(arg, TensorRef):
            name, ttype = next(found)
            value = w.broadcast(name, ttype, result.shape)
            dtype = ttype.dtype if param.name == "condition" else result.dtype
            branches.append(w.convert(value, TensorType(result.shape, ttype.dtype), dtype))
        else:
            branches.append(w.constant(0 if isinstance(arg, ScalarRef) else arg, result))
    condition = type_text(TensorType(result.shape, DataType.Bool))
    return w.line(f"stablehlo.select {', '.join(branches)}", f"{condition}, {type_text(result)}")


def _cast(w: Writer, node: Node) -> str:
    (name, ttype), result = _tensors(w, node)[0], node.call.results[0]
    return w.line(f"stablehlo.convert {name}", f"({type_text(ttype)}) -> {type_text(result)}")


def _reduce(w: Writer, node: Node) -> str:
    (name, ttype), result, dims = _tensors(w, node)[0], node.call.results[0], reduced_dims(node.call)
    name, ttype = w.convert(name, ttype, result.dtype), TensorType(ttype.shape, result.dtype)
    reducer, start = REDUCERS[node.name]
    first = TensorType((), result.dtype)
    init = w.constant(int(start), first)
    left = TensorType(tuple(n for d, n in enumerate(ttype.shape) if d not in dims), result.dtype)
    over = ", ".join(map(str, dims))
    text = f"stablehlo.reduce({name} init: {init}) applies stablehlo.{reducer} across dimensions = [{over}]"
    out = w.line(text, f"({type_text(ttype)}, {type_text(first)}) -> {type_text(left)}")
    return out if left.shape == result.shape else w.reshape(out, left, result)


def _dot(
    w: Writer, a: tuple[str, TensorType], b: tuple[str, TensorType], inner: tuple[int, int], batch: int,
    result: TensorType,
) -> str:  # fmt: skip
    lead = f"batching_dims = {list(range(batch))} x {list(range(batch))}, " if batch else ""
    text = f"stablehlo.dot_general {a[0]}, {b[0]}, {lead}contracting_dims = [{inner[0]}] x [{inner[1]}]"
    return w.line(text, f"({type_text(a[1])}, {type_text(b[1])}) -> {type_text(result)}")


def _matmul(w: Writer, node: Node) -> str:
    a, b = _tensors(w, node)
    batch = a[1].ndim - 2 if b[1].ndim > 2 else 0
    if a[1].ndim < 2 or b[1].ndim < 2 or (batch and a[1].shape[:batch] != b[1].shape[: b[1].ndim - 2]):
        raise Untranslatable("a broadcast matmul")
    return _dot(w, a, b, (a[1].ndim - 1, b[1].ndim - 2), batch, node.call.results[0])


def _linear(w: Writer, node: Node) -> str:
    x, weight, *bias = _tensors(w, node)
    if weight[1].ndim != 2:
        raise Untranslatable("a stacked or single weight")
    result = node.call.results[0]
    out = _dot(w, x, weight, (x[1].ndim - 1, 1), 0, result)
    for name, ttype in bias:
        out = w.line(f"stablehlo.add {out}, {w.broadcast(name, ttype, result.shape)}", type_text(result))
    return out


def _reshaped(w: Writer, node: Node) -> str:
    ((name, ttype),) = _tensors(w, node)
    return w.reshape(name, ttype, node.call.results[0])


def _transpose(w: Writer, node: Node) -> str:
    ((name, ttype),) = _tensors(w, node)
    order = [d % ttype.ndim for d in node.call["dims"]]
    return w.line(f"stablehlo.transpose {name}, dims = {order}", f"({type_text(ttype)}) -> "
                  f"{type_text(node.call.results[0])}")  # fmt: skip


def _spread(w: Writer, node: Node) -> str:
    ((name, ttype),), result = _tensors(w, node), node.call.results[0]
    dims = [d % result.ndim for d in node.call["broadcast_dims"]] if node.name == "broadcast_in_dim" else None
    if ttype.shape == result.shape:
        return w.line(f"stablehlo.negate {name}", type_text(result))
    return w.broadcast(name, ttype, result.shape, dims)


def _slice(w: Writer, node: Node) -> str:
    ((name, ttype),) = _tensors(w, node)
    bounds = ", ".join(":".join(map(str, part)) for part in slice_bounds(node.call))
    return w.line(f"stablehlo.slice {name} [{bounds}]", f"({type_text(ttype)}) -> {type_text(node.call.results[0])}")


def _select_one(w: Writer, node: Node) -> str:
    ((name, ttype),), result = _tensors(w, node), node.call.results[0]
    dim, place = node.call["dim"] % ttype.ndim, int(node.call["index"])
    place %= ttype.shape[dim]
    parts = [f"{place}:{place + 1}" if d == dim else f"0:{n}" for d, n in enumerate(ttype.shape)]
    cut = TensorType(tuple(1 if d == dim else n for d, n in enumerate(ttype.shape)), ttype.dtype)
    return w.reshape(
        w.line(f"stablehlo.slice {name} [{', '.join(parts)}]", f"({type_text(ttype)}) -> {type_text(cut)}"), cut, result
    )


def _pad(w: Writer, node: Node) -> str:
    ((name, ttype),), result, widths = _tensors(w, node), node.call.results[0], list(node.call["pad_widths"])
    pairs = [(int(widths[i]), int(widths[i + 1])) for i in range(0, len(widths), 2)]
    pairs = [*pairs, *[(0, 0)] * (ttype.ndim - len(pairs))][::-1]
    value = w.constant(0, TensorType((), ttype.dtype))
    text = f"stablehlo.pad {name}, {value}, low = {[a for a, _ in pairs]}, high = {[b for _, b in pairs]}, "
    scalar = type_text(TensorType((), ttype.dtype))
    text += f"interior = {[0] * ttype.ndim}"
    return w.line(text, f"({type_text(ttype)}, {scalar}) -> {type_text(result)}")


def _cat(w: Writer, node: Node) -> str:
    found, result = _tensors(w, node), node.call.results[0]
    same = [w.convert(name, ttype, result.dtype) for name, ttype in found]
    kinds = ", ".join(type_text(TensorType(ttype.shape, result.dtype)) for _, ttype in found)
    text = f"stablehlo.concatenate {', '.join(same)}, dim = {node.call['dim'] % result.ndim}"
    return w.line(text, f"({kinds}) -> {type_text(result)}")


def _iota(w: Writer, node: Node) -> str:
    return w.line("stablehlo.iota dim = 0", type_text(node.call.results[0]))


def _full(w: Writer, node: Node) -> str:
    value = node.call["fill_value"]
    return w.constant(1 if isinstance(value, ScalarRef) else value, node.call.results[0])


def _look_up(w: Writer, table: tuple[str, TensorType], index: tuple[str, TensorType], dim: int, node: Node) -> str:
    """Rows of `table` along `dim` by number; the index' dims stand where `dim` stood."""
    (name, ttype), (rows, places), result = table, index, node.call.results[0]
    kept = [d for d in range(ttype.ndim) if d != dim]
    offsets = [d if d < dim else d + places.ndim - 1 for d in kept]
    sizes = ", ".join("1" if d == dim else str(n) for d, n in enumerate(ttype.shape))
    numbers = f"offset_dims = {offsets}, collapsed_slice_dims = [{dim}], start_index_map = [{dim}]"
    text = (
        f'"stablehlo.gather"({name}, {rows}) <{{dimension_numbers = #stablehlo.gather<{numbers}, '
        f"index_vector_dim = {places.ndim}>, slice_sizes = array<i64: {sizes}>, indices_are_sorted = false}}>"
    )
    return w.line(text, f"({type_text(ttype)}, {type_text(places)}) -> {type_text(result)}")


def _embedding(w: Writer, node: Node) -> str:
    index, table = _tensors(w, node)[:2]
    return _look_up(w, table, index, 0, node)


def _index_select(w: Writer, node: Node) -> str:
    table, index = _tensors(w, node)
    return _look_up(w, table, index, node.call["dim"] % table[1].ndim, node)


EMITTERS: dict[str, Emitter] = {
    "cast": _cast, "matmul": _matmul, "linear": _linear, "reshape": _reshaped, "squeeze": _reshaped,
    "broadcast": _reshaped, "permute": _transpose, "broadcast_in_dim": _spread, "expand": _spread, "slice": _slice,
    "select": _select_one, "pad": _pad, "cat": _cat, "iota": _iota, "full": _full, "embedding_fwd": _embedding,
    "index_select": _index_select, "where": _select, **dict.fromkeys(REDUCERS, _reduce),
}  # fmt: skip


def _is_pointwise(node: Node) -> bool:
    """Every result dim is a factor of all operands that have it, and of nothing else; none is whole, as in a sort."""
    (result,) = node.rule.results
    if any(factor.kind is not FactorKind.PASS for factor in node.rule.factors):
        return False
    return len(node.rule.factors) == sum(map(bool, result)) and all(
        dims == result[len(result) - len(dims) :] or all(not d or d in result for d in dims)
        for dims in node.rule.operands
    )


def _emit(w: Writer, node: Node) -> str:
    found = EMITTERS.get(node.name)
    if found is not None:
        return found(w, node)
    if len(node.outputs) == 1 and _is_pointwise(node) and node.inputs:
        return _pointwise(w, node)
    raise Untranslatable(node.name)


def _annotate(w: Writer, tensor: int) -> None:
    """The annotation goes on the op that makes the value, the last one written."""
    sharding = w.graph.annotations.get(tensor)
    if sharding is None:
        return
    marked = f"{{sdy.sharding = #sdy.sharding_per_value<[<{sharding_text(sharding)}>]>}}"
    head, signature = w.lines[-1].rsplit(" : ", 1)
    is_constant = "stablehlo.constant" in head  # its attributes stand before its value
    text = head.replace("constant ", f"constant {marked} ") if is_constant else f"{head} {marked}"
    w.lines[-1] = f"{text} : {signature}"


def _marked(graph: Graph, tensor: int) -> str:
    sharding, text = graph.annotations.get(tensor), type_text(graph.tensors[tensor].type)
    return text if sharding is None else f"{text} {{sdy.sharding = #sdy.sharding<{sharding_text(sharding)}>}}"


def stablehlo_of(graph: Graph) -> str:
    """The graph as one function. Raises Untranslatable."""
    meshes = {sharding.mesh for sharding in graph.annotations.values()}
    if len(meshes) != 1:
        raise Untranslatable(f"{len(meshes)} meshes")
    w = Writer(graph, meshes.pop())
    for place, i in enumerate(graph.input_tensors):
        w.names[i] = f"%arg{place}"
    taken = ", ".join(f"{w.names[i]}: {_marked(graph, i)}" for i in graph.input_tensors)
    for node in graph.nodes:
        w.names[node.outputs[0]] = _emit(w, node)
        _annotate(w, node.outputs[0])
    given = ", ".join(_marked(graph, i) for i in graph.outputs)
    kinds = ", ".join(type_text(graph.tensors[i].type) for i in graph.outputs)
    names = ", ".join(w.names[i] for i in graph.outputs)
    head = f"  func.func public @main({taken}) -> ({given}) {{"
    return "\n".join([mesh_text(w.mesh), head, *w.lines, f"    return {names} : {kinds}", "  }"])
