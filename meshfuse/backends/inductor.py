"""Segments compiled by Inductor, torch's compiler, and called without any of torch.compile's guards.

The kernel's function is traced once into ATen ops, on fake tensors of the shapes and strides that its calls have, and
given to Inductor's graph compiler (Ansel et al., "PyTorch 2", ASPLOS 2024). A program's shapes never change, so a call
is the generated code's own: it checks sizes and strides, and what does not fit runs the text instead.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..disk_cache import writable_root
from ..errors import error_text
from ..kernels.indices import OUT_OF_RANGE
from ..ops.factories import RANDOM_STATE
from ..runtime.buffers import use_pool
from . import Prepared, Task, Unsupported

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_INT64 = 2**64
# What compiled code raises for other sizes, and for a wrong index.
_TOLD = (AssertionError, RuntimeError)
_assert_size_stride = torch._C._dynamo.guards.assert_size_stride  # pyright: ignore[reportAttributeAccessIssue]
# (the text, what it is called with): equal kernels of the simulated ranks of a process are compiled once. Of those
# used last so many are kept; programs keep their own.
MOST_KERNELS = 1024
_compiled: dict[Any, Prepared] = {}


class Inductor:
    """Compiles before the call, for the very shapes and strides of the task."""

    name = "inductor"

    def prepare(self, task: Task) -> Prepared:
        key = (
            "\n".join(task.kernel.source()),
            task.kernel.functions,
            str(task.device),
            tuple(map(_described, task.arguments)),
        )
        code = _compiled.pop(key, None)
        if code is None:
            if task.device.type == "cpu":
                _try_instructions()
            with own_cache(task.rank), torch.no_grad():
                code = _compile(task)
        _compiled[key] = code  # the last, as the one used last
        for old in list(_compiled)[:-MOST_KERNELS]:
            _compiled.pop(old, None)
        return _guarded(code, task)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return repr(value)


@contextlib.contextmanager
def own_cache(rank: int) -> Iterator[None]:
    """Give Inductor a disk folder that no other rank reads, as ranks may differ in their constants.

    With the disk cache off, or broken, the folder lasts as long as the compilation.
    """
    root = writable_root()
    with tempfile.TemporaryDirectory() as passing, _folder_restored():
        os.environ[_FOLDER] = str(Path(root or passing) / "inductor" / torch.__version__ / f"rank_{rank}")
        yield


@contextlib.contextmanager
def _folder_restored() -> Iterator[None]:
    """Restore the variable that names Inductor's folder, which Inductor sets itself when it first looks."""
    before = os.environ.get(_FOLDER)
    try:
        yield
    finally:
        os.environ.pop(_FOLDER, None) if before is None else os.environ.update({_FOLDER: before})


def _try_instructions() -> None:
    """Have torch find out what instructions the processor and the C++ compiler have.

    A process does that once, by compiling a program for each set of instructions in Inductor's folder of that moment.
    In torch's own folder the results last and serve all ranks; in a rank's own folder each rank would begin anew.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    # Errors of the compiler are reported where it compiles a kernel.
    with _folder_restored(), contextlib.suppress(Exception):
        valid_vec_isa_list()


def trace(task: Task) -> torch.fx.GraphModule:
    """The kernel as a graph of functional ATen ops on the task's tensors and its random state.

    Other numbers become constants of the graph. Raises Unsupported where the kernel's Python depends on tensors'
    values.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    varying = _varying(task)
    with FakeTensorMode() as mode:
        fakes = [_fake(task.arguments[place], task.device) for place in varying]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = list(task.arguments)
        for place, tensor in zip(varying, tensors, strict=True):
            arguments[place] = tensor
        found = task.eager(*arguments)
        return found if isinstance(found, tuple) else (found,)

    assert mode is not None
    try:
        return make_fx(torch.func.functionalize(run), select_decomp_table(), tracing_mode="fake")(*fakes)
    except Exception as error:
        raise Unsupported(f"it cannot be traced: {error_text(error)}") from error


def _varying(task: Task) -> list[int]:
    """The places of the parameters that are not constants of the compiled code."""
    pairs = enumerate(zip(task.kernel.params, task.arguments, strict=True))
    return [place for place, (name, value) in pairs if isinstance(value, torch.Tensor) or name in RANDOM_STATE]


def _fake(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return torch.empty((), dtype=torch.int64, device=device)


def _compile(task: Task) -> Prepared:
    from torch._inductor.compile_fx import compile_fx_inner

    module = trace(task)
    # Results get the strides that the text's results have.
    output = module.graph.output_node()
    results: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    held = _compared(module)
    output.args = ((*results, *held),)
    inputs = module.graph.find_nodes(op="placeholder")
    examples = [node.meta["val"] for node in inputs]
    try:
        made: Any = compile_fx_inner(module, examples, is_inference=True)
    except Exception as error:
        raise Unsupported(f"Inductor cannot compile it: {error_text(error)}") from error
    code = getattr(made, "current_callable", None) or made
    if task.device.type == "cpu":
        use_pool(code)
    unchecked = _unchecked(made, inputs)
    if not held and not unchecked:
        return code

    def run(arguments: list[torch.Tensor]) -> Any:
        for place, shape, strides in unchecked:
            _assert_size_stride(arguments[place], shape, strides)
        return code(arguments)[: len(results)]

    return run


def _unchecked(made: Any, inputs: Sequence[torch.fx.Node]) -> list[tuple[int, Sequence[int], Sequence[int]]]:
    """(place, sizes, strides) of the arguments whose strides the compiled code does not check itself.

    These are arguments that none of its kernels reads, but of which it may return views.
    """
    text = getattr(made, "source_code", None) or ""
    left = [(place, node.meta["val"]) for place, node in enumerate(inputs)
            if f"assert_size_stride({node.target}, " not in text]  # fmt: skip
    return [(place, tuple(value.shape), value.stride()) for place, value in left]


def _compared(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Floating-point values that are compared, and read elsewhere too.

    They become outputs of the code, so that it computes them once. Inductor may compute a value again for each reader,
    with other last bits. Then nothing would equal its maximum, or be no less than it, and the gradient of that maximum
    would be lost.
    """
    tests = [getattr(torch.ops.aten, name).Tensor for name in ("eq", "ne", "ge", "gt", "le", "lt")]
    nodes = [n for test in tests for made in module.graph.find_nodes(op="call_function", target=test)
             for n in made.all_input_nodes]  # fmt: skip
    return [n for n in dict.fromkeys(nodes)
            if n.op == "call_function" and len(n.users) > 1 and n.meta["val"].dtype.is_floating_point]  # fmt: skip


def _guarded(code: Prepared, task: Task) -> Prepared:
    """Compiled code as a function of the kernel's parameters.

    The code takes a list, which it empties, and raises AssertionError for other sizes or strides before it does
    anything. Such a call runs the text, and so does one with other constants.
    """
    varying, results = _varying(task), len(task.kernel.results)
    take: Callable[[Sequence[Any]], Any] = (lambda found: found[0]) if results == 1 else tuple
    eager = task.eager
    if len(varying) == len(task.arguments) and not any(name in RANDOM_STATE for name in task.kernel.params):
        return _plain(code, eager, results)
    states = [place for place in varying if not isinstance(task.arguments[place], torch.Tensor)]
    # Compared by their text: -0.0 is another constant than 0.0.
    constants = [(place, value, repr(value)) for place, value in enumerate(task.arguments) if place not in varying]

    def run(*arguments: Any) -> Any:
        if any(arguments[i] is not value and repr(arguments[i]) != text for i, value, text in constants):
            return eager(*arguments)
        given = list(arguments)
        for place in states:
            given[place] = _wrapped(given[place], task.device)
        try:
            return take(code([given[place] for place in varying]))
        except _TOLD as error:
            return _again(error, eager, arguments)

    return run


def _plain(code: Prepared, eager: Prepared, results: int) -> Prepared:
    """The shortest way into the code, for kernels that take tensors only."""

    def one(*arguments: torch.Tensor) -> Any:
        try:
            return code([*arguments])[0]
        except _TOLD as error:
            return _again(error, eager, arguments)

    def several(*arguments: torch.Tensor) -> Any:
        try:
            return code([*arguments])
        except _TOLD as error:
            return _again(error, eager, arguments)

    return one if results == 1 else several


def _again(error: Exception, eager: Prepared, arguments: Sequence[Any]) -> Any:
    """What the text does with these arguments, for an error of the code that the text avoids or tells better.

    The code takes no other sizes, and only says that some index is wrong.
    """
    if isinstance(error, AssertionError) or "index out of bounds" in str(error) or OUT_OF_RANGE in str(error):
        return eager(*arguments)
    raise error


def _wrapped(number: int, device: torch.device) -> torch.Tensor:
    """The low 64 bits of an int as an int64 tensor."""
    low = number % _INT64
    return torch.tensor(low - _INT64 if low >= _INT64 // 2 else low, device=device)
