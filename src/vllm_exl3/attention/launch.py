"""Launching the read kernels: shapes in, grids and compile-time constants out."""

import math
from dataclasses import dataclass, replace

import torch
import triton
from triton.runtime.jit import JITFunction

from vllm_exl3.attention.attend import attend_kernel
from vllm_exl3.attention.layout import content_bytes, rotation_block
from vllm_exl3.attention.merge import merge_kernel
from vllm_exl3.attention.rotation import device_signs

__all__ = ["LOG2_E", "Config", "Problem", "attend_segments", "attend_whole", "partial_elements", "rows_of"]

LOG2_E = 1.0 / math.log(2.0)
_NEVER = 2**31 - 1
_NOTHING = (_NEVER, math.inf)
_ASSEMBLES = isinstance(attend_kernel, JITFunction) and torch.version.cuda is not None
"""Whether kernels may use NVIDIA instructions: not in Triton's interpreter, nor on other GPUs."""


@dataclass(frozen=True)
class Config:
    """How one launch is cut.

    Attributes:
        tile: keys an inner step.
        warps: of a program.
        segments: parts of the context, each a program; their results are merged.
        stages: of the software pipeline; page numbers take half of them.
        registers: most of a thread, so that more programs share a multiprocessor; 0 leaves it to the compiler.
        apart: whether a program takes one query token, so that nothing of it depends on the others.
    """

    tile: int
    warps: int
    segments: int
    stages: int
    registers: int = 0
    apart: bool = False


@dataclass(frozen=True)
class Problem:
    """One layer's tensors and constants.

    Attributes:
        query: ``[tokens, heads, D]``, last dimension contiguous.
        cache: uint8 ``[pages, kv_heads, page, D + 8]``, any strides that are multiples of 8 but 1 in the last.
        table: int32 ``[requests, pages a request]``.
        lengths: int32 ``[requests]``: tokens in the cache.
        starts: int32 ``[requests + 1]``.
        output: like the query, any floating point type.
        scale: of the scores.
        window: a token sees itself and the ``window - 1`` tokens before; 0 sees all.
        soft_cap: scores become cap·tanh(score/cap) when positive.
        sinks: ``[heads]`` or None.
    """

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    output: torch.Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def requests(self) -> int:
        """Requests in the batch, padding included."""
        return self.lengths.shape[0]

    @property
    def kv_heads(self) -> int:
        """Heads of the cache."""
        return self.cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.kv_heads

    def of_requests(self, first: int, end: int) -> "Problem":
        """The same for the requests ``first`` to ``end - 1`` alone."""
        return replace(
            self,
            table=self.table[first:end],
            lengths=self.lengths[first:end],
            starts=self.starts[first : end + 1],
        )

    def of_request(self, row: int) -> "Problem":
        """The same for one request alone."""
        return self.of_requests(row, row + 1)


def rows_of(group: int, max_query: int, most: int = 32) -> tuple[int, int, int]:
    """Rows of a program, query tokens in them, programs that share a group's heads."""
    if group > most:
        return most, 1, -(-group // most)
    rows = min(most, max(8, triton.next_power_of_2(group * max_query)))
    return rows, min(max_query, rows // group), 1


def partial_elements(requests: int, kv_heads: int, group: int, head_size: int, max_query: int, config: Config) -> int:
    """float32 elements of scratch that `attend_segments` needs."""
    rows, block_q, head_blocks = rows_of(group, 1 if config.apart else max_query)
    programs = requests * -(-max_query // block_q) * kv_heads * head_blocks
    return programs * config.segments * rows * (_padded(head_size) + 2)


def attend_segments(problem: Problem, max_query: int, config: Config, scratch: torch.Tensor | None) -> None:
    """Attend requests of at most ``max_query`` query tokens, each split into segments.

    Args:
        problem: the layer; requests of more query tokens are left alone.
        max_query: the same for every replay of a graph.
        config: how to cut.
        scratch: float32, at least `partial_elements`; not needed for one segment.
    """
    rows, block_q, head_blocks = rows_of(problem.group, 1 if config.apart else max_query)
    q_blocks = problem.requests * -(-max_query // block_q)
    partial = stats = problem.output
    if config.segments > 1:
        assert scratch is not None
        programs = q_blocks * problem.kv_heads * head_blocks * config.segments * rows
        split = programs * _padded(problem.query.shape[2])
        partial, stats = scratch[:split], scratch[split : split + 2 * programs]
    constants = _constants(problem, config, rows, block_q, head_blocks)
    grid = (config.segments, problem.kv_heads * head_blocks, q_blocks)
    _launch(problem, config, grid, constants, partial, stats, (1, max_query), _NOTHING)
    if config.segments > 1:
        merge_kernel[(problem.query.shape[1], problem.requests * max_query)](
            partial,
            stats,
            problem.lengths,
            problem.starts,
            device_signs(constants["BLOCK"], problem.query.device),
            problem.sinks,
            problem.output,
            config.segments,
            max_query,
            problem.output.stride(0),
            STEP=16,
            **{name: constants[name] for name in _MERGE_CONSTANTS},
            num_warps=4,
        )


def attend_whole(
    problem: Problem, config: Config, rows: int, min_query: int, skip: tuple[int, float] = _NOTHING
) -> None:
    """Attend requests of at least ``min_query`` query tokens, a block of them at a time over its whole context.

    Args:
        problem: the layer.
        config: how to cut, in one segment.
        rows: of a program, at most; a power of two.
        min_query: requests of fewer query tokens are left alone.
        skip: left alone are requests of up to 63 query tokens over this many earlier tokens and more, and of 64 and
            more whose query tokens times tokens in the cache are this many and more.
    """
    rows, block_q, head_blocks = rows_of(problem.group, rows, rows)
    constants = _constants(problem, config, rows, block_q, head_blocks)
    q_blocks = problem.query.shape[0] // block_q + problem.requests
    grid = (1, problem.kv_heads * head_blocks, q_blocks)
    _launch(problem, config, grid, constants, problem.output, problem.output, (min_query, _NEVER), skip)


_MERGE_CONSTANTS = (
    "D", "PADDED", "BLOCK", "LOG_BLOCK", "GROUP", "ROWS", "BLOCK_Q", "HEAD_BLOCKS", "TILE", "WINDOW", "SINKS",
)  # fmt: skip


def _padded(head_size: int) -> int:
    # A product wants 16 values a step, and a word holds four.
    return max(64, int(triton.next_power_of_2(head_size)))


def _constants(problem: Problem, config: Config, rows: int, block_q: int, head_blocks: int) -> dict[str, int]:
    size = problem.query.shape[2]
    block = rotation_block(size)
    return {
        "D": size,
        "PADDED": _padded(size),
        "BLOCK": block,
        "LOG_BLOCK": block.bit_length() - 1,
        "GROUP": problem.group,
        "ROWS": rows,
        "BLOCK_Q": block_q,
        "HEAD_BLOCKS": head_blocks,
        "TILE": config.tile,
        "WINDOW": problem.window,
        "SINKS": problem.sinks is not None,
    }


def _launch(
    problem: Problem,
    config: Config,
    grid: tuple[int, int, int],
    constants: dict[str, int],
    partial: torch.Tensor,
    stats: torch.Tensor,
    queries: tuple[int, int],
    skip: tuple[int, float],
) -> None:
    cache = problem.cache
    strides = [cache.stride(axis) for axis in range(3)]
    assert cache.shape[-1] == content_bytes(problem.query.shape[2]) and cache.stride(3) == 1
    assert all(stride % 8 == 0 for stride in strides) and cache.data_ptr() % 8 == 0
    attend_kernel[grid](
        problem.query,
        cache,
        problem.table,
        problem.lengths,
        problem.starts,
        device_signs(constants["BLOCK"], problem.query.device),
        problem.sinks,
        problem.output,
        partial,
        stats,
        problem.requests,
        config.segments,
        *queries,
        *skip,
        problem.scale / constants["BLOCK"] * (1.0 if problem.soft_cap > 0 else LOG2_E),
        problem.soft_cap,
        strides[0],
        strides[1],
        problem.table.stride(0),
        problem.query.stride(0),
        problem.output.stride(0),
        PAGE=cache.shape[2],
        SLOT=strides[2],
        WIDE=cache.shape[0] * strides[0] >= 1 << 32,
        SOFT_CAP=problem.soft_cap > 0,
        SPLIT=config.segments > 1,
        RAGGED=queries[1] == _NEVER,
        ASM=_ASSEMBLES,
        **constants,
        num_warps=config.warps,
        num_stages=config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    )
