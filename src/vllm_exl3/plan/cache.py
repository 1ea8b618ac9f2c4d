"""How much KV cache a token and a request take, for each cache type, and how many tokens a budget holds.

Follows vLLM 0.32's allocation: layers of one kind form groups of equal size, all groups draw blocks from one pool, and
a block of a group is a page in each of its layers. A hybrid model's attention pages are made as large as a state.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_exl3.plan.layers import CacheLayer

__all__ = ["CACHE_TYPES", "Capacity", "cache_capacity", "request_bytes", "token_bytes", "unsupported"]

CACHE_TYPES = ("auto", "fp8", "int4_per_token_head")
"""``--kv-cache-dtype``: the model's 16 bits, fp8, and four bits by this package's attention."""

BLOCK_TOKENS = 16
"""vLLM's default block on CUDA."""
INT4_SCALES = 8
"""Bytes of the two scales beside a token's nibbles (`attention.layout`): a head of D elements takes D + 8."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a cache of some bytes.

    Attributes:
        tokens: tokens over all requests, of requests of full length, as vLLM's log gives it.
        requests: requests of full length at once.
        longest: the longest single request that fits.
    """

    tokens: int
    requests: float
    longest: int


def unsupported(cache_type: str, layers: Sequence[CacheLayer]) -> str | None:
    """Why a model cannot have this cache type, or None."""
    if cache_type not in CACHE_TYPES:
        return f"{cache_type} is not modelled: expected one of {', '.join(CACHE_TYPES)}"
    if cache_type == "int4_per_token_head":
        if any(layer.kind == "latent" for layer in layers):
            return "latent attention (MLA) has no int4 cache"
        if any(layer.head_dim % 8 for layer in layers):
            return "heads that are not a multiple of 8 have no int4 cache"
    return None


def token_bytes(layer: CacheLayer, cache_type: str, ranks: int = 1) -> int:
    """Bytes that one token takes in one layer on one tensor-parallel rank; 0 for a state.

    Args:
        layer: the layer.
        cache_type: one of `CACHE_TYPES`.
        ranks: tensor-parallel ranks, over which heads are divided (or copied, where there are fewer).
    """
    element = 1 if cache_type == "fp8" else 2
    if layer.kind == "latent":  # every rank holds all of it
        return layer.latent * element + layer.indexer
    if layer.kind not in ("full", "window"):
        return 0
    heads = max(1, layer.kv_heads // ranks)
    head = layer.head_dim + INT4_SCALES if cache_type == "int4_per_token_head" else 2 * layer.head_dim * element
    return heads * head


def request_bytes(
    layers: Sequence[CacheLayer], cache_type: str, length: int, *, ranks: int = 1, chunk: int = 2048
) -> int:
    """Bytes of one request of this length, in whole pages.

    Args:
        layers: decoder layers, of one pipeline stage where there are several.
        cache_type: one of `CACHE_TYPES`.
        length: tokens of the request.
        ranks: tensor-parallel ranks.
        chunk: ``--max-num-batched-tokens``: a window keeps that many tokens more while a prompt is read.
    """
    pool = _pool(layers, cache_type, ranks)
    return 0 if pool is None else _blocks(pool, length, chunk) * pool.block_bytes


def cache_capacity(
    layers: Sequence[CacheLayer], cache_type: str, nbytes: int, length: int, *, ranks: int = 1, chunk: int = 2048
) -> Capacity:
    """Capacity of a cache of ``nbytes`` on each rank; the arguments are those of `request_bytes`."""
    pool = _pool(layers, cache_type, ranks)
    if pool is None:
        return Capacity(0, 0.0, 0)
    blocks = max(nbytes, 0) // pool.block_bytes
    requests = blocks / _blocks(pool, length, chunk)
    return Capacity(int(requests * length), requests, _longest(pool, blocks, length, chunk))


@dataclass(frozen=True, slots=True)
class _Pool:
    """Groups of layers that draw blocks from one pool.

    Attributes:
        block_tokens: tokens of a block of attention.
        block_bytes: of a block of any group.
        groups: kind of each group, and its window or the number of states that a request holds.
    """

    block_tokens: int
    block_bytes: int
    groups: tuple[tuple[str, int], ...]


def _pool(layers: Sequence[CacheLayer], cache_type: str, ranks: int) -> _Pool | None:
    caching = [layer for layer in layers if layer.kind != "none"]
    if not caching:
        return None
    counts = Counter((layer.kind, layer.window or layer.states) for layer in caching)
    per_token = max(token_bytes(layer, cache_type, ranks) for layer in caching)
    state = max(layer.state // ranks for layer in caching)
    tokens = BLOCK_TOKENS
    if state and per_token:
        tokens = -(-state // (per_token * BLOCK_TOKENS)) * BLOCK_TOKENS
    page = max(tokens * per_token, state)
    least, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * least else least
    groups = [kind for kind, count in counts.items() for _ in range(-(-count // size))]
    return _Pool(tokens, size * page, tuple(groups))


def _blocks(pool: _Pool, length: int, chunk: int) -> int:
    """Blocks that one request of this length holds at most."""
    total = 0
    for kind, size in pool.groups:
        if kind == "state":
            total += size
        elif kind == "window":
            total += -(-min(size - 1 + chunk, length) // pool.block_tokens) + 1
        else:
            total += -(-length // pool.block_tokens)
    return total


def _longest(pool: _Pool, blocks: int, limit: int, chunk: int) -> int:
    """The longest request, up to ``limit`` tokens, that these blocks hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _blocks(pool, middle, chunk) <= blocks else (low, middle - 1)
    return low
