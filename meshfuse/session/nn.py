"""`RemoteModule`: a module on one rpc worker, called from others, as `torch.distributed.nn` has it.

m = nn.RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
y = m(x)                                    # in an autograd context gradients reach worker1, and x
optimizer = optim.DistributedOptimizer(torch.optim.SGD, m.remote_parameters(), lr=0.1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import _remote_device
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, caller_line, shown, user_error
from .rpc.calls import calls
from .rpc.rref import RRef

# What of torch.nn.Module would need the parameters here, or change them; torch's refuses these, too.
_UNSUPPORTED = (
    "register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float",
    "double", "half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook", "register_forward_hook",
    "state_dict", "load_state_dict", "named_parameters", "buffers", "named_buffers", "children", "named_children",
    "modules", "named_modules", "requires_grad_", "zero_grad", "share_memory", "extra_repr",
)  # fmt: skip


class RemoteModule(torch.nn.Module):
    """A module of `module_cls(*args, **kwargs)` on another worker. `rpc.init_rpc` must have been called.

    remote_device: "worker/device" or "rank:1/device"; the device may be left out, and is then the CPU. Tensors that are
    passed to a module on a GPU are moved there, and results back to the CPU.

    `forward` waits, `forward_async` gives a future. It can be sent to other workers. `train`, `eval`, `get_module_rref`
    and `remote_parameters` are there; what else torch.nn.Module has raises ArgumentError. Errors of the class are
    raised by the first call.
    """

    def __init__(
        self, remote_device: str, module_cls: Callable[..., torch.nn.Module], args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__()
        on, device = _place(remote_device)
        self._refer(on, device, calls().remote(on, _create, (module_cls, args or (), kwargs or {}, device), {}, None))

    def _refer(self, on: str | int, device: str, module_rref: RRef[Any]) -> None:
        self.on, self.device, self.module_rref = on, device, module_rref
        self.is_device_map_set = self.is_scriptable = False

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """One of a module that is there already, by a reference to it."""
        return _refer_to(*_place(remote_device), module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward where it is. Raises what it raises."""
        return calls().sync(self.module_rref.owner(), _forward, (self.module_rref, self.device, args, kwargs), {}, None)

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """The same without waiting."""
        arguments = (self.module_rref, self.device, args, kwargs)
        return calls().start(self.module_rref.owner(), _forward, arguments, {}, None)

    def get_module_rref(self) -> RRef[Any]:
        """A reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """References to its parameters, for a DistributedOptimizer. recurse: those of its submodules, too."""
        return calls().sync(self.module_rref.owner(), _parameters, (self.module_rref, recurse), {}, None)

    def train(self, mode: bool = True) -> RemoteModule:
        """Let dropouts drop, and the like; with False not."""
        calls().sync(self.module_rref.owner(), _train, (self.module_rref, bool(mode)), {}, None)
        self.training = bool(mode)
        return self

    def parameters(self, recurse: bool = True) -> Any:
        """Raises ArgumentError: they are elsewhere."""
        raise _not_supported("parameters", " Please use ``remote_parameters`` instead.")

    def __reduce__(self) -> Any:
        if not calls().is_sending():
            raise user_error(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC",
                repr(self), "an argument or a result of an rpc call", "Save the module where it is, by its reference.",
                caller_line(), ArgumentError,
            )  # fmt: skip
        return _refer_to, (self.on, self.device, self.module_rref)

    def __repr__(self) -> str:
        return f"RemoteModule({self.module_rref} on {self.on}/{self.device})"


def _not_supported(name: str, do: str = "") -> Exception:
    return user_error(
        f"Method ``{name}`` not supported for RemoteModule.{do}", "a module on another worker", "one of this process",
        "Call a function on its worker with get_module_rref().", caller_line(), ArgumentError,
    )  # fmt: skip


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise _not_supported(name)

    method.__name__, method.__doc__ = name, "Raises ArgumentError: the module is elsewhere."
    return method


for _name in _UNSUPPORTED:
    setattr(RemoteModule, _name, _refuse(_name))


def _place(remote_device: Any) -> tuple[str | int, str]:
    """The worker, by its name or rank, and the device. Raises ArgumentError for other texts."""
    try:
        found = _remote_device(remote_device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise user_error(
            f"RemoteModule: remote_device ({error})", shown(remote_device), '"worker/device", or "rank:1/device"', "",
            caller_line(), ArgumentError,
        ) from None  # fmt: skip
    on = found.worker_name() if found.worker_name() is not None else found.rank()
    if on is None:
        raise user_error("RemoteModule: remote_device", shown(remote_device), "one of a worker", "", caller_line(),
                         ArgumentError)  # fmt: skip
    return on, str(found.device())


def _refer_to(on: str | int, device: str, module_rref: RRef[Any]) -> RemoteModule:
    made = RemoteModule.__new__(RemoteModule)
    torch.nn.Module.__init__(made)
    made._refer(on, device, module_rref)
    return made


# What runs where the module is.


def _create(module_cls: Any, args: Any, kwargs: Mapping[str, Any], device: str) -> torch.nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise user_error(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns another",
            shown(module), "a torch.nn.Module", "", cls=ArgumentError,
        )  # fmt: skip
    return module.to(device)


def _forward(module_rref: RRef[Any], device: str, args: Any, kwargs: Any) -> Any:
    module = module_rref.local_value()
    if torch.device(device).type == "cpu":
        return module(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), module(*args, **kwargs))


def _parameters(module_rref: RRef[Any], recurse: bool) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _train(module_rref: RRef[Any], mode: bool) -> None:
    module_rref.local_value().train(mode)


__all__ = ["RemoteModule"]
