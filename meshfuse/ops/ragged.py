"""What becomes of ragged tensors, the rows of experts (`ops/experts.py`), in ops that know nothing of them."""

from __future__ import annotations

from ..errors import user_error
from .opdef import Call
from .pointwise import pointwise_rule
from .values import TensorType


def infer(call: Call) -> tuple[TensorType, ...]:
    """The types of an op's results; those of an op on single elements of ragged tensors are ragged, too.

    Raises DefinitionError for any other op on ragged tensors, and as the op's own type rule does.
    """
    made, ragged = call.op.infer(call), [t for t in call.types if t.rows]
    if not ragged or call.op.on_rows:
        return made
    first = ragged[0]
    fits = all(t.shape[:2] == first.shape[:2] and t.rows == first.rows for t in ragged) and not any(
        _varies(t) for t in call.types if not t.rows
    )
    if call.op.rule is not pointwise_rule or not fits or any(t.shape[:2] != first.shape[:2] for t in made):
        raise user_error(
            f"{call.op.name}: rows of experts", ", ".join(map(str, call.types)),
            "an op that works on single elements, of rows of one moe_dispatch and numbers that are the same for all",
            "Bring the rows back to their tokens first (fd.ops.moe_collect), or use moe_linear.",
        )  # fmt: skip
    return tuple([t._replace(rows=first.rows) for t in made])


def _varies(dense: TensorType) -> bool:
    """Whether a tensor has other numbers for other experts or tokens."""
    return dense.ndim > 2 and any(n != 1 for n in dense.shape[:-2][-2:] + dense.shape[-2:-1])
