"""A Mixtral of sixteen experts, planned for two hosts of two workers: `python examples/auto/moe.py`."""

from __future__ import annotations

import torch
from common import plan_and_train, words
from transformers import MixtralConfig, MixtralForCausalLM


def main() -> None:
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    ids = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
    plan_and_train(lambda: MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}, words())


if __name__ == "__main__":
    main()
