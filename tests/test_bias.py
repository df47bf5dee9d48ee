"""A linear's bias over the ranks that share its sum: added once, where it lies, as cheap as an add of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.testing import assert_same_as_unsharded, inputs_for

MESH = mf.DeviceMesh((2, 2), ("dp", "tp"))
AXES = (None, "dp", "tp", ("dp", "tp"))


def linear(x: list[Any], w: list[Any], b: list[Any], y: list[Any] | None, own_add: bool = False) -> Any:
    """x [8, 12] and w [20, 12] and b [20] in these shardings; with `own_add` the bias is added by the user."""
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=mf.DataType.Double) for shape in ((8, 12), (20, 12), (20,))]
        out = fd.ops.linear(*tensors[:2], None if own_add else tensors[2])
        out = fd.ops.add(out, fd.ops.broadcast(tensors[2], [True, False])) if own_add else out
        fd.add_output(out)
        for t, spec in zip((*tensors, out), (x, w, b, y), strict=True):
            if spec is not None:
                fd.mesh_split(t, MESH, spec)
    return fd


def split(*dims: Any) -> list[str]:
    """The mesh axes of a tensor's dims."""
    return [axis for dim in dims if dim for axis in ([dim] if isinstance(dim, str) else dim)]


def layouts() -> list[tuple[Any, ...]]:
    """All in which no axis splits two dims of one tensor."""
    found = []
    for rows, inner, n, b in itertools.product(AXES[:3], AXES, AXES[:3], AXES):
        for out in (None, [None, None], ["tp", None], [None, "tp"], ["dp", "tp"]):
            for dims in ((rows, inner), (n, inner)):
                if len(set(split(*dims))) != len(split(*dims)):
                    break
            else:
                found.append(([rows, inner], [n, inner], [b], out))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("inner", AXES)
def test_the_bias_is_added_once_in_all_layouts(inner: Any) -> None:
    for x, w, b, y in layouts():
        if x[1] == inner:
            fd = linear(x, w, b, y)
            inputs = inputs_for(fd)
            assert_same_as_unsharded(fd, inputs, (F.linear(*inputs),))


@pytest.mark.slow
@pytest.mark.parametrize("inner", AXES[1:])
def test_it_costs_no_more_than_an_add_of_its_own(inner: Any) -> None:
    dearer = []
    for x, w, b, y in layouts():
        if x[1] == inner and set(split(inner)) & set(split(*b)):
            mine, other = (linear(x, w, b, y, own).bill().total for own in (False, True))
            dearer += [(x, w, b, y, mine, other)] if mine > other else []
    assert dearer == []


def test_a_free_result_lies_where_its_bias_does() -> None:
    """A reduce-scatter: half the bytes of an all-reduce."""
    fd = linear([None, "tp"], [None, "tp"], ["tp"], None)
    assert "reduce-scatter[tp]" in str(fd.compile().resharded) and "all-" not in str(fd.compile().resharded)
    assert fd.bill().total == 8 * 20 * 8 // 2


@pytest.mark.parametrize(
    ("shapes", "specs"),
    [
        (((8, 12), (3, 20, 12), (3, 20)), ([None, "tp"], [None, None, "tp"], [None, "tp"])),
        (((8, 12), (3, 20, 12), (3, 20)), ([None, "tp"], [None, None, "tp"], ["tp", None])),
        (((2, 8, 12), (20, 12), (20,)), ([None, None, "tp"], [None, "tp"], ["tp"])),
        (((12,), (20, 12), (20,)), (["tp"], [None, "tp"], ["tp"])),
    ],
)
@pytest.mark.parametrize("kind", [mf.DataType.Double, mf.DataType.BFloat16])
def test_products_of_all_ranks_and_kinds(shapes: Any, specs: Any, kind: mf.DataType) -> None:
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=kind) for shape in shapes]
        y = fd.ops.linear(*tensors)
        fd.add_output(y)
        for t, spec in zip(tensors, specs, strict=True):
            fd.mesh_split(t, MESH, spec)
    inputs = [torch.randint(-2, 3, shape).to(getattr(torch, kind.value)) for shape in shapes]
    (found,) = fd.simulate(inputs, check_replicas=True)
    assert found.dtype is inputs[0].dtype
    x, w, b = (t.double() for t in inputs)
    wanted = torch.einsum("...k,dnk->d...n", x, w) + b[:, None] if w.ndim == 3 else F.linear(x, w, b)
    torch.testing.assert_close(found.double(), wanted)
    assert "= broadcast(" in str(fd.compile().resharded)


@pytest.mark.parametrize("kind", [mf.DataType.BFloat16, mf.DataType.Half])
@pytest.mark.parametrize("x", [(12,), (6, 12), (2, 5, 12)])
@pytest.mark.parametrize("w", [(8, 12), (4, 8, 12), (1, 8, 12)])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_16_bit_floats_are_rounded_after_the_bias(x: Any, w: Any, kind: mf.DataType, dim: int | None) -> None:
    """2049 - 2048 is 1, though neither type holds 2049; ranks that hold whole rows of the weight know no less."""
    if dim == len(w) - 1:
        dim = None  # Terms of ranks are rounded.
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=kind) for shape in (x, w, w[:-1])]
        fd.add_output(fd.ops.linear(*tensors))
        for t in tensors[1:]:
            fd.mesh_split(t, MESH, ["tp" if d == dim else None for d in range(len(t.shape()))])
    rows, matrix, bias = (torch.zeros(shape, dtype=getattr(torch, kind.value)) for shape in (x, w, w[:-1]))
    rows += 1
    matrix[..., 0], matrix[..., 7] = 2048, 1
    (found,) = fd.simulate([rows, matrix, bias - 2048])
    assert found.eq(1).all()
