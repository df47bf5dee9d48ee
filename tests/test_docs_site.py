"""The site of the documentation: it builds without a network and without a warning, and the API page has every name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshfuse as mf
from scripts import script

ROOT = Path(__file__).parent.parent
# Connections fail in this process, as they do without a network.
OFFLINE = """
import runpy, socket, sys
def refused(*_, **__): raise OSError("no network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
sys.argv = ["mkdocs", "build", "--strict", "--site-dir", sys.argv[1]]
runpy.run_module("mkdocs", run_name="__main__")
"""


@pytest.mark.slow
def test_the_site_builds_offline_with_warnings_as_errors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "api" / "index.html").read_text()
    for name in mf.__all__:
        assert f'id="meshfuse.{name}"' in api, name
    for name in ("define_tensor", "execute", "__call__", "latest_backward"):
        assert f'id="meshfuse.FusionDefinition.{name}"' in api
    assert "__setattr__" not in api
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert loaded == [], page


def test_every_page_is_in_the_navigation_and_every_name_on_the_api_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r"[\w-]+\.md", config)) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))
    named = re.findall(r"^::: meshfuse\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(mf.__all__)


def test_lines_of_a_docstring_become_a_list() -> None:
    listed = script("tools/docstring_lists.py").listed
    assert listed("One line.\n\nshape: sizes.\nx, y: two,\n    of them.\n\nEnd: of it::\n\n    code: here") == (
        "One line.\n\n- shape: sizes.\n- x, y: two,\n  of them.\n\nEnd: of it::\n\n    code: here"
    )
    assert listed("Raises an error: always.") == "Raises an error: always."


def test_links_that_leave_the_site_become_names() -> None:
    hook = script("tools/docs_hooks.py").on_page_markdown
    assert hook("see [it](../examples/a.py), [b](b.md)", page=None) == "see it (`examples/a.py`), [b](b.md)"
