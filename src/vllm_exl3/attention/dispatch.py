"""Which kernel attends which request of a batch, and with how much scratch.

| query tokens of a request | served by |
|---|---|
| 1 to 8 (decoding, verification of drafts) | the decoding kernels on segments of the context |
| 9 to 63 over 8192 and more earlier tokens | the same, a request at a time |
| 64 and more; times the tokens in the cache 2¹⁹ and more | FlashAttention on unpacked stretches |
| others | the Triton kernel on the whole context |

The decoding kernels are CUDA's (`native`) for the shapes they serve, unless the user cut them, and Triton's elsewhere.

The second and third need to know lengths on the host. While a CUDA graph is captured nothing is known there but the
batch's longest query, so there the first and the last serve all, and a graph's kernels are the same in every replay.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_exl3.attention.attend import LONG_QUERY
from vllm_exl3.attention.decode import DECODE_QUERY, Decoder, multiprocessors
from vllm_exl3.attention.launch import Config, Problem, attend_whole
from vllm_exl3.attention.prefill import FlashAttention, PrefillPlan, attend_long, plan_prefill
from vllm_exl3.attention.settings import Settings
from vllm_exl3.attention.shape import measured_prefill_shape

__all__ = ["DECODE_QUERY", "HostBatch", "Int4Attention", "Settings", "sort_requests"]

_MIDDLE_CONTEXT = 8192
_LONG_WORK = float(1 << 19)
"""64 query tokens over 8192: from there on FlashAttention repays unpacking."""
_FLASH_HEAD_SIZE = 256
_LONG_QUERY = LONG_QUERY.value


@dataclass(frozen=True)
class HostBatch:
    """What is known of a batch's requests on the host.

    Attributes:
        decode_query: most query tokens of a request that decodes, 0 if none does.
        middle: (row, first query token, last + 1, tokens in the cache) of requests of 9 to 63 over a long context.
        long: the same of requests of 64 and more with much work.
        others: whether there are more.
    """

    decode_query: int
    middle: list[tuple[int, int, int, int]]
    long: list[tuple[int, int, int, int]]
    others: bool


def sort_requests(starts: Sequence[int], lengths: Sequence[int]) -> HostBatch:
    """Sort a batch's requests.

    Args:
        starts: offsets into the query tokens, one more than requests.
        lengths: tokens in the cache; exact for requests of more than `DECODE_QUERY` query tokens.
    """
    decode, others = 0, False
    middle: list[tuple[int, int, int, int]] = []
    long: list[tuple[int, int, int, int]] = []
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        count = last - first
        if count <= DECODE_QUERY:
            decode = max(decode, count)
        elif count < _LONG_QUERY and length - count >= _MIDDLE_CONTEXT:
            middle.append((row, first, last, length))
        elif count >= _LONG_QUERY and float(count) * length >= _LONG_WORK:
            long.append((row, first, last, length))
        else:
            others = True
    return HostBatch(decode, middle, long, others)


@dataclass(frozen=True)
class Int4Attention:
    """One layer's attention over the int4 cache.

    Attributes:
        heads: query heads of this rank.
        kv_heads: KV heads of this rank.
        head_size: D, a multiple of 8.
        scale: of the scores.
        window: a token sees itself and the ``window - 1`` tokens before; 0 sees all.
        soft_cap: scores become cap·tanh(score/cap) when positive.
        settings: what the user set.
    """

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int
    soft_cap: float
    settings: Settings

    @functools.cached_property
    def decoder(self) -> Decoder:
        """What serves requests of few query tokens."""
        return Decoder(self.heads // self.kv_heads, self.kv_heads, self.head_size, self.settings)

    def prefill_config(self) -> tuple[Config, int]:
        """How Triton prefill is cut, and its rows."""
        shape = self.settings.prefill or measured_prefill_shape(self.head_size)
        assert shape.rows is not None
        return Config(shape.tile, shape.warps, 1, shape.stages), shape.rows

    def flash_plan(self, output: torch.Tensor) -> PrefillPlan | None:
        """Sizes of FlashAttention's scratch; None where it does not prefill this layer."""
        if not self.settings.flash_prefill or self.settings.batch_invariant or self.window:
            return None
        if self.head_size > _FLASH_HEAD_SIZE:
            return None
        apart = output.dtype != torch.bfloat16
        return plan_prefill(self.heads, self.kv_heads, self.head_size, multiprocessors(output.device), apart)

    def reserve(self, max_requests: int, output: torch.Tensor) -> None:
        """Allocate as much as any batch may need, and free it: a memory profile then counts it."""
        sizes = [4 * self.decoder.scratch_elements(max_requests, output.device)]
        if (plan := self.flash_plan(output)) is not None:
            sizes.append(plan.nbytes)
        torch.empty(max(sizes), dtype=torch.uint8, device=output.device)

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        output: torch.Tensor,
        sinks: torch.Tensor | None,
        max_query: int,
        batch: HostBatch | None,
        flash_attention: FlashAttention | None,
    ) -> None:
        """Attend a batch.

        Args:
            query: ``[tokens, heads, D]``.
            cache: uint8 ``[pages, kv_heads, page, D + 8]``.
            table: int32 ``[requests, pages a request]``.
            lengths: int32 ``[requests]``.
            starts: int32 ``[requests + 1]``.
            output: ``[tokens, heads, D]``.
            sinks: ``[heads]`` or None.
            max_query: most query tokens of a request.
            batch: the batch as the host knows it; None while a graph is captured, or where it is not known.
            flash_attention: FlashAttention, where it runs.
        """
        problem = Problem(query, cache, table, lengths, starts, output, self.scale, self.window, self.soft_cap, sinks)
        if max_query <= DECODE_QUERY:
            self.decoder.attend(problem, max_query)
            return
        plan = self.flash_plan(output) if flash_attention is not None else None
        if batch is None or self.window or self.settings.batch_invariant:
            self.decoder.attend(problem, DECODE_QUERY)
            config, rows = self.prefill_config()
            attend_whole(problem, config, rows, DECODE_QUERY + 1)
            return
        if batch.decode_query:
            self.decoder.attend(problem, _next_power_of_two(batch.decode_query))
        for row, first, last, _ in batch.middle:
            self.decoder.attend(problem.of_request(row), _next_power_of_two(last - first))
        if batch.others or (batch.long and plan is None):
            config, rows = self.prefill_config()
            skip = (_MIDDLE_CONTEXT, _LONG_WORK if plan is not None else math.inf)
            attend_whole(problem, config, rows, DECODE_QUERY + 1, skip)
        if batch.long and plan is not None:
            assert flash_attention is not None
            scratch = [torch.empty(shape, dtype=dtype, device=query.device) for shape, dtype in plan.shapes]
            attend_long(problem, batch.long, plan, scratch, flash_attention)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
