"""How decoding over the int4 KV cache is cut for the CUDA kernels: arithmetic on shapes, without a GPU."""

import functools
from dataclasses import dataclass, replace

from vllm_exl3.attention.layout import content_bytes
from vllm_exl3.cuda.compiler import Instance
from vllm_exl3.cuda.declarations import constants

__all__ = [
    "MERGE_THREADS",
    "MOST_SEGMENTS",
    "SIZES",
    "THREADS",
    "TILE",
    "NativeCut",
    "cut_of",
    "every_instance",
    "instances_for",
    "merge_instance",
    "merge_shared_bytes",
]

_DEVICE = constants("kv/merge.cuh")
TILE, THREADS = _DEVICE["KV_TILE"], _DEVICE["KV_THREADS"]
"""Tokens of a step and threads of a block of the kernel that attends."""

MERGE_THREADS = _DEVICE["KV_MERGE_THREADS"]
"""Threads of a block of the kernel that adds up."""

MOST_SEGMENTS = THREADS
"""Each has a thread when they are added up."""

SIZES = (64, 128, 256, 512)
"""Heads that the kernels serve."""

_WARPS = THREADS // 32
_MOST_QUERY = 63
"""Query tokens of a request that decodes, or is served as if it did."""

_RESERVED = 1024
"""Bytes of shared memory that the driver takes for each block."""

_LARGE_SHARED = 160 << 10
"""Bytes of shared memory from which three stages of heads of 256 leave room for several blocks a multiprocessor."""


@dataclass(frozen=True)
class NativeCut:
    """How a batch is cut into blocks.

    Attributes:
        size: of a head.
        rows: of a block, a multiple of 8.
        block_query: query tokens of a block.
        query_blocks: blocks that share a request's query tokens.
        head_blocks: blocks that share a group's heads.
        stages: tiles of the ring.
        held: whether queries stay in registers.
        blocks: that run at once on a multiprocessor.
    """

    size: int
    rows: int
    block_query: int
    query_blocks: int
    head_blocks: int
    stages: int
    held: bool
    blocks: int

    def programs(self, requests: int, kv_heads: int) -> int:
        """Blocks of a segment."""
        return requests * self.query_blocks * kv_heads * self.head_blocks

    def scratch_elements(self, requests: int, kv_heads: int, segments: int) -> int:
        """float32 elements of scratch."""
        return self.programs(requests, kv_heads) * segments * self.rows * (self.size + 2)

    def segments(self, requests: int, kv_heads: int, multiprocessors: int) -> int:
        """As many as all multiprocessors run at once."""
        at_once = multiprocessors * self.blocks
        return max(1, min(MOST_SEGMENTS, at_once // self.programs(requests, kv_heads)))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return _shared_bytes(self.size, self.rows, self.stages, self.held)

    def instance(self, chunk: int) -> Instance:
        """The kernel, for copies of ``chunk`` bytes."""
        macros = {
            "SIZE": self.size, "TILES": self.rows // 8, "STAGES": self.stages, "CHUNK": chunk, "HELD": int(self.held),
            "BLOCKS": self.blocks,
        }  # fmt: skip
        return Instance("kv/decode.cu", "exl3_kv_decode", tuple((f"INSTANCE_{k}", str(v)) for k, v in macros.items()))


def _shared_bytes(size: int, rows: int, stages: int, held: bool) -> int:
    """``kv_shared_bytes`` of kernels/kv_decode_problem.cuh."""
    queries = 0 if held else rows * (2 * size + 64)
    known = 4 * (rows * _WARPS + 4 * rows + rows // 8 + _WARPS + 2)
    return stages * TILE * content_bytes(size) + queries + 2 * rows * (2 * TILE + 32) + 8 * TILE + known


@functools.cache
def cut_of(group: int, max_query: int, size: int, shared_memory: int, apart: bool = False) -> NativeCut:
    """Rows and blocks for requests of at most ``max_query`` query tokens.

    Args:
        group: query heads that share a KV head.
        max_query: most query tokens of a request.
        size: of a head.
        shared_memory: bytes that a block may use.
        apart: whether a block takes one query token, so that nothing of it depends on the others.
    """
    if apart:
        return replace(cut_of(group, 1, size, shared_memory), query_blocks=max_query)
    most = 32 if size <= 256 else 16
    if group > most:
        rows, tokens, query_blocks, head_blocks = most, 1, max_query, -(-group // most)
    else:
        query_blocks = -(-max_query // (most // group))
        tokens, head_blocks = -(-max_query // query_blocks), 1
        rows = -(-group * tokens // 8) * 8
    held = rows == 8 and size <= 256
    stages = 3 if shared_memory >= _LARGE_SHARED else 2
    # As registers allow: 128, 168 or 255 a thread.
    wanted = 2 if size == 512 or rows == 32 else 4 if rows == 8 else 3
    fitting = shared_memory // (_shared_bytes(size, rows, stages, held) + _RESERVED)
    return NativeCut(size, rows, tokens, query_blocks, head_blocks, stages, held, max(1, min(wanted, fitting)))


def merge_instance(size: int) -> Instance:
    """The kernel that adds segments up."""
    return Instance("kv/merge.cu", "exl3_kv_merge", (("INSTANCE_SIZE", str(size)),))


def merge_shared_bytes(size: int) -> int:
    """Dynamic shared memory of a block that adds up."""
    return 4 * (MERGE_THREADS // 32 * (size + 2) + THREADS)


def instances_for(size: int, group: int, shared_memory: int) -> list[Instance]:
    """Every kernel that a layer may launch, whatever its cache's layout."""
    cuts = {cut_of(group, count, size, shared_memory) for count in range(1, _MOST_QUERY + 1)}
    found = {cut.instance(chunk) for cut in cuts for chunk in (16, 8)}
    return [merge_instance(size), *sorted(found, key=lambda instance: instance.label)]


def every_instance(shared_memory: int) -> list[Instance]:
    """Every kernel there is, for the compile tests."""
    found = (instance for size in SIZES for group in (1, 8) for instance in instances_for(size, group, shared_memory))
    return list(dict.fromkeys(found))
