"""What torch refuses while a program runs is told in terms of the user's op, operands and line."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.ops import OPS as TABLE

# Arguments of the ops, x and y being tensors of one dtype.
OPS: dict[str, tuple[Any, ...]] = {
    "add": ("x", "y"), "matmul": ("x", "y"), "sum": ("x", [0]), "exp": ("x",), "cumsum": ("x", 0), "max": ("x", [1]),
    "argsort": ("x", 0), "topk": ("x", 2, 0, True, True), "var": ("x", [0], 0), "bitwise_and": ("x", "y"),
    "where": ("y", "x", "x"), "remainder": ("x", "y"), "gelu": ("x",), "abs": ("x",), "lgamma": ("x",),
    "softmax": ("x", 1), "cat": (["x", "y"], 0), "triu": ("x", 0), "neg": ("x",), "isnan": ("x",),
}  # fmt: skip
# Numbers of four bits are packed in twos: what cannot be made of ones cannot be passed.
DTYPES = [d for d in mf.DataType if d is not mf.DataType.Null and not d.name.startswith("Float4")]


def defined(name: str, dtype: mf.DataType, mesh: mf.DeviceMesh) -> mf.FusionDefinition | None:
    """A definition of one op; None where it does not take the dtype."""
    with mf.FusionDefinition() as fd:
        named = {n: fd.define_tensor([4, 4], dtype=dtype) for n in "xy"}
        fd.mesh_split(named["x"], mesh, ["tp", None])
        try:
            made = fd.call(name, tuple(_filled(arg, named) for arg in OPS[name]))
        except mf.DefinitionError:
            return None
        for out in made if isinstance(made, tuple) else (made,):
            fd.add_output(out)
    return fd


def _filled(arg: Any, named: dict[str, Any]) -> Any:
    if isinstance(arg, list) and arg[0] in named:
        return [named[name] for name in arg]
    return named[arg] if isinstance(arg, str) else arg


@pytest.mark.parametrize("name", OPS)
def test_no_error_of_torch_is_raised_as_it_is(name: str) -> None:
    refused = []
    for dtype in DTYPES:
        fd = defined(name, dtype, mf.DeviceMesh((2,), ("tp",)))
        if fd is not None:
            ones = torch.ones(4, 4).to(getattr(torch, dtype.value))
            try:
                fd.simulate([ones, ones])
            except mf.KernelError as error:
                refused.append(str(error))
    for text in refused:
        assert "cannot be computed on rank 0: found " in text and "needed operands that torch has a kernel for" in text
        assert "(at test_refusals.py:" in text and re.search(r"v\d: \w+\[\d, \d\]", text)
    assert refused or name not in ("add", "matmul")


def test_a_refusal_names_the_op_its_operands_and_the_cause() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], dtype=mf.DataType.UInt64)
        double = fd.ops.add(x, x)
        fd.add_output(double)
    with pytest.raises(mf.KernelError) as caught:
        fd.execute([torch.ones(4, 4, dtype=torch.uint64)])
    text = str(caught.value)
    assert text.startswith("double (add) cannot be computed on rank 0: found NotImplementedError: ")
    assert (
        "uint64[4, 4]" in text
        and f"Cast them with fd.ops.cast, or pass other values. (at {fd.recording.nodes[0].line})" in text
    )
    assert isinstance(caught.value.__cause__, NotImplementedError) and isinstance(caught.value, ValueError)


# indices ----------------------------------------------------------------------------------------------------------

# A table of 6 x 4 is looked up in along its first dim. What each op makes of the table, the indices and a number.
LOOKUPS: dict[str, Any] = {
    "embedding_fwd": lambda ops, table, ids, number: ops.embedding_fwd(ids, table),
    "index_select": lambda ops, table, ids, number: ops.index_select(table, ids, 0),
    "take_along_axis": lambda ops, table, ids, number: ops.take_along_axis(table, ops.broadcast(ids, [False, True]), 0),
    "gather": lambda ops, table, ids, number: ops.gather(table, ops.broadcast_in_dim(ids, [5, 3], [0]), 0),
    "select": lambda ops, table, ids, number: ops.select(table, number, 0),
    "scatter": lambda ops, table, ids, number: ops.scatter(table, ops.broadcast_in_dim(ids, [5, 4], [0]), 1.5, 0),
    "scatter_max": lambda ops, table, ids, number: ops.scatter_max(
        table, ops.broadcast_in_dim(ids, [5, 4], [0]), _five(ops, table), 0
    ),
    "scatter_min": lambda ops, table, ids, number: ops.scatter_min(
        table, ops.broadcast_in_dim(ids, [5, 4], [0]), _five(ops, table), 0
    ),
    "scatter_prod": lambda ops, table, ids, number: ops.scatter_prod(
        table, ops.broadcast_in_dim(ids, [5, 4], [0]), _five(ops, table), 0
    ),
    "window_max_bwd": lambda ops, table, ids, number: ops.window_max_bwd(
        ops.reshape(ops.sum(_five(ops, table), [1]), [1, 1, 5]), ops.reshape(ids, [1, 1, 5]), [6], [1], [1]
    ),
    "embedding_bwd": lambda ops, table, ids, number: ops.embedding_bwd(_five(ops, table), ids, 6),
    "take_along_axis_bwd": lambda ops, table, ids, number: ops.take_along_axis_bwd(
        _five(ops, table), ops.broadcast(ids, [False, True]), 0, 6
    ),
    "select_bwd": lambda ops, table, ids, number: ops.select_bwd(ops.sum(table, [0]), number, 0, 6),
}
# Other calls of theirs, whose gradients are other ops.
OTHER_LOOKUPS: dict[str, Any] = {
    "a padded table": lambda ops, table, ids, number: ops.embedding_fwd(ids, table, 2),
    "a table by counts": lambda ops, table, ids, number: ops.embedding_fwd(ids, table, None, None, None, True),
    "a source": lambda ops, table, ids, number: ops.scatter(
        ops.full([6, 4], 0.0, mf.DataType.Double), ops.broadcast_in_dim(ids, [5, 4], [0]), _five(ops, table), 0
    ),
    "one index": lambda ops, table, ids, number: ops.index_select(table, ops.squeeze(ops.slice(ids, [2], [3]), [0]), 0),
    "an index for all": lambda ops, table, ids, number: ops.take_along_axis(
        table, ops.broadcast_in_dim(ids, [5, 1], [0]), 0
    ),
    "the classes of a loss": lambda ops, table, ids, number: ops.cross_entropy(
        ops.broadcast_in_dim(ops.permute(table, [1, 0]), [5, 4, 6], [1, 2]), ops.broadcast_in_dim(ids, [5, 4], [0])
    ),
}


def _five(ops: Any, table: Any) -> Any:
    return ops.slice(table, [0, 0], [5, 4])


SPECS: dict[str, list[Any] | None] = {
    "no mesh": None, "whole": [None, None], "rows": ["tp", None], "columns": [None, "tp"],
}  # fmt: skip


def lookup(build: Any, spec: list[Any] | None, ranks: int = 4) -> mf.FusionDefinition:
    """A definition of one look-up in a table that lies so on some ranks."""
    with mf.FusionDefinition() as fd:
        table = fd.define_tensor([6, 4], dtype=mf.DataType.Double)
        ids, number = fd.define_tensor([5], dtype=mf.DataType.Int), fd.define_scalar(dtype=mf.DataType.Int)
        fd.add_output(build(fd, table, ids, number))
        if spec is not None:
            fd.mesh_split(table, mf.DeviceMesh((ranks,), ("tp",)), spec)
    return fd


def forward(name: str) -> Any:
    return lambda fd, *given: LOOKUPS[name](fd.ops, *given)


def gradient(name: str) -> Any:
    """The gradient by the table, when the look-up itself is no output: it reads the indices and not the look-up."""

    def build(fd: Any, table: Any, *given: Any) -> Any:
        return fd.grad({**LOOKUPS, **OTHER_LOOKUPS}[name](fd.ops, table, *given), [table])[0]

    return build


def second_gradient(name: str) -> Any:
    """The gradient of that by what it was seeded with: a look-up again."""

    def build(fd: Any, table: Any, *given: Any) -> Any:
        made = {**LOOKUPS, **OTHER_LOOKUPS}[name](fd.ops, table, *given)
        seed = fd.ops.full(list(made.type.shape), 1.0, made.dtype)
        return fd.grad(fd.grad(made, [table], [seed])[0], [seed])[0]

    return build


def wrong(name: str, place: int) -> tuple[list[Any], str]:
    """Arguments with one index that the table does not have, and what the error says of it."""
    ids = torch.tensor([0, 3, 5, 2, 1])
    if name.startswith("select"):
        return [torch.ones(6, 4, dtype=torch.float64), ids, place], f"found {place}, needed -6 to 5"
    ids[2] = place
    return [torch.ones(6, 4, dtype=torch.float64), ids, 0], rf"found {place} in v\d+: int64\[[\d, ]+\], needed 0 to 5"


@pytest.mark.parametrize("place", [-7, 6, 2**40])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_that_the_dim_does_not_have_is_an_error_on_every_mesh(name: str, spec: str, place: int) -> None:
    """The same error, whether a rank holds the whole dim, a part of it or none."""
    fd = lookup(forward(name), SPECS[spec])
    arguments, message = wrong(name, place)
    with pytest.raises(mf.KernelError, match=f"{message}, as the dim has size 6.*at test_refusals.py") as caught:
        fd.simulate(arguments)
    # In its distributed form the gradient of a maximum looks at indices by another op.
    assert re.match(rf"({name}|linear_index): an index is out of range on rank ", str(caught.value))
    fd.simulate(wrong(name, 5)[0])
    if SPECS[spec] is None:
        with pytest.raises(mf.KernelError, match=message):
            fd.execute(arguments)


@pytest.mark.parametrize("place", [-7, 6])
@pytest.mark.parametrize("spec", ["no mesh", "rows"])
@pytest.mark.parametrize("name", [name for name in (*LOOKUPS, *OTHER_LOOKUPS) if name != "scatter_prod"])
@pytest.mark.parametrize("build", [gradient, second_gradient])
def test_gradients_find_such_an_index_though_nothing_reads_the_look_up(
    build: Any, name: str, spec: str, place: int
) -> None:
    """As the forward would: what is added where nothing was read is no gradient."""
    fd = lookup(build(name), SPECS[spec])
    arguments, message = wrong(name, place)
    with pytest.raises(mf.KernelError, match=f"an index is out of range on rank .*{message}.*at test_refusals.py"):
        fd.simulate(arguments)
    fd.simulate(wrong(name, 5)[0])


def test_an_index_of_rows_that_are_all_the_same_is_read() -> None:
    """Picked before the sum, rows that are one row repeated would need no index."""
    mesh = mf.DeviceMesh((4,), ("tp",))
    with mf.FusionDefinition() as fd:
        row, ids = fd.define_tensor([1, 4096, 8]), fd.define_tensor([3], dtype=mf.DataType.Int)
        found = fd.ops.index_select(fd.ops.tanh(fd.ops.sum(fd.ops.expand(row, [6, 4096, 8]), [2])), ids, 0)
        fd.add_output(found)
        fd.mesh_split(row, mesh, [None, None, "tp"])
        fd.mesh_split(found, mesh, [None, None])
    for place in (5, 6, -1):
        with contextlib.nullcontext() if place == 5 else pytest.raises(mf.KernelError, match=f"found {place} in "):
            fd.simulate([torch.ones(1, 4096, 8), torch.tensor([0, place, 1])])


def test_the_look_ups_here_are_all_that_there_are() -> None:
    indexed = {op.name for op in TABLE.values() if any(p.name in ("index", "padding_idx") for p in op.params)}
    assert indexed == set(LOOKUPS)


# How many rows a rank adds is known at run time only, so that this one stays eager, and what is beside it.
STAYS_EAGER = "embedding_bwd"


@pytest.mark.slow
@pytest.mark.parametrize("names", [[name for name in LOOKUPS if name != STAYS_EAGER], [STAYS_EAGER]])
def test_errors_of_compiled_segments_are_those_of_eager_ones(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of look-ups in one program, each with indices of its own: compiling it takes as long as one alone."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    with mf.FusionDefinition() as fd:
        table = fd.define_tensor([6, 4], dtype=mf.DataType.Double)
        for name in names:
            ids, number = fd.define_tensor([5], dtype=mf.DataType.Int), fd.define_scalar(dtype=mf.DataType.Int)
            fd.add_output(forward(name)(fd, table, ids, number))
        fd.mesh_split(table, mf.DeviceMesh((2,), ("tp",)), SPECS["rows"])  # each rank's segments are compiled
    right = {name: wrong(name, 5)[0][1:] for name in names}
    whole = torch.ones(6, 4, dtype=torch.float64)
    fd.simulate([whole, *itertools.chain(*right.values())])
    for name in names:
        (_, *given), message = wrong(name, 6)
        with pytest.raises(mf.KernelError, match=rf"^({name}|linear_index): an index is out of range on .*{message}"):
            fd.simulate([whole, *itertools.chain(*{**right, name: given}.values())])
    (made,) = fd._execution.simulated.values()
    chosen = {c.backend for segments in made.simulation.segments for c in segments.chosen.values()}
    assert chosen == {"eager" if names == [STAYS_EAGER] else "inductor"}


def test_no_indices_at_all_are_fine() -> None:
    with mf.FusionDefinition() as fd:
        table, ids = fd.define_tensor([6, 4]), fd.define_tensor([0], dtype=mf.DataType.Int)
        fd.add_output(fd.ops.embedding_fwd(ids, table))
    assert fd.execute([torch.ones(6, 4), torch.empty(0, dtype=torch.int64)])[0].shape == (0, 4)


def test_an_out_of_memory_error_names_the_op() -> None:
    with mf.FusionDefinition() as fd:
        y = fd.ops.sin(fd.define_tensor([1 << 60]))
        fd.add_output(y)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fd.execute([torch.ones(1).expand(1 << 60)])
    text = str(caught.value)
    assert isinstance(caught.value, mf.OutOfMemoryError) and isinstance(caught.value.__cause__, RuntimeError)
    assert re.match(
        r"no memory for y \(sin\) on rank 0: found RuntimeError: .*allocate.*, needed less at once\. ", text
    )
    assert "print(fd.memory())" in text and text.endswith(f"(at {fd.recording.nodes[0].line})")
