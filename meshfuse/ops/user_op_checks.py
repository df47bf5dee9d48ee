"""Checks of the options of `torch_op` against its rule: when they are given, and when a function given as one returns.

`marks` are the dims that the rule marks by `~`. `returned_...` are options that functions of the call give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from ..dtypes import DataType
from ..errors import caller_line, shown, user_error
from .notation import Notation, parse
from .opdef import Call, Partial, Sample

_REDUCTIONS = ("sum", "prod", "max", "min")


def checked_notation(
    rule: str, *, blocked: Any, reduce: Any, halo: Any, fill: Any, sizes: Any, dtype: Any, partial: Any, flops: Any,
    samples: Any, domain: Any, differentiable: Any,
) -> Notation:  # fmt: skip
    """The rule of `torch_op`, read. Raises DefinitionError for a rule that cannot be read and for unfit options."""
    notation = parse(rule)
    marks = {dim.factors for dims in notation.operands for dim in dims if dim.halo}
    _check_halos(notation, marks)
    _check_result_factors(notation, blocked)
    _check_claims(notation, blocked, reduce, partial, samples)
    _check_functions(notation, marks, halo, sizes)
    _check_options(notation, fill, dtype, flops, domain, differentiable)
    if marks and not is_function(halo):
        _check_widths(notation, marks, halo)
    return notation


def _check_halos(notation: Notation, marks: set[tuple[str, ...]]) -> None:
    """Raises DefinitionError where a dim marked by `~` is missing in some result."""
    for factors in marks:
        if any(factors[0] not in {f for dim in dims for f in dim.factors} for dims in notation.results):
            raise user_error(f"rule {notation.text!r}: {factors[0]}~", "a result without it", "it in every result",
                             "Reduce over it in an op of its own.")  # fmt: skip


def _check_result_factors(notation: Notation, blocked: Any) -> None:
    """Raises DefinitionError for a factor that some results lack: they would be sums over it, on a rank alone."""
    whole = set(blocked.split()) if isinstance(blocked, str) else set()
    made = [{f for dim in dims for f in dim.factors} for dims in notation.results]
    cut = {f for dims in notation.operands for dim in dims for f in dim.factors} - whole
    for place, factors in enumerate(made):
        for f in sorted(cut & set().union(*made) - factors):
            raise user_error(
                f"rule {notation.text!r}: {f}", f"result {place} without it, others with it", "it in every result",
                f"Make result {place} in an op of its own, or mark {f} as blocked.",
            )  # fmt: skip


def _check_claims(notation: Notation, blocked: Any, reduce: Any, partial: Any, samples: Any) -> None:
    """Raises DefinitionError for values that `blocked`, `reduce`, `partial` or `samples` cannot have."""
    known = {f for dims in (*notation.operands, *notation.results) for dim in dims for f in dim.factors}
    unknown = [f for f in blocked.split() if f not in known] if isinstance(blocked, str) else [blocked]
    listed = isinstance(samples, (list, tuple)) and all(isinstance(sample, Sample) for sample in samples)
    problems = [
        (unknown, "blocked", blocked, f"factors of the rule, of {sorted(known)}", "Write them with spaces between."),
        (reduce not in _REDUCTIONS, "reduce", reduce, f"one of {', '.join(_REDUCTIONS)}", "A mean is a sum, divided."),
        (not isinstance(partial, Partial), "partial", partial, "an mf.Partial", "Leave it out where unsure."),
        (not listed, "samples", samples, "a list of mf.Sample", "Write samples=[mf.Sample((mf.TensorType(...),))]."),
    ]
    for wrong, name, found, needed, do in problems:
        if wrong:
            raise user_error(f"rule {notation.text!r}: {name}", shown(found), needed, do)


def _check_functions(notation: Notation, marks: set[tuple[str, ...]], halo: Any, sizes: Any) -> None:
    """Raises DefinitionError for a halo where the rule marks no dim, and for `sizes` that is no function."""
    if halo is not None and not marks:
        raise user_error(f"rule {notation.text!r}: halo", shown(halo), "a dim with neighbours in the rule, as in 't~'",
                         "Mark the dims of which the function sees neighbours.")  # fmt: skip
    if sizes is not None and not is_function(sizes):
        raise user_error(f"rule {notation.text!r}: sizes", shown(sizes), "a function of the call",
                         'Write sizes=lambda call: {"n": 4}, for example.')  # fmt: skip


def _check_widths(notation: Notation, marks: set[tuple[str, ...]], halo: Any) -> None:
    """Raises DefinitionError where a marked factor has no pair (before, after)."""
    for (factor,) in marks:
        if not _is_widths(halo.get(factor) if isinstance(halo, Mapping) else None):
            raise user_error(
                f"rule {notation.text!r}: halo", shown(halo), f"elements before and after for {factor!r}",
                f'Write halo={{"{factor}": (1, 0)}}, or a function of the call.',
            )  # fmt: skip


def _check_options(notation: Notation, fill: Any, dtype: Any, flops: Any, domain: Any, differentiable: Any) -> None:
    """Raises DefinitionError for options of the wrong kind."""
    pair = isinstance(domain, (list, tuple)) and len(domain) == 2 and all(map(_is_number, domain))
    numbers = isinstance(fill, bool) or fill is None or isinstance(fill, complex) or _is_number(fill)
    known = dtype is None or isinstance(dtype, DataType) or is_function(dtype)
    problems = [
        (not numbers, "fill", fill, "a number", "It stands beyond the tensor's ends."),
        (not known, "dtype", dtype, "an mf.DataType, or a function of the call", "Leave it out for the operands'."),
        (flops is not None and not is_function(flops), "flops", flops, "a function of the call",
         "Write flops=lambda call: 2.0 * call.types[0].numel, for example."),
        (domain is not None and not pair, "domain", domain, "the least and the greatest number that tests draw", ""),
        (not isinstance(differentiable, bool), "differentiable", differentiable, "True or False", ""),
    ]  # fmt: skip
    for wrong, name, found, needed, do in problems:
        if wrong:
            raise user_error(f"rule {notation.text!r}: {name}", shown(found), needed, do)


def is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Whether a value is a function of the call. A DataType can be called too, and is none."""
    return callable(value) and not isinstance(value, DataType)


def returned_sizes(notation: Notation, sizes: Callable[[Call], Any] | None, call: Call) -> Mapping[str, int]:
    """The sizes that the user's function returns. Raises DefinitionError for anything but an int by factor."""
    found = {} if sizes is None else sizes(call)
    letters = notation.letters()
    if isinstance(found, Mapping) and all(f in letters and _is_size(n, -1) for f, n in found.items()):
        return found
    raise _bad_return(notation, "sizes", found, f"a size for some of {', '.join(letters)}")


def returned_dtypes(notation: Notation, found: Any, count: int) -> Sequence[DataType]:
    """The results' dtypes, from one for all or one for each. Raises DefinitionError for anything else."""
    given = (found,) * count if isinstance(found, DataType) else found
    listed = isinstance(given, (list, tuple)) and all(isinstance(d, DataType) for d in given)
    if listed and len(given) == count:
        return given
    raise _bad_return(notation, "dtype", found, f"an mf.DataType, or {count} of them")


def returned_halo(notation: Notation, found: Any) -> Mapping[str, tuple[int, int]]:
    """The widths that the user's function returns. Raises DefinitionError unless each marked factor has a pair."""
    marks = {dim.factors[0] for dims in notation.operands for dim in dims if dim.halo}
    if isinstance(found, Mapping) and all(_is_widths(found.get(f)) for f in marks):
        return found
    raise _bad_return(notation, "halo", found, f"elements before and after for each of {', '.join(sorted(marks))}")


def returned_flops(notation: Notation, flops: Callable[[Call], Any], call: Call) -> float:
    """The number of operations that the user's function returns. Raises DefinitionError where it is none."""
    found = flops(call)
    if _is_number(found) and 0 <= found < math.inf:
        return float(found)
    raise _bad_return(notation, "flops", found, "a number of operations, 0 or more")


def _bad_return(notation: Notation, name: str, found: Any, needed: str) -> Exception:
    return user_error(f"rule {notation.text!r}: what its {name} function returned", shown(found), needed,
                      "Correct the function.", caller_line())  # fmt: skip


def _is_widths(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len(given) == 2 and all(_is_size(n, 0) for n in given)


def _is_size(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
