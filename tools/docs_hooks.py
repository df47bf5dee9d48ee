"""What the site of the documentation needs beside its pages: links that leave docs/ become plain names of files."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it with each page's text. The site has no files of the checkout outside docs/."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
