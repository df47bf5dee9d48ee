"""A GPT-2 of transformers, planned for two hosts of two workers: `python examples/auto/gpt2.py`."""

from __future__ import annotations

import torch
from common import plan_and_train, words
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    config = GPT2Config(
        n_layer=6, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
    plan_and_train(lambda: GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, words())


if __name__ == "__main__":
    main()
