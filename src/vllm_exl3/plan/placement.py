"""Placement of weights: GPU memory first, then host memory that the GPU reads (vLLM's UVA offloading), where needed.

vLLM offloads whole parameters of decoder layers, the first layers first; embeddings and heads stay. With experts, only
their parameters are named, since a token reads few of them.
"""

from dataclasses import dataclass
from math import ceil

from vllm_exl3.plan.estimate import HostShare
from vllm_exl3.plan.sizes import GIB
from vllm_exl3.plan.weights import Weights

__all__ = ["EXPERT_PARAMETERS", "Placement", "place", "split_layers"]


EXPERT_PARAMETERS = ("w13_trellis", "w13_suh", "w13_svh", "w2_trellis", "w2_suh", "w2_svh")
"""Values of ``--cpu-offload-params`` that move routed experts only."""

_PARTS = (2 / 3, 1 / 3)
"""Shares of a layer's expert bytes: gate and up are one parameter, down is another."""
_DENSE_PARTS = (0.2, 0.1, 0.45, 0.25)
"""Shares of a layer's other bytes: qkv, o, gate and up, down, about as they are in Llama and Qwen."""


NOTHING = HostShare()


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers of one rank's weights.

    Attributes:
        gpu: bytes in GPU memory.
        host: bytes in host memory that the GPU reads.
        pinned: bytes of host memory that takes: torch rounds each pinned tensor up to a power of two.
        offload_gib: ``--cpu-offload-gb``.
        experts_only: whether only experts' parameters are offloaded.
        share: what the GPU reads over the bus.
        short: bytes for which there is no place; 0 where everything has one.
    """

    gpu: int
    host: int = 0
    pinned: int = 0
    offload_gib: float = 0.0
    experts_only: bool = False
    share: HostShare = NOTHING
    short: int = 0


def place(weights: Weights, room: int, host_room: int | None, *, ngram_in_host: bool = False) -> Placement:
    """Divide a rank's weights over its tiers.

    Args:
        weights: what the rank holds.
        room: bytes that GPU memory has for weights.
        host_room: bytes of host memory for this rank; None to use none.
        ngram_in_host: n-gram tables are pinned, which is not part of vLLM's offloading.
    """
    table = weights.ngram if ngram_in_host else 0
    total = weights.total - table
    if total <= room:
        return Placement(total, table, table)
    layers = weights.layers
    experts, dense = weights.experts, sum(layer.nbytes for layer in layers)
    missing = total - room
    if host_room is None:
        return Placement(total, table, table, short=missing)
    experts_only = missing <= experts
    movable = experts if experts_only else experts + dense
    wanted = ceil(missing / GIB * 4) / 4  # vLLM moves whole parameters until this many are moved
    moved = min(movable, _whole_parameters(weights, round(wanted * GIB), experts_only))
    pinned = table + _pinned(weights, moved, experts_only)
    short = max(missing - moved, 0) + max(pinned - host_room, 0)
    if experts_only:
        share = HostShare(0.0, moved / experts)
    else:  # every parameter of the first layers, experts among them
        share = HostShare(moved / movable, moved / movable if experts else 0.0)
    return Placement(total - moved, moved + table, pinned, wanted, experts_only, share, short)


def _whole_parameters(weights: Weights, wanted: int, experts_only: bool) -> int:
    """Bytes that vLLM moves when asked for ``wanted``: the parameter that reaches it is moved whole."""
    moved = 0
    for size in _parameters(weights, experts_only):
        if moved >= wanted:
            break
        moved += size
    return moved


def _parameters(weights: Weights, experts_only: bool) -> list[int]:
    sizes = []
    for layer in weights.layers:
        if not experts_only:
            sizes += _parts(layer.nbytes, _DENSE_PARTS)
        if layer.expert_bytes:
            sizes += _parts(layer.expert_bytes, _PARTS)
    return sizes


def _parts(whole: int, shares: tuple[float, ...]) -> list[int]:
    """A number of bytes divided by these shares; the last takes what rounding leaves."""
    sizes = [int(whole * share) for share in shares[:-1]]
    return [*sizes, whole - sum(sizes)]


def _pinned(weights: Weights, moved: int, experts_only: bool) -> int:
    """Host memory for so many moved bytes, each parameter rounded up to a power of two."""
    taken, left = 0, moved
    for size in _parameters(weights, experts_only):
        if left <= 0:
            break
        taken += 1 << max(size - 1, 0).bit_length()
        left -= size
    return taken


def split_layers(weights: Weights, rooms: list[int]) -> list[int]:
    """How many decoder layers each pipeline stage gets, so that every stage keeps a like share of its room free.

    Args:
        weights: what one rank would hold of all stages.
        rooms: bytes that each stage's GPU has for weights and cache.

    Returns:
        Layers by stage, at least one each, in the form of ``VLLM_PP_LAYER_PARTITION``.
    """
    sizes = [layer.nbytes + layer.expert_bytes for layer in weights.layers]
    stages = len(rooms)
    fixed = [0] * stages
    fixed[0] += weights.embedding + weights.ngram
    fixed[-1] += weights.head
    left = [room - size for room, size in zip(rooms, fixed, strict=True)]
    whole = sum(max(size, 1) for size in left)
    counts, index = [], 0
    for stage, room in enumerate(left):
        rest = stages - stage - 1
        if not rest:
            count = len(sizes) - index
        else:
            count = round(len(sizes) * max(room, 1) / whole)
            count = min(max(count, 1), len(sizes) - index - rest)
        counts.append(count)
        index += count
    return counts
