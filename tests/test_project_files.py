"""Files that the project's page reads: workflow, templates, gallery and its pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from scripts import script

ROOT = Path(__file__).parent.parent


def parsed(path: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / path).read_text())


def test_the_workflow_runs_what_a_submission_has_to_pass() -> None:
    jobs = parsed("workflows/ci.yml")["jobs"]
    assert {"run": "bash .ci/run"} in jobs["test"]["steps"]
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == supported
    cached = next(step["with"] for step in jobs["test"]["steps"] if "cache@" in step.get("uses", ""))
    for named in re.findall(r"'([^']+)'", cached["key"]):
        assert (ROOT / named).exists()


def test_issue_templates_are_forms() -> None:
    for name in ("bug_report.yml", "feature_request.yml"):
        form = parsed(f"ISSUE_TEMPLATE/{name}")
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in form["body"])


def test_links_and_pictures_of_these_pages_are_there() -> None:
    for page in (ROOT / "SECURITY.md", ROOT / "CODE_OF_CONDUCT.md", ROOT / "examples" / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists() or target.startswith("https://"), f"{page.name}: {target}"


def test_the_gallery_has_every_example() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    hidden = ("README.md", "pyrightconfig.json", "__pycache__")
    for path in (ROOT / "examples").iterdir():
        assert path.name in hidden or path.name.startswith(".") or f"[{path.name}" in text, path.name


def test_the_pictures_are_what_the_script_draws() -> None:
    made = script("tools/pictures.py")
    there = {path.name: path.read_text() for path in made.FOLDER.glob("*.svg")}
    assert there == made.pictures(), "run .venv/bin/python tools/pictures.py"
