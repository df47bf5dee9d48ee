"""Programs beyond the table of bills, by "group/name": a group is a module here."""

from . import backward, convolutions, far, few, general, grids, picked, rolls, sequences
from .known import Known

GROUPS = (backward, convolutions, far, few, general, grids, picked, rolls, sequences)
CLASSES: dict[str, Known] = {
    f"{group.__name__.rpartition('.')[2]}/{name}": known for group in GROUPS for name, known in group.CLASSES.items()
}
