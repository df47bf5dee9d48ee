"""The reverse sweep: appends the backward of a definition to it, as ordinary ops.

Reverse mode over the recorded ops, last first (Linnainmaa 1970; the form of autograd and JAX's `vjp`). The gradient of
a tensor is the sum of what its readers ask for, and each op's VJP passes it on to the op's operands. Equal calls are
made once. Unreduced sums stay unreduced as long as the VJPs' ops carry them; propagation decides that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ..dtypes import Category, DataType
from ..errors import SourceLine, located, user_error
from ..gc_pause import no_collection
from ..kernels.scalars import FUNCTIONS
from ..ops.opdef import OpDef
from ..ops.values import ScalarRef, TensorRef
from ..ops.vjp import Backward, sizes
from ..ops.window_gradients import WindowGradient, joined_windows
from .applying import call_at
from .recording import Definition, OpNode, Recording
from .tensor_view import TensorView, Val, as_listed, own, own_all


def append_gradients(fd: Definition, outputs: Any, wrt: Any, grad_outputs: Any, line: SourceLine) -> list[TensorView]:
    """Append what `fd.grad` asks for; the gradients by each tensor of `wrt`.

    `outputs`, `wrt` and `grad_outputs` are a tensor or a list of them. Raises DefinitionError as `gradients`, and for
    anything but tensors of this definition or another number of `grad_outputs` than `outputs`.
    """
    sources, targets = own_all(fd, outputs, "grad: outputs", line), own_all(fd, wrt, "grad: wrt", line)
    given = [None] * len(sources) if grad_outputs is None else as_listed(grad_outputs)
    if len(given) != len(sources):
        raise user_error(
            "grad: grad_outputs", f"{len(given)} for {len(sources)} outputs", "one per output, or None", "", line
        )
    seeds = [None if g is None else own(fd, g, "grad: grad_outputs", line) for g in given]
    first = len(fd.recording.nodes)
    with no_collection():
        made = gradients(fd, sources, targets, seeds, fd.recording.constants, line)
    fd.recording.sweeps.append(range(first, len(fd.recording.nodes)))
    fd.recording.primals.update((grad.id, primal.id) for grad, primal in zip(made, targets, strict=True))
    return made


def gradients(
    fd: Definition,
    outputs: Sequence[TensorView],
    wrt: Sequence[TensorView],
    grad_outputs: Sequence[TensorView | None],
    constants: Iterable[int],
    line: SourceLine,
) -> list[TensorView]:
    """The gradients of the sum of (output * its grad_output) by every tensor of `wrt`, in its shape and dtype.

    A grad_output of None stands for ones. `constants` are tensors that no gradient passes through. Raises
    DefinitionError for tensors that are no real or complex numbers, and for an op on the way that has no derivative.
    """
    for tensor, what in (*((t, "outputs") for t in outputs), *((t, "wrt") for t in wrt)):
        _check_differentiable(tensor, what, line)
    sweep = _Sweep(fd, [t.id for t in wrt], frozenset(constants), line)
    for output, grad in zip(outputs, grad_outputs, strict=True):
        sweep.seed(output, grad)
    sweep.run()
    return sweep.results(wrt)


def _check_differentiable(tensor: TensorView, what: str, line: SourceLine) -> None:
    if tensor.dtype.category < Category.FLOAT:
        raise user_error(
            f"grad: {what}", f"{tensor.label}: {tensor.type}", "floating point or complex tensors",
            "Only those have gradients.", line,
        )  # fmt: skip


def dependents(recording: Recording, wrt: Iterable[int], constants: Container[int]) -> set[int]:
    """Those tensors, and the real and complex ones that depend on them by a way on which no constant lies."""
    found, tensors = set(wrt), recording.tensors
    for node in recording.nodes:
        if any(i in found for i in node.inputs):
            found.update(
                i for i in node.outputs if tensors[i].type.dtype.category >= Category.FLOAT and i not in constants
            )
    return found


class _GradientOps:
    """Ops of the table as functions that append at a given line; equal calls are made once.

    On numbers alone the result is a number.
    """

    def __init__(self, fd: Definition, line: SourceLine):
        self.fd, self.line = fd, line
        self._made: dict[Any, Any] = {}
        self._widened: dict[int, TensorView] = {}

    def cast(self, x: TensorView, dtype: DataType) -> TensorView:
        """A tensor in another type; what was cast to a wider one before is had again as it was."""
        narrow = self._widened.get(x.id)
        if narrow is not None and narrow.dtype is dtype:
            return narrow
        made = self._call("cast", x, dtype)
        if x.dtype.category is Category.FLOAT and x.dtype.itemsize < dtype.itemsize:
            self._widened[made.id] = x
        return made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        made = functools.partial(self._call, name)
        setattr(self, name, made)  # found there from now on
        return made

    def copy(self, x: TensorView) -> TensorView:
        """A tensor of its own that equals x."""
        return call_at(self.fd, self.line, "set", (x,))

    def gradients(
        self, outputs: Sequence[TensorView], wrt: Sequence[TensorView], grads: Sequence[TensorView]
    ) -> list[TensorView]:
        """The gradients of what has been appended before."""
        return gradients(self.fd, outputs, wrt, grads, (), self.line)

    def apply(self, op: OpDef, *args: Any) -> Any:
        """Apply an op that need not be registered."""
        return self._call(op, *args)

    def _call(self, name: str | OpDef, *args: Any) -> Any:
        if isinstance(name, str) and name in FUNCTIONS and all(isinstance(arg, (bool, int, float)) for arg in args):
            return FUNCTIONS[name](*args)
        key = (name, *map(_key, args))
        if key not in self._made:
            self._made[key] = call_at(self.fd, self.line, name, args)
        return self._made[key]


def _key(arg: Any) -> Any:
    """A key that is equal for arguments that mean the same."""
    if isinstance(arg, (TensorView, Val)):
        return arg.ref
    if isinstance(arg, (list, tuple)):
        return tuple(map(_key, arg))
    return (type(arg), repr(arg))


class _Sweep:
    """The gradients on their way back; `_parts[t]` is what the readers of tensor t have contributed so far.

    A part is marked if it is another tensor's gradient passed on as it is. Marked parts are added last: the others may
    be unreduced sums, which are then added up before they are reduced.
    """

    def __init__(self, fd: Definition, wrt: Sequence[int], constants: frozenset[int], line: SourceLine):
        self.fd, self.line = fd, line
        self.nodes = tuple(fd.recording.nodes)
        self.first_new = len(fd.recording.tensors)
        self.ops = _GradientOps(fd, line)
        self.active = dependents(fd.recording, wrt, constants)
        self._parts: dict[int, list[tuple[bool, TensorView | WindowGradient]]] = {}
        self._lines: dict[SourceLine, SourceLine] = {}

    def seed(self, output: TensorView, given: TensorView | None) -> None:
        """Begin with the gradient of an output; None stands for ones."""
        grad: TensorView = self.ops.full(sizes(output), 1.0, output.dtype) if given is None else given
        if not _fits(grad, output):
            raise user_error(
                "grad: grad_outputs", f"{grad.label}: {grad.type} for {output.label}: {output.type}",
                "the output's shape",
                "Pass a tensor of the shape of the output; fd.grad(loss, [x, y]) is by several.", self.line,
            )  # fmt: skip
        if output.id in self.active:
            grad = grad if given is None else self._sized(grad, output)
            self._add(output, grad, {grad.id})

    def _sized(self, grad: TensorView, like: TensorView) -> TensorView:
        """The gradient; where sizes are open, with a check in each call that it has its primal's shape."""
        if grad.id == like.id or -1 not in (*grad.type.shape, *like.type.shape):
            return grad
        return self.ops.sized(grad, sizes(like))

    def run(self) -> None:
        """Pass gradients on through every op between outputs and `wrt`, last op first."""
        for node in reversed(self.nodes):
            has_gradient = any(i in self._parts for i in node.outputs)
            if has_gradient and any(i in self.active for i in node.inputs):
                self.ops.line = self._line_of(node)
                self._pass_on(node, tuple(self._total(i) for i in node.outputs))

    def _line_of(self, node: OpNode) -> SourceLine:
        """The line of the op itself, marked as its gradient: communication of the backward is shown there."""
        at = node.line
        if at not in self._lines:
            self._lines[at] = at.of_gradient()
        return self._lines[at]

    def _total(self, tensor: int) -> TensorView | None:
        """The sum of a tensor's parts in its dtype; None where it has none."""
        parts = self._parts.get(tensor)
        if not parts:
            return None
        shape, dtype = self.fd.recording.tensors[tensor].type[:2]
        pieces = [part for _, part in parts if isinstance(part, WindowGradient)]
        others = sorted(
            (entry for entry in parts if not isinstance(entry[1], WindowGradient)), key=lambda entry: entry[0]
        )
        added = [*joined_windows(self.ops, pieces, shape), *(part for _, part in others)]
        total = self._as_type(functools.reduce(self.ops.add, added), dtype)
        self._parts[tensor] = [(True, total)]
        return total

    def _as_type(self, grad: TensorView, dtype: DataType) -> TensorView:
        if grad.dtype.category > dtype.category:
            grad = self.ops.real(grad)
        return grad if grad.dtype is dtype else self.ops.cast(grad, dtype)

    def _pass_on(self, node: OpNode, grads: tuple[TensorView | None, ...]) -> None:
        if node.op.vjp is None:
            raise user_error(
                f"{node.op.name} has no derivative here", "a gradient that passes through it", "",
                "Leave what depends on it out of the outputs, or cut it off with fd.stop_gradient(t).", node.line,
            )  # fmt: skip
        arguments = {param.name: self._value(arg) for param, arg in zip(node.op.params, node.args, strict=True)}
        results = tuple(TensorView(self.fd, TensorRef(i)) for i in node.outputs)
        made = self._applied(node, Backward(node.op.name, self.ops, arguments, results, grads, self.active))
        passed = {grad.id for grad in grads if grad is not None}
        for name, grad in made.items():
            self._add(arguments[name], grad, passed)

    def _applied(self, node: OpNode, used: Backward) -> Mapping[str, Any]:
        assert node.op.vjp is not None
        with located(node.line):
            return node.op.vjp(used)

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, TensorRef):
            return TensorView(self.fd, arg)
        if isinstance(arg, ScalarRef):
            return Val(self.fd, arg)
        return tuple(map(self._value, arg)) if isinstance(arg, tuple) else arg

    def _add(self, operand: Any, grad: Any, passed: set[int]) -> None:
        if isinstance(operand, tuple):
            for one, part in zip(operand, grad, strict=True):
                self._add(one, part, passed)
        elif grad is not None and operand.id in self.active:
            is_piece = isinstance(grad, WindowGradient)
            assert is_piece or _fits(grad, operand), f"{operand.type} has a gradient {grad.type}"
            self._parts.setdefault(operand.id, []).append((not is_piece and grad.id in passed, grad))

    def results(self, wrt: Sequence[TensorView]) -> list[TensorView]:
        """The gradient by each tensor of `wrt`, each as a tensor of its own, so that each can be annotated."""
        self.ops.line = self.line
        out: list[TensorView] = []
        given: set[int] = set()
        for tensor in wrt:
            grad = self._total(tensor.id)
            if grad is None:
                grad = call_at(self.fd, self.line, "full", (sizes(tensor), 0.0, tensor.dtype))
            elif grad.id < self.first_new or grad.id in given:
                grad = call_at(self.fd, self.line, "set", (grad,))
            given.add(grad.id)
            out.append(grad)
        return out


def _fits(grad: TensorView, primal: TensorView) -> bool:
    """Whether the shapes are equal where they are known."""
    found, wanted = grad.type.shape, primal.type.shape
    if found == wanted:
        return True
    return len(found) == len(wanted) and all(n == m or -1 in (n, m) for n, m in zip(found, wanted, strict=True))
