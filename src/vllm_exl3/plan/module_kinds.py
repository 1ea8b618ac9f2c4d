"""Bits per weight by kind of module: where a pack's bytes are, tensors in 16 bits included."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from vllm_exl3.pack.assemble import RING_GROUP, RING_NGRAM
from vllm_exl3.pack.metadata import text_config
from vllm_exl3.pack.pack import Pack
from vllm_exl3.pack.skip import Skipper
from vllm_exl3.pack.spelling import TOWER, is_embedding_name, is_head_name
from vllm_exl3.pack.stored import StoredScaledTable
from vllm_exl3.plan.shapes import number

__all__ = ["ModuleKind", "module_kinds"]

_KINDS = (
    ("vision and audio", re.compile(rf"(^|\.){TOWER}(\.|$)")),
    ("routed experts", re.compile(r"\.experts(\.|$)")),
    ("routers", re.compile(r"\.(gate|router|shared_expert_gate)$")),
    ("shared experts", re.compile(r"\.(shared_experts?|shared_mlp)(\.|$)")),
    ("linear attention", re.compile(r"\.(linear_attn|mamba|mixer|ssm|conv|delta_net)(\.|$)")),
    ("attention", re.compile(r"\.(\w*attn|\w*attention)(\.|$)")),
    ("MLP", re.compile(r"\.(\w*mlp|feed_forward|ffn|block_sparse_moe)(\.|$)")),
)
"""Kinds by what their modules are called, in the order in which they are tried."""

_ORDER = ("embedding", "n-gram table", *(name for name, _ in _KINDS), "head", "MTP", "norms and others")


@dataclass
class ModuleKind:
    """All modules of one kind.

    Attributes:
        name: the kind, such as ``attention``.
        modules: how many there are.
        weights: their weights, without padding of vocabularies but with that of stored blocks.
        nbytes: bytes of everything that they store.
    """

    name: str
    modules: int = 0
    weights: int = 0
    nbytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight, scales and biases included."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def module_kinds(pack: Pack) -> list[ModuleKind]:
    """The kinds of module that a pack holds, from the embedding to the head."""
    kinds: dict[str, ModuleKind] = {}
    skipper = Skipper(pack)
    for key, weights, nbytes in _modules(pack):
        kind = kinds.setdefault(name := _kind(pack, skipper, key), ModuleKind(name))
        kind.modules += 1
        kind.weights += weights
        kind.nbytes += nbytes
    return sorted(kinds.values(), key=lambda kind: _ORDER.index(kind.name))


def _modules(pack: Pack) -> Iterator[tuple[str, int, int]]:
    """Key, weights and bytes of every module; a dense copy of a quantized one is no module of its own."""
    for key, linear in pack.linears.items():
        yield key, linear.in_features * linear.out_features, linear.nbytes
    for key, table in pack.embeddings.items():
        if isinstance(table, StoredScaledTable):
            columns = table.table.shape[1] * 8 // table.bits
        else:
            columns = number(text_config(pack.config), "hidden_size") or table.groups * RING_GROUP
        yield key, table.rows * columns, table.nbytes
    for key, ngram in pack.ngram_tables.items():
        yield key, ngram.rows * RING_NGRAM, ngram.nbytes
    for key, tensor in pack.dense.items():
        if key not in pack.linears and key not in pack.embeddings:
            yield key, prod(tensor.shape), tensor.nbytes


def _kind(pack: Pack, skipper: Skipper, key: str) -> str:
    if skipper.is_mtp(key):
        return "MTP"
    if key in pack.ngram_tables:
        return "n-gram table"
    if key in pack.dense and len(pack.dense[key].shape) < 2:
        return "norms and others"
    if is_head_name(key):
        return "head"
    if is_embedding_name(key):
        return "embedding"
    return next((name for name, pattern in _KINDS if pattern.search(key)), "norms and others")
