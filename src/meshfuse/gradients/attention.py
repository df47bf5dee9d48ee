"""The VJP of scaled dot product attention."""

from __future__ import annotations

from typing import Any

from ..errors import user_error
from .context import Backward, Vjp


def _attention(b: Backward) -> dict[str, Any]:
    """By `sdpfa_bwd`, from what the forward pass saved."""
    _check(b)
    out, lse, seed, offset = b.results
    qkv = (b["query"], b["key"], b["value"])
    p, causal = b["dropout_p"], b["is_causal"]
    options = (0.0 if p is None else p, False if causal is None else causal)
    made = b.ops.sdpfa_bwd(b.grads[0], *qkv, out, lse, *options, seed, offset, b["scale"])
    return dict(zip(("query", "key", "value"), made, strict=True))


def _check(b: Backward) -> None:
    for name in ("bias", "mask"):
        if b[name] is not None:
            raise user_error(
                f"sdpfa_fwd: no derivative here with a {name}", "", "",
                "Write the attention with matmul and softmax, or pass is_causal.",
            )  # fmt: skip
    if b.grads[1] is not None or b.grads[0] is None:
        raise user_error("sdpfa_fwd: no derivative here of its log-sum-exp", "", "", "Write the scores with matmul.")


SDPFA_FWD: Vjp = _attention
