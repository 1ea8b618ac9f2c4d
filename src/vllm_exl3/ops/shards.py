"""The layout that every EXL3 op shares: trellis shards, back to back in flat tensors.

A vLLM layer holds one flat ``trellis``, ``suh`` and ``svh`` each, however many checkpoint tensors
(q, k, v; gate, up) it fuses and however their bit rates and codebooks differ. A list of `Shard`
says what lies where; ops take it as a flat list of integers, since custom ops take no objects.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache

from vllm_exl3.pack.stored import TILE, Codebook

__all__ = ["Shard", "cached_shards", "pack_shards", "unpack_shards"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One trellis of a fused layer, as this rank holds it.

    Attributes:
        half_bits: 2·K.
        codebook: a `Codebook` value.
        in_features: trellis rows held, a multiple of 128; inputs are zero-extended to it.
        out_features: trellis columns held, a multiple of 128.
        crop_start: first of those columns that the layer returns.
        crop_size: columns that the layer returns.
    """

    half_bits: int
    codebook: int
    in_features: int
    out_features: int
    crop_start: int
    crop_size: int

    @property
    def trellis_shape(self) -> tuple[int, int, int]:
        """``[in/16, out/16, 16·K]`` in int16 words."""
        return self.in_features // TILE, self.out_features // TILE, self.half_bits * 8

    @property
    def trellis_words(self) -> int:
        """int16 words that this shard takes in the flat trellis."""
        rows, columns, words = self.trellis_shape
        return rows * columns * words


_WIDTH = len(fields(Shard))


def pack_shards(shards: Iterable[Shard]) -> list[int]:
    """Flatten shards to the six integers each that an op takes."""
    return [int(value) for shard in shards for value in astuple(shard)]


def unpack_shards(values: Sequence[int]) -> list[Shard]:
    """The inverse of `pack_shards`.

    Raises:
        ValueError: the length is no multiple of six, or a codebook is unknown.
    """
    if not values or len(values) % _WIDTH:
        raise ValueError(f"shards: found {len(values)} integers, expected a positive multiple of {_WIDTH}")
    shards = [Shard(*values[i : i + _WIDTH]) for i in range(0, len(values), _WIDTH)]
    for shard in shards:
        Codebook(shard.codebook)
    return shards


class _Shards(tuple[Shard, ...]):
    """Shards whose hash is computed once: plans are looked up by them several times in every call of an op."""

    def __hash__(self) -> int:
        known = self.__dict__.get("hash")
        if known is None:
            known = self.__dict__["hash"] = super().__hash__()
        return int(known)


@lru_cache(maxsize=4096)
def cached_shards(values: tuple[int, ...]) -> tuple[Shard, ...]:
    """`unpack_shards` for an op's call, which comes with the same integers every time."""
    return _Shards(unpack_shards(values))
