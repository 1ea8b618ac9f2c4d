"""Random batches over random int4 caches, on any device."""

import random
from dataclasses import dataclass

import torch

from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.layout import content_bytes, encode_rows, rotate
from vllm_exl3.attention.reference import attention_reference


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        lengths: tokens in the cache of each request.
        counts: query tokens of each.
        heads: query heads.
        kv_heads: KV heads.
        head_size: D.
        page: tokens a page.
        window: 0 for none.
        soft_cap: 0 for none.
        sinks: whether heads have one.
        heads_inside: page layout NHD rather than HND.
        padding: bytes between pages, as hybrid models have.
        seed: of the values.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int
    kv_heads: int
    head_size: int
    page: int
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    heads_inside: bool = False
    padding: int = 0
    seed: int = 0


def random_case(seed: int, longest: int, most_query: int = 8, wide: bool = True) -> Case:
    """A case of up to ``longest`` cached tokens a request."""
    rng = random.Random(seed)
    requests = rng.randint(1, 4)
    counts = [rng.randint(1, most_query) for _ in range(requests)]
    lengths = [rng.randint(count, max(count, int(longest * rng.random() ** 2))) for count in counts]
    if requests > 1 and rng.random() < 0.3:
        counts[-1] = lengths[-1] = 0  # padding of a graph
    kv_heads = rng.choice((1, 2, 3))
    group = rng.choice((1, 2, 4, 5, 6, 8, 12, 71) if wide else (1, 3, 6))
    return Case(
        tuple(lengths),
        tuple(counts),
        kv_heads * group,
        kv_heads,
        rng.choice((64, 80, 96, 128, 256, 512) if wide else (64, 96)),
        rng.choice((16, 32, 48, 64, 528)),
        rng.choice((0, 0, 1, 17, 100, longest)),
        rng.choice((0.0, 0.0, 2.0, 30.0)),
        rng.random() < 0.3,
        rng.random() < 0.5,
        rng.choice((0, 0, 64, 4096)),
        seed,
    )


def build(case: Case, device: torch.device | str, dtype: torch.dtype) -> tuple[Problem, torch.Tensor]:
    """The problem, its output full of NaN, and the float64 result.

    Slots that no request uses hold random bits, as reused pages do: NaN and infinite scales among them. Pages that lie
    before every query token's window are one page of zeros, as vLLM has it.
    """
    generator = torch.Generator().manual_seed(case.seed)
    requests, size = len(case.lengths), case.head_size
    per_request = max(1, -(-max(case.lengths) // case.page)) + 1
    total = requests * per_request + 3
    cache = _empty_cache(case, total, generator)
    table = torch.randint(0, total, (requests, per_request), generator=generator, dtype=torch.int32)
    order = torch.randperm(total, generator=generator).tolist()
    for row, length in enumerate(case.lengths):
        pages = [order.pop() for _ in range(-(-length // case.page))]
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        keys = torch.randn(2, case.kv_heads, length, size, generator=generator) * 2 + 0.2
        slots = encode_rows(rotate(keys)).movedim(0, 2).flatten(2)
        for index, page in enumerate(pages):
            part = slots[:, index * case.page : (index + 1) * case.page]
            cache[page, :, : part.shape[1]] = part
    starts = [0]
    for count in case.counts:
        starts.append(starts[-1] + count)
    query = torch.randn(max(1, starts[-1]), case.heads, size, generator=generator).to(dtype)
    sinks = torch.randn(case.heads, generator=generator) * 3 if case.sinks else None
    scale = size**-0.5
    problem = Problem(
        query.to(device),
        _moved(cache, device),
        table.to(device),
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.full_like(query, torch.nan, device=device),
        scale,
        case.window,
        case.soft_cap,
        sinks.to(device) if sinks is not None else None,
    )
    expected = attention_reference(
        problem.query, problem.cache, problem.table, list(case.lengths), starts, scale, case.window or None,
        case.soft_cap, problem.sinks,
    )  # fmt: skip
    if case.window:
        _free_unseen_pages(case, problem, order.pop())
    return problem, expected[: starts[-1]].cpu()


def _free_unseen_pages(case: Case, problem: Problem, null_page: int) -> None:
    problem.cache[null_page] = 0
    for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
        problem.table[row, : max(0, length - count - case.window + 1) // case.page] = null_page


def _empty_cache(case: Case, pages: int, generator: torch.Generator) -> torch.Tensor:
    content = content_bytes(case.head_size)
    page_bytes = case.kv_heads * case.page * content + case.padding
    raw = torch.randint(0, 256, (pages, page_bytes), generator=generator, dtype=torch.uint8)
    raw = raw[:, : page_bytes - case.padding]
    if case.heads_inside:
        return raw.unflatten(1, (case.page, case.kv_heads, content)).transpose(1, 2)
    return raw.unflatten(1, (case.kv_heads, case.page, content))


def _moved(cache: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The same on a device, with the same strides and gaps."""
    moved = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    return moved.copy_(cache)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; NaN where a NaN is."""
    return float((actual.double().cpu() - expected).norm() / expected.norm())


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 3e-3 if DEVICE == "cuda" else 1e-3
"""Of the error: what a bfloat16 output costs on a GPU; the interpreter has no bfloat16 worth testing."""
UNPACKED_TOLERANCE = 5e-3 if DEVICE == "cuda" else 1.2e-2
"""The same where keys and values are unpacked to bfloat16, to which the interpreter truncates."""
