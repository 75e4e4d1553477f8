"""Compute the size of a transformer: exact parameters and multiply-adds, of the whole model and of one rank.

``transformer`` builds a model from numbers by hand, ``read_model`` from a Hugging Face ``config.json`` or a name in
``PRESETS``. Shapes: ``h`` hidden width, ``t`` ranks of the model (tensor) axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property, partial
from math import gcd
from pathlib import Path
from typing import Any, TypeAlias

from ds_topo.errors import TopologyError, abridged
from ds_topo.topology.axes import read_json

MOST_LAYERS = 2048
"""More than any model has, and few enough to plan in seconds."""


class Split(Enum):
    """The dimension of a weight that tensor parallelism splits (Shoeybi et al., arXiv:1909.08053)."""

    COLUMN = "outputs"
    ROW = "inputs"
    WHOLE = "nothing: every rank has all of it"


@dataclass(frozen=True)
class Linear:
    """A linear layer, ``[tokens, inputs] -> [tokens, outputs]``.

    >>> [Linear(8, 8, bias=True, split=split).parameters(tensor=2) for split in Split]
    [36, 40, 72]
    """

    inputs: int
    outputs: int
    bias: bool = False
    split: Split = Split.WHOLE

    def parameters(self, tensor: int = 1) -> int:
        """Return the parameters on one of ``tensor`` ranks. Each has the whole bias of a row-parallel layer."""
        bias = self.outputs if self.bias else 0
        if self.split is Split.WHOLE:
            return self.multiplications + bias
        return self.multiplications // tensor + (bias // tensor if self.split is Split.COLUMN else bias)

    def shape(self, tensor: int) -> tuple[int, int]:
        """Return ``(inputs, outputs)`` on one of ``tensor`` ranks."""
        if self.split is Split.COLUMN:
            return self.inputs, self.outputs // tensor
        return (self.inputs // tensor if self.split is Split.ROW else self.inputs), self.outputs

    @property
    def multiplications(self) -> int:
        """The multiply-adds for one token, over all ranks."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Causal self-attention.

    Args:
        heads: heads of the queries; the model axis splits them.
        kv_heads: heads of keys and values (grouped queries, Ainslie et al., arXiv:2305.13245).
        key_width: features of a head's queries and keys.
        value_width: features of a head's values.
        linears: the projections, the output's last.
        norm_parameters: parameters of norms inside (of queries and keys, or of compressed ones), whole on every rank.
        rotary: positions turn queries and keys (Su et al., arXiv:2104.09864).
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    linears: tuple[Linear, ...]
    norm_parameters: int = 0
    rotary: bool = True

    def input_widths(self, tensor: int) -> tuple[float, float]:
        """Return the features of a token's queries, and of its keys and values, on one of ``tensor`` ranks."""
        key_values = max(self.kv_heads, tensor) / tensor * (self.key_width + self.value_width)
        return self.heads * self.key_width / tensor, key_values


def projections(
    hidden: int, heads: int, kv_heads: int, width: int, *, bias_in: bool, bias_out: bool
) -> tuple[Linear, Linear]:
    """Return one projection for queries, keys and values (three are the same work), and the output's."""
    into = Linear(hidden, (heads + 2 * kv_heads) * width, bias_in, Split.COLUMN)
    return into, Linear(heads * width, hidden, bias_out, Split.ROW)


@dataclass(frozen=True)
class FeedForward:
    """``[tokens, h] -> [tokens, width] -> [tokens, h]``; ``gated``: with two inputs (SwiGLU, arXiv:2002.05202)."""

    hidden: int
    width: int
    gated: bool
    bias: bool = False

    @cached_property
    def linears(self) -> tuple[Linear, Linear]:
        """The linear layer to the inner width (both inputs at once), and the one back."""
        into = Linear(self.hidden, (2 if self.gated else 1) * self.width, self.bias, Split.COLUMN)
        return into, Linear(self.width, self.hidden, self.bias, Split.ROW)

    def parameters(self, tensor: int = 1) -> int:
        """Return the parameters on one of ``tensor`` ranks."""
        return sum(linear.parameters(tensor) for linear in self.linears)


@dataclass(frozen=True)
class Experts:
    """A mixture of ``count`` feed-forward layers. Each token goes through ``top_k`` of them and through ``shared``.

    ``router_parameters`` are whole on every rank.
    """

    count: int
    top_k: int
    expert: FeedForward
    router_parameters: int
    shared: FeedForward | None = None

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that every token goes through: the router, and the shared expert's."""
        hidden = self.expert.hidden
        return (Linear(hidden, self.router_parameters // hidden), *(self.shared.linears if self.shared else ()))


@dataclass(frozen=True)
class Block:
    """One transformer layer: attention, then a feed-forward layer or experts (``mlp``)."""

    hidden: int
    attention: Attention
    mlp: FeedForward | Experts
    norm_parameters: int

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers that every token goes through."""
        return (*self.attention.linears, *self.mlp.linears)

    def parameters(self, tensor: int = 1) -> int:
        """Return the parameters outside experts, on one of ``tensor`` ranks."""
        norms = self.attention.norm_parameters + self.norm_parameters
        return sum(linear.parameters(tensor) for linear in self.linears) + norms

    @cached_property
    def expert_parameters(self) -> int:
        """The parameters of all experts."""
        return self.mlp.count * self.mlp.expert.parameters() if isinstance(self.mlp, Experts) else 0

    def largest_linear(self, tensor: int) -> int:
        """Return the parameters of the largest linear layer on one of ``tensor`` ranks, experts aside."""
        linears = self.attention.linears if isinstance(self.mlp, Experts) else self.linears
        return max(linear.parameters(tensor) for linear in linears)

    @cached_property
    def multiplications(self) -> int:
        """The multiply-adds of one token with the weights that it meets."""
        experts = self.mlp.top_k * self.mlp.expert.linears if isinstance(self.mlp, Experts) else ()
        return sum(linear.multiplications for linear in (*self.linears, *experts))


class End(Enum):
    """An end of a model."""

    EMBEDDING = "the look-up of tokens and positions"
    HEAD = "the last norm, the output layer and the cross entropy"


Piece: TypeAlias = "Block | End"
"""A part of the model whose time and memory are computed: a block, or an end of the model."""


@dataclass(frozen=True)
class Model:
    """A decoder: embedding, blocks, a norm and the output layer.

    Args:
        vocabulary: rows of the embedding.
        sequence: positions of a training sequence unless the job says otherwise.
        positions: rows of a learned position embedding (GPT-2), 0 for rotary ones.
        final_norm_parameters: parameters of the norm after the last block.
        dropout: the layers drop activations in training (GPT-2's generation).
    """

    name: str
    hidden: int
    vocabulary: int
    sequence: int
    blocks: tuple[Block, ...]
    positions: int = 0
    final_norm_parameters: int = 0
    tied: bool = False
    dropout: bool = False

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @cached_property
    def parameters(self) -> int:
        """The exact number of parameters."""
        embedding = (self.vocabulary + self.positions) * self.hidden
        output = 0 if self.tied else self.vocabulary * self.hidden
        blocks = sum(block.parameters() + block.expert_parameters for block in self.blocks)
        return embedding + blocks + self.final_norm_parameters + output

    @cached_property
    def active_parameters(self) -> int:
        """The parameters that one token meets: all but the experts that it is not sent to."""
        mixtures = [block.mlp for block in self.blocks if isinstance(block.mlp, Experts)]
        return self.parameters - sum((mlp.count - mlp.top_k) * mlp.expert.parameters() for mlp in mixtures)

    @cached_property
    def heads(self) -> int:
        """The greatest common divisor of the blocks' heads. The model axis must divide it."""
        return gcd(*(block.attention.heads for block in self.blocks))

    @cached_property
    def split_widths(self) -> frozenset[int]:
        """The widths of feed-forward layers, which tensor parallelism splits."""
        layers = (block.mlp.shared if isinstance(block.mlp, Experts) else block.mlp for block in self.blocks)
        return frozenset(layer.width for layer in layers if layer)

    @cached_property
    def expert_count(self) -> int:
        """The greatest common divisor of the blocks' numbers of experts, 0 without experts."""
        return gcd(*(block.mlp.count for block in self.blocks if isinstance(block.mlp, Experts)))

    def flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """Return the FLOPs of forward and backward for one token: ``6 x multiplications + attention``.

        Backward costs twice as much as forward, which makes ``3 x 2`` operations for every weight that a token meets
        (Narayanan et al., SC 2021, appendix; the embedding's look-up counts nothing). Attention adds
        ``3 x 2 x s x heads x (key width + value width)`` with a full mask, half of it with a causal one.
        """
        weights = sum(block.multiplications for block in self.blocks) + self.hidden * self.vocabulary
        pairs = sum(
            block.attention.heads * (block.attention.key_width + block.attention.value_width) for block in self.blocks
        )
        return 6.0 * weights + 6.0 * sequence * pairs * (0.5 if causal else 1.0)


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    sequence: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    experts: int = 0,
    top_k: int = 0,
    gated: bool | None = None,
    tied: bool | None = None,
    name: str = "",
) -> Model:
    """Return a model from numbers by hand.

    It is a GPT (GPT-2's layers: biases, LayerNorm, GELU, learned positions, tied output) if ``kv_heads`` is missing or
    equal to ``heads`` and ``ffn`` is at least three times ``hidden``. Otherwise it has Llama's layers (no biases,
    RMSNorm, SwiGLU, rotary positions, an output layer of its own). ``gated`` and ``tied`` override this.

    >>> transformer(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024).parameters
    124439808
    >>> llama = transformer(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192)
    >>> llama.parameters
    8030261248
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = 4 * hidden if ffn is None else ffn
    numbers = {"layers": layers, "hidden": hidden, "heads": heads, "kv-heads": kv_heads, "ffn": ffn}
    numbers |= {"vocab": vocabulary, "sequence": sequence}
    for option, value in numbers.items():
        if value < 1:
            raise TopologyError(f"--{option} {value}: a model needs at least 1")
    _check_layers(layers)
    if hidden % heads:
        raise TopologyError(f"--heads {heads} must divide --hidden {hidden}: every head has hidden / heads features")
    if heads % kv_heads:
        raise TopologyError(f"--kv-heads {kv_heads} must divide --heads {heads}: each is shared by heads / kv-heads")
    if not (0 < top_k <= experts or experts == top_k == 0):
        raise TopologyError(f"--experts {experts} --top-k {top_k}: give both, with 1 <= top-k <= experts")
    gpt = not gated if gated is not None else (kv_heads == heads and ffn >= 3 * hidden and not experts)
    dense = FeedForward(hidden, ffn, gated=not gpt, bias=gpt)
    mlp = Experts(experts, top_k, dense, hidden * experts) if experts else dense
    width = hidden // heads
    linears = projections(hidden, heads, kv_heads, width, bias_in=gpt, bias_out=gpt)
    attention = Attention(heads, kv_heads, width, width, linears, rotary=not gpt)
    norm = 2 * hidden if gpt else hidden
    return Model(
        name=name or f"{layers} layers of {hidden}",
        hidden=hidden,
        vocabulary=vocabulary,
        sequence=sequence,
        blocks=(Block(hidden, attention, mlp, 2 * norm),) * layers,
        positions=sequence if gpt else 0,
        final_norm_parameters=norm,
        tied=gpt if tied is None else tied,
        dropout=gpt,
    )


def _check_layers(layers: int) -> None:
    if layers > MOST_LAYERS:
        raise TopologyError(f"{layers} layers: the planner takes at most {MOST_LAYERS}, as it looks at each of them")


def read_model(path: str | Path) -> Model:
    """Return the model that a Hugging Face ``config.json`` (or the folder that holds one) describes, or a known one.

    >>> read_model("meta-llama/Meta-Llama-3-70B").parameters
    70553706496
    """
    path = Path(path)
    name = path.name.lower().removeprefix("meta-")
    if not path.exists() and name in PRESETS and len(path.parts) < 3 and not path.is_absolute():
        return model_from_config(PRESETS[name], name)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        meant = "".join(f"did you mean {near}? " for near in get_close_matches(name, PRESETS, n=1))
        raise TopologyError(
            f"model {str(path)!r} is neither a file nor a known model: {meant}Give the config.json of a downloaded "
            f"model, its folder, or one of {', '.join(PRESETS)}"
        )
    config = read_json(path, "model")
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise TopologyError(f"model {str(path)!r} has no model_type: give the config.json of a model of Hugging Face")
    return model_from_config(config, name=str(config.get("_name_or_path") or path.resolve().parent.name))


def model_from_config(config: Mapping[str, Any], name: str = "") -> Model:
    """Return the model of a loaded ``config.json``. Tests compare the totals with those of ``transformers``.

    >>> model_from_config({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
    ...                    "n_positions": 1024}).parameters
    124439808
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise TopologyError(
            f"model_type {family!r} is not a family that the planner knows ({known}): give its numbers by hand with "
            "--layers --hidden --heads --kv-heads --ffn --vocab --sequence (and --experts --top-k)"
        )
    try:
        return FAMILIES[family](config, name or family)
    except TopologyError as error:
        raise TopologyError(f"config of family {family!r}: {error}") from None


def whole_number(content: Mapping[str, Any], *keys: str, least: int = 1, default: int | None = None) -> int:
    """Return the value of the first of ``keys`` that an object of a JSON file has, or the default if it has none.

    >>> whole_number({"heads": 8, "ffn": None}, "heads"), whole_number({"heads": 8, "ffn": None}, "ffn", default=4)
    (8, 4)
    """
    key = next((key for key in keys if content.get(key) is not None), keys[0])
    value = content.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if value is None else f"is {abridged(value)}"
        raise TopologyError(f"{key!r} {found}; a whole number from {least} on must be there")
    return value


def _is_set(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    return default if value is None else bool(value)


def _experts(config: Mapping[str, Any], count: int, width: int, shared: int = 0, gates: int = 0) -> Experts:
    """Return ``count`` experts of a width, beside one of width ``shared`` whose output has ``gates``."""
    hidden, top_k = whole_number(config, "hidden_size"), whole_number(config, "num_experts_per_tok")
    if top_k > count:
        raise TopologyError(f"'num_experts_per_tok' is {top_k}, more than the {count} experts")
    of_width = partial(FeedForward, hidden, gated=True)
    return Experts(count, top_k, of_width(width), hidden * (count + gates), of_width(shared) if shared else None)


def _gpt2(config: Mapping[str, Any], name: str) -> Model:
    number = partial(whole_number, config)
    return transformer(
        layers=number("n_layer"),
        hidden=number("n_embd"),
        heads=number("n_head"),
        vocabulary=number("vocab_size"),
        sequence=number("n_positions"),
        ffn=number("n_inner", default=4 * number("n_embd")),
        gated=False,
        tied=_is_set(config, "tie_word_embeddings", True),
        name=name,
    )


def _llama(config: Mapping[str, Any], name: str) -> Model:
    """Build Llama, Mistral or Qwen: RMSNorm, rotary positions, grouped queries, SwiGLU or experts."""
    number, family = partial(whole_number, config), config["model_type"]
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    bias = family in ("llama", "qwen3", "qwen3_moe") and _is_set(config, "attention_bias")
    bias_in = bias or family == "qwen2" or (family == "qwen2_moe" and _is_set(config, "qkv_bias", True))
    kv_heads, width = number("num_key_value_heads", default=heads), number("head_dim", default=0)
    if heads % kv_heads:
        raise TopologyError(f"{kv_heads} key-value heads must divide the {heads} attention heads")
    if not width and hidden % heads:
        raise TopologyError(f"{heads} attention heads must divide the hidden size {hidden}")
    width = width or hidden // heads
    norms = 2 * width if family in ("qwen3", "qwen3_moe") else 0
    linears = projections(hidden, heads, kv_heads, width, bias_in=bias_in, bias_out=bias)
    attention = Attention(heads, kv_heads, width, width, linears, norms)
    if family == "mixtral":
        experts = _experts(config, number("num_local_experts"), number("intermediate_size"))
        return _decoder(config, name, attention, experts)
    count = number("num_experts", "num_local_experts", least=0) if family.endswith("_moe") else 0
    if not count:
        return _decoder(config, name, attention)
    shared = number("shared_expert_intermediate_size") if family == "qwen2_moe" else 0
    experts = _experts(config, count, number("moe_intermediate_size"), shared, gates=1 if shared else 0)
    dense_layers, step = config.get("mlp_only_layers") or [], number("decoder_sparse_step", default=1)
    if not isinstance(dense_layers, list) or not all(type(layer) is int for layer in dense_layers):
        raise TopologyError(f"'mlp_only_layers' is {abridged(dense_layers)}; a list of whole numbers must be there")
    return _decoder(
        config, name, attention, experts, lambda layer: layer not in dense_layers and (layer + 1) % step == 0
    )


def _deepseek(config: Mapping[str, Any], name: str) -> Model:
    """Build DeepSeek-V2 or V3: latent attention (arXiv:2405.04434), shared experts, dense first layers.

    V3's layers for predicting further tokens (``num_nextn_predict_layers``) are not part of ``transformers``' model and
    not counted. Neither is the router's correction bias, which is no parameter there.
    """
    number = partial(whole_number, config)
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    rope, nope, value = (number(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    kv_rank, query_rank = number("kv_lora_rank"), number("q_lora_rank", least=0, default=0)
    bias = _is_set(config, "attention_bias")
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
    count = number("n_routed_experts", least=0, default=0)
    if not count:
        return _decoder(config, name, attention)
    width, shared = number("moe_intermediate_size"), number("n_shared_experts", least=0, default=0)
    experts = _experts(config, count, width, shared * width)
    first_sparse = number("first_k_dense_replace", least=0, default=0)
    every = number("moe_layer_freq", default=1)
    return _decoder(config, name, attention, experts, lambda layer: layer >= first_sparse and layer % every == 0)


def _decoder(
    config: Mapping[str, Any],
    name: str,
    attention: Attention,
    experts: Experts | None = None,
    has_experts: Callable[[int], bool] = lambda layer: True,
) -> Model:
    """Return a model with RMSNorm, rotary positions, and experts in those layers that have them."""
    number = partial(whole_number, config)
    hidden, layers = number("hidden_size"), number("num_hidden_layers")
    _check_layers(layers)
    dense = FeedForward(hidden, number("intermediate_size"), gated=True, bias=_is_set(config, "mlp_bias"))
    mlps = (experts if experts and has_experts(layer) else dense for layer in range(layers))
    return Model(
        name=name,
        hidden=hidden,
        vocabulary=number("vocab_size"),
        sequence=number("max_position_embeddings"),
        blocks=tuple(Block(hidden, attention, mlp, 2 * hidden) for mlp in mlps),
        final_norm_parameters=hidden,
        tied=_is_set(config, "tie_word_embeddings"),
    )


FAMILIES: dict[str, Callable[[Mapping[str, Any], str], Model]] = {
    "gpt2": _gpt2,
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _llama),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
}
"""The function that reads a ``config.json``, by its ``model_type``."""


# -- public models -----------------------------------------------------------------------------------------------------


_NUMBERS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def _config(*numbers: int, **more: Any) -> Mapping[str, Any]:
    return {"model_type": "llama", **dict(zip(_NUMBERS, numbers, strict=True)), **more}


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
"""The values of public ``config.json`` files that the planner reads, by the lower-case name at Hugging Face."""
