"""What `fd.overlap` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..argument_checks import as_int
from ..errors import SourceLine, shown, user_error

if TYPE_CHECKING:
    from .tensor_view import TensorView


# A loop is written out chunk by chunk: to plan more chunks would take longer than the communication that they hide.
_MOST_CHUNKS = 4096


class Overlap(NamedTuple):
    """A request to work on a tensor in chunks of a dim, in a ring or not, and the user's line that makes it."""

    dim: int
    chunks: int
    ring: bool
    line: SourceLine


def checked_overlap(tensor: TensorView, chunks: Any, dim: Any, ring: Any, line: SourceLine) -> Overlap:
    """The request. Raises DefinitionError for what is no number of chunks, no dim of the tensor or no bool."""
    what, count, place = f"overlap of {tensor.label}", as_int(chunks), as_int(dim)
    if count is None or not 1 <= count <= _MOST_CHUNKS:
        raise user_error(
            f"{what}: chunks", shown(chunks), f"an int from 1 to {_MOST_CHUNKS}",
            "Pass how many chunks to cut the dim into.", line,
        )  # fmt: skip
    if place is None or not -tensor.ndim <= place < tensor.ndim:
        raise user_error(f"{what}: no such dim", shown(dim), f"a dim of {tensor.type}", "Pass an existing dim.", line)
    if not isinstance(ring, bool):
        raise user_error(f"{what}: ring", shown(ring), "True or False", "Pass ring=True for a ring of messages.", line)
    return Overlap(place % tensor.ndim, count, ring, line)
