"""Errors meant for people, in one form, and the source lines they point at.

Every error that a user's mistake can cause is a ValueError whose text says what is wrong, what was found, what is
needed and what to do. Errors of definitions and calls are RuntimeErrors as well, which nvFuser's scripts catch. Errors
of ranks (a peer failed, stopped or disagreed) are RuntimeErrors alone.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
from collections.abc import Container
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from .fast_dataclass import quickly_made

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_GENERATED = "<meshfuse"
_LONGEST = 400  # characters of a value in an error text
_LONGEST_OF_LINES = 100  # of one whose repr has several lines, such as a module of torch
_LONGEST_PART = 1000  # of what is wrong, what was found and what is needed, each
# Its frame stands between two of meshfuse's own where one reads a cached property; it is no line of the user's.
_CACHES = functools.__file__
# Modules of torch that stand between a user's `loss.backward()` and the backward of a call.
_AUTOGRAD = frozenset(("torch.autograd.function", "torch.autograd.graph", "torch.autograd", "torch._tensor"))
_ASSIGNED = re.compile(r"^(?:\w+\.)?(\w+)\s*(?::[^=]+)?=(?!=)")


@quickly_made
@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a user's script. Its text is read from the file when it is asked for; `given` replaces it.

    name: what the tensor that the line makes is called, such as the path of a module; "" for the script's own variable.
    """

    file: str
    line: int
    function: str = ""
    given: str | None = None
    name: str = ""

    @property
    def text(self) -> str:
        """The source text of the line, stripped; empty where the file cannot be read."""
        if self.given is not None:
            return self.given
        try:
            return linecache.getline(self.file, self.line).strip()
        except ValueError:  # its name is none that a file can have
            return ""

    def label(self, name: str) -> str:
        """A name of ours, with the tensor's own, or with the variable that the line assigns if it does: `x (t0)`."""
        return f"{self.called} ({name})" if self.called not in ("", name) or self.name else name

    @property
    def called(self) -> str:
        """The name of the tensor that the line makes, else the variable that the line assigns; "" without either."""
        if self.name:
            return self.name
        found = _ASSIGNED.match(self.text) if ";" not in self.text else None
        return found.group(1) if found else ""

    def of_gradient(self) -> SourceLine:
        """The line, marked as that of the gradient of what it makes."""
        return SourceLine(self.file, self.line, self.function, f"gradient of: {self.text}")

    def __str__(self) -> str:
        return f"{file_name(self.file)}:{self.line}"


def file_name(path: str) -> str:
    """The last part of a path as printable text: bytes that are no characters are escaped."""
    return os.path.basename(path).encode(errors="backslashreplace").decode()


def caller_line() -> SourceLine:
    """The innermost line of the stack that is not meshfuse's own; cheap enough for every defined op."""
    return line_in_script(sys._getframe(1))


def line_in_script(frame: FrameType, beside: Container[str] = ()) -> SourceLine:
    """The innermost line, from this frame outwards, that is not meshfuse's own, nor of one of the packages `beside`."""
    last, here = frame, frame
    while here is not None:
        name = here.f_code.co_filename
        is_ours = name.startswith((_PACKAGE, _GENERATED)) or name == _CACHES or _is_between(here)
        if not is_ours and not (beside and _package_of(here) in beside):
            return _line_of(here)
        last, here = here, here.f_back
    return _line_of(last)


def _is_between(frame: FrameType) -> bool:
    """Whether this is torch's autograd, or the `__init__` that the standard library writes for one of our classes."""
    made_for_a_dataclass = frame.f_code.co_filename == "<string>" and _package_of(frame) == __package__
    return made_for_a_dataclass or frame.f_globals.get("__name__") in _AUTOGRAD


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _line_of(frame: FrameType) -> SourceLine:
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class MeshfuseError(Exception):
    """Base of meshfuse's errors. `where` is the script's line, which ends the text; it may be set after the raise."""

    def __init__(self, message: str = "", where: SourceLine | None = None):
        super().__init__(message)
        self.where = where

    def __str__(self) -> str:
        message = super().__str__()
        if self.where is None:
            return message
        first, newline, rest = message.partition("\n")
        return f"{first} (at {self.where}){newline}{rest}"


class DefinitionError(MeshfuseError, ValueError, RuntimeError):
    """A wrong op argument or annotation, found while a program is defined or compiled."""


class DtypeError(DefinitionError):
    """An op does not take operands of these dtypes. A definition adds where its operands have them from.

    has_origins: whether they have been added.
    """

    has_origins = False


class ArgumentError(MeshfuseError, ValueError, RuntimeError):
    """A wrong tensor or scalar given to a program when it is called."""


# Errors that the user causes. They are RuntimeErrors, too, and a handler of torch's errors must let them pass.
USER_ERRORS = (DefinitionError, ArgumentError)


class SizeError(ArgumentError, DefinitionError):
    """The arguments' sizes, which the definition leaves open, do not fit together in one of its ops."""


class RankError(MeshfuseError, RuntimeError):
    """A peer rank failed, stopped answering, or disagrees with this one.

    `peer` is the rank whose failure caused it, if known; `ended` what was interrupted here, in the words that the
    message begins with; `silent` are the ranks that did not answer.
    """

    peer: int | None = None
    ended: str = ""
    silent: tuple[int, ...] = ()


class RankTimeout(RankError, TimeoutError):
    """A wait for peer ranks reached its time limit (MESHFUSE_TIMEOUT)."""


class KernelError(MeshfuseError, ValueError, RuntimeError):
    """torch refused an op while a program ran: it has no kernel for these dtypes, or the values are not allowed."""


class CheckpointError(MeshfuseError, OSError):
    """A checkpoint could not be written or read: no space, no such file, or bytes that are not those written."""


class located:
    """A context in which errors of meshfuse that name no line get this line of the script."""

    __slots__ = ("line",)

    def __init__(self, line: SourceLine):
        self.line = line

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, MeshfuseError):
            error.where = error.where or self.line


def shown(value: object) -> str:
    """A user's value in an error text: its repr in one line, shortened where it is long; its type if it has no repr.

    Of tensors, modules and others whose repr takes several lines a long one is left out.
    """
    kind = type(value).__name__
    try:
        text = repr(value)
        if "\n" not in text:
            return _cut(text, _LONGEST)
        # After the first line of an error comes the user's own: the rest would be lost below it.
        line = f"a {kind}: {' '.join(text.split())}"
        return line if len(line) <= _LONGEST_OF_LINES else f"a {kind}{_shape(value)}"
    except Exception:  # lists nested too deep, ints of too many digits, classes with a repr that fails
        return f"a {kind} that cannot be printed"


def _shape(value: Any) -> str:
    return f" of shape {list(value.shape)}" if hasattr(value, "__array__") else ""


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def error_text(error: BaseException) -> str:
    """An error of somebody else's in one line: its class, and the first line of its text, shortened where it is long.

    The text of a user's error class may fail, may be as large as the data that it is about, or may not be printable.
    """
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{kind}, which cannot be printed"
    ours = isinstance(error, MeshfuseError)
    first = (text if ours else text[: 4 * _LONGEST]).strip().partition("\n")[0]
    first = first if ours else _cut(first, _LONGEST)
    return f"{kind}: {first.encode(errors='backslashreplace').decode()}"


def user_error(
    wrong: str,
    found: str = "",
    needed: str = "",
    do: str = "",
    where: SourceLine | None = None,
    cls: type[MeshfuseError] = DefinitionError,
) -> MeshfuseError:
    """An error with the text `{wrong}: found {found}, needed {needed}.

    {do} (at file:line)`; empty parts are left out, and of long ones the ends.
    """
    facts = [f"found {_cut(found, _LONGEST_PART)}"] if found else []
    facts += [f"needed {_cut(needed, _LONGEST_PART)}"] if needed else []
    what = _cut(wrong, _LONGEST_PART)
    sentence = f"{what}: {', '.join(facts)}" if facts else what
    sentence = sentence.rstrip(".") + "."
    return cls(f"{sentence} {do}".rstrip(), where)
