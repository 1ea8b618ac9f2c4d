"""The int4 attention on a GPU over long contexts, in graphs and in mixed batches; tests/attention runs there too."""

import dataclasses
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.attention.cases import Case, build, error
from vllm_exl3.attention.dispatch import HostBatch, Int4Attention, Settings, sort_requests
from vllm_exl3.attention.launch import Problem
from vllm_exl3.attention.layout import content_bytes, encode_rows, rotate
from vllm_exl3.attention.reference import attention_reference
from vllm_exl3.attention.write import write_tokens

HEADS, KV_HEADS, SIZE, PAGE = 24, 4, 256, 16
SETTINGS = Settings(None, None, True, False)
LAYER = Int4Attention(HEADS, KV_HEADS, SIZE, SIZE**-0.5, 0, 0.0, SETTINGS)


def flash_attention() -> Any:
    """vLLM's, if it is installed."""
    return pytest.importorskip("vllm_exl3.serving.kv").flash_attention()


def cache_of(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of one request of normal keys and values, and its row of the page table in random order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-length // PAGE)
    order = torch.randperm(pages, generator=generator, device="cuda")
    cache = torch.empty(pages, KV_HEADS, PAGE, content_bytes(SIZE), dtype=torch.uint8, device="cuda")
    slots = (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:length]
    for first in range(0, length, 16384):
        part = slots[first : first + 16384]
        rows = torch.randn(2, part.numel(), KV_HEADS, SIZE, generator=generator, device="cuda", dtype=torch.bfloat16)
        write_tokens(rows[0], rows[1], cache, part)
    return cache, order.int()[None]


def attend(
    layer: Int4Attention, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int, **options: Any
) -> torch.Tensor:
    """One request through the dispatch."""
    output = torch.full_like(query, torch.nan)
    count = query.shape[0]
    lengths, starts = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([length], [0, count]))
    batch = sort_requests([0, count], [length]) if count > 8 else None
    layer(query, cache, table, lengths, starts, output, None, count, options.get("batch", batch), options.get("flash"))
    return output


def expected(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int, head: int) -> torch.Tensor:
    """float64 of one KV head's query heads."""
    group = HEADS // KV_HEADS
    part = query[:, head * group : (head + 1) * group]
    return attention_reference(part, cache[:, head : head + 1], table, [length], [0, query.shape[0]], SIZE**-0.5)


@pytest.mark.parametrize("length", [8192 + 1, 32768, 262144])
def test_diffuse_attention(length: int) -> None:
    cache, table = cache_of(length, length)
    for count in (1, 2, 8):
        query = 0.05 * torch.randn(count, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
        output = attend(LAYER, query, cache, table, length)
        for head in (0, 3):
            reference = expected(query, cache, table, length, head).cpu()
            assert error(output[:, head * 6 : head * 6 + 6], reference) <= 3e-3


@pytest.mark.parametrize("length", [40000, 131072 + 7])
@pytest.mark.parametrize("count", [9, 64, 300])
def test_long_prefill(length: int, count: int) -> None:
    cache, table = cache_of(length, length)
    query = 0.05 * torch.randn(count, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    reference = expected(query, cache, table, length, 2).cpu()
    for flash in (None, flash_attention()):
        output = attend(LAYER, query, cache, table, length, flash=flash)
        assert error(output[:, 12:18], reference) <= 4e-3
    output = attend(LAYER, query, cache, table, length, batch=None)  # as in a graph
    assert error(output[:, 12:18], reference) <= 4e-3


@pytest.mark.parametrize("length", [8192, 262144])
def test_needles_are_found(length: int) -> None:
    cache, table = cache_of(length, 1)
    generator = torch.Generator().manual_seed(2)
    for position in (0, 5, length // 3, length - 3):
        key, value = torch.randn(2, 1, KV_HEADS, SIZE, generator=generator).cuda()
        slot = table[0, position // PAGE].long() * PAGE + position % PAGE
        write_tokens(2 * key, 3 * value, cache, slot[None])
        query = (2 * key).repeat_interleave(HEADS // KV_HEADS, 1).bfloat16()
        for rows in (1, 2, 100):
            output = attend(
                LAYER, query.expand(rows, -1, -1).contiguous(), cache, table, length, flash=flash_attention()
            )
            found = output[-1].float()
            wanted = (3 * value)[0].repeat_interleave(HEADS // KV_HEADS, 0)
            similarity = torch.nn.functional.cosine_similarity(found, wanted, dim=-1)
            assert similarity.min() > 0.98, (position, rows, similarity.min())


def test_graphs_replay_other_lengths() -> None:
    case = Case((900, 3000, 0, 40), (2, 1, 0, 2), 12, 2, 128, 16, seed=1)
    problem, _ = build(case, "cuda", torch.bfloat16)
    layer = Int4Attention(12, 2, 128, 128**-0.5, 0, 0.0, SETTINGS)

    def run() -> None:
        layer(
            problem.query, problem.cache, problem.table, problem.lengths, problem.starts, problem.output, None, 2,
            None, None,
        )  # fmt: skip

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other, reference = build(
        dataclasses.replace(case, lengths=(17, 2999, 8, 0), counts=(1, 2, 2, 0)), "cuda", torch.bfloat16
    )
    for name in ("query", "cache", "table", "lengths", "starts"):
        target = getattr(problem, name)
        target[: getattr(other, name).shape[0]].copy_(getattr(other, name)[: target.shape[0]])
    problem.output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert error(problem.output[: reference.shape[0]], reference) <= 3e-3


@pytest.mark.parametrize("native", [True, False])
def test_batch_invariance(native: bool) -> None:
    """A request's bits, alone and in batches, with drafts and without."""
    cache, table = cache_of(30000, 4)
    settings = dataclasses.replace(SETTINGS, batch_invariant=True, native=native)
    layer = dataclasses.replace(LAYER, settings=settings)
    query = torch.randn(40, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    query[1::2] *= 1e-3
    alone = attend(layer, query[:4], cache, table, 30000)
    for token in range(4):
        single = attend(layer, query[token : token + 1], cache, table, 29997 + token)
        assert torch.equal(single[0], alone[token]), token
    for counts in ((4, 1, 1, 1, 1, 1, 1), (4, 8, 5, 2, 7, 1, 6), (4, 20, 1, 8, 1, 1, 3)):
        lengths = [30000, 100, 2000, 9, 7777, 1, 25000]
        lengths = [max(pair) for pair in zip(lengths, counts, strict=True)]
        starts = [sum(counts[:index]) for index in range(8)]
        there = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in (lengths, starts)]
        output = torch.full_like(query, torch.nan)
        batch = sort_requests(starts, lengths) if max(counts) > 8 else None
        rows = table.expand(7, -1).contiguous()
        layer(query[: starts[-1]], cache, rows, *there, output, None, max(counts), batch, flash_attention())
        assert torch.equal(output[:4], alone), counts


def test_vllms_writer_and_ours_agree() -> None:
    module = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head")
    key, value = torch.randn(2, 64, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(8 * PAGE, device="cuda")[:64]
    ours, theirs = torch.zeros(2, 8, KV_HEADS, PAGE, content_bytes(SIZE), dtype=torch.uint8, device="cuda")
    write_tokens(key, value, ours, slots)
    by_slot = theirs.transpose(1, 2)
    half = theirs.shape[-1] // 2
    scales = [by_slot[..., end - 4 : end].view(torch.float32)[..., 0] for end in (half, 2 * half)]
    module.reshape_and_cache_int4(
        key, value, *by_slot.split(half, -1), slots, k_scale_cache=scales[0], v_scale_cache=scales[1]
    )
    exact = torch.cat([encode_rows(rotate(x.float())) for x in (key, value)], -1)
    # vLLM rounds rotated values to bfloat16 before it quantizes: a nibble in some dozens falls to its neighbour.
    for written, most in ((ours, 2e-3), (theirs, 0.1)):
        rows = written.transpose(1, 2).flatten(0, 1)[slots]
        assert (rows != exact).float().mean() <= most


def test_a_batch_of_everything() -> None:
    case = Case(
        (9000, 20, 12000, 1, 9100, 500), (1, 12, 20, 1, 70, 3), 12, 2, 128, 48, soft_cap=20.0, sinks=True, seed=3
    )
    problem, reference = build(case, "cuda", torch.bfloat16)
    starts = problem.starts.tolist()
    batch = sort_requests(starts, case.lengths)
    assert isinstance(batch, HostBatch) and batch.middle and batch.long and batch.others and batch.decode_query == 3
    layer = Int4Attention(12, 2, 128, 128**-0.5, 0, 20.0, SETTINGS)
    for known, flash in ((batch, None), (batch, flash_attention()), (None, None)):
        problem.output.fill_(torch.nan)
        layer(
            problem.query, problem.cache, problem.table, problem.lengths, problem.starts, problem.output,
            problem.sinks, 70, known, flash,
        )  # fmt: skip
        assert error(problem.output, reference) <= 4e-3


def test_problem_of_a_request_shares_memory() -> None:
    problem, _ = build(Case((40, 30), (1, 1), 6, 1, 64, 16), "cuda", torch.bfloat16)
    part: Problem = problem.of_request(1)
    assert part.output.data_ptr() == problem.output.data_ptr() and part.starts.tolist() == [1, 2]
