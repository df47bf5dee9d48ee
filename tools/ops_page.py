#!/usr/bin/env python3
"""Writes docs/ops.md from the records of the ops: `.venv/bin/python tools/ops_page.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshfuse.definition.namespaces import composite_help
from meshfuse.ops import COMPOSITES, OPS, composite, families
from meshfuse.ops.binding import signature
from meshfuse.ops.opdef import OpDef
from meshfuse.ops.summary import CARRIES, FATES, ExampleCall, examples
from meshfuse.ops.torch_names import rows

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
_OWN = [name for name in COMPOSITES if name not in OPS]
_HEAD = """\
# The ops

<!-- Written by tools/ops_page.py from the ops' records: change those, and run `.venv/bin/python tools/ops_page.py`. -->

The functions of `fd.ops`, and what happens when one of their dims is sharded. `meshfuse ops`, `meshfuse ops sum` and
`help(fd.ops.sum)` show the same, also for ops of your own.

Python's operators on tensors are ops, too: `x @ w` is `fd.ops.matmul(x, w)`, and so on for `+` `-` `*` `/` `//` `%`
`**`, `&` `|` `^` `<<` `>>`, `<` `<=` `>` `>=`, `-x`, `~x`, `abs(x)` and `x.T`. Two differ from Python, as in nvFuser:

- `//` and `%` are `div` and `mod`: on floating point numbers `//` divides, and cuts nothing off.
- `==` tells whether two names are the same tensor object; `fd.ops.eq` compares numbers.

`x.size(d)`, `x.shape[d]` and `x.shape()` are scalars of the definition, with which ops and sizes can be computed.

Element types are nvFuser's: elementwise ops and `var` of Half or BFloat16 give Float: nothing is rounded between
ops. Cast a result where half precision is to be kept or sent, or write `mf.FusionDefinition(promotion="torch")`, in
which every such result has its operands' type, as in torch. `fd.explain(t)` says where it happens.
"""
_NAMES = """\
## Under another name

What to write for names of torch or numpy that are not here. Errors for such names say the same.
"""
_READING = """\
## How to read the tables

*dims* shows a call with a letter for each dim of its tensors: `matmul([a, b], [b, c]) -> [a, c]`. The same letter is
the same size; `(a b)` is a dim made of both, with a the major one; 1 is a dim of that size. Tensors are Float unless
another type is shown. Several lines are several kinds of calls. What the words behind a call say of its dims:

{fates}

*unreduced operands*: an operand may be an *unreduced* (partial) sum, or maximum, ..., of which each rank holds one
term. If the op can work on the terms the reduction is put off, so that one collective serves many ops; if not, it is
done first:

{carries}

*gradient*: whether `fd.grad` goes through the op.
"""


def page() -> str:
    """The whole page."""
    fates = "\n".join(f"- **{word}**: {meaning};" for word, meaning in FATES.items())
    carries = "\n".join(f"- **{word}**: {rule.value};" for rule, word in CARRIES.items())
    reading = _READING.format(fates=f"{fates[:-1]}.", carries=f"{carries[:-1]}.")
    return "\n".join([_HEAD, _index(), _NAMES, _table(("torch", "here"), map(_name, rows())), reading, *_sections()])


def _name(row: tuple[Sequence[str], str]) -> Sequence[str]:
    names, text = row
    return (" ".join(f"`{name}`" for name in names), text)


def _index() -> str:
    """Every op's name, a paragraph per family."""
    named = {title: [op.name for op in ops] for title, (_, ops) in families().items()}
    lines = [f"- [{title}](#{title}): {', '.join(names)}" for title, names in {"composites": _OWN, **named}.items()]
    return "\n".join([*lines, ""])


def _sections() -> Iterable[str]:
    yield f"## composites\n\n{composite.__doc__}"
    yield _table(("call", "what"), (_composite(name) for name in _OWN))
    for title, (about, ops) in families().items():
        yield f"## {title}\n\n{about}\n"
        yield _table(("call", "what", "dims", "unreduced operands", "gradient"), map(_row, ops))


def _composite(name: str) -> Sequence[str]:
    call, about = composite_help(name)
    return (f"`{call}`", " ".join(about.split()))


def _row(op: OpDef) -> Sequence[str]:
    call, about = f"`{signature(op)}`", op.about
    dims = "<br>".join(map(_dims, examples(op)))
    return (call, about, dims, CARRIES[op.partial], "yes" if op.vjp else "no")


def _dims(example: ExampleCall) -> str:
    """The call and what its dims do; the latter alone where all tensors are alike and all dims pass."""
    alike = len(set(re.findall(r"\[[^][]*\]", example.text))) == 1
    return example.outcome if alike and example.outcome == "all pass" else f"`{example.text}`: {example.outcome}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}: {len(OPS)} ops and {len(_OWN)} composites")
