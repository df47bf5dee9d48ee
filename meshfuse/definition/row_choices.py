"""Which choice of experts the rows of a definition follow: rows of two choices do not fit together."""

from __future__ import annotations

from ..errors import user_error
from .recording import Recording


def check_rows(recording: Recording) -> None:
    """Raises DefinitionError where the last op reads rows of several choices, or brings rows back by another one."""
    op, inputs = recording.nodes[-1].op, recording.nodes[-1].inputs
    ragged = [i for i in inputs if recording.tensors[i].type.rows]
    if not ragged:
        return
    found = dict.fromkeys(_choice(recording, i) for i in ragged)
    if op.exchange is not None and op.exchange.kind == "collect":
        found[inputs[op.exchange.choice]] = None
    known = [i for i in found if i is not None]
    if len(known) > 1:
        names = ", ".join(recording.tensors[i].label for i in known)
        raise user_error(f"{op.name}: rows that follow several choices of experts", names, "rows of one moe_dispatch",
                         "Bring the rows of each back to their tokens, by the tensor that it was given.")  # fmt: skip


def _choice(recording: Recording, tensor: int) -> int | None:
    """The tensor that said which experts the tokens of some rows go to; None for rows that came as an input."""
    while True:
        node = recording.producer(tensor)
        if node is None:
            return None
        if node.op.exchange is not None:
            return node.inputs[node.op.exchange.choice]
        tensor = next(i for i in node.inputs if recording.tensors[i].type.rows)
