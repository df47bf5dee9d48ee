"""Every op of the table as a definition of the real nvFuser: it builds, with the types that are inferred."""

from __future__ import annotations

import pytest
from native_calls import differences, make_call, on_one_rank, samples

from meshfuse.backends.nvfuser import build_call
from meshfuse.dtypes import DataType
from meshfuse.ops import OPS
from meshfuse.ops.native import ToTorch
from meshfuse.ops.native_forms import RANDOM

pytestmark = pytest.mark.nvfuser

HALF = {DataType.Half, DataType.BFloat16}
ATTENTION = {"sdpfa_fwd", "sdpfa_bwd"}
# What goes to torch on one rank, by op: a part of the reason.
TO_TORCH = {
    **dict.fromkeys(("uniform", "normal", "rand_like", "randn_like"), RANDOM),
    "embedding_fwd": "max_norm changes the table",
    **dict.fromkeys(ATTENTION, "attention"),
}


def to_torch(name: str, place: int, dtype: DataType | None) -> bool:
    """Whether this sample is one that nvFuser is not asked for."""
    op, sample = OPS[name], OPS[name].samples()[place]
    if name == "embedding_fwd":
        return len(sample.args) > 2
    if name in ATTENTION:
        query, key = (sample.args[op.places[operand]] for operand in ("query", "key"))
        return dtype not in HALF or query.shape[-3] != key.shape[-3]
    return name in TO_TORCH


@pytest.mark.parametrize(("name", "place"), list(samples()))
def test_every_sample_builds(name: str, place: int) -> None:
    op = OPS[name]
    local = on_one_rank(make_call(op, op.samples()[place]))
    if to_torch(name, place, None):
        with pytest.raises(ToTorch, match=TO_TORCH[name]):
            build_call(local)
    else:
        assert not differences(build_call(local))
