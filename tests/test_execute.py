"""What a second call of `execute` may leave out: nothing that its arguments need checked."""

from __future__ import annotations

import pytest
import torch

import meshfuse as mf
from meshfuse.executor.argument_guards import outline


def doubled(*dims: int, scalar: bool = False) -> mf.FusionDefinition:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(dims))
        factor = fd.define_scalar(dtype=mf.DataType.Int) if scalar else 2.0
        fd.add_output(x * factor)
    return fd


GOOD = torch.arange(6.0).reshape(2, 3)
BAD = {
    "a dtype": [GOOD.double()],
    "a shape": [GOOD.t()],
    "dims": [GOOD[0]],
    "a count": [GOOD, GOOD],
    "no list": GOOD,
    "no tensor": [2.0],
    "a layout": [GOOD.to_sparse()],
    "none": [],
}


@pytest.mark.parametrize("what", BAD)
def test_arguments_are_checked_after_good_ones(what):
    fd, fresh = doubled(2, 3), doubled(2, 3)
    for _ in range(3):
        (found,) = fd.execute([GOOD])
        assert torch.equal(found, GOOD * 2)
    with pytest.raises(mf.ArgumentError) as first:
        fresh.execute(BAD[what])
    with pytest.raises(mf.ArgumentError) as later:
        fd.execute(BAD[what])
    assert str(first.value).partition(" (at")[0] == str(later.value).partition(" (at")[0]
    assert torch.equal(fd.execute([GOOD])[0], GOOD * 2)


def test_open_sizes_and_scalars_are_those_of_the_call():
    fd = doubled(-1, 3)
    for rows in (2, 5, 2, 4):
        x = torch.randn(rows, 3)
        assert torch.equal(fd.execute([x])[0], x * 2)
    scaled = doubled(2, 3, scalar=True)
    for factor in (2, 7, 2):
        assert torch.equal(scaled.execute([GOOD, factor])[0], GOOD * factor)
    with pytest.raises(mf.ArgumentError):
        scaled.execute([GOOD, "7"])


def test_strides_are_checked_at_every_call_where_the_definition_names_them():
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([2, 3], stride_order=[0, 1])
        fd.add_output(x * 2.0)
    for _ in range(2):
        assert torch.equal(fd.execute([GOOD.t().contiguous().t()])[0], GOOD * 2)
        with pytest.raises(mf.ArgumentError, match="has the wrong stride order"):
            fd.execute([GOOD])


def test_shapes_dtypes_and_devices_are_what_is_known():
    keys = [outline([t]) for t in (GOOD, GOOD.to("meta"), GOOD.double(), GOOD[:1])]
    assert len(set(keys)) == len(keys)
    assert outline([GOOD]) == outline([GOOD + 1]) == outline((torch.nn.Parameter(GOOD),))
    assert outline([GOOD, 1]) is outline(iter([GOOD])) is None


def test_a_graph_of_autograd_is_made_as_the_mode_says():
    """Outputs carry gradients where torch's mode and an input ask for them; the mode is left as it was."""
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            (found,) = doubled(2, 3).execute([GOOD.clone().requires_grad_()])
            assert found.requires_grad is torch.is_grad_enabled() is mode


def passed_on() -> mf.FusionDefinition:
    """Outputs that are the argument, views of it, copies of it, and computed."""
    mesh = mf.DeviceMesh((2,), ("x",))
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([2, 3])
        for made in (x, fd.ops.permute(x, [1, 0]), fd.ops.set(x), fd.ops.slice(x, [0, 1], [2, 3]), x * 2.0):
            fd.add_output(made)
        fd.mesh_split(x, mesh, ["x", None])
    return fd


@pytest.mark.parametrize("leaf", [True, False])
def test_the_graph_of_autograd_has_the_call_alone(leaf: bool) -> None:
    """Nothing of the programs, and not how arguments are cut and put together; without a gradient there is none."""
    value = GOOD.clone().requires_grad_()
    value = value if leaf else value * 1
    for found in passed_on().simulate([value], check_replicas=True):
        node = found.grad_fn
        assert node is not None and node.name() == "DefinitionCallBackward"
        (before,) = [other for other, _ in node.next_functions if other is not None]
        assert before is value.grad_fn or (leaf and before.variable is value)
    with torch.no_grad():
        assert not any(found.requires_grad for found in passed_on().simulate([value]))
