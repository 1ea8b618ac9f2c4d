"""Bytes of a pack's weights on each rank, layer by layer, under tensor, expert and pipeline parallelism.

Linears are divided as `plan.partition` divides them, dense modules as vLLM divides their kind. What vLLM builds without
quantization is decoded while loading and takes 16 bits: only vLLM's model class knows which, so it is not counted, but
for MLA's ``kv_b_proj``, of which vLLM keeps a 16-bit copy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_exl3.pack.check_experts import declared_experts
from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.spelling import HEAD_NAMES
from vllm_exl3.pack.stored import StoredLinear, StoredTensor
from vllm_exl3.plan.layers import layer_count
from vllm_exl3.plan.partition import block_split, covering_blocks
from vllm_exl3.plan.shapes import ROW_LEAVES, input_width, number, output_width

__all__ = ["LayerWeights", "Weights", "rank_weights"]

REPLICATED = frozenset(
    ("gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "wq_a", "wkv", "wk",
     "weights_proj", "conv1d", "per_layer_model_projection")
)  # fmt: skip
"""Last name component of linears that every rank holds whole."""

VOCABULARY = ("lm_head", "embed_tokens", "wte", "embed_in", "word_embeddings", "head", "embed")
_KEY_VALUE = ("k_proj", "v_proj", "k", "v")
_TOWERS = ("visual", "vision", "audio")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = ".experts."
_VOCABULARY_PADDING = 64


@dataclass
class LayerWeights:
    """One decoder layer on one rank.

    Attributes:
        nbytes: bytes of everything but routed experts.
        weights: EXL3 weights of that, as many as are multiplied for every token.
        weight_bits: their bits.
        dense_bytes: bytes of its 16-bit linears, which every step reads as well.
        expert_bytes: bytes of this rank's routed experts.
        expert_weights: weights of these.
        experts: how many of them there are.
    """

    nbytes: int = 0
    weights: int = 0
    weight_bits: float = 0.0
    dense_bytes: int = 0
    expert_bytes: int = 0
    expert_weights: int = 0
    experts: int = 0


@dataclass
class Weights:
    """Everything that one rank holds.

    Attributes:
        embedding: bytes of token embeddings.
        head: bytes of the output head.
        head_weights: its weights.
        head_bits: bits of each.
        other: bytes outside of decoder layers: final norms, towers, projectors.
        ngram: bytes of n-gram tables.
        layers: decoder layers, in order.
        skipped: bytes that are not read without speculation or at all.
    """

    embedding: int = 0
    head: int = 0
    head_weights: int = 0
    head_bits: float = 0.0
    other: int = 0
    ngram: int = 0
    layers: list[LayerWeights] = field(default_factory=list)
    skipped: int = 0

    @property
    def outside(self) -> int:
        """Bytes outside of decoder layers, n-gram tables left out: vLLM's offloading never moves these."""
        return self.embedding + self.head + self.other

    @property
    def experts(self) -> int:
        """Bytes of routed experts."""
        return sum(layer.expert_bytes for layer in self.layers)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.outside + self.ngram + self.experts + sum(layer.nbytes for layer in self.layers)


def rank_weights(pack: Pack, ranks: int = 1, rank: int = 0, *, whole_experts: bool = False) -> Weights:
    """The weights that one tensor-parallel rank holds.

    Args:
        pack: the pack, by its headers.
        ranks: tensor-parallel ranks.
        rank: which one.
        whole_experts: experts are divided as whole ones (``--enable-expert-parallel``), not each into parts.

    Raises:
        Exl3PackError: the experts cannot be divided so.
    """
    found = Weights(layers=[LayerWeights() for _ in range(max(layer_count(pack.config), 1))])
    share = _Share(pack.config, ranks, rank, whole_experts)
    skipper = Skipper(pack)
    for key, linear in pack.linears.items():
        if skipper.rule_for_module(key) is not None:
            found.skipped += linear.nbytes
        else:
            _add_linear(found, share, key, linear)
    for table in pack.embeddings.values():
        found.embedding += -(-table.nbytes // ranks)
    for ngram in pack.ngram_tables.values():
        found.ngram += -(-ngram.nbytes // ranks)
    _add_dense(found, share, pack, skipper)
    _add_latent_copies(found, share)
    return found


@dataclass(frozen=True)
class _Share:
    """Which part of each module a rank has."""

    config: Mapping[str, Any]
    ranks: int
    rank: int
    whole_experts: bool

    def columns(self, leaf: str, stored: int) -> int:
        """Stored output channels of this rank's part of a linear whose outputs are divided."""
        width = output_width(leaf, stored, self.config)
        each = -(-width // self.ranks)
        text = text_config(self.config)
        heads = number(text, "num_key_value_heads")
        if leaf in _KEY_VALUE and heads and heads < self.ranks:
            each, first = width // heads, self.rank * heads // self.ranks * (width // heads)
        else:
            first = self.rank * each
        return _covering(first, each, width, stored)

    def rows(self, leaf: str, stored: int) -> int:
        """Stored input channels of this rank's part of a linear whose inputs are divided."""
        width = input_width(leaf, stored, self.config)
        each = -(-width // self.ranks)
        return _covering(self.rank * each, each, width, stored)

    def has_expert(self, index: int, experts: int) -> bool:
        """True if a whole expert is this rank's: contiguous shares, the first ones larger."""
        share, more = divmod(experts, self.ranks)
        start = self.rank * share + min(self.rank, more)
        return start <= index < start + share + (self.rank < more)


def _covering(first: int, size: int, width: int, stored: int) -> int:
    """Stored channels that cover ``size`` channels from ``first`` on, of ``width`` in ``stored`` ones."""
    return min(covering_blocks(first, min(size, max(width - first, 0)))[1], stored)


def _add_linear(found: Weights, share: _Share, key: str, linear: StoredLinear) -> None:
    leaf = key.rpartition(".")[2]
    rows, columns = linear.in_features, linear.out_features
    if _EXPERT in key and "shared_expert" not in key:
        _add_expert(found, share, key, linear)
        return
    if share.ranks > 1 and leaf not in REPLICATED:
        if leaf in ROW_LEAVES:
            rows = share.rows(leaf, rows)
        else:
            columns = share.columns(leaf, columns)
    nbytes = _piece_bytes(linear, rows, columns)
    weights = rows * columns
    if leaf in HEAD_NAMES and _layer_of(key) is None:
        found.head += nbytes
        found.head_weights += weights
        found.head_bits = linear.bits
        return
    layer = _layer(found, key)
    if layer is None:
        found.other += nbytes
        return
    layer.nbytes += nbytes
    layer.weights += weights
    layer.weight_bits += weights * linear.bits


def _add_expert(found: Weights, share: _Share, key: str, linear: StoredLinear) -> None:
    layer = _layer(found, key)
    if layer is None:
        found.other += linear.nbytes
        return
    rows, columns = linear.in_features, linear.out_features
    leaf = key.rpartition(".")[2]
    if share.whole_experts and share.ranks > 1:
        index = int(key.partition(_EXPERT)[2].partition(".")[0])
        if not share.has_expert(index, max(declared_experts(share.config), 1)):
            return
    elif leaf in ROW_LEAVES:
        rows = block_split(rows, share.rank, share.ranks, where=key)[1]
    else:
        columns = block_split(columns, share.rank, share.ranks, where=key)[1]
    layer.expert_bytes += _piece_bytes(linear, rows, columns)
    layer.expert_weights += rows * columns
    layer.experts += leaf in ROW_LEAVES


def _piece_bytes(linear: StoredLinear, rows: int, columns: int) -> int:
    """Bytes of so many stored rows and columns: trellis, one scale a channel, and the marker."""
    size = rows * columns * linear.half_bits // 16 + 2 * (rows + columns)
    if linear.bias is not None:
        size += linear.bias.nbytes * columns // linear.out_features
    return size + (linear.marker.nbytes if linear.marker is not None else 0)


def _add_dense(found: Weights, share: _Share, pack: Pack, skipper: Skipper) -> None:
    """Every tensor that belongs to no EXL3 module."""
    for name, tensor in pack.tensors.items():
        key, _, leaf = name.rpartition(".")
        if key in pack.linears or key in pack.embeddings or key.rpartition(".shard_")[0] in pack.ngram_tables:
            continue
        if key in pack.ngram_tables:
            continue
        if skipper.rule_for_tensor(name) is not None:
            found.skipped += tensor.nbytes
            continue
        module = key.rpartition(".")[2]
        size = _dense_bytes(share, module, tensor)
        layer = _layer(found, name)
        if module in VOCABULARY and layer is None and module not in HEAD_NAMES:
            found.embedding += size
        elif module in HEAD_NAMES and layer is None:
            found.head += size
            found.head_weights += size // 2
            found.head_bits = 16
        elif layer is None:
            found.other += size
        elif _EXPERT in name and "shared_expert" not in name:
            layer.expert_bytes += size
        else:
            layer.nbytes += size
            layer.dense_bytes += size if len(tensor.shape) == 2 and leaf == "weight" else 0


def _dense_bytes(share: _Share, module: str, tensor: StoredTensor) -> int:
    """Bytes of a rank's part of a dense tensor; float32 matrices are held in the model's 16 bits."""
    size = tensor.nbytes
    if tensor.dtype == "F32" and len(tensor.shape) > 1:
        size //= 2
    if share.ranks == 1 or len(tensor.shape) < 2 or module in REPLICATED:
        return size
    if module in VOCABULARY:
        rows = -(-tensor.shape[0] // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        return size // tensor.shape[0] * -(-rows // share.ranks)
    return -(-size // share.ranks)


def _add_latent_copies(found: Weights, share: _Share) -> None:
    """MLA multiplies with a 16-bit copy of ``kv_b_proj``, which vLLM makes after loading."""
    text = text_config(share.config)
    rank = number(text, "kv_lora_rank")
    heads = number(text, "num_attention_heads")
    width = number(text, "qk_nope_head_dim") + number(text, "v_head_dim")
    for layer in found.layers:
        layer.nbytes += 2 * rank * -(-heads // share.ranks) * width


def _layer_of(key: str) -> int | None:
    if any(tower in key for tower in _TOWERS):
        return None
    match = _LAYER.search(key)
    return int(match[1]) if match else None


def _layer(found: Weights, key: str) -> LayerWeights | None:
    index = _layer_of(key)
    return found.layers[index] if index is not None and index < len(found.layers) else None


def stage(weights: Weights, first: int, size: int, *, stages: int, index: int) -> Weights:
    """The part of one pipeline stage: its layers, the embedding on the first stage, the head on the last."""
    return replace(
        weights,
        embedding=weights.embedding if index == 0 else 0,
        ngram=weights.ngram if index == 0 else 0,
        head=weights.head if index == stages - 1 else 0,
        head_weights=weights.head_weights if index == stages - 1 else 0,
        other=weights.other if index in (0, stages - 1) else 0,
        layers=weights.layers[first : first + size],
    )
