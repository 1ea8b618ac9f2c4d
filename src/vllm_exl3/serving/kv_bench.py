"""Measuring attention over long contexts on this GPU: int4 with our kernels and vLLM's, fp8 on vLLM's backends.

A decoding time is one layer's whole attention (rotations and merging included) in a replayed CUDA graph that goes round
over more cache than the L2 holds, pages in random order; a prefill time is one chunk by events. Errors are relative
Frobenius errors against float64 over the same cache, of the first KV head.
"""

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_exl3.attention.dispatch import HostBatch, Int4Attention, Settings
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.layout import content_bytes
from vllm_exl3.attention.reference import attention_reference
from vllm_exl3.attention.shape import KernelShape
from vllm_exl3.cuda.timing import replayed
from vllm_exl3.serving.kv import flash_attention

__all__ = ["Caches", "Shape"]

_ROTATED_BYTES = 400e6
_FP8 = torch.float8_e4m3fn
_SEGMENTS = 16
"""Of vLLM's own split decoding."""


@dataclass(frozen=True)
class Shape:
    """One layer and batch.

    Attributes:
        context: tokens in the cache of each request, query tokens included.
        batch: requests.
        query: query tokens of each.
        heads: query heads.
        kv_heads: KV heads.
        head_size: D.
        page: tokens a page.
    """

    context: int
    batch: int = 1
    query: int = 1
    heads: int = 24
    kv_heads: int = 4
    head_size: int = 256
    page: int = 16

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return -(-self.context // self.page)

    def nbytes(self, slot: int) -> int:
        """Bytes of cache that are read, at ``slot`` bytes a token and KV head."""
        return self.batch * self.context * self.kv_heads * slot


class Caches:
    """Random int4 and fp8 caches for the largest of some shapes, and the kernels over them.

    Args:
        shapes: all of the same layer.
    """

    def __init__(self, shapes: list[Shape]) -> None:
        self.layer = shapes[0]
        self.pages = max(shape.batch * shape.pages for shape in shapes)
        layer, size = self.layer, self.layer.head_size
        self.int4 = _random_int4(self.pages, layer)
        fp8 = torch.empty(self.pages, layer.page, layer.kv_heads, 2 * size, dtype=_FP8, device="cuda")
        for part in fp8.split(4096):
            part.copy_(torch.randn(part.shape, device="cuda"))
        self.fp8 = fp8.split(size, -1)

    def _batches(self, shape: Shape, slot: int) -> list[Problem]:
        copies = 1 if shape.query > 8 else max(2, min(12, math.ceil(_ROTATED_BYTES / shape.nbytes(slot))))
        query = 0.3 * torch.randn(shape.batch * shape.query, shape.heads, shape.head_size, device="cuda")
        starts = torch.arange(0, shape.batch * shape.query + 1, shape.query, device="cuda", dtype=torch.int32)
        lengths = torch.full((shape.batch,), shape.context, device="cuda", dtype=torch.int32)
        return [
            Problem(
                query.bfloat16(),
                self.int4,
                torch.randperm(self.pages, device="cuda")[: shape.batch * shape.pages].int().view(shape.batch, -1),
                lengths,
                starts,
                torch.full_like(query, torch.nan, dtype=torch.bfloat16),
                shape.head_size**-0.5,
            )
            for _ in range(copies)
        ]

    def ours(self, shape: Shape, decode: KernelShape | None = None, flash: bool = True) -> tuple[float, float]:
        """Microseconds and error of this package's attention.

        Args:
            shape: what to attend.
            decode: how decoding is cut; None takes what dispatch does.
            flash: whether FlashAttention may prefill.
        """
        settings = Settings(decode, None, flash, False)
        layer = Int4Attention(shape.heads, shape.kv_heads, shape.head_size, shape.head_size**-0.5, 0, 0.0, settings)
        long = [(row, row * shape.query, (row + 1) * shape.query, shape.context) for row in range(shape.batch)]
        batch = HostBatch(0, [], long, False) if shape.query > 8 else None

        def run(problem: Problem) -> None:
            layer(
                problem.query, self.int4, problem.table, problem.lengths, problem.starts, problem.output, None,
                shape.query, batch, flash_attention(),
            )  # fmt: skip

        return self._measured(shape, content_bytes(shape.head_size), run, self._slots)

    def stock(self, shape: Shape) -> tuple[float, float]:
        """The same of vLLM's own int4 attention."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        half = self.int4.shape[-1] // 2
        by_slot = self.int4.transpose(1, 2)
        key, value = by_slot.split(half, -1)
        scales = [by_slot[..., end - 4 : end].view(torch.float32)[..., 0] for end in (half, 2 * half)]
        run = functools.partial(
            self._unified, shape, key, value,
            kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD, k_scale_cache=scales[0], v_scale_cache=scales[1],
        )  # fmt: skip
        return self._measured(shape, content_bytes(shape.head_size), run, self._slots)

    def fp8_triton(self, shape: Shape) -> tuple[float, float]:
        """The same of vLLM's Triton attention over an fp8 cache."""
        one = torch.ones(1, device="cuda").expand(shape.batch, shape.kv_heads)
        run = functools.partial(self._unified, shape, *self.fp8, k_descale=one, v_descale=one)
        return self._measured(shape, 2 * shape.head_size, run, self._fp8_values)

    def fp8_flash(self, shape: Shape) -> tuple[float, float]:
        """The same of vLLM's FlashAttention 3 over an fp8 cache, with queries in fp8 as vLLM gives them."""
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
        except ImportError as error:
            raise RuntimeError(f"vLLM's FlashAttention does not load here: {error}") from error

        one = torch.ones(1, device="cuda").expand(shape.batch, shape.kv_heads)
        lengths = torch.full((shape.batch,), shape.context, device="cuda", dtype=torch.int32)
        starts = torch.arange(0, shape.batch * shape.query + 1, shape.query, device="cuda", dtype=torch.int32)
        schedule = get_scheduler_metadata(
            shape.batch, shape.query, shape.context, shape.heads, shape.kv_heads, shape.head_size, lengths,
            qkv_dtype=_FP8, cu_seqlens_q=starts, page_size=shape.page, causal=True,
        )  # fmt: skip
        queries: dict[int, torch.Tensor] = {}

        def run(problem: Problem) -> None:
            query = queries.setdefault(problem.query.data_ptr(), problem.query.to(_FP8))
            flash_attn_varlen_func(
                query, *self.fp8, shape.query, problem.starts, shape.context, seqused_k=problem.lengths,
                softmax_scale=problem.scale, causal=True, block_table=problem.table, out=problem.output,
                scheduler_metadata=schedule, q_descale=one, k_descale=one, v_descale=one, fa_version=3,
            )  # fmt: skip

        return self._measured(shape, 2 * shape.head_size, run, self._fp8_values)

    def _unified(
        self, shape: Shape, key: torch.Tensor, value: torch.Tensor, problem: Problem, **options: object
    ) -> None:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        requests = max(shape.batch, 128 // shape.kv_heads)
        sums = _vllm_scratch(requests, shape.heads, shape.head_size)
        unified_attention(
            q=problem.query, k=key, v=value, out=problem.output, cu_seqlens_q=problem.starts,
            max_seqlen_q=shape.query, seqused_k=problem.lengths, max_seqlen_k=shape.context,
            softmax_scale=problem.scale, causal=True, window_size=(-1, -1), block_table=problem.table, softcap=0,
            q_descale=None, seq_threshold_3D=128 // shape.kv_heads, num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=sums[0], softmax_segm_max=sums[1], softmax_segm_expsum=sums[2],
            **{"k_descale": None, "v_descale": None, **options},
        )  # fmt: skip

    def _measured(
        self,
        shape: Shape,
        slot: int,
        run: Callable[[Problem], None],
        values: Callable[[Problem, int], tuple[torch.Tensor, torch.Tensor] | None],
    ) -> tuple[float, float]:
        problems = self._batches(shape, slot)
        run(problems[0])
        error = _error(problems[0], shape, values(problems[0], shape.context))
        if shape.query <= 8:
            return replayed(lambda index: run(problems[index]), len(problems), 3), error
        times = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(problems[0])
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times), error

    def _slots(self, problem: Problem, length: int) -> None:
        return None

    def _fp8_values(self, problem: Problem, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = problem.table[0].long()
        key, value = (part[pages, :, :1].flatten(0, 1)[:length, 0].double() for part in self.fp8)
        return key, value


def _error(problem: Problem, shape: Shape, values: tuple[torch.Tensor, torch.Tensor] | None) -> float:
    """Of the first KV head of the first request; of at most 64 query tokens, the last ones."""
    group = problem.group
    count = min(shape.query, 64)
    last = slice(shape.query - count, shape.query)
    query, actual = problem.query[last, :group], problem.output[last, :group].double()
    if values is None:
        expected = attention_reference(
            query, problem.cache[:, :1], problem.table[:1], [shape.context], [0, count], problem.scale
        )
    else:
        key, value = values
        scores = torch.einsum("qgd,kd->qgk", query.double(), key) * problem.scale
        position = torch.arange(shape.context - count, shape.context, device="cuda")[:, None, None]
        scores.masked_fill_(torch.arange(shape.context, device="cuda") > position, -torch.inf)
        expected = scores.softmax(-1) @ value
    return float((actual - expected).norm() / expected.norm())


def _random_int4(pages: int, layer: Shape) -> torch.Tensor:
    """Random nibbles, scales within a factor of two, zero-points near the middle."""
    size = layer.head_size
    shape = (pages, layer.kv_heads, layer.page, content_bytes(size))
    cache = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    for at in (size // 2, size + 4):
        scale = torch.rand(shape[:3], device="cuda") * 0.1 + 0.1
        word = (scale.view(torch.int32) & -16) | torch.randint(6, 10, scale.shape, device="cuda", dtype=torch.int32)
        cache[..., at : at + 4] = word.unsqueeze(-1).view(torch.uint8)
    return cache


@functools.lru_cache(maxsize=1)
def _vllm_scratch(requests: int, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = torch.empty(2, requests, heads, _SEGMENTS, device="cuda")
    return torch.empty(requests, heads, _SEGMENTS, size, device="cuda"), stats[0], stats[1]
