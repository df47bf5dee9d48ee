"""How long programs are planned."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

from ..errors import SourceLine, shown, user_error
from ..graph import Graph

VARIABLE = "MESHFUSE_SEARCH"


class Effort(Enum):
    """How long programs are planned.

    FOLLOW: by rules alone: shardings go along the ops' dims, forward and back, and nothing has a price.
    FAST: over whole axes, as the user wrote them; an op may be in parts, each of a rank's own elements.
    AUTO: also written in other ops, and over parts of axes where links have no latency: more collectives of less are
        then no dearer.
    THOROUGH: over parts of axes whatever the links.
    """

    FOLLOW = "follow"
    FAST = "fast"
    AUTO = "auto"
    THOROUGH = "thorough"

    @property
    def rewrites(self) -> bool:
        """Whether a program of which several ops together may be written in others is planned in these, too."""
        return self in (Effort.AUTO, Effort.THOROUGH)

    def in_parts(self, graph: Graph) -> bool:
        """Whether the parts of axes are placed one by one."""
        if self is not Effort.AUTO:
            return self is Effort.THOROUGH
        meshes = dict.fromkeys(sharding.mesh for sharding in graph.annotations.values())
        return all(link.is_bytes_only for mesh in meshes for link in mesh.links)


def effort_of(given: Any, line: SourceLine | None) -> Effort:
    """The effort of the given name, else the one that MESHFUSE_SEARCH names, else AUTO.

    Raises DefinitionError for any other name.
    """
    name = os.environ.get(VARIABLE) or "auto" if given is None else given
    try:
        return Effort(name)
    except ValueError:
        what = VARIABLE if given is None else "search"
        needed = "'follow', 'fast', 'auto' or 'thorough'"
        raise user_error(what, shown(name), needed, "'thorough' plans longer.", line) from None
