"""Versions that compare by number, also with strings."""

from __future__ import annotations

import re


class Version(str):
    """A version: `Version("0.1.0") < "0.10"`. Numbers before a + or a letter count; missing ones are 0."""

    __slots__ = ()

    @property
    def release(self) -> tuple[int, ...]:
        numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-zA-Z]", self)[0])]
        while numbers and not numbers[-1]:
            numbers.pop()
        return tuple(numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.release == Version(other).release

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self.release < Version(other).release

    def __le__(self, other: str) -> bool:
        return self.release <= Version(other).release

    def __gt__(self, other: str) -> bool:
        return self.release > Version(other).release

    def __ge__(self, other: str) -> bool:
        return self.release >= Version(other).release

    def __hash__(self) -> int:
        return hash(self.release)


NvfuserVersion = Version
