"""Test exact numbers of parameters, and floating-point operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_topo.errors import TopologyError
from ds_topo.plan.model import PRESETS, Block, FeedForward, Model, model_from_config, read_model, transformer
from tests.plan.published_runs import recomputed_flops_per_token

Config = dict[str, Any]


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, **more: Any) -> Config:
    """Return a config of Llama or a similar model."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        **more,
    }


def gpt2(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
    }


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
DEEPSEEK = {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}

# sums of numel() over the parameters of transformers' models, as their cards and safetensors indexes say
TOTALS: dict[str, tuple[Config, int]] = {
    "gpt2": (gpt2(12, 768, 12), 124_439_808),
    "gpt2-medium": (gpt2(24, 1024, 16), 354_823_168),
    "gpt2-large": (gpt2(36, 1280, 20), 774_030_080),
    "gpt2-xl": (gpt2(48, 1600, 25), 1_557_611_200),
    "llama-2-7b": (llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "llama-2-13b": (llama(40, 5120, 40, 40, 13824, 32000), 13_015_864_320),
    "llama-2-70b": (llama(80, 8192, 64, 8, 28672, 32000), 68_976_648_192),
    "mistral-7b": (llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral"), 7_241_732_096),
    "mixtral-8x22b": (llama(56, 6144, 48, 8, 16384, 32768, **MIXTRAL), 140_630_071_296),
    "qwen2-7b": (llama(28, 3584, 28, 4, 18944, 152064, model_type="qwen2"), 7_615_616_512),
    "qwen2.5-0.5b": (llama(24, 896, 14, 2, 4864, 151936, model_type="qwen2", tie_word_embeddings=True), 494_032_768),
    "qwen1.5-moe-a2.7b": (
        llama(
            24,
            2048,
            16,
            16,
            5632,
            151936,
            model_type="qwen2_moe",
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    "qwen3-0.6b": (
        llama(28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "deepseek-v2-lite": (
        llama(
            27,
            2048,
            16,
            16,
            10944,
            102400,
            **{**DEEPSEEK, "model_type": "deepseek_v2"},
            n_routed_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_shared_experts=2,
        ),
        15_706_484_224,
    ),
}


# totals of the safetensors files; DeepSeek's have 256 more in each of 58 layers, the router's correction bias
PRESET_TOTALS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_of_configs_match_published_totals(name: str) -> None:
    config, total = TOTALS[name]
    assert model_from_config(config).parameters == total


def test_parameters_of_presets_match_published_totals() -> None:
    assert {name: read_model(name).parameters for name in PRESETS} == PRESET_TOTALS


def test_presets_have_the_keys_and_sizes_of_transformers() -> None:
    """Each key of a preset is one of the family's config, and transformers' own model has as many parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, preset in PRESETS.items():
        config = AutoConfig.for_model(**preset)
        assert [key for key in preset if not hasattr(config, key)] == []
        if "deepseek" not in name:
            with torch.device("meta"):
                assert count(AutoModelForCausalLM.from_config(config)) == PRESET_TOTALS[name], name


@pytest.mark.parametrize("name", ["meta-llama/Meta-Llama-3-70B", "Llama-3-70b", "llama-3-70b"])
def test_presets_are_known_by_names_of_hugging_face(name: str) -> None:
    model = read_model(name)
    assert (model.name, model.sequence, model.layers) == ("llama-3-70b", 8192, 80)


def test_a_folder_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-3-70b").mkdir()
    Path("llama-3-70b/config.json").write_text(json.dumps(llama(2, 64, 4, 4, 128, 96)))
    assert read_model("llama-3-70b").layers == 2


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"known model: did you mean llama-3.1-405b\? Give .* deepseek-v3"):
        read_model("llama-3-405b")
    with pytest.raises(TopologyError, match="is neither a file nor a known model"):
        read_model(tmp_path / "llama-3-70b")


def test_active_parameters_leave_out_idle_experts() -> None:
    assert read_model("mixtral-8x7b").active_parameters == 12_879_925_248


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@given(st.sampled_from([1, 2, 4]), st.booleans())
def test_tensor_parallel_ranks_together_hold_every_parameter(tensor: int, gated: bool) -> None:
    model = transformer(layers=2, hidden=64, heads=4, vocabulary=96, sequence=16, gated=gated)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, FeedForward)
    whole = (*block.attention.linears, *block.mlp.linears)
    weights = sum(linear.inputs * linear.outputs for linear in whole)
    biases = block.parameters() - weights
    assert weights + biases <= tensor * block.parameters(tensor) <= weights + tensor * biases


@given(st.integers(1, 128), st.integers(1, 64), st.integers(1, 16), st.integers(1, 8192), st.integers(1, 100_000))
def test_flops_match_narayanan_et_al(layers: int, width: int, heads: int, sequence: int, vocabulary: int) -> None:
    """The SC 2021 paper's equation 3 holds, with recomputation: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    hidden = width * heads
    model = transformer(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, sequence=sequence)
    blocks = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden))
    assert model.flops_per_token(sequence, causal=False) == pytest.approx(blocks + 6 * hidden * vocabulary)
    formula = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    assert recomputed_flops_per_token(model, sequence) == pytest.approx(formula)


@pytest.mark.parametrize(("config", "tokens", "tflops"), [("llama-3-8b", 14451, 744), ("llama-3.1-405b", 292, 737)])
def test_flops_match_published_throughputs(config: str, tokens: int, tflops: int) -> None:
    """Megatron-Bridge's TFLOP/s per GPU count half of attention, for a causal mask."""
    assert tokens * read_model(config).flops_per_token(8192) / 1e12 == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 65}, "--heads 4 must divide --hidden 65"),
        ({"kv_heads": 3}, "--kv-heads 3 must divide --heads 4"),
        ({"layers": 0}, "--layers 0: a model needs at least 1"),
        ({"experts": 4}, "--experts 4 --top-k 0: give both"),
        ({"experts": 2, "top_k": 3}, "1 <= top-k <= experts"),
    ],
)
def test_transformer_refuses_contradicting_numbers(change: dict[str, int], text: str) -> None:
    numbers = {"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 96, "sequence": 16} | change
    with pytest.raises(TopologyError, match=text.replace("(", r"\(")):
        transformer(**numbers)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "bert"}, "'bert' is not a family .*give its numbers by hand with --layers --hidden"),
        ({}, "None is not a family"),
        (llama(2, 64, 4, 4, 128, 96, hidden_size=None), "'hidden_size' is missing"),
        (llama(2, 64, 4, 4, 128, 96, vocab_size="many"), "'vocab_size' is 'many'"),
        (llama(2, 64, 5, 5, 128, 96), "5 attention heads must divide the hidden size 64"),
        (llama(2, 64, 4, 3, 128, 96), "3 key-value heads must divide the 4 attention heads"),
        (llama(2, 64, 4, 3, 128, 96, head_dim=16), "3 key-value heads must divide the 4 attention heads"),
        (llama(2, 64, 4, 4, 128, 96, model_type=["llama"]), r"\['llama'\] is not a family"),
        *(
            (llama(2, 64, 4, 4, 128, 96, **{"head_dim": 16, key: 0}), f"'{key}' is 0; a whole number from 1 on")
            for key in llama(2, 64, 4, 4, 128, 96)
            if key != "model_type"
        ),
        (llama(2, 64, 4, 4, 128, 96, **MIXTRAL | {"num_local_experts": 0}), "'num_local_experts' is 0"),
        (llama(2, 64, 4, 4, 128, 96, **MIXTRAL | {"num_experts_per_tok": 0}), "'num_experts_per_tok' is 0"),
        (llama(2, 64, 4, 4, 128, 96, **MIXTRAL | {"num_experts_per_tok": 9}), "is 9, more than the 8 experts"),
        (llama(2, 64, 4, 4, 128, 96, **QWEN3_MOE | {"decoder_sparse_step": 0}), "'decoder_sparse_step' is 0"),
        (llama(2, 64, 4, 4, 128, 96, **QWEN3_MOE | {"mlp_only_layers": "abc"}), "'mlp_only_layers' is 'abc'; a list"),
        (llama(2, 64, 4, 4, 128, 96, **QWEN3_MOE | {"mlp_only_layers": ["1"]}), "a list of whole numbers must be"),
        (llama(2, 64, 4, 4, 128, 96, **QWEN3_MOE | {"num_experts": None}), "'num_experts' is missing"),
        (
            llama(2, 64, 4, 4, 128, 96, **DEEPSEEK, model_type="deepseek_v2", n_routed_experts=4),
            "'moe_intermediate_size' is missing",
        ),
    ],
)
def test_model_from_config_refuses_bad_configs(config: Config, text: str) -> None:
    with pytest.raises(TopologyError, match=text):
        model_from_config(config)


def test_model_by_hand_equals_model_by_config() -> None:
    by_hand: Model = transformer(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192
    )
    by_config = read_model("llama-3-8b")
    assert (by_hand.parameters, by_hand.blocks) == (by_config.parameters, by_config.blocks)
