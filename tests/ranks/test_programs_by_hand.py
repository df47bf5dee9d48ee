"""Host programs by hand on real ranks: results, and the error of ranks whose programs differ."""

from __future__ import annotations

from typing import Any

import pytest

from meshfuse.host_programs import HostProgramBuilder, HostPrograms

pytestmark = pytest.mark.ranks


def program(rank: int, factor: int = 2) -> Any:
    """A product over split columns, reduced and scattered while more is computed, then gathered; and a message."""
    import torch

    b = HostProgramBuilder(rank)
    x, w = b.input("x", [4, 3]), b.input("w", [3, 2])
    part = b.reduce_scatter(b.kernel("product", "y = x @ w", "y", x=x, w=w), [0, 1])
    scaled = b.kernel("scaled", f"y = x * {factor}", "y", x=x)
    whole = b.wait(b.all_gather(b.wait(part), [0, 1]))
    if rank == 0:
        b.wait(b.send(scaled, 1))
        return b.program(whole, None)
    return b.program(whole, b.wait(b.recv([4, 3], torch.float32, 0)))


def on_rank_run() -> tuple[bool, bool]:
    import torch

    import meshfuse as mf

    torch.manual_seed(0)
    x, w, rank = torch.randn(4, 6), torch.randn(6, 2), mf.World.current().rank
    programs = HostPrograms(program(r) for r in range(2))
    for _ in range(2):
        whole, sent = programs.execute([x[:, 3 * rank : 3 * rank + 3], w[3 * rank : 3 * rank + 3]])
    assert whole is not None
    torch.testing.assert_close(whole, x @ w)
    if sent is not None:
        torch.testing.assert_close(sent, 2 * x[:, :3])
    return True, sent is not None


def test_two_ranks(ranks2: Any) -> None:
    assert ranks2.run(on_rank_run) == [(True, False), (True, True)]


def on_rank_disagree() -> str:
    """What ranks with other programs are told."""
    import torch

    import meshfuse as mf

    rank = mf.World.current().rank
    programs = HostPrograms(program(r, 2 + rank) for r in range(2))
    with pytest.raises(mf.RankError) as error:
        programs.execute([torch.randn(4, 3), torch.randn(3, 2)])
    return str(error.value)


def test_ranks_with_other_programs(ranks2: Any) -> None:
    for found in ranks2.run(on_rank_disagree):
        assert found.startswith("ranks disagree on the host programs")
        assert "found rank 0 'y = x * 2'; rank 1 'y = x * 3', needed one value on all of them. Write them" in found
