"""Small models of Hugging Face, made from configs: nothing is downloaded. Each with arguments, and how they are cut."""

# ruff: noqa: E501  # rows of tables

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf


class Example(NamedTuple):
    """A model, the arguments of a training step, and a plan."""

    model: torch.nn.Module
    arguments: dict[str, Any]
    plan: Any


_VOCABULARY, _BATCH, _ROWS = 64, 4, 12
_SMALL = dict(
    vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def _ids(rows: int = _ROWS) -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (_BATCH, rows), generator=torch.Generator().manual_seed(5))


def _language(config: Any, name: str, plan: Any = "hf", **more: Any) -> Example:
    model = getattr(hf, name)(config)
    return Example(model, {"input_ids": _ids(), "labels": _ids(), **more}, plan)


def _decoder(family: str, plan: Any = "hf", **more: Any) -> Callable[[], Example]:
    """A model with a causal language model's head, of a family whose config has the usual names."""

    def make() -> Example:
        config = getattr(hf, f"{family}Config")(**(_SMALL | more))
        return _language(config, f"{family}ForCausalLM", plan)

    return make


def _gpt2(dropout: float) -> Callable[[], Example]:
    def make() -> Example:
        config = hf.GPT2Config(
            vocab_size=_VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
        )  # fmt: skip
        plan = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "h.*.attn.c_proj": "rowwise"}
        return _language(config, "GPT2LMHeadModel", plan)

    return make


def _deepseek() -> Example:
    config = hf.DeepseekV3Config(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        max_position_embeddings=64,
    )  # fmt: skip
    return _language(config, "DeepseekV3ForCausalLM")


def _bert() -> Example:
    config = hf.BertConfig(
        vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    heads = {f"attention.self.{name}": "colwise" for name in ("query", "key", "value")}
    plan = {
        **heads,
        "attention.output.dense": "rowwise",
        "intermediate.dense": "colwise",
        "layer.*.output.dense": "rowwise",
    }
    return _language(config, "BertForMaskedLM", plan, attention_mask=_padding())


def _padding() -> torch.Tensor:
    """A mask of which two rows end early."""
    mask = torch.ones(_BATCH, _ROWS, dtype=torch.long)
    mask[0, 7:] = 0
    mask[2, 10:] = 0
    return mask


def _t5() -> Example:
    config = hf.T5Config(
        vocab_size=_VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    plan = {
        **{name: "colwise" for name in ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "DenseReluDense.wi")},
        "SelfAttention.o": "rowwise", "DenseReluDense.wo": "rowwise",
    }  # fmt: skip
    return _language(config, "T5ForConditionalGeneration", plan)


def _vit() -> Example:
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    pixels = torch.randn(_BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    labels = torch.tensor([0, 3, 5, 7])
    plan = {"layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"}
    return Example(hf.ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}, plan)


def _whisper() -> Example:
    config = hf.WhisperConfig(
        vocab_size=_VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(_BATCH, 8, 32, generator=torch.Generator().manual_seed(6))
    plan = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    return Example(hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": _ids()}, plan)


def _mamba2() -> Example:
    config = hf.Mamba2Config(
        vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1,
        chunk_size=4, expand=2,
    )  # fmt: skip
    return _language(config, "Mamba2ForCausalLM", {"mixer.out_proj": "rowwise"})


MODELS: dict[str, Callable[[], Example]] = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=4),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gpt2": _gpt2(0.0),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4),
    "phi": _decoder("Phi", resid_pdrop=0.0),
    "phi3": _decoder("Phi3"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen3_moe": _decoder("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "deepseek_v3": _deepseek,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "mamba2": _mamba2,
}


def _gemma3() -> Example:
    config = hf.Gemma3TextConfig(**(_SMALL | {"head_dim": 8, "sliding_window": 4}))
    return _language(config, "Gemma3ForCausalLM")


MODELS["gemma3"] = _gemma3
