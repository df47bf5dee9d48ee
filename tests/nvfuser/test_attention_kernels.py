"""Attention on a GPU by nvFuser's kernels and by torch's fused ones, forward and backward, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.dtypes import from_torch

pytestmark = pytest.mark.gpu


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of q [2, heads, rows, width] and of k and v [2, shared, columns, width]; what is added to the scores."""

    rows: int = 64
    columns: int = 64
    width: int = 32
    heads: int = 4
    shared: int = 4
    causal: bool = False
    added: str = ""

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        q, k = (2, self.heads, self.rows, self.width), (2, self.shared, self.columns, self.width)
        made = [torch.randn(shape, generator=generator) for shape in (q, k, k)]
        if self.added == "bias":
            made.append(torch.randn(2, self.heads, self.rows, self.columns, generator=generator))
        if self.added == "mask":
            made.append(torch.rand(self.rows, self.columns, generator=generator) < 0.7)
            made[-1][3] = False  # a row that sees nothing
        return [t.cuda() if t.dtype is torch.bool else t.to("cuda", dtype) for t in made]

    def definition(self, dtype: torch.dtype) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            given = [fd.define_tensor(list(t.shape), dtype=from_torch(t.dtype)) for t in self.tensors(dtype)]
            named = {self.added: given[3]} if self.added else {}
            out = fd.ops.sdpfa_fwd(*given[:3], **named, is_causal=self.causal)[0]
            fd.add_output(out)
            for grad in [] if self.added else fd.grad(fd.ops.sum(out * out), given):
                fd.add_output(grad)
        return fd

    def expected(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = (t.double().requires_grad_() for t in tensors[:3])
        wide = [x.repeat_interleave(self.heads // self.shared, 1) for x in (k, v)]
        mask: Any = tensors[3] if self.added else None
        mask = mask.double() if self.added == "bias" else mask
        out = F.scaled_dot_product_attention(q, *wide, attn_mask=mask, is_causal=self.causal)
        if self.added:
            return [out.nan_to_num()]
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v])]


CASES = {
    "plain": Case(), "causal": Case(causal=True), "more columns": Case(columns=80), "odd": Case(63, 49, 20),
    "causal, more rows": Case(rows=80, causal=True), "causal, more columns": Case(columns=80, causal=True),
    "shared heads": Case(shared=2, causal=True), "wide": Case(width=320, causal=True), "bias": Case(added="bias"),
    "odd bias": Case(63, 49, 20, added="bias"), "mask": Case(added="mask"), "odd mask": Case(63, 49, added="mask"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "nvfuser"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, dtype: torch.dtype, backend: str) -> None:
    case, limit = CASES[name], 1e-4 if dtype is torch.float32 else 2e-2
    tensors = case.tensors(dtype)
    found = case.definition(dtype).execute(tensors, backend=backend)
    for place, (a, b) in enumerate(zip(found, case.expected(tensors), strict=True)):
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error < limit, (place, error)
