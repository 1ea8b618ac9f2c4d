"""Forms of kernels, launch arguments that several share, and where a fused layer's shards lie.

Arithmetic on shapes, without torch or a GPU.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants, members
from vllm_exl3.ops.shards import Shard
from vllm_exl3.pack.stored import BLOCK, Codebook

__all__ = [
    "BLOCK_K",
    "MAX_SHARDS",
    "ROW_PAD",
    "Arithmetic",
    "Codes",
    "Form",
    "GpuLimits",
    "LinearArgs",
    "LinearPlan",
    "ShardArgs",
    "ShardOffsets",
    "TransformLaunch",
    "check_shards",
    "place_scratch",
    "round_up",
    "shard_offsets",
]

_SHAPES = constants("base/shapes.cuh")
MAX_SHARDS, BLOCK_K, ROW_PAD = (_SHAPES[name] for name in ("MAX_SHARDS", "BLOCK_K", "ROW_PAD"))
"""Shards that one launch serves; input channels of a k block; bytes after each row of weights in shared memory."""

_NARROW, _SCRATCH_ALIGN = 16, 256

Codes = tuple[tuple[int, int], ...]
"""(half_bits, codebook) of what a launch multiplies, a fused layer's shards or a layer's experts: sorted, each once."""


class Arithmetic(IntEnum):
    """The operand that a weight is on the tensor core; ``kernels/base/codebook.cuh`` explains each."""

    INTEGER = 0
    PAIR = 1
    HALF = 2
    BYTE = 3


@dataclass(frozen=True, slots=True)
class Form:
    """One kernel and its arithmetic.

    Attributes:
        identity: use the codebook's identity (mul1 by bytes, mcg and 3INST by halves) instead of decoding to fp16.
        tile_rows: tokens that share one decoding of the weights; more than 16 means the wide kernel, unless `narrow`.
        fast: activations of mul1's identity are one int8 instead of two.
        narrow: the narrow kernel serves 32 tokens (sm_90a).
    """

    identity: bool
    tile_rows: int
    fast: bool = False
    narrow: bool = False

    @property
    def wide(self) -> bool:
        """True where the wide kernel (sm_90a) serves it."""
        return self.tile_rows > _NARROW and not self.narrow

    @property
    def name(self) -> str:
        """Its name in tables."""
        decoded = "wide" if self.wide else "half"
        return f"{'fast' if self.fast else 'identity' if self.identity else decoded}{self.tile_rows}"

    def arithmetic(self, codebook: int) -> Arithmetic:
        """How a shard of this codebook is multiplied."""
        if not self.identity:
            return Arithmetic.HALF
        if codebook != Codebook.MUL1:
            return Arithmetic.PAIR
        return Arithmetic.BYTE if self.fast else Arithmetic.INTEGER

    def kinds(self, kinds: Sequence[tuple[int, int]]) -> str:
        """``INSTANCE_KINDS`` for (half_bits, codebook) pairs."""
        return ", ".join(
            f"Kind<{half_bits}, {codebook}, {int(self.arithmetic(codebook))}, INSTANCE_TILE_ROWS>"
            for half_bits, codebook in kinds
        )


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """A GPU, as far as plans depend on it.

    Attributes:
        architecture: NVRTC's name, such as ``sm_90a``.
        multiprocessors: their number.
        shared_memory: bytes that one block may use.
        clusters: (blocks of a cluster, how many such clusters run at once) for blocks that fill a multiprocessor.
    """

    architecture: str
    multiprocessors: int
    shared_memory: int
    clusters: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:
        # plans are looked up by it in every call of an op, and no two kinds of GPU serve one process as a rule
        return hash(self.architecture)

    @property
    def dependent_launch(self) -> bool:
        """True where kernels may start before the one ahead has finished (sm_90 and later)."""
        return _capability(self.architecture) >= 90

    @property
    def warpgroups(self) -> bool:
        """True where it has wgmma."""
        return self.architecture == "sm_90a"


@functools.cache
def _capability(architecture: str) -> int:
    return int("".join(filter(str.isdigit, architecture)))


class ShardArgs(ctypes.Structure):
    """``ShardArgs`` of wide/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("wide/arguments.cuh", "ShardArgs")


class LinearArgs(ctypes.Structure):
    """``LinearArgs`` of wide/arguments.cuh."""

    __slots__ = ()
    _fields_ = members("wide/arguments.cuh", "LinearArgs", ShardArgs)


@dataclass(frozen=True, slots=True)
class ShardOffsets:
    """Where a shard lies in the flat tensors, in elements."""

    trellis: int
    suh: int
    svh: int


@dataclass(frozen=True, slots=True)
class TransformLaunch:
    """A launch that rotates the input: its kernel, blocks in x and y, threads and dynamic shared memory a block."""

    instance: Instance
    grid: tuple[int, int]
    threads: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """One transform and one GEMM launch, all but the pointers.

    Attributes:
        instance: the GEMM kernel.
        arguments: template of the launch arguments; pointers are zero, and shard pointers hold nothing.
        arguments_type: the structure that they are.
        offsets: where each shard's tensors begin.
        grid: thread blocks of the GEMM, and row tiles.
        threads: threads a block of the GEMM.
        shared: its dynamic shared memory in bytes.
        transform: the launch before it that rotates the input, or None where the GEMM does so by itself.
        counters: of the device's arrival counters that the launch uses, zero before and after it; 0 where its scratch
            holds them.
        scratch: bytes of scratch.
        scratch_parts: where its parts begin.
        out_features: columns of the output.
        cluster: blocks in x of the GEMM that form a cluster.
    """

    instance: Instance
    arguments: bytes
    arguments_type: type[Any]
    offsets: tuple[ShardOffsets, ...]
    grid: tuple[int, int]
    threads: int
    shared: int
    transform: TransformLaunch | None
    counters: int
    scratch: int
    scratch_parts: dict[str, int]
    out_features: int
    cluster: int = 1

    @property
    def instances(self) -> list[Instance]:
        """Its kernels."""
        return [self.instance] if self.transform is None else [self.transform.instance, self.instance]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not less."""
    return -(-value // multiple) * multiple


def shard_offsets(shards: Sequence[Shard]) -> tuple[ShardOffsets, ...]:
    """Where each shard lies in the flat tensors, one behind the other."""
    offsets, trellis, suh, svh = [], 0, 0, 0
    for shard in shards:
        offsets.append(ShardOffsets(trellis, suh, svh))
        trellis += shard.trellis_words
        suh += shard.in_features
        svh += shard.out_features
    return tuple(offsets)


def place_scratch(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where parts of scratch begin, by name and one behind the other, and how many bytes they take together.

    Args:
        sizes: bytes of each part.
    """
    parts, end = {}, 0
    for name, size in sizes.items():
        parts[name] = end
        end += round_up(size, _SCRATCH_ALIGN)
    return parts, end


def check_shards(shards: tuple[Shard, ...], in_width: int) -> None:
    """Refuse shards that break the layout's rules.

    Raises:
        ValueError: one does; the message says which and how.
    """
    if not 0 < len(shards) <= MAX_SHARDS:
        raise ValueError(f"{len(shards)} shards in one launch, expected 1 to {MAX_SHARDS}")
    for index, shard in enumerate(shards):
        if shard.in_features % BLOCK or shard.out_features % BLOCK or shard.in_features < in_width:
            raise ValueError(
                f"shard {index}: found {shard.in_features}×{shard.out_features} for {in_width} inputs, "
                f"expected multiples of {BLOCK} and at least as many inputs"
            )
        if not 0 <= shard.crop_start <= shard.crop_start + shard.crop_size <= shard.out_features:
            raise ValueError(
                f"shard {index}: crop {shard.crop_start}+{shard.crop_size} of {shard.out_features} columns"
            )
