"""Models from a Hugging Face ``config.json``: one function for each family, checked against ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_topo.errors import TopologyError, abridged
from ds_topo.planner.layers import Attention, Block, Experts, FeedForward, Linear, Split, dense_attention
from ds_topo.planner.model import Model

Config = Mapping[str, Any]


def read_model(path: str | Path) -> Model:
    """The model that a ``config.json`` (or the folder that holds one) describes.

    Raises:
        TopologyError: no such file, no JSON, a family that is not known, a number that is missing.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"config {str(path)!r} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"config {str(path)!r} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise TopologyError(f"config {str(path)!r} is not a JSON object")
    return model_from_config(config, name=str(config.get("_name_or_path") or path.parent.name))


def model_from_config(config: Config, name: str = "") -> Model:
    """The model of a loaded ``config.json``.

    >>> model_from_config({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
    ...                    "n_positions": 1024}).parameters
    124439808

    Raises:
        TopologyError: a family that is not known, a number that is missing or does not fit the others.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise TopologyError(
            f"model_type {family!r} is not a family that the planner knows ({known}): give its numbers by hand with "
            "--layers --hidden --heads --kv-heads --ffn --vocab --sequence (and --experts --top-k)"
        )
    return FAMILIES[family](_Numbers(config), name or family)


class _Numbers:
    """A config whose numbers are checked when they are read."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __getitem__(self, key: str) -> int:
        return self._checked(key, least=1)

    def get(self, key: str, default: int) -> int:
        """A number from 1 on, if it is there."""
        return default if self._config.get(key) is None else self[key]

    def count(self, key: str) -> int:
        """A number that may be 0, as it is where it is not there."""
        return 0 if self._config.get(key) is None else self._checked(key, least=0)

    def first_count(self, *keys: str) -> int:
        """The first of several names that is there; it may be 0."""
        return self._checked(next((key for key in keys if self._config.get(key) is not None), keys[0]), least=0)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._config.get(key)
        return default if value is None else bool(value)

    def numbers(self, key: str) -> list[int]:
        """A list of whole numbers, empty where it is not there."""
        values = self._config.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(f"{key!r} is {abridged(values)}; a list of whole numbers must be there")
        return values

    def error(self, text: str) -> TopologyError:
        """What is wrong with the config."""
        return TopologyError(f"config of family {self._config.get('model_type')!r}: {text}")

    def _checked(self, key: str, least: int) -> int:
        value = self._config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            found = "is missing" if value is None else f"is {abridged(value)}"
            raise self.error(f"{key!r} {found}; a whole number from {least} on must be there")
        return value


def _gpt2(config: _Numbers, name: str) -> Model:
    hidden, heads = config["n_embd"], config["n_head"]
    _check_heads(hidden, heads)
    attention = dense_attention(hidden, heads, heads, hidden // heads, bias_in=True, bias_out=True, rotary=False)
    mlp = FeedForward(hidden, config.get("n_inner", 4 * hidden), gated=False, bias=True)
    return Model(
        name=name,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        sequence=config["n_positions"],
        blocks=(Block(hidden, attention, mlp, 4 * hidden),) * config["n_layer"],
        positions=config["n_positions"],
        final_norm_parameters=2 * hidden,
        tied=config.flag("tie_word_embeddings", True),
        dropout=True,
    )


def _llama(config: _Numbers, name: str) -> Model:
    return _rotary(config, name, bias_in=config.flag("attention_bias"), bias_out=config.flag("attention_bias"))


def _mistral(config: _Numbers, name: str) -> Model:
    return _rotary(config, name)


def _mixtral(config: _Numbers, name: str) -> Model:
    hidden, count = config["hidden_size"], config["num_local_experts"]
    expert = FeedForward(hidden, config["intermediate_size"], gated=True)
    experts = Experts(count, _top_k(config, count), expert, hidden * count)
    return _rotary(config, name, experts=lambda layer: experts)


def _qwen2(config: _Numbers, name: str) -> Model:
    return _rotary(config, name, bias_in=True)


def _qwen2_moe(config: _Numbers, name: str) -> Model:
    hidden = config["hidden_size"]
    shared = FeedForward(hidden, config["shared_expert_intermediate_size"], gated=True)
    # the shared expert's output has a gate of its own: h weights
    bias_in = config.flag("qkv_bias", True)
    return _rotary(config, name, bias_in=bias_in, experts=_sparse_steps(config, shared, hidden))


def _qwen3(config: _Numbers, name: str) -> Model:
    bias = config.flag("attention_bias")
    return _rotary(config, name, bias_in=bias, bias_out=bias, head_norms=True)


def _qwen3_moe(config: _Numbers, name: str) -> Model:
    bias = config.flag("attention_bias")
    experts = _sparse_steps(config, None, 0)
    return _rotary(config, name, bias_in=bias, bias_out=bias, head_norms=True, experts=experts)


def _deepseek(config: _Numbers, name: str) -> Model:
    """DeepSeek-V2 and V3: latent attention (arXiv:2405.04434), shared experts, dense first layers.

    The layers for predicting further tokens of V3 (``num_nextn_predict_layers``) are not part of ``transformers``'
    model and not counted; nor is the router's correction bias, which is no parameter there.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    kv_rank, query_rank = config["kv_lora_rank"], config.count("q_lora_rank")
    bias = config.flag("attention_bias")
    queries = heads * (nope + rope)
    linears = [Linear(hidden, queries, False, Split.COLUMN)]
    if query_rank:
        linears = [Linear(hidden, query_rank, bias), Linear(query_rank, queries, False, Split.COLUMN)]
    linears += [
        Linear(hidden, kv_rank + rope, bias),
        Linear(kv_rank, heads * (nope + value), False, Split.COLUMN),
        Linear(heads * value, hidden, bias, Split.ROW),
    ]
    attention = Attention(heads, heads, nope + rope, value, tuple(linears), query_rank + kv_rank)
    count = config.count("n_routed_experts")
    width = config["moe_intermediate_size"] if count else 0
    shared = config.count("n_shared_experts")
    sparse = Experts(
        count=count,
        top_k=_top_k(config, count) if count else 0,
        expert=FeedForward(hidden, width, gated=True),
        router_parameters=hidden * count,
        shared=FeedForward(hidden, shared * width, gated=True) if shared else None,
    )
    dense = FeedForward(hidden, config["intermediate_size"], gated=True, bias=config.flag("mlp_bias"))
    first_sparse = config.count("first_k_dense_replace") if count else config["num_hidden_layers"]
    every = config.get("moe_layer_freq", 1)
    return _assemble(
        config,
        name,
        attention,
        lambda layer: sparse if layer >= first_sparse and layer % every == 0 else dense,
    )


FAMILIES: dict[str, Callable[[_Numbers, str], Model]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""``model_type`` of a ``config.json`` -> what reads it."""


def _rotary(
    config: _Numbers,
    name: str,
    *,
    bias_in: bool = False,
    bias_out: bool = False,
    head_norms: bool = False,
    experts: Callable[[int], Experts | None] = lambda layer: None,
) -> Model:
    """Llama's kin: RMSNorm, rotary positions, grouped queries, SwiGLU."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(f"{kv_heads} key-value heads must divide the {heads} attention heads")
    width = config.get("head_dim", 0)
    if not width:
        _check_heads(hidden, heads)
        width = hidden // heads
    norms = 2 * width if head_norms else 0
    attention = dense_attention(
        hidden, heads, kv_heads, width, bias_in=bias_in, bias_out=bias_out, norm_parameters=norms
    )
    dense = FeedForward(hidden, config["intermediate_size"], gated=True, bias=config.flag("mlp_bias"))
    return _assemble(config, name, attention, lambda layer: experts(layer) or dense)


def _assemble(config: _Numbers, name: str, attention: Attention, mlp: Callable[[int], FeedForward | Experts]) -> Model:
    hidden = config["hidden_size"]
    return Model(
        name=name,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        sequence=config["max_position_embeddings"],
        blocks=tuple(Block(hidden, attention, mlp(layer), 2 * hidden) for layer in range(config["num_hidden_layers"])),
        final_norm_parameters=hidden,
        tied=config.flag("tie_word_embeddings"),
    )


def _sparse_steps(config: _Numbers, shared: FeedForward | None, shared_gate: int) -> Callable[[int], Experts | None]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer has experts, but those in ``mlp_only_layers``."""
    hidden, count = config["hidden_size"], config.first_count("num_experts", "num_local_experts")
    if not count:
        return lambda layer: None
    expert = FeedForward(hidden, config["moe_intermediate_size"], gated=True)
    experts = Experts(count, _top_k(config, count), expert, hidden * count + shared_gate, shared)
    dense_layers, step = set(config.numbers("mlp_only_layers")), config.get("decoder_sparse_step", 1)

    def of_layer(layer: int) -> Experts | None:
        return experts if layer not in dense_layers and (layer + 1) % step == 0 else None

    return of_layer


def _top_k(config: _Numbers, count: int) -> int:
    top_k = config["num_experts_per_tok"]
    if top_k > count:
        raise config.error(f"'num_experts_per_tok' is {top_k}, more than the {count} experts")
    return top_k


def _check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise TopologyError(f"config: {heads} attention heads must divide the hidden size {hidden}")
