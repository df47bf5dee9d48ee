"""Backends of segments: compiled code against the text that it stands for, and when each is chosen."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import meshfuse as mf
from meshfuse import disk_cache
from meshfuse.backends import Task, Unsupported, assignment, inductor
from meshfuse.backends.assignment import assigned, requested, saved_seconds
from meshfuse.backends.inductor import Inductor, own_cache, trace
from meshfuse.execution import backends_table
from meshfuse.executor import segments
from meshfuse.executor.bind import bind_program
from meshfuse.lowering.segments import Segment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LINE = mf.DeviceMesh((2,), ("tp",))
Body = Callable[..., mf.TensorView]


def defined(body: Body, *shapes: tuple[int, ...], **kinds: mf.DataType) -> mf.FusionDefinition:
    """A definition of one segment: everything is whole on two ranks."""
    with mf.FusionDefinition(seed=5) as fd:
        inputs = [fd.define_tensor(list(shape)) for shape in shapes]
        scalars = [fd.define_scalar(dtype=kind) for kind in kinds.values()]
        made = body(fd, *inputs, *scalars)
        for output in made if isinstance(made, tuple) else (made,):
            fd.add_output(output)
            fd.mesh_split(output, LINE, [None] * output.ndim)
    return fd


def task_of(fd: mf.FusionDefinition, *arguments: object) -> Task:
    """The definition's only segment on rank 0, called with these."""
    compiled = fd.compile()
    program = compiled.host_program(0)
    bound = bind_program(program, lambda ranks: None, CPU)
    (kernel,), (segment,) = program.kernels, compiled.segmented.parts
    assert isinstance(segment, Segment)
    outlines = tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a
        for a in arguments
    )  # fmt: skip
    return Task(kernel, segment, compiled.segmented, 0, CPU, bound.scope[kernel.name], outlines)


def pointwise(fd, x, y):
    return fd.ops.relu(x * 0.9 + y) - 0.1


def normalized(fd, x, y):
    return fd.ops.layer_norm(x, [8]), fd.ops.softmax(y, 0)


def product(fd, x, y):
    return fd.ops.permute(fd.ops.matmul(x, fd.ops.permute(y, [1, 0])), [1, 0])


def random(fd, x, y):
    return x * fd.ops.uniform(0.0, 1.0, [4, 8]), y + fd.ops.normal(0.0, 1.0, [4, 8])


def attention(fd, x, y):
    heads = [fd.ops.reshape(t, [1, 2, 4, 4]) for t in (x, y, x + y)]
    mixed, *state = fd.ops.sdpfa_fwd(*heads, is_causal=True)
    return mixed, *state


def places(fd, x, y):
    """Tensors that the kernel's Python makes of constants."""
    return x + fd.ops.iota(8), fd.ops.triu(y, 1)


BODIES = [pointwise, normalized, product, attention, places]


def arguments_of(task_params: tuple[str, ...], offset: int = 3) -> list[object]:
    generator = torch.Generator().manual_seed(0)
    found: list[object] = []
    for name in task_params:
        state = {"seed": 5, "offset": offset}
        found.append(state[name] if name in state else torch.randn(4, 8, generator=generator))
    return found


def params(fd: mf.FusionDefinition) -> tuple[str, ...]:
    (kernel,) = fd.compile().host_program(0).kernels
    return kernel.params


def same(found: object, expected: object) -> None:
    """Equal values, types and strides."""
    pairs = zip(*((v if isinstance(v, tuple | list) else (v,)) for v in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, check_stride=True)


@pytest.mark.slow
@pytest.mark.parametrize("body", [*BODIES, random], ids=lambda f: f.__name__)
def test_the_trace_is_the_text(body):
    fd = defined(body, (4, 8), (4, 8))
    task = task_of(fd, *arguments_of(params(fd)))
    arguments = arguments_of(task.kernel.params, offset=2**40 + 7)
    tensors = [a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in arguments]
    found = trace(task)(*tensors)
    same(found if len(task.kernel.results) > 1 else found[0], task.eager(*arguments))


@pytest.fixture(scope="module")
def compiled() -> tuple[Task, Callable[..., object]]:
    """One kernel compiled by Inductor: with a scalar, random numbers and two results, one a permuted product."""

    def body(fd, x, y, scale):
        mixed = fd.ops.relu(x * scale) + fd.ops.uniform(0.0, 1.0, [4, 8])
        return mixed, product(fd, mixed, y)

    fd = defined(body, (4, 8), (4, 8), scale=mf.DataType.Double)
    task = task_of(fd, *call(params(fd), 2.0, 3))
    return task, Inductor().prepare(task)


def call(names: tuple[str, ...], scale: float, offset: int, transposed: bool = False) -> list[object]:
    tensors = [torch.randn(4, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    if transposed:
        tensors = [t.t().contiguous().t() for t in tensors]
    given = iter(tensors)
    numbers = {"seed": -(2**63) - 1, "offset": offset}
    return [next(given) if n.startswith("v") else numbers.get(n, scale) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("offset", [3, 4, 2**33])
@pytest.mark.parametrize("scale", [2.0, 0.5])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiled_code_is_the_text(compiled, offset, scale, transposed):
    """Also for another scalar and for other strides than it was compiled for: then the text itself runs."""
    task, run = compiled
    arguments = call(task.kernel.params, scale, offset, transposed)
    same(run(*arguments), task.eager(*arguments))


VIEWS: dict[str, Body] = {
    "broadcast": lambda fd, x: fd.ops.broadcast(x, [True, False, False]),
    "expand": lambda fd, x: fd.ops.expand(fd.ops.broadcast(x, [True, False, False]), [3, 4, 8]),
    "permute": lambda fd, x: fd.ops.permute(x, [1, 0]),
    "slice": lambda fd, x: fd.ops.slice(x, [1, 2], [3, 8]),
    "reshape": lambda fd, x: fd.ops.reshape(x, [2, 16]),
    "select": lambda fd, x: fd.ops.select(x, 1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("asserts", [True, False])
def test_a_view_of_an_argument_that_nothing_else_reads_is_of_the_strides_that_it_has(name, asserts, monkeypatch):
    """Inductor checks the strides of what its kernels read alone, and with TORCHINDUCTOR_SIZE_ASSERTS=0 of nothing."""
    from torch._inductor import config

    monkeypatch.setattr(inductor, "_compiled", {})
    fd = defined(lambda fd, x, y: (VIEWS[name](fd, x), pointwise(fd, y, y)), (4, 8), (4, 8))
    arguments = arguments_of(params(fd))
    task = task_of(fd, *arguments)
    with config.patch(size_asserts=asserts):
        run = Inductor().prepare(task)
    others = [[t.t().contiguous().t() for t in arguments], [torch.cat([t, t], 1)[:, ::2] for t in arguments]]
    for given in (arguments, *others):
        same(run(*given), task.eager(*given))


NUMBERS = (0.0, -0.0, float("nan"), float("inf"), 1, True, 1.0)


@pytest.mark.slow
def test_a_constant_of_compiled_code_is_not_mistaken_for_an_equal_one():
    """1 / -0.0 is not 1 / 0.0: neither what is compiled for one, nor what is kept of it, is the other's."""
    fd = defined(lambda fd, x, scale: fd.ops.truediv(x, scale), (4, 8), scale=mf.DataType.Double)
    x = torch.linspace(-2.0, 2.0, 32).reshape(4, 8)
    for first in (0.0, -0.0):
        task = task_of(fd, x, first)
        run = Inductor().prepare(task)
        for number in NUMBERS:
            torch.testing.assert_close(run(x, number), task.eager(x, number), equal_nan=True)


def test_what_depends_on_values_is_left_to_torch():
    fd = defined(pointwise, (4, 8), (4, 8))
    task = task_of(fd, *arguments_of(params(fd)))
    branching = Task(
        task.kernel, task.segment, task.definition, 0, CPU, lambda x, y: x if x.sum() > 0 else y, task.arguments
    )
    with pytest.raises(Unsupported, match="it cannot be traced: "):
        trace(branching)


def test_each_rank_has_its_own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHFUSE_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folders = []
    for rank in range(2):
        with own_cache(rank):
            folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert len(set(folders)) == 2 and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/users")
    with own_cache(0):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folders[0]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/the/users"


def test_with_the_disk_cache_off_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHFUSE_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    with own_cache(0):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        folder.mkdir(parents=True)
    assert folder.is_absolute() and not folder.exists() and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:meshfuse's cache of plans")
@pytest.mark.parametrize("name", ["/proc/self", "/dev/null", "a file"])
def test_a_cache_that_cannot_be_written_to_keeps_nothing_from_being_compiled(monkeypatch, tmp_path, name):
    (tmp_path / "a file").touch()
    monkeypatch.setattr(disk_cache, "_warned", set())
    monkeypatch.setenv("MESHFUSE_CACHE", str(tmp_path / name))
    with own_cache(0):
        os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_a_folder_of_plans_that_became_read_only_is_not_compiled_in(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "folder", lambda: Path("/proc/self/plans"))
    monkeypatch.setattr(disk_cache, "_warned", set())
    with pytest.warns(disk_cache.CacheWarning, match="meshfuse's cache of plans: /proc/self/plans: "), own_cache(0):
        os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_instructions_are_tried_where_all_ranks_find_what_was_compiled_for_it(monkeypatch):
    """In a rank's own folder each would compile the same programs anew, and with the disk cache off every process."""
    from torch._inductor import cpu_vec_isa

    fd, folders = defined(pointwise, (4, 8), (4, 8)), []

    def note(result):
        folders.append(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "torch's"))
        return result

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: note([]))
    monkeypatch.setattr(inductor, "_compile", lambda task: note(lambda arguments: arguments))
    monkeypatch.setattr(inductor, "_compiled", {})
    Inductor().prepare(task_of(fd, *arguments_of(params(fd))))
    assert folders[0] == "torch's" and "rank_0" in folders[1]
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


# choosing ---------------------------------------------------------------------------------------------------------


def chain(length: int, size: int) -> mf.FusionDefinition:
    def body(fd, x):
        for _ in range(length):
            x = fd.ops.relu(x)
        return x

    return defined(body, (size, size))


def test_auto_compiles_once_that_pays():
    """Longer chains pay sooner, short ones and products never."""
    dues = [assigned(chain(n, 64).compile().segmented, "auto", CPU).due for n in (1, 20, 200, 2000)]
    assert dues[0] is None
    assert dues[1] > dues[2] > dues[3] >= 16
    products = defined(product, (4, 8), (4, 8)).compile().segmented
    made = assigned(products, "auto", CPU)
    assert made.due is None and {c.backend for c in made.chosen.values()} == {"eager"}


def test_a_segment_saves_by_its_ops_and_the_values_between_them():
    def seconds(length: int, size: int, device: torch.device) -> float:
        compiled = chain(length, size).compile()
        (segment,) = compiled.segmented.parts
        return saved_seconds(compiled.resharded, segment, device)

    for device, large in ((CPU, 1024), (CUDA, 8192)):
        assert seconds(1, 64, device) == 0.0
        assert seconds(20, 64, device) < seconds(40, 64, device) < seconds(40, large, device)


@pytest.mark.parametrize("size, backend", [(64, "inductor"), (8192, "nvfuser")])
def test_auto_takes_nvfuser_where_a_gpu_is_kept_busy(size, backend, monkeypatch):
    """By products that take it longer than the host takes to start them; and what has no products."""

    def mixed(fd, x, y):
        for _ in range(8):
            x = fd.ops.relu(fd.ops.gelu(fd.ops.matmul(x, y)) * 0.5)
        return x

    there = [True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there[0] or None)
    segmented = defined(mixed, (size, size), (size, size)).compile().segmented
    (made,) = assigned(segmented, "auto", CUDA).chosen.values()
    assert (made.backend, made.otherwise) == (backend, "inductor" if backend == "nvfuser" else None)
    (made,) = assigned(chain(20, size).compile().segmented, "auto", CUDA).chosen.values()
    assert made.backend == "nvfuser"
    (made,) = assigned(segmented, "auto", CPU).chosen.values()
    assert made.backend == "inductor"
    there[0] = False
    (made,) = assigned(segmented, "auto", CUDA).chosen.values()
    assert (made.backend, made.otherwise) == ("inductor", None)


def test_what_one_backend_cannot_compile_another_does(monkeypatch):
    """And where none can, it is torch's; the table has each one's reason."""

    class Refusing:
        def __init__(self, name: str):
            self.name = name

        def prepare(self, task):
            raise Unsupported(f"no {self.name} for {task.kernel.name}")

    class Taking(Refusing):
        def prepare(self, task):
            return task.eager

    def table(second: type[Refusing]) -> str:
        monkeypatch.setitem(assignment.MAKERS, "inductor", lambda: second("inductor"))
        fd = chain(2, 4)
        assert torch.equal(fd.simulate([x])[0], x.relu())
        (made,) = fd._execution.simulated.values()
        return backends_table(made.compiled, made.simulation.segments[0].chosen).splitlines()[1]

    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")  # Simulated ranks are not compiled for "auto".
    monkeypatch.setitem(assignment.MAKERS, "nvfuser", lambda: Refusing("nvfuser"))
    chosen = assignment.Assignment(0, {0: assignment.Chosen("nvfuser", "from call 0 on", "inductor")})
    monkeypatch.setattr(segments, "assigned", lambda *_: chosen)
    x = torch.linspace(-1, 1, 16).reshape(4, 4)
    assert "inductor  compiled; nvfuser: no nvfuser for segment_0 " in table(Taking)
    row = table(Refusing)
    assert "eager    inductor: no inductor for segment_0; nvfuser: no nvfuser for segment_0 " in row


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_may_run_what_another_compiles(threads, monkeypatch):
    """One of them compiles, once; the others run the text meanwhile."""
    made, started = [], threading.Event()

    class Slow:
        def prepare(self, task):
            made.append(task.kernel.name)
            started.set()
            time.sleep(0.05)
            return task.eager

    monkeypatch.setitem(assignment.MAKERS, "inductor", Slow)
    x, found = torch.linspace(-1, 1, 16).reshape(4, 4), []
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.relu(fd.ops.mul(fd.define_tensor([4, 4]), 1.0)))

    def work():
        found.extend(torch.equal(fd.execute([x], backend="inductor")[0], x.relu()) for _ in range(5))

    others = [threading.Thread(target=work) for _ in range(threads)]
    for thread in others:
        thread.start()
        started.wait(5)  # The rest come while the first one compiles.
    for thread in others:
        thread.join(60)
    assert found == [True] * 5 * threads and len(made) == len(set(made)) == 1


def test_named_backends_compile_all_before_the_first_call():
    segmented = chain(2, 4).compile().segmented
    for name, due in (("eager", None), ("inductor", 0), ("nvfuser", 0)):
        made = assigned(segmented, name, CPU)
        assert made.due == due and {c.backend for c in made.chosen.values()} == {name}


def test_the_backend_is_an_argument_or_the_environments(monkeypatch):
    monkeypatch.delenv("MESHFUSE_BACKEND", raising=False)
    assert requested(None) == "auto"
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    assert requested(None) == "inductor" and requested("eager") == "eager"
    monkeypatch.setenv("MESHFUSE_BACKEND", "xla")
    with pytest.raises(mf.ArgumentError) as caught:
        chain(1, 4).simulate([torch.randn(4, 4)])
    assert "MESHFUSE_BACKEND: found 'xla', needed one of auto, eager, inductor, nvfuser." in str(caught.value)
    with pytest.raises(mf.ArgumentError) as caught:
        chain(1, 4).execute([torch.randn(4, 4)], backend="cuda")
    assert "backend: found 'cuda', needed one of auto, eager, inductor, nvfuser." in str(caught.value)


def test_the_table_of_backends_says_what_runs_each_segment(monkeypatch):
    monkeypatch.delenv("MESHFUSE_BACKEND", raising=False)
    due = assigned(chain(200, 64).compile().segmented, "auto", CPU).due
    heading, row = chain(200, 64).backends().splitlines()
    assert heading.split() == ["segment", "backend", "why", "ops"]
    assert row.startswith(f"segment_0  inductor  from call {due} on, to save about ") and row.endswith("and 194 more")
    assert "segment_0  eager    compiling it would save 0 us per call" in chain(1, 4).backends()


def test_a_program_of_chunks_alone_says_that_it_has_no_segments():
    fd, mesh = mf.FusionDefinition(), mf.DeviceMesh((2,), ("x",))
    x, w = fd.define_tensor([128, 64]), fd.define_tensor([64, 64])
    product = fd.ops.matmul(x, w)
    fd.add_output(product)
    fd.mesh_split(x, mesh, ["x", None])
    fd.mesh_split(product, mesh, [None, None])
    fd.overlap(product, 4)
    assert fd.backends() == "no segments: what loops over chunks compute runs in eager torch"


def test_what_a_backend_cannot_compile_is_left_to_torch(monkeypatch):
    """nvFuser compiles nothing for a CPU, and may not be there at all."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "nvfuser")
    fd, x = chain(2, 4), torch.randn(4, 4)
    (found,) = fd.simulate([x])
    assert torch.equal(found, x.relu())
    (made,) = fd._execution.simulated.values()
    for each in made.simulation.segments:
        (chosen,) = each.chosen.values()
        assert chosen.backend == "eager" and chosen.why.startswith("nvfuser: ")


@pytest.mark.slow
def test_simulated_ranks_run_compiled_segments(monkeypatch):
    """Ranks of one process with equal kernels share one compilation; those of uneven shards have their own."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([3, 8])
        y = fd.ops.softmax(x * 2.0, 0)
        fd.add_output(y)
        fd.mesh_split(x, LINE, ["tp", None])
    whole = torch.randn(3, 8)
    (found,) = fd.simulate([whole])
    torch.testing.assert_close(found, torch.softmax(whole * 2.0, 0))
    (made,) = fd._execution.simulated.values()
    chosen = [c for segments in made.simulation.segments for c in segments.chosen.values()]
    assert chosen and all((c.backend, c.why) == ("inductor", "compiled") for c in chosen)


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "asinh": torch.asinh, "tanh": torch.tanh, "erf": torch.erf, "log1p": lambda x: torch.log1p(x.abs()),
}  # fmt: skip


def extremes(fd, x):
    """The gradients of maxima and minima of rows that no vector of a CPU divides."""
    out = []
    for place, name in enumerate(COMPUTED):
        y = getattr(fd.ops, name)(fd.ops.abs(x) if name == "log1p" else x)
        best = (fd.ops.max, fd.ops.min)[place % 2](y, [1])
        out.append(fd.grad(best, x))
    return tuple(out)


@pytest.mark.slow
def test_a_compiled_maximum_is_one_of_its_operand():
    """Its gradient goes to what equals it: computed anew for the comparison, nothing might."""
    fd = defined(extremes, (4, 5))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    run = Inductor().prepare(task_of(fd, x))
    for place, (found, function) in enumerate(zip(run(x), COMPUTED.values(), strict=True)):
        leaf = x.double().requires_grad_()
        (torch.amax, torch.amin)[place % 2](function(leaf), 1).sum().backward()
        torch.testing.assert_close(found.double(), leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eq", "ge", "le"])
def test_what_is_compared_with_an_extreme_of_it_is_the_number_that_this_was_taken_of(name):
    """A mask of all that is no less than the largest, as routers make, has an element in each row."""

    def body(fd, x):
        out = []
        for function in ("lgamma", "exp", "tanh", "log1p"):
            y = getattr(fd.ops, function)(fd.ops.abs(x) * 0.3 + 0.1) * 1.7 + x
            best = (fd.ops.min if name == "le" else fd.ops.max)(y, [1], True)
            out.append(fd.ops.sum(fd.ops.cast(getattr(fd.ops, name)(y, best), mf.DataType.Int), [1]))
        return tuple(out)

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for found in Inductor().prepare(task_of(defined(body, (4, 5)), x))(x):
        assert found.tolist() == [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", ["execute", "simulate"])
def test_an_error_while_tracing_is_reported_like_any_other(way, monkeypatch):
    """The next call compiles: one wrong batch must not leave a job on the text for good."""
    monkeypatch.setenv("MESHFUSE_BACKEND", "inductor")
    with mf.FusionDefinition() as fd:
        x, index = fd.define_tensor([4, 8]), fd.define_tensor([4, 3], dtype=mf.DataType.Int)
        fd.add_output(fd.ops.take_along_axis(x * 2.0, index, 1))
    run = getattr(fd, way)
    for _ in range(2):
        with pytest.raises(mf.KernelError, match=r"an index is out of range on rank 0: found 8 in .*test_backends\.py"):
            run([torch.randn(4, 8), torch.full((4, 3), 8)])
    value, places = torch.randn(4, 8), torch.full((4, 3), 7)
    torch.testing.assert_close(run([value, places])[0], (value * 2.0).take_along_dim(places, 1))
    if way == "execute":
        assert "inductor  compiled" in fd.backends()
    with pytest.raises(mf.KernelError, match=r"an index is out of range on rank 0: found 8"):
        run([torch.randn(4, 8), torch.full((4, 3), 8)])


def test_what_ends_a_compilation_ends_one_call(monkeypatch):
    """Of several segments those before it stay compiled, and the others are compiled at the next call."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4, 8])
    y = fd.ops.sum(fd.ops.exp(x * 2.0), [1])
    fd.add_output(fd.ops.exp(y * 2.0))
    fd.mesh_split(x, mf.DeviceMesh((1,), ("x",)), [None, "x"])
    calls = []

    def prepare(self, task):
        calls.append(task.kernel.name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return task.eager

    monkeypatch.setattr(Inductor, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        fd.execute([torch.ones(4, 8)], backend="inductor")
    fd.execute([torch.ones(4, 8)], backend="inductor")
    assert calls[0] == calls[1] and fd.backends().count("compiled") == len(set(calls))
