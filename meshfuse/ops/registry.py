"""The ops in `fd.ops`, by name: those of the table, and those that users register."""

from __future__ import annotations

import keyword

from ..errors import caller_line, shown, user_error
from . import COMPOSITES, EXPERT_OPS, OPS
from .opdef import OpDef

_registered: dict[str, OpDef] = {}


def register_op(op: OpDef) -> OpDef:
    """Add an op of your own to `fd.ops` of every definition in this process, from here on; returns it.

    On real ranks every rank must register it, as it does when it runs the script. Raises DefinitionError for what is no
    OpDef, for a name that is no Python name or begins with an underscore, and for a name that is taken.
    """
    if not isinstance(op, OpDef):
        raise user_error("register_op", f"{shown(op)} ({type(op).__name__})", "an OpDef",
                         "Make one with mf.torch_op, or mf.OpDef(...).", caller_line())  # fmt: skip
    for one in (op, *op.adjoints):
        _check_name(one.name)
    _registered.update({one.name: one for one in (op, *op.adjoints)})
    return op


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise user_error("register_op: the op's name", shown(name), "a Python name without a leading underscore",
                         "Rename the op.", caller_line())  # fmt: skip
    if name in _registered:
        raise user_error(f"register_op: {name!r} is registered already", repr(_registered[name]), "a new name",
                         f"Rename the op, or call mf.unregister_op({name!r}) first.", caller_line())  # fmt: skip
    if name in OPS or name in EXPERT_OPS or name in COMPOSITES:
        raise user_error(f"register_op: meshfuse has an op {name!r}", "", "a new name", "Rename the op.",
                         caller_line())  # fmt: skip


def unregister_op(op: str | OpDef) -> None:
    """Remove a registered op, given as such or by name, from `fd.ops`. Definitions that use it keep it.

    Raises DefinitionError where it is not registered.
    """
    name = op.name if isinstance(op, OpDef) else op
    if not isinstance(name, str) or name not in _registered:
        raise user_error(f"unregister_op: {shown(name)} is not registered", f"registered {sorted(_registered)}", "",
                         "Ops of the table stay.", caller_line())  # fmt: skip
    for one in (_registered[name], *_registered[name].adjoints):
        _registered.pop(one.name, None)


def find(op: str | OpDef) -> OpDef | None:
    """The op of this name, None where there is none; an OpDef is returned as it is."""
    if isinstance(op, OpDef):
        return op
    return OPS.get(op) or EXPERT_OPS.get(op) or _registered.get(op) if isinstance(op, str) else None


def names() -> list[str]:
    """The names of all ops: the table's, then the registered ones."""
    return [*OPS, *EXPERT_OPS, *_registered]
