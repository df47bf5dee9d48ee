"""A page as a value: a notebook shows it, a terminal gets its file, and `save` writes it elsewhere."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..compiler import CompiledProgram
from ..errors import SourceLine, caller_line, file_name, user_error
from ..html_text import escaped
from ..whole_files import write_whole
from .page import page


@dataclass(frozen=True, slots=True)
class ShownPage:
    """The page of a definition. path: the file that it is in, "" for none."""

    html: str = field(repr=False)
    path: str

    def save(self, path: Any) -> ShownPage:
        """Write the page to a file. Raises DefinitionError where that cannot be done."""
        return _written(self.html, path, caller_line())

    def __str__(self) -> str:
        return f"page: {self.path}" if self.path else "a page; save(path) writes it"

    def _repr_html_(self) -> str:
        look = "width:100%;height:720px;border:1px solid #8884;border-radius:6px"
        return f'<iframe style="{look}" srcdoc="{escaped(self.html)}"></iframe>'


def show_page(
    programs: Sequence[CompiledProgram], path: Any, alternatives: bool, line: SourceLine, names: Sequence[str] = ()
) -> ShownPage:
    """The page of these programs, in a file where a path is given, or where no notebook shows it.

    A browser opens where there is a terminal and no path.
    """
    return show_text(page(programs, file_name(line.file), alternatives, names), path, line)


def show_text(text: str, path: Any, line: SourceLine) -> ShownPage:
    """A page's text, in a file or a notebook as `show_page`."""
    if path is not None:
        return _written(text, path, line)
    if "ipykernel" in sys.modules:
        return ShownPage(text, "")
    made = _written(text, Path(tempfile.mkdtemp(prefix="meshfuse-")) / "page.html", line)
    if sys.stdout.isatty():
        webbrowser.open(Path(made.path).as_uri())
    return made


def _written(text: str, path: Any, line: SourceLine) -> ShownPage:
    try:
        found = Path(path).absolute()
        write_whole(found, text.encode())
    except (OSError, TypeError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise user_error(f"cannot write the page to {path}", found, "a path that can be written", "", line) from None
    return ShownPage(text, str(found))
