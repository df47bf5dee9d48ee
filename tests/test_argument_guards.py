"""Arguments like those of an earlier call: recognised by guards or outlines, checked anew where any differs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from meshfuse.executor.argument_guards import ArgumentGuards

OPTIONS = (False, None, False)
GOOD = torch.arange(6.0).reshape(2, 3)


class Own(torch.Tensor):
    """A class with ops of its own."""


class Failing(torch.Tensor):
    """A class all of whose attributes raise."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise KeyError(func)


def knowing() -> ArgumentGuards[str]:
    """One that recognises two float32 tensors of 2 x 3 by guards and by outlines."""
    familiar = ArgumentGuards[str]()
    familiar.learn([GOOD, GOOD], OPTIONS, "program")
    assert familiar.find([GOOD, GOOD], OPTIONS) == familiar.find((GOOD, GOOD + 1), OPTIONS) == "program"
    return familiar


def freed() -> torch.Tensor:
    made = GOOD.clone()
    made.untyped_storage().resize_(0)
    return made


OTHERS: dict[str, Callable[[], object]] = {
    "another dtype": GOOD.double, "another size": lambda: GOOD[:1], "another number of dims": lambda: GOOD[None],
    "another device": lambda: GOOD.to("meta"), "its memory freed": freed,
    "a lazy negative": lambda: torch._neg_view(GOOD),
    "sparse": GOOD.to_sparse, "sparse rows": GOOD.to_sparse_csr, "a class of tensors": lambda: GOOD.as_subclass(Own),
    "a failing class": lambda: GOOD.as_subclass(Failing),
    "fake": lambda: FakeTensorMode().from_tensor(GOOD), "a number": lambda: 2.0, "nothing": lambda: None,
    "quantized": lambda: torch.quantize_per_tensor(GOOD, 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([GOOD, GOOD]), "opaque": GOOD.to_mkldnn,
    "jagged": lambda: torch.nested.nested_tensor([GOOD, GOOD], layout=torch.jagged),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_checked_anew(other: str) -> None:
    familiar, value = knowing(), OTHERS[other]()
    assert familiar.find([GOOD, value], OPTIONS) is familiar.find([value, GOOD], OPTIONS) is None


def test_so_are_other_counts_other_lists_and_other_options() -> None:
    familiar = knowing()
    for arguments in ([], [GOOD], [GOOD] * 3, iter([GOOD, GOOD]), {0: GOOD, 1: GOOD}, GOOD, None, 2):
        assert familiar.find(arguments, OPTIONS) is None
    for options in ((True, None, False), (False, "eager", False), (False, None, True), (False, [], False)):
        assert familiar.find([GOOD, GOOD], options) is None
    assert familiar.find([GOOD, GOOD], (False, torch.ones(2), False)) is None


def test_so_are_calls_in_modes_that_follow_tensors() -> None:
    familiar = knowing()
    with FakeTensorMode():
        assert familiar.find([GOOD, GOOD], OPTIONS) is None
    with forward_ad.dual_level():
        assert familiar.find([GOOD, forward_ad.make_dual(GOOD, GOOD)], OPTIONS) is None


MODES = {"plain": contextlib.nullcontext, "inference": torch.inference_mode, "no_grad": torch.no_grad,
         "autocast": lambda: torch.autocast("cpu")}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_strides_gradients_and_the_callers_mode_are_not_looked_at(mode: str) -> None:
    familiar = knowing()
    with MODES[mode]():
        made = GOOD + 1
        for value in (made, made.t().contiguous().t(), torch.nn.Parameter(GOOD), GOOD.clone().requires_grad_()):
            assert familiar.find([GOOD, value], OPTIONS) == familiar.find([value, value], OPTIONS) == "program"


def test_many_kinds_of_arguments_are_distinguished() -> None:
    """More than have guards, by guards or outlines; each is found again after all others."""
    familiar, kinds = ArgumentGuards[int](), [torch.zeros(n) for n in range(12)]
    for size, value in enumerate(kinds):
        assert familiar.find([value], OPTIONS) is None
        familiar.learn([value], OPTIONS, size)
        assert [familiar.find([v], OPTIONS) for v in kinds[: size + 1]] == list(range(size + 1))


def test_no_argument_is_held() -> None:
    value, familiar = torch.zeros(3), ArgumentGuards[int]()
    familiar.learn([value], OPTIONS, 1)
    assert familiar.find([value], OPTIONS) == 1
    held = weakref.ref(value)
    del value
    assert held() is None and familiar.find([torch.zeros(3)], OPTIONS) == 1
