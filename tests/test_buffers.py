"""Buffers that are used again: never while anyone holds them, always once no one does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.runtime import buffers, scratch
from meshfuse.runtime.buffers import Plain, Pooled
from meshfuse.runtime.scratch import Scratch

HOLDERS: dict[str, Any] = {
    "itself": lambda t: t,
    "a view": lambda t: t[1:],
    "another shape": lambda t: t.view(-1),
    "a transpose": lambda t: t.T,
    "detached": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
    "an array's part": lambda t: t.numpy()[0, 1:],
    "its storage": lambda t: t.untyped_storage(),
    "by DLPack": lambda t: np.from_dlpack(t),
    "saved for a backward": lambda t: torch.ones(3, 4, requires_grad=True) * t,
}


def number(holder: Any) -> float:
    """Some element that a holder sees."""
    if isinstance(holder, torch.UntypedStorage):
        return torch.empty(0).set_(holder)[-1].item()
    if isinstance(holder, torch.Tensor) and holder.requires_grad:
        return holder.detach().max().item()
    return float(holder.reshape(-1)[-1])


@pytest.mark.parametrize("how", HOLDERS)
def test_what_someone_holds_is_not_handed_out(how):
    pool = Pooled()
    first = pool.empty((3, 4), torch.float32).fill_(7)
    place = first.data_ptr()
    holder = HOLDERS[how](first)
    del first
    others = [pool.empty((3, 4), torch.float32).fill_(8) for _ in range(3)]
    assert place not in [t.data_ptr() for t in others] and number(holder) == 7
    del others, holder
    assert place in [t.data_ptr() for t in [pool.empty((3, 4), torch.float32) for _ in range(4)]]


TAKEN: dict[str, Any] = {
    "freed": lambda t: t.untyped_storage().resize_(0),
    "made larger": lambda t: t.resize_(100, 100),
    "made smaller": lambda t: t.untyped_storage().resize_(4),
    "shared with other processes": lambda t: t.share_memory_(),
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("held", [True, False])
def test_memory_that_its_holder_changed_is_not_handed_out(how, held):
    """It may be gone, or be another process', which no reference count shows: the buffer is as if never made."""
    pool = Pooled()
    kept = [pool.empty((3, 4), torch.float32) for _ in range(3)]
    TAKEN[how](kept[1])
    place = kept[1].data_ptr()
    kept = kept[1:2] if held else []
    for _ in range(2):
        others = [pool.empty((3, 4), torch.float32).fill_(8) for _ in range(4)]
        assert all(t.untyped_storage().nbytes() == 48 and not t.is_shared() for t in others)
        assert len({t.data_ptr() for t in others} - {place}) == 4 and all(t.sum() == 96 for t in others)
        del others
    assert sum(map(len, pool._slots.values())) == 4


def test_what_another_process_was_sent_stays_as_it_was():
    """By torch.multiprocessing's queues, whose readers have the sender's memory."""
    pool, queue = Pooled(), torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(pool.full((3, 4), 7, torch.float32))
    pool.full((3, 4), 8, torch.float32)
    assert queue.get().tolist() == [[7] * 4] * 3


STEPS = st.lists(st.tuples(st.sampled_from([(4,), (2, 3), (0,), ()]), st.integers(0, 5), st.booleans()), max_size=40)


@given(STEPS)
def test_live_buffers_share_no_memory(steps):
    """Any order of taking and giving back; each buffer keeps the number that was written into it."""
    pool, live = Pooled(), {}
    for number_, (shape, place, drop) in enumerate(steps):
        if drop:
            live.pop(place, None)
        else:
            live[place] = (number_, pool.empty(shape, torch.float32).fill_(number_))
        assert all((t == n).all() for n, t in live.values())
    places = [t.data_ptr() for _, t in live.values() if t.numel()]
    assert len(set(places)) == len(places)


def test_a_steady_state_makes_nothing():
    pool = Pooled()

    def step(kept: list[torch.Tensor]) -> None:
        a = pool.empty((5, 2), torch.float32).fill_(1)
        b = pool.clone(a.T)
        del a
        kept.append(pool.cat([b, pool.full((3,), 2, torch.float32)]))

    step([])
    made = pool.made
    for _ in range(5):
        step([])
    assert pool.made == made
    kept: list[torch.Tensor] = []
    for _ in range(5):
        step(kept)
    # One output more is held at each step.
    assert pool.made == made + 4 and all(t.tolist() == [1] * 10 + [2] * 3 for t in kept)


def test_wishes_of_a_user_do_not_stay():
    pool = Pooled()
    mine = pool.empty((2,), torch.float32)
    place = mine.data_ptr()
    mine.requires_grad_().note = "mine"  # type: ignore[attr-defined]
    del mine
    again = pool.empty((2,), torch.float32)
    assert again.data_ptr() == place and not again.requires_grad and not hasattr(again, "note")


MODES = {"plain": torch.enable_grad, "inference": torch.inference_mode, "without gradients": torch.no_grad}


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
def test_a_buffer_of_one_mode_serves_another(first, second):
    pool = Pooled()
    with MODES[first]():
        mine = pool.full((2, 3), 1, torch.float32)
        place = mine.data_ptr()
        del mine
    with MODES[second]():
        again = pool.clone(torch.ones(2, 3) * 5)
        assert again.data_ptr() == place and again.sum() == 30
        pool.combine(torch.ones(2, 3), again, "sum").mul_(2)


def test_the_default_device_is_not_used():
    pool = Pooled()
    with torch.device("meta"):
        made = pool.empty((2,), torch.float32)
    assert made.device.type == "cpu"


def test_threads_have_memory_of_their_own():
    pool, found = Pooled(), []

    def work() -> None:
        for _ in range(200):
            a = pool.empty((64,), torch.float32).fill_(threading.get_ident() % 1000)
            found.append(bool((a == threading.get_ident() % 1000).all()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found) and len(found) == 800


def test_unused_buffers_are_dropped(monkeypatch):
    """A minute after its last use; what someone holds is his then."""
    now = [0.0]
    monkeypatch.setattr(buffers.time, "monotonic", lambda: now[0])
    pool = Pooled()
    held = pool.empty((7,), torch.uint8).fill_(7)
    crowd = [pool.empty((3,), torch.uint8) for _ in range(50)]
    del crowd
    for _ in range(4 * buffers._INTERVAL):
        now[0] += 0.1
        pool.empty((3,), torch.uint8)
    assert sum(map(len, pool._slots.values())) == 1 and pool.made == 51
    assert held.tolist() == [7] * 7 and pool.empty((7,), torch.uint8).data_ptr() != held.data_ptr()


def test_a_buffer_that_came_back_is_the_next():
    """However many others are free: it is still in the caches."""
    pool = Pooled()
    crowd = [pool.empty((3,), torch.float32) for _ in range(20)]
    del crowd
    places = {pool.empty((3,), torch.float32).data_ptr() for _ in range(20)}
    assert len(places) == 1


def pooled_bytes(pool: Any) -> int:
    return sum(slot.data.nbytes for slots in pool._slots.values() for slot in slots)


def scratch_bytes(pool: Any) -> int:
    return sum(buffer.nbytes for buffers_ in pool._free.values() for buffer in buffers_)


def taken_and_given(pool: Scratch, count: int) -> None:
    pool.give(*[pool.take(count, torch.uint8) for _ in range(2)])


def held_and_dropped(pool: Pooled, count: int) -> None:
    _ = [pool.empty((count,), torch.uint8) for _ in range(2)]


POOLS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], Callable[[Any], int]]] = {
    "of programs": (Pooled, held_and_dropped, pooled_bytes), "of calls": (Scratch, taken_and_given, scratch_bytes),
}  # fmt: skip


@pytest.mark.parametrize("which", POOLS)
def test_sizes_that_are_always_new_do_not_pile_up(monkeypatch, which):
    monkeypatch.setattr(scratch, "KEPT", 10_000)
    make, use, nbytes = POOLS[which]
    pool = make()
    for count in range(1000, 1200):
        scratch.CLOCK.now += 1
        use(pool, count)
        assert nbytes(pool) <= 10_000 + 2 * count * (scratch.RECENT + 2)


@pytest.mark.parametrize("which", POOLS)
def test_sizes_that_come_again_are_kept_however_large(monkeypatch, which):
    """Some of them at every few executions only, beside those that others ask for."""
    monkeypatch.setattr(scratch, "KEPT", 10_000)
    make, use, _ = POOLS[which]
    pool, empty, made = make(), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *args, **more: made.append(args) or empty(*args, **more))
    new = (lambda: pool.made) if which == "of programs" else (lambda: len(made))
    for step in range(40):
        if step == 2 * (scratch.RECENT - 2):
            before = new()
        scratch.CLOCK.now += 1
        for count in (4000, 5000, 6000 + step % (scratch.RECENT - 2)):
            use(pool, count)
    assert new() == before


REDUCTIONS = list(itertools.product(["sum", "prod", "max", "min"], [torch.float32, torch.int64, torch.bool]))


@pytest.mark.parametrize(("reduce", "dtype"), REDUCTIONS)
def test_pooled_memory_computes_what_plain_memory_does(reduce, dtype):
    terms = (torch.randn(3, 4, 5) * 3).to(dtype)
    for pooled, plain in itertools.product([Pooled()], [Plain(torch.device("cpu"))]):
        for _ in range(2):
            assert torch.equal(pooled.fold(terms, reduce), plain.fold(terms, reduce))
            one, other = terms[0].T, terms[1].T
            assert torch.equal(pooled.combine(one, other, reduce), plain.combine(one, other, reduce))
            assert torch.equal(pooled.cat([one, other, terms[0, :0]]), plain.cat([one, other, terms[0, :0]]))
            assert torch.equal(pooled.dense(one), plain.dense(one)) and pooled.dense(one).is_contiguous()
            assert torch.equal(pooled.full((2,), 1, dtype), plain.full((2,), 1, dtype))
    assert pooled.dense(terms) is terms
