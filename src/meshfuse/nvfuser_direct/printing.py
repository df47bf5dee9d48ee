"""The text of a definition as nvFuser writes it: a function that defines it again."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..definition.builder import DefinitionBuilder
from ..report.reprint import definition_source

_HEADER = "def nvfuser_fusion(fd : FusionDefinition) -> None :"
_INDENT = "    "
_OUTPUT = re.compile(r"fd\.add_output\((tv\d+)\)")


def function_text(fd: DefinitionBuilder, aliases: Mapping[int, int]) -> str:
    """`nvfuser_fusion(fd)`, which needs FusionDefinition and DataType to be there.

    A definition with annotations imports meshfuse for its meshes.
    """
    head, _, body = definition_source(fd).partition("fd:\n")
    meshes = [line for line in head.splitlines() if line.startswith("mesh")]
    imports = ["import meshfuse as mf"] if meshes else []
    seed = [f"# seed={seed}"] if (seed := getattr(fd, "seed", 0)) else []
    above = [_INDENT + line for line in (*seed, *imports, *meshes)]
    lines = [_line(line) for line in body.splitlines()]
    outputs = iter(range(len(fd.outputs)))
    lines = [_OUTPUT.sub(lambda m: _output(m[1], aliases.get(next(outputs))), line) for line in lines]
    return "\n".join([_HEADER, *above, *lines]) + "\n"


def _line(line: str) -> str:
    """nvFuser's names: tv0 for a tensor, c0 for a scalar."""
    named = re.sub(r"\bt(\d+)\b", r"tv\1", re.sub(r"\bs(\d+)\b", r"c\1", line))
    return named.replace("mf.DataType.", "DataType.")


def _output(name: str, alias: int | None) -> str:
    return f"fd.add_output({name}{'' if alias is None else f', tv{alias}'})"
