#!/usr/bin/env python3
"""A headless Chromium: `tools/browser.py` prints its path, `tools/browser.py PAGE PNG WIDTH HEIGHT` takes a picture.

Exit status: 0 done, 1 failed, 3 no Chromium is on PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT = 120  # seconds for one page
UNAVAILABLE = 3
# No sandbox: it needs rights that root in a container has not. The rest keeps it from looking for its maker's hosts.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=2000",
)  # fmt: skip


def find() -> str | None:
    """The path of the first Chromium on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def dom(page: Path, width: int, height: int = 900) -> str:
    """The HTML of a page once its scripts have run, in a window of this size. Raises RuntimeError without it."""
    return _run(page, width, height, "--dump-dom")


def picture(page: Path, png: Path, width: int, height: int) -> None:
    """Write a picture of a page. Raises RuntimeError where none was made."""
    _run(page, width, height, f"--screenshot={png.absolute()}")
    if not png.is_file():
        raise RuntimeError(f"no picture of {page}")


def _run(page: Path, width: int, height: int, what: str) -> str:
    browser = find()
    if browser is None:
        raise RuntimeError(f"no browser on PATH: {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", what]
        done = subprocess.run(
            [*command, page.absolute().as_uri()], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{browser} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main(words: list[str]) -> int:
    found = find()
    if found is None:
        print(f"meshfuse: no browser on PATH: {', '.join(NAMES)}", file=sys.stderr)
        return UNAVAILABLE
    if not words:
        print(found)
        return 0
    if len(words) != 4:
        print(f"usage: {sys.argv[0]} [PAGE PNG WIDTH HEIGHT]", file=sys.stderr)
        return 2
    picture(Path(words[0]), Path(words[1]), int(words[2]), int(words[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
