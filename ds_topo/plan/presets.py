"""Know the configs of public models by name, for ``ds-topo plan --model llama-3-70b``.

The values are those of each model's public ``config.json``; keys that the planner does not read are left out. A test
compares the numbers of parameters with the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, positions: int, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


_LLAMA_8B, _LLAMA_70B = (32, 4096, 32, 8, 14336, 128256), (80, 8192, 64, 8, 28672, 128256)
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _config(*_LLAMA_8B, 8192),
    "llama-3-70b": _config(*_LLAMA_70B, 8192),
    "llama-3.1-8b": _config(*_LLAMA_8B, 131072),
    "llama-3.1-70b": _config(*_LLAMA_70B, 131072),
    "llama-3.1-405b": _config(126, 16384, 128, 8, 53248, 128256, 131072),
    "mixtral-8x7b": _config(32, 4096, 32, 8, 14336, 32000, 32768, **_MIXTRAL),
    "qwen3-8b": _config(36, 4096, 32, 8, 12288, 151936, 40960, **_QWEN3),
    "qwen3-14b": _config(40, 5120, 40, 8, 17408, 151936, 40960, **_QWEN3),
    "qwen3-32b": _config(64, 5120, 64, 8, 25600, 151936, 40960, **_QWEN3),
    "qwen3-30b-a3b": _config(48, 2048, 32, 4, 6144, 151936, 40960, **_QWEN3_MOE, moe_intermediate_size=768),
    "qwen3-235b-a22b": _config(94, 4096, 64, 4, 12288, 151936, 40960, **_QWEN3_MOE, moe_intermediate_size=1536),
    "deepseek-v3": _config(61, 7168, 128, 128, 18432, 129280, 163840, **_DEEPSEEK_V3),
}
"""The configs by the lower-case name of the model, as in the last part of its name at Hugging Face."""
