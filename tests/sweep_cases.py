"""Every causal language model of transformers, built tiny in float64 from its config, and rollouts to measure on it.

Nothing is read but the configs' defaults: a size is shrunk by its name, and one layer is kept of every kind. So a new
type of transformers is tested as soon as it is installed; `SETTINGS` says what a type needs beside that.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODEL_NAMES

SIDE = 8
"""Heads, experts, groups, tokens and rollouts of the largest batch: every axis that can be mistaken for another."""

VOCABULARY = 61
# `index_topk` is longer than a rollout: the scores of sparse attention are ReLUs, so many are exactly 0, and which of
# them a top-k selects depends on the padding.
SHRUNK: dict[str, Any] = {
    name: value
    for value, names in {
        VOCABULARY: "vocab_size vocab_size_per_layer_input",
        64: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx max_target_positions",
        40: """intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim d_inner dim_ff dff feed_forward_size
            ffn_hidden_size shared_expert_intermediate_size""",
        32: """hidden_size hidden_size_global d_model n_embd dim embedding_size word_embed_proj_dim emb_dim dim_model
            decoder_hidden_size embed_dim lru_width input_embedding_size output_embedding_size embedding_dim
            attention_hidden_size""",
        16: """moe_intermediate_size expert_dim q_lora_rank kv_lora_rank hidden_size_per_layer_input lora_rank
            expert_ffn_hidden_size shared_intermediate_size o_lora_rank moe_shared_expert_intermediate_size
            index_topk""",
        SIDE: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
            num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts
            moe_num_experts head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim kv_channels linear_key_head_dim
            linear_value_head_dim linear_num_key_heads linear_num_value_heads state_size ssm_state_size mamba_d_state
            mamba_num_heads mamba_head_dim mamba_d_head mamba_n_heads n_mamba_heads global_head_dim index_head_dim
            linear_head_dim zero_expert_num""",
        4: """num_key_value_heads n_head_kv num_global_key_value_heads swa_num_key_value_heads chunk_size
            mamba_chunk_size sliding_window window_size index_n_heads o_groups linear_num_heads rotary_dim
            n_group num_expert_group attention_chunk_size""",
        2: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
            num_encoder_layers num_experts_per_tok num_experts_per_token moe_topk top_k num_key_value_groups moe_k""",
        1: "first_k_dense_replace num_dense_layers topk_group moe_layer_start_index num_kv_shared_layers",
    }.items()
    for name in names.split()
}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 100,
    "split_ngram_parts": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        **{f"{part}_config": {"head_dim": 4} for part in ("patcher", "encoder", "decoder", "global")},
    },
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": 4},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mllama": {"pad_token_id": 0, "cross_attention_layers": [1]},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "reformer": {
        "axial_pos_embds": False,  # in training mode, these and chunks accept only certain numbers of tokens
        "attn_layers": ["local", "local"],
        "attention_head_size": 4,
        "local_attn_chunk_length": 16,
    },
    "xglm": {"attention_heads": 8},
    "xlstm": {"num_blocks": 2, "ffn_round_up_to_multiple_of": 8, "hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 5,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 8,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 8,
        "mamba_headdim": 8,
        "kv_channels": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a type needs beside the sizes above."""


def shrunk(config: Any) -> dict[str, Any]:
    """Settings that make a config tiny: the sizes above, one layer of every kind, nested configs likewise."""
    made: dict[str, Any] = {}
    for name, value in config.__dict__.items():
        if isinstance(value, transformers.PreTrainedConfig):
            made[name] = shrunk(value)
        elif name in SHRUNK and isinstance(value, int | None) and value not in (0, False, True):
            made[name] = SHRUNK[name]
        elif name in ("is_decoder", "use_cache"):
            made[name] = name == "is_decoder"
        elif "drop" in name and isinstance(value, float):
            made[name] = 0.0
    if "num_key_value_heads" in made and config.num_key_value_heads == getattr(config, "num_attention_heads", None):
        made["num_key_value_heads"] = made["num_attention_heads"]
    lists = {name: value for name, value in config.__dict__.items() if is_by_layer(config, value)}
    if lists:  # one layer of every combination of kinds
        kinds = list(zip(*lists.values(), strict=True))
        chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        chosen = chosen if len(chosen) > 1 else [0, 1]
        made |= {name: [value[place] for place in chosen] for name, value in lists.items()}
        made["num_hidden_layers"] = len(chosen)
    return made


def is_by_layer(config: Any, value: Any) -> bool:
    """Whether a setting lists a kind for every layer."""
    layers = getattr(config, "num_hidden_layers", None)
    return isinstance(value, list | tuple) and len(value) == layers and all(isinstance(kind, str) for kind in value)


def config_of(model_type: str) -> Any:
    """The tiny config of a type."""
    kind = getattr(transformers, MODEL_NAMES[model_type]).config_class
    settings = shrunk(kind())
    for name, value in SETTINGS.get(model_type, {}).items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return kind(**tokens | settings)


NEEDS_TRAINING = {"reformer"}
"""Types that compute gradients in training mode only."""


def tiny_model(model_type: str) -> Any:
    """A float64 model with random weights; norms, scales and biases moved off their initial values."""
    torch.manual_seed(0)
    made = getattr(transformers, MODEL_NAMES[model_type])(config_of(model_type)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    for module in made.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation_internal"):
            module.config._experts_implementation_internal = "eager"  # the grouped product knows no float64
    return made.train(model_type in NEEDS_TRAINING)


LENGTHS = (8, 6, 8, 5, 7, 8, 4, 7)
PROMPT = 3


def padded_batch(count: int, tokens: int = SIDE, *, padding: str = "right") -> tuple[Tensor, Tensor, Tensor]:
    """Ids, completion and attention mask of the first `count` of eight rollouts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(count, tokens, dtype=torch.long)
    attention, completion = torch.zeros_like(ids), torch.zeros(count, tokens, dtype=torch.bool)
    for row, length in enumerate(LENGTHS[:count]):
        real = slice(tokens - length, tokens) if padding == "left" else slice(0, length)
        ids[row, real] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        attention[row, real] = 1
        completion[row, real.start + PROMPT : real.stop] = True
    return ids, completion, attention


def packed_batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same rollouts in one row: ids, completion mask, and the rollout of every token."""
    ids, completion, attention = padded_batch(count)
    real = attention.bool()
    owners = torch.arange(count)[:, None].expand_as(ids)
    return ids[real][None], completion[real][None], owners[real][None]
