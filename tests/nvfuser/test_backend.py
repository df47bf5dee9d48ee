"""Whole programs through the nvFuser backend: real definitions, fake kernels; numbers against unsharded torch."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import fake_kernels
import pytest
import torch
from whole_programs import PROGRAMS, compare

import meshfuse as mf
from meshfuse.backends import Unsupported, assignment
from meshfuse.backends.nvfuser.backend import NvFuser
from meshfuse.backends.nvfuser.launch import NativePart, Run
from meshfuse.backends.nvfuser.partition import LIBRARY
from meshfuse.dtypes import DataType

pytestmark = pytest.mark.nvfuser

DTYPES = {torch.float64: DataType.Double, torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16}


def chosen(fd: mf.FusionDefinition) -> list[tuple[str, str]]:
    (made,) = fd._execution.simulated.values()
    return [(c.backend, c.why) for segments in made.simulation.segments for c in segments.chosen.values()]


FORMS = [*((name, False) for name in PROGRAMS), ("mlp", True), ("block", True)]


# Every number of ranks, and every type on two; on a GPU each with each.
KINDS = [(1, torch.float32), (4, torch.float32), *((2, dtype) for dtype in DTYPES)]


@pytest.mark.parametrize(("ranks", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("name", "staged"), FORMS)
def test_whole_programs(
    name: str, staged: bool, ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = fake_kernels.use(monkeypatch)
    if staged:
        fake_kernels.staged(monkeypatch)
    program = PROGRAMS[name]
    fd, inputs = program.definition(mf.DeviceMesh((ranks,), ("r",)), DTYPES[dtype]), program.inputs(dtype)
    # On a CPU torch lays some products of 16-bit floats out otherwise than it traces them: their readers run as text.
    least = 0.9 if dtype is torch.bfloat16 else 1.0
    for calls in (1, 2):
        compare(fd.simulate(inputs, check_streams=True), program.expected(inputs), dtype)
        assert least * calls * len(launcher.parts) <= launcher.calls <= calls * len(launcher.parts) > 0
    assert all(backend == "nvfuser" or why == f"nvfuser: {LIBRARY}" for backend, why in chosen(fd))


def test_reasons_say_which_ops_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels.use(monkeypatch)
    program = PROGRAMS["dropout"]
    fd = program.definition(mf.DeviceMesh((2,), ("r",)), DataType.Float)
    fd.simulate(program.inputs(torch.float32))
    reason = r"nvfuser: \d+ ops compiled in 2 definitions, 1 left to torch: .*random numbers"
    for rank in (0, 1):
        assert re.search(rf"^def segment_0\(.*\):  # {reason}", str(fd.host_program(rank)), re.MULTILINE)
    assert re.search(f"segment_0 +{reason.replace(': ', ' +', 1)}", fd.backends())


class Refusing(fake_kernels.FakeLauncher):
    """Cannot run definitions with these functions of nvFuser's."""

    refused: tuple[str, ...] = ()

    def prepare(self, part: NativePart, device: torch.device) -> Run:
        text = repr(part.kernel.definition)
        if found := [name for name in self.refused if f"fd.ops.{name}(" in text]:
            raise Unsupported(f"nvFuser cannot run it: {found[0]} has no kernel")
        return super().prepare(part, device)


@pytest.mark.parametrize(("refused", "others"), [(("tanh",), 30), (("tanh", "exp", "rsqrt"), 20), (("add",), 20)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_no_kernel_is_found_among_other_ops(
    refused: tuple[str, ...], others: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That an op cannot be run shows when a definition is compiled. The ops beside it stay nvFuser's."""
    launcher = Refusing()
    launcher.refused = refused
    monkeypatch.setitem(assignment.MAKERS, "nvfuser", lambda: NvFuser(launcher))  # type: ignore[arg-type]
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS["block"]
    fd = program.definition(mf.DeviceMesh((ranks,), ("r",)), DataType.Double)
    inputs = program.inputs(torch.float64)
    for _ in range(2):
        compare(fd.simulate(inputs), program.expected(inputs), torch.float64)
    reasons = "; ".join(why for _, why in chosen(fd))
    assert all(f"{name} has no kernel" in reasons for name in refused)
    native = sum(int(n) for n in re.findall(r"(\d+) ops compiled", reasons))
    assert native > others, reasons


ORDERS = list(itertools.permutations(range(3)))


def laid_out(inputs: list[torch.Tensor], order: tuple[int, ...]) -> list[torch.Tensor]:
    back = [order.index(d) for d in range(3)]
    return [t.permute(order).contiguous().permute(back) for t in inputs]


@pytest.mark.parametrize("order", ORDERS)
def test_inputs_of_any_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions are made for how the first call's inputs lie; later ones that do not fit run as text."""
    launcher = fake_kernels.use(monkeypatch)
    program = PROGRAMS["permuted"]
    fd = program.definition(mf.DeviceMesh((1,), ("r",)), DataType.Double)
    for later in (order, *ORDERS):
        inputs, before = laid_out(program.inputs(torch.float64), later), launcher.calls
        compare(fd.execute(inputs), program.expected(inputs), torch.float64)
        assert (launcher.calls > before) == (later == order)


def test_inputs_with_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made for dense inputs does not take others; what is made for holes and repeats takes both."""
    launcher = fake_kernels.use(monkeypatch)
    program = PROGRAMS["permuted"]
    dense = program.inputs(torch.float64)
    holes = [torch.zeros([2 * n for n in t.shape], dtype=t.dtype)[::2, ::2, ::2].copy_(t) for t in dense]
    repeated = [t[:, :1].expand(t.shape) for t in dense]
    for first, counts in ((dense, (1, 0, 0)), (holes, (1, 1, 1)), (repeated, (1, 0, 1))):
        fd = program.definition(mf.DeviceMesh((1,), ("r",)), DataType.Double)
        for later, taken in zip((first, dense, holes, repeated), (1, *counts), strict=True):
            before = launcher.calls
            compare(fd.execute(later), program.expected(later), torch.float64)
            assert (launcher.calls > before) == taken


def test_a_cpu_leaves_segments_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    program = PROGRAMS["softmax"]
    fd, inputs = program.definition(mf.DeviceMesh((2,), ("r",)), DataType.Float), program.inputs(torch.float32)
    compare(fd.simulate(inputs), program.expected(inputs), torch.float32)
    reason = "nvfuser: nvFuser computes on CUDA devices, and these tensors are on cpu"
    assert set(chosen(fd)) == {("eager", reason)}


Of = Callable[..., Any]


def _grouped_torch(x: torch.Tensor, table: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    sizes = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
    return torch.cat([part @ w for part, w in zip(x.split(sizes), table, strict=True)])


# The op on x [8, 6], a table [3, 6, 5] and three integers, and the same in torch.
UNTRACEABLE: dict[str, tuple[Of, Of]] = {
    "experts": (lambda fd, x, table, ends: fd.ops.grouped_mm(x, table, ends), _grouped_torch),
    "rows of a table": (
        lambda fd, x, table, rows: fd.ops.embedding_fwd(rows, fd.ops.reshape(table, [18, 5])),
        lambda x, table, rows: table.reshape(18, 5)[rows.long()],
    ),
    "sums into rows": (
        lambda fd, x, table, rows: fd.ops.embedding_bwd(fd.ops.slice(x, [0, 0], [3, 6]), rows, 9),
        lambda x, table, rows: torch.zeros(9, 6, dtype=x.dtype).index_add(0, rows.long(), x[:3]),
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", UNTRACEABLE)
def test_ops_that_cannot_be_traced_leave_the_others_to_nvfuser(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their Python reads tensors' values: experts' offsets, rows of a table. The ops beside them are still compiled."""
    launcher = fake_kernels.use(monkeypatch)
    op, in_torch = UNTRACEABLE[name]
    with mf.FusionDefinition() as fd:
        x, table = (fd.define_tensor(shape, dtype=DataType.Double) for shape in ([8, 6], [3, 6, 5]))
        rows = fd.define_tensor([3], dtype=DataType.Int32)
        made = op(fd, fd.ops.exp(fd.ops.neg(x)), fd.ops.exp(table), rows)
        fd.add_output(fd.ops.permute(fd.ops.mul(fd.ops.tanh(made), 2.0), [1, 0]))
        for tensor in (x, table):
            fd.mesh_split(tensor, mf.DeviceMesh((ranks,), ("r",)), [*[None] * (tensor.ndim - 1), "r"])
    a, b = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64) / 2
    inputs = a, b, torch.tensor([2, 5, 8], dtype=torch.int32)
    (found,) = fd.simulate(inputs)
    assert {backend for backend, _ in chosen(fd)} == {"nvfuser"}, chosen(fd)
    assert launcher.calls == len(launcher.parts) > 0
    torch.testing.assert_close(found, (in_torch((-a).exp(), b.exp(), inputs[2]).tanh() * 2).t())


def test_a_rank_ends_as_it_should() -> None:
    """nvFuser would meet the others by itself when the process ends, on a GPU of the rank's own, and abort it here."""
    env = {
        **os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
    }  # fmt: skip
    text = "from meshfuse.backends.nvfuser import load_nvfuser; load_nvfuser()"
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
