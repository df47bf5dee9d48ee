"""What each axis of a mesh is for, and which places that leaves to weights and arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SourceLine, shown, user_error
from ...mesh import DeviceMesh
from ...sharding.layout import axes
from ...sharding.value import Sharding

DATA, FULLY_SHARDED, TENSOR, SEQUENCE, EXPERT, PIPELINE = (
    "data", "fully sharded", "tensor", "sequence", "expert", "pipeline"
)  # fmt: skip
ROLES = (DATA, FULLY_SHARDED, TENSOR, SEQUENCE, EXPERT, PIPELINE)
# The roles of axes that the rows of a batch are cut over.
_OF_ROWS = (DATA, FULLY_SHARDED, EXPERT)


def checked_roles(roles: Any, mesh: DeviceMesh, line: SourceLine) -> dict[str, str]:
    """What a user passed as `roles`. Raises DefinitionError for axes and roles that do not exist."""
    given = {} if roles is None else roles
    if not isinstance(given, Mapping):
        raise user_error("plan: roles", shown(roles), "a dict of roles by axis", 'Pass {"dp": "data"}, say.', line)
    for axis, role in given.items():
        if axis not in mesh.names:
            raise user_error("plan: roles", f"axis {axis!r}", f"one of {list(mesh.names)}", "", line)
        if role not in ROLES:
            raise user_error(f"plan: the role of axis {axis}", shown(role), f"one of {list(ROLES)}", "", line)
    if list(given.values()).count(PIPELINE) > 1:
        raise user_error("plan: roles", "several axes for pipelines", "one", "Make them one axis of the mesh.", line)
    return dict(given)


def ranks_of_rows(roles: Mapping[str, str], mesh: DeviceMesh) -> int:
    """Over how many ranks the roles cut the rows of a batch."""
    return math.prod([mesh.axis_size(axis) for axis, role in roles.items() if role in _OF_ROWS])


def fitting(
    places: Sequence[Sharding], roles: Mapping[str, str], is_argument: bool, is_batch: bool, is_expert: bool
) -> tuple[Sharding, ...]:  # fmt: skip
    """Of the places of an input those that go with the roles of axes; those of axes without a role are all there."""
    for axis, role in roles.items():
        wanted = _dims(role, is_argument, is_batch, is_expert)
        found = [s for s in places if wanted is None or _dim_of(s, axis) in wanted]
        # What an axis should cut and does not divide stays whole along it.
        places = found or [s for s in places if _dim_of(s, axis) is None]
    return tuple(places)


def _dims(role: str, is_argument: bool, is_batch: bool, is_expert: bool) -> frozenset[int | None] | None:
    """The dims that an axis of this role may cut, with None for none; None where it may cut any."""
    whole = frozenset([None])
    if is_argument:
        rows = role in _OF_ROWS and is_batch
        return frozenset([0]) if rows else frozenset(range(1, 9)) if role == SEQUENCE and is_batch else whole
    if role == FULLY_SHARDED:
        return frozenset(range(9))
    if role == EXPERT:
        return frozenset([0]) if is_expert else whole
    return whole if role in (DATA, SEQUENCE) else None


def _dim_of(sharding: Sharding, axis: str) -> int | None:
    return next((d for d, layout in enumerate(sharding.dims) if axis in {s.axis for s in axes(layout)}), None)
