"""The example's text: the King James Bible, from the Debian packages ``bible-kjv-text`` and ``bible-kjv``.

``bible-kjv-text`` stores a compressed form, so the reader program of ``bible-kjv`` prints it.  Both packages
are downloaded with ``apt-get download`` and unpacked into a cache directory outside the checkout; nothing is
installed.  Whole books are held out for evaluation and shipped as ``eval.txt``.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
EVAL_PATH = HERE / "eval.txt"
PACKAGES = ("bible-kjv-text", "bible-kjv")
# Books with no close parallel elsewhere, so that the model cannot have read the same story in training.
HELD_OUT_BOOKS = frozenset({"Est", "Eccl", "John"})
TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
DOWNLOAD_SECONDS = 300
VERSE = re.compile(r"(?P<book>\d?[A-Za-z]+)(?P<chapter>\d+):\d+ (?P<text>.+)")


@dataclass(frozen=True, slots=True)
class Verse:
    """One verse; ``chapter`` is unique only together with ``book``."""

    book: str
    chapter: int
    text: str


def cache_dir() -> Path:
    """Where downloads live: ``$XDG_CACHE_HOME/meshfuse/gpt-text``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meshfuse" / "gpt-text"


def fetch_text() -> tuple[bytes, bytes]:
    """The training text and the evaluation text: one verse per line, an empty line after each chapter.

    Raises ``RuntimeError`` where the packages cannot be downloaded, unpacked or read.
    """
    raw = print_bible(unpack_packages(cache_dir()))
    warn_if_changed(raw)
    verses = parse_verses(raw)
    return (
        render(verse for verse in verses if verse.book not in HELD_OUT_BOOKS),
        render(verse for verse in verses if verse.book in HELD_OUT_BOOKS),
    )


def unpack_packages(cache: Path) -> Path:
    """Download what is missing of ``PACKAGES`` into ``cache`` and return the folder they are unpacked in."""
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / "root"
    for package in PACKAGES:
        if not list(cache.glob(f"{package}_*.deb")):
            _run(["apt-get", "download", package], cwd=cache)
        _run(["dpkg", "-x", str(next(cache.glob(f"{package}_*.deb"))), str(root)], cwd=cache)
    return root


def print_bible(root: Path) -> bytes:
    """Every verse on one line after its reference, such as ``Ge1:1``, printed by the unpacked reader."""
    reader, library = root / "usr" / "bin" / "bible", root / "usr" / "lib"
    return _run([str(reader), "-f", "-p", str(library), "Gen1:1-Rev22:21"], cwd=root)


def _run(command: list[str], cwd: Path) -> bytes:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or b""
        raise RuntimeError(
            f"the training text cannot be fetched: `{' '.join(command)}` failed with {error} "
            f"{detail.decode(errors='replace').strip()}; it needs Debian's apt-get and dpkg, package lists "
            "(run `apt-get update`) and libreadline8"
        ) from error
    return done.stdout


def warn_if_changed(raw: bytes) -> None:
    """Say so where the package prints other text than the shipped weights were trained on."""
    found = hashlib.sha256(raw).hexdigest()
    if found != TEXT_SHA256:
        print(
            "warning: the text differs from the one the shipped weights were trained on: "
            f"found sha256 {found}, need {TEXT_SHA256}; expect other losses"
        )


def parse_verses(raw: bytes) -> list[Verse]:
    """The verses of the reader's output; raises ``ValueError`` on a line of another form."""
    return [_parse_verse(line) for line in raw.decode("ascii").splitlines()]


def _parse_verse(line: str) -> Verse:
    match = VERSE.fullmatch(line)
    if match is None:
        raise ValueError(
            f"a line of the text is not a verse: found {line!r}, need a form like 'Ge1:1 In the beginning'; "
            f"delete {cache_dir()} and fetch again"
        )
    return Verse(match["book"], int(match["chapter"]), match["text"])


def render(verses: Iterator[Verse]) -> bytes:
    """One verse per line without its reference, and an empty line after each chapter."""
    chapters = groupby(verses, key=lambda verse: (verse.book, verse.chapter))
    return "".join("\n".join(verse.text for verse in group) + "\n\n" for _, group in chapters).encode("ascii")


def to_tokens(text: bytes) -> Tensor:
    """The bytes of ``text`` as an int64 tensor ``[len(text)]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(text: bytes, block: int) -> tuple[Tensor, Tensor]:
    """Consecutive windows of ``text``: ``(tokens, targets)``, both ``[N, block]``, targets one byte later.

    Every byte but the first is a target once; a last window shorter than ``block`` is left out.
    """
    tokens = to_tokens(text)
    count = (len(tokens) - 1) // block
    return tokens[: count * block].view(count, block), tokens[1 : count * block + 1].view(count, block)


def eval_windows(block: int) -> tuple[Tensor, Tensor]:
    """``windows`` of the shipped held-out text."""
    return windows(EVAL_PATH.read_bytes(), block)
